"""What must hold after a fault: functions from what was seen to what is wrong with it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.faults.combinations import SLOTS, Combination

SERVES_NOTHING = ("empty", "quarantined", "in_doubt", "changing")


@dataclass(frozen=True, slots=True)
class Status:
    """What a member says of itself.

    Attributes
    ----------
    serving
        Step of the version that it says that it serves; -1 for none.
    held
        For each of its tensors the step whose bytes it has; -1 for zeros, None for no version's.
    links
        Worker id of the trainer that it is connected to, by slot.
    peers
        Names that its transport holds connections to.
    n_quarantined
        Ranges of its memory that a late read may still change.
    """

    state: str
    serving: int = -1
    held: tuple[int | None, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    n_quarantined: int = 0

    def __str__(self) -> str:
        return f"serving {self.serving}" if self.state == "serving" else self.state


@dataclass(frozen=True, slots=True)
class Event:
    """A member's state from a moment of this machine's monotonic clock on."""

    at_s: float
    state: str
    serving: int = -1


def old_or_new(statuses: Mapping[str, Status], versions: Collection[int]) -> Iterator[str]:
    """Every member serves entirely one of ``versions``, or says that it serves nothing."""
    for name, status in statuses.items():
        if status.state == "serving":
            if status.serving not in versions or not status.held or set(status.held) != {status.serving}:
                yield f"{name} says that it serves {status.serving} and holds {list(status.held)}"
        elif status.state not in SERVES_NOTHING:
            yield f"{name} is {status.state!r}"
        elif status.serving != -1:
            yield f"{name} is {status.state!r} and says that it serves {status.serving}"


def one_version(statuses: Mapping[str, Status]) -> Iterator[str]:
    """No two members serve different versions now."""
    served = {name: status.serving for name, status in statuses.items() if status.state == "serving"}
    if len(set(served.values())) > 1:
        yield f"ranks serve different versions: {served}"


def never_two(histories: Mapping[str, Sequence[Event]]) -> Iterator[str]:
    """No two members have served different versions at any moment."""
    spans = {name: list(_served(events)) for name, events in histories.items()}
    for (one, ones), (other, others) in itertools.combinations(spans.items(), 2):
        for (a, a_from, a_to), (b, b_from, b_to) in itertools.product(ones, others):
            together = min(a_to, b_to) - max(a_from, b_from)
            if a != b and together > 0:
                yield f"{one} served {a} while {other} served {b}, for {together * 1e3:.3f} ms"


def _served(events: Sequence[Event]) -> Iterator[tuple[int, float, float]]:
    for event, following in itertools.pairwise([*events, Event(float("inf"), "end")]):
        if event.state == "serving":
            yield event.serving, event.at_s, following.at_s


def outcome(
    combination: Combination, statuses: Mapping[str, Status], histories: Mapping[str, Sequence[Event]]
) -> Iterator[str]:
    """The new version is served by nobody, ever, where it cannot be had, and by all where nothing stands against it."""
    seen = {name: str(status) for name, status in statuses.items()}
    if combination.must_fail:
        for name, events in histories.items():
            if any(event.serving == 1 for event in events):
                yield f"{combination} must fail the refit, and {name} served the new version; now {seen}"
    if combination.must_succeed and any(status.serving != 1 for status in statuses.values()):
        yield f"{combination} alone must not stop a refit: {seen}"


def struck(combination: Combination, errors: Mapping[str, str]) -> Iterator[str]:
    """The fault was felt by those whom it must be felt by."""
    members, said = combination.evidence
    if members and not any(said in errors.get(name, "") for name in members):
        yield f"no error of {', '.join(members)} says {said!r}: {dict(errors)}"


def kept_old(combination: Combination, survivors: Mapping[str, Status]) -> Iterator[str]:
    """Where the group has not gone over, its survivors serve the old version."""
    if combination.keeps_old:
        for name, status in survivors.items():
            if status.serving != 0:
                yield f"{name} is {status} after a refit that failed before the decision, expected serving 0"


def settled(survivors: Mapping[str, Status]) -> Iterator[str]:
    """Once the service can be asked again, who was in doubt has learnt."""
    for name, status in survivors.items():
        if status.state in ("in_doubt", "changing"):
            yield f"{name} is {status} although the service answers"


def no_dead_links(
    statuses: Mapping[str, Status],
    lost: Mapping[str, Collection[str]],
    lives: Mapping[str, str],
    dead: Collection[str],
) -> Iterator[str]:
    """A member whose refit failed by a trainer's death is not connected to it any more.

    One that was only told of it, by the group's decision, finds out at its next refit.
    """
    for name, status in statuses.items():
        for slot, worker_id in status.links.items():
            if slot in dead and slot in lost.get(name, ()) and worker_id == lives[slot]:
                yield f"{name} is still connected to {slot}, which is dead"


def present_links(statuses: Mapping[str, Status], lives: Mapping[str, str]) -> Iterator[str]:
    """After a refit that succeeded members are connected to the present lives of all trainers, and to nobody else."""
    for name, status in statuses.items():
        if dict(status.links) != dict(lives) or sorted(status.peers) != sorted(SLOTS):
            yield f"{name} is connected to {dict(status.links)} by peers {list(status.peers)}, expected {dict(lives)}"
        if status.n_quarantined:
            yield f"{name} has {status.n_quarantined} ranges in quarantine after a refit that succeeded"
