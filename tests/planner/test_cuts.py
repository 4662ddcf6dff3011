"""Cut hints: the grid of one group, and of several under the 64 KiB rule."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reference import Scenario
from tests.strategies import read_table, scenarios

from reshard.planner.cuts import Cuts, cuts
from reshard.planner.dictionaries import TensorDict
from reshard.planner.errors import ConflictError, TableError
from reshard.planner.reads import Buffer, ReadRequest, ReadTable


def column_rank(name: str, shape: tuple[int, int], rank: int, n_ranks: int) -> ReadTable:
    """One rank's equal share of the columns."""
    width = shape[1] // n_ranks
    request = ReadRequest(name, shape, "bfloat16", (0, rank * width), (1, 1), (shape[0], width), 0, 0, (width, 1))
    return ReadTable.build([Buffer(f"{name}.p", (shape[0], width), "bfloat16")], [request])


def group(name: str, shape: tuple[int, int], n_ranks: int) -> list[ReadTable]:
    return [column_rank(name, shape, rank, n_ranks) for rank in range(n_ranks)]


def test_one_group_is_always_taken_however_small_its_boxes() -> None:
    grid = cuts([group("w", (4, 8), 8)])
    assert grid.of("w") == ((0, 4), tuple(range(9)))


@pytest.mark.parametrize(
    ("rows", "taken"), [(2048, True), (2047, False)], ids=["boxes of 64 KiB", "boxes just under 64 KiB"]
)
def test_a_further_group_is_merged_while_no_box_falls_under_64_kib(rows: int, taken: bool) -> None:
    """TP4 then TP3 of 192 columns: the grid's narrowest column band is 16 wide, so 32 bytes a row."""
    shape = (rows, 192)
    grid = cuts([group("w", shape, 4), group("w", shape, 3)])
    expected = (0, 48, 64, 96, 128, 144, 192) if taken else (0, 48, 96, 144, 192)
    assert grid.of("w")[1] == expected


def test_the_rule_is_kept_per_tensor() -> None:
    large, small = (4096, 192), (4, 192)
    first = [ReadTable.concat([a, b]) for a, b in zip(group("l", large, 4), group("s", small, 4), strict=True)]
    second = [ReadTable.concat([a, b]) for a, b in zip(group("l", large, 3), group("s", small, 3), strict=True)]
    grid = cuts([first, second])
    assert len(grid.of("l")[1]) == 7
    assert len(grid.of("s")[1]) == 5


def test_a_group_that_cuts_where_another_did_is_no_loss() -> None:
    grid = cuts([group("w", (4, 8), 8), group("w", (4, 8), 4)])
    assert grid.digest == cuts([group("w", (4, 8), 8)]).digest


def test_a_left_out_group_does_not_block_the_next() -> None:
    shape = (2048, 192)
    grid = cuts([group("w", shape, 4), group("w", shape, 64), group("w", shape, 3)])
    assert grid.of("w")[1] == (0, 48, 64, 96, 128, 144, 192)


@given(scenarios())
def test_boxes_tile_every_shard_and_requests_are_unions_of_boxes(scenario: Scenario) -> None:
    grid = cuts([[read_table(scenario)]])
    for shard in scenario.shards:
        pieces = grid.boxes(shard.tensor, shard.start, shard.stop)
        cells = [cell for piece in pieces for cell in itertools.product(*map(range, *piece))]
        assert sorted(cells) == sorted(itertools.product(*map(range, shard.start, shard.stop)))
    for request in scenario.requests:
        if request.value is not None:
            continue
        first = request.start
        last = [a + s * (c - 1) for a, s, c in zip(first, request.step, request.count, strict=True)]
        shape = scenario.tensors[request.tensor].shape
        for start, stop in grid.boxes(request.tensor, (0,) * len(shape), shape):
            inside = [a <= lo and hi - 1 <= b for a, lo, hi, b in zip(first, start, stop, last, strict=True)]
            apart = [hi <= a or b < lo for a, lo, hi, b in zip(first, start, stop, last, strict=True)]
            assert all(inside) or any(apart), "a grid box lies across the edge of a request"


@given(scenarios(), st.integers(0, 3))
def test_more_tables_of_one_group_in_any_order_give_one_grid(scenario: Scenario, seed: int) -> None:
    table = read_table(scenario)
    rows = np.random.default_rng(seed).permutation(len(table))
    halves = [table.take(rows[: len(rows) // 2]), table.take(rows[len(rows) // 2 :])]
    assert cuts([halves]).digest == cuts([[table]]).digest


def test_tensors_that_nobody_reads_and_empty_boxes_are_not_cut() -> None:
    grid = cuts([group("w", (4, 8), 2)])
    assert "other" not in grid
    assert grid.boxes("other", (0,), (9,)) == [((0,), (9,))]
    assert grid.boxes("w", (2, 3), (2, 8)) == [((2, 3), (2, 8))]
    with pytest.raises(KeyError):
        grid.of("other")
    assert cuts([]).boxes("w", (), ()) == [((), ())]


def test_read_tables_that_disagree_are_refused() -> None:
    with pytest.raises(ConflictError, match=r"'w' is bfloat16 \(4, 16\).*\(4, 8\)"):
        cuts([group("w", (4, 8), 2), group("w", (4, 16), 2)])


@pytest.mark.parametrize(
    ("offsets", "coordinates"),
    [
        ([0, 2], [0, 4]),
        ([0, 2, 5], [0, 4, 0, 8]),
        ([0, 2, 4], [1, 4, 0, 8]),
        ([0, 2, 4], [0, 4, 0, 9]),
        ([0, 2, 5], [0, 4, 0, 0, 8]),
        ([0, 2, 6], [0, 4, 0, 6, 5, 8]),
        ([0, 0, 2], [0, 8]),
        ([0, 3, 4], [0, 4, 0, 8]),
    ],
    ids=["few axes", "wrong end", "starts late", "beyond", "repeats", "falls", "axis without", "shifted"],
)
def test_hostile_grids_are_refused(offsets: list[int], coordinates: list[int]) -> None:
    tensors = TensorDict.build(["w"], ["uint8"], [(4, 8)])
    with pytest.raises(TableError, match="cuts"):
        Cuts(tensors, np.array(offsets), np.array(coordinates))
