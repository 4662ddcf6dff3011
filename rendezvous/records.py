"""What does the service remember? The records of its state, and the keys under which a store keeps them.

Records are immutable: a transition replaces them. Times are seconds on the store's clock. Which facts share a
record is chosen by who waits for them: a waiter is woken when a record that it read changes, so beats,
ballots and the progress of slots, which change often and which nobody waits for, are kept apart from models,
transactions and lease books.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from reshard.rendezvous.types import Decision, SlotRecord, VersionKey, WorkerInfo

__all__ = [
    "KINDS",
    "Ballot",
    "Beat",
    "Group",
    "Hint",
    "HintSet",
    "Hints",
    "Key",
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
    "ballot_key",
    "beat_key",
    "group_key",
    "hints_key",
    "last_use_key",
    "leases_key",
    "model_key",
    "progress_key",
    "slot_key",
    "transaction_key",
    "version_key",
    "worker_key",
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


@dataclass(frozen=True, slots=True)
class Key(Generic[R]):
    """Where a record of one type is kept."""

    kind: str
    name: str
    type: type[R] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def worker_key(worker_id: str) -> Key[Worker]:
    """Key of a worker."""
    return Key("worker", worker_id, Worker)


def beat_key(worker_id: str) -> Key[Beat]:
    """Key of a worker's beat."""
    return Key("beat", worker_id, Beat)


def model_key(model: str) -> Key[Model]:
    """Key of a model."""
    return Key("model", model, Model)


def progress_key(model: str) -> Key[Progress]:
    """Key of a model's slot progress."""
    return Key("progress", model, Progress)


def version_key(uid: str) -> Key[Version]:
    """Key of a version."""
    return Key("version", uid, Version)


def slot_key(uid: str, slot: str) -> Key[Slot]:
    """Key of a version's slot."""
    return Key("slot", f"{uid}:{slot}", Slot)


def leases_key(uid: str) -> Key[LeaseBook]:
    """Key of a version's leases."""
    return Key("leases", uid, LeaseBook)


def group_key(model: str, group: str) -> Key[Group]:
    """Key of a group; names hold no NUL, so the pair is unambiguous."""
    return Key("group", f"{model}\0{group}", Group)


def transaction_key(txn_id: str) -> Key[Transaction]:
    """Key of a transaction."""
    return Key("txn", txn_id, Transaction)


def ballot_key(txn_id: str) -> Key[Ballot]:
    """Key of a transaction's ballot."""
    return Key("ballot", txn_id, Ballot)


def hints_key(model: str) -> Key[Hints]:
    """Key of a model's cut hints."""
    return Key("hints", model, Hints)


def last_use_key(model: str) -> Key[LastUse]:
    """Key of a model's last use."""
    return Key("use", model, LastUse)
