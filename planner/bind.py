"""Which absolute addresses does a backend read? Plans bound to one set of base addresses.

Rows come in equal-length local and remote lists, by wave and holder. Row i has equal bytes (and count) on
both sides. Arithmetic is int64 modulo 2**64, viewed as uint64 at the edge; every range is checked to lie
below 2**64 first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from reshard.planner.classify import Int64, UInt64, ragged_arange
from reshard.planner.errors import PlanError
from reshard.planner.rows import STAGING, WireRows
from reshard.planner.shards import Holder

if TYPE_CHECKING:
    from reshard.planner.plans import Plan

_PIECE_RUNS: Final = 1 << 14
_MIN_GROUP: Final = 8
_NONE: Final[UInt64] = np.zeros((0, 0), np.uint64)


@dataclass(frozen=True, eq=False)
class PeerRows:
    """Descriptor rows to and from one holder.

    Attributes
    ----------
    holder : Holder
    memory : str
        The holder's memory kind.
    local, remote : uint64[N, 3] or uint64[N, 5]
        C-order rows (address, bytes, device) or (address, bytes, device, stride, count).
    """

    holder: Holder
    memory: str
    local: UInt64
    remote: UInt64

    @property
    def n_bytes(self) -> int:
        """Bytes that the rows move."""
        if self.local.shape[1] == 5:
            return int((self.local[:, 1] * self.local[:, 4]).sum())
        return int(self.local[:, 1].sum())


@dataclass(frozen=True, eq=False)
class BoundPlan:
    """A plan with addresses.

    Attributes
    ----------
    waves : tuple of tuple of PeerRows
        By wave, then by holder (only holders with rows in that wave).
    local_memory : str
        Memory kind of buffers and staging.
    tables : tuple of (uint64[M, 3 or 5], uint64[M, 3 or 5])
        Local and remote rows of each of `Plan.holders`, of all waves; `waves` are views of them.
    """

    waves: tuple[tuple[PeerRows, ...], ...]
    local_memory: str
    tables: tuple[tuple[UInt64, UInt64], ...]


def _bases(values: UInt64, n: int, what: str) -> UInt64:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.uint64)
    if array.ndim != 1 or len(array) < n or array.dtype.kind not in "iu":
        raise PlanError(
            f"{what}: got {array.dtype} of shape {array.shape}; expected uint64 of {n} base addresses",
            got=array.shape,
            expected=n,
        )
    if array.dtype.kind == "i" and bool((array < 0).any()):
        raise PlanError(
            f"{what}: got {int(array.min())}; expected addresses of 0 or more", got=int(array.min()), expected=0
        )
    return array.astype(np.uint64)


def _check_range(bases: UInt64, n_bytes: Int64, what: str) -> None:
    """Base + bytes <= 2**64 for each region."""
    room = np.uint64(0xFFFFFFFFFFFFFFFF) - bases
    wrong = (n_bytes > 0) & (np.maximum(n_bytes - 1, 0).astype(np.uint64) > room)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise PlanError(
            f"{what} {i}: base {int(bases[i]):#x} + {int(n_bytes[i])} bytes passes 2**64",
            got=int(bases[i]),
            expected=(1 << 64) - int(n_bytes[i]),
        )


def bind_plan(
    plan: Plan,
    source_bases: Mapping[str, UInt64],
    destination_bases: UInt64,
    staging_base: int,
    *,
    strided: bool,
    local_device: int,
    local_memory: str,
    into: BoundPlan | None = None,
) -> BoundPlan:
    """See `Plan.bind`."""
    missing = [h.name for h in plan.holders if h.name not in source_bases]
    if missing:
        raise PlanError(f"no base addresses for holders {missing[:8]}; the plan reads from them", got=missing)
    local = _bases(destination_bases, len(plan.buffers), "destination bases")
    _check_range(local[: len(plan.buffers)], plan.buffer_bytes, "destination buffer")
    if not 0 <= staging_base < 1 << 64:
        raise PlanError(f"staging base {staging_base}; expected 0 to 2**64", got=staging_base)
    staging = np.array([staging_base], np.uint64)
    _check_range(staging, np.array([plan.staging_bytes]), "staging arena")
    # index -1 (staging) reaches the last element
    local = np.append(local[: len(plan.buffers)], staging)
    remote: list[UInt64] = []
    for holder, region_bytes in zip(plan.holders, plan.region_bytes, strict=True):
        bases = _bases(source_bases[holder.name], len(region_bytes), f"holder {holder.name!r}: source bases")
        _check_range(bases[: len(region_bytes)], region_bytes, f"holder {holder.name!r}: region")
        remote.append(bases)
    # one allocation for all holders: the kernel backs it with large pages, which many small ones do not get
    arena: tuple[UInt64, UInt64] | None = None
    used = 0
    waves: list[list[PeerRows]] = [[] for _ in range(plan.n_waves)]
    tables: list[tuple[UInt64, UInt64]] = []
    for h, (holder, bases, made) in enumerate(zip(plan.holders, remote, plan.wire(), strict=True)):
        rows, start = made.rows, made.wave_start
        src = bases.view(np.int64)[rows.region] + rows.src_offset_bytes
        dst = local.view(np.int64)[rows.dst_buffer] + rows.dst_offset_bytes
        if strided:
            near, far, n_rows = _strided_rows(rows, dst, src, local_device, holder.device)
        else:
            n_rows = rows.count
            total = int(n_rows.sum())
            near, far = into.tables[h] if into is not None and h < len(into.tables) else (_NONE, _NONE)
            if near.shape != (total, 3):
                if arena is None:
                    arena = np.empty((_most_runs(plan), 3), np.uint64), np.empty((_most_runs(plan), 3), np.uint64)
                near, far = arena[0][used : used + total], arena[1][used : used + total]
                used += total
            _flat_rows(rows, near.view(np.int64), dst, far.view(np.int64), src, local_device, holder.device)
        tables.append((near, far))
        cuts = np.append(0, np.cumsum(n_rows))[start].tolist()
        for wave in np.flatnonzero(np.diff(start)).tolist():
            here = slice(cuts[wave], cuts[wave + 1])
            waves[wave].append(PeerRows(holder, holder.memory, near[here], far[here]))
    return BoundPlan(tuple(tuple(peers) for peers in waves), local_memory, tuple(tables))


def _most_runs(plan: Plan) -> int:
    """At least as many runs as the plan reads; fewer by those blocks that continue each other."""
    t = plan.templates
    members = np.diff(t.classes.member_start)[t.items.cls]
    exact = t.items.fetch < 0
    runs = np.ones(len(t.items), np.int64)
    runs[exact] = t.layout.n_runs[t.items.piece[exact]]
    return int((runs * members).sum())


def _strided_rows(
    rows: WireRows, dst: Int64, src: Int64, dst_device: int, src_device: int
) -> tuple[UInt64, UInt64, Int64]:
    """Tables of five columns, and how many of their rows each row became (backward series are expanded)."""
    n_rows = np.ones(len(rows), np.int64)
    if (rows.dst_stride_bytes < 0).any():
        back = rows.dst_stride_bytes < 0
        n_rows = np.where(back, rows.count, 1)
        at = np.repeat(np.arange(len(rows)), n_rows)
        k = ragged_arange(n_rows)
        dst = dst[at] + k * rows.dst_stride_bytes[at]
        src = src[at] + k * np.where(back, rows.src_stride_bytes, 0)[at]
        rows = rows.take(at)
        back = rows.dst_stride_bytes < 0
        count = np.where(back, 1, rows.count)
        src_stride, dst_stride = np.where(back, 0, rows.src_stride_bytes), np.where(back, 0, rows.dst_stride_bytes)
    else:
        count, src_stride, dst_stride = rows.count, rows.src_stride_bytes, rows.dst_stride_bytes
    out = []
    for address, device, stride in ((dst, dst_device, dst_stride), (src, src_device, src_stride)):
        table = np.empty((len(address), 5), np.int64)
        table[:, 0] = address
        table[:, 1] = rows.run_bytes
        table[:, 2] = device
        # one run has no stride; backends want one of at least its bytes
        table[:, 3] = np.where(count > 1, stride, rows.run_bytes)
        table[:, 4] = count
        out.append(table.view(np.uint64))
    return out[0], out[1], n_rows


def _flat_rows(
    rows: WireRows, local: Int64, dst: Int64, remote: Int64, src: Int64, dst_device: int, src_device: int
) -> None:
    """Write tables of three columns, one row a run, in pieces that stay in the cache.

    Rows of one shape lie side by side (they come from one template): their expansion is one pattern, written
    row by row, plus each row's address. Rows of mixed shapes go through differences and a running sum.
    """
    if len(local) == len(rows):
        for table, address, device in ((local, dst, dst_device), (remote, src, src_device)):
            table[:, 0], table[:, 1], table[:, 2] = address, rows.run_bytes, device
        return
    columns = (rows.count, rows.run_bytes, rows.src_stride_bytes, rows.dst_stride_bytes)
    new = np.zeros(len(rows), np.bool_)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    begin = np.flatnonzero(new)
    if len(begin) * _MIN_GROUP > len(rows) + _MIN_GROUP:
        _mixed_runs(rows, local, dst, rows.dst_stride_bytes, dst_device)
        _mixed_runs(rows, remote, src, rows.src_stride_bytes, src_device)
        return
    at = 0
    for a, b in zip(begin.tolist(), [*begin[1:].tolist(), len(rows)], strict=True):
        count, n_bytes = int(rows.count[a]), int(rows.run_bytes[a])
        stop = at + count * (b - a)
        _equal_runs(local[at:stop], dst[a:b], count, n_bytes, int(rows.dst_stride_bytes[a]), dst_device)
        _equal_runs(remote[at:stop], src[a:b], count, n_bytes, int(rows.src_stride_bytes[a]), src_device)
        at = stop


def _equal_runs(out: Int64, address: Int64, count: int, n_bytes: int, stride: int, device: int) -> None:
    """Expand rows of one shape: `count` runs each."""
    pattern = np.empty((count, 3), np.int64)
    pattern[:, 0] = np.arange(count) * stride
    pattern[:, 1], pattern[:, 2] = n_bytes, device
    by_row = out.reshape(len(address), count * 3)
    flat = pattern.reshape(-1)
    step = max(1, _PIECE_RUNS // count)
    for i in range(0, len(address), step):
        piece = by_row[i : i + step]
        piece[:] = flat
        piece[:, 0::3] += address[i : i + step, None]


def _mixed_runs(rows: WireRows, out: Int64, address: Int64, stride: Int64, device: int) -> None:
    """Expand rows of any shapes."""
    ends = np.cumsum(rows.count)
    first = 0
    while first < len(rows):
        base = int(ends[first] - rows.count[first])
        last = max(first + 1, int(np.searchsorted(ends, base + _PIECE_RUNS, side="right")))
        stop = int(ends[last - 1])
        counts = rows.count[first:last]
        starts = ends[first:last] - counts - base
        # differences of addresses: the stride inside a series, a jump at the start of each
        delta = np.repeat(stride[first:last], counts)
        begin = address[first:last]
        delta[starts[0]] = begin[0]
        delta[starts[1:]] = begin[1:] - (begin[:-1] + (counts[:-1] - 1) * stride[first : last - 1])
        np.cumsum(delta, out=out[base:stop, 0])
        out[base:stop, 1] = np.repeat(rows.run_bytes[first:last], counts)
        out[base:stop, 2] = device
        first = last


__all__ = ["STAGING", "BoundPlan", "PeerRows", "bind_plan"]
