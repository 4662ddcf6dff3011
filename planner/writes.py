"""Is each destination byte written by one request only? Program order settled, exactly-once proved.

1. Each view must be injective (its elements land on different places).
2. Where no two views of a buffer have overlapping covering ranges, that is the proof; one sort for all buffers.
3. The others are compared as boxes in the buffer's own dims. Where two overlap, the one that is later in program order wins and
   the earlier one is cut back; with no order between them it is an `OverlapError`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planner.boxes import cross, subtract
from reshard.planner.classify import Bool, Int64
from reshard.planner.errors import OverlapError, PlanError
from reshard.planner.reads import KIND_MATERIALISED, ReadTable


@dataclass(frozen=True, eq=False)
class Writes:
    """The requests of a read table after program order; rows may be fewer or more.

    Attributes
    ----------
    origin : int64[N]
        Row in the read table.
    start, count : D int64[N]
        Source coordinates of the first element and number of elements, per dim.
    dst_offset : int64[N]
        First destination element.
    n_cut : int
        Rows that were cut back or dropped.
    """

    origin: Int64
    start: tuple[Int64, ...]
    count: tuple[Int64, ...]
    dst_offset: Int64
    n_cut: int


def settle_writes(reads: ReadTable) -> Writes:
    """Apply program order and prove that what remains writes each element at most once.

    Raises
    ------
    OverlapError
        A view that writes an element twice, or two requests of equal order that overlap.
    PlanError
        An overlap that cannot be cut: views that are no boxes of the buffer, or a materialised destination that something writes later.
    """
    _check_injective(reads)
    rows = np.arange(len(reads))
    whole = Writes(rows, reads.start, reads.count, reads.dst_offset, 0)
    alive = reads.volume > 0
    if not alive.all():
        rows = np.flatnonzero(alive)
    first, last = reads.dst_reach
    involved = _overlapping_ranges(reads.buffer_id[rows], first[rows], last[rows] + 1)
    if not len(involved):
        return whole
    return _settle(reads, rows[involved])


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
    where = reads._where(row)[1]
    if n > 1 << 24:
        raise PlanError(f"{where}: {n} elements with interleaving strides; expected strides that nest", got=n)
    places = np.zeros(1, np.int64)
    for count, stride in zip(reads.count, reads.dst_stride, strict=True):
        places = (places[:, None] + np.arange(int(count[row])) * int(stride[row])).reshape(-1)
    if len(np.unique(places)) != n:
        raise OverlapError(
            f"{where}: the view writes one element twice", tensor=reads.buffers.name(int(reads.buffer_id[row]))
        )


def _overlapping_ranges(buffer: Int64, begin: Int64, end: Int64) -> Int64:
    """Positions whose covering range meets another's in the same buffer."""
    n = len(buffer)
    if n < 2:
        return np.zeros(0, np.int64)
    order = np.lexsort([begin, buffer]) if not _ascending(buffer, begin) else np.arange(n)
    b, lo, hi = buffer[order], begin[order], end[order]
    fresh = np.ones(n, np.bool_)
    fresh[1:] = b[1:] != b[:-1]
    # cheap first: neighbours only; ranges that contain later ones show up as a neighbour overlap too
    clash = (~fresh[1:]) & (lo[1:] < hi[:-1])
    if not clash.any():
        return np.zeros(0, np.int64)
    _, rank = np.unique(hi, return_inverse=True)
    width = n + 1
    number = np.cumsum(fresh) - 1
    top = np.maximum.accumulate(number * width + rank)
    reach = np.empty(n, np.int64)
    ordered = np.unique(hi)
    reach = ordered[top - number * width]
    new = fresh.copy()
    new[1:] |= lo[1:] >= reach[:-1]
    group = np.cumsum(new) - 1
    many = np.bincount(group)[group] > 1
    return np.sort(order[many])


def _ascending(buffer: Int64, begin: Int64) -> bool:
    step = np.diff(buffer)
    if int(step.min()) < 0:
        return False
    return bool(((step > 0) | (np.diff(begin) >= 0)).all())


def _settle(reads: ReadTable, rows: Int64) -> Writes:
    """Compare some requests as boxes of their buffers and cut the earlier ones."""
    boxes = _Boxes.of(reads, rows)
    order = reads.order[rows]
    buffer = reads.buffer_id[rows]
    by_buffer = np.argsort(buffer, kind="stable")
    _, number = np.unique(buffer, return_inverse=True)
    grouped = number[by_buffer].astype(np.int64)
    left, right = cross(grouped, grouped, int(grouped[-1]) + 1)
    left, right = by_buffer[left], by_buffer[right]
    meet = (left != right) & (order[right] >= order[left])
    left, right = left[meet], right[meet]
    meet = boxes.meet(left, right)
    left, right = left[meet], right[meet]
    if len(left) == 0:
        return Writes(np.arange(len(reads)), reads.start, reads.count, reads.dst_offset, 0)
    tie = order[left] == order[right]
    if tie.any():
        k = int(np.argmax(tie))
        a, b = sorted((int(rows[left[k]]), int(rows[right[k]])))
        name = reads.buffers.name(int(buffer[left[k]]))
        raise OverlapError(
            f"buffer {name!r}: {reads._where(a)[1]} and {reads._where(b)[1]} write the same elements with equal program "
            f"order {int(order[left[k]])}",
            tensor=name,
        )
    materialised = reads.kind[rows[left]] == KIND_MATERIALISED
    if materialised.any():
        k = int(np.argmax(materialised))
        raise PlanError(
            f"{reads._where(int(rows[right[k]]))[1]} writes, later in program order, into what "
            f"{reads._where(int(rows[left[k]]))[1]} leaves to the engine's own loader",
            tensor=reads.buffers.name(int(buffer[left[k]])),
        )
    boxes.require_boxes(reads, np.unique(np.concatenate([left, right])))
    return _cut(reads, rows, boxes, left, right)


def _cut(reads: ReadTable, rows: Int64, boxes: _Boxes, left: Int64, right: Int64) -> Writes:
    cut = np.unique(left)
    number = np.searchsorted(cut, left)
    origin, lo, hi = subtract(
        np.arange(len(cut)),
        [c[cut] for c in boxes.lo],
        [c[cut] for c in boxes.hi],
        number,
        [c[right] for c in boxes.lo],
        [c[right] for c in boxes.hi],
    )
    piece = cut[origin]
    table_row = rows[piece]
    n_dims = reads.n_dims
    start = [reads.start[d][table_row].copy() for d in range(n_dims)]
    count = [reads.count[d][table_row].copy() for d in range(n_dims)]
    offset = reads.dst_offset[table_row].copy()
    for d in range(n_dims):
        dim = boxes.dim_of[d][piece]
        for e in range(len(lo)):
            here = dim == e
            if not here.any():
                continue
            # k along d is the buffer coordinate less the box's first one (from the other end where it runs backwards)
            first = lo[e] - boxes.lo[e][piece]
            size = hi[e] - lo[e]
            back = boxes.hi[e][piece] - hi[e]
            k = np.where(reads.dst_stride[d][table_row] < 0, back, first)
            start[d] = np.where(here, start[d] + k * reads.step[d][table_row], start[d])
            count[d] = np.where(here, size, count[d])
            offset = np.where(here, offset + k * reads.dst_stride[d][table_row], offset)
    keep = np.ones(len(reads), np.bool_)
    keep[rows[cut]] = False
    kept = np.flatnonzero(keep)
    all_rows = np.concatenate([kept, table_row])
    order = np.argsort(all_rows, kind="stable")
    return Writes(
        all_rows[order],
        tuple(np.concatenate([c[kept], s])[order] for c, s in zip(reads.start, start, strict=True)),
        tuple(np.concatenate([c[kept], s])[order] for c, s in zip(reads.count, count, strict=True)),
        np.concatenate([reads.dst_offset[kept], offset])[order],
        len(cut),
    )


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Destination views as boxes of their buffers.

    `exact` says that the view is exactly its box; otherwise the box only covers it. `dim_of[d]` is the buffer dim that source dim d
    runs along, -1 for dims of one element.
    """

    lo: list[Int64]
    hi: list[Int64]
    dim_of: list[Int64]
    exact: Bool

    @classmethod
    def of(cls, reads: ReadTable, rows: Int64) -> _Boxes:
        buffer = reads.buffer_id[rows]
        shape = [c[buffer] for c in reads.buffers.shape] or [np.ones(len(rows), np.int64)]
        n_dims = len(shape)
        stride: list[Int64] = []
        running = np.ones(len(rows), np.int64)
        for size in reversed(shape):
            stride.insert(0, running)
            running = running * size
        rest = reads.dst_reach[0][rows].copy()
        lo = []
        for s in stride:
            lo.append(rest // s)
            rest = rest % s
        hi = [c + 1 for c in lo]
        exact = np.ones(len(rows), np.bool_)
        used = [np.zeros(len(rows), np.bool_) for _ in range(n_dims)]
        dim_of = []
        for d in range(reads.n_dims):
            count, step = reads.count[d][rows], np.abs(reads.dst_stride[d][rows])
            real = count > 1
            dim = np.full(len(rows), -1, np.int64)
            for e in range(n_dims):
                here = real & (dim < 0) & (step == stride[e]) & (shape[e] > 1) & ~used[e]
                here &= count <= shape[e] - lo[e]
                dim[here] = e
                used[e] |= here
                hi[e] = np.where(here, lo[e] + count, hi[e])
            exact &= ~real | (dim >= 0)
            dim_of.append(dim)
        # what is no box is covered by whole slices of the buffer's outermost dim
        last = reads.dst_reach[1][rows]
        for e in range(n_dims):
            if e == 0:
                lo[e] = np.where(exact, lo[e], reads.dst_reach[0][rows] // stride[0])
                hi[e] = np.where(exact, hi[e], last // stride[0] + 1)
            else:
                lo[e] = np.where(exact, lo[e], 0)
                hi[e] = np.where(exact, hi[e], shape[e])
        return cls(lo, hi, dim_of, exact)

    def meet(self, left: Int64, right: Int64) -> Bool:
        out = np.ones(len(left), np.bool_)
        for a, b in zip(self.lo, self.hi, strict=True):
            out &= (a[left] < b[right]) & (a[right] < b[left])
        return out

    def require_boxes(self, reads: ReadTable, rows: Int64) -> None:
        wrong = ~self.exact[rows]
        if wrong.any():
            raise PlanError(
                "overlapping writes, in program order, of views that are no boxes of their buffer", got=int(wrong.sum())
            )
