"""Strided destination views as exact boxes: the coordinates in which overlapping writes are compared and cut.

A view that steps through a buffer is no box of it, but it is one of finer coordinates. For each buffer:

1. Coordinates are the buffer's own dims; where views do not follow them but are all plain progressions
   (flattened copies of a matrix, say), one flat dim. A view dim that fits neither is enumerated.
2. With T the least common multiple of the steps taken along a dim, x becomes (x // T, x % T). A view of step
   T is then a box, and a view of step t is T / t boxes. No divisibility of the dim is needed.

Each box remembers which elements of its view it stands for, so that what is left after a cut is again a
strided view.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from reshard.planner.classify import Bool, Int64, ragged_arange
from reshard.planner.errors import PlanError
from reshard.planner.reads import ReadTable

_MAX_BOXES: Final = 1 << 20


@dataclass(frozen=True, eq=False)
class Views:
    """Sub-views of some requests: along dim d the elements ``first[d] + step[d] * m``, m < ``count[d]``.

    Attributes
    ----------
    origin : int64[V]
        Position in the list of requests that are compared.
    first, step, count : D int64[V]
        In elements of the request's own dims.
    """

    origin: Int64
    first: list[Int64]
    step: list[Int64]
    count: list[Int64]

    def __len__(self) -> int:
        return len(self.origin)

    def take(self, rows: Int64) -> Views:
        """Some of the views."""
        return Views(
            self.origin[rows],
            [c[rows] for c in self.first],
            [c[rows] for c in self.step],
            [c[rows] for c in self.count],
        )

    def explode(self, dim: int, parts: Int64) -> Views:
        """Replace each view by `parts` interleaved sub-views along one dim (one an element: enumeration)."""
        total = int(parts.sum())
        if total > _MAX_BOXES:
            raise PlanError(
                f"overlapping destination views fall into {total} boxes; expected at most {_MAX_BOXES}",
                got=total,
                expected=_MAX_BOXES,
            )
        row = np.repeat(np.arange(len(self)), parts)
        nth = ragged_arange(parts)
        first, step, count = ([c[row] for c in dims] for dims in (self.first, self.step, self.count))
        n = parts[row]
        first[dim] = first[dim] + nth * step[dim]
        step[dim] = step[dim] * n
        count[dim] = -(-(count[dim] - nth) // n)
        keep = count[dim] > 0
        return Views(
            self.origin[row][keep],
            [c[keep] for c in first],
            [c[keep] for c in step],
            [c[keep] for c in count],
        )


@dataclass(frozen=True, eq=False)
class Boxes:
    """Views, and the boxes that they exactly are.

    Attributes
    ----------
    views : Views
    lo, hi : E int64[V]
        Refined coordinates.
    dim_of : D int64[V]
        Coordinate that each source dim runs along, -1 where it has one element.
    backwards : D bool[V]
        The coordinate falls as the source dim's index rises.
    """

    views: Views
    lo: list[Int64]
    hi: list[Int64]
    dim_of: list[Int64]
    backwards: list[Bool]

    def cut(self, rows: Int64, lo: list[Int64], hi: list[Int64]) -> Views:
        """The sub-views that some smaller boxes, inside the boxes `rows`, stand for."""
        v = self.views
        first = [c[rows] for c in v.first]
        count = [c[rows] for c in v.count]
        for d in range(len(first)):
            dim = self.dim_of[d][rows]
            for e in np.unique(dim[dim >= 0]).tolist():
                here = dim == e
                skip = np.where(self.backwards[d][rows], self.hi[e][rows] - hi[e], lo[e] - self.lo[e][rows])
                first[d] = np.where(here, first[d] + v.step[d][rows] * skip, first[d])
                count[d] = np.where(here, hi[e] - lo[e], count[d])
        return Views(v.origin[rows], first, [c[rows] for c in v.step], count)


def exact_boxes(reads: ReadTable, rows: Int64) -> Boxes:
    """Describe the destination views of some requests as exact boxes in common coordinates of each buffer.

    Raises
    ------
    PlanError
        Over a million boxes would be needed.
    """
    n_dims = reads.n_dims
    count = [reads.count[d][rows] for d in range(n_dims)]
    none, one = np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64)
    views = Views(np.arange(len(rows)), [none] * n_dims, [one] * n_dims, count)
    shape = _coordinates(reads, rows, views)
    # a dim that runs along no coordinate is enumerated; that may free a coordinate for another, so look again
    while True:
        matched = _match(reads, rows, views, shape)
        loose = [np.flatnonzero((c > 1) & (m.dim < 0)) for c, m in zip(views.count, matched, strict=True)]
        worst = [d for d, at in enumerate(loose) if len(at)]
        if not worst:
            break
        d = worst[0]
        parts = np.ones(len(views), np.int64)
        parts[loose[d]] = views.count[d][loose[d]]
        views = views.explode(d, parts)
    buffer = reads.buffer_id[rows]
    period = _periods(buffer[views.origin], matched, len(shape))
    for d in range(n_dims):
        parts = np.ones(len(views), np.int64)
        for e in range(len(shape)):
            here = matched[d].dim == e
            parts[here] = period[e][buffer[views.origin[here]]] // matched[d].step[here]
        if (parts > 1).any():
            views = views.explode(d, parts)
            matched = _match(reads, rows, views, shape)
    return _refine(reads, rows, views, shape, matched, period)


@dataclass(frozen=True, eq=False)
class _Match:
    """For one source dim: the coordinate it runs along (-1: none) and its step there."""

    dim: Int64
    step: Int64


def _coordinates(reads: ReadTable, rows: Int64, views: Views) -> list[Int64]:
    """Sizes of each request's buffer dims; a buffer whose views only fit flat has one dim."""
    buffer = reads.buffer_id[rows]
    shape = [c[buffer] for c in reads.buffers.shape] or [np.ones(len(rows), np.int64)]
    matched = _match(reads, rows, views, shape)
    misfit = np.zeros(len(rows), np.bool_)
    n_real = np.zeros(len(rows), np.int64)
    for c, m in zip(views.count, matched, strict=True):
        misfit |= (c > 1) & (m.dim < 0)
        n_real += c > 1
    if not misfit.any():
        return shape
    bad = np.zeros(len(reads.buffers), np.bool_)
    bad[buffer[misfit]] = True
    bad[buffer[n_real > 1]] = False
    flat = bad[buffer]
    size = np.ones(len(rows), np.int64)
    for c in shape:
        size *= c
    return [np.where(flat, 1, c) for c in shape[:-1]] + [np.where(flat, size, shape[-1])]


def _origin_of(reads: ReadTable, rows: Int64, views: Views) -> Int64:
    """Least destination element of each view."""
    row = rows[views.origin]
    out = reads.dst_offset[row].copy()
    for d in range(reads.n_dims):
        stride = reads.dst_stride[d][row]
        out += views.first[d] * stride + np.minimum((views.count[d] - 1) * views.step[d] * stride, 0)
    return out


def _strides(shape: list[Int64]) -> list[Int64]:
    out: list[Int64] = []
    running = np.ones(len(shape[0]), np.int64)
    for size in reversed(shape):
        out.insert(0, running)
        running = running * size
    return out


def _match(reads: ReadTable, rows: Int64, views: Views, shape: list[Int64]) -> list[_Match]:
    """Find, for each source dim of more than one element, an unused coordinate that it stays within."""
    row, at = rows[views.origin], views.origin
    rest = _origin_of(reads, rows, views)
    sizes = [c[at] for c in shape]
    units = [c[at] for c in _strides(shape)]
    place = []
    for unit in units:
        place.append(rest // unit)
        rest = rest % unit
    used = [np.zeros(len(views), np.bool_) for _ in shape]
    out = []
    for d in range(reads.n_dims):
        stride = np.abs(reads.dst_stride[d][row]) * views.step[d]
        real = views.count[d] > 1
        dim, step = np.full(len(views), -1, np.int64), np.ones(len(views), np.int64)
        for e, (size, unit) in enumerate(zip(sizes, units, strict=True)):
            per = stride // unit
            here = real & (dim < 0) & ~used[e] & (size > 1) & (stride % unit == 0) & (per > 0)
            here &= place[e] + per * (views.count[d] - 1) < size
            dim[here] = e
            step[here] = per[here]
            used[e] |= here
        out.append(_Match(dim, step))
    return out


def _periods(buffer: Int64, matched: list[_Match], n_coordinates: int) -> list[Int64]:
    """Least common multiple of the steps along each coordinate, by buffer."""
    n = int(buffer.max()) + 1
    out = []
    for e in range(n_coordinates):
        period = np.ones(n, np.int64)
        for m in matched:
            here = (m.dim == e) & (m.step > 1)
            pairs = np.unique(np.stack([buffer[here], m.step[here]]), axis=1)
            for b, step in pairs.T.tolist():
                common = math.lcm(int(period[b]), step)
                if common > _MAX_BOXES * step:
                    raise PlanError(
                        f"overlapping destination views step by {step} and {int(period[b])}: over {_MAX_BOXES} boxes",
                        got=common,
                        expected=_MAX_BOXES * step,
                    )
                period[b] = common
        out.append(period)
    return out


def _refine(
    reads: ReadTable, rows: Int64, views: Views, shape: list[Int64], matched: list[_Match], period: list[Int64]
) -> Boxes:
    row, at = rows[views.origin], views.origin
    buffer = reads.buffer_id[row]
    rest = _origin_of(reads, rows, views)
    lo, hi = [], []
    for e, unit in enumerate(_strides(shape)):
        x = rest // unit[at]
        rest = rest % unit[at]
        q, r = np.divmod(x, period[e][buffer])
        lo += [q, r]
        hi += [q + 1, r + 1]
    dims = []
    for d, m in enumerate(matched):
        coordinate = np.full(len(views), -1, np.int64)
        for e in range(len(shape)):
            here = m.dim == e
            coordinate[here] = 2 * e
            hi[2 * e] = np.where(here, lo[2 * e] + views.count[d], hi[2 * e])
        dims.append(coordinate)
    backwards = [reads.dst_stride[d][row] < 0 for d in range(reads.n_dims)]
    return Boxes(views, lo, hi, dims, backwards)


__all__ = ["Boxes", "Views", "exact_boxes"]
