"""Which shards of a part does anybody need? Rows of requested tensors, by part; nothing is concatenated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planner.classify import Bool, Int64
from reshard.planner.shards import ShardPart


@dataclass(frozen=True, eq=False, slots=True)
class PartRows:
    """The shards of one part that somebody needs, in order of tensor.

    Attributes
    ----------
    part : ShardPart
    rows : int64[K] or None
        Row of each in the part; None means all rows as they are.
    tensor : int64[K]
        Needed-tensor numbers, ascending.
    unique : bool
        At most one shard a tensor.
    """

    part: ShardPart
    rows: Int64 | None
    tensor: Int64
    unique: bool

    def take(self, values: Int64) -> Int64:
        """A column of the part, at these rows."""
        return values if self.rows is None else values[self.rows]

    def row(self, i: Int64) -> Int64:
        """Rows in the part of positions here."""
        return i if self.rows is None else self.rows[i]


def needed_rows(part: ShardPart, id_map: Int64 | None, number: Int64 | None) -> PartRows:
    """Rows of the requested tensors of one part, without empty shards, in order of tensor.

    Parameters
    ----------
    id_map : int64 array or None
        Tensor id in the part to union id.
    number : int64 array or None
        Union id to needed-tensor number, -1 where nobody asks; None is the identity.
    """
    tensor = part.tensor_id
    rows: Int64 | None = None
    if id_map is not None and number is not None:
        tensor = number[id_map][tensor]
    elif id_map is not None:
        tensor = id_map[tensor]
    elif number is not None:
        tensor = number[tensor]
    keep: Bool | None = tensor >= 0 if number is not None else None
    if part.geometries.has_empty:
        alive = part.geometries.volume[part.geometry_id] > 0
        keep = alive if keep is None else keep & alive
    if keep is not None and not keep.all():
        rows = np.flatnonzero(keep)
        tensor = tensor[rows]
    unique = part.unique_rows
    if not part.sorted_rows or id_map is not None:
        step = np.diff(tensor)
        if len(step) and int(step.min()) < 0:
            order = np.argsort(tensor, kind="stable")
            tensor = tensor[order]
            rows = order if rows is None else rows[order]
            step = np.diff(tensor)
        unique = not len(step) or int(step.min()) > 0
    return PartRows(part, rows, tensor, unique)


def needed_numbers(tensor: Int64, n_all: int) -> Int64 | None:
    """Union id to needed-tensor number (-1: nobody asks); None if all are needed."""
    if len(tensor) == n_all:
        return None
    number = np.full(n_all, -1, np.int64)
    number[tensor] = np.arange(len(tensor))
    return number
