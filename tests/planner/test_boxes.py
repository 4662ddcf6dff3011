"""Sets of boxes against sets of cells."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.planner.boxes import find_overlap, subtract
from reshard.planner.classify import classify

Boxes = list[tuple[int, tuple[int, ...], tuple[int, ...]]]


@st.composite
def box_sets(draw: st.DrawFn, n_dims: int, max_size: int = 8, extent: int = 5) -> Boxes:
    """Boxes that are not empty, in up to three groups."""
    boxes: Boxes = []
    for _ in range(draw(st.integers(0, max_size))):
        edges = [
            sorted(draw(st.lists(st.integers(0, extent), min_size=2, max_size=2, unique=True))) for _ in range(n_dims)
        ]
        boxes.append((draw(st.integers(0, 2)), tuple(e[0] for e in edges), tuple(e[1] for e in edges)))
    return boxes


def columns(boxes: Boxes, n_dims: int) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    group = np.array([box[0] for box in boxes], np.int64)
    lo = [np.array([box[1][d] for box in boxes], np.int64) for d in range(n_dims)]
    hi = [np.array([box[2][d] for box in boxes], np.int64) for d in range(n_dims)]
    return group, lo, hi


def cells(box: tuple[int, tuple[int, ...], tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {(box[0], *point) for point in itertools.product(*map(range, box[1], box[2]))}


@pytest.mark.parametrize("n_dims", [0, 1, 2, 3])
@given(data=st.data())
def test_find_overlap_finds_one_if_there_is_one(n_dims: int, data: st.DataObject) -> None:
    boxes = data.draw(box_sets(n_dims))
    found = find_overlap(*columns(boxes, n_dims))
    pairs = [(i, j) for i, j in itertools.combinations(range(len(boxes)), 2) if cells(boxes[i]) & cells(boxes[j])]
    assert (found is None) == (not pairs)
    if found is not None:
        assert found in pairs


@given(st.integers(0, 3), st.integers(1, 40))
def test_pinwheels_are_disjoint_though_no_plane_splits_them(group: int, size: int) -> None:
    """Five rectangles around a square: no straight cut separates any two sides of it."""
    a, b, c = size, 2 * size, 3 * size
    wheel: Boxes = [
        (group, (0, 0), (a, b)),
        (group, (0, b), (b, c)),
        (group, (b, a), (c, c)),
        (group, (a, 0), (c, a)),
        (group, (a, a), (b, b)),
    ]
    assert find_overlap(*columns(wheel, 2)) is None
    wheel[4] = (group, (a - 1, a), (b, b))
    assert find_overlap(*columns(wheel, 2)) == (0, 4)


@pytest.mark.parametrize("n_dims", [0, 1, 2])
def test_one_box_in_interleaved_groups(n_dims: int) -> None:
    box = (0,) * n_dims, (4,) * n_dims
    assert find_overlap(*columns([(0, *box), (1, *box), (0, *box), (1, *box)], n_dims)) in [(0, 2), (1, 3)]
    assert find_overlap(*columns([(0, *box), (1, *box), (2, *box)], n_dims)) is None


def test_coordinates_near_the_end_of_int64_do_not_wrap() -> None:
    top = np.iinfo(np.int64).max
    apart: Boxes = [(0, (0, top - 1), (1, top)), (0, (0, top - 3), (1, top - 1)), (7, (0, 0), (1, top))]
    assert find_overlap(*columns(apart, 2)) is None
    apart[1] = (0, (0, top - 3), (1, top))
    assert find_overlap(*columns(apart, 2)) == (0, 1)


@pytest.mark.parametrize("n_dims", [1, 2, 3])
@given(data=st.data())
def test_subtract_leaves_exactly_the_other_cells(n_dims: int, data: st.DataObject) -> None:
    boxes = data.draw(box_sets(n_dims))
    knives = data.draw(box_sets(n_dims, max_size=4))
    origin, lo, hi = subtract(*columns(boxes, n_dims), *columns(knives, n_dims))
    taken = set().union(*(cells(knife) for knife in knives))
    left: list[list[tuple[int, ...]]] = [[] for _ in boxes]
    for row in range(len(origin)):
        start, stop = tuple(int(c[row]) for c in lo), tuple(int(c[row]) for c in hi)
        left[origin[row]].extend(cells((boxes[origin[row]][0], start, stop)))
    for box, found in zip(boxes, left, strict=True):
        assert sorted(found) == sorted(cells(box) - taken)
    assert list(origin) == sorted(origin)


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 1), st.sampled_from([0, 1 << 62, -(1 << 63)]))))
def test_classes_are_equal_rows_numbered_by_first_appearance(rows: list[tuple[int, int, int]]) -> None:
    table = [np.array([row[d] for row in rows], np.int64) for d in range(3)]
    class_id, first = classify(table)
    seen: dict[tuple[int, int, int], int] = {}
    expected = [seen.setdefault(row, len(seen)) for row in rows]
    assert class_id.tolist() == expected
    assert [rows[i] for i in first] == list(seen)


def test_classes_survive_hash_collisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every row in one hash slot the columns alone must decide."""
    from reshard.planner import classify as module

    monkeypatch.setattr(module, "hash_rows", lambda columns: np.zeros(len(columns[0]), np.uint64))
    values = np.array([5, 3, 5, 4, 9, 9, 3, 8, 7, 6, 2, 1, 0, 5, 11, 12, 13], np.int64)
    class_id, first = module.classify([values])
    assert values[first][class_id].tolist() == values.tolist()
    assert len(first) == len(set(values.tolist()))
    assert class_id.tolist() == [list(dict.fromkeys(values.tolist())).index(v) for v in values.tolist()]
