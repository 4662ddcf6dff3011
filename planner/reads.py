"""What does one receiver need? `ReadTable`: views of source tensors into views of destination buffers.

Requests are *source-aligned*: for each source dim d a request takes the coordinates ``start[d] + step[d] *
k`` for k in ``[0, count[d])``; element (k_0, ..., k_n) lands at element ``dst_offset + sum(k_d *
dst_stride[d])`` of its buffer. A narrow, a select (count 1), a permute (any order of strides) and a stepped
slice are all of this form; `reshard.planner.affine` turns other affine views into one or several of them.

Kinds: *copy*; *constant* (the loader fills a range; there is no source); *materialised* (the source box is
staged whole and the loader itself writes the destination). `order` is the loader's program order: where two
requests write the same bytes the greater order wins; equal orders are an error.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

import numpy as np

from reshard.planner.classify import Int64, column
from reshard.planner.dictionaries import TensorDict
from reshard.planner.errors import ConflictError, TableError
from reshard.planner.geometries import padded_dims
from reshard.planner.read_checks import KIND_CONSTANT, KIND_COPY, KIND_MATERIALISED, check_reads

RequestKind = Literal["copy", "constant", "materialised"]
_KINDS: Final[dict[str, int]] = {"copy": KIND_COPY, "constant": KIND_CONSTANT, "materialised": KIND_MATERIALISED}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A destination buffer: contiguous, row-major.

    Attributes
    ----------
    name, dtype : str
    shape : tuple of int
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One request in object form.

    Attributes
    ----------
    tensor : str
        Source tensor, "" for a constant.
    tensor_shape, tensor_dtype
        What the loader was shown; the table must agree on the shape. The table's dtype is what is read, the
        buffer's dtype is what is written.
    start, step, count : tuple of int
        Per source dim, in elements; steps are 1 or more. Constants have only `count` (of the filled view).
    buffer : int
        Index of the destination buffer.
    dst_offset_elems : int
    dst_stride_elems : tuple of int
        Per source dim, in elements of the buffer; negative where the destination runs backwards.
    order : int
    kind : {"copy", "constant", "materialised"}
    value : bytes
        One element of the buffer's dtype, for constants.
    """

    tensor: str
    tensor_shape: tuple[int, ...]
    tensor_dtype: str
    start: tuple[int, ...]
    step: tuple[int, ...]
    count: tuple[int, ...]
    buffer: int
    dst_offset_elems: int
    dst_stride_elems: tuple[int, ...]
    order: int = 0
    kind: RequestKind = "copy"
    value: bytes = b""


@dataclass(frozen=True, eq=False)
class ReadTable:
    """All read requests of one receiver.

    Parameters
    ----------
    tensors : TensorDict
        Source tensors as the loader was shown them.
    buffers : TensorDict
        Destination buffers: name, dtype, shape.
    tensor_id : int64[N]
        Into `tensors`; -1 for constants.
    start, step, count : tuple of D int64[N]
        Left-padded with 0, 1, 1.
    buffer_id, dst_offset : int64[N]
        Buffer and first element in it.
    dst_stride : tuple of D int64[N]
        Elements of the buffer, left-padded with 0.
    order, kind : int64[N]
        Program order; 0 copy, 1 constant, 2 materialised.
    values : mapping
        Request row to the constant's element bytes.

    Raises
    ------
    TableError
        A view outside its tensor or its buffer, a step under 1, a negative count, ids out of bounds,
        duplicate buffers.
    """

    tensors: TensorDict
    buffers: TensorDict
    tensor_id: Int64
    start: tuple[Int64, ...]
    step: tuple[Int64, ...]
    count: tuple[Int64, ...]
    buffer_id: Int64
    dst_offset: Int64
    dst_stride: tuple[Int64, ...]
    order: Int64
    kind: Int64
    values: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fix = object.__setattr__
        for name in ("tensor_id", "buffer_id", "dst_offset", "order", "kind"):
            fix(self, name, column(getattr(self, name), name))
        for name in ("start", "step", "count", "dst_stride"):
            fix(self, name, tuple(column(c, f"{name}[{d}]") for d, c in enumerate(getattr(self, name))))
        check_reads(self)

    @classmethod
    def build(cls, buffers: Iterable[Buffer], requests: Iterable[ReadRequest]) -> ReadTable:
        """From objects (may loop).

        Examples
        --------
        >>> table = ReadTable.build(
        ...     [Buffer("p", (2, 2), "bfloat16")],
        ...     [ReadRequest("w", (4, 2), "bfloat16", (1, 0), (1, 1), (2, 2), 0, 0, (2, 1))],
        ... )
        >>> len(table), table.requested_bytes
        (1, 8)
        """
        rows, targets = list(requests), list(buffers)
        known: dict[str, int] = {}
        first: list[ReadRequest] = []
        tensor_id, values = [], {}
        for i, row in enumerate(rows):
            if row.kind not in _KINDS:
                raise TableError(f"request {i}: kind {row.kind!r}; expected one of {list(_KINDS)}", got=row.kind)
            ranks = {len(row.count), len(row.dst_stride_elems)}
            if row.kind != "constant":
                ranks |= {len(row.start), len(row.step), len(row.tensor_shape)}
            if len(ranks) != 1:
                raise TableError(
                    f"request {i} of tensor {row.tensor!r}: start, step, count, strides and shape have ranks "
                    f"{sorted(ranks)}; expected one rank",
                    tensor=row.tensor,
                    got=sorted(ranks),
                    expected=len(row.tensor_shape),
                )
            if row.kind == "constant":
                tensor_id.append(-1)
                values[i] = bytes(row.value)
                continue
            t = known.setdefault(row.tensor, len(first))
            if t == len(first):
                first.append(row)
            if (tuple(row.tensor_shape), row.tensor_dtype) != (tuple(first[t].tensor_shape), first[t].tensor_dtype):
                raise ConflictError(
                    f"request {i}: tensor {row.tensor!r} is {row.tensor_dtype} {tuple(row.tensor_shape)} here and "
                    f"{first[t].tensor_dtype} {tuple(first[t].tensor_shape)} in an earlier request",
                    holders=(),
                    tensor=row.tensor,
                    got=(row.tensor_dtype, tuple(row.tensor_shape)),
                    expected=(first[t].tensor_dtype, tuple(first[t].tensor_shape)),
                )
            tensor_id.append(t)
        n_dims = max((len(row.count) for row in rows), default=0)
        blank = [row.kind == "constant" for row in rows]
        starts = [(0,) * len(row.count) if c else row.start for row, c in zip(rows, blank, strict=True)]
        steps = [(1,) * len(row.count) if c else row.step for row, c in zip(rows, blank, strict=True)]
        return cls(
            TensorDict.build(list(known), [r.tensor_dtype for r in first], [r.tensor_shape for r in first]),
            TensorDict.build([b.name for b in targets], [b.dtype for b in targets], [b.shape for b in targets]),
            column(tensor_id, "tensor_id"),
            padded_dims(starts, n_dims, 0),
            padded_dims(steps, n_dims, 1),
            padded_dims([row.count for row in rows], n_dims, 1),
            column([row.buffer for row in rows], "buffer_id"),
            column([row.dst_offset_elems for row in rows], "dst_offset"),
            padded_dims([row.dst_stride_elems for row in rows], n_dims, 0),
            column([row.order for row in rows], "order"),
            column([_KINDS[row.kind] for row in rows], "kind"),
            values,
        )

    def __len__(self) -> int:
        return len(self.tensor_id)

    @property
    def n_dims(self) -> int:
        """Number of (padded) dim columns."""
        return len(self.count)

    def where(self, row: int) -> str:
        """A request in words, for error messages."""
        tensor, buffer = self.names_of(row)
        return f"request {row} (tensor {tensor!r} into buffer {buffer!r})"

    def names_of(self, row: int) -> tuple[str, str]:
        """Tensor and buffer of a request ("" and the number where ids are out of bounds)."""
        t, b = int(self.tensor_id[row]), int(self.buffer_id[row])
        tensor = self.tensors.name(t) if 0 <= t < len(self.tensors) else ""
        return tensor, self.buffers.name(b) if 0 <= b < len(self.buffers) else str(b)

    @cached_property
    def buffer_elems(self) -> Int64:
        """int64[B]: elements of each destination buffer."""
        out = np.ones(len(self.buffers), np.int64)
        for dim in self.buffers.shape:
            out *= dim
        return out

    @cached_property
    def dst_reach(self) -> tuple[Int64, Int64]:
        """Least and greatest destination element of each request (equal to the offset where it is empty)."""
        first, last = self.dst_offset.copy(), self.dst_offset.copy()
        for count, stride in zip(self.count, self.dst_stride, strict=True):
            far = np.maximum(count - 1, 0) * stride
            first += np.minimum(far, 0)
            last += np.maximum(far, 0)
        return first, last

    @cached_property
    def volume(self) -> Int64:
        """int64[N]: elements of each request."""
        out = np.ones(len(self), np.int64)
        for count in self.count:
            out *= count
        return column(out, "volume")

    @cached_property
    def buffer_bytes(self) -> Int64:
        """int64[B]: bytes of each destination buffer."""
        return column(self.buffer_elems * self.buffers.bits // 8, "buffer_bytes")

    @property
    def requested_bytes(self) -> int:
        """Destination bytes of all requests, as if none overlapped."""
        return int((self.volume * self.buffers.bits[self.buffer_id] // 8).sum())

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that address the content."""
        hasher = hashlib.sha256(b"reshard.ReadTable.1\0")
        hasher.update(self.tensors.digest + self.buffers.digest)
        hasher.update(np.array([len(self), self.n_dims], np.int64).tobytes())
        columns = (self.tensor_id, self.buffer_id, self.dst_offset, self.order, self.kind)
        for values in (*columns, *self.start, *self.step, *self.count, *self.dst_stride):
            hasher.update(values.tobytes())
        for row, value in sorted(self.values.items()):
            hasher.update(f"{row}:{value.hex()};".encode())
        return hasher.digest()

    def take(self, rows: Int64) -> ReadTable:
        """Some of the requests (all buffers and tensors stay)."""
        position = {old: new for new, old in enumerate(rows.tolist())}
        return ReadTable(
            self.tensors,
            self.buffers,
            self.tensor_id[rows],
            tuple(c[rows] for c in self.start),
            tuple(c[rows] for c in self.step),
            tuple(c[rows] for c in self.count),
            self.buffer_id[rows],
            self.dst_offset[rows],
            tuple(c[rows] for c in self.dst_stride),
            self.order[rows],
            self.kind[rows],
            {position[row]: value for row, value in self.values.items() if row in position},
        )

    def only(self, patterns: Sequence[str]) -> ReadTable:
        """Requests whose source tensor (or, for constants, buffer) matches one of the glob patterns."""
        tensors = np.array(
            [any(fnmatch.fnmatchcase(n, p) for p in patterns) for n in self.tensors.names_list], np.bool_
        )
        buffers = np.array(
            [any(fnmatch.fnmatchcase(n, p) for p in patterns) for n in self.buffers.names_list], np.bool_
        )
        constant = self.kind == KIND_CONSTANT
        keep = np.zeros(len(self), np.bool_)
        if len(tensors):
            keep |= tensors[np.where(constant, 0, self.tensor_id)] & ~constant
        if len(buffers):
            keep |= buffers[self.buffer_id] & constant
        return self.take(np.flatnonzero(keep))

    @staticmethod
    def concat(tables: Sequence[ReadTable]) -> ReadTable:
        """Tables of one receiver, one after another.

        Buffers of one name are one buffer; program order runs on.

        Raises
        ------
        ConflictError
            One name with two shapes or dtypes.
        """
        n_dims = max((t.n_dims for t in tables), default=0)
        tensors, tensor_maps = _union([t.tensors for t in tables], "tensor")
        buffers, buffer_maps = _union([t.buffers for t in tables], "buffer")

        def dims(name: str, pad: int) -> tuple[Int64, ...]:
            out = []
            for d in range(n_dims):
                back = n_dims - d
                parts = [
                    getattr(t, name)[-back] if back <= t.n_dims else np.full(len(t), pad, np.int64) for t in tables
                ]
                out.append(np.concatenate(parts) if parts else np.zeros(0, np.int64))
            return tuple(out)

        def rows(parts: list[Int64]) -> Int64:
            return np.concatenate(parts) if parts else np.zeros(0, np.int64)

        tensor_id = rows(
            [
                np.where(t.tensor_id >= 0, m[np.maximum(t.tensor_id, 0)], -1) if len(m) else t.tensor_id
                for t, m in zip(tables, tensor_maps, strict=True)
            ]
        )
        orders, next_order = [], 0
        for t in tables:
            low = int(t.order.min()) if len(t) else 0
            orders.append(t.order - low + next_order)
            next_order += (int(t.order.max()) - low + 1) if len(t) else 0
        values: dict[int, bytes] = {}
        base = 0
        for t in tables:
            values.update({base + row: value for row, value in t.values.items()})
            base += len(t)
        return ReadTable(
            tensors,
            buffers,
            tensor_id,
            dims("start", 0),
            dims("step", 1),
            dims("count", 1),
            rows([m[t.buffer_id] for t, m in zip(tables, buffer_maps, strict=True)]),
            rows([t.dst_offset for t in tables]),
            dims("dst_stride", 0),
            rows(orders),
            rows([t.kind for t in tables]),
            values,
        )


def _union(dictionaries: Sequence[TensorDict], what: str) -> tuple[TensorDict, list[Int64]]:
    known: dict[str, int] = {}
    rows: list[tuple[TensorDict, int]] = []
    maps = []
    for d in dictionaries:
        ids = []
        for i, name in enumerate(d.names_list):
            j = known.setdefault(name, len(rows))
            if j == len(rows):
                rows.append((d, i))
            home, k = rows[j]
            mine, theirs = (d.dtype_label(i), d.shape_of(i)), (home.dtype_label(k), home.shape_of(k))
            if mine != theirs:
                raise ConflictError(
                    f"{what} {name!r} is {mine[0]} {mine[1]} in one read table and {theirs[0]} {theirs[1]} in another",
                    holders=(),
                    tensor=name,
                    got=mine,
                    expected=theirs,
                )
            ids.append(j)
        maps.append(column(ids, "id map"))
    union = TensorDict.build(list(known), [d.dtype_label(i) for d, i in rows], [d.shape_of(i) for d, i in rows])
    return union, maps


__all__ = [
    "KIND_CONSTANT",
    "KIND_COPY",
    "KIND_MATERIALISED",
    "Buffer",
    "ReadRequest",
    "ReadTable",
    "RequestKind",
]
