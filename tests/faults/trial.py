"""One cell of the fault matrix, on processes of its own: two trainers, two receivers, the service, a network between.

1. All start; versions 0 (taken by both receivers) and 1 are published.
2. Both refit to 1; one of them stops at the step; the fault strikes; it goes on.
3. What is left is looked at. What died is started again, members in doubt learn, version 2 is published.
4. Both refit to 2, and must succeed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import checks
from tests.faults.checks import Event, Status
from tests.faults.combinations import MEMBERS, SLOTS, STRUCK_TRAINER, VICTIM, Combination
from tests.faults.proxy import Proxy
from tests.faults.ranks import LEASE_TTL_S, WORKER_TTL_S
from tests.ports import lasting_port

from reshard.refit.demo.channel import ChannelClosed, Message
from reshard.refit.demo.supervisor import Child, Supervisor
from reshard.rendezvous import Rendezvous

REFIT_S = 9.0
"""A refit in which something fails; four fifths of it are more than `WORKER_TTL_S`."""
GOOD_REFIT_S = 30.0
"""A refit that must succeed."""
STALL_S = 1.0
SILENT_REFIT_S = 3.0
GOODBYE_S = 30.0
"""What a refit may take beyond its time to say goodbye: to peers, to the service, for memory in doubt."""
GIVE_BACK_S = 1.5
"""How long after a refit its lease may be there yet: less than it takes to run out by itself."""
ANSWER_S = 60.0
"""How long a process may take to start, or to answer a question."""
_GONE, _HUNG = "gone", "hung"


@dataclass(slots=True)
class Outcome:
    """What became of a combination.

    Attributes
    ----------
    problems
        What did not hold; empty if it passed.
    results
        By member, the type of the error that its refit with the fault ended in; ``ok``, ``gone`` or ``hung``.
    errors
        By member, that error's text.
    states
        By member, what it said of itself right after.
    """

    combination: Combination
    problems: list[str] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    skipped: str = ""


class Trial:
    """One combination.

    Parameters
    ----------
    number
        Distinguishes its processes from those of other trials of the supervisor.
    """

    def __init__(self, supervisor: Supervisor, number: int, combination: Combination) -> None:
        self._supervisor = supervisor
        self._number = number
        self._combination = combination
        self._port = lasting_port()
        self._network = Proxy(self._port)
        # The service itself, for who looks at it; the processes of the trial go through the proxy.
        self._address = f"127.0.0.1:{self._port}"
        self._n_started = 0
        self._children: dict[str, Child] = {}
        self._lives: dict[str, str] = {}
        self._histories: dict[str, list[Event]] = {name: [] for name in MEMBERS}
        self._lost: dict[str, tuple[str, ...]] = {}
        self._outcome = Outcome(combination, skipped=combination.skipped)

    def run(self) -> Outcome:
        """Try it; what goes wrong is in the outcome."""
        outcome = self._outcome
        if outcome.skipped:
            self._network.close()
            return outcome
        since = time.monotonic()
        try:
            self._run()
        except (RuntimeError, TimeoutError, OSError) as error:
            outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            if outcome.problems:
                outcome.problems += [
                    f"log of {name}: {tail}" for name, c in self._children.items() if (tail := c.log_tail().strip())
                ]
            for child in self._children.values():
                child.kill()
                child.channel.close()
            self._network.close()
        outcome.seconds = time.monotonic() - since
        return outcome

    def _run(self) -> None:
        outcome = self._outcome
        self._start_all(["server"])
        self._start_all([*SLOTS, *MEMBERS])
        self._publish(0)
        self._refit_all(0)
        self._publish(1)
        if not self._refit_with_fault():
            return
        statuses = self._statuses()
        outcome.states = {name: str(statuses[name]) if name in statuses else _GONE for name in MEMBERS}
        dead = [slot for slot in SLOTS if not self._alive(slot)]
        self._note(checks.old_or_new(statuses, {0, 1}))
        self._note(checks.one_version(statuses))
        self._note(checks.outcome(self._combination, statuses, self._histories))
        self._note(checks.struck(self._combination, outcome.errors))
        self._note(checks.no_dead_links(statuses, self._lost, self._lives, dead))
        self._wait_for_leases()
        survivors = tuple(statuses)
        self._recover()
        statuses = {name: status for name, status in self._statuses().items() if name in survivors}
        self._note(checks.settled(statuses))
        self._note(checks.kept_old(self._combination, statuses))
        self._publish(2)
        self._refit_all(2)
        statuses = self._statuses()
        self._note(checks.old_or_new(statuses, {2}))
        self._note(checks.one_version(statuses))
        self._note(checks.present_links(statuses, self._lives))
        self._note(checks.never_two(self._histories))
        self._wait_for_leases()

    def _note(self, problems: Iterable[str]) -> None:
        self._outcome.problems += problems

    # -- processes

    def _start_all(self, names: Sequence[str]) -> None:
        """Start processes (again) and wait until each says that it is ready."""
        through = f"127.0.0.1:{self._network.port}"
        shared: Message = {"address": through, "transport": self._combination.transport}
        for name in names:
            self._n_started += 1
            arguments: Message
            if name == "server":
                target, arguments = "run_server", {"port": self._port}
            elif name in SLOTS:
                target, arguments = "run_trainer", {"slot": name, "slots": list(SLOTS), **shared}
            else:
                target = "run_receiver"
                arguments = {"member": name, "members": list(MEMBERS), "install": self._combination.install, **shared}
            self._children[name] = self._supervisor.start(
                f"{self._number}-{self._n_started}-{name}",
                f"tests.faults.ranks:{target}",
                arguments,
            )
        for name in names:
            self._answer(name)

    def _alive(self, name: str) -> bool:
        """Whether a process runs (one that nobody has reaped yet does not)."""
        try:
            state = Path(f"/proc/{self._children[name].pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in ("Z", "X")

    def _wait_for_end(self, name: str) -> None:
        """Wait until a process that has closed its channel has ended, a moment later."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self._children[name].pid)
            try:
                if not select.select([descriptor], [], [], ANSWER_S)[0]:
                    raise TimeoutError(f"{name} has closed its channel and did not end within {ANSWER_S:g} s")
            finally:
                os.close(descriptor)

    def _end(self, name: str, signum: signal.Signals) -> None:
        """Kill a process, or ask it to end; it serves nothing from then on."""
        if name in self._histories:
            self._histories[name].append(Event(time.monotonic(), "end"))
        if signum is signal.SIGKILL:
            self._children[name].kill()
        else:
            os.kill(self._children[name].pid, signum)

    def _receive(self, name: str, timeout_s: float) -> Message:
        """The next message of a process that is no change of state; those are noted."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._children[name].channel.receive(timeout_s=max(deadline - time.monotonic(), 0.01))
            if "state" not in message:
                return message
            event = Event(_number(message["at_s"]), str(message["state"]), int(_number(message["serving"])))
            history = self._histories[name]
            if (
                not history or history[-1].at_s <= event.at_s
            ):  # one that was killed has ended when it was sent the signal
                history.append(event)

    def _ask(self, name: str, command: Message, timeout_s: float = ANSWER_S) -> Message:
        self._children[name].channel.send(command)
        return self._answer(name, timeout_s)

    def _answer(self, name: str, timeout_s: float = ANSWER_S) -> Message:
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._receive(name, max(deadline - time.monotonic(), 0.01))
            if "answer" in message:
                answer = message["answer"]
                return answer if isinstance(answer, dict) else {}
            if "error" in message or "failed" in message:
                raise RuntimeError(f"{name}: {message}")

    def _statuses(self) -> dict[str, Status]:
        """What each member that lives says of itself."""
        found: dict[str, Status] = {}
        for name in MEMBERS:
            if self._alive(name):
                found[name] = _status(self._ask(name, {"do": "status"}))
        return found

    # -- versions

    def _publish(self, step: int) -> None:
        for slot in SLOTS:
            self._children[slot].channel.send({"do": "publish", "step": step, "epoch": 0})
        for slot in SLOTS:
            self._lives[slot] = str(self._answer(slot)["worker_id"])

    def _refit_all(self, step: int) -> None:
        """A refit of the whole group, which must succeed."""
        for name in MEMBERS:
            self._children[name].channel.send({"do": "refit", "step": step, "timeout_s": GOOD_REFIT_S})
        for name in MEMBERS:
            answer = self._answer(name, GOOD_REFIT_S + ANSWER_S)
            if answer["error"]:
                self._note([f"refit to {step} on {name}: {answer['error']}: {answer['text']}"])

    def _refit_with_fault(self) -> bool:
        """A refit in which the fault strikes; False if it could not be brought so far."""
        has_s = SILENT_REFIT_S if self._combination.fault == "server silent" else REFIT_S
        if self._combination.must_succeed:
            has_s = GOOD_REFIT_S
        command: Message = {"do": "refit", "step": 1, "timeout_s": has_s, "cold": True}
        for name in MEMBERS:
            extra: Message = {"pause_at": self._combination.step} if name == VICTIM else {}
            self._children[name].channel.send({**command, **extra})
        said = self._receive(VICTIM, ANSWER_S)
        if "paused" not in said:
            self._note([f"{VICTIM} never came to {self._combination.step}: {said}"])
            return False
        self._note(checks.old_or_new({VICTIM: _status(said["status"])}, {0}))
        since = time.monotonic()
        self._strike()
        answered: list[str] = []
        for name in MEMBERS:
            try:
                answer = self._answer(name, max(since + has_s + GOODBYE_S - time.monotonic(), 0.1))
            except (ChannelClosed, ConnectionError):
                self._wait_for_end(name)
                self._outcome.results[name] = _GONE
                answered.append(name)
            except TimeoutError:
                self._outcome.results[name] = _HUNG
                self._note([f"{name} did not end its refit of {has_s:g} s within {GOODBYE_S:g} s more"])
            else:
                self._outcome.results[name] = str(answer["error"] or "ok")
                self._outcome.errors[name] = f"{answer['error']}: {answer['text']}" if answer["error"] else ""
                self._lost[name] = _names(answer["lost"])
                answered.append(name)
        if self._combination.can_release:
            killed = [VICTIM] if self._combination.fault == "receiver killed" else []
            left = self._holding(name for name in answered if name not in killed)
            self._note(f"{name} has ended its refit and holds a lease" for name in left)
        self._network.resume()
        return _HUNG not in self._outcome.results.values()

    def _strike(self) -> None:
        """Do the harm, and let the victim go on."""
        fault, victim = self._combination.fault, self._children[VICTIM]
        go_on: Message = {"do": "go on"}
        if fault == "trainer killed":
            self._end(STRUCK_TRAINER, signal.SIGKILL)
        elif fault == "receiver killed":
            self._end(VICTIM, signal.SIGKILL)
            return
        elif fault == "server killed":
            self._end("server", signal.SIGKILL)
            victim.channel.send(go_on)
            time.sleep(0.3)
            self._start_all(["server"])
            return
        elif fault == "network stall":
            trainer = self._children[STRUCK_TRAINER].pid
            self._network.stall()
            os.kill(trainer, signal.SIGSTOP)
            victim.channel.send(go_on)
            time.sleep(STALL_S)
            os.kill(trainer, signal.SIGCONT)
            self._network.resume()
            return
        elif fault == "server silent":
            self._network.stall()
        elif fault in ("wrong bytes", "late digest"):
            self._ask(STRUCK_TRAINER, {"do": "spoil", "what": "data" if fault == "wrong bytes" else "digests"})
        elif fault == "slow rank":
            go_on = {"do": "dawdle", "seconds": STALL_S}
        elif fault == "out of staging memory":
            go_on = {"do": "exhaust"}
        elif fault == "SIGTERM":
            self._end(VICTIM, signal.SIGTERM)
            return
        victim.channel.send(go_on)

    # -- afterwards

    def _holding(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that hold a lease now and do not give it back at once."""
        asked, end_s = frozenset(names), time.monotonic() + GIVE_BACK_S
        while (left := sorted(asked & set(self._leases()))) and time.monotonic() < end_s:
            time.sleep(0.1)
        return left

    def _leases(self) -> list[str]:
        """Holders of the leases that the service knows of."""
        service = Rendezvous.connect(self._address)
        try:
            return [lease.holder for lease in service.describe(timeout_s=ANSWER_S).leases]
        finally:
            service.close()

    def _wait_for_leases(self) -> None:
        """None is left, once those of killed receivers, and of who could not reach the service, have run out."""
        deadline = time.monotonic() + LEASE_TTL_S + ANSWER_S
        while (left := self._leases()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            self._note([f"{len(left)} leases are left, of {left}"])

    def _recover(self) -> None:
        """Start what died again, and let members in doubt learn."""
        if self._combination.fault in ("server killed", "server silent"):
            time.sleep(WORKER_TTL_S + 0.2)  # publishers and receivers find out that the new service does not know them
        self._start_all([name for name in ("server", *SLOTS, *MEMBERS) if not self._alive(name)])
        for name in MEMBERS:
            self._ask(name, {"do": "settle", "timeout_s": GOOD_REFIT_S}, GOOD_REFIT_S + ANSWER_S)


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"got {value!r}, expected a number")
    return value


def _status(said: object) -> Status:
    if not isinstance(said, dict) or not isinstance(said["held"], list) or not isinstance(said["links"], dict):
        raise TypeError(f"got {said!r}, expected a status")
    return Status(
        str(said["state"]),
        int(_number(said["serving"])),
        tuple(None if step is None else int(_number(step)) for step in said["held"]),
        {slot: str(worker_id) for slot, worker_id in said["links"].items()},
        _names(said["peers"]),
        int(_number(said["n_quarantined"])),
    )


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"got {value!r}, expected a list of names")
    return tuple(str(name) for name in value)
