"""Which of several equal replicas is read? Deterministic choices that balance without communication.

`first` takes the holder that is first by name. `spread` orders the boxes of one owner set; with x in [0, 1)
the midpoint of a box in their cumulative bytes, instance i of n reads replica floor((i + x) * R / n): each
receiver sweeps its window of the replicas, so all are loaded evenly and each receiver opens few sessions.
`nearest` keeps to replicas on the receiver's host where there are any, and spreads over those.

Within an owner set boxes are ordered by template and then by member, so that each replica serves a *range* of
the members of a template box: the choice is made without looking at members at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planner.classes import Classes
from reshard.planner.classify import Int64, classify, ragged_arange
from reshard.planner.options import PlanOptions
from reshard.planner.requests import Requests
from reshard.planner.sources import SourceBoxes
from reshard.planner.tables import ShardTable


@dataclass(frozen=True, eq=False)
class Serves:
    """Who serves which members of a template box, ordered by box.

    Attributes
    ----------
    box : int64[R]
    candidate : int64[R]
        Row of the candidate columns.
    first, stop : int64[R]
        Members [first, stop) of the box's class; the ranges of a box are disjoint and cover the class.
    """

    box: Int64
    candidate: Int64
    first: Int64
    stop: Int64


def choose_replicas(
    sources: ShardTable,
    requests: Requests,
    classes: Classes,
    boxes: SourceBoxes,
    box_bytes: Int64,
    options: PlanOptions,
) -> Serves:
    """Choose a holder for every member of every box that is read.

    Parameters
    ----------
    requests : Requests
        Give the receiver its phase where the options do not.
    box_bytes : int64[B]
        Bytes on the wire from each template box, for one member; 0 where it is not read.
    """
    size = np.diff(classes.member_start)[boxes.cls]
    read = box_bytes > 0
    spread = read & (boxes.n_candidates > 1) if options.policy != "first" else np.zeros(len(boxes), np.bool_)
    plain = np.flatnonzero(read & ~spread)
    none = np.zeros(len(plain), np.int64)
    alone = Serves(plain, boxes.candidate_first[plain], none, size[plain])
    several = np.flatnonzero(spread)
    if len(several) == 0:
        return alone
    phase = _phase(requests, options)
    shared = _spread(sources, boxes, several, box_bytes[several], size[several], options, phase)
    box = np.concatenate([alone.box, shared.box])
    order = np.argsort(box, kind="stable")
    return Serves(
        box[order],
        np.concatenate([alone.candidate, shared.candidate])[order],
        np.concatenate([alone.first, shared.first])[order],
        np.concatenate([alone.stop, shared.stop])[order],
    )


def _spread(
    sources: ShardTable,
    boxes: SourceBoxes,
    box: Int64,
    n_bytes: Int64,
    size: Int64,
    options: PlanOptions,
    phase: float,
) -> Serves:
    table, n_replicas = _candidates(sources, boxes, box, options)
    columns = [n_replicas, *(boxes.candidate_part[c] for c in np.ascontiguousarray(table.T))]
    owners, _ = classify(columns)
    order = np.argsort(owners, kind="stable")
    owners, box, table = owners[order], box[order], table[order]
    n_replicas, size, n_bytes = n_replicas[order], size[order], n_bytes[order]
    # cumulative bytes within each owner set
    weight = (n_bytes * size).astype(np.float64)
    new = np.ones(len(order), np.bool_)
    new[1:] = owners[1:] != owners[:-1]
    at, number = np.flatnonzero(new), np.cumsum(new) - 1
    total = np.add.reduceat(weight, at)[number]
    ends = np.cumsum(weight)
    before = ends - weight - (ends - weight)[at][number]
    # replica r has the part [r * n / R - i, (r + 1) * n / R - i) of this instance's unit interval; the boxes are laid
    # along it from the phase on and wrap around once
    i, n = options.instance, options.instances
    low = i * n_replicas // n
    width = -(-(i + 1) * n_replicas // n) - low
    turns = 2 * width
    row = np.repeat(np.arange(len(order)), turns)
    nth = ragged_arange(turns)
    turn, step = nth // width[row], nth % width[row]
    replica = low[row] + step
    origin = before + phase * total

    def member(nth_edge: Int64) -> Int64:
        """First member whose midpoint lies at or after an edge of this instance's replicas (0 to `width`)."""
        inner = np.clip((low[row] + nth_edge) * (n / n_replicas[row]) - i, 0.0, 1.0)
        # the outer edges are exact: one turn must end where the next begins, or a member in between is lost
        fraction = np.where(nth_edge == 0, 0.0, np.where(nth_edge == width[row], 1.0, inner)) + turn
        found = np.ceil((fraction * total[row] - origin[row]) / n_bytes[row] - 0.5)
        out: Int64 = np.clip(found, 0, size[row]).astype(np.int64)
        return out

    first, stop = member(step), member(step + 1)
    keep = np.flatnonzero(first < stop)
    return Serves(box[row[keep]], table[row[keep], replica[keep]], first[keep], stop[keep])


def _phase(requests: Requests, options: PlanOptions) -> float:
    """Where in its window a receiver starts to sweep, in [0, 1): by its rank, or by what it reads."""
    if options.members > 1:
        return options.member / options.members
    return (requests.fingerprint >> 11) / float(1 << 53)


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


__all__ = ["Serves", "choose_replicas"]
