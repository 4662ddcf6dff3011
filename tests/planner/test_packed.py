"""Sub-byte and block-scaled dtypes: cuts between bytes, and scales cut with their blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.world import World
from tests.reference import Bits, RefTensor, flat, n_bytes, points

from reshard.planner import (
    BlockScale,
    Buffer,
    CoverageError,
    DTypeError,
    Holder,
    PlanOptions,
    ReadRequest,
    ReadTable,
    Shard,
    ShardPart,
    ShardTable,
    plan,
)
from reshard.planner.execute import execute
from reshard.planner.explain import explain_byte

LABELS = ["int4", "uint4", "float4_e2m1fn"]


@given(st.sampled_from(LABELS), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 64]), st.data())
def test_packed_tensors_are_cut_and_moved_by_the_byte(
    label: str, rows: int, pairs: int, budget: int, data: st.DataObject
) -> None:
    """Any grid on byte boundaries into any narrow, step over rows, select and row order, against nibbles."""
    shape = (rows, 2 * pairs)
    content = bytes(data.draw(st.lists(st.integers(0, 255), min_size=rows * pairs, max_size=rows * pairs)))
    row_cuts = sorted({0, rows, data.draw(st.integers(0, rows))})
    column_cuts = sorted({0, pairs, data.draw(st.integers(0, pairs))})
    parts, memory = [], {}
    whole = Bits(bytearray(content), 4)
    for i, (a, b) in enumerate(itertools.pairwise(row_cuts)):
        for j, (c, d) in enumerate(itertools.pairwise(column_cuts)):
            name = f"r{i}{j}"
            shard = Shard("w", label, shape, (a, 2 * c), (b, 2 * d))
            size = (b - a) * (d - c)
            parts.append(ShardPart.from_shards(Holder(name), [shard], [size]))
            local = Bits(bytearray(size), 4)
            for index, point in enumerate(points(shard.start, shard.stop)):
                local.put(0, index, whole.get(0, flat(shape, point)))
            memory[name] = [np.frombuffer(local.data, np.uint8)]
    first = data.draw(st.integers(0, rows - 1))
    step = data.draw(st.integers(1, 2))
    count = data.draw(st.integers(1, 1 + (rows - 1 - first) // step))
    start = 2 * data.draw(st.integers(0, pairs - 1))
    width = 2 * data.draw(st.integers(1, pairs - start // 2))
    request = ReadRequest("w", shape, label, (first, start), (step, 1), (count, width), 0, 0, (width, 1))
    reads = ReadTable.build([Buffer("p", (count, width), label)], [request])
    made = plan(ShardTable(parts), reads, PlanOptions(max_runs_per_block=budget))
    (got,) = execute(made, memory, [np.zeros(count * width // 2, np.uint8)])
    want = Bits(bytearray(count * width // 2), 4)
    for i in range(count):
        for j in range(width):
            want.put(0, i * width + j, whole.get(0, (first + i * step) * shape[1] + start + j))
    assert got.tobytes() == bytes(want.data)
    assert made.certificate.written_bytes == n_bytes(label, (count, width))
    origin = explain_byte(made, "p", 0)
    assert origin.element == (first, start)
    assert RefTensor("w", label, shape).shape == shape


def packed(start: int, count: int, dst_offset: int, dst_stride: tuple[int, int], step: int = 1) -> ReadTable:
    request = ReadRequest("w", (4, 8), "int4", (0, start), (1, step), (4, count), 0, dst_offset, dst_stride)
    return ReadTable.build([Buffer("p", (4, 16), "int4")], [request])


@pytest.mark.parametrize(
    "reads",
    [
        packed(1, 4, 0, (16, 1)),
        packed(0, 3, 0, (16, 1)),
        packed(0, 4, 1, (16, 1)),
        packed(0, 4, 0, (15, 1)),
        packed(0, 4, 0, (16, 2)),
        packed(0, 4, 0, (1, 4)),
        packed(0, 2, 0, (16, 1), step=2),
        packed(0, 1, 0, (16, 0)),
    ],
    ids=[
        "starts inside a byte",
        "stops inside a byte",
        "lands inside a byte",
        "rows land inside a byte",
        "spreads nibbles",
        "transposes nibbles",
        "steps over nibbles",
        "selects a nibble",
    ],
)
def test_requests_that_cut_inside_a_byte_are_refused(reads: ReadTable) -> None:
    part = ShardPart.from_shards(Holder("a"), [Shard("w", "int4", (4, 8), (0, 0), (4, 8))], [16])
    with pytest.raises(DTypeError, match=r"'w'|'p'"):
        plan(ShardTable([part]), reads)


# Block scales: ceil(n / 128) x ceil(k / 128)


def scaled_world(rows: int, columns: int, block: int, holders: list[tuple[int, int]]) -> World:
    """fp8 weights and their float32 scales, cut over holders by rows on the block grid."""
    world = World()
    world.tensor("w", np.arange(rows * columns).reshape(rows, columns) % 251, "float8_e4m3fn")
    n_scales = -(-rows // block), -(-columns // block)
    world.tensor("scale", np.arange(n_scales[0] * n_scales[1]).reshape(n_scales) / 8, "float32")
    for number, (start, stop) in enumerate(holders):
        world.hold(f"r{number}", "w", (start,), (stop,))
        world.hold(f"r{number}", "scale", (start // block,), (-(-stop // block),))
    return world


def test_rows_128_to_384_of_a_128_blocked_tensor_read_scale_rows_1_to_3() -> None:
    world = scaled_world(512, 200, 128, [(0, 256), (256, 512)])
    world.buffer("w", 256, 200, label="float8_e4m3fn")
    world.buffer("scale", 2, 2, label="float32")
    world.copy("w", np.s_[128:384], 0)
    world.copy("scale", np.s_[1:3], 1)
    made = world.check()
    blocks = made.blocks
    scale_rows = [
        (int(blocks.start[-2][i]), int(blocks.start[-2][i] + blocks.count[-2][i]))
        for i in np.flatnonzero(blocks.buffer == 1).tolist()
    ]
    assert sorted(scale_rows) == [(1, 2), (2, 3)]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.data())
def test_weights_and_scales_stay_together_with_partial_blocks_at_the_edges(
    rows: int, columns: int, block: int, data: st.DataObject
) -> None:
    grid = [*range(0, rows, block), rows]
    inner = sorted(set(data.draw(st.lists(st.sampled_from(grid), max_size=2))) | {0, rows})
    world = scaled_world(rows, columns, block, list(itertools.pairwise(inner)))
    start, stop = sorted(data.draw(st.lists(st.sampled_from(grid), min_size=2, max_size=2, unique=True)))
    first, last = start // block, -(-stop // block)
    world.buffer("w", stop - start, columns, label="float8_e4m3fn")
    world.buffer("scale", last - first, -(-columns // block), label="float32")
    world.copy("w", np.s_[start:stop], 0)
    world.copy("scale", np.s_[first:last], 1)
    world.check()


def test_a_scale_that_its_holder_did_not_publish_is_missing_not_a_neighbours() -> None:
    world = scaled_world(512, 128, 128, [(0, 256)])
    world.hold("r1", "w", (256,), (512,))
    world.buffer("scale", 2, 1, label="float32")
    world.copy("scale", np.s_[1:3], 0)
    with pytest.raises(CoverageError, match=r"'scale'.*\[2, 3\)"):
        world.plan()


@given(st.sampled_from(LABELS), st.integers(1, 4), st.integers(1, 5), st.data())
def test_packed_fills_lie_under_packed_copies(label: str, rows: int, pairs: int, data: st.DataObject) -> None:
    """A constant is one byte of packed elements; a copy over a part of it leaves the rest."""
    width = 2 * pairs
    first = 2 * data.draw(st.integers(0, pairs - 1))
    count = 2 * data.draw(st.integers(1, pairs - first // 2))
    part = ShardPart.from_shards(Holder("a"), [Shard("w", label, (rows, width), (0, 0), (rows, width))], [rows * pairs])
    fill = ReadRequest("", (), "", (0, 0), (1, 1), (rows, width), 0, 0, (width, 1), 0, "constant", b"\x7b")
    copy = ReadRequest("w", (rows, width), label, (0, first), (1, 1), (rows, count), 0, first, (width, 1), 1)
    reads = ReadTable.build([Buffer("p", (rows, width), label)], [fill, copy])
    made = plan(ShardTable([part]), reads)
    memory = np.arange(rows * pairs).astype(np.uint8)
    (got,) = execute(made, {"a": [memory]}, [np.zeros(rows * pairs, np.uint8)])
    want = np.full((rows, pairs), 0x7B, np.uint8)
    want[:, first // 2 : (first + count) // 2] = memory.reshape(rows, pairs)[:, first // 2 : (first + count) // 2]
    assert np.array_equal(got.reshape(rows, pairs), want)
    assert made.certificate.written_bytes == rows * count // 2
    assert made.certificate.filled_bytes == rows * (width - count) // 2


def test_packed_fills_inside_a_byte_are_refused() -> None:
    fill = ReadRequest("", (), "", (0, 0), (1, 1), (4, 3), 0, 0, (16, 1), 0, "constant", b"\x7b")
    with pytest.raises(DTypeError, match="'p'"):
        plan(ShardTable([]), ReadTable.build([Buffer("p", (4, 16), "int4")], [fill]))


@given(st.data())
def test_no_element_is_ever_read_with_a_neighbours_scale(data: st.DataObject) -> None:
    """Random cuts, blocks and requests, accepted exactly when every cut is on the grid and the scales come along."""
    shape = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    block = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    n_scales = -(-shape[0] // block[0]), -(-shape[1] // block[1])

    def interval(extent: int, size: int) -> tuple[int, int]:
        """Half of the time on the grid."""
        grid = [*range(0, extent, size), extent] if data.draw(st.booleans()) else range(extent + 1)
        edges = data.draw(st.lists(st.sampled_from(grid), min_size=2, max_size=2, unique=True))
        return min(edges), max(edges)

    cut = data.draw(st.sampled_from([*range(0, shape[0], block[0]), shape[0], data.draw(st.integers(0, shape[0]))]))
    parts = []
    for name, start, stop in (("a", 0, cut), ("b", cut, shape[0])):
        rows = [Shard("w", "float8_e4m3fn", shape, (start, 0), (stop, shape[1]), 0, 0)]
        if name == "a":
            rows.append(Shard("s", "float32", n_scales, (0, 0), n_scales, 1, 0))
        parts.append(ShardPart.from_shards(Holder(name), rows, [81, 4 * 81]))
    want = [interval(shape[0], block[0]), interval(shape[1], block[1])]
    scales = [interval(n_scales[0], 1), interval(n_scales[1], 1)]
    if data.draw(st.booleans()):
        scales = [(a // b, -(-z // b)) for (a, z), b in zip(want, block, strict=True)]

    def request(tensor: str, label: str, of: tuple[int, int], box: list[tuple[int, int]], buffer: int) -> ReadRequest:
        counts = tuple(b - a for a, b in box)
        return ReadRequest(tensor, of, label, tuple(a for a, _ in box), (1, 1), counts, buffer, 0, (counts[1], 1))

    requests = [request("w", "float8_e4m3fn", shape, want, 0), request("s", "float32", n_scales, scales, 1)]
    reads = ReadTable.build([Buffer("w", shape, "float8_e4m3fn"), Buffer("s", n_scales, "float32")], requests)
    edges = [(cut, 0), *((a, d) for d in range(2) for a in want[d])]
    on_grid = all(edge % block[d] == 0 or edge == shape[d] for edge, d in edges)
    needed = {(i // block[0], j // block[1]) for i in range(*want[0]) for j in range(*want[1])}
    brought = {(i, j) for i in range(*scales[0]) for j in range(*scales[1])}
    options = PlanOptions(block_scales={"w": BlockScale("s", block)})
    if on_grid and needed <= brought:
        assert plan(ShardTable(parts), reads, options).certificate.written_bytes > 0
    else:
        with pytest.raises(DTypeError, match="'w'"):
            plan(ShardTable(parts), reads, options)
