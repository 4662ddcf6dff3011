"""What does one holder hold? `ShardPart`: the columns of one holder's shards, checked once.

1. Columns are one-dimensional, contiguous, read-only int64 (built from Python objects, or taken from the wire
   as they are).
2. Ids are untrusted: they are checked against the two dictionaries' bounds.
3. Each (tensor shape, geometry) pair that occurs is checked once, not each shard: a box lies inside its
   tensor.
4. Each shard lies inside its region: offset + bytes <= region bytes. Zero-size shards are kept and yield
   nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from reshard.planner.classify import Int64, column
from reshard.planner.dictionaries import TensorDict
from reshard.planner.digesting import digest_column
from reshard.planner.dtypes import dtype
from reshard.planner.errors import ConflictError, TableError
from reshard.planner.geometries import GeometryDict
from reshard.planner.names import check_name
from reshard.planner.shard_checks import check_part

Memory = Literal["dram", "vram"]
_TABLE_LIMIT = 1 << 22


@dataclass(frozen=True, slots=True)
class Holder:
    """Who owns the memory.

    Attributes
    ----------
    name : str
        The slot's name, stable over the lives of its process.
    host : str
        For the `nearest` policy.
    memory : {"dram", "vram"}
    device : int
        Device ordinal in the holder's process.
    """

    name: str
    host: str = ""
    memory: Memory = "dram"
    device: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.memory not in ("dram", "vram"):
            raise TableError(
                f"holder {self.name!r}: memory {self.memory!r}; expected 'dram' or 'vram'",
                got=self.memory,
                expected=("dram", "vram"),
                where=self.name,
            )
        if not 0 <= self.device < 1 << 31:
            raise TableError(
                f"holder {self.name!r}: device {self.device}; expected 0 to 2**31",
                got=self.device,
                expected=0,
                where=self.name,
            )


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard in object form, for building parts by hand.

    Attributes
    ----------
    tensor, dtype : str
    shape : tuple of int
        Global shape of the tensor.
    start, stop : tuple of int
        The box, half-open, in global elements.
    region : int
        Index into the part's `region_bytes`.
    offset_bytes : int
        Where the box starts in the region.
    replica_group : int
        Holders of one box with the same non-negative group claim equal content.
    axes : tuple of str, optional
        Names of the stored axes, where they matter.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    region: int = 0
    offset_bytes: int = 0
    replica_group: int = -1
    axes: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class ShardPart:
    """The shards of one holder.

    Parameters
    ----------
    holder : Holder
    tensors : TensorDict
    geometries : GeometryDict
    tensor_id, geometry_id, region, offset_bytes, replica_group : int64[N]
        One row a shard; `replica_group` is -1 where nothing is claimed.
    region_bytes : int64[R]
        Sizes of the holder's regions.
    layout : str
        Parts of one layout never overlap.
    claim : str
        Layouts with the same non-empty claim hold equal content.

    Attributes
    ----------
    sorted_rows, unique_rows, one_group, one_region : bool
        What the planner's fast paths ask: tensor ids ascend, and strictly; one replica group, one region in
        all rows.

    Raises
    ------
    TableError, DTypeError
        Any rule of the module's docstring broken; the message names holder, tensor, dim, got and expected.
    """

    holder: Holder
    tensors: TensorDict
    geometries: GeometryDict
    tensor_id: Int64
    geometry_id: Int64
    region: Int64
    offset_bytes: Int64
    replica_group: Int64
    region_bytes: Int64
    layout: str = "default"
    claim: str = ""
    sorted_rows: bool = field(init=False, default=True)
    unique_rows: bool = field(init=False, default=True)
    one_group: bool = field(init=False, default=True)
    one_region: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        fix = object.__setattr__
        for name in ("tensor_id", "geometry_id", "region", "offset_bytes", "replica_group", "region_bytes"):
            fix(self, name, column(getattr(self, name), name))
        check_part(self)
        step = np.diff(self.tensor_id)
        lowest = int(step.min()) if len(step) else 1
        fix(self, "sorted_rows", lowest >= 0)
        fix(self, "unique_rows", lowest > 0)
        for flag, values in (("one_group", self.replica_group), ("one_region", self.region)):
            fix(self, flag, len(values) == 0 or bool(values.min() == values.max()))

    @classmethod
    def from_shards(
        cls,
        holder: Holder,
        shards: Iterable[Shard],
        region_bytes: Iterable[int],
        layout: str = "default",
        claim: str = "",
    ) -> ShardPart:
        """Build from objects.

        Parameters
        ----------
        holder : Holder
        shards : iterable of Shard
        region_bytes : iterable of int
            Bytes of each region that the shards refer to.
        layout, claim : str

        Raises
        ------
        TableError, DTypeError
            As for the columns; also a tensor with two shapes, dtypes or axes in one part.

        Examples
        --------
        >>> part = ShardPart.from_shards(Holder("rank0"), [Shard("w", "bfloat16", (4, 2), (0, 0), (2, 2))], [8])
        >>> len(part), part.tensors.names_list
        (1, ['w'])
        """
        rows = list(shards)
        tensors: dict[str, int] = {}
        first: list[Shard] = []
        boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        tensor_id, geometry_id = [], []
        for row in rows:
            start, stop, shape = tuple(row.start), tuple(row.stop), tuple(row.shape)
            if len(start) != len(shape) or len(stop) != len(shape):
                raise TableError(
                    f"holder {holder.name!r}, tensor {row.tensor!r}: box of rank {len(start)}/{len(stop)} in a tensor "
                    f"of rank {len(shape)}",
                    tensor=row.tensor,
                    got=len(start),
                    expected=len(shape),
                    where=holder.name,
                )
            t = tensors.setdefault(row.tensor, len(first))
            if t == len(first):
                dtype(row.dtype)
                first.append(row)
            known = first[t]
            if (tuple(known.shape), known.dtype, known.axes) != (shape, row.dtype, row.axes):
                raise ConflictError(
                    f"holder {holder.name!r}, tensor {row.tensor!r}: got {row.dtype} {shape} axes {row.axes}; "
                    f"expected {known.dtype} {tuple(known.shape)} axes {known.axes} as in its first shard",
                    holders=(holder.name,),
                    tensor=row.tensor,
                    got=(row.dtype, shape),
                    expected=(known.dtype, tuple(known.shape)),
                    where=holder.name,
                )
            tensor_id.append(t)
            geometry_id.append(boxes.setdefault((start, stop), len(boxes)))
        axes = {t: tuple(row.axes) for t, row in enumerate(first) if row.axes is not None}
        return cls(
            holder,
            TensorDict.build(list(tensors), [r.dtype for r in first], [r.shape for r in first], axes),
            GeometryDict.build(boxes),
            column(tensor_id, "tensor_id"),
            column(geometry_id, "geometry_id"),
            column([row.region for row in rows], "region"),
            column([row.offset_bytes for row in rows], "offset_bytes"),
            column([row.replica_group for row in rows], "replica_group"),
            column(list(region_bytes), "region_bytes"),
            layout,
            claim,
        )

    def __len__(self) -> int:
        return len(self.tensor_id)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes over everything but the holder: equal digests mean equal tables."""
        hasher = hashlib.sha256(b"reshard.ShardPart.2\0")
        hasher.update(self.tensors.digest)
        hasher.update(self.geometries.digest)
        for name in ("tensor_id", "geometry_id", "region", "offset_bytes", "replica_group", "region_bytes"):
            digest_column(hasher, getattr(self, name))
        hasher.update(f"{self.layout}\0{self.claim}".encode())
        return hasher.digest()

    def with_holder(self, holder: Holder) -> ShardPart:
        """The same table for another holder (no column is copied or checked again)."""
        twin = object.__new__(ShardPart)
        for name, value in self.__dict__.items():
            object.__setattr__(twin, name, value)
        object.__setattr__(twin, "holder", holder)
        return twin
