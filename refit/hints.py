"""Receivers' cut hints, merged into one grid that a publisher lays its buffer out by.

The first group's cuts are always taken; a further group's cuts of a tensor are merged in as long as no box of the
grid gets smaller than `MIN_BOX_BYTES`, and beyond that the group reads spans.

Hints are an offer of receivers that may be of an earlier model, or wrong: what does not fit is left out, and said.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reshard.planner.cuts import MIN_BOX_BYTES
from reshard.planner.dtypes import dtype as parse_dtype

if TYPE_CHECKING:
    from reshard.rendezvous.types import CutHint, CutHints

logger = logging.getLogger(__name__)

__all__ = ["MOST_BOXES", "merge_hints"]

Grid = tuple[tuple[int, ...], ...]

MOST_BOXES = 1 << 20
"""Boxes of all tensors of a publisher together: what a layout costs grows with them."""


def merge_hints(
    hints: CutHints, shapes: Mapping[str, tuple[int, ...]] | None = None, *, min_box_bytes: int = MIN_BOX_BYTES
) -> dict[str, Grid]:
    """Tensor name -> per dim the coordinates of the grid, 0 and the extent included.

    Parameters
    ----------
    shapes
        Of the publisher's tensors: grids of others, or of another shape, are left out, and all if together they cut
        into more than `MOST_BOXES`. If None, the first grid of a tensor says its shape.
    """
    known = dict(shapes) if shapes is not None else {}
    merged: dict[str, Grid] = {}
    for _, members in itertools.groupby(hints.hints, key=lambda hint: hint.group):
        own = _union_of(list(members), known, closed=shapes is not None)
        for name, (grid, item_bits) in own.items():
            both = _union(merged.setdefault(name, grid), grid)
            if _smallest_elems(both) * item_bits // 8 >= min_box_bytes:
                merged[name] = both
    n_boxes = sum(math.prod(max(len(axis) - 1, 1) for axis in grid) for grid in merged.values())
    if shapes is not None and n_boxes > MOST_BOXES:
        logger.warning("cut hints for %d boxes, at most %d: none is taken", n_boxes, MOST_BOXES)
        return {}
    return merged


def _union_of(
    members: list[CutHint], known: dict[str, tuple[int, ...]], *, closed: bool
) -> dict[str, tuple[Grid, int]]:
    """Of one group; adds to ``known`` shapes unless it is ``closed``."""
    out: dict[str, tuple[Grid, int]] = {}
    for hint in members:
        for i, name in enumerate(hint.cuts.tensors.names_list):
            if closed and name not in known:
                continue
            grid = hint.cuts.of(name)
            shape = tuple(axis[-1] for axis in grid)
            if known.setdefault(name, shape) != shape:
                logger.warning(
                    "cut hints of member %s of group %s for tensor %r are of shape %s, not %s: left out",
                    hint.member, hint.group, name, shape, known[name],
                )  # fmt: skip
                continue
            bits = parse_dtype(hint.cuts.tensors.dtype_label(i)).bits
            out[name] = (_union(out[name][0], grid) if name in out else grid, bits)
    return out


def _union(one: Grid, other: Grid) -> Grid:
    return tuple(tuple(sorted({*a, *b})) for a, b in zip(one, other, strict=True))


def _smallest_elems(grid: Grid) -> int:
    return math.prod(min((b - a for a, b in itertools.pairwise(axis)), default=1) for axis in grid)
