"""What does a plan consist of? Every (request, shard) block, a column at a time.

A block is one template piece at one member. Its piece and tensor and its place at the holder are there (that
is what a plan is made of); every other column follows from them by a gather, and is made when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from reshard.planner.assemble import Segment
from reshard.planner.classify import Bool, Int64

if TYPE_CHECKING:
    from reshard.planner.plans import Plan


class Blocks:
    """Every (request, shard) block of a plan, grouped by holder; all columns are int64.

    Parameters
    ----------
    plan : Plan
    segments : sequence of Segment
        Instances by holder; their items are numbers in `piece_of`.
    piece_of : int64[I]
        Template piece of each item.
    """

    def __init__(self, plan: Plan, segments: Sequence[Segment], piece_of: Int64) -> None:
        self._plan = plan
        self._segments = segments
        self._piece_of = piece_of
        self._n = sum(len(s) for s in segments)

    def __len__(self) -> int:
        return self._n

    def _gathered(self, of: Callable[[int, Segment], Int64]) -> Int64:
        parts = [of(i, s) for i, s in enumerate(self._segments)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @cached_property
    def piece(self) -> Int64:
        """Template piece."""
        return self._gathered(lambda _, s: np.repeat(self._piece_of[s.item], s.n_members))

    @cached_property
    def tensor(self) -> Int64:
        """Source tensor, a number in `Plan.sources.tensors`."""
        return self._plan.templates.classes.tensor[self._needed]

    @cached_property
    def _needed(self) -> Int64:
        return self._gathered(lambda _, s: s.tensor)

    @cached_property
    def holder(self) -> Int64:
        """Index into `Plan.holders`."""
        return self._gathered(lambda i, s: np.full(len(s), i, np.int64))

    @cached_property
    def part(self) -> Int64:
        """Part number in the shard table."""
        return self._gathered(lambda _, s: np.full(len(s), s.part, np.int64))

    @cached_property
    def row(self) -> Int64:
        """Row of the shard in its part."""
        return self._gathered(lambda _, s: s.tensor if s.row is None else s.row)

    @cached_property
    def region(self) -> Int64:
        """The holder's region."""
        return self._gathered(lambda _, s: np.zeros(len(s), np.int64) if s.region is None else s.region)

    @cached_property
    def src_offset_bytes(self) -> Int64:
        """First byte in the region."""
        return self._gathered(lambda _, s: s.src_offset)

    @cached_property
    def request_number(self) -> Int64:
        """Row in `Plan.requests`."""
        t = self._plan.templates
        return t.classes.request_first[self._needed] + t.requests.nth[t.pieces.request[self.piece]]

    @cached_property
    def request(self) -> Int64:
        """Row in the read table."""
        return self._plan.requests.origin[self.request_number]

    @cached_property
    def buffer(self) -> Int64:
        """Destination buffer."""
        return self._plan.requests.buffer[self.request_number]

    @cached_property
    def dst_offset_bytes(self) -> Int64:
        """First byte in the buffer."""
        bits = self._plan.buffers.bits[self.buffer]
        first = self._plan.requests.dst_offset[self.request_number] * bits // 8
        return first + self._plan.templates.layout.dst_offset[self.piece]

    @cached_property
    def _unit(self) -> Int64:
        """Staging unit, -1 for blocks that are read straight into their buffer."""
        t, out = self._plan.templates, np.full(len(self), -1, np.int64)
        fetch = t.piece_fetch[self.piece]
        at = np.flatnonzero(fetch >= 0)
        if len(at):
            out[at] = self._plan.waves.unit(t.fetches.group[fetch[at]], self._needed[at])
        return out

    @cached_property
    def wave(self) -> Int64:
        """Wave in which the block arrives."""
        waves = self._plan.waves
        if waves.request_wave is None:
            return np.zeros(len(self), np.int64)
        staged = self._unit >= 0
        return np.where(staged, waves.unit_wave[self._unit], waves.request_wave[self.request_number])

    @cached_property
    def staging_offset_bytes(self) -> Int64:
        """First byte in the staging arena, -1 for blocks that are read straight into their buffer."""
        t, out = self._plan.templates, np.full(len(self), -1, np.int64)
        at = np.flatnonzero(self._unit >= 0)
        if len(at):
            piece = self.piece[at]
            fetch = t.piece_fetch[piece]
            inside = t.fetches.staging[fetch] + t.layout.src_offset[piece] - t.fetches.src_offset[fetch]
            out[at] = self._plan.waves.unit_offset[self._unit[at]] + inside
        return out

    @cached_property
    def span_offset_bytes(self) -> Int64:
        """First byte, in the region, of the range that is read into staging; -1 for blocks read straight into place."""
        t, out = self._plan.templates, np.full(len(self), -1, np.int64)
        fetch = t.piece_fetch[self.piece]
        at = np.flatnonzero(fetch >= 0)
        inside = t.layout.src_offset[self.piece[at]] - t.fetches.src_offset[fetch[at]]
        out[at] = self.src_offset_bytes[at] - inside
        return out

    @cached_property
    def span_bytes(self) -> Int64:
        """Length of that range, 0 for blocks that are read straight into their buffer."""
        t, out = self._plan.templates, np.zeros(len(self), np.int64)
        fetch = t.piece_fetch[self.piece]
        at = np.flatnonzero(fetch >= 0)
        out[at] = t.fetches.n_bytes[fetch[at]]
        return out

    @cached_property
    def converts(self) -> Bool:
        """bool[N]: whether the copy out of staging casts."""
        t = self._plan.templates
        request = t.pieces.request[self.piece]
        out: Bool = t.src_code[request] != t.dst_code[request]
        return out

    @cached_property
    def run_bytes(self) -> Int64:
        """Bytes of a contiguous run at the source."""
        layout = self._plan.templates.layout
        return (layout.run * layout.src_unit)[self.piece]

    @cached_property
    def n_runs(self) -> Int64:
        """Contiguous runs."""
        return self._plan.templates.layout.n_runs[self.piece]

    @cached_property
    def start(self) -> tuple[Int64, ...]:
        """By dim: first source coordinate, global; for packed dtypes the last dim is in bytes."""
        t = self._plan.templates
        q = t.pieces.request
        first = [a[q] + s[q] * k for a, s, k in zip(t.requests.start, t.requests.step, t.pieces.lo, strict=True)]
        return tuple(c[self.piece] for c in first)

    @cached_property
    def step(self) -> tuple[Int64, ...]:
        """By dim: distance of neighbouring source coordinates."""
        t = self._plan.templates
        return tuple(c[t.pieces.request][self.piece] for c in t.requests.step)

    @cached_property
    def count(self) -> tuple[Int64, ...]:
        """By dim: number of source coordinates."""
        return tuple(c[self.piece] for c in self._plan.templates.pieces.count)

    @cached_property
    def dst_stride_bytes(self) -> tuple[Int64, ...]:
        """By source dim: bytes between neighbours in the destination."""
        t = self._plan.templates
        unit = t.layout.dst_unit
        return tuple((c[t.pieces.request] * unit)[self.piece] for c in t.requests.stride)
