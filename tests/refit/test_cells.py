"""Cells cover each shard exactly once, are boxes, and are no longer than a mebibyte."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.planner import Holder, Shard, ShardPart
from reshard.planner.dtypes import dtype
from reshard.refit import cells
from reshard.refit.cells import CellGrid, cell_pattern
from reshard.refit.digests import CELL_BYTES, cell_tag
from reshard.refit.errors import RefitError


@given(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.sampled_from(["uint8", "bfloat16", "float32", "float64"]),
)
def test_small_boxes_are_one_cell(extents: tuple[int, ...], label: str) -> None:
    pattern = cell_pattern(extents, label, dtype(label).bits)
    nbytes = math.prod(extents) * dtype(label).bits // 8
    assert pattern.nbytes.tolist() == ([nbytes] if nbytes else [])
    if nbytes:
        assert tuple(pattern.shape[0]) == extents


@pytest.mark.parametrize(
    ("extents", "label"),
    [
        ((5000, 700), "float32"),
        ((3, 2, 1 << 19), "bfloat16"),
        ((1 << 22,), "uint8"),
        ((7, 1 << 21), "float32"),
        ((2, 3, 5, 1 << 18), "float32"),
        ((4, 1 << 22), "uint4"),
        ((1 << 23,), "float64"),
    ],
)
def test_large_boxes_are_cut_into_contiguous_boxes(extents: tuple[int, ...], label: str) -> None:
    bits = dtype(label).bits
    pattern = cell_pattern(extents, label, bits)
    total = math.prod(extents) * bits // 8
    assert int(pattern.nbytes.max()) <= CELL_BYTES
    assert int(pattern.nbytes.sum()) == total
    assert bool((pattern.offset_bytes[1:] == pattern.offset_bytes[:-1] + pattern.nbytes[:-1]).all())
    assert len(pattern) <= 2 * -(-total // CELL_BYTES)
    assert bool((pattern.shape.prod(axis=1) * bits // 8 == pattern.nbytes).all())
    assert pattern.tags.tolist() == [list(cell_tag(label, tuple(shape))) for shape in pattern.shape.tolist()]
    strides = np.array([math.prod(extents[d + 1 :]) for d in range(len(extents))])
    assert bool(((pattern.start * strides).sum(axis=1) * bits // 8 == pattern.offset_bytes).all())


def test_a_grid_follows_the_rows_of_its_part() -> None:
    part = ShardPart.from_shards(
        Holder("t0"),
        [
            Shard("a", "float32", (4, 4), (0, 0), (2, 4), 0, 64),
            Shard("b", "uint8", (0, 3), (0, 0), (0, 3), 0, 0),
            Shard("c", "bfloat16", (1 << 21,), (0,), (1 << 21,), 0, 128),
        ],
        [128 + (1 << 22)],
    )
    grid = CellGrid.of(part)
    assert grid.first.tolist() == [0, 1, 1, 5]
    assert grid.offset_bytes.tolist() == [64, 128, 128 + (1 << 20), 128 + (2 << 20), 128 + (3 << 20)]
    assert len(CellGrid.of(ShardPart.from_shards(Holder("t0"), [], [0]))) == 0


def test_a_peers_table_takes_no_memory_without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says that it holds costs it nothing, and cells cost whoever reads it."""
    most = cells.MOST_CELLS_OF_A_BOX
    assert len(cell_pattern.__wrapped__((4, most * CELL_BYTES // 4), "uint8", 8)) == most, "not kept"
    with pytest.raises(RefitError, match=f"has {most + 4} cells, expected at most {most}"):
        cell_pattern((4, (most // 4 + 1) * CELL_BYTES), "uint8", 8)
    with pytest.raises(RefitError, match=f"has {2**41} cells"):
        cell_pattern((1 << 21, 1 << 40), "uint8", 8)
    monkeypatch.setattr(cells, "MOST_CELLS", 3)
    shards = [Shard(name, "uint8", (8,), (0,), (8,), 0, 0) for name in "abcd"]
    assert len(CellGrid.of(ShardPart.from_shards(Holder("t0"), shards[:3], [8]))) == 3
    with pytest.raises(RefitError, match="a table of 4 boxes has 4 cells, expected at most 3"):
        CellGrid.of(ShardPart.from_shards(Holder("t0"), shards, [8]))
