"""Which disjoint boxes do a class's shards offer, and who holds each? Deduplication and overlap.

1. Equal boxes are one box with several candidates, if their holders claim it (same replica group within a
   layout, same claim between layouts) or the options trust it; otherwise a `ConflictError` names two holders.
2. Boxes of one layout must be disjoint; of two layouts too, unless both carry the same claim. Otherwise
   `OverlapError`.
3. Boxes of claimed layouts that overlap without being equal are cut: the preferred layout keeps its boxes
   whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planner.boxes import cross, find_overlap, subtract
from reshard.planner.classes import Classes
from reshard.planner.classify import Bool, Int64, classify
from reshard.planner.errors import Box, ConflictError, OverlapError, format_box
from reshard.planner.options import PlanOptions
from reshard.planner.tables import ShardTable


@dataclass(frozen=True, eq=False)
class SourceBoxes:
    """Disjoint boxes of each class, ordered by class.

    Attributes
    ----------
    cls : int64[B]
    start, stop : D int64[B]
        What may be read of the shard.
    shard_start, shard_stop : D int64[B]
        The shard itself (strides follow from it); equal for all candidates.
    candidate_first, n_candidates : int64[B]
        Range in the candidate columns.
    candidate_part, candidate_nth : int64[K]
        Part number, and which shard of the tensor there; ascending by part within a box.
    candidate_group : int64[K]
        Replica group.
    claimed : tuple of (int, int)
        Pairs of parts of which one's box was cut back on the word of a common claim.
    """

    cls: Int64
    start: list[Int64]
    stop: list[Int64]
    shard_start: list[Int64]
    shard_stop: list[Int64]
    candidate_first: Int64
    n_candidates: Int64
    candidate_part: Int64
    candidate_nth: Int64
    candidate_group: Int64
    claimed: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.cls)


def _labels(sources: ShardTable) -> tuple[Int64, Int64]:
    """Layout number and claim number (-1 where none) of each part."""
    layouts: dict[str, int] = {}
    claims: dict[str, int] = {}
    layout = [layouts.setdefault(part.layout, len(layouts)) for part in sources.parts]
    claim = [claims.setdefault(part.claim, len(claims)) if part.claim else -1 for part in sources.parts]
    return np.array(layout, np.int64), np.array(claim, np.int64)


def source_boxes(sources: ShardTable, classes: Classes, options: PlanOptions) -> SourceBoxes:
    """Deduplicate and disentangle the template shards.

    Raises
    ------
    ConflictError
        Equal boxes of two holders (or twice one holder's) without a claim.
    OverlapError
        Unequal boxes that overlap within one layout, or between layouts that claim nothing.
    """
    shards = classes.shards
    layout_of, claim_of = _labels(sources)
    layout, claim = layout_of[shards.part], claim_of[shards.part]
    box, first = classify([shards.cls, *shards.start, *shards.stop])
    if len(first) < len(box):
        _check_claims(sources, classes, box, first, layout, claim, options)
        by_box = np.argsort(box, kind="stable")
    else:
        by_box = np.arange(len(box))
    counts = np.bincount(box, minlength=len(first))
    out = SourceBoxes(
        shards.cls[first],
        [c[first] for c in shards.start],
        [c[first] for c in shards.stop],
        [c[first] for c in shards.start],
        [c[first] for c in shards.stop],
        np.cumsum(counts) - counts,
        counts,
        shards.part[by_box],
        shards.nth[by_box],
        shards.replica_group[by_box],
    )
    one_layout = len(layout_of) == 0 or bool((layout_of == layout_of[0]).all())
    if one_layout:
        _check_disjoint(sources, classes, out, out.cls)
        return out
    return _resolve(sources, classes, out, box, layout, claim, layout_of, options)


def _check_claims(
    sources: ShardTable,
    classes: Classes,
    box: Int64,
    first: Int64,
    layout: Int64,
    claim: Int64,
    options: PlanOptions,
) -> None:
    if options.trust_equal_boxes:
        return
    shards = classes.shards
    own, own_first = classify([box, layout])
    leader = own_first[own]
    rows = np.arange(len(box))
    group = shards.replica_group
    wrong = (rows != leader) & ((group < 0) | (group != group[leader]))
    wrong_leader = leader
    if not wrong.any():
        head = first[box]
        between = layout != layout[head]
        wrong = between & ((claim < 0) | (claim != claim[head]))
        wrong_leader = head
    if not wrong.any():
        return
    bad = int(np.argmax(wrong))
    other = int(wrong_leader[bad])
    name = sources.tensors.name(int(classes.tensor[classes.first[int(shards.cls[bad])]]))
    held = _unpadded(sources, classes, int(shards.cls[bad]), shards.start, shards.stop, bad)
    holders = tuple(sources.parts[int(shards.part[i])].holder.name for i in (other, bad))
    raise ConflictError(
        f"tensor {name!r}: {holders[0]!r} and {holders[1]!r} both hold {format_box(held)} and do not claim to be "
        f"replicas (replica groups {int(group[other])} and {int(group[bad])}); two pipeline stages with local names "
        "look like this",
        holders=holders,
        tensor=name,
        got=(int(group[other]), int(group[bad])),
        expected="one replica group of 0 or more",
    )


def _unpadded(sources: ShardTable, classes: Classes, cls: int, start: list[Int64], stop: list[Int64], row: int) -> Box:
    n = int(sources.tensors.ndim[int(classes.tensor[classes.first[cls]])])
    keep = range(len(start) - n, len(start))
    return tuple((int(start[d][row]), int(stop[d][row])) for d in keep)


def _overlap_error(sources: ShardTable, classes: Classes, boxes: SourceBoxes, pair: tuple[int, int]) -> OverlapError:
    cls = int(boxes.cls[pair[0]])
    name = sources.tensors.name(int(classes.tensor[classes.first[cls]]))
    held = [_unpadded(sources, classes, cls, boxes.shard_start, boxes.shard_stop, i) for i in pair]
    parts = [sources.parts[int(boxes.candidate_part[boxes.candidate_first[i]])] for i in pair]
    holders = [part.holder.name for part in parts]
    same = parts[0].layout == parts[1].layout
    why = (
        f"in one layout {parts[0].layout!r}"
        if same
        else f"in layouts {parts[0].layout!r} and {parts[1].layout!r} without one claim"
    )
    return OverlapError(
        f"tensor {name!r}: {format_box(held[0])} of {holders[0]!r} and {format_box(held[1])} of {holders[1]!r} "
        f"overlap {why}",
        tensor=name,
        boxes=held,
        holders=holders,
    )


def _check_disjoint(sources: ShardTable, classes: Classes, boxes: SourceBoxes, group: Int64) -> None:
    pair = find_overlap(group, boxes.start, boxes.stop)
    if pair is not None:
        raise _overlap_error(sources, classes, boxes, pair)


def _resolve(
    sources: ShardTable,
    classes: Classes,
    boxes: SourceBoxes,
    box: Int64,
    layout: Int64,
    claim: Int64,
    layout_of: Int64,
    options: PlanOptions,
) -> SourceBoxes:
    """Several layouts: prove each disjoint, then let each box lose what a preferred layout's box holds."""
    n_layouts = int(layout_of.max()) + 1
    by_layout = box * n_layouts + layout
    # a box that two layouts hold belongs to both when layouts are checked
    held, row = np.unique(by_layout, return_index=True)
    owner, member_layout = held // n_layouts, held % n_layouts
    group = boxes.cls[owner] * n_layouts + member_layout
    pair = find_overlap(group, [c[owner] for c in boxes.start], [c[owner] for c in boxes.stop])
    if pair is not None:
        raise _overlap_error(sources, classes, boxes, (int(owner[pair[0]]), int(owner[pair[1]])))
    if find_overlap(boxes.cls, boxes.start, boxes.stop) is None:
        return boxes
    rank = _preference(sources, layout_of, options)
    best = np.full(len(boxes), n_layouts, np.int64)
    np.minimum.at(best, owner, rank[member_layout])
    box_claim = np.full(len(boxes), -1, np.int64)
    box_claim[owner] = claim[row]
    left, right = cross(boxes.cls, boxes.cls, int(boxes.cls.max(initial=-1)) + 1)
    meet = (left != right) & (best[right] < best[left])
    for a, b in zip(boxes.start, boxes.stop, strict=True):
        meet &= (a[left] < b[right]) & (a[right] < b[left])
    left, right = left[meet], right[meet]
    unclaimed = (box_claim[left] < 0) | (box_claim[left] != box_claim[right])
    if unclaimed.any():
        k = int(np.argmax(unclaimed))
        raise _overlap_error(sources, classes, boxes, (int(right[k]), int(left[k])))
    keep, start, stop = _cut_back(boxes, left, right)
    first_part = boxes.candidate_part[boxes.candidate_first]
    n_parts = len(sources.parts)
    pairs = np.unique(first_part[right] * n_parts + first_part[left])
    return SourceBoxes(
        boxes.cls[keep],
        start,
        stop,
        [c[keep] for c in boxes.shard_start],
        [c[keep] for c in boxes.shard_stop],
        boxes.candidate_first[keep],
        boxes.n_candidates[keep],
        boxes.candidate_part,
        boxes.candidate_nth,
        boxes.candidate_group,
        tuple((pair // n_parts, pair % n_parts) for pair in pairs.tolist()),
    )


def _preference(sources: ShardTable, layout_of: Int64, options: PlanOptions) -> Int64:
    """Rank of each layout: by first holder, but with `nearest` those on the receiver's host go first."""
    n_layouts = int(layout_of.max()) + 1
    near: Bool = np.zeros(n_layouts, np.bool_)
    if options.policy == "nearest":
        for part, number in zip(sources.parts, layout_of.tolist(), strict=True):
            near[number] |= part.holder.host == options.receiver_host
    rank = np.empty(n_layouts, np.int64)
    rank[np.argsort(~near, kind="stable")] = np.arange(n_layouts)
    return rank


def _cut_back(boxes: SourceBoxes, left: Int64, right: Int64) -> tuple[Int64, list[Int64], list[Int64]]:
    """Each box minus the boxes that cut it; left ascending."""
    touched = np.zeros(len(boxes), np.bool_)
    touched[left] = True
    whole, cut = np.flatnonzero(~touched), np.flatnonzero(touched)
    position = np.cumsum(touched) - 1
    origin, lo, hi = subtract(
        np.arange(len(cut)),
        [c[cut] for c in boxes.start],
        [c[cut] for c in boxes.stop],
        position[left],
        [c[right] for c in boxes.start],
        [c[right] for c in boxes.stop],
    )
    keep = np.concatenate([whole, cut[origin]])
    order = np.argsort(keep, kind="stable")
    start = [np.concatenate([c[whole], part])[order] for c, part in zip(boxes.start, lo, strict=True)]
    stop = [np.concatenate([c[whole], part])[order] for c, part in zip(boxes.stop, hi, strict=True)]
    return keep[order], start, stop


__all__ = ["SourceBoxes", "source_boxes"]
