"""Does a read table keep its rules? Every view lies inside its tensor and inside its buffer.

Arithmetic that could overflow on hostile columns is bounded first: by division on the source side, in
floating point on the destination side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from reshard.planner.classify import Bool, Int64
from reshard.planner.dtypes import dtype
from reshard.planner.errors import DTypeError, TableError

if TYPE_CHECKING:
    from reshard.planner.reads import ReadTable

KIND_COPY: Final = 0
KIND_CONSTANT: Final = 1
KIND_MATERIALISED: Final = 2


def check_reads(table: ReadTable) -> None:
    """Check a read table's columns, ids and views.

    Raises
    ------
    TableError, DTypeError
        As `ReadTable` says.
    """
    n, n_dims = len(table.tensor_id), len(table.count)
    for name in ("buffer_id", "dst_offset", "order", "kind"):
        if len(getattr(table, name)) != n:
            raise TableError(f"read table: {name} has {len(getattr(table, name))} rows; expected {n}", expected=n)
    for name in ("start", "step", "count", "dst_stride"):
        dims = getattr(table, name)
        if len(dims) != n_dims or any(len(c) != n for c in dims):
            raise TableError(f"read table: {name} needs {n_dims} columns of {n} rows", got=len(dims), expected=n_dims)
    if n == 0:
        return
    kind, tensor, buffer = table.kind, table.tensor_id, table.buffer_id
    _refuse(table, (kind < 0) | (kind > 2), "kind", kind, 2)
    constant = kind == KIND_CONSTANT
    _refuse(table, (tensor < 0) & ~constant, "tensor id", tensor, len(table.tensors) - 1)
    _refuse(table, tensor >= len(table.tensors), "tensor id", tensor, len(table.tensors) - 1)
    _refuse(table, (buffer < 0) | (buffer >= len(table.buffers)), "buffer id", buffer, len(table.buffers) - 1)
    _refuse(table, table.dst_offset < 0, "destination offset", table.dst_offset, 0)
    safe = np.where(tensor >= 0, tensor, 0) if constant.any() else tensor
    limit = table.buffer_elems[buffer]
    empty = np.zeros(n, np.bool_)
    for d, (start, step, count) in enumerate(zip(table.start, table.step, table.count, strict=True)):
        _refuse(table, step < 1, "step", step, 1, d)
        _refuse(table, start < 0, "start", start, 0, d)
        _refuse(table, count < 0, "count", count, 0, d)
        empty |= count == 0
        back = n_dims - d
        if len(table.tensors):
            size = table.tensors.shape[-back][safe] if back <= table.tensors.n_dims else np.ones(n, np.int64)
            # (size - 1 - start) // step + 1 coordinates fit; divisions cannot overflow where products could
            room = np.where(start < size, (size - 1 - start) // step + 1, 0)
            _refuse(table, (count > room) & ~constant, "elements requested", count, room, d)
            padding = (back > table.tensors.ndim[safe]) & ~constant
            _refuse(table, padding & (count != 1), "count in a padding dim", count, 1, d)
    reach = table.dst_offset.astype(np.float64)
    for count, stride in zip(table.count, table.dst_stride, strict=True):
        reach += np.maximum(count - 1, 0).astype(np.float64) * np.abs(stride.astype(np.float64))
    _refuse(table, (reach > 2.0**62) & ~empty, "destination stride (elements), reaching past", table.dst_offset, limit)
    first, last = table.dst_reach
    _refuse(table, (first < 0) & ~empty, "first destination element", first, 0)
    _refuse(table, (last >= limit) & ~empty, "last destination element", last, limit - 1)
    for row in np.flatnonzero(constant).tolist():
        label = table.buffers.dtype_label(int(buffer[row]))
        expected = dtype(label).unit_bytes
        if len(table.values.get(row, b"")) != expected:
            raise DTypeError(
                f"{table.where(row)}: constant of {len(table.values.get(row, b''))} bytes; "
                f"expected {expected} ({label})",
                got=len(table.values.get(row, b"")),
                expected=expected,
            )


def _refuse(table: ReadTable, wrong: Bool, message: str, got: Int64, expected: int | Int64, dim: int = -1) -> None:
    """Raise for the first row that is wrong, if any; `dim` is a padded dim."""
    if not wrong.any():
        return
    row = int(np.argmax(wrong))
    tensor, _ = table.names_of(row)
    where = table.where(row)
    real = dim
    if dim >= 0:
        t = int(table.tensor_id[row])
        real = dim - (table.n_dims - int(table.tensors.ndim[t])) if t >= 0 else dim
    limit = int(expected[row]) if isinstance(expected, np.ndarray) else expected
    raise TableError(
        f"{where}{f' dim {real}' if dim >= 0 else ''}: {message} {int(got[row])}; expected {limit}",
        tensor=tensor,
        dim=real,
        got=int(got[row]),
        expected=limit,
        where=where,
    )
