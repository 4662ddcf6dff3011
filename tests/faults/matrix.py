"""Every step of a refit x everything that can go wrong in it, over real processes (``make faults``).

After each combination: every survivor serves entirely the old or entirely the new version, or says that it serves
nothing; no two ranks of the group serve different versions; no lease, and no peer that died, is left; and the next
refit succeeds.

A *network stall* holds back all traffic with the service (a proxy between it and everybody else) and stops one
trainer's process, so that neither questions nor, over nixl and TCP, reads are answered; *server silent* holds it back
for longer than the refit has.

    python -m tests.faults.matrix [--install shadow|stream] [--transport memory|nixl] [--steps STEP ...]
                                  [--only STEP:FAULT ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.proxy import Proxy
from tests.faults.ranks import GROUP, LEASE_TTL_S, MODEL, WORKER_TTL_S

from reshard.refit.demo.channel import ChannelClosed, Message
from reshard.refit.demo.supervisor import Child, Supervisor
from reshard.rendezvous import Rendezvous

ROOT = Path(__file__).resolve().parents[2]
STEPS = (
    "discover",
    "capture",
    "plan",
    "certify",
    "connect",
    "allocate",
    "read",
    "verify",
    "release",
    "vote",
    "install",
    "check",
    "serve",
)
FAULTS = (
    "trainer killed",
    "receiver killed",
    "server killed",
    "network stall",
    "server silent",
    "wrong bytes",
    "late digest",
    "slow rank",
    "out of staging memory",
    "SIGTERM",
)
SLOTS = ["trainer-0", "trainer-1"]
MEMBERS = ["tp0", "tp1"]
VICTIM = "tp1"
REFIT_S = 7.0
STALL_S = 1.0
SILENT_REFIT_S = 3.0
GOODBYE_S = 12.0
"""What a refit may take beyond its time to say goodbye: to peers, to the service, for memory in doubt."""
ASKS = ("discover", "read", "vote", "install", "serve")
"""Steps in, or right before, which the service is asked."""
SERVES_NOTHING = {"empty", "quarantined", "in_doubt", "changing"}


@dataclass(frozen=True, slots=True)
class Combination:
    """One cell of the matrix."""

    step: str
    fault: str
    install: str = "shadow"
    transport: str = "memory"

    def __str__(self) -> str:
        how = [part for part, usual in ((self.install, "shadow"), (self.transport, "memory")) if part != usual]
        return f"{self.step}:{self.fault}" + (f" ({', '.join(how)})" if how else "")

    @property
    def refit_s(self) -> float:
        """How long the refit with the fault has."""
        return SILENT_REFIT_S if self.fault == "server silent" else REFIT_S

    @property
    def skipped(self) -> str:
        """Why it cannot be tried; empty if it can."""
        if self.fault == "out of staging memory" and STEPS.index(self.step) > STEPS.index("allocate"):
            return "nothing is allocated after the stage 'allocate'"
        if self.fault == "server silent" and self.step not in ASKS:
            return f"the service is asked nothing between the steps {', '.join(ASKS)}"
        if self.install == "stream" and self.step == "release":
            return "in stream mode the lease is released inside the install"
        return ""


@dataclass(slots=True)
class Outcome:
    """What became of a combination."""

    combination: Combination
    problems: list[str] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    skipped: str = ""


def combinations(install: str = "shadow", transport: str = "memory") -> Iterator[Combination]:
    """The whole matrix."""
    for step in STEPS:
        for fault in FAULTS:
            yield Combination(step, fault, install, transport)


class Trial:
    """One combination, on processes of its own."""

    def __init__(self, supervisor: Supervisor, number: int, combination: Combination) -> None:
        self.supervisor = supervisor
        self.number = number
        self.combination = combination
        self.port = _free_port()
        self.network = Proxy(self.port)
        # The service itself, for who looks at it; the processes of the trial go through the proxy.
        self.address = f"127.0.0.1:{self.port}"
        self.lives = 0
        self.children: dict[str, Child] = {}
        self.epoch = 0

    # -- processes

    def start(self, name: str) -> Child:
        """Start (again) the process called ``name``."""
        self.lives += 1
        through = f"127.0.0.1:{self.network.port}"
        if name == "server":
            target, arguments = "run_server", {"port": self.port}
        elif name in SLOTS:
            target = "run_trainer"
            arguments = {"slot": name, "slots": SLOTS, "address": through, "transport": self.combination.transport}
        else:
            target = "run_receiver"
            arguments = {
                "member": name,
                "members": MEMBERS,
                "address": through,
                "transport": self.combination.transport,
                "install": self.combination.install,
            }
        child = self.supervisor.start(
            f"{self.number}-{self.lives}-{name}",
            f"tests.faults.ranks:{target}",
            arguments,  # type: ignore[arg-type]
        )
        self.children[name] = child
        return child

    def start_all(self, names: Sequence[str]) -> None:
        """Start processes and wait until each says that it is ready."""
        for name in names:
            self.start(name)
        for name in names:
            self.answer(name, 20.0)

    def alive(self, name: str) -> bool:
        """Whether a process runs (one that nobody has reaped yet does not)."""
        try:
            state = Path(f"/proc/{self.children[name].pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in ("Z", "X")

    def ask(self, name: str, command: Message, timeout_s: float = 20.0) -> Message:
        """One answer of one process; what it says meanwhile is dropped."""
        channel = self.children[name].channel
        channel.send(command)
        return self.answer(name, timeout_s)

    def answer(self, name: str, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        channel = self.children[name].channel
        while True:
            message = channel.receive(timeout_s=max(deadline - time.monotonic(), 0.01))
            if "answer" in message:
                answer = message["answer"]
                return answer if isinstance(answer, dict) else {}
            if "error" in message or "failed" in message:
                raise RuntimeError(f"{name}: {message}")

    def publish(self, step: int) -> None:
        for slot in SLOTS:
            self.children[slot].channel.send({"do": "publish", "step": step, "epoch": self.epoch})
        for slot in SLOTS:
            self.answer(slot, 20.0)

    # -- the trial

    def run(self) -> Outcome:
        outcome = Outcome(self.combination, skipped=self.combination.skipped)
        if outcome.skipped:
            return outcome
        since = time.monotonic()
        try:
            self._run(outcome)
        except (RuntimeError, TimeoutError, OSError) as error:
            outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            for child in self.children.values():
                child.kill()
                child.channel.close()
            self.network.close()
        outcome.seconds = time.monotonic() - since
        return outcome

    def _run(self, outcome: Outcome) -> None:
        self.start_all(["server"])
        self.start_all([*SLOTS, *MEMBERS])
        self.publish(0)
        self._refit_all(0, outcome, must_succeed=True)
        self.publish(1)
        self._refit_with_fault(outcome)
        self._check(outcome, {0, 1})
        self._check_leases(outcome)
        self._recover()
        self._refit_all(2, outcome, must_succeed=True)
        self._check(outcome, {2})
        self._check_leases(outcome)

    def _refit_all(self, step: int, outcome: Outcome, *, must_succeed: bool) -> None:
        for name in MEMBERS:
            self.children[name].channel.send({"do": "refit", "step": step, "timeout_s": 3 * REFIT_S})
        for name in MEMBERS:
            answer = self.answer(name, 4 * REFIT_S)
            if must_succeed and answer["error"]:
                outcome.problems.append(f"refit to {step} on {name}: {answer['error']}: {answer['text']}")

    def _refit_with_fault(self, outcome: Outcome) -> None:
        has_s = self.combination.refit_s
        command: Message = {"do": "refit", "step": 1, "timeout_s": has_s, "cold": True}
        since = time.monotonic()
        for name in MEMBERS:
            extra: Message = {"pause_at": self.combination.step} if name == VICTIM else {}
            self.children[name].channel.send({**command, **extra})
        paused = self._wait_for_pause()
        if not paused:
            outcome.problems.append(f"{VICTIM} never came to {self.combination.step}")
            return
        self._strike()
        for name in MEMBERS:
            try:
                answer = self.answer(name, max(since + has_s + GOODBYE_S - time.monotonic(), 0.1))
                outcome.results[name] = str(answer["error"] or "ok")
            except (ChannelClosed, ConnectionError):
                outcome.results[name] = "gone"
            except TimeoutError:
                outcome.results[name] = "hung"
                outcome.problems.append(f"{name} did not end its refit of {has_s:g} s within {GOODBYE_S:g} s more")
        self.network.resume()

    def _wait_for_pause(self) -> bool:
        deadline = time.monotonic() + REFIT_S
        channel = self.children[VICTIM].channel
        while time.monotonic() < deadline:
            message = channel.receive(timeout_s=max(deadline - time.monotonic(), 0.01))
            if "paused" in message:
                return True
            if "answer" in message:
                return False
        return False

    def _strike(self) -> None:
        """Do the harm, and let the victim go on."""
        fault, victim = self.combination.fault, self.children[VICTIM]
        go_on: Message = {"do": "go on"}
        if fault == "trainer killed":
            self.children["trainer-1"].kill()
        elif fault == "receiver killed":
            victim.kill()
            return
        elif fault == "server killed":
            self.children["server"].kill()
            victim.channel.send(go_on)
            time.sleep(0.3)
            self.start_all(["server"])
            return
        elif fault == "network stall":
            trainer = self.children["trainer-1"].pid
            self.network.stall()
            os.kill(trainer, signal.SIGSTOP)
            victim.channel.send(go_on)
            time.sleep(STALL_S)
            os.kill(trainer, signal.SIGCONT)
            self.network.resume()
            return
        elif fault == "server silent":
            self.network.stall()
        elif fault in ("wrong bytes", "late digest"):
            self.ask("trainer-1", {"do": "spoil", "what": "data" if fault == "wrong bytes" else "digests"})
        elif fault == "slow rank":
            go_on = {"do": "dawdle", "seconds": STALL_S}
        elif fault == "out of staging memory":
            go_on = {"do": "exhaust"}
        elif fault == "SIGTERM":
            os.kill(victim.pid, signal.SIGTERM)
            return
        victim.channel.send(go_on)

    def _check(self, outcome: Outcome, versions: set[int]) -> None:
        """Old or new or nothing, on every survivor; never two versions."""
        served: dict[str, int] = {}
        for name in MEMBERS:
            if not self.alive(name):
                outcome.states[name] = "gone"
                continue
            status = self.ask(name, {"do": "status"})
            state, serving, held, links = (status[k] for k in ("state", "serving", "held", "links"))
            outcome.states[name] = f"{state} {serving}"
            if state == "serving":
                served[name] = int(str(serving))
                if serving not in versions or not isinstance(held, list) or any(h != serving for h in held):
                    outcome.problems.append(f"{name} says that it serves {serving} and holds {held}")
            elif state not in SERVES_NOTHING:
                outcome.problems.append(f"{name} is {state!r}")
            if isinstance(links, list):
                dead = [slot for slot in links if isinstance(slot, str) and slot in SLOTS and not self.alive(slot)]
                if dead and outcome.results.get(name) in ("HolderLostError", "PeerError", "TransferError"):
                    outcome.problems.append(f"{name} is still connected to {dead}")
        if len(set(served.values())) > 1:
            outcome.problems.append(f"ranks serve different versions: {served}")
        if self.combination.fault == "slow rank" and set(served.values()) != {max(versions)}:
            outcome.problems.append(f"a slow rank alone must not stop a refit: {outcome.states}")

    def _check_leases(self, outcome: Outcome) -> None:
        """None is left, once those of killed receivers have run out."""
        service = Rendezvous.connect(self.address)
        try:
            deadline = time.monotonic() + LEASE_TTL_S + 2.0
            left = service.describe(timeout_s=10.0).leases
            while left and time.monotonic() < deadline:
                time.sleep(0.1)
                left = service.describe(timeout_s=10.0).leases
            if left:
                outcome.problems.append(f"{len(left)} leases are left: {[lease.holder for lease in left]}")
        finally:
            service.close()

    def _recover(self) -> None:
        """Start what died again, let members in doubt learn, and publish the next version."""
        if self.combination.fault in ("server killed", "server silent"):
            time.sleep(WORKER_TTL_S + 0.2)  # publishers and receivers find out that the new service does not know them
        again = [name for name in ("server", *SLOTS, *MEMBERS) if not self.alive(name)]
        self.start_all(again)
        for name in MEMBERS:
            self.ask(name, {"do": "settle", "timeout_s": 2 * REFIT_S}, 3 * REFIT_S)
        self.publish(2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(chosen: Sequence[Combination], folder: Path, report: object = None) -> list[Outcome]:
    """Run combinations one after another."""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment |= {"UCX_TLS": "tcp"}  # over shared memory a stopped process can be read
    modules = ("numpy", "grpc", "tests.faults.ranks", "reshard.transports.memory", "reshard.refit.attempt")
    outcomes: list[Outcome] = []
    with Supervisor(modules, folder, environment=environment) as supervisor:
        for number, combination in enumerate(chosen):
            outcome = Trial(supervisor, number, combination).run()
            outcomes.append(outcome)
            if callable(report):
                report(outcome)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", choices=("shadow", "stream"), default="shadow")
    parser.add_argument("--transport", choices=("memory", "nixl"), default="memory")
    parser.add_argument("--steps", nargs="*", default=STEPS, choices=STEPS)
    parser.add_argument("--only", nargs="*", default=[], metavar="STEP:FAULT")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    every = [c for c in combinations(options.install, options.transport) if c.step in options.steps]
    chosen = [c for c in every if not options.only or f"{c.step}:{c.fault}" in options.only]

    def show(outcome: Outcome) -> None:
        if outcome.skipped:
            print(f"skip  {outcome.combination!s:40} {outcome.skipped}")
            return
        mark = "FAIL" if outcome.problems else "ok"
        states = ", ".join(f"{n}: {outcome.results.get(n, '-')} -> {s}" for n, s in outcome.states.items())
        print(f"{mark:5} {outcome.combination!s:40} {outcome.seconds:5.1f} s  {states}", flush=True)
        for problem in outcome.problems:
            print(f"      {problem}")

    with tempfile.TemporaryDirectory(prefix="reshard-faults-") as folder:
        outcomes = run(chosen, Path(folder), show)
    tried = [o for o in outcomes if not o.skipped]
    failed = [o for o in tried if o.problems]
    print(f"{len(tried)} combinations tried, {len(outcomes) - len(tried)} skipped with a reason, {len(failed)} failed")
    if options.json is not None:
        rows = [
            {
                "step": o.combination.step,
                "fault": o.combination.fault,
                "install": o.combination.install,
                "transport": o.combination.transport,
                "skipped": o.skipped,
                "problems": o.problems,
                "results": o.results,
                "states": o.states,
                "seconds": round(o.seconds, 2),
            }
            for o in outcomes
        ]
        options.json.write_text(json.dumps({"model": MODEL, "group": GROUP, "combinations": rows}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
