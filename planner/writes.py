"""Is each destination byte written by one request only? Program order settled, exactly-once proved.

1. Each view must be injective (its elements land on different places).
2. Where no two views of a buffer have overlapping covering ranges, that is the proof; one sort for all
   buffers.
3. The others are compared as exact boxes of the buffer (`lattice`). Where two overlap, the one that is later
   in program order wins and the earlier one is cut back; with no order between them it is an `OverlapError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from reshard.planner.boxes import cross, find_overlap, subtract, volumes
from reshard.planner.classify import Int64
from reshard.planner.errors import OverlapError, PlanError
from reshard.planner.lattice import Boxes, exact_boxes
from reshard.planner.reads import KIND_MATERIALISED, ReadTable


@dataclass(frozen=True, eq=False)
class Writes:
    """The requests of a read table after program order; rows may be fewer or more.

    Attributes
    ----------
    origin : int64[N]
        Row in the read table.
    start, step, count : D int64[N]
        The source view.
    dst_offset : int64[N]
        First destination element.
    dst_stride : D int64[N]
    outlived : mapping of int to (tuple of int, int)
        By row of a materialised request that later ones write over: their rows, and how many elements remain its own.
        Such a request is not cut, as the loader needs all of its box.
    """

    origin: Int64
    start: tuple[Int64, ...]
    step: tuple[Int64, ...]
    count: tuple[Int64, ...]
    dst_offset: Int64
    dst_stride: tuple[Int64, ...]
    outlived: Mapping[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)


def settle_writes(reads: ReadTable) -> Writes:
    """Apply program order and prove that what remains writes each element at most once.

    Raises
    ------
    OverlapError
        A view that writes an element twice, or two requests of equal order that overlap.
    PlanError
        Views too intricate to compare.
    """
    _check_injective(reads)
    rows = np.arange(len(reads))
    whole = Writes(rows, reads.start, reads.step, reads.count, reads.dst_offset, reads.dst_stride)
    alive = reads.volume > 0
    if not alive.all():
        rows = np.flatnonzero(alive)
    first, last = reads.dst_reach
    involved, group = _overlapping_ranges(reads.buffer_id[rows], first[rows], last[rows] + 1)
    if not len(involved):
        return whole
    return _settle(reads, rows[involved], group) or whole


def _check_injective(reads: ReadTable) -> None:
    n = len(reads)
    fine = np.ones(n, np.bool_)
    reach = np.ones(n, np.int64)
    for count, stride in zip(reversed(reads.count), reversed(reads.dst_stride), strict=True):
        size = np.abs(stride)
        real = count > 1
        fine &= ~real | (size >= reach)
        reach = np.where(real, size * count, reach)
    fine |= reads.volume == 0
    if fine.all():
        return
    odd = np.flatnonzero(~fine)
    size = np.stack([np.abs(s[odd]) for s in reads.dst_stride])
    count = np.stack([c[odd] for c in reads.count])
    size = np.where(count > 1, size, 0)
    order = np.argsort(size, axis=0, kind="stable")
    size, count = np.take_along_axis(size, order, 0), np.take_along_axis(count, order, 0)
    reach = np.ones(len(odd), np.int64)
    wrong = np.zeros(len(odd), np.bool_)
    for s, c in zip(size, count, strict=True):
        real = c > 1
        wrong |= real & (s < reach)
        reach = np.where(real, s * c, reach)
    for i in np.flatnonzero(wrong).tolist():
        _check_one(reads, int(odd[i]))


def _check_one(reads: ReadTable, row: int) -> None:
    """Exact check of one view whose strides interleave: by enumeration, which bounds what is accepted."""
    n = int(reads.volume[row])
    where = reads.where(row)
    if n > 1 << 24:
        raise PlanError(f"{where}: {n} elements with interleaving strides; expected strides that nest", got=n)
    places = np.zeros(1, np.int64)
    for count, stride in zip(reads.count, reads.dst_stride, strict=True):
        places = (places[:, None] + np.arange(int(count[row])) * int(stride[row])).reshape(-1)
    if len(np.unique(places)) != n:
        raise OverlapError(
            f"{where}: the view writes one element twice", tensor=reads.buffers.name(int(reads.buffer_id[row]))
        )


def _overlapping_ranges(buffer: Int64, begin: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Positions whose covering range meets another's in its buffer, and the number of their chain."""
    n = len(buffer)
    none = np.zeros(0, np.int64)
    if n < 2:
        return none, none
    order = np.lexsort([begin, buffer]) if not _ascending(buffer, begin) else np.arange(n)
    b, lo, hi = buffer[order], begin[order], end[order]
    fresh = np.ones(n, np.bool_)
    fresh[1:] = b[1:] != b[:-1]
    # a range that reaches over several later ones overlaps its neighbour too
    if not ((~fresh[1:]) & (lo[1:] < hi[:-1])).any():
        return none, none
    ordered, rank = np.unique(hi, return_inverse=True)
    width = n + 1
    number = np.cumsum(fresh) - 1
    top = np.maximum.accumulate(number * width + rank)
    reach = ordered[top - number * width]
    new = fresh.copy()
    new[1:] |= lo[1:] >= reach[:-1]
    group = np.cumsum(new) - 1
    many = np.bincount(group)[group] > 1
    return order[many], group[many]


def _ascending(buffer: Int64, begin: Int64) -> bool:
    step = np.diff(buffer)
    if int(step.min()) < 0:
        return False
    return bool(((step > 0) | (np.diff(begin) >= 0)).all())


def _settle(reads: ReadTable, rows: Int64, group: Int64) -> Writes | None:
    """Compare some requests, by chain, as boxes and cut the earlier ones; None if nothing overlaps."""
    boxes = exact_boxes(reads, rows)
    origin = boxes.views.origin
    if find_overlap(group[origin], boxes.lo, boxes.hi) is None:
        return None
    left, right = _meetings(reads, rows, group, boxes)
    # a request with any cut box is replaced by all its boxes, less what later requests write
    touched = np.zeros(len(rows), np.bool_)
    touched[origin[left]] = True
    cut = np.flatnonzero(touched[origin])
    number = np.full(len(origin), -1, np.int64)
    number[cut] = np.arange(len(cut))
    piece, lo, hi = subtract(
        np.arange(len(cut)),
        [c[cut] for c in boxes.lo],
        [c[cut] for c in boxes.hi],
        number[left],
        [c[right] for c in boxes.lo],
        [c[right] for c in boxes.hi],
    )
    views = boxes.cut(cut[piece], lo, hi)
    row = rows[views.origin]
    loader = reads.kind[row] == KIND_MATERIALISED
    outlived = _outlived(reads, rows, origin[left], origin[right], row[loader], volumes(lo, hi, len(row))[loader])
    views, row = views.take(np.flatnonzero(~loader)), row[~loader]
    keep = np.ones(len(reads), np.bool_)
    keep[rows[touched]] = False
    keep[list(outlived)] = True
    kept = np.flatnonzero(keep)
    order = np.argsort(np.concatenate([kept, row]), kind="stable")

    def joined(old: Int64, new: Int64) -> Int64:
        return np.concatenate([old[kept], new])[order]

    dims = range(reads.n_dims)
    offset = reads.dst_offset[row].copy()
    for d in dims:
        offset += views.first[d] * reads.dst_stride[d][row]
    return Writes(
        np.concatenate([kept, row])[order],
        tuple(joined(reads.start[d], reads.start[d][row] + views.first[d] * reads.step[d][row]) for d in dims),
        tuple(joined(reads.step[d], views.step[d] * reads.step[d][row]) for d in dims),
        tuple(joined(reads.count[d], views.count[d]) for d in dims),
        joined(reads.dst_offset, offset),
        tuple(joined(reads.dst_stride[d], views.step[d] * reads.dst_stride[d][row]) for d in dims),
        outlived,
    )


def _outlived(
    reads: ReadTable, rows: Int64, left: Int64, right: Int64, owner: Int64, volume: Int64
) -> dict[int, tuple[tuple[int, ...], int]]:
    """Materialised requests that later ones write over; `owner` and `volume` are what is left of them."""
    earlier, later = rows[left], rows[right]
    out = {}
    for row in np.unique(earlier[reads.kind[earlier] == KIND_MATERIALISED]).tolist():
        over = np.unique(later[earlier == row])
        out[row] = (tuple(over[reads.kind[over] != KIND_MATERIALISED].tolist()), int(volume[owner == row].sum()))
    return out


def _meetings(reads: ReadTable, rows: Int64, group: Int64, boxes: Boxes) -> tuple[Int64, Int64]:
    """Pairs of boxes (earlier, later) that overlap.

    Raises
    ------
    OverlapError
        Two of equal program order overlap.
    """
    origin = boxes.views.origin
    order = reads.order[rows][origin]
    _, chain = np.unique(group[origin], return_inverse=True)
    by_chain = np.argsort(chain, kind="stable")
    left, right = cross(chain[by_chain], chain[by_chain], int(chain.max()) + 1)
    left, right = by_chain[left], by_chain[right]
    meet = (origin[left] != origin[right]) & (order[right] >= order[left])
    left, right = left[meet], right[meet]
    meet = np.ones(len(left), np.bool_)
    for a, b in zip(boxes.lo, boxes.hi, strict=True):
        meet &= (a[left] < b[right]) & (a[right] < b[left])
    left, right = left[meet], right[meet]
    tie = order[left] == order[right]
    if tie.any():
        k = int(np.argmax(tie))
        first, second = sorted((int(rows[origin[left[k]]]), int(rows[origin[right[k]]])))
        name = reads.buffers.name(int(reads.buffer_id[first]))
        raise OverlapError(
            f"buffer {name!r}: {reads.where(first)} and {reads.where(second)} write the same elements, with equal "
            f"program order {int(order[left[k]])}",
            tensor=name,
        )
    return left, right
