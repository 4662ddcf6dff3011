"""What does a piece look like in memory, and how is it fetched? Strides, merging, exact runs or spans.

1. A piece is a strided block of bytes on both sides; dims that are packed on both sides merge.
2. Exact (one descriptor a run) or span (one descriptor for the covering range of the shard, into staging,
   then a local strided copy): the cost model decides, and the budget of runs a block overrides it. Casts
   always go through staging.
3. A cast of few runs gathers them in staging: it is split into pieces of one run. A span over the limit is split
   along its outermost dims; a single run over the limit too.
4. Spans of one shard that overlap are read once; they are rounded outwards first where that is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from reshard.planner.classify import Bool, Int64, ragged_arange
from reshard.planner.join import Pieces, TemplateRequests
from reshard.planner.options import PlanOptions
from reshard.planner.sources import SourceBoxes

MODE_EXACT: Final = 0
MODE_SPAN: Final = 1
MODE_GATHER: Final = 2
ALIGN: Final = 64
_MOST_ROUNDING: Final = 16
"""A span that is rounded grows by at most one part in so many."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Pieces as strided blocks, relative to the shard and to the request's first destination unit.

    Attributes
    ----------
    src_offset, dst_offset : int64[P]
        Bytes from the shard's start, and from the request's first destination byte (may be negative where
        strides are).
    run : int64[P]
        Units of the innermost contiguous run.
    n_runs : int64[P]
    src_unit, dst_unit : int64[P]
        Bytes of a unit on each side; they differ where a cast lies between.
    count, src_stride, dst_stride : D int64[P]
        Outer dims after merging, outermost first, left-padded with 1 and 0; strides in bytes.
    span : int64[P]
        Bytes of the covering range of the shard.
    """

    src_offset: Int64
    dst_offset: Int64
    run: Int64
    n_runs: Int64
    src_unit: Int64
    dst_unit: Int64
    count: list[Int64]
    src_stride: list[Int64]
    dst_stride: list[Int64]
    span: Int64

    def n_descriptors(self, strided: bool) -> Int64:
        """Descriptors of each piece read exactly: its runs, or (strided) its series of runs."""
        return self.n_runs // self.count[-1] if strided else self.n_runs


def _shard_strides(boxes: SourceBoxes, box: Int64) -> list[Int64]:
    """Row-major strides, in units, of the shards that pieces read."""
    strides: list[Int64] = []
    stride = np.ones(len(box), np.int64)
    for d in reversed(range(len(boxes.start))):
        strides.insert(0, stride)
        stride = stride * (boxes.shard_stop[d][box] - boxes.shard_start[d][box])
    return strides


def lay_out(pieces: Pieces, requests: TemplateRequests, boxes: SourceBoxes, src_unit: Int64, dst_unit: Int64) -> Layout:
    """Describe pieces as strided blocks.

    Parameters
    ----------
    src_unit, dst_unit : int64[Q]
        Bytes of a unit of each template request, on each side.
    """
    q, n_dims, n = pieces.request, len(pieces.lo), len(pieces)
    isz, osz = src_unit[q], dst_unit[q]
    strides = _shard_strides(boxes, pieces.box)
    src_offset, dst_offset = np.zeros(n, np.int64), np.zeros(n, np.int64)
    span = isz.copy()
    src, dst = [], []
    for d in range(n_dims):
        step, k = requests.step[d][q], pieces.lo[d]
        at = requests.start[d][q] + step * k - boxes.shard_start[d][pieces.box]
        src_offset += at * strides[d]
        dst_offset += k * requests.stride[d][q]
        src.append(strides[d] * step * isz)
        dst.append(requests.stride[d][q] * osz)
        span += (pieces.count[d] - 1) * src[d]
    # merge from the innermost dim outwards: top is the dim that the next one may continue
    count = np.ones((n_dims + 1, n), np.int64)
    src_stride, dst_stride = np.zeros((n_dims + 1, n), np.int64), np.zeros((n_dims + 1, n), np.int64)
    # slot n_dims is the run itself: one unit that a contiguous dim may continue
    src_stride[n_dims], dst_stride[n_dims] = isz, osz
    top = np.full(n, n_dims)
    column = np.arange(n)
    for d in reversed(range(n_dims)):
        e = pieces.count[d]
        real = e > 1
        packed = (src[d] == src_stride[top, column] * count[top, column]) & (
            dst[d] == dst_stride[top, column] * count[top, column]
        )
        merge = real & packed
        count[top[merge], column[merge]] *= e[merge]
        fresh = real & ~packed
        top = top - fresh
        count[top[fresh], column[fresh]] = e[fresh]
        src_stride[top[fresh], column[fresh]] = src[d][fresh]
        dst_stride[top[fresh], column[fresh]] = dst[d][fresh]
    run = count[n_dims]
    n_runs = count[:n_dims].prod(axis=0)
    # what is not an outer dim keeps count 1 and stride 0
    outer = count[:n_dims] > 1
    return Layout(
        src_offset * isz,
        dst_offset * osz,
        run,
        n_runs,
        isz,
        osz,
        list(count[:n_dims]),
        list(np.where(outer, src_stride[:n_dims], 0)),
        list(np.where(outer, dst_stride[:n_dims], 0)),
        span,
    )


def choose_modes(layout: Layout, cast: Bool, options: PlanOptions) -> Int64:
    """Exact, span, or (for casts) the runs of an exact read gathered in staging, for each piece."""
    cost = options.cost
    n = layout.n_descriptors(options.strided_rows)
    useful = layout.run * layout.n_runs * layout.src_unit
    runs_s = n * cost.descriptor_s + useful / cost.wire_bytes_per_s
    span_s = cost.descriptor_s + layout.span / cost.wire_bytes_per_s
    copy_s = np.where(cast, 0.0, useful / cost.copy_bytes_per_s)
    exact = (n <= options.max_runs_per_block) & (runs_s <= span_s + copy_s)
    exact |= layout.n_runs == 1
    # a cast goes through staging either way; series of runs do too, so budget its runs one by one
    gather = exact & (layout.n_runs <= options.max_runs_per_block) & (layout.n_runs > 1)
    return np.where(cast, np.where(gather, MODE_GATHER, MODE_SPAN), np.where(exact, MODE_EXACT, MODE_SPAN))


def split_to_runs(pieces: Pieces, layout: Layout, mode: Int64) -> tuple[Pieces, Int64] | None:
    """Split pieces that are to be gathered, one dim a round, until each is one run; None if all are."""
    over = np.flatnonzero((mode == MODE_GATHER) & (layout.n_runs > 1))
    if len(over) == 0:
        return None
    # the outermost dim of more than one element is never part of the run while there are several runs
    dim = _outermost(pieces, over)
    count = np.stack(pieces.count)[dim, over]
    return _split(pieces, over, dim, count, np.ones(len(over), np.int64))


def split_to_limit(pieces: Pieces, layout: Layout, staged: Bool, limit: int) -> tuple[Pieces, Int64] | None:
    """Split staged pieces whose covering range exceeds `limit` bytes; None if none does.

    Each round splits an offending piece along its outermost dim of more than one element.
    """
    over = np.flatnonzero(staged & (layout.span > limit))
    if len(over) == 0:
        return None
    dim = _outermost(pieces, over)
    count = np.stack(pieces.count)[dim, over]
    # parts of at most ceil(count / n_parts): their spans shrink at least in proportion
    n_parts = np.minimum(count, np.maximum(2, -(-layout.span[over] // limit)))
    return _split(pieces, over, dim, count, -(-count // n_parts))


def _outermost(pieces: Pieces, rows: Int64) -> Int64:
    """The outermost dim of more than one element (the last dim where there is none)."""
    n_dims = len(pieces.lo)
    dim = np.full(len(rows), n_dims - 1)
    for d in reversed(range(n_dims)):
        dim[pieces.count[d][rows] > 1] = d
    return dim


def _split(pieces: Pieces, over: Int64, dim: Int64, count: Int64, size: Int64) -> tuple[Pieces, Int64]:
    """Split the pieces `over` along their `dim` into parts of `size` elements; and where each came from."""
    n_dims = len(pieces.lo)
    n_parts = -(-count // size)
    keep = np.ones(len(pieces), np.bool_)
    keep[over] = False
    kept = np.flatnonzero(keep)
    rows = np.repeat(np.arange(len(over)), n_parts)
    begin = ragged_arange(n_parts) * size[rows]
    length = np.minimum(size[rows], count[rows] - begin)
    lo, counts = [], []
    for d in range(n_dims):
        here = dim[rows] == d
        a, n = pieces.lo[d][over][rows], pieces.count[d][over][rows]
        lo.append(np.concatenate([pieces.lo[d][kept], np.where(here, a + begin, a)]))
        counts.append(np.concatenate([pieces.count[d][kept], np.where(here, length, n)]))
    origin = np.concatenate([kept, over[rows]])
    order = np.lexsort([*reversed(lo), pieces.box[origin], pieces.request[origin]])
    origin = origin[order]
    split = Pieces(pieces.request[origin], pieces.box[origin], [c[order] for c in lo], [c[order] for c in counts])
    return split, origin


@dataclass(frozen=True, eq=False)
class Fetches:
    """What is read into staging, on templates; ordered by (class, group, box, offset).

    Attributes
    ----------
    box : int64[F]
        Source box.
    src_offset, n_bytes : int64[F]
        Range of the shard.
    group : int64[F]
        Staging group: fetches that are in staging together with all pieces that use them.
    staging : int64[F]
        Offset within the group, aligned to 64 bytes.
    group_cls, group_bytes : int64[G]
        Class of each group and the staging that it takes.
    """

    box: Int64
    src_offset: Int64
    n_bytes: Int64
    group: Int64
    staging: Int64
    group_cls: Int64
    group_bytes: Int64

    def __len__(self) -> int:
        return len(self.box)


def plan_fetches(
    pieces: Pieces, layout: Layout, mode: Int64, boxes: SourceBoxes, limit: int, *, round_spans: bool = False
) -> tuple[Fetches, Int64]:
    """Merge overlapping spans of one shard and pack them into staging groups of at most `limit` bytes.

    Parameters
    ----------
    round_spans
        See `PlanOptions.round_spans`.

    Returns
    -------
    Fetches
    fetch : int64[P]
        The fetch that each staged piece lies in, -1 for exact ones.
    """
    staged = np.flatnonzero(mode != MODE_EXACT)
    fetch = np.full(len(pieces), -1, np.int64)
    none = np.zeros(0, np.int64)
    if len(staged) == 0:
        return Fetches(none, none, none, none, none, none, none), fetch
    box, begin = pieces.box[staged], layout.src_offset[staged]
    end = begin + layout.span[staged]
    if round_spans:
        begin, end = _rounded(begin, end, layout, staged, pieces, boxes, limit)
    order = np.lexsort([begin, box])
    box, begin, end, rows = box[order], begin[order], end[order], staged[order]
    new = np.ones(len(rows), np.bool_)
    # offsets stay far under 2**62 / rows only for sane tables: compare within a box by running maximum per box
    reach = _running_max(box, end)
    new[1:] = (box[1:] != box[:-1]) | (begin[1:] > reach[:-1])
    number = np.cumsum(new) - 1
    first = np.flatnonzero(new)
    stop = np.maximum.reduceat(end, first)
    too_long = (stop - begin[first] > limit)[number]
    if too_long.any():
        # a union over the limit is not formed: its spans are read one by one, equal ones once
        same = np.zeros(len(rows), np.bool_)
        same[1:] = (box[1:] == box[:-1]) & (begin[1:] == begin[:-1]) & (end[1:] == end[:-1])
        new |= too_long & ~same
        number = np.cumsum(new) - 1
        first = np.flatnonzero(new)
        stop = np.maximum.reduceat(end, first)
    fetch[rows] = number
    fetch_box, fetch_begin = box[first], begin[first]
    n_bytes = stop - fetch_begin
    group, staging, group_cls, group_bytes = _pack_groups(boxes.cls[fetch_box], n_bytes, limit)
    return Fetches(fetch_box, fetch_begin, n_bytes, group, staging, group_cls, group_bytes), fetch


def _rounded(
    begin: Int64, end: Int64, layout: Layout, staged: Int64, pieces: Pieces, boxes: SourceBoxes, limit: int
) -> tuple[Int64, Int64]:
    """Ranges rounded outwards to whole indices of their piece's outermost dim, where that is little."""
    period = np.ones(len(staged), np.int64)
    for count, stride in zip(reversed(layout.count), reversed(layout.src_stride), strict=True):
        period = np.where(count[staged] > 1, stride[staged], period)
    shard = layout.src_unit[staged].copy()
    for first, last in zip(boxes.shard_start, boxes.shard_stop, strict=True):
        shard *= (last - first)[pieces.box[staged]]
    first, last = begin // period * period, np.minimum(-(-end // period) * period, shard)
    length, added = end - begin, (last - first) - (end - begin)
    little = (added * _MOST_ROUNDING <= length) & (length + added <= limit)
    return np.where(little, first, begin), np.where(little, last, end)


def _running_max(part: Int64, values: Int64) -> Int64:
    """Running maximum of values, restarted with each part (parts are adjacent)."""
    _, rank = np.unique(values, return_inverse=True)
    width = int(rank.max()) + 1
    new = np.ones(len(part), np.bool_)
    new[1:] = part[1:] != part[:-1]
    number = np.cumsum(new) - 1
    top = np.maximum.accumulate(number * width + rank)
    ordered = np.unique(values)
    out: Int64 = ordered[top - number * width]
    return out


def _pack_groups(cls: Int64, n_bytes: Int64, limit: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Next-fit packing of each class's fetches, in order."""
    size = -(-n_bytes // ALIGN) * ALIGN
    total = np.bincount(cls, weights=size)
    ends = np.cumsum(size)
    new = np.ones(len(cls), np.bool_)
    new[1:] = cls[1:] != cls[:-1]
    # only classes that exceed the limit need a walk, group by group
    for c in np.flatnonzero(total > limit).tolist():
        rows = np.flatnonzero(cls == c)
        i = 0
        while i < len(rows):
            new[rows[i]] = True
            base = int(ends[rows[i]] - size[rows[i]])
            i = max(i + 1, int(np.searchsorted(ends[rows], base + limit, side="right")))
    group = np.cumsum(new) - 1
    first = np.flatnonzero(new)
    staging = ends - size - (ends - size)[first][group]
    group_bytes = np.add.reduceat(size, first)
    return group, staging, cls[first], group_bytes
