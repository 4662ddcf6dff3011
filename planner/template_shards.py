"""What do the shards of a class look like? The shards of its first member, collected over all parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.planner.classify import Int64, ragged_arange
from reshard.planner.needs import PartRows
from reshard.planner.requests import pad


@dataclass(frozen=True, eq=False)
class TemplateShards:
    """The shards of each class's first member, ordered by (class, part, occurrence).

    Attributes
    ----------
    cls, part, nth : int64[S]
        Class, part number, and which shard of that tensor in that part.
    start, stop : D int64[S]
    replica_group : int64[S]
    """

    cls: Int64
    part: Int64
    nth: Int64
    start: list[Int64]
    stop: list[Int64]
    replica_group: Int64


def template_shards(
    parts: tuple[PartRows, ...], first: Int64, n_dims: int, n: int, numbers: Sequence[int] | None = None
) -> TemplateShards:
    """Collect the shards of each class's first member; `numbers` are the parts' numbers if not 0, 1, ..."""
    cls_of: list[Int64] = []
    part_of: list[Int64] = []
    nth_of: list[Int64] = []
    geometry_of: list[Int64] = []
    group_of: list[Int64] = []
    dictionaries: dict[int, list[int]] = {}
    for i, rows in zip(range(len(parts)) if numbers is None else numbers, parts, strict=True):
        if not len(rows.tensor):
            continue
        if rows.unique:
            if len(rows.tensor) == n:
                cls, at = np.arange(len(first)), first
            else:
                at = np.searchsorted(rows.tensor, first)
                at = np.minimum(at, len(rows.tensor) - 1)
                cls = np.flatnonzero(rows.tensor[at] == first)
                at = at[cls]
            nth = np.zeros(len(cls), np.int64)
        else:
            low = np.searchsorted(rows.tensor, first, side="left")
            high = np.searchsorted(rows.tensor, first, side="right")
            counts = high - low
            cls = np.repeat(np.arange(len(first)), counts)
            nth = ragged_arange(counts)
            at = np.repeat(low, counts) + nth
        row = rows.row(at)
        dictionaries.setdefault(id(rows.part.geometries), []).append(len(cls_of))
        cls_of.append(cls)
        part_of.append(np.full(len(cls), i, np.int64))
        nth_of.append(nth)
        geometry_of.append(rows.part.geometry_id[row])
        group_of.append(rows.part.replica_group[row])
    if not cls_of:
        none = np.zeros(0, np.int64)
        return TemplateShards(none, none, none, [none] * n_dims, [none] * n_dims, none)
    sizes = np.array([len(c) for c in cls_of])
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    start = [np.zeros(total, np.int64) for _ in range(n_dims)]
    stop = [np.ones(total, np.int64) for _ in range(n_dims)]
    geometry = np.concatenate(geometry_of)
    part_rows = {id(r.part.geometries): r.part.geometries for r in parts}
    for key, pieces in dictionaries.items():
        geometries = part_rows[key]
        where = (
            np.concatenate([np.arange(ends[k] - sizes[k], ends[k]) for k in pieces]) if len(dictionaries) > 1 else None
        )
        ids = geometry if where is None else geometry[where]
        a = pad([c[ids] for c in geometries.start], n_dims, 0, len(ids))
        b = pad([c[ids] for c in geometries.stop], n_dims, 1, len(ids))
        for d in range(n_dims):
            if where is None:
                start[d], stop[d] = a[d], b[d]
            else:
                start[d][where], stop[d][where] = a[d], b[d]
    cls, part = np.concatenate(cls_of), np.concatenate(part_of)
    order = np.argsort(cls, kind="stable")
    return TemplateShards(
        cls[order],
        part[order],
        np.concatenate(nth_of)[order],
        [c[order] for c in start],
        [c[order] for c in stop],
        np.concatenate(group_of)[order],
    )
