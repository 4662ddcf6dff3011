"""Which run is this, what is each of its ranks, and do they make one world?

1. `RunIdentity` says which run, of which code and configuration, on how many ranks.
2. `RankInventory` says what one rank is: place, host, device, software, storage, memory.
3. `validate_inventory_consensus` judges a run's inventories together, in a fixed order.

The records are part of `reshard.rendezvous.contracts`, which is where callers import them from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reshard.rendezvous.checked_record import CheckedRecord, shown
from reshard.rendezvous.errors import ContractError, ContractTypeError

__all__ = [
    "MAX_MEMORY_BYTES",
    "MAX_WORLD_SIZE",
    "MIN_WORLD_SIZE",
    "RankInventory",
    "RunIdentity",
    "validate_inventory_consensus",
]

MIN_WORLD_SIZE = 2
MAX_WORLD_SIZE = 4096
MAX_MEMORY_BYTES = (1 << 63) - 1

_DEVICE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity(CheckedRecord):
    """Which run this is.

    Attributes
    ----------
    run_id : str
        32 lower-case hex digits, fresh per run.
    commit : str
        The code's commit, 40 lower-case hex digits.
    config_digest, model_digest : str
        SHA-256 of the run's configuration and of the model's description, 64 lower-case hex digits each.
    world_size : int
        Ranks of the run, 2 to 4096.

    Raises
    ------
    ContractError
        A field is not as said; TypeError for an unknown keyword.
    """

    run_id: str
    commit: str
    config_digest: str
    model_digest: str
    world_size: int

    def __post_init__(self) -> None:
        self._check_hex("run_id", 32)
        self._check_hex("commit", 40)
        self._check_hex("config_digest", 64)
        self._check_hex("model_digest", 64)
        self._check_int("world_size", MIN_WORLD_SIZE, MAX_WORLD_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInventory(CheckedRecord):
    """What one rank is.

    Attributes
    ----------
    rank, local_rank : int
        Its place in the world and on its host, each in [0, world_size).
    world_size : int
        Ranks that it believes in, 2 to 4096.
    host_digest, device_digest, software_digest, storage_digest : str
        SHA-256, 64 lower-case hex digits each: of the host's and the device's identity, of the installed
        software, and of the storage that all ranks share.
    device_kind : str
        ``"cpu"`` or ``"cuda"``, what the rank computes on.
    free_memory_bytes, total_memory_bytes : int
        Of the device; at least one byte in total, and no more free than that.

    Raises
    ------
    ContractError
        A field is not as said; TypeError for an unknown keyword.
    """

    rank: int
    local_rank: int
    world_size: int
    host_digest: str
    device_digest: str
    software_digest: str
    storage_digest: str
    device_kind: Literal["cpu", "cuda"]
    free_memory_bytes: int
    total_memory_bytes: int

    def __post_init__(self) -> None:
        world = self._check_int("world_size", MIN_WORLD_SIZE, MAX_WORLD_SIZE)
        self._check_int("rank", 0, world - 1)
        self._check_int("local_rank", 0, world - 1)
        for field in ("host_digest", "device_digest", "software_digest", "storage_digest"):
            self._check_hex(field, 64)
        self._check_choice("device_kind", _DEVICE_KINDS)
        total = self._check_int("total_memory_bytes", 1, MAX_MEMORY_BYTES)
        self._check_int("free_memory_bytes", 0, total)


def validate_inventory_consensus(identity: RunIdentity, records: Sequence[RankInventory]) -> tuple[RankInventory, ...]:
    """Refuse inventories that are not one consistent world of the run.

    Checked in this order: the identity's type; the records' types; one record per rank; the ranks cover the
    world exactly; all believe in the identity's world size; no two ranks share a device of a host; no two
    share a local rank on a host; all have the same software; all have the same storage.

    Parameters
    ----------
    identity : RunIdentity
        The run.
    records : list or tuple of RankInventory
        One per rank, in any order.

    Returns
    -------
    tuple of RankInventory
        The records in rank order.

    Raises
    ------
    ContractError
        Naming the field and the ranks; `failures` holds what each rank in question said.
    """
    what = "inventory"
    if type(identity) is not RunIdentity:
        raise ContractTypeError(what, "identity", type(identity).__name__, "RunIdentity")
    if not isinstance(records, list | tuple):
        raise ContractTypeError(what, "records", type(records).__name__, "a list or tuple of RankInventory")
    for index, record in enumerate(records):
        if type(record) is not RankInventory:
            raise ContractTypeError(what, f"records[{index}]", type(record).__name__, "RankInventory")
    world = identity.world_size
    if len(records) != world:
        raise ContractError(what, "records", f"{len(records)} records", f"one for each of {world} ranks")
    by_rank = sorted(records, key=lambda record: record.rank)
    seen = Counter(record.rank for record in records)
    if set(seen) != set(range(world)):
        missing = sorted(set(range(world)) - set(seen))
        twice = sorted(rank for rank, count in seen.items() if count > 1)
        beyond = sorted(rank for rank in seen if rank >= world)
        raise ContractError(
            what,
            "rank",
            f"missing {missing[:8]}, more than once {twice[:8]}, beyond the world {beyond[:8]}",
            f"each of [0, {world}) once",
        )
    _require_same(what, "world_size", {record.rank: record.world_size for record in by_rank}, world)
    _require_unique(
        what, "device_digest", {r.rank: (r.host_digest, r.device_digest) for r in by_rank}, "(host, device)"
    )
    _require_unique(what, "local_rank", {r.rank: (r.host_digest, r.local_rank) for r in by_rank}, "(host, local rank)")
    for field in ("software_digest", "storage_digest"):
        said: dict[int, object] = {record.rank: getattr(record, field) for record in by_rank}
        _require_same(what, field, said, said[0])
    return tuple(by_rank)


def _require_same(what: str, field: str, said: Mapping[int, object], expected: object) -> None:
    differing = {rank: shown(value) for rank, value in said.items() if value != expected}
    if differing:
        rank, value = next(iter(differing.items()))
        raise ContractError(
            what,
            field,
            f"{value} from rank {rank} ({len(differing)} of {len(said)} ranks differ)",
            shown(expected),
            differing,
        )


def _require_unique(what: str, field: str, said: Mapping[int, tuple[object, ...]], pair: str) -> None:
    owner: dict[tuple[object, ...], int] = {}
    for rank, key in said.items():
        first = owner.setdefault(key, rank)
        if first != rank:
            raise ContractError(
                what,
                field,
                f"ranks {first} and {rank} with the same {pair} {shown(key)}",
                f"a {pair} of its own for each rank",
                {first: shown(key), rank: shown(key)},
            )
