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
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

from reshard.planner.dtypes import dtype as planner_dtype
from reshard.planner.errors import DTypeError
from reshard.rendezvous.checked_record import CheckedRecord
from reshard.rendezvous.inventory import (
    MAX_MEMORY_BYTES,
    MAX_WORLD_SIZE,
    MIN_WORLD_SIZE,
    RankInventory,
    RunIdentity,
    validate_inventory_consensus,
)
from reshard.rendezvous.limits import MAX_DIM_ELEMS, MAX_NAME_BYTES
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

MAX_SEQUENCE = (1 << 63) - 1

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_ERROR_CODE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
_MAX_ERROR_CODE_CHARS = 64
_MAX_COORDINATOR_CHARS = 262  # a host name of 253, brackets, a colon and five digits

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
