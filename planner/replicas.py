"""Which of several equal replicas is read? Deterministic choices that balance without communication.

`first` takes the holder that is first by name. `spread` orders the boxes of one owner set by cumulative
bytes; with x in [0, 1) the midpoint of a box, instance i of n reads replica floor((i + x) * R / n) mod R:
each receiver sweeps its window of the replicas, so all are loaded evenly and each receiver opens few
sessions. `nearest` keeps to replicas on the receiver's host where there are any, and spreads over those.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planner.classes import Classes
from reshard.planner.classify import Int64, classify, ragged_arange
from reshard.planner.options import PlanOptions
from reshard.planner.sources import SourceBoxes
from reshard.planner.tables import ShardTable


@dataclass(frozen=True, eq=False)
class Picks:
    """The chosen candidate of each (replicated box, member).

    Attributes
    ----------
    box : int64[R]
        Replicated boxes that are read, ascending.
    first : int64[R]
        Where the box's members start in the instance columns.
    tensor, candidate : int64[M]
        Needed-tensor number, and the candidate chosen (a row of the candidate columns).
    """

    box: Int64
    first: Int64
    tensor: Int64
    candidate: Int64


def pick_replicas(
    sources: ShardTable, classes: Classes, boxes: SourceBoxes, box_bytes: Int64, options: PlanOptions
) -> Picks:
    """Choose a replica for each instance of each replicated box that is read.

    Parameters
    ----------
    box_bytes : int64[B]
        Bytes on the wire from each template box, for one member; 0 where it is not read.
    """
    box = np.flatnonzero((boxes.n_candidates > 1) & (box_bytes > 0))
    size = np.diff(classes.member_start)[boxes.cls[box]]
    first = np.cumsum(size) - size
    owner = np.repeat(np.arange(len(box)), size)
    tensor = classes.members[np.repeat(classes.member_start[boxes.cls[box]], size) + ragged_arange(size)]
    if options.policy == "first" or len(box) == 0:
        return Picks(box, first, tensor, boxes.candidate_first[box][owner])
    table, n = _candidates(sources, boxes, box, options)
    columns = [n, *table.T] if table.shape[1] else [n]
    owner_set, _ = classify([np.ascontiguousarray(boxes.candidate_part[c]) if i else c for i, c in enumerate(columns)])
    key = owner_set[owner] * len(classes.tensor) + tensor
    order = np.argsort(key, kind="stable")
    group = owner_set[owner][order]
    weight = box_bytes[box][owner][order].astype(np.float64)
    new = np.ones(len(order), np.bool_)
    new[1:] = group[1:] != group[:-1]
    at = np.flatnonzero(new)
    number = np.cumsum(new) - 1
    ends = np.cumsum(weight)
    base = (ends - weight)[at]
    total = np.add.reduceat(weight, at)
    x = (ends - weight / 2 - base[number]) / total[number]
    n_replicas = n[owner][order]
    pick = np.floor((options.instance + x) * n_replicas / options.instances).astype(np.int64) % n_replicas
    candidate = np.empty(len(order), np.int64)
    candidate[order] = table[owner[order], pick]
    return Picks(box, first, tensor, candidate)


def _candidates(sources: ShardTable, boxes: SourceBoxes, box: Int64, options: PlanOptions) -> tuple[Int64, Int64]:
    """Candidate rows of each box as a padded table, and their number; only near ones where there are any."""
    counts = boxes.n_candidates[box]
    owner = np.repeat(np.arange(len(box)), counts)
    rows = np.repeat(boxes.candidate_first[box], counts) + ragged_arange(counts)
    if options.policy == "nearest":
        near_part = np.array([part.holder.host == options.receiver_host for part in sources.parts], np.bool_)
        near = near_part[boxes.candidate_part[rows]]
        some = np.bincount(owner, weights=near, minlength=len(box)) > 0
        keep = near | ~some[owner]
        owner, rows = owner[keep], rows[keep]
        counts = np.bincount(owner, minlength=len(box))
    first = np.cumsum(counts) - counts
    nth = np.arange(len(rows)) - first[owner]
    # padding repeats the first candidate: it is never picked, and keeps the table valid to index with
    table = np.repeat(rows[first][:, None], int(counts.max()), axis=1)
    table[owner, nth] = rows
    return table, counts


__all__ = ["Picks", "pick_replicas"]
