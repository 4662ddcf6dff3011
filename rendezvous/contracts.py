"""The records that ranks of one process group agree on before they act.

Each record is frozen, is checked when it is made, and refuses with a `ContractError` that names the field:

1. `RunIdentity`: which run this is, of which code and configuration, on how many ranks.
2. `RankInventory`: what one rank is: place, host, device, software, storage, memory.
3. `TopologyPlan`: who meets where, over what.
4. `LogicalPlacement`: how one matrix is dealt to the ranks in equal shards.
5. `StageMessage`: what one rank says about one stage.

`validate_inventory_consensus` judges a run's inventories together. Records travel as canonical JSON
(`reshard.rendezvous.canonical`); `CheckedRecord.from_plain` makes them of what was decoded, with the same
checks.

Integers are `int` itself: a boolean, or any other subclass, is not one.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

from reshard.planner.dtypes import dtype as planner_dtype
from reshard.planner.errors import DTypeError
from reshard.rendezvous.checked_record import CheckedRecord, shown
from reshard.rendezvous.errors import ContractError, ContractTypeError
from reshard.rendezvous.stages import Stage

__all__ = [
    "MAX_DIM_ELEMS",
    "MAX_MEMORY_BYTES",
    "MAX_NAME_BYTES",
    "MAX_SEQUENCE",
    "MAX_WORLD_SIZE",
    "MIN_WORLD_SIZE",
    "LogicalPlacement",
    "PlacementStyle",
    "RankInventory",
    "RunIdentity",
    "StageMessage",
    "TopologyPlan",
    "Vote",
    "validate_inventory_consensus",
]

MIN_WORLD_SIZE = 2
MAX_WORLD_SIZE = 4096
MAX_NAME_BYTES = 4096
MAX_DIM_ELEMS = 1 << 40
MAX_MEMORY_BYTES = (1 << 63) - 1
MAX_SEQUENCE = (1 << 63) - 1

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_ERROR_CODE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
_MAX_ERROR_CODE_CHARS = 64
_MAX_COORDINATOR_CHARS = 262  # a host name of 253, brackets, a colon and five digits

_DEVICE_KINDS = ("cpu", "cuda")
_BACKENDS = ("gloo", "nccl")


class PlacementStyle(Enum):
    """How a matrix is dealt to ranks: column-wise splits dim 0 (output features), row-wise dim 1."""

    COLUMN_WISE = "column-wise"
    ROW_WISE = "row-wise"
    REPLICATED = "replicated"


class Vote(Enum):
    """What a rank says about a stage."""

    COMMIT = "commit"
    ABORT = "abort"


_STYLE_DIM: Mapping[PlacementStyle, int | None] = {
    PlacementStyle.COLUMN_WISE: 0,
    PlacementStyle.ROW_WISE: 1,
    PlacementStyle.REPLICATED: None,
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyPlan(CheckedRecord):
    """Who meets where, over what.

    Attributes
    ----------
    world_size : int
        Ranks, 2 to 4096.
    coordinator : str
        ``host:port`` of the process group's store: a host name, an IPv4 address or a bracketed IPv6 address,
        and a port in [1, 65535].
    backend : str
        ``"gloo"`` or ``"nccl"``, the process group's collective backend.
    placement_digest : str
        `contract_digest` of the placements, 64 lower-case hex digits.

    Raises
    ------
    ContractError
        A field is not as said; TypeError for an unknown keyword.
    """

    world_size: int
    coordinator: str
    backend: Literal["gloo", "nccl"]
    placement_digest: str

    def __post_init__(self) -> None:
        self._check_int("world_size", MIN_WORLD_SIZE, MAX_WORLD_SIZE)
        coordinator = self._check_text("coordinator", _MAX_COORDINATOR_CHARS)
        host, _, port = coordinator.rpartition(":")
        if not _is_host(host) or not _is_port(port):
            raise self._fault("coordinator", coordinator, "host:port with a port in [1, 65535]")
        self._check_choice("backend", _BACKENDS)
        self._check_hex("placement_digest", 64)


def _is_host(text: str) -> bool:
    if text.startswith("[") and text.endswith("]"):
        try:
            ipaddress.IPv6Address(text[1:-1])
        except ValueError:
            return False
        return True
    return len(text) <= 253 and _HOST.fullmatch(text) is not None


def _is_port(text: str) -> bool:
    # No sign, no leading zero, no digits of other scripts: one spelling per port.
    return re.fullmatch(r"[1-9][0-9]{0,4}", text) is not None and int(text) <= 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalPlacement(CheckedRecord):
    """How one matrix is dealt to all ranks in equal shards.

    Attributes
    ----------
    name : str
        The matrix, 1 byte to 4 KiB of UTF-8 with no NUL.
    dtype : str
        A label of the planner's allow-list, without ``torch.``.
    style : PlacementStyle
        Column-wise (dim 0 is split), row-wise (dim 1) or replicated.
    shard_dim : int or None
        The dim that is split: 0, 1, or None when replicated; must agree with `style`.
    world_size : int
        Ranks, 2 to 4096.
    global_shape, local_shape : tuple of two int
        In elements, each 1 to 2**40. The split dim divides exactly by `world_size` and `local_shape` is what
        comes out.

    Raises
    ------
    ContractError
        A field is not as said; TypeError for an unknown keyword.
    """

    ENUMS: ClassVar[Mapping[str, type[Enum]]] = {"style": PlacementStyle}
    TUPLES: ClassVar[frozenset[str]] = frozenset({"global_shape", "local_shape"})

    name: str
    dtype: str
    style: PlacementStyle
    shard_dim: int | None
    world_size: int
    global_shape: tuple[int, int]
    local_shape: tuple[int, int]

    def __post_init__(self) -> None:
        self._check_name()
        label = self._check_text("dtype", 64)
        try:
            known = planner_dtype(label).label == label
        except DTypeError:
            known = False
        if not known:
            raise self._fault("dtype", label, "a dtype of the planner's allow-list")
        style = self._check_enum("style", PlacementStyle)
        dim = _STYLE_DIM[style]
        if self.shard_dim is not None:
            self._check_int("shard_dim", 0, 1)
        if self.shard_dim != dim:
            raise self._fault("shard_dim", self.shard_dim, f"{dim} for a {style.value} placement")
        world = self._check_int("world_size", MIN_WORLD_SIZE, MAX_WORLD_SIZE)
        self._check_shape("global_shape")
        self._check_shape("local_shape")
        expected = list(self.global_shape)
        if dim is not None:
            expected[dim], rest = divmod(self.global_shape[dim], world)
            if rest:
                raise self._fault("global_shape", self.global_shape, f"dim {dim} to divide exactly by {world} ranks")
        if self.local_shape != tuple(expected):
            raise self._fault("local_shape", self.local_shape, f"{tuple(expected)}")

    def _check_name(self) -> None:
        name = self._check_text("name", MAX_NAME_BYTES)
        # Lone surrogates have no UTF-8 and are counted as what they would be: refused below.
        n_bytes = len(name.encode("utf-8", "surrogatepass"))
        if n_bytes > MAX_NAME_BYTES or "\x00" in name or any("\ud800" <= char <= "\udfff" for char in name):
            raise self._fault("name", name, f"at most {MAX_NAME_BYTES} bytes of UTF-8 with no NUL")

    def _check_shape(self, field: str) -> None:
        shape = self._exact(field, getattr(self, field), tuple)
        if len(shape) != 2:
            raise self._fault(field, shape, "two sizes")
        for size in shape:
            self._exact(field, size, int)
            if not 1 <= size <= MAX_DIM_ELEMS:
                raise self._fault(field, shape, f"sizes in [1, {MAX_DIM_ELEMS}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMessage(CheckedRecord):
    """What one rank says about one stage.

    Attributes
    ----------
    sequence : int
        Which round of the conversation this is, from 0.
    stage : Stage
        The stage that is voted on.
    vote : Vote
        COMMIT or ABORT.
    error_code : str or None
        Why, always with an abort and never without one: upper-case words joined by underscores, ``AAA_BBB``,
        at most 64 characters.

    Raises
    ------
    ContractError
        A field is not as said; TypeError for an unknown keyword.
    """

    ENUMS: ClassVar[Mapping[str, type[Enum]]] = {"stage": Stage, "vote": Vote}

    sequence: int
    stage: Stage
    vote: Vote
    error_code: str | None = None

    def __post_init__(self) -> None:
        self._check_int("sequence", 0, MAX_SEQUENCE)
        self._check_enum("stage", Stage)
        vote = self._check_enum("vote", Vote)
        if vote is Vote.COMMIT:
            if self.error_code is not None:
                raise self._fault("error_code", self.error_code, "None with a commit vote")
            return
        if self.error_code is None:
            raise self._fault("error_code", None, "a code like AAA_BBB with an abort vote")
        code = self._check_text("error_code", _MAX_ERROR_CODE_CHARS)
        if not _ERROR_CODE.fullmatch(code):
            raise self._fault("error_code", code, "a code like AAA_BBB")


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
