"""What do callers of the rendezvous say and hear? Plain values: no gRPC, no clock, no store.

Each type checks its fields when it is built and raises :class:`InvalidRequestError` naming the field, on both
sides of the wire. Identifiers are 32 hex digits, digests 32 bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from reshard.planner.cuts import Cuts
from reshard.rendezvous import limits
from reshard.rendezvous.errors import InvalidRequestError

__all__ = [
    "CutHint",
    "CutHints",
    "Decision",
    "Facts",
    "Lease",
    "Manifest",
    "Progress",
    "SlotRecord",
    "TLSFiles",
    "VersionKey",
    "WorkerInfo",
]

_Number = TypeVar("_Number", np.uint64, np.int64)
_NO_BASES: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
_NO_SIZES: npt.NDArray[np.int64] = np.empty(0, np.int64)


class Decision(Enum):
    """A durable fact of a transaction, or the lack of one.

    ``COMMIT``/``ABORT`` is the first fact, ``SERVE``/``QUARANTINE`` the second. ``PENDING`` is not decided
    yet; ``UNKNOWN`` says that the service has no record (a memory store that was restarted, or a member that asks
    over an hour after it was lost): a member in doubt then quarantines.
    """

    PENDING = "pending"
    COMMIT = "commit"
    ABORT = "abort"
    SERVE = "serve"
    QUARANTINE = "quarantine"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """Paths of a client's TLS files, PEM.

    `ca` None trusts the system's roots; `cert` and `key` go together (mutual TLS).
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """A transaction's two facts as far as they are recorded, and why.

    ``decision`` is PENDING, COMMIT, ABORT or UNKNOWN; ``outcome`` is PENDING, SERVE, QUARANTINE or UNKNOWN.
    ``reason`` names the member, slot or tensor that made it ABORT or QUARANTINE.
    """

    decision: Decision
    outcome: Decision = Decision.PENDING
    reason: str = ""


@dataclass(frozen=True, slots=True, order=True)
class VersionKey:
    """Which trained state: a model's (epoch, step). Step 0 is valid; no step is no version."""

    model: str
    epoch: int
    step: int

    def __post_init__(self) -> None:
        limits.check_name("version.model", self.model)
        limits.check_int("version.epoch", self.epoch, at_least=0, at_most=limits.MAX_STEP)
        limits.check_int("version.step", self.step, at_least=0, at_most=limits.MAX_STEP)

    def __str__(self) -> str:
        return f"{self.model}@{self.epoch}.{self.step}"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One process life of a trainer or receiver.

    Parameters
    ----------
    role
        What the worker does.
    model
        The model it trains or serves.
    host
        The machine, as replica policies compare it.
    name
        What people call it (``trainer-3``); names may repeat over process lives, ids never do.
    endpoints
        Transport name to that transport's endpoint message.
    """

    role: Literal["trainer", "receiver"]
    model: str
    host: str
    name: str
    endpoints: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits.check_choice("worker.role", self.role, ("trainer", "receiver"))
        limits.check_name("worker.model", self.model)
        limits.check_name("worker.host", self.host, empty_ok=True)
        limits.check_name("worker.name", self.name)
        object.__setattr__(self, "endpoints", _check_endpoints("worker.endpoints", self.endpoints))


@dataclass(frozen=True, slots=True, eq=False)
class SlotRecord:
    """What one slot contributes to one version: a table, where its regions are, the root of its digests.

    Parameters
    ----------
    slot, worker_id, host
        Who fills the slot.
    endpoints
        Transport name to endpoint message of the holder.
    table_digest
        Digest of the :class:`~reshard.planner.ShardPart`, put before with ``put_table``.
    region_bases
        uint64 ``[R]``, absolute address of each region of the table in this version.
    region_bytes
        int64 ``[R]``.
    memory, device
        What kind of memory the regions are.
    digest_root
        32 bytes over the version's cell digests, or empty where digests are off.
    header_region, digest_region
        Regions of the seqlock header and of the cell digests; -1 where there are none.
    empty
        The publisher says that it holds no rows; only then may an empty table fill the slot.
    roots
        Per replica group and alias the 32-byte root over its canonical cells; the service compares equal keys
        between slots.
    """

    slot: str
    worker_id: str
    host: str
    endpoints: Mapping[str, bytes]
    table_digest: bytes
    region_bases: npt.NDArray[np.uint64] = field(default_factory=lambda: _NO_BASES)
    region_bytes: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_SIZES)
    memory: Literal["dram", "vram"] = "dram"
    device: int = 0
    digest_root: bytes = b""
    header_region: int = -1
    digest_region: int = -1
    empty: bool = False
    roots: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits.check_name("record.slot", self.slot)
        limits.check_id("record.worker_id", self.worker_id)
        limits.check_name("record.host", self.host, empty_ok=True)
        limits.check_digest("record.table_digest", self.table_digest)
        limits.check_choice("record.memory", self.memory, ("dram", "vram"))
        limits.check_int("record.device", self.device, at_least=0, at_most=4096)
        limits.check_digest("record.digest_root", self.digest_root, empty_ok=True)
        if not isinstance(self.empty, bool):
            raise InvalidRequestError("record.empty", f"expected a bool, got {type(self.empty).__name__}")
        bases: npt.NDArray[np.uint64] = _column("record.region_bases", self.region_bases, np.uint64)
        sizes: npt.NDArray[np.int64] = _column("record.region_bytes", self.region_bytes, np.int64)
        if bases.size != sizes.size:
            raise InvalidRequestError("record.region_bases", f"{bases.size} bases for {sizes.size} sizes")
        if sizes.size and int(sizes.min()) < 0:
            raise InvalidRequestError("record.region_bytes", f"negative size {int(sizes.min())}")
        if bases.size and bool((bases + sizes.view(np.uint64) < bases).any()):
            raise InvalidRequestError("record.region_bases", "a region runs past 2^64")
        for name in ("header_region", "digest_region"):
            limits.check_int(f"record.{name}", getattr(self, name), at_least=-1, at_most=max(bases.size - 1, -1))
        roots = {
            limits.check_name("record.roots", key): limits.check_digest(f"record.roots[{key!r:.80}]", root)
            for key, root in _sorted_items("record.roots", self.roots, limits.MAX_ROOTS)
        }
        limits.check_total("record.roots", sum(len(key.encode()) for key in roots), limits.MAX_ROOT_NAMES_BYTES)
        object.__setattr__(self, "endpoints", _check_endpoints("record.endpoints", self.endpoints))
        object.__setattr__(self, "region_bases", bases)
        object.__setattr__(self, "region_bytes", sizes)
        object.__setattr__(self, "roots", roots)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SlotRecord):
            return NotImplemented
        return self._plain() == other._plain() and self._arrays() == other._arrays()

    def __hash__(self) -> int:
        return hash((self.slot, self.worker_id, self.table_digest, self.digest_root))

    def _plain(self) -> tuple[object, ...]:
        placed = (self.slot, self.worker_id, self.host, dict(self.endpoints), self.memory, self.device)
        content = (self.table_digest, self.digest_root, self.empty, dict(self.roots))
        return (*placed, *content, self.header_region, self.digest_region)

    def _arrays(self) -> tuple[bytes, bytes]:
        return self.region_bases.tobytes(), self.region_bytes.tobytes()


@dataclass(frozen=True, slots=True)
class Lease:
    """A receiver's claim that keeps a version's memory unchanged while it reads.

    ``since_s`` is a reading of the holder's own ``time.monotonic()``: of the last renewal's sending or,
    before the first, of the grant's arrival. The holder counts the lease as ended `margin_s` before the
    service does.
    """

    id: str
    version_uid: str
    ttl_s: float
    since_s: float = 0.0

    def __post_init__(self) -> None:
        limits.check_id("lease.id", self.id)
        limits.check_id("lease.version_uid", self.version_uid)
        limits.check_ttl("lease.ttl_s", self.ttl_s)

    def remaining_s(self, now_s: float, *, margin_s: float = 0.0) -> float:
        """Seconds left at the monotonic time `now_s`; negative once it has ended."""
        return self.since_s + self.ttl_s - margin_s - now_s

    def restarted(self, since_s: float) -> Lease:
        """The same lease, counted from `since_s`."""
        return replace(self, since_s=since_s)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete version as a receiver gets it: every slot, the group's transaction and a granted lease."""

    version: VersionKey
    uid: str
    layout_epoch: int
    transaction: str
    members: tuple[str, ...]
    slots: tuple[SlotRecord, ...]
    lease: Lease

    def slot(self, name: str) -> SlotRecord:
        """The record of one slot; KeyError if the version has none of that name."""
        for record in self.slots:
            if record.slot == name:
                return record
        raise KeyError(f"version {self.version} has no slot {name!r}; it has {[r.slot for r in self.slots]}")


@dataclass(frozen=True, slots=True)
class CutHint:
    """Where one receiver cuts the source tensors."""

    group: str
    member: str
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class CutHints:
    """The hints of all receivers of a model, of one layout epoch; layout epoch 0 has none."""

    layout_epoch: int
    hints: tuple[CutHint, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the awaited version got: slots filled of those expected (0: no version is open), and what is wrong."""

    n_filled: int = 0
    n_slots: int = 0
    missing: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    message: str = ""


def _sorted_items(name: str, mapping: object, at_most: int) -> list[tuple[object, object]]:
    if not isinstance(mapping, Mapping) or len(mapping) > at_most:
        raise InvalidRequestError(name, f"expected a mapping of at most {at_most} entries")
    return sorted(mapping.items(), key=lambda entry: str(entry[0]))


def _check_endpoints(name: str, endpoints: object) -> Mapping[str, bytes]:
    checked = {
        limits.check_name(name, key, max_bytes=64): limits.check_bytes(
            f"{name}[{key!r:.80}]", value, at_most=limits.MAX_ENDPOINT_BYTES
        )
        for key, value in _sorted_items(name, endpoints, limits.MAX_ENDPOINTS)
    }
    limits.check_total(name, sum(map(len, checked.values())), limits.MAX_ENDPOINTS_BYTES)
    return checked


def _column(name: str, values: object, dtype: type[_Number]) -> npt.NDArray[_Number]:
    if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
        got = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise InvalidRequestError(name, f"expected a one-dimensional {dtype.__name__} array, got {got}")
    if values.size > limits.MAX_REGIONS:
        raise InvalidRequestError(name, f"{values.size} regions, at most {limits.MAX_REGIONS}")
    column = values if not values.flags.writeable and values.flags.c_contiguous else values.copy()
    column.flags.writeable = False
    return column
