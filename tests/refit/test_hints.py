"""Cut hints of several groups become one grid: the first group's cuts always, others' while boxes stay large."""

from __future__ import annotations

import pytest

from reshard.planner import Buffer, ReadRequest, ReadTable
from reshard.planner.cuts import cuts
from reshard.refit.hints import merge_hints
from reshard.rendezvous.types import CutHint, CutHints

SHAPE = (8, 6)


def hint(group: str, member: str, first: tuple[int, int], count: tuple[int, int], dtype: str = "float32") -> CutHint:
    """What a rank says that takes one box of ``w``."""
    request = ReadRequest("w", SHAPE, dtype, first, (1, 1), count, 0, 0, (count[1], 1))
    return CutHint(group, member, cuts([[ReadTable.build([Buffer("p", count, dtype)], [request])]]))


def merged(*hints: CutHint, least: int) -> tuple[tuple[int, ...], ...]:
    return merge_hints(CutHints(1, hints), min_box_bytes=least)["w"]


def test_the_members_of_a_group_are_joined_however_small_the_boxes_are() -> None:
    rows = [hint("g", f"m{i}", (2 * i, 0), (2, 6)) for i in range(4)]
    assert merged(*rows, least=1 << 20) == ((0, 2, 4, 6, 8), (0, 6))


def test_another_groups_cuts_are_taken_while_every_box_stays_large_enough() -> None:
    """Boxes of 4 x 3 float32: 48 bytes."""
    first, other = hint("a", "m", (0, 0), (4, 6)), hint("b", "m", (0, 0), (8, 3))
    assert merged(first, other, least=48) == ((0, 4, 8), (0, 3, 6))
    assert merged(first, other, least=49) == ((0, 4, 8), (0, 6)), "the first group's alone"


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 48), ("bfloat16", 24), ("uint4", 6)])
def test_sizes_are_counted_in_the_tensors_own_bytes(dtype: str, nbytes: int) -> None:
    first, other = hint("a", "m", (0, 0), (4, 6), dtype), hint("b", "m", (0, 0), (8, 2), dtype)
    least = nbytes * 2 // 3  # boxes of 4 x 2
    assert len(merged(first, other, least=least)[1]) == 3
    assert len(merged(first, other, least=least + 1)[1]) == 2


def test_a_third_group_may_be_taken_where_the_second_was_not() -> None:
    first, small, fits = (
        hint("a", "m", (0, 0), (4, 6)),
        hint("b", "m", (1, 0), (1, 6)),
        hint("c", "m", (0, 0), (8, 3)),
    )
    assert merged(first, small, fits, least=48) == ((0, 4, 8), (0, 3, 6))


def test_tensors_of_one_group_alone_keep_their_cuts() -> None:
    assert merge_hints(CutHints(1, ())) == {}
    assert merged(hint("b", "m", (0, 0), (1, 1)), least=1 << 20) == ((0, 1, 8), (0, 1, 6))
