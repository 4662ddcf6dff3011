"""The demo from start to end: what `reshard demo` does.

1. Start the nursery, the rendezvous service, the trainers, the inference ranks and the judge.
2. As often as asked for: publish, refit, save a checkpoint from gathered tensors, compare every inference parameter
   with what the same loader makes of that checkpoint, put the ranks back together and compare greedy tokens. In
   between, one optimizer step.
3. Return the report; anything that differs is a `DemoError` that says what.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from reshard.planner.errors import MissingDependencyError
from reshard.refit.demo.channel import JsonValue, Message
from reshard.refit.demo.settings import DemoError, DemoSettings
from reshard.refit.demo.supervisor import Child, ChildrenFailed, Supervisor
from reshard.transports.registry import probe

__all__ = ["DemoReport", "Progress", "RefitOfRanks", "run_demo"]

PACKAGES: Final = ("torch", "transformers", "safetensors", "grpc")
PRELOAD: Final = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "safetensors.torch",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
ENVIRONMENT: Final = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
Progress = Callable[[str, str, int, int], None]
"""Called with (what happens now, who does what of it or "", steps done, steps in all)."""


@dataclass(frozen=True, slots=True)
class RefitOfRanks:
    """One refit of the whole group.

    Parameters
    ----------
    step
        The training step refitted to.
    loss
        The trainers' mean loss in the optimizer step before it; None before the first.
    publish_s
        Seconds of the slowest publisher.
    refit_s
        Seconds from asking the ranks until all had installed.
    ranks
        Each rank's report, by name.
    n_elems_compared
        Elements compared bit for bit, over all ranks.
    tokens
        Greedy tokens of the refitted weights, one list a prompt (equal to the trainer's).
    """

    step: int
    loss: float | None
    publish_s: float
    refit_s: float
    ranks: dict[str, Message]
    n_elems_compared: int
    tokens: JsonValue


@dataclass(slots=True)
class DemoReport:
    """What a run of the demo found.

    Parameters
    ----------
    settings
        The options.
    transport
        Name of the transport that moved the bytes.
    trainers
        What each trainer published at first, by name: boxes, tensors of experts of layer 0.
    refits
        The refits, in order.
    seconds
        Seconds by phase of the run.
    """

    settings: DemoSettings
    transport: str = ""
    trainers: dict[str, Message] = field(default_factory=dict)
    refits: list[RefitOfRanks] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to a phase."""
        started = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


def run_demo(settings: DemoSettings, progress: Progress) -> DemoReport:
    """Run the demo.

    Parameters
    ----------
    settings
        The options.
    progress
        Told of each step as it begins.

    Raises
    ------
    DemoError
        If a process failed, or if any byte or token differs.
    MissingDependencyError
        If a package is not installed.
    """
    if sys.platform != "linux":
        raise DemoError(
            f"the demo runs on Linux: it forks, and ties its processes together as Linux does; this is {sys.platform}"
        )
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, "demo")
    if settings.transport != "auto" and (reason := probe(settings.transport)):
        raise DemoError(f"--transport {settings.transport}: {reason}")
    with settings.work_folder() as folder:
        return _Run(settings, folder, progress).run()


class _Run:
    """The processes of one run and the steps made with them."""

    def __init__(self, settings: DemoSettings, folder: Path, progress: Progress) -> None:
        self.settings = settings
        self.folder = folder
        self.progress = progress
        self.report = DemoReport(settings)
        self.deadline = time.monotonic() + settings.timeout_s
        self.n_steps = 3 + 6 * settings.refits - 1
        self.layout_epoch = 0
        self.n_done = 0

    def run(self) -> DemoReport:
        with contextlib.ExitStack() as stack:
            with self._step("import", "importing torch and transformers, once for all processes"):
                self.supervisor = stack.enter_context(
                    Supervisor(PRELOAD, self.folder, timeout_s=self._left_s(), environment=ENVIRONMENT)
                )
            with self._step("start", "starting the rendezvous service"):
                address = self._start_rendezvous()
            trainers = f"{self.settings.trainers} trainers ({self.settings.sharding})"
            with self._step("start", f"starting {trainers}, {self.settings.tensor_parallel} inference ranks"):
                self._start_ranks(address)
            for step in range(self.settings.refits):
                loss = self._train(step) if step else None
                self.report.refits.append(self._refit(step, loss))
        return self.report

    def _left_s(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DemoError(f"the demo did not end within {self.settings.timeout_s:g} s")
        return left

    @contextlib.contextmanager
    def _step(self, phase: str, what: str) -> Iterator[None]:
        self.what = what
        self.progress(what, "", self.n_done, self.n_steps)
        with self.report.timed(phase):
            yield
        self.n_done += 1
        self.progress(what, "", self.n_done, self.n_steps)

    def _on_event(self, name: str, message: Message) -> None:
        if "stage" in message:
            self.progress(self.what, f"{name} {message['stage']}", self.n_done, self.n_steps)

    def _start_rendezvous(self) -> str:
        service = self.supervisor.start("rendezvous", "reshard.refit.demo.coordinator:run_rendezvous", {})
        return str(self.supervisor.wait([service], timeout_s=self._left_s())["rendezvous"]["address"])

    def _start_ranks(self, address: str) -> None:
        settings = self.settings
        model: Message = {"model": settings.model, "layers": settings.layers}
        common: Message = {"transport": settings.transport, "rendezvous": address, "timeout_s": settings.timeout_s}
        store = str(self.folder / f"gloo-{time.time_ns()}")
        layout: Message = {"trainers": settings.trainers, "sharding": settings.sharding, "store": store}
        layout["cut_hints"] = settings.cut_hints
        self.trainers: list[Child] = [
            self.supervisor.start(
                name,
                "reshard.refit.demo.trainer:run_trainer",
                {**model, **common, "rank": rank, **layout},
            )
            for rank, name in enumerate(settings.trainer_names)
        ]
        self.inference: list[Child] = [
            self.supervisor.start(
                name,
                "reshard.refit.demo.inference:run_inference",
                {**model, **common, "rank": rank, "tensor_parallel": settings.tensor_parallel},
            )
            for rank, name in enumerate(settings.inference_names)
        ]
        self.judge = self.supervisor.start("judge", "reshard.refit.demo.inference:run_judge", model)
        ready = self.supervisor.wait([*self.trainers, *self.inference, self.judge], timeout_s=self._left_s())
        transports = {str(ready[child.name]["transport"]) for child in (*self.trainers, *self.inference)}
        if len(transports) != 1:
            raise DemoError(f"--transport {settings.transport}: the processes chose {', '.join(sorted(transports))}")
        self.report.transport = transports.pop()

    def _train(self, step: int) -> float:
        with self._step("train", "one AdamW step of the trainer"):
            answers = self._ask(self.trainers, {"do": "train", "step": step})
        losses = [answer["loss"] for answer in answers.values()]
        return sum(loss for loss in losses if isinstance(loss, float)) / len(losses)

    def _refit(self, step: int, loss: float | None) -> RefitOfRanks:
        replanned = self.settings.cut_hints and len(self.report.refits) == 1
        kind = "warm" if self.report.refits and not replanned else "cold"
        kill = bool(self.settings.kill) and len(self.report.refits) == 1
        started = time.perf_counter()
        with self._step("publish", f"step {step}: publishing"):
            published = self._publish(step)
        publish_s = time.perf_counter() - started
        self.report.trainers = self.report.trainers or published
        expected = self._save(step) if kill else None  # while there is somebody to gather from
        started = time.perf_counter()
        with self._step(f"refit {kind}", f"step {step}: {kind} refit"):
            ranks = self._refit_and_kill(step) if kill else self._ask(self.inference, {"do": "refit", "step": step})
        refit_s = time.perf_counter() - started
        n_elems, tokens = self._check(step, expected if expected is not None else self._save(step))
        return RefitOfRanks(step, loss, publish_s, refit_s, ranks, n_elems, tokens)

    def _publish(self, step: int) -> dict[str, Message]:
        if step and self.settings.cut_hints and not self.layout_epoch:
            answer = self._ask(self.trainers[:1], {"do": "layout epoch"})[self.trainers[0].name]
            self.layout_epoch = int(str(answer["layout_epoch"]))
        return self._ask(self.trainers, {"do": "publish", "step": step, "layout_epoch": self.layout_epoch})

    def _save(self, step: int) -> JsonValue:
        """Save a checkpoint of the trainers' gathered tensors; return the greedy tokens of these."""
        with self._step("check", f"step {step}: saving a checkpoint of the gathered tensors"):
            saved = self._ask(self.trainers, {"do": "save", "folder": str(self._checkpoint(step))})
        return saved[self.trainers[0].name]["tokens"]

    def _checkpoint(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def _check(self, step: int, expected: JsonValue) -> tuple[int, JsonValue]:
        """Compare the ranks with the checkpoint and with its tokens; return how many elements, and the tokens."""
        dumps = {child.name: self.folder / f"{child.name}-step-{step}.safetensors" for child in self.inference}
        with self._step("check", f"step {step}: comparing every parameter with what the loader makes of it"):
            folder = str(self._checkpoint(step))
            commands: dict[str, JsonValue] = {
                name: {"do": "check", "folder": folder, "dump": str(dump)} for name, dump in dumps.items()
            }
            checked = self._ask(self.inference, commands)
        with self._step("check", f"step {step}: putting the ranks together and comparing greedy tokens"):
            paths: list[JsonValue] = [str(dump) for dump in dumps.values()]
            tokens = self._ask([self.judge], {"do": "tokens", "dumps": paths})["judge"]["tokens"]
        if tokens != expected:
            raise DemoError(f"step {step}: greedy tokens: got {tokens} of the refitted weights, expected {expected}")
        return sum(int(str(answer["n_elems"])) for answer in checked.values()), tokens

    def _refit_and_kill(self, step: int) -> dict[str, Message]:
        """Kill a trainer when all ranks are about to read; return their reports if a replica took its place.

        Raises
        ------
        DemoError
            If they could not go on: with what each of them says, and whether the old weights still serve.
        """
        victim = self.supervisor.children[self.settings.kill]
        paused: set[str] = set()

        def on_event(name: str, message: Message) -> None:
            self._on_event(name, message)
            if "paused" in message:
                paused.add(name)
                if len(paused) == len(self.inference):
                    victim.kill()
                    for child in self.inference:
                        child.channel.send({"do": "go on"})

        before = self._digests()
        command: Message = {"do": "refit", "step": step, "pause_at": "read"}
        try:
            ranks = self.supervisor.ask(self.inference, command, timeout_s=self._left_s(), on_event=on_event)
            failures: dict[str, str] = {}
        except ChildrenFailed as error:
            ranks, failures = error.answers, error.failures
        self.supervisor.forget(victim)
        self.trainers.remove(victim)
        if len(ranks) == len(self.inference):
            return ranks
        lines = [f"{victim.name} was killed in the middle of the refit to step {step}"]
        lines += [f"{child.name}: {failures.get(child.name, 'went on')}" for child in self.inference]
        changed = [name for name, digest in self._digests().items() if digest != before[name]]
        last = (
            f"{', '.join(changed)}: the weights have changed"
            if changed
            else f"{', '.join(before)}: the weights of step {step - 1} still serve, bit for bit"
        )
        raise DemoError("\n".join([*lines, last]))

    def _digests(self) -> dict[str, str]:
        """Return a digest of each inference rank's parameters."""
        answers = self._ask(self.inference, {"do": "digest"})
        return {name: str(answer["digest"]) for name, answer in answers.items()}

    def _ask(self, children: list[Child], command: Mapping[str, JsonValue]) -> dict[str, Message]:
        return self.supervisor.ask(children, command, timeout_s=self._left_s(), on_event=self._on_event)
