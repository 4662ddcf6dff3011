"""Which bytes of which holder are read? Templates broadcast to their members, holder by holder.

An *item* is one thing that is read, on templates: a piece read exactly, or a fetch into staging. For each
holder a `Segment` has the source offset of every (item, member) instance that the holder serves; nothing else
differs between members. A segment depends on one part and on the templates only, so that `replan` can keep
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planner.classes import Classes, PartRows
from reshard.planner.classify import Int64, ragged_arange
from reshard.planner.join import Pieces
from reshard.planner.replicas import Picks
from reshard.planner.shape import MODE_EXACT, Fetches, Layout
from reshard.planner.sources import SourceBoxes


@dataclass(frozen=True, eq=False)
class Items:
    """Template items, ordered by source box.

    Attributes
    ----------
    cls, box : int64[I]
    src_offset : int64[I]
        Bytes from the shard's start.
    piece, fetch : int64[I]
        The piece read exactly, or the fetch; the other is -1.
    """

    cls: Int64
    box: Int64
    src_offset: Int64
    piece: Int64
    fetch: Int64

    def __len__(self) -> int:
        return len(self.cls)


@dataclass(frozen=True, eq=False)
class Segment:
    """What is read from one holder.

    Attributes
    ----------
    part : int
        Part number in the shard table.
    item, n_members : int64[K]
        Items, and how many instances of each follow one another.
    tensor : int64[N]
        Needed-tensor number of each instance.
    row : int64[N] or None
        Row in the part (None where rows are `tensor` itself).
    src_offset : int64[N]
        Bytes from the region's start.
    region : int64[N] or None
        None where all are region 0.
    """

    part: int
    item: Int64
    n_members: Int64
    tensor: Int64
    row: Int64 | None
    src_offset: Int64
    region: Int64 | None

    def __len__(self) -> int:
        return len(self.tensor)


def list_items(pieces: Pieces, layout: Layout, mode: Int64, fetches: Fetches, boxes: SourceBoxes) -> Items:
    """Exact pieces and fetches, together, by source box."""
    exact = np.flatnonzero(mode == MODE_EXACT)
    box = np.concatenate([pieces.box[exact], fetches.box])
    offset = np.concatenate([layout.src_offset[exact], fetches.src_offset])
    piece = np.concatenate([exact, np.full(len(fetches), -1, np.int64)])
    fetch = np.concatenate([np.full(len(exact), -1, np.int64), np.arange(len(fetches))])
    order = np.argsort(box, kind="stable")
    box = box[order]
    return Items(boxes.cls[box], box, offset[order], piece[order], fetch[order])


def assemble(classes: Classes, boxes: SourceBoxes, items: Items, picks: Picks) -> list[Segment]:
    """Broadcast items to members, one segment a holder that is read from."""
    size = np.diff(classes.member_start)
    single = np.flatnonzero(boxes.n_candidates[items.box] == 1)
    candidate = boxes.candidate_first[items.box[single]]
    part, nth = boxes.candidate_part[candidate], boxes.candidate_nth[candidate]
    order = np.argsort(part, kind="stable")
    single, part, nth = single[order], part[order], nth[order]
    many = _picked(boxes, items, picks)
    n_parts = len(classes.parts)
    cuts = np.searchsorted(part, np.arange(n_parts + 1))
    many_cuts = np.searchsorted(many.part, np.arange(n_parts + 1))
    shared: dict[bytes, Int64] = {}
    out = []
    inverse = np.zeros(len(classes.tensor), np.int64)
    for p in range(n_parts):
        a, b, c, d = int(cuts[p]), int(cuts[p + 1]), int(many_cuts[p]), int(many_cuts[p + 1])
        if a == b and c == d:
            continue
        item, which = single[a:b], nth[a:b]
        cls = items.cls[item]
        counts = size[cls]
        key = cls.tobytes()
        tensor = shared.get(key)
        if tensor is None:
            begin = classes.member_start[cls]
            tensor = shared[key] = classes.members[np.repeat(begin, counts) + ragged_arange(counts)]
        if c < d:
            item, counts, tensor, which = many.append(item, counts, tensor, which, c, d)
        out.append(_segment(p, classes.parts[p], items, item, counts, tensor, which, inverse))
    return out


def _segment(
    number: int,
    rows: PartRows,
    items: Items,
    item: Int64,
    counts: Int64,
    tensor: Int64,
    nth: Int64,
    inverse: Int64,
) -> Segment:
    part = rows.part
    row: Int64 | None
    if rows.unique and len(rows.tensor) == len(inverse) and rows.rows is None:
        row = None
        offset = part.offset_bytes[tensor]
    else:
        if rows.unique:
            inverse[rows.tensor] = np.arange(len(rows.tensor)) if rows.rows is None else rows.rows
            row = inverse[tensor]
        else:
            first = np.searchsorted(rows.tensor, tensor)
            row = rows.row(first + np.repeat(nth, counts))
        offset = part.offset_bytes[row]
    offset += np.repeat(items.src_offset[item], counts)
    region: Int64 | None = None
    if not part.one_region or (len(part) and int(part.region[0]) != 0):
        region = part.region[tensor if row is None else row]
    return Segment(number, item, counts, tensor, row, offset, region)


@dataclass(frozen=True, eq=False)
class _Many:
    """Instances of replicated items, by the part picked: run-length coded by item."""

    part: Int64
    item: Int64
    nth: Int64
    tensor: Int64

    def append(
        self, item: Int64, counts: Int64, tensor: Int64, nth: Int64, begin: int, end: int
    ) -> tuple[Int64, Int64, Int64, Int64]:
        mine, which = self.item[begin:end], self.nth[begin:end]
        new = np.ones(len(mine), np.bool_)
        new[1:] = (mine[1:] != mine[:-1]) | (which[1:] != which[:-1])
        at = np.flatnonzero(new)
        return (
            np.concatenate([item, mine[at]]),
            np.concatenate([counts, np.diff(np.append(at, len(mine)))]),
            np.concatenate([tensor, self.tensor[begin:end]]),
            np.concatenate([nth, which[at]]),
        )


def _picked(boxes: SourceBoxes, items: Items, picks: Picks) -> _Many:
    """One row for each (replicated item, member), ordered by the part picked, then item, then nth."""
    none = np.zeros(0, np.int64)
    if len(picks.box) == 0:
        return _Many(none, none, none, none)
    n_instances = np.diff(np.append(picks.first, len(picks.tensor)))
    position = np.full(len(boxes), -1, np.int64)
    position[picks.box] = np.arange(len(picks.box))
    item = np.flatnonzero(position[items.box] >= 0)
    at = position[items.box[item]]
    counts = n_instances[at]
    instance = np.repeat(picks.first[at], counts) + ragged_arange(counts)
    item = np.repeat(item, counts)
    candidate = picks.candidate[instance]
    part, nth = boxes.candidate_part[candidate], boxes.candidate_nth[candidate]
    width = int(nth.max()) + 1 if len(nth) else 1
    order = np.argsort((part * (int(item.max()) + 1 if len(item) else 1) + item) * width + nth, kind="stable")
    return _Many(part[order], item[order], nth[order], picks.tensor[instance][order])
