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
from reshard.planner.dictionaries import GeometryDict, TensorDict, check_label, check_name
from reshard.planner.dtypes import dtype
from reshard.planner.errors import ConflictError, DTypeError, TableError

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
        self._check()
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

    def _error(self, row: int, message: str, *, dim: int = -1, got: object, expected: object) -> TableError:
        name = self.tensors.name(int(self.tensor_id[row]))
        return TableError(
            f"holder {self.holder.name!r}, tensor {name!r}, shard row {row}: {message}",
            tensor=name,
            dim=dim,
            got=got,
            expected=expected,
            where=self.holder.name,
        )

    def _check_ids(self, name: str, bound: int) -> None:
        ids: Int64 = getattr(self, name)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= bound):
            bad = int(np.argmax((ids < 0) | (ids >= bound)))
            raise TableError(
                f"holder {self.holder.name!r}, shard row {bad}: {name} {int(ids[bad])}; expected 0 to {bound - 1}",
                got=int(ids[bad]),
                expected=bound - 1,
                where=self.holder.name,
            )

    def _check(self) -> None:
        n, holder = len(self.tensor_id), self.holder.name
        for what, label in (("layout", self.layout), ("claim", self.claim)):
            if label or what == "layout":
                check_label(label, f"holder {holder!r}: {what}")
        for name in ("geometry_id", "region", "offset_bytes", "replica_group"):
            if len(getattr(self, name)) != n:
                raise TableError(
                    f"holder {holder!r}: column {name} has {len(getattr(self, name))} rows; expected {n}",
                    got=len(getattr(self, name)),
                    expected=n,
                    where=holder,
                )
        if len(self.region_bytes) and int(self.region_bytes.min()) < 0:
            raise TableError(
                f"holder {holder!r}: region {int(self.region_bytes.argmin())} has {int(self.region_bytes.min())} bytes",
                got=int(self.region_bytes.min()),
                expected=0,
                where=holder,
            )
        if n == 0:
            return
        if int(self.replica_group.min()) < -1:
            bad = int(self.replica_group.argmin())
            raise self._error(
                bad,
                f"replica_group {int(self.replica_group[bad])}; expected -1 or more",
                got=int(self.replica_group[bad]),
                expected=-1,
            )
        self._check_ids("tensor_id", len(self.tensors))
        self._check_ids("geometry_id", len(self.geometries))
        shard_bytes = self._check_boxes()
        self._check_extent(shard_bytes)

    def _check_boxes(self) -> Int64:
        """Check each (shape class, geometry) pair that occurs; return int64[N] bytes of each shard."""
        shape_class, first = self.tensors.shape_class
        n_geometries = len(self.geometries)
        key = shape_class[self.tensor_id] * n_geometries + self.geometry_id
        n_keys = len(first) * n_geometries
        slot: Int64 | None = None
        if n_keys <= max(_TABLE_LIMIT, 4 * len(key)):
            seen = np.zeros(n_keys, np.bool_)
            seen[key] = True
            pairs = np.flatnonzero(seen)
        else:
            pairs, slot = np.unique(key, return_inverse=True)
        tensor, box = first[pairs // n_geometries], pairs % n_geometries
        wrong = self.geometries.ndim[box] != self.tensors.ndim[tensor]
        if wrong.any():
            row = int(np.argmax(key == pairs[np.argmax(wrong)]))
            got, expected = (
                int(self.geometries.ndim[self.geometry_id[row]]),
                int(self.tensors.ndim[self.tensor_id[row]]),
            )
            raise self._error(row, f"box of rank {got}; expected rank {expected}", got=got, expected=expected)
        n_dims = max(self.tensors.n_dims, self.geometries.n_dims)
        volume = np.ones(len(pairs), np.int64)
        for d in range(-n_dims, 0):
            if -d > self.geometries.n_dims or -d > self.tensors.n_dims:
                continue
            start, stop = self.geometries.start[d][box], self.geometries.stop[d][box]
            size = self.tensors.shape[d][tensor]
            wrong = stop > size
            if wrong.any():
                pair = int(np.argmax(wrong))
                row = int(np.argmax(key == pairs[pair]))
                dim = d + int(self.tensors.ndim[tensor[pair]])
                got_box = (int(start[pair]), int(stop[pair]))
                raise self._error(
                    row,
                    f"dim {dim}: box [{got_box[0]}, {got_box[1]}) outside the global size {int(size[pair])}",
                    dim=dim,
                    got=got_box,
                    expected=(0, int(size[pair])),
                )
            volume *= stop - start
        bits = self.tensors.bits[tensor]
        packed = bits < 8
        if packed.any():
            pack = 8 // np.minimum(bits, 8)
            cut = packed & (volume > 0)
            cut &= (self.geometries.start[-1][box] % pack != 0) | (self.geometries.stop[-1][box] % pack != 0)
            if cut.any():
                pair = int(np.argmax(cut))
                row = int(np.argmax(key == pairs[pair]))
                name = self.tensors.name(int(self.tensor_id[row]))
                span = (int(self.geometries.start[-1][box[pair]]), int(self.geometries.stop[-1][box[pair]]))
                raise DTypeError(
                    f"holder {self.holder.name!r}, tensor {name!r}: last dim cut at [{span[0]}, {span[1]}) falls "
                    f"inside a byte of {int(pack[pair])} packed elements",
                    tensor=name,
                    got=span,
                    expected=int(pack[pair]),
                )
        pair_bytes = volume * bits // 8
        if slot is not None:
            by_row: Int64 = pair_bytes[slot]
            return by_row
        table = np.zeros(n_keys, np.int64)
        table[pairs] = pair_bytes
        out: Int64 = table[key]
        return out

    def _check_extent(self, shard_bytes: Int64) -> None:
        n_regions = len(self.region_bytes)
        if int(self.offset_bytes.min()) < 0:
            row = int(self.offset_bytes.argmin())
            got = int(self.offset_bytes[row])
            raise self._error(row, f"offset {got} bytes; expected 0 or more", got=got, expected=0)
        if n_regions == 1 and int(self.region.min()) == 0 == int(self.region.max()):
            limit = self.region_bytes[0]
            wrong = shard_bytes > limit - self.offset_bytes
        else:
            inside = (self.region >= 0) & (self.region < n_regions)
            wrong = ~inside & (shard_bytes > 0)
            if wrong.any():
                row = int(np.argmax(wrong))
                got = int(self.region[row])
                raise self._error(row, f"region {got}; expected 0 to {n_regions - 1}", got=got, expected=n_regions - 1)
            padded = np.append(self.region_bytes, np.int64(np.iinfo(np.int64).max))
            wrong = shard_bytes > padded[np.where(inside, self.region, n_regions)] - self.offset_bytes
        wrong &= shard_bytes > 0
        if wrong.any():
            row = int(np.argmax(wrong))
            begin, size = int(self.offset_bytes[row]), int(shard_bytes[row])
            region = int(self.region[row])
            limit_bytes = int(self.region_bytes[region])
            raise self._error(
                row,
                f"bytes [{begin}, {begin + size}) outside region {region} of {limit_bytes} bytes",
                got=begin + size,
                expected=limit_bytes,
            )

    @cached_property
    def digest(self) -> bytes:
        """32 bytes over everything but the holder: equal digests mean equal tables."""
        hasher = hashlib.sha256(b"reshard.ShardPart.1\0")
        hasher.update(self.tensors.digest)
        hasher.update(self.geometries.digest)
        hasher.update(np.array([len(self), len(self.region_bytes)], np.int64).tobytes())
        for name in ("tensor_id", "geometry_id", "region", "offset_bytes", "replica_group", "region_bytes"):
            hasher.update(getattr(self, name).tobytes())
        hasher.update(f"{self.layout}\0{self.claim}".encode())
        return hasher.digest()

    def with_holder(self, holder: Holder) -> ShardPart:
        """The same table for another holder (no column is copied or checked again)."""
        twin = object.__new__(ShardPart)
        for name, value in self.__dict__.items():
            object.__setattr__(twin, name, value)
        object.__setattr__(twin, "holder", holder)
        return twin
