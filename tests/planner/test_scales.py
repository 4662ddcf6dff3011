"""Block-scaled tensors: every cut lies on the block grid, and every request comes with its scales."""

from __future__ import annotations

import pytest

from reshard.planner import (
    BlockScale,
    Buffer,
    DTypeError,
    Holder,
    PlanOptions,
    ReadRequest,
    ReadTable,
    Shard,
    ShardPart,
    ShardTable,
    TableError,
    plan,
)

SHAPE, BLOCK = (500, 256), (128, 128)
SCALES = {"w": BlockScale("w_scale", BLOCK)}


def sources(cut: int = 256, scale_shape: tuple[int, int] = (4, 2)) -> ShardTable:
    """Two holders of rows [0, cut) and [cut, 500); scales whole at the first."""
    rows = [(0, cut), (cut, SHAPE[0])]
    parts = []
    for i, (start, stop) in enumerate(rows):
        shards = [Shard("w", "float8_e4m3fn", SHAPE, (start, 0), (stop, SHAPE[1]), 0, 0)]
        if i == 0:
            shards.append(Shard("w_scale", "float32", scale_shape, (0, 0), scale_shape, 1, 0))
        parts.append(ShardPart.from_shards(Holder(f"h{i}"), shards, [SHAPE[0] * SHAPE[1], 1024]))
    return ShardTable(parts)


def reads(rows: tuple[int, int], scale_rows: tuple[int, int] | None, step: int = 1) -> ReadTable:
    """Rows of the tensor, and rows of the scales."""
    count = -(-(rows[1] - rows[0]) // step)
    buffers = [Buffer("p", (count, SHAPE[1]), "float8_e4m3fn"), Buffer("s", (4, 2), "float32")]
    start = (rows[0], 0)
    requests = [ReadRequest("w", SHAPE, "float8_e4m3fn", start, (step, 1), (count, SHAPE[1]), 0, 0, (SHAPE[1], 1))]
    if scale_rows is not None:
        n = scale_rows[1] - scale_rows[0]
        requests.append(ReadRequest("w_scale", (4, 2), "float32", (scale_rows[0], 0), (1, 1), (n, 2), 1, 0, (2, 1)))
    return ReadTable.build(buffers, requests)


def test_rows_128_to_384_need_scale_rows_1_to_3() -> None:
    assert SCALES["w"].scale_box(((128, 384), (0, 256)), SHAPE, "w") == ((1, 3), (0, 2))
    made = plan(sources(), reads((128, 384), (1, 3)), PlanOptions(block_scales=SCALES))
    assert made.certificate.written_bytes == 256 * 256 + 2 * 2 * 4


def test_a_partial_block_at_the_end_is_on_the_grid() -> None:
    assert SCALES["w"].scale_box(((384, 500), (128, 256)), SHAPE) == ((3, 4), (1, 2))
    made = plan(sources(), reads((384, 500), (3, 4)), PlanOptions(block_scales=SCALES))
    assert made.certificate.written_bytes == 116 * 256 + 8


@pytest.mark.parametrize("rows", [(64, 256), (128, 300), (1, 500), (0, 499)])
def test_a_request_off_the_grid_is_refused(rows: tuple[int, int]) -> None:
    with pytest.raises(DTypeError, match=rf"'w' dim 0.*\[{rows[0]}, {rows[1]}\)"):
        plan(sources(), reads(rows, (0, 4)), PlanOptions(block_scales=SCALES))
    # the same cut of a tensor that has no block scales is nothing special
    assert plan(sources(), reads(rows, (0, 4))).certificate.written_bytes > 0


def test_a_stepped_request_is_refused() -> None:
    with pytest.raises(DTypeError, match="neighbour's scale"):
        plan(sources(), reads((0, 256), (0, 2), step=2), PlanOptions(block_scales=SCALES))


def test_a_shard_off_the_grid_is_refused_naming_its_holder() -> None:
    with pytest.raises(DTypeError, match=r"holder 'h0' cuts \[0, 200\)"):
        plan(sources(cut=200), reads((0, 256), (0, 2)), PlanOptions(block_scales=SCALES))


@pytest.mark.parametrize("scale_rows", [None, (0, 1), (1, 2)])
def test_a_request_without_its_scales_is_refused(scale_rows: tuple[int, int] | None) -> None:
    with pytest.raises(DTypeError, match=r"no request reads its scales, 'w_scale' \(\(0, 2\), \(0, 2\)\)"):
        plan(sources(), reads((0, 256), scale_rows), PlanOptions(block_scales=SCALES))


def test_scales_of_another_shape_are_refused() -> None:
    table = sources(scale_shape=(3, 2))
    request = ReadRequest("w", SHAPE, "float8_e4m3fn", (0, 0), (1, 1), (128, 256), 0, 0, (256, 1))
    wanted = ReadTable.build([Buffer("p", (128, 256), "float8_e4m3fn")], [request])
    with pytest.raises(TableError, match=r"have shape \(3, 2\); expected \(4, 2\)"):
        plan(table, wanted, PlanOptions(block_scales=SCALES))


def test_blocks_of_another_rank_are_refused() -> None:
    with pytest.raises(TableError, match="ranks"):
        BlockScale("s", (128,)).scale_shape(SHAPE)
    with pytest.raises(TableError, match="1 or more"):
        BlockScale("s", (128, 0))
