"""One inference process of the demo: a tensor-parallel rank that refits itself, and checks itself.

1. "refit" runs `Receiver.refit` to one version, reporting each stage as it begins.
2. "check" loads a saved checkpoint with the same loaders into a second model and compares every parameter bit for
   bit; then it writes the refitted parameters to a file, for the ranks to be put back together.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.planner.errors import require
from reshard.refit.demo import models
from reshard.refit.demo.channel import Channel, JsonValue, Message, serve_commands
from reshard.refit.demo.checks import compare_with_checkpoint
from reshard.refit.demo.engine import ReferenceModel, TensorParallel
from reshard.refit.demo.settings import DemoSettings
from reshard.refit.demo.trainer import MODEL_NAME

if TYPE_CHECKING:
    from reshard.refit.receiver import Receiver
    from reshard.refit.report import RefitReport

__all__ = ["run_inference", "run_judge"]


def run_inference(
    channel: Channel,
    *,
    rank: int,
    model: str,
    layers: int,
    tensor_parallel: int,
    transport: str,
    rendezvous: str,
    timeout_s: float,
) -> None:
    """Run one inference rank until its channel closes.

    Parameters
    ----------
    channel
        To the supervisor.
    rank
        This process's tensor-parallel rank.
    model, layers, tensor_parallel, transport, timeout_s
        As in `DemoSettings`.
    rendezvous
        Address of the rendezvous service.
    """
    require("torch", extra="torch")
    import torch

    from reshard.refit.engines.loader import LoaderEngine
    from reshard.refit.receiver import Receiver
    from reshard.rendezvous import Rendezvous
    from reshard.transports import open_transport

    torch.set_num_threads(1)
    settings = DemoSettings(
        model=model, layers=layers, tensor_parallel=tensor_parallel, transport=transport, timeout_s=timeout_s
    )
    config = models.build_config(settings)
    parallel = TensorParallel(rank, tensor_parallel)
    engine = ReferenceModel(models.model_shape(config), parallel, torch.bfloat16)
    service = Rendezvous.connect(rendezvous)
    wire = open_transport(transport)
    pause = _Pause(channel, timeout_s)
    receiver = Receiver(
        wire,
        service,
        LoaderEngine(engine.module, load_weights=engine.load_weights),
        model=MODEL_NAME,
        group="demo",
        members=settings.inference_names,
        member=settings.inference_names[rank],
        require_full_coverage=True,
        on_stage=pause,
    )
    try:
        inference = _Inference(engine, receiver, pause, timeout_s)
        channel.send({"answer": {"transport": wire.name}})
        serve_commands(channel, {"refit": inference.refit, "check": inference.check, "digest": inference.digest})
    finally:
        receiver.close()
        wire.close()
        service.close()


class _Pause:
    """Tells the supervisor of each stage as it begins, and waits there for its word at one stage, if asked to."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self.stage = ""
        self._channel = channel
        self._timeout_s = timeout_s

    def __call__(self, stage: str) -> None:
        self._channel.send({"stage": stage})
        if stage == self.stage:
            self.stage = ""
            self._channel.send({"paused": stage})
            self._channel.receive(timeout_s=self._timeout_s)


class _Inference:
    """One rank: the model that serves, and the receiver that refits it."""

    def __init__(self, model: ReferenceModel, receiver: Receiver, pause: _Pause, timeout_s: float) -> None:
        self.model = model
        self.receiver = receiver
        self.pause = pause
        self.timeout_s = timeout_s

    def refit(self, command: Message) -> Message:
        step = command["step"]
        if not isinstance(step, int):
            raise TypeError(f"step: got {step!r}, expected an integer")
        self.pause.stage = str(command.get("pause_at", ""))
        return _summary(self.receiver.refit(version=step, timeout_s=self.timeout_s))

    def digest(self, command: Message) -> Message:
        """Answer with a digest of all parameters, so that "the old weights still serve" can be seen."""
        require("torch", extra="torch")
        import torch

        state = hashlib.blake2b(digest_size=16)
        for name, parameter in self.model.named_parameters():
            state.update(name.encode())
            state.update(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"digest": state.hexdigest()}

    def check(self, command: Message) -> Message:
        require("safetensors", extra="demo")
        from safetensors.torch import save_file

        n_elems = compare_with_checkpoint(self.model, Path(str(command["folder"])))
        dump = Path(str(command["dump"]))
        save_file({name: parameter.detach().contiguous() for name, parameter in self.model.named_parameters()}, dump)
        return {"n_elems": n_elems}


def _summary(report: RefitReport) -> Message:
    certificate = report.certificate
    stages: dict[str, JsonValue] = {name: float(seconds) for name, seconds in report.stages.items()}
    return {
        "version": str(report.version),
        "cold": report.cold,
        "mode": report.mode,
        "useful_bytes": int(report.useful_bytes),
        "wire_bytes": int(report.wire_bytes),
        "verified_bytes": int(report.verified_bytes),
        "n_descriptors": int(report.n_descriptors),
        "gbps": float(report.gbps),
        "wire_s": float(report.wire_s),
        "total_s": float(report.total_s),
        "failovers": list(report.failovers),
        "stages": stages,
        "coverage_pct": float(report.coverage_pct),
        "certificate": {
            "requested_bytes": int(certificate.requested_bytes),
            "written_bytes": int(certificate.written_bytes),
            "filled_bytes": int(certificate.filled_bytes),
            "unwritten_bytes": int(certificate.unwritten_bytes),
        },
    }


def run_judge(channel: Channel, *, model: str, layers: int) -> None:
    """Run the process that puts the inference ranks' parameters back together and asks the model.

    Parameters
    ----------
    channel
        To the supervisor.
    model, layers
        As in `DemoSettings`.
    """
    require("torch", extra="torch")
    import torch

    torch.set_num_threads(1)
    config = models.build_config(DemoSettings(model=model, layers=layers))

    def tokens(command: Message) -> Message:
        from safetensors.torch import load_file

        from reshard.refit.demo.unshard import unshard

        dumps = command["dumps"]
        if not isinstance(dumps, list):
            raise TypeError(f"dumps: got {dumps!r}, expected a list of paths")
        full = unshard(models.model_shape(config), [load_file(str(dump)) for dump in dumps])
        return {"tokens": [list(answer) for answer in models.greedy_tokens(config, full)]}

    channel.send({"answer": {}})
    serve_commands(channel, {"tokens": tokens})
