"""What does the service remember? The records of its state.

Records are immutable: a transition replaces them. Times are seconds on the store's clock. Which facts share a
record is chosen by who waits for them: a waiter is woken when a record that it read changes, so beats,
ballots and the progress of slots, which change often and which nobody waits for, are kept apart from models,
transactions and lease books.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from reshard.rendezvous.types import Decision, SlotRecord, VersionKey, WorkerInfo

__all__ = [
    "KINDS",
    "Ballot",
    "Beat",
    "Group",
    "Hint",
    "HintSet",
    "Hints",
    "LastUse",
    "Layout",
    "LeaseBook",
    "LeaseRow",
    "Model",
    "Progress",
    "Record",
    "Run",
    "Slot",
    "SlotProgress",
    "Transaction",
    "Version",
    "VersionRef",
    "VersionState",
    "Vote",
    "Worker",
]


@dataclass(frozen=True, slots=True)
class Worker:
    """A process life."""

    id: str
    info: WorkerInfo
    ttl_s: float
    registered_at: float


@dataclass(frozen=True, slots=True)
class Beat:
    """Until when a worker counts as alive. Past `expires_at` it is lost, for good: no beat revives it."""

    worker_id: str
    seen_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class VersionRef:
    """A version in its model's list."""

    uid: str
    epoch: int
    step: int
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """The epoch that a run of the trainer was given."""

    run_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model's epoch, the highest step opened in it (-1: none), and its versions that are not gone."""

    model: str
    epoch: int = -1
    step: int = -1
    runs: tuple[Run, ...] = ()
    versions: tuple[VersionRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The table that a slot declared for a layout epoch."""

    layout_epoch: int
    table_digest: bytes


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """The last step that a slot published in the model's epoch, its layout then, and which version whose it was."""

    step: int
    layout: Layout
    uid: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Per slot how far its publisher got, in one epoch of a model."""

    epoch: int
    slots: Mapping[str, SlotProgress] = field(default_factory=dict)


class VersionState(Enum):
    """The life of a version; a version that is gone has no record."""

    STAGING = "staging"
    READY = "ready"
    REFUSED = "refused"
    RETIRING = "retiring"


@dataclass(frozen=True, slots=True)
class Version:
    """A version: expected slots, the worker that filled each, and who offered an empty table without saying so."""

    uid: str
    key: VersionKey
    layout_epoch: int
    slots: tuple[str, ...]
    opened_at: float
    state: VersionState = VersionState.STAGING
    filled: Mapping[str, str] = field(default_factory=dict)
    offered_empty: tuple[str, ...] = ()
    reason: str = ""
    holders: tuple[str, ...] = ()
    drop: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """A filled slot of a version."""

    uid: str
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease, live until `expires_at`."""

    worker_id: str
    holder: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class LeaseBook:
    """The leases of a version, by id."""

    uid: str
    rows: Mapping[str, LeaseRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """A group: its newest transaction, and which facts its members have certainly learned.

    ``joined`` is, per member, the sequence number of the last transaction it joined: a member joins only
    after it learned the facts of those before, so they may be forgotten. ``history`` are the finished ones
    still kept.
    """

    model: str
    group: str
    members: tuple[str, ...]
    seq: int = 0
    current: str = ""
    serving: VersionKey | None = None
    quarantined: bool = False
    joined: Mapping[str, int] = field(default_factory=dict)
    history: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Transaction:
    """One group's change to one version, and its two facts."""

    id: str
    group: str
    seq: int
    uid: str
    key: VersionKey
    members: tuple[str, ...]
    timeout_s: float
    deadline: float
    decision: Decision = Decision.PENDING
    outcome: Decision = Decision.PENDING
    reason: str = ""
    decided_at: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether no fact is open any more."""
        return self.decision is Decision.ABORT or self.outcome is not Decision.PENDING


@dataclass(frozen=True, slots=True)
class Vote:
    """A member's vote. `names_digest` names the set of source tensors that it consumed."""

    yes: bool
    reason: str = ""
    identity: bytes = b""
    plan_digest: bytes = b""
    names_digest: bytes = b""
    allow_unconsumed: tuple[str, ...] = ()
    wire_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ballot:
    """Which tables the version had, which worker stands for each member, what they voted and whether they installed."""

    id: str
    tables: tuple[bytes, ...] = ()
    joined: Mapping[str, str] = field(default_factory=dict)
    leases: Mapping[str, str] = field(default_factory=dict)
    votes: Mapping[str, Vote] = field(default_factory=dict)
    installed: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hint:
    """Where one receiver cuts the source tensors, by digest, and when it said so."""

    group: str
    member: str
    digest: bytes
    said_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class HintSet:
    """The hints of one layout epoch."""

    layout_epoch: int
    hints: tuple[Hint, ...]


@dataclass(frozen=True, slots=True)
class Hints:
    """A model's cut hints: the newest set first, then some older ones, so that all publishers can use the same."""

    model: str
    sets: tuple[HintSet, ...] = ()


@dataclass(frozen=True, slots=True)
class LastUse:
    """When a model was last used, to within an hour."""

    model: str
    used_at: float


Record = Worker | Beat | Model | Progress | Version | Slot | LeaseBook | Group | Transaction | Ballot | Hints | LastUse
R = TypeVar("R", Worker, Beat, Model, Progress, Version, Slot, LeaseBook, Group, Transaction, Ballot, Hints, LastUse)

KINDS: Mapping[str, type[Record]] = {
    "worker": Worker,
    "beat": Beat,
    "model": Model,
    "progress": Progress,
    "version": Version,
    "slot": Slot,
    "leases": LeaseBook,
    "group": Group,
    "txn": Transaction,
    "ballot": Ballot,
    "hints": Hints,
    "use": LastUse,
}
