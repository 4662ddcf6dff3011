"""Columns that a transport and a copier read: wire rows, local copies and fills, made from templates.

A wire row is one regular series of runs: `count` runs of `run_bytes`, each side with its own stride. A block
of more than one outer dim becomes several rows; runs that backends want one by one are expanded in `bind`,
not here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from reshard.planner.assemble import Segment
from reshard.planner.classify import Bool, Int64, ragged_arange
from reshard.planner.shape import MODE_EXACT

if TYPE_CHECKING:
    from reshard.planner.plans import Plan

STAGING = -1


@dataclass(frozen=True, eq=False)
class WireRows:
    """Rows of one wave, relative to regions, buffers and the staging arena; grouped by holder.

    Attributes
    ----------
    holder, region : int64[N]
        Index into `Plan.holders`, and the holder's region.
    src_offset_bytes, dst_offset_bytes : int64[N]
        Bytes.
    dst_buffer : int64[N]
        Destination buffer, or -1 for the staging arena.
    run_bytes, count : int64[N]
    src_stride_bytes, dst_stride_bytes : int64[N]
        Bytes between runs (0 where there is one run).
    """

    holder: Int64
    region: Int64
    src_offset_bytes: Int64
    dst_buffer: Int64
    dst_offset_bytes: Int64
    run_bytes: Int64
    count: Int64
    src_stride_bytes: Int64
    dst_stride_bytes: Int64

    def __len__(self) -> int:
        return len(self.holder)

    def take(self, rows: Int64 | Bool | slice) -> WireRows:
        """Some of the rows."""
        return WireRows(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class LocalCopies:
    """Strided copies from staging into buffers.

    Attributes
    ----------
    request : int64[N]
        Row in the read table.
    staging_offset_bytes : int64[N]
        Bytes into the arena.
    buffer, dst_offset_bytes : int64[N]
        Buffer, and bytes into it.
    src_code, dst_code : int64[N]
        Dtype codes; where they differ the copy casts.
    src_unit, dst_unit : int64[N]
        Bytes of a unit (an element, or a byte of packed elements) on each side.
    run_units : int64[N]
        Units of a contiguous run.
    count, src_stride_bytes, dst_stride_bytes : D int64[N]
        Outer dims, outermost first (left-padded with 1 and 0), strides in bytes (destination strides may be
        negative).
    shape_class : int64[N]
        Rows of one number have equal dtype, run, counts and strides (a template).
    """

    request: Int64
    staging_offset_bytes: Int64
    buffer: Int64
    dst_offset_bytes: Int64
    src_code: Int64
    dst_code: Int64
    src_unit: Int64
    dst_unit: Int64
    run_units: Int64
    count: tuple[Int64, ...]
    src_stride_bytes: tuple[Int64, ...]
    dst_stride_bytes: tuple[Int64, ...]
    shape_class: Int64

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, eq=False)
class Fills:
    """Constants to write.

    Attributes
    ----------
    request, buffer, dst_offset_bytes : int64[N]
        Row in the read table, buffer, bytes into it.
    unit : int64[N]
        Bytes of the value.
    count, dst_stride_bytes : D int64[N]
        Extents and strides in bytes.
    values : tuple of bytes
        One unit each.
    """

    request: Int64
    buffer: Int64
    dst_offset_bytes: Int64
    unit: Int64
    count: tuple[Int64, ...]
    dst_stride_bytes: tuple[Int64, ...]
    values: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.request)


def _request_rows(plan: Plan, piece: Int64, tensor: Int64) -> Int64:
    """Row in `plan.requests` of each (piece, member)."""
    t = plan.templates
    return t.classes.request_first[tensor] + t.requests.nth[t.pieces.request[piece]]


def _dst_bytes(plan: Plan, request: Int64, piece: Int64) -> Int64:
    """First destination byte of each (request row, piece)."""
    buffer = plan.requests.buffer[request]
    return plan.requests.dst_offset[request] * plan.buffers.bits[buffer] // 8 + plan.templates.layout.dst_offset[piece]


def wire_columns(plan: Plan, wave: int) -> WireRows:
    """Rows of one wave; see `Plan.rows`."""
    t = plan.templates
    made: list[WireRows] = []
    for holder, segment in enumerate(plan.segments):
        item = np.repeat(segment.item, segment.n_members)
        piece, fetch = t.items.piece[item], t.items.fetch[item]
        exact = fetch < 0
        region = np.zeros(len(item), np.int64) if segment.region is None else segment.region
        for is_exact in (True, False):
            rows = np.flatnonzero(exact == is_exact)
            if not len(rows):
                continue
            make = _exact_rows if is_exact else _fetch_rows
            found = make(plan, wave, holder, piece if is_exact else fetch, segment, region, rows)
            if len(found):
                made.append(merge_rows(found))
    if not made:
        none = np.zeros(0, np.int64)
        return WireRows(*([none] * 9))
    return WireRows(*(np.concatenate([getattr(m, name) for m in made]) for name in WireRows.__dataclass_fields__))


def _exact_rows(
    plan: Plan, wave: int, holder: int, piece: Int64, segment: Segment, region: Int64, rows: Int64
) -> WireRows:
    layout = plan.templates.layout
    piece = piece[rows]
    request = _request_rows(plan, piece, segment.tensor[rows])
    if plan.waves.request_wave is not None:
        mine = plan.waves.request_wave[request] == wave
        rows, piece, request = rows[mine], piece[mine], request[mine]
    dst = _dst_bytes(plan, request, piece)
    src, buffer = segment.src_offset[rows], plan.requests.buffer[request]
    # the innermost outer dim stays in the row; the others become rows of their own
    n_rows = np.ones(len(layout.run), np.int64)
    for count in layout.count[:-1]:
        n_rows *= count
    if len(piece) and int(n_rows[piece].max()) > 1:
        repeat = n_rows[piece]
        at = np.repeat(np.arange(len(piece)), repeat)
        nth = ragged_arange(repeat)
        piece, rows, buffer, src, dst = piece[at], rows[at], buffer[at], src[at], dst[at]
        for d in reversed(range(len(layout.count) - 1)):
            count = layout.count[d][piece]
            k = nth % count
            nth = nth // count
            src = src + k * layout.src_stride[d][piece]
            dst = dst + k * layout.dst_stride[d][piece]
    return WireRows(
        np.full(len(piece), holder, np.int64),
        region[rows],
        src,
        buffer,
        dst,
        (layout.run * layout.src_unit)[piece],
        layout.count[-1][piece],
        layout.src_stride[-1][piece],
        layout.dst_stride[-1][piece],
    )


def _fetch_rows(
    plan: Plan, wave: int, holder: int, fetch: Int64, segment: Segment, region: Int64, rows: Int64
) -> WireRows:
    fetches, waves = plan.templates.fetches, plan.waves
    fetch = fetch[rows]
    unit = waves.unit(fetches.group[fetch], segment.tensor[rows])
    mine = waves.unit_wave[unit] == wave
    rows, fetch, unit = rows[mine], fetch[mine], unit[mine]
    none = np.zeros(len(rows), np.int64)
    return WireRows(
        none + holder,
        region[rows],
        segment.src_offset[rows],
        none + STAGING,
        waves.unit_offset[unit] + fetches.staging[fetch],
        fetches.n_bytes[fetch],
        none + 1,
        none,
        none,
    )


def merge_rows(rows: WireRows) -> WireRows:
    """Merge neighbouring rows of one holder that continue each other on both sides.

    Rows of one run merge where the second starts at the end of the first in source and destination. Rows of
    several runs merge where they have equal runs and strides and the second's first run follows the first's
    last one at the same stride. Where nothing merges, rows stay in template order: equal shapes side by side
    expand fastest.
    """
    if len(rows) < 2:
        return rows
    one_region = bool((rows.region == rows.region[0]).all())
    if one_region:
        order = np.argsort(rows.src_offset_bytes, kind="stable")
    else:
        order = np.lexsort([rows.src_offset_bytes, rows.region])
    a, b = order[:-1], order[1:]
    src_step = np.diff(rows.src_offset_bytes[order])
    series = rows.count > 1
    extent = np.where(series, rows.count * rows.src_stride_bytes, rows.run_bytes)
    near = np.flatnonzero(src_step == extent[order][:-1])
    a, b = a[near], b[near]
    same = (rows.region[a] == rows.region[b]) & (rows.dst_buffer[a] == rows.dst_buffer[b]) & (series[a] == series[b])
    dst_extent = np.where(series[a], rows.count[a] * rows.dst_stride_bytes[a], rows.run_bytes[a])
    same &= rows.dst_offset_bytes[b] - rows.dst_offset_bytes[a] == dst_extent
    alike = (rows.run_bytes[a] == rows.run_bytes[b]) & (rows.src_stride_bytes[a] == rows.src_stride_bytes[b])
    alike &= rows.dst_stride_bytes[a] == rows.dst_stride_bytes[b]
    same &= alike | ~series[a]
    if not same.any():
        return rows
    joined = np.zeros(len(rows) - 1, np.bool_)
    joined[near[same]] = True
    rows, series = rows.take(order), series[order]
    first = np.flatnonzero(np.append(True, ~joined))
    total = np.add.reduceat(rows.run_bytes, first)
    count = np.add.reduceat(rows.count, first)
    single = ~series[first]
    head = rows.take(first)
    return replace(head, run_bytes=np.where(single, total, head.run_bytes), count=np.where(single, 1, count))


def copy_columns(plan: Plan, wave: int) -> LocalCopies:
    """Copies of one wave; see `Plan.copies`."""
    from reshard.planner.plans import member_ranges

    t, waves = plan.templates, plan.waves
    layout = t.layout
    staged = np.flatnonzero(t.mode != MODE_EXACT)
    row, tensor = member_ranges(t.classes, t.requests.cls[t.pieces.request[staged]])
    piece = staged[row]
    fetch = t.piece_fetch[piece]
    unit = waves.unit(t.fetches.group[fetch], tensor) if len(piece) else piece
    mine = waves.unit_wave[unit] == wave
    piece, tensor, fetch, unit = piece[mine], tensor[mine], fetch[mine], unit[mine]
    request = _request_rows(plan, piece, tensor)
    template = t.pieces.request[piece]
    offset = waves.unit_offset[unit] + t.fetches.staging[fetch] + layout.src_offset[piece] - t.fetches.src_offset[fetch]
    return LocalCopies(
        plan.requests.origin[request],
        offset,
        plan.requests.buffer[request],
        _dst_bytes(plan, request, piece),
        t.src_code[template],
        t.dst_code[template],
        layout.src_unit[piece],
        layout.dst_unit[piece],
        layout.run[piece],
        tuple(c[piece] for c in layout.count),
        tuple(c[piece] for c in layout.src_stride),
        tuple(c[piece] for c in layout.dst_stride),
        piece,
    )
