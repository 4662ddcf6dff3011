"""Which boxes of a source tensor a strided view of it reads, and where each element lands.

Loaders describe a copy by two strided views of equal sizes: one of the source tensor, one of the
destination buffer. The planner joins requests with shards, which are boxes in *source* coordinates, so each
pair of views is brought into the source-aligned normal form of :class:`AlignedView`: along every source dim
it takes ``start + step * k`` for ``k`` in ``[0, counts)``, and every step of every source dim moves the
destination by a fixed stride.

1. Drop view dims of size 1, flip dims that walk the source backwards, refuse what lies outside the tensor.
2. Write each view stride in the mixed radix of the source's own strides.
3. Where the coordinates of one source dim would carry into the next, cut the view dim there: a head up to the
   first carry, a body that is itself an (outer, inner) pair of dims, and a tail.
4. Where one source dim is seen by two view dims, merge them if the destination lets them, else enumerate the
   shorter one. A dim that repeats the source (stride 0), or moves two source dims at once (a diagonal), is
   enumerated too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard.planner.errors import PlanError

MAX_VIEWS = 65_536
"""Default bound on the number of aligned views that one strided view may fall into."""


class AlignedView(NamedTuple):
    """One source-aligned piece of a strided copy; all numbers are in elements.

    Attributes
    ----------
    start, step, counts : tuple of int
        One entry per source dim: coordinates ``start + step * k``, ``k`` in ``[0, counts)``; ``step >= 1``.
    dst_offset : int
        Destination element of the first source element.
    dst_stride : tuple of int
        Destination elements moved per step of each source dim; 0 where ``counts`` is 1. May be negative.
    """

    start: tuple[int, ...]
    step: tuple[int, ...]
    counts: tuple[int, ...]
    dst_offset: int
    dst_stride: tuple[int, ...]


class _Dim(NamedTuple):
    size: int
    src_stride: int
    dst_stride: int


class _Walk(NamedTuple):
    """A strided copy still to be aligned: a first element on both sides, and the dims walked from it."""

    src_offset: int
    dst_offset: int
    dims: tuple[_Dim, ...]


def source_aligned(
    shape: Sequence[int],
    src_offset: int,
    sizes: Sequence[int],
    src_strides: Sequence[int],
    dst_offset: int,
    dst_strides: Sequence[int],
    *,
    max_views: int = MAX_VIEWS,
) -> list[AlignedView]:
    """Turn a pair of strided views into source-aligned pieces.

    Parameters
    ----------
    shape : sequence of int
        Global shape of the source tensor, which is taken as contiguous and row-major.
    src_offset : int
        First source element, in elements from the tensor's beginning.
    sizes, src_strides, dst_strides : sequence of int
        The common sizes of both views and their strides in elements.
    dst_offset : int
        First destination element, from the beginning of the destination buffer.
    max_views : int
        Refuse to return more pieces than this.

    Returns
    -------
    list of AlignedView
        Disjoint in the positions of the view that they cover, and complete. Empty if any size is 0.

    Raises
    ------
    PlanError
        The views disagree in rank, a size is negative, the source view leaves the tensor, or more than
        `max_views` pieces would be needed.

    Examples
    --------
    Columns 2 and 4 of a (3, 6) tensor, transposed into a packed (2, 3) destination:

    >>> source_aligned((3, 6), 2, (2, 3), (2, 6), 0, (3, 1))
    [AlignedView(start=(0, 2), step=(1, 2), counts=(3, 2), dst_offset=0, dst_stride=(1, 3))]

    A flat range that begins inside one row and ends inside another:

    >>> for view in source_aligned((3, 4), 3, (6,), (1,), 0, (1,)):
    ...     print(view.start, view.counts, view.dst_offset)
    (0, 3) (1, 1) 0
    (1, 0) (1, 4) 1
    (2, 0) (1, 1) 5
    """
    if not len(sizes) == len(src_strides) == len(dst_strides):
        raise PlanError(
            f"a strided copy needs one source and one destination stride per size: got {len(sizes)} sizes, "
            f"{len(src_strides)} source strides, {len(dst_strides)} destination strides"
        )
    if any(size < 0 for size in sizes):
        raise PlanError(f"a strided copy has sizes {tuple(sizes)}: expected no negative one")
    if any(size == 0 for size in sizes):
        return []
    walk = _normalised(src_offset, sizes, src_strides, dst_offset, dst_strides)
    _check_inside(shape, walk)
    return _Aligner(tuple(shape), max_views).run(walk)


def _normalised(
    src_offset: int,
    sizes: Sequence[int],
    src_strides: Sequence[int],
    dst_offset: int,
    dst_strides: Sequence[int],
) -> _Walk:
    """Drop dims of size 1 and walk every dim forwards through the source."""
    dims = []
    for size, src_stride, dst_stride in zip(sizes, src_strides, dst_strides, strict=True):
        if size == 1:
            continue
        if src_stride < 0:
            src_offset += (size - 1) * src_stride
            dst_offset += (size - 1) * dst_stride
            src_stride, dst_stride = -src_stride, -dst_stride
        dims.append(_Dim(size, src_stride, dst_stride))
    return _Walk(src_offset, dst_offset, tuple(dims))


def _check_inside(shape: Sequence[int], walk: _Walk) -> None:
    n_elems = math.prod(shape)
    last = walk.src_offset + sum((dim.size - 1) * dim.src_stride for dim in walk.dims)
    if walk.src_offset < 0 or last >= n_elems:
        raise PlanError(
            f"a view reads source elements [{walk.src_offset}, {last + 1}) of a tensor of shape "
            f"{tuple(shape)}, which has [0, {n_elems})"
        )


class _Aligner:
    """Aligns walks over one source shape; one that cannot be aligned whole is cut into several."""

    def __init__(self, shape: tuple[int, ...], max_views: int) -> None:
        self.shape = shape
        self.strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        self.max_views = max_views

    def run(self, walk: _Walk) -> list[AlignedView]:
        views: list[AlignedView] = []
        pending = [walk]
        while pending:
            if len(views) + len(pending) > self.max_views:
                raise PlanError(
                    f"a view with strides {tuple(dim.src_stride for dim in walk.dims)} and sizes "
                    f"{tuple(dim.size for dim in walk.dims)} of a tensor of shape {self.shape} falls into "
                    f"more than {self.max_views} source-aligned pieces"
                )
            piece = pending.pop()
            cut = self._cut(piece)
            if cut is None:
                views.append(self._view(piece))
            else:
                pending.extend(reversed(cut))
        return views

    def _digits(self, offset: int) -> tuple[int, ...]:
        """Return `offset` in the mixed radix of the source strides: its coordinates, if it is inside."""
        digits = []
        for stride in self.strides:
            digit, offset = divmod(offset, stride)
            digits.append(digit)
        return tuple(digits)

    def _view(self, walk: _Walk) -> AlignedView:
        """Return the aligned view of a walk in which every dim moves one source dim of its own."""
        step, count, dst_stride = [1] * len(self.shape), [1] * len(self.shape), [0] * len(self.shape)
        for dim in walk.dims:
            digits = self._digits(dim.src_stride)
            axis = next(axis for axis, digit in enumerate(digits) if digit)
            step[axis], count[axis], dst_stride[axis] = digits[axis], dim.size, dim.dst_stride
        start = self._digits(walk.src_offset)
        return AlignedView(start, tuple(step), tuple(count), walk.dst_offset, tuple(dst_stride))

    def _cut(self, walk: _Walk) -> list[_Walk] | None:
        """Return the walks that replace `walk`, or None if it is aligned already."""
        digits = [self._digits(dim.src_stride) for dim in walk.dims]
        for index, moved in enumerate(digits):
            if sum(digit > 0 for digit in moved) == 0:
                return _enumerated(walk, index)
        coords = self._digits(walk.src_offset)
        for axis in reversed(range(len(self.shape))):
            movers = [index for index, moved in enumerate(digits) if moved[axis]]
            if len(movers) > 1:
                merged = _merged(walk, movers)
                if merged is not None:
                    return [merged]
            reach = coords[axis] + sum(digits[index][axis] * (walk.dims[index].size - 1) for index in movers)
            if axis > 0 and reach >= self.shape[axis]:
                return self._uncarried(walk, axis, movers, digits, coords[axis])
            if len(movers) > 1:
                return _enumerated(walk, min(movers, key=lambda index: walk.dims[index].size))
        for index, moved in enumerate(digits):
            if sum(digit > 0 for digit in moved) > 1:
                return _enumerated(walk, index)
        return None

    def _uncarried(
        self, walk: _Walk, axis: int, movers: Sequence[int], digits: Sequence[tuple[int, ...]], coord: int
    ) -> list[_Walk]:
        """Cut `walk` so that a dim of it no longer carries out of source dim `axis`."""
        extent = self.shape[axis]
        if len(movers) > 1:
            return _enumerated(walk, max(movers, key=lambda index: walk.dims[index].src_stride))
        (index,) = movers
        size, step = walk.dims[index].size, digits[index][axis]
        regular = extent % step == 0 and digits[index] == self._digits(step * self.strides[axis])
        period = extent // step
        if not regular or coord >= step:
            head = min(size - 1, -(-(extent - coord) // step))
            return _split(walk, index, head)
        if size % period:
            return _split(walk, index, size - size % period)
        dim = walk.dims[index]
        outer = _Dim(size // period, dim.src_stride * period, dim.dst_stride * period)
        inner = _Dim(period, dim.src_stride, dim.dst_stride)
        pair = tuple(part for part in (outer, inner) if part.size > 1)
        return [walk._replace(dims=walk.dims[:index] + pair + walk.dims[index + 1 :])]


def _merged(walk: _Walk, movers: Sequence[int]) -> _Walk | None:
    """Join two of the dims `movers` that both sides walk as one longer dim, or return None."""
    for inner in movers:
        for outer in movers:
            first, second = walk.dims[inner], walk.dims[outer]
            if (
                inner != outer
                and second.src_stride == first.src_stride * first.size
                and second.dst_stride == first.dst_stride * first.size
            ):
                joined = first._replace(size=first.size * second.size)
                dims = [joined if index == inner else dim for index, dim in enumerate(walk.dims) if index != outer]
                return walk._replace(dims=tuple(dims))
    return None


def _split(walk: _Walk, index: int, at: int) -> list[_Walk]:
    """Cut dim `index` at position `at`, dropping a part of size 1 from the dims of its walk."""
    dim = walk.dims[index]
    parts = []
    for first, size in ((0, at), (at, dim.size - at)):
        kept = (dim._replace(size=size),) if size > 1 else ()
        parts.append(
            _Walk(
                walk.src_offset + first * dim.src_stride,
                walk.dst_offset + first * dim.dst_stride,
                walk.dims[:index] + kept + walk.dims[index + 1 :],
            )
        )
    return parts


def _enumerated(walk: _Walk, index: int) -> list[_Walk]:
    """Replace dim `index` by its positions: halves, so that the caller's bound stops a huge one early."""
    return _split(walk, index, walk.dims[index].size // 2)
