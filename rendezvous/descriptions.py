"""What is there now? The answer of ``Describe``: workers, versions, leases, transactions and groups, for people."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.rendezvous.types import Decision, VersionKey

__all__ = [
    "Description",
    "GroupStatus",
    "LeaseStatus",
    "SlotStatus",
    "TransactionStatus",
    "VersionStatus",
    "WorkerStatus",
]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as ``reshard ps`` shows it. ``lost`` is judged at the time of asking."""

    id: str
    role: str
    model: str
    host: str
    name: str
    ttl_s: float
    age_s: float
    silent_s: float
    lost: bool


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot of a version: ``filled``, ``missing`` or ``lost``, and how far its publisher got."""

    slot: str
    state: str
    worker_id: str
    last_step: int


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """A version: staging, ready, withdrawn (a worker was lost), refused (unequal replicas) or retiring."""

    uid: str
    version: VersionKey
    state: str
    layout_epoch: int
    slots: tuple[SlotStatus, ...]
    n_leases: int
    age_s: float


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """A live lease."""

    id: str
    version_uid: str
    holder: str
    worker_id: str
    remaining_s: float


@dataclass(frozen=True, slots=True)
class TransactionStatus:
    """A transaction and its two facts (PENDING where not decided)."""

    id: str
    group: str
    version: VersionKey
    members: tuple[str, ...]
    joined: tuple[str, ...]
    voted: tuple[str, ...]
    installed: tuple[str, ...]
    decision: Decision
    outcome: Decision
    reason: str
    remaining_s: float


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A group: what it serves, and how many steps it lags behind the newest ready version."""

    model: str
    group: str
    members: tuple[str, ...]
    serving: VersionKey | None
    quarantined: bool
    lag_steps: int


@dataclass(frozen=True, slots=True)
class Description:
    """Everything the service knows, at one moment."""

    store: str
    server_id: str
    workers: tuple[WorkerStatus, ...]
    versions: tuple[VersionStatus, ...]
    leases: tuple[LeaseStatus, ...]
    transactions: tuple[TransactionStatus, ...]
    groups: tuple[GroupStatus, ...]
