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
from reshard.planner.dictionaries import TensorDict, padded_dims
from reshard.planner.dtypes import dtype
from reshard.planner.errors import ConflictError, DTypeError, TableError

RequestKind = Literal["copy", "constant", "materialised"]
KIND_COPY: Final = 0
KIND_CONSTANT: Final = 1
KIND_MATERIALISED: Final = 2
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
        self._check()

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
        return self._where(row)[1]

    def _where(self, row: int) -> tuple[str, str]:
        t, b = int(self.tensor_id[row]), int(self.buffer_id[row])
        tensor = self.tensors.name(t) if 0 <= t < len(self.tensors) else ""
        buffer = self.buffers.name(b) if 0 <= b < len(self.buffers) else str(b)
        return tensor, f"request {row} (tensor {tensor!r} into buffer {buffer!r})"

    def _refuse(self, wrong: np.ndarray, message: str, got: Int64, expected: object, dim: int = -1) -> None:
        if not wrong.any():
            return
        row = int(np.argmax(wrong))
        tensor, where = self._where(row)
        real = dim
        if dim >= 0:
            t = int(self.tensor_id[row])
            real = dim - (self.n_dims - int(self.tensors.ndim[t])) if t >= 0 else dim
        limit = int(expected[row]) if isinstance(expected, np.ndarray) else expected
        raise TableError(
            f"{where}{f' dim {real}' if dim >= 0 else ''}: {message} {int(got[row])}; expected {limit}",
            tensor=tensor,
            dim=real,
            got=int(got[row]),
            expected=limit,
            where=where,
        )

    def _check(self) -> None:
        n, n_dims = len(self.tensor_id), len(self.count)
        for name in ("buffer_id", "dst_offset", "order", "kind"):
            if len(getattr(self, name)) != n:
                raise TableError(f"read table: {name} has {len(getattr(self, name))} rows; expected {n}", expected=n)
        for name in ("start", "step", "count", "dst_stride"):
            dims = getattr(self, name)
            if len(dims) != n_dims or any(len(c) != n for c in dims):
                raise TableError(
                    f"read table: {name} needs {n_dims} columns of {n} rows", got=len(dims), expected=n_dims
                )
        if n == 0:
            return
        kind, tensor, buffer = self.kind, self.tensor_id, self.buffer_id
        self._refuse((kind < 0) | (kind > 2), "kind", kind, 2)
        constant = kind == KIND_CONSTANT
        self._refuse((tensor < 0) & ~constant, "tensor id", tensor, len(self.tensors) - 1)
        self._refuse(tensor >= len(self.tensors), "tensor id", tensor, len(self.tensors) - 1)
        self._refuse((buffer < 0) | (buffer >= len(self.buffers)), "buffer id", buffer, len(self.buffers) - 1)
        self._refuse(self.dst_offset < 0, "destination offset", self.dst_offset, 0)
        safe = np.where(tensor >= 0, tensor, 0) if constant.any() else tensor
        limit = self._buffer_elems[buffer]
        empty = np.zeros(n, np.bool_)
        for d, (start, step, count) in enumerate(zip(self.start, self.step, self.count, strict=True)):
            self._refuse(step < 1, "step", step, 1, d)
            self._refuse(start < 0, "start", start, 0, d)
            self._refuse(count < 0, "count", count, 0, d)
            empty |= count == 0
            back = n_dims - d
            if len(self.tensors):
                size = self.tensors.shape[-back][safe] if back <= self.tensors.n_dims else np.ones(n, np.int64)
                # (size - 1 - start) // step + 1 coordinates fit; divisions cannot overflow where products could
                room = np.where(start < size, (size - 1 - start) // step + 1, 0)
                self._refuse((count > room) & ~constant, "elements requested", count, room, d)
                padding = (back > self.tensors.ndim[safe]) & ~constant
                self._refuse(padding & (count != 1), "count in a padding dim", count, 1, d)
        reach = self.dst_offset.astype(np.float64)
        for count, stride in zip(self.count, self.dst_stride, strict=True):
            reach += np.maximum(count - 1, 0).astype(np.float64) * np.abs(stride.astype(np.float64))
        self._refuse((reach > 2.0**62) & ~empty, "destination stride (elements), reaching past", self.dst_offset, limit)
        first, last = self.dst_reach
        self._refuse((first < 0) & ~empty, "first destination element", first, 0)
        self._refuse((last >= limit) & ~empty, "last destination element", last, limit - 1)
        for row in np.flatnonzero(constant).tolist():
            label = self.buffers.dtype_label(int(buffer[row]))
            expected = dtype(label).unit_bytes
            if len(self.values.get(row, b"")) != expected:
                raise DTypeError(
                    f"{self.where(row)}: constant of {len(self.values.get(row, b''))} bytes; "
                    f"expected {expected} ({label})",
                    got=len(self.values.get(row, b"")),
                    expected=expected,
                )

    @cached_property
    def _buffer_elems(self) -> Int64:
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
        return column(self._buffer_elems * self.buffers.bits // 8, "buffer_bytes")

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
