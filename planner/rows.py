"""Columns that a transport and a copier read: wire rows, local copies and fills, made from templates.

A wire row is one regular series of runs: `count` runs of `run_bytes`, each side with its own stride. A block
of more than one outer dim becomes several rows; runs that backends want one by one are expanded in `bind`,
not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from reshard.planner.assemble import Segment
from reshard.planner.classify import Bool, Int64, ragged_arange
from reshard.planner.shape import MODE_EXACT

if TYPE_CHECKING:
    from reshard.planner.plans import Plan

STAGING: Final = -1


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

    def take(self, rows: slice) -> LocalCopies:
        """Some of the copies."""
        return LocalCopies(
            self.request[rows],
            self.staging_offset_bytes[rows],
            self.buffer[rows],
            self.dst_offset_bytes[rows],
            self.src_code[rows],
            self.dst_code[rows],
            self.src_unit[rows],
            self.dst_unit[rows],
            self.run_units[rows],
            tuple(c[rows] for c in self.count),
            tuple(c[rows] for c in self.src_stride_bytes),
            tuple(c[rows] for c in self.dst_stride_bytes),
            self.shape_class[rows],
        )


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


@dataclass(frozen=True, eq=False)
class HolderRows:
    """All wire rows of one holder, ordered by wave.

    Attributes
    ----------
    rows : WireRows
    wave_start : int64[W + 1]
        Where each wave's rows start.
    """

    rows: WireRows
    wave_start: Int64

    def wave(self, wave: int) -> WireRows:
        """Rows of one wave."""
        return self.rows.take(slice(int(self.wave_start[wave]), int(self.wave_start[wave + 1])))


class RowMaker:
    """Makes the wire rows of a plan, holder by holder, from its templates.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        requests, layout = plan.requests, plan.templates.layout
        bits = plan.buffers.bits[requests.buffer] if len(requests) else requests.buffer
        self._first_byte = requests.dst_offset * bits // 8
        self._one_request = len(requests) == len(plan.templates.classes.tensor)
        self._run_bytes = layout.run * layout.src_unit
        # the innermost outer dim stays in the row; the others become rows of their own
        self._n_rows = np.ones(len(layout.run), np.int64)
        for count in layout.count[:-1]:
            self._n_rows *= count

    def holder_rows(self, holder: int) -> HolderRows:
        """Rows of one of `plan.holders`, runs that continue each other merged."""
        plan = self._plan
        segment = plan.segments[holder]
        is_fetch = plan.templates.items.fetch[segment.item] >= 0
        made: list[tuple[WireRows, Int64]] = []
        if not is_fetch.all():
            made.append(self._exact(holder, segment, ~is_fetch))
        if is_fetch.any():
            made.append(self._fetch(holder, segment, is_fetch))
        rows = join_rows([m[0] for m in made])
        if plan.n_waves == 1:
            merged, _ = merge_rows(rows, None)
            return HolderRows(merged, np.array([0, len(merged)]))
        wave = np.concatenate([m[1] for m in made])
        order = np.argsort(wave.astype(np.int32), kind="stable")
        merged, wave = merge_rows(rows.take(order), wave[order])
        return HolderRows(merged, np.searchsorted(wave, np.arange(plan.n_waves + 1)))

    def _exact(self, holder: int, segment: Segment, items: Bool) -> tuple[WireRows, Int64]:
        """Rows, and waves, of the items that are read straight into their buffers."""
        t, requests, waves = self._plan.templates, self._plan.requests, self._plan.waves
        layout = t.layout
        item, n = segment.item[items], segment.n_members[items]
        tensor, src, region = _instances(segment, items)
        piece = t.items.piece[item]
        request = tensor
        if not self._one_request:
            request = t.classes.request_first[tensor] + np.repeat(t.requests.nth[t.pieces.request[piece]], n)
        dst = self._first_byte[request] + np.repeat(layout.dst_offset[piece], n)
        buffer = requests.buffer[request]
        wave = request if waves.request_wave is None else waves.request_wave[request]
        if int(self._n_rows[piece].max()) > 1:
            each = np.repeat(piece, n)
            rows = self._n_rows[each]
            at = np.repeat(np.arange(len(each)), rows)
            each, nth = each[at], ragged_arange(rows)
            src, dst, buffer, region, wave = src[at], dst[at], buffer[at], region[at], wave[at]
            for d in reversed(range(len(layout.count) - 1)):
                count = layout.count[d][each]
                k, nth = nth % count, nth // count
                src += k * layout.src_stride[d][each]
                dst += k * layout.dst_stride[d][each]
            n = n * self._n_rows[piece]
        shape = (self._run_bytes, layout.count[-1], layout.src_stride[-1], layout.dst_stride[-1])
        columns = [np.repeat(c[piece], n) for c in shape]
        return WireRows(np.full(len(src), holder, np.int64), region, src, buffer, dst, *columns), wave

    def _fetch(self, holder: int, segment: Segment, items: Bool) -> tuple[WireRows, Int64]:
        """Rows, and waves, of the items that are read into staging."""
        t, waves = self._plan.templates, self._plan.waves
        tensor, src, region = _instances(segment, items)
        fetch = np.repeat(t.items.fetch[segment.item[items]], segment.n_members[items])
        unit = waves.unit(t.fetches.group[fetch], tensor)
        none = np.zeros(len(src), np.int64)
        place = waves.unit_offset[unit] + t.fetches.staging[fetch]
        rows = WireRows(
            none + holder, region, src, none + STAGING, place, t.fetches.n_bytes[fetch], none + 1, none, none
        )
        return rows, waves.unit_wave[unit]


def _instances(segment: Segment, items: Bool) -> tuple[Int64, Int64, Int64]:
    """Tensor, source offset and region of the instances of some items."""
    region = np.zeros(len(segment), np.int64) if segment.region is None else segment.region
    if items.all():
        return segment.tensor, segment.src_offset, region
    keep = np.repeat(items, segment.n_members)
    return segment.tensor[keep], segment.src_offset[keep], region[keep]


def join_rows(parts: Sequence[WireRows]) -> WireRows:
    """Rows one after another."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.zeros(0, np.int64)
        return WireRows(*([none] * 9))
    return WireRows(*(np.concatenate([getattr(p, name) for p in parts]) for name in WireRows.__dataclass_fields__))


def merge_rows(rows: WireRows, wave: Int64 | None) -> tuple[WireRows, Int64]:
    """Merge rows of one holder, and one wave, that continue each other on both sides.

    Rows of one run merge where the second starts at the end of the first in source and destination. Rows of
    several runs merge where they have equal runs and strides and the second's first run follows the first's
    last one at the same stride. Where nothing merges, rows stay in template order: equal shapes side by side
    expand fastest.

    Parameters
    ----------
    wave : int64[N] or None
        Ascending; None is one wave.

    Returns
    -------
    WireRows, int64
        The rows, and their waves (those given, where nothing merges).
    """
    number = np.zeros(0, np.int64) if wave is None else wave
    if len(rows) < 2:
        return rows, number
    if wave is None and bool((rows.region == rows.region[0]).all()):
        order = np.argsort(rows.src_offset_bytes, kind="stable")
    else:
        order = np.lexsort([rows.src_offset_bytes, rows.region, *([] if wave is None else [wave])])
    series = rows.count > 1
    end = rows.src_offset_bytes + np.where(series, rows.count * rows.src_stride_bytes, rows.run_bytes)
    near = np.flatnonzero(rows.src_offset_bytes[order[1:]] == end[order[:-1]])
    a, b = order[near], order[near + 1]
    same = (rows.region[a] == rows.region[b]) & (rows.dst_buffer[a] == rows.dst_buffer[b])
    same &= series[a] == series[b]
    extent = np.where(series[a], rows.count[a] * rows.dst_stride_bytes[a], rows.run_bytes[a])
    same &= rows.dst_offset_bytes[b] - rows.dst_offset_bytes[a] == extent
    alike = (rows.run_bytes[a] == rows.run_bytes[b]) & (rows.src_stride_bytes[a] == rows.src_stride_bytes[b])
    alike &= rows.dst_stride_bytes[a] == rows.dst_stride_bytes[b]
    same &= alike | ~series[a]
    if wave is not None:
        same &= wave[a] == wave[b]
    if not same.any():
        return rows, number
    joined = np.zeros(len(rows), np.bool_)
    joined[near[same] + 1] = True
    first = np.flatnonzero(~joined)
    total = np.add.reduceat(rows.run_bytes[order], first)
    count = np.add.reduceat(rows.count[order], first)
    head = rows.take(order[first])
    single = head.count == 1
    run = np.where(single, total, head.run_bytes)
    merged = replace(head, run_bytes=run, count=np.where(single, 1, count))
    return merged, number if wave is None else wave[order[first]]


@dataclass(frozen=True, eq=False)
class StagedCopies:
    """All local copies of a plan, ordered by wave; `wave_start` is int64[W + 1]."""

    copies: LocalCopies
    wave_start: Int64


def copy_columns(plan: Plan) -> StagedCopies:
    """Every copy out of staging."""
    from reshard.planner.plans import member_ranges

    t, waves, requests = plan.templates, plan.waves, plan.requests
    layout = t.layout
    staged = np.flatnonzero(t.mode != MODE_EXACT)
    row, tensor = member_ranges(t.classes, t.requests.cls[t.pieces.request[staged]])
    piece = staged[row]
    fetch = t.piece_fetch[piece]
    unit = waves.unit(t.fetches.group[fetch], tensor) if len(piece) else piece
    wave = waves.unit_wave[unit]
    order = np.argsort(wave.astype(np.int32), kind="stable")
    piece, tensor, fetch, unit, wave = piece[order], tensor[order], fetch[order], unit[order], wave[order]
    template = t.pieces.request[piece]
    request = t.classes.request_first[tensor] + t.requests.nth[template]
    buffer = requests.buffer[request]
    inside = t.fetches.staging[fetch] + layout.src_offset[piece] - t.fetches.src_offset[fetch]
    copies = LocalCopies(
        requests.origin[request],
        waves.unit_offset[unit] + inside,
        buffer,
        requests.dst_offset[request] * plan.buffers.bits[buffer] // 8 + layout.dst_offset[piece],
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
    return StagedCopies(copies, np.searchsorted(wave, np.arange(plan.n_waves + 1)))
