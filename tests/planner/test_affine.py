"""`source_aligned` against walking both views element by element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from reshard.planner.affine import AlignedView, source_aligned
from reshard.planner.errors import PlanError

Walk = tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


def walked(
    src_offset: int,
    sizes: Sequence[int],
    src_strides: Sequence[int],
    dst_offset: int,
    dst_strides: Sequence[int],
) -> list[tuple[int, int]]:
    """Every (flat source element, destination element) of a pair of views."""
    pairs = []
    for k in itertools.product(*map(range, sizes)):
        pairs.append(
            (
                src_offset + sum(i * s for i, s in zip(k, src_strides, strict=True)),
                dst_offset + sum(i * s for i, s in zip(k, dst_strides, strict=True)),
            )
        )
    return sorted(pairs)


def aligned_pairs(shape: Sequence[int], view: AlignedView) -> Iterator[tuple[int, int]]:
    """Every (flat source element, destination element) of an aligned view, refusing what is out of bounds."""
    for k in itertools.product(*map(range, view.counts)):
        flat = 0
        for extent, start, step, i in zip(shape, view.start, view.step, k, strict=True):
            coordinate = start + step * i
            if not 0 <= coordinate < extent:
                raise IndexError(f"coordinate {coordinate} of {view} is outside [0, {extent})")
            flat = flat * extent + coordinate
        yield flat, view.dst_offset + sum(i * s for i, s in zip(k, view.dst_stride, strict=True))


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    """Strided views inside a small tensor: overlapping, repeated, backwards, diagonal, crossing rows."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    n_elems = math.prod(shape)
    sizes, src_strides = [], []
    low = high = 0
    natural = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))] or [1]
    for _ in range(draw(st.integers(0, 4))):
        stride = draw(st.one_of(st.sampled_from(natural), st.integers(-7, 14)))
        room = n_elems - 1 - (high - low)
        size = draw(st.integers(1, 6))
        if stride:
            size = min(size, 1 + room // abs(stride))
        low += min(0, stride * (size - 1))
        high += max(0, stride * (size - 1))
        sizes.append(size)
        src_strides.append(stride)
    assume(math.prod(sizes) <= 2_000)
    src_offset = draw(st.integers(-low, n_elems - 1 - high))
    dst_strides = tuple(draw(st.integers(-3, 9)) for _ in sizes)
    return shape, src_offset, tuple(sizes), tuple(src_strides), draw(st.integers(0, 9)), dst_strides


@given(walks())
@example(((3, 4), 3, (6,), (1,), 0, (1,)))
@example(((4, 6), 0, (5,), (5,), 0, (1,)))
@example(((4, 6), 0, (2, 12), (12, 1), 0, (1, 2)))
@example(((8, 6), 0, (8, 2, 3), (6, 3, 1), 0, (6, 1, 2)))
@example(((1, 4, 1, 3), 0, (3, 4), (1, 3), 0, (4, 1)))
@example(((4, 4), 0, (4,), (5,), 0, (1,)))
@example(((), 0, (3, 2), (0, 0), 0, (2, 1)))
@example(((6,), 5, (6,), (-1,), 0, (1,)))
@example(((6,), 5, (6,), (-1,), 5, (-1,)))
def test_pieces_cover_the_view_exactly_once(walk: Walk) -> None:
    shape, src_offset, sizes, src_strides, dst_offset, dst_strides = walk
    views = source_aligned(shape, src_offset, sizes, src_strides, dst_offset, dst_strides)
    pairs = sorted(itertools.chain.from_iterable(aligned_pairs(shape, view) for view in views))
    assert pairs == walked(src_offset, sizes, src_strides, dst_offset, dst_strides)
    for view in views:
        assert all(step >= 1 and count >= 1 for step, count in zip(view.step, view.counts, strict=True))
        assert all(stride == 0 for stride, count in zip(view.dst_stride, view.counts, strict=True) if count == 1)


@pytest.mark.parametrize(
    ("shape", "offset", "sizes", "strides", "n_views"),
    [
        ((151936, 2048), 594 * 2048, (594, 2048), (2048, 1), 1),
        ((2048, 768), 96, (2048, 96), (768, 1), 1),
        ((128, 768, 2048), 5 * 768 * 2048, (2048, 768), (1, 2048), 1),
        ((64, 64), 0, (4096,), (1,), 1),
        ((64, 64), 64, (128,), (1,), 1),
        ((1_000_000, 64), 37, (50_000_000,), (1,), 3),
        ((8, 3, 128, 64), 0, (8, 384, 64), (3 * 128 * 64, 64, 1), 1),
        ((1 << 40,), 1, (1 << 39,), (2,), 1),
    ],
    ids=[
        "rows",
        "columns",
        "transposed",
        "flattened",
        "flat rows",
        "flat range",
        "merged heads",
        "2^40 stepped",
    ],
)
def test_the_usual_views_stay_whole(
    shape: tuple[int, ...], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], n_views: int
) -> None:
    packed = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    views = source_aligned(shape, offset, sizes, strides, 0, packed)
    assert len(views) == n_views
    assert sum(math.prod(view.counts) for view in views) == math.prod(sizes)


def test_a_size_of_zero_reads_nothing() -> None:
    assert source_aligned((4, 4), 0, (4, 0), (4, 1), 0, (0, 1)) == []
    assert source_aligned((0, 4), 0, (0, 4), (4, 1), 0, (4, 1)) == []


@pytest.mark.parametrize(
    ("shape", "offset", "sizes", "strides", "message"),
    [
        ((4, 4), 1, (16,), (1,), r"elements \[1, 17\) .*\(4, 4\).* \[0, 16\)"),
        ((4, 4), 3, (2, 2), (-4, 1), r"elements \[-1, "),
        ((4,), 0, (-1,), (1,), "no negative"),
        ((4,), 0, (2, 2), (1,), "2 sizes, 1 source strides"),
        ((0, 4), 0, (1,), (1,), r"has \[0, 0\)"),
    ],
)
def test_views_that_cannot_be_are_refused(
    shape: tuple[int, ...], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        source_aligned(shape, offset, sizes, strides, 0, tuple(1 for _ in sizes))


def test_too_many_pieces_are_refused_early() -> None:
    with pytest.raises(PlanError, match="more than 100 source-aligned pieces"):
        source_aligned((1 << 20, 1 << 20), 0, (1 << 20,), ((1 << 20) + 1,), 0, (1,), max_views=100)
