"""Group G of the cases from the field, each as a test of its kind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.world import World

from reshard.planner import (
    Buffer,
    ConflictError,
    CostModel,
    CoverageError,
    Holder,
    OverlapError,
    ReadRequest,
    ReadTable,
    Shard,
    ShardPart,
    ShardTable,
    plan,
)


def chunks(extent: int, n_ranks: int) -> list[tuple[int, int]]:
    """Torch's rule: (offset, size) of ceil-sized chunks."""
    size = -(-extent // n_ranks)
    return [(min(r * size, extent), max(0, min(size, extent - r * size))) for r in range(n_ranks)]


@pytest.mark.parametrize(
    ("extent", "n_ranks", "expected"),
    [
        (6, 4, [(0, 2), (2, 2), (4, 2), (6, 0)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (7, 3, [(0, 3), (3, 3), (6, 1)]),
    ],
    ids=["G1", "G2", "G4"],
)
def test_uneven_and_empty_chunks_of_named_cases(extent: int, n_ranks: int, expected: list[tuple[int, int]]) -> None:
    assert chunks(extent, n_ranks) == expected
    check_chunks(extent, n_ranks, 4)


def test_g8_the_vocabulary_over_256_ranks() -> None:
    sizes = [size for _, size in chunks(151936, 256)]
    assert sizes == [594] * 255 + [466]
    check_chunks(151936, 256, 1)


@given(st.integers(1, 40), st.integers(1, 17), st.integers(1, 3))
def test_uneven_and_empty_chunks(extent: int, n_ranks: int, columns: int) -> None:
    check_chunks(extent, n_ranks, columns)


def check_chunks(extent: int, n_ranks: int, columns: int) -> None:
    """G1, G2, G8: every rank is a member; the empty ones yield nothing and block nothing."""
    world = World()
    world.ramp("w", extent, columns)
    for rank, (offset, size) in enumerate(chunks(extent, n_ranks)):
        world.hold(f"r{rank:03d}", "w", (offset,), (offset + size,))
    world.buffer("p", extent, columns)
    world.copy("w", ...)
    made = world.check()
    filled = [f"r{rank:03d}" for rank, (_, size) in enumerate(chunks(extent, n_ranks)) if size]
    assert [holder.name for holder in made.holders] == filled
    assert len(world.sources().holders) == n_ranks
    assert made.certificate.written_bytes == extent * columns * 2


@given(st.permutations([(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]))
def test_g3_empty_shards_never_replace_a_real_one(order: list[tuple[int, int]]) -> None:
    """2 rows on mesh (2, 4): ranks (i, 1..3) are empty, those of row 0 at offset 1 where (1, 0) really holds row 1."""
    world = World()
    world.ramp("w", 2, 3)
    for row, column in order:
        start = row if column == 0 else row + 1
        world.hold(f"r{row}{column}", "w", (start,), (row + 1,))
    world.buffer("p", 2, 3)
    world.copy("w", ...)
    made = world.check()
    assert [holder.name for holder in made.holders] == ["r00", "r10"]


def test_g4_overlapping_claims_of_one_layout_are_refused() -> None:
    world = World()
    world.ramp("w", 7, 2)
    for rank, start in enumerate((0, 2, 4)):
        world.hold(f"r{rank}", "w", (start,), (start + 3,))
    world.buffer("p", 7, 2)
    world.copy("w", ...)
    with pytest.raises(OverlapError, match="'w'") as caught:
        world.plan()
    assert set(caught.value.holders) <= {"r0", "r1", "r2"}
    assert len(caught.value.holders) == 2


STRIDED = {
    "G5": (4, {"00": (0, 1), "10": (1, 2), "01": (2, 3), "11": (3, 4)}),
    "G6": (6, {"00": (0, 2), "10": (2, 3), "01": (3, 5), "11": (5, 6)}),
}


@pytest.mark.parametrize(("extent", "placement"), STRIDED.values(), ids=STRIDED.keys())
def test_tensor_parallel_splits_before_fsdp(extent: int, placement: dict[str, tuple[int, int]]) -> None:
    """Rank order is not row order; only the published boxes say who holds what."""
    world = World()
    world.ramp("w", extent, 2)
    for name, (start, stop) in placement.items():
        world.hold(name, "w", (start,), (stop,))
    world.buffer("p", extent, 2)
    world.copy("w", ...)
    made = world.check()
    assert len(made.holders) == 4


@pytest.mark.parametrize("sizes", [(6, 4), (4, 6), (5, 6)])
def test_g7_different_global_shapes_conflict(sizes: tuple[int, int]) -> None:
    def part(name: str, size: int, start: int, stop: int) -> ShardPart:
        return ShardPart.from_shards(Holder(name), [Shard("w", "uint8", (size,), (start,), (stop,))], [stop - start])

    with pytest.raises(ConflictError) as caught:
        ShardTable([part("a", sizes[0], 0, 3), part("b", sizes[1], 3, 4)])
    assert set(caught.value.holders) == {"a", "b"}
    sources = ShardTable([part("a", 5, 0, 3), part("b", 5, 3, 5)])
    reads = ReadTable.build(
        [Buffer("p", (5,), "uint8")], [ReadRequest("w", (5,), "uint8", (0,), (1,), (5,), 0, 0, (1,))]
    )
    assert plan(sources, reads).certificate.written_bytes == 5


@pytest.mark.parametrize(("inter", "tp"), [(4, 2), (6, 3), (8, 1), (12, 4)])
def test_g9_swiglu_fc1_is_gate_and_up_of_each_rank(inter: int, tp: int) -> None:
    """Rank r's local tensor is [gate rows, up rows]; the receiver wants all gates, then all ups."""
    world = World()
    world.ramp("fc1", 2 * inter, 3)
    half = inter // tp
    rows = [list(range(r * 2 * half, (r + 1) * 2 * half)) for r in range(tp)]
    gate = [row for r in rows for row in r[:half]]
    up = [row for r in rows for row in r[half:]]
    if (inter, tp) == (4, 2):
        assert (gate, up) == ([0, 1, 4, 5], [2, 3, 6, 7])
    for r in range(tp):
        world.hold(f"r{r}", "fc1", (rows[r][0],), (rows[r][-1] + 1,))
    world.buffer("gate_up", 2, inter, 3)
    for r in range(tp):
        begin = r * 2 * half
        world.copy("fc1", np.s_[begin : begin + half], 0, np.s_[0, r * half : (r + 1) * half])
        world.copy("fc1", np.s_[begin + half : begin + 2 * half], 0, np.s_[1, r * half : (r + 1) * half])
    world.check()
    got = world.run()[0].reshape(2 * inter, 3)
    assert np.array_equal(got, world.arrays["fc1"][gate + up])


def qkv_rows(heads: int, groups: int, head_dim: int) -> dict[str, list[int]]:
    """Rows of Q, K and V in Megatron's per-group [q .. q k v] interleaving."""
    per_group = heads // groups
    rows: dict[str, list[int]] = {"q": [], "k": [], "v": []}
    row = 0
    for _ in range(groups):
        for name, n in (("q", per_group), ("k", 1), ("v", 1)):
            rows[name] += range(row, row + n * head_dim)
            row += n * head_dim
    return rows


def test_g10_rows_of_megatron_qkv() -> None:
    rows = qkv_rows(4, 2, 2)
    assert rows == {"q": [0, 1, 2, 3, 8, 9, 10, 11], "k": [4, 5, 12, 13], "v": [6, 7, 14, 15]}


@pytest.mark.parametrize(("heads", "groups", "head_dim", "tp"), [(4, 2, 2, 2), (8, 2, 4, 4), (6, 3, 1, 2)])
def test_g10_megatron_qkv_is_unpicked(heads: int, groups: int, head_dim: int, tp: int) -> None:
    rows = qkv_rows(heads, groups, head_dim)
    total = (heads + 2 * groups) * head_dim
    per_group = heads // groups
    world = World()
    world.ramp("qkv", total, 3)
    width = -(-total // tp)
    for rank in range(tp):
        world.hold(f"r{rank}", "qkv", (min(rank * width, total),), (min((rank + 1) * width, total),))
    world.buffer("fused", total, 3)
    numbers = np.arange(total).reshape(groups, -1)
    at = 0
    for first, n in ((0, per_group), (per_group, 1), (per_group + 1, 1)):
        for group in range(groups):
            begin = int(numbers[group, first * head_dim])
            world.copy("qkv", np.s_[begin : begin + n * head_dim], 0, np.s_[at : at + n * head_dim])
            at += n * head_dim
    world.check()
    assert np.array_equal(world.run()[0], world.arrays["qkv"][rows["q"] + rows["k"] + rows["v"]])


def test_g11_without_the_ranks_that_own_k_and_v_it_fails_closed() -> None:
    """64 query heads and 2 KV heads over TP8: 8704 rows, 1088 a rank; only ranks 3 and 7 own K and V."""
    rows = qkv_rows(64, 2, 128)
    assert sum(map(len, rows.values())) == 8704
    owners = {name: sorted({row // 1088 for row in of}) for name, of in rows.items()}
    assert owners["k"] == owners["v"] == [3, 7]
    last = range(3 * 1088, 4 * 1088)
    assert [sum(row in last for row in rows[name]) for name in "qkv"] == [832, 128, 128]

    def world_of(ranks: list[int]) -> World:
        world = World()
        world.ramp("qkv", 8704, 1)
        for rank in ranks:
            world.hold(f"r{rank}", "qkv", (rank * 1088,), ((rank + 1) * 1088,))
        world.buffer("kv", 512, 1)
        for at, begin in enumerate((rows["k"][0], rows["k"][128], rows["v"][0], rows["v"][128])):
            world.copy("qkv", np.s_[begin : begin + 128], 0, np.s_[at * 128 : (at + 1) * 128])
        return world

    made = world_of(list(range(8))).check()
    assert [holder.name for holder in made.holders] == ["r3", "r7"]
    for gone in (3, 7):
        with pytest.raises(CoverageError, match="'qkv'"):
            world_of([rank for rank in range(8) if rank != gone]).plan()


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, [0, 1, 2, 3, 8, 10]), (1, [4, 5, 6, 7, 9, 11])], ids=["rank 0", "rank 1"]
)
def test_g12_fused_qkv_rows_into_tp2(rank: int, expected: list[int]) -> None:
    world = World()
    world.ramp("qkv", 12, 2)
    world.hold("a", "qkv", (0,), (5,))
    world.hold("b", "qkv", (5,), (12,))
    world.buffer("p", 6, 2)
    world.copy("qkv", np.s_[4 * rank : 4 * rank + 4], 0, np.s_[0:4])
    world.copy("qkv", np.s_[8 + rank : 9 + rank], 0, np.s_[4:5])
    world.copy("qkv", np.s_[10 + rank : 11 + rank], 0, np.s_[5:6])
    world.check()
    assert np.array_equal(world.run()[0], world.arrays["qkv"][expected])


@given(st.integers(1, 6), st.integers(1, 3))
def test_g13_gate_and_up_interleaved_row_by_row(n_rows: int, columns: int) -> None:
    """The source holds g0 u0 g1 u1 ...; permutation 0,2,4,1,3,5 for three rows each, by stepped slices."""
    world = World()
    world.ramp("gu", 2 * n_rows, columns)
    world.hold("a", "gu", (0,), (n_rows,))
    world.hold("b", "gu", (n_rows,), (2 * n_rows,))
    world.buffer("p", 2 * n_rows, columns)
    world.copy("gu", np.s_[0::2], 0, np.s_[:n_rows])
    world.copy("gu", np.s_[1::2], 0, np.s_[n_rows:])
    world.check()
    permutation = [*range(0, 2 * n_rows, 2), *range(1, 2 * n_rows, 2)]
    assert n_rows != 3 or permutation == [0, 2, 4, 1, 3, 5]
    assert np.array_equal(world.run()[0], world.arrays["gu"][permutation])


def test_g14_stacked_experts() -> None:
    """[2, 4, 2], gate then up on dim 1: expert 1's first up row starts at element 12."""
    world = World()
    world.ramp("w13", 2, 4, 2)
    world.hold("a", "w13", (0, 0, 0), (2, 4, 1))
    world.hold("b", "w13", (0, 0, 1), (2, 4, 2))
    world.buffer("up", 2, 2)
    world.copy("w13", np.s_[1, 2:4], 0)
    world.check()
    assert world.run()[0][0, 0] == 12


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_g15_a_column_is_not_a_flat_read(n_rows: int, n_columns: int, data: st.DataObject) -> None:
    column = data.draw(st.integers(0, n_columns - 1))
    world = World()
    world.tensor("w", np.arange(1, n_rows * n_columns + 1).reshape(n_rows, n_columns))
    world.hold("a", "w")
    world.buffer("p", n_rows)
    world.copy("w", np.s_[:, column], 0)
    world.check()
    if (n_rows, n_columns, column) == (2, 2, 1):
        assert world.run()[0].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("gap", "boxes"),
    [((4, 5), [(0, 4), (5, 10)]), ((0, 1), [(1, 10)]), ((9, 10), [(0, 3), (3, 9)]), ((2, 8), [(0, 2), (8, 10)])],
    ids=["G16", "front", "back", "wide"],
)
def test_g16_a_gap_is_named(gap: tuple[int, int], boxes: list[tuple[int, int]]) -> None:
    world = World()
    world.ramp("w", 10)
    for number, (start, stop) in enumerate(boxes):
        world.hold(f"r{number}", "w", (start,), (stop,))
    world.buffer("p", 10)
    world.copy("w", ...)
    with pytest.raises(CoverageError, match=rf"'w'.*\[{gap[0]}, {gap[1]}\)") as caught:
        world.plan()
    assert caught.value.tensor == "w"
    assert [tuple(map(tuple, box)) for box in caught.value.missing] == [(gap,)]


def overlapping(layouts: tuple[tuple[str, str], tuple[str, str]]) -> World:
    world = World()
    world.ramp("w", 10)
    world.hold("a", "w", (0,), (6,))
    world.hold("b", "w", (5,), (10,))
    world.layouts = {"a": layouts[0], "b": layouts[1]}
    world.buffer("p", 10)
    world.copy("w", ...)
    return world


@pytest.mark.parametrize("policy", ["first", "spread", "nearest"])
def test_g17_overlap_of_two_layouts_claimed_equal_is_cut(policy: str) -> None:
    made = overlapping((("old", "step-7"), ("new", "step-7"))).check(policy=policy)
    assert made.economics.wire_bytes == 20
    assert made.certificate.written_bytes == 20
    assert made.assumptions


@pytest.mark.parametrize(
    "layouts",
    [
        (("default", ""), ("default", "")),
        (("old", ""), ("new", "")),
        (("old", "x"), ("new", "y")),
        (("same", "x"), ("same", "x")),
    ],
    ids=["one layout", "no claim", "claims differ", "one layout with a claim"],
)
def test_g17_any_other_overlap_is_refused(layouts: tuple[tuple[str, str], tuple[str, str]]) -> None:
    with pytest.raises((OverlapError, ConflictError), match="'w'"):
        overlapping(layouts).plan()


@pytest.mark.parametrize(("budget", "n_runs"), [(128, 128), (64, 1), (1, 1)])
def test_g18_columns_are_runs_within_the_budget_and_a_span_over_it(budget: int, n_runs: int) -> None:
    world = World()
    world.ramp("w", 128, 128, label="uint8")
    world.hold("a", "w")
    world.buffer("p", 128, 64, label="uint8")
    world.copy("w", np.s_[:, :64], 0)
    made = world.check(max_runs_per_block=budget, cost=CostModel(descriptor_s=0.0))
    assert made.economics.n_descriptors == n_runs
    assert made.economics.useful_bytes == 128 * 64
    assert made.economics.wire_bytes <= 128 * 128
    if n_runs == 128:
        assert made.economics.wire_bytes == 128 * 64


def test_g19_stored_axes_travel_and_nothing_guesses() -> None:
    """A square matrix stored in x out: the view is transposed only because capture presents it so."""
    world = World()
    world.tensor("down", [[1, 2], [3, 4]], axes=("in", "out"))
    world.hold("a", "down")
    world.buffer("p", 2, 2)
    world.copy("down", ..., permute=(1, 0))
    world.check()
    assert world.run()[0].tolist() == [[1, 3], [2, 4]]
    sources = world.sources()
    assert sources.tensors.axes == {0: ("in", "out")}
    plain = World()
    plain.tensor("down", [[1, 2], [3, 4]])
    plain.hold("a", "down")
    plain.buffer("p", 2, 2)
    plain.copy("down", ...)
    plain.check()
    assert plain.run()[0].tolist() == [[1, 2], [3, 4]]
    assert plain.sources().tensors.axes == {}
    assert plain.sources().parts[0].digest != sources.parts[0].digest


@pytest.mark.parametrize("label", ["uint8", "bfloat16", "float32", "float64"])
def test_g20_a_scalar_is_one_descriptor(label: str) -> None:
    world = World()
    world.tensor("scale", 3, label)
    world.hold("a", "scale")
    world.buffer("p", label=label)
    world.copy("scale", ...)
    made = world.check()
    assert made.economics.n_descriptors == 1
    assert made.economics.wire_bytes == np.dtype(world.arrays["scale"].dtype).itemsize


@given(st.data())
def test_any_grid_into_any_view(data: st.DataObject) -> None:
    """The whole kind at once: a grid on two dims, a narrowed, stepped and permuted view."""
    shape = tuple(data.draw(st.integers(1, 7)) for _ in range(3))
    world = World()
    world.ramp("w", *shape)
    bounds = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    for number, box in enumerate(itertools.product(*(itertools.pairwise(b) for b in bounds))):
        world.hold(f"r{number}", "w", tuple(a for a, _ in box), tuple(b for _, b in box))
    index = []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, n)), data.draw(st.integers(1, 3))))
    sizes = np.empty(shape)[tuple(index)].shape
    permute = data.draw(st.permutations(range(3)))
    world.buffer("p", *(sizes[d] for d in permute))
    world.copy("w", tuple(index), permute=permute)
    world.check(max_runs_per_block=data.draw(st.sampled_from([1, 3, 64])))
