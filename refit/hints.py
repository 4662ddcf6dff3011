"""Receivers' cut hints, merged into one grid that a publisher lays its buffer out by.

The first group's cuts are always taken; a further group's cuts of a tensor are merged in as long as no box of the
grid gets smaller than `MIN_BOX_BYTES`, and beyond that the group reads spans.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from reshard.planner.cuts import MIN_BOX_BYTES
from reshard.planner.dtypes import dtype as parse_dtype

if TYPE_CHECKING:
    from reshard.rendezvous.types import CutHint, CutHints

__all__ = ["merge_hints"]

Grid = tuple[tuple[int, ...], ...]


def merge_hints(hints: CutHints, *, min_box_bytes: int = MIN_BOX_BYTES) -> dict[str, Grid]:
    """Tensor name -> per dim the coordinates of the grid, 0 and the extent included."""
    merged: dict[str, Grid] = {}
    for _, members in itertools.groupby(hints.hints, key=lambda hint: hint.group):
        own = _union_of(list(members))
        for name, (grid, item_bits) in own.items():
            before = merged.get(name)
            if before is None:
                merged[name] = grid
                continue
            both = tuple(tuple(sorted({*a, *b})) for a, b in zip(before, grid, strict=True))
            if _smallest_elems(both) * item_bits // 8 >= min_box_bytes:
                merged[name] = both
    return merged


def _union_of(members: list[CutHint]) -> dict[str, tuple[Grid, int]]:
    out: dict[str, tuple[Grid, int]] = {}
    for hint in members:
        for i, name in enumerate(hint.cuts.tensors.names_list):
            grid = hint.cuts.of(name)
            bits = parse_dtype(hint.cuts.tensors.dtype_label(i)).bits
            if name in out:
                grid = tuple(tuple(sorted({*a, *b})) for a, b in zip(out[name][0], grid, strict=True))
            out[name] = (grid, bits)
    return out


def _smallest_elems(grid: Grid) -> int:
    return math.prod(min((b - a for a, b in itertools.pairwise(axis)), default=1) for axis in grid)
