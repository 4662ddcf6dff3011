"""When does each staged byte get its place? Waves under one byte budget.

Two waves are in flight: wave k is read into one half of the arena while wave k - 1 is copied out of the
other. Units (the staging of one tensor, or a part of it where it exceeds a half) are taken in the order of
their destination buffers, so that each buffer, and with it each layer, completes as early as it can.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from reshard.planner.classes import Classes
from reshard.planner.classify import Int64, ragged_arange
from reshard.planner.requests import Requests
from reshard.planner.shape import ALIGN, Fetches


@dataclass(frozen=True, eq=False)
class Waves:
    """Wave and place in the arena of each staging unit, and the wave of each request.

    Attributes
    ----------
    n_waves : int
        At least 1.
    staging_bytes : int
        Size of the arena (both halves).
    unit_first : int64[G]
        Where the members of each staging group start in the unit columns.
    unit_wave, unit_offset : int64[U]
    request_wave : int64[N] or None
        Wave in which a request's exact blocks are read; None if there is one wave.
    member : int64[T]
        Position of each needed tensor in its class.
    """

    n_waves: int
    staging_bytes: int
    unit_first: Int64
    unit_wave: Int64
    unit_offset: Int64
    request_wave: Int64 | None
    member: Int64

    def unit(self, group: Int64, tensor: Int64) -> Int64:
        """Unit of each (staging group, needed tensor)."""
        return self.unit_first[group] + self.member[tensor]


def plan_waves(classes: Classes, requests: Requests, fetches: Fetches, half_bytes: int) -> Waves:
    """Pack staging units into waves of at most `half_bytes`, next-fit in order of destination buffer."""
    size = np.diff(classes.member_start)
    member = np.empty(len(classes.tensor), np.int64)
    none = np.zeros(0, np.int64)
    if len(fetches) == 0:
        return Waves(1, 0, none, none, none, None, member)
    member[classes.members] = np.arange(len(member)) - np.repeat(classes.member_start[:-1], size)
    # place of each request in the order in which buffers complete
    place = np.empty(len(requests), np.int64)
    place[np.lexsort([requests.origin, requests.buffer])] = np.arange(len(requests))
    priority = np.minimum.reduceat(place, classes.request_first)
    n_units = size[fetches.group_cls]
    unit_first = np.cumsum(n_units) - n_units
    group = np.repeat(np.arange(len(n_units)), n_units)
    tensor = classes.members[np.repeat(classes.member_start[fetches.group_cls], n_units) + ragged_arange(n_units)]
    order = np.lexsort([group, priority[tensor]])
    n_bytes = fetches.group_bytes[group][order]
    ends = np.cumsum(n_bytes)
    # one step a wave, on a plain list: NumPy's own search costs ten times as much for one value
    starts, reach, first_byte = [0], ends.tolist(), (ends - n_bytes).tolist()
    while True:
        nxt = max(starts[-1] + 1, bisect_right(reach, first_byte[starts[-1]] + half_bytes, starts[-1]))
        if nxt >= len(reach):
            break
        starts.append(nxt)
    begin = np.array(starts, np.int64)
    wave_sorted = np.zeros(len(order), np.int64)
    wave_sorted[begin[1:]] = 1
    wave_sorted = np.cumsum(wave_sorted)
    base_of = (ends - n_bytes)[begin]
    wave_bytes = np.append(base_of[1:], ends[-1]) - base_of
    n_waves = len(begin)
    half = -(-int(wave_bytes.max()) // ALIGN) * ALIGN
    offset_sorted = ends - n_bytes - base_of[wave_sorted] + (wave_sorted % 2) * half
    unit_wave, unit_offset = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    unit_wave[order], unit_offset[order] = wave_sorted, offset_sorted
    request_wave: Int64 | None = None
    if n_waves > 1:
        first_place = priority[tensor[order[begin]]]
        request_wave = np.maximum(np.searchsorted(first_place, place, side="right") - 1, 0)
    return Waves(n_waves, half * min(n_waves, 2), unit_first, unit_wave, unit_offset, request_wave, member)
