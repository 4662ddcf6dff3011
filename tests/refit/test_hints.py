"""Cut hints of several groups become one grid: the first group's cuts always, others' while boxes stay large."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, holds, shards_of, tp_cluster, weights

from reshard.planner import Buffer, ReadRequest, ReadTable
from reshard.planner.cuts import cuts
from reshard.planner.dictionaries import TensorDict
from reshard.refit import hints
from reshard.refit.errors import PublishError
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


# -- hints that are of another model, or wrong


def other(group: str, shape: tuple[int, ...], member: str = "m") -> CutHint:
    """What a rank says that takes the first row of a ``w`` of another shape."""
    nd = len(shape)
    count = (1, *shape[1:])
    strides = tuple(int(np.prod(count[d + 1 :])) for d in range(nd))
    request = ReadRequest("w", shape, "float32", (0,) * nd, (1,) * nd, count, 0, 0, strides)
    return CutHint(group, member, cuts([[ReadTable.build([Buffer("p", count, "float32")], [request])]]))


@pytest.mark.parametrize("shape", [(8,), (8, 6, 2), (6, 8), (16, 12)])
@pytest.mark.parametrize("group", ["a", "g", "z"])
def test_hints_of_another_shape_are_left_out_and_said(
    group: str, shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Those of an earlier model of this name, whose group still lives."""
    ours = hint("g", "n", (0, 0), (4, 6))
    both = sorted([ours, other(group, shape)], key=lambda h: (h.group, h.member))
    assert merge_hints(CutHints(1, tuple(both)), {"w": SHAPE}) == {"w": ((0, 4, 8), (0, 6))}
    assert f"group {group} for tensor 'w' are of shape {shape}, not (8, 6)" in caplog.text
    assert merge_hints(CutHints(1, tuple(both)), {"v": SHAPE}) == {}


def test_hints_for_too_many_boxes_are_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "MOST_BOXES", 7)
    grid = CutHints(1, (hint("g", "m0", (0, 0), (4, 3)), hint("g", "m1", (2, 0), (2, 3))))
    assert merge_hints(grid, {"w": SHAPE}) == {"w": ((0, 2, 4, 8), (0, 3, 6))}
    monkeypatch.setattr(hints, "MOST_BOXES", 5)
    assert merge_hints(grid, {"w": SHAPE}) == {}
    assert "for 6 boxes, at most 5" in caplog.text


@pytest.mark.parametrize("shape", [(8,), (8, 16, 2)])
def test_a_publisher_is_not_kept_from_publishing_by_them(shape: tuple[int, ...]) -> None:
    with tp_cluster(publisher_settings={"cut_hints": True}) as cluster:
        wrong = other("a", shape).cuts
        named = replace(wrong, tensors=TensorDict.build(["q"], ["float32"], [shape]))
        cluster.rendezvous.put_cuts("m", named, group="a", member="m")
        cluster.publish(0, weights(0), layout_epoch=cluster.publishers[0].newest_layout_epoch())
        cluster.refit_ok(0)
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]


def test_cuts_of_another_number_of_dims_are_refused_by_name() -> None:
    with tp_cluster() as cluster, pytest.raises(PublishError, match="tensor 'q': got cuts of 1 dims, expected 2"):
        cluster.publishers[0].publish(
            epoch=0, step=0, tensors=shards_of(weights(0), 0, 2), cuts={"q": [[0, 8]]}, timeout_s=TIMEOUT_S
        )
