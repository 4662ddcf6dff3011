"""Where is each record kept? Keys, typed by what is kept under them; their text is what a store sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from reshard.rendezvous.records import (
    Ballot,
    Beat,
    Group,
    Hints,
    LastUse,
    LeaseBook,
    Model,
    Progress,
    R,
    Slot,
    Transaction,
    Version,
    Worker,
)

__all__ = [
    "Key",
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
