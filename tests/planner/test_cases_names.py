"""Groups N (names and merging), C (loaders that do more than copy) and D (dtypes), on the planner's side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.world import World

from reshard.planner import (
    Buffer,
    ConflictError,
    CoverageError,
    DTypeError,
    Holder,
    OverlapError,
    PlanError,
    PlanOptions,
    ReadRequest,
    ReadTable,
    Shard,
    ShardPart,
    ShardTable,
    plan,
)
from reshard.planner.coverage import engine_coverage


def replicated(groups: tuple[int, ...], layouts: tuple[tuple[str, str], ...] = ()) -> World:
    """One tensor kept whole by several holders."""
    world = World()
    world.ramp("layers.0.w", 4, 2)
    for number, group in enumerate(groups):
        world.hold(f"r{number}", "layers.0.w", group=group)
    world.layouts = {f"r{number}": layout for number, layout in enumerate(layouts)}
    world.buffer("p", 4, 2)
    world.copy("layers.0.w", ...)
    return world


@pytest.mark.parametrize("groups", [(-1, -1), (0, 1), (3, -1), (-1, -1, -1)])
def test_n1_equal_boxes_without_a_common_claim_name_both_holders(groups: tuple[int, ...]) -> None:
    with pytest.raises(ConflictError) as caught:
        replicated(groups).plan()
    assert len(set(caught.value.holders)) == 2
    assert set(caught.value.holders) <= {f"r{number}" for number in range(len(groups))}
    for holder in caught.value.holders:
        assert repr(holder) in str(caught.value)
    assert "'layers.0.w'" in str(caught.value)


@given(st.data())
def test_n1_two_pipeline_stages_with_local_names(data: st.DataObject) -> None:
    """The kind: stages of any depth, each numbering its layers from 0; refused unless no name is shared."""
    depths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    clever = data.draw(st.booleans())
    world = World()
    first = 0
    for stage, depth in enumerate(depths):
        for layer in range(depth):
            name = f"layers.{first + layer if clever else layer}.w"
            if name not in world.arrays:
                world.ramp(name, 3)
            world.hold(f"stage{stage}", name)
        first += depth
    for number, name in enumerate(sorted(world.arrays)):
        world.buffer(name, 3)
        world.copy(name, ..., number)
    if clever:
        world.check()
    else:
        with pytest.raises(ConflictError):
            world.plan()


@pytest.mark.parametrize(("policy", "instance"), [("first", 0), ("spread", 0), ("spread", 1), ("nearest", 0)])
def test_n5_claimed_replicas_have_one_owner_and_are_assumed_equal(policy: str, instance: int) -> None:
    made = replicated((5, 5)).check(policy=policy, instance=instance, instances=2)
    assert len(made.holders) == 1
    assert made.economics.wire_bytes == 16
    assert made.assumptions


def test_equal_boxes_can_be_trusted_for_tables_that_cannot_say() -> None:
    made = replicated((-1, -1)).check(trust_equal_boxes=True)
    assert made.economics.wire_bytes == 16
    assert made.assumptions


def test_n2_equal_engine_layers_with_sources_for_a_quarter() -> None:
    world = World()
    for layer in range(12):
        world.ramp(f"layers.{layer}.w", 5, 3)
        world.hold("r0", f"layers.{layer}.w")
        world.buffer(f"layers.{layer}.w", 5, 3)
        world.copy(f"layers.{layer}.w", ..., layer)
    made = world.check()
    engine = {f"layers.{layer}.w": 30 for layer in range(48)}
    coverage = engine_coverage(made, engine)
    assert coverage.percent == 25.0
    assert coverage.n_installed == 12
    assert len(coverage.never_written) == 36
    assert coverage.never_written == tuple(sorted(f"layers.{layer}.w" for layer in range(12, 48)))


@given(
    st.integers(1, 64).flatmap(lambda local: st.tuples(st.just(local), st.integers(1, 8))),
    st.data(),
)
def test_n3_local_experts_have_global_numbers(sizes: tuple[int, int], data: st.DataObject) -> None:
    """512 experts, EP8, rank 1's local expert 0 is global expert 64 of [64, 128): offsets in a stacked tensor."""
    n_local, ep = sizes
    rank = data.draw(st.integers(0, ep - 1))
    world = World()
    world.ramp("experts", n_local * ep, 2)
    for holder in range(ep):
        world.hold(f"r{holder}", "experts", (holder * n_local,), ((holder + 1) * n_local,))
    world.buffer("w", n_local, 2)
    world.copy("experts", np.s_[rank * n_local : (rank + 1) * n_local], 0)
    made = world.check()
    assert [holder.name for holder in made.holders] == [f"r{rank}"]
    assert world.run()[0][0, 0] == rank * n_local * 2


@pytest.mark.parametrize(("published", "total"), [(256, 512), (511, 512), (1, 4)])
def test_n4_experts_that_nobody_published_are_named(published: int, total: int) -> None:
    world = World()
    world.ramp("experts", total, 2)
    world.hold("r0", "experts", (0,), (published,))
    world.buffer("w", total, 2)
    world.copy("experts", ...)
    with pytest.raises(CoverageError, match=rf"\[{published}, {total}\)") as caught:
        world.plan()
    assert caught.value.missing == [((published, total), (0, 2))]


def test_n6_names_of_both_sides_that_do_not_meet_are_listed() -> None:
    world = World()
    world.ramp("visual.decoder.layers.0.w", 4)
    world.ramp("head", 4)
    world.hold("r0", "visual.decoder.layers.0.w")
    world.hold("r0", "head")
    world.buffer("head", 4)
    world.copy("head", ...)
    made = world.check()
    assert list(made.certificate.unconsumed) == ["visual.decoder.layers.0.w"]
    coverage = engine_coverage(made, {"head": 8, "visual.blocks.0.w": 8})
    assert coverage.never_written == ("visual.blocks.0.w",)


def test_n7_a_request_for_an_unknown_tensor_is_refused_and_zero_bytes_are_fine() -> None:
    world = World()
    world.ramp("w", 4)
    world.hold("r0", "w")
    world.ramp("ghost", 4)
    world.buffer("p", 4)
    world.copy("ghost", ...)
    with pytest.raises((PlanError, CoverageError), match="'ghost'"):
        world.plan()
    nothing = plan(world.sources(), ReadTable.build([], []), PlanOptions())
    assert nothing.certificate.written_bytes == 0
    assert nothing.holders == ()
    assert nothing.n_waves in (0, 1)


@pytest.mark.parametrize("policy", ["first", "spread"])
@pytest.mark.parametrize("n_replicas", [1, 2, 8])
def test_n8_sixteen_offers_are_two_boxes(policy: str, n_replicas: int) -> None:
    world = World()
    world.ramp("w", 6, 4)
    for replica in range(n_replicas):
        world.hold(f"r{replica}a", "w", (0,), (3,), group=0)
        world.hold(f"r{replica}b", "w", (3,), (6,), group=0)
    world.buffer("p", 6, 4)
    world.copy("w", ...)
    made = world.check(policy=policy)
    assert made.economics.wire_bytes == made.economics.useful_bytes == 48
    assert len(made.holders) == 2


def tied(present: bool, declared: bool) -> World:
    world = World()
    world.ramp("embed", 4, 2)
    world.hold("r0", "embed")
    if present:
        world.ramp("lm_head", 4, 2)
        world.hold("r0", "lm_head")
    world.buffer("embed", 4, 2)
    world.copy("embed", ..., 0)
    if declared or present:
        world.arrays.setdefault("lm_head", world.arrays["embed"])
        world.labels.setdefault("lm_head", "bfloat16")
        world.buffer("lm_head", 4, 2)
        world.copy("lm_head", ..., 1)
    return world


def test_n9_a_declared_alias_reads_the_one_that_is_published() -> None:
    made = tied(present=False, declared=True).check(aliases={"lm_head": "embed"})
    assert made.certificate.written_bytes == 32
    assert not list(made.certificate.unconsumed)


def test_n9_a_declared_alias_that_is_published_too_is_assumed_equal() -> None:
    made = tied(present=True, declared=True).check(aliases={"lm_head": "embed"})
    assert made.certificate.written_bytes == 32
    assert made.assumptions


def test_n9_without_an_alias_the_missing_one_is_an_error_or_never_written() -> None:
    with pytest.raises((PlanError, CoverageError), match="'lm_head'"):
        tied(present=False, declared=True).plan()
    made = tied(present=False, declared=False).check()
    assert engine_coverage(made, {"embed": 16, "lm_head": 16}).never_written == ("lm_head",)


@pytest.mark.parametrize("unique", [True, False])
def test_n10_per_expert_scales_need_global_names(unique: bool) -> None:
    world = World()
    for rank in range(2):
        name = f"experts.{rank}.scale" if unique else "experts.0.scale"
        if name not in world.arrays:
            world.ramp(name, 1, label="float32")
        world.hold(f"r{rank}", name)
    world.buffer("scales", len(world.arrays), label="float32")
    for number, name in enumerate(sorted(world.arrays)):
        world.copy(name, ..., 0, np.s_[number : number + 1])
    if unique:
        world.check()
    else:
        with pytest.raises(ConflictError, match=r"'experts\.0\.scale'"):
            world.plan()


def test_n11_an_unpublished_buffer_keeps_its_value_and_is_listed() -> None:
    world = World()
    world.ramp("running_mean", 4, label="float32")
    world.hold("r0", "running_mean")
    world.buffer("running_mean", 4, label="float32")
    world.buffer("inv_freq", 4, label="float32")
    world.copy("running_mean", ..., 0)
    made = world.check()
    coverage = engine_coverage(made, {"running_mean": 16, "inv_freq": 16})
    assert coverage.never_written == ("inv_freq",)
    assert made.certificate.unwritten_bytes == 16


def test_n12_accents_composed_and_decomposed_stay_two_tensors() -> None:
    world = World()
    world.tensor("\u00e9", [1, 2])
    world.tensor("e\u0301", [3, 4])
    for name in ("\u00e9", "e\u0301"):
        world.hold("r0", name)
    world.buffer("p", 2, 2)
    world.copy("\u00e9", ..., 0, np.s_[0])
    world.copy("e\u0301", ..., 0, np.s_[1])
    world.check()
    assert world.run()[0].tolist() == [[1, 2], [3, 4]]


# Loaders that do more than copy


@pytest.mark.parametrize(("rows", "padded"), [(10, 16), (1, 2), (15, 16), (16, 16)])
def test_c1_a_fill_under_a_partial_copy_is_exact(rows: int, padded: int) -> None:
    world = World()
    world.ramp("embed", rows, 3)
    world.hold("a", "embed", (0,), (rows // 2,))
    world.hold("b", "embed", (rows // 2,), (rows,))
    world.buffer("p", padded, 3)
    world.fill(0)
    world.copy("embed", ..., 0, np.s_[:rows])
    made = world.check()
    assert made.certificate.written_bytes == rows * 6
    assert made.certificate.filled_bytes == (padded - rows) * 6
    assert made.certificate.unwritten_bytes == 0


def test_c1_a_fill_over_a_copy_hides_it() -> None:
    world = World()
    world.ramp("w", 8)
    world.hold("a", "w")
    world.buffer("p", 8)
    world.copy("w", ...)
    world.fill(7, 0, np.s_[2:5])
    made = world.check()
    assert made.certificate.written_bytes == 10
    assert made.certificate.filled_bytes == 6
    assert made.economics.useful_bytes == 10


@given(st.integers(0, 6), st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.booleans())
def test_c2_the_later_of_two_copies_wins_and_hidden_elements_are_not_read(
    first: int, n_first: int, second: int, n_second: int, swapped: bool
) -> None:
    world = World()
    world.ramp("one", 12)
    world.tensor("two", np.arange(100, 112))
    for name in ("one", "two"):
        world.hold("a", name)
    world.buffer("p", 12)
    ranges = [("one", first, n_first), ("two", second, n_second)]
    for name, start, count in reversed(ranges) if swapped else ranges:
        world.copy(name, np.s_[start : start + count], 0, np.s_[start : start + count])
    made = world.check()
    union = len(set(range(first, first + n_first)) | set(range(second, second + n_second)))
    assert made.economics.useful_bytes == 2 * union
    assert made.certificate.written_bytes == 2 * union


def test_c2_as_reported() -> None:
    world = World()
    world.ramp("one", 6)
    world.tensor("two", np.arange(100, 106))
    world.hold("a", "one")
    world.hold("a", "two")
    world.buffer("p", 10)
    world.copy("one", ..., 0, np.s_[0:6])
    world.copy("two", ..., 0, np.s_[4:10])
    made = world.check()
    assert made.economics.useful_bytes == 20


@pytest.mark.parametrize("pieces", [[(0, 6)], [(0, 2), (2, 6)], [(0, 1), (1, 2), (2, 6)]])
def test_c3_a_materialised_tensor_is_staged_whole(pieces: list[tuple[int, int]]) -> None:
    """The loader computes `-exp(w)`: the planner stages `w` in its own dtype; the destination is the loader's."""
    world = World()
    world.ramp("a_log", 6, label="float32")
    for number, (start, stop) in enumerate(pieces):
        world.hold(f"r{number}", "a_log", (start,), (stop,))
    world.buffer("a", 6, label="float32")
    world.copy("a_log", ..., kind="materialised")
    made = world.plan()
    (staged,) = made.materialised
    assert staged.tensor == "a_log"
    assert made.economics.useful_bytes == 24


def test_c4_the_last_of_two_small_writes_wins() -> None:
    world = World()
    world.tensor("first.weight_shape", [3, 4], "int64")
    world.tensor("second.weight_shape", [5, 6], "int64")
    for name in world.arrays:
        world.hold("a", name)
    world.buffer("weight_shape", 2, label="int64")
    world.copy("first.weight_shape", ...)
    world.copy("second.weight_shape", ...)
    made = world.check()
    assert world.run()[0].tolist() == [5, 6]
    assert made.economics.useful_bytes == 16


@pytest.mark.parametrize("orders", [(0, 0), (3, 3)])
def test_c5_equal_order_is_an_error(orders: tuple[int, int]) -> None:
    world = World()
    world.ramp("one", 6)
    world.hold("a", "one")
    world.buffer("p", 8)
    world.copy("one", np.s_[0:4], 0, np.s_[0:4], order=orders[0])
    world.copy("one", np.s_[2:6], 0, np.s_[3:7], order=orders[1])
    with pytest.raises(OverlapError, match="'p'"):
        world.plan()


@pytest.mark.parametrize("fills_first", [True, False])
def test_c5_fills_and_copies_of_equal_order_too(fills_first: bool) -> None:
    world = World()
    world.ramp("one", 6)
    world.hold("a", "one")
    world.buffer("p", 8)
    if fills_first:
        world.fill(0, 0, ..., order=1)
    world.copy("one", np.s_[0:4], 0, np.s_[0:4], order=1)
    if not fills_first:
        world.fill(0, 0, ..., order=1)
    with pytest.raises(OverlapError, match="'p'"):
        world.plan()


@pytest.mark.parametrize("stride", [0, 1])
def test_a_request_that_writes_one_element_twice_is_an_error(stride: int) -> None:
    """Two steps of the source land on one destination element: strides (1, 1) or 0."""
    part = ShardPart.from_shards(Holder("a"), [Shard("w", "uint8", (2, 2), (0, 0), (2, 2))], [4])
    reads = ReadTable.build(
        [Buffer("p", (4,), "uint8")],
        [ReadRequest("w", (2, 2), "uint8", (0, 0), (1, 1), (2, 2), 0, 0, (stride, 1))],
    )
    with pytest.raises(OverlapError, match="'p'"):
        plan(ShardTable([part]), reads)


# Dtypes


def test_d1_float32_into_float32_never_goes_through_bfloat16() -> None:
    world = World()
    world.tensor("bias", np.array([1.001], np.float32), "float32")
    world.hold("a", "bias")
    world.buffer("bias", 1, label="float32")
    world.copy("bias", ...)
    world.check()
    assert world.run()[0].tobytes() == np.float32(1.001).tobytes()


@pytest.mark.parametrize(
    ("src", "dst", "before", "after"),
    [
        ("bfloat16", "float32", [0x3F80, 0xC000, 0x7F80], [0x3F800000, 0xC0000000, 0x7F800000]),
        ("float32", "bfloat16", [0x3F800000, 0x3F808000, 0x3F818000], [0x3F80, 0x3F80, 0x3F82]),
    ],
    ids=["D2", "rounding"],
)
def test_d2_casts_are_exact(src: str, dst: str, before: list[int], after: list[int]) -> None:
    as_stored = {"bfloat16": np.uint16, "float32": np.uint32}
    world = World()
    values = np.array(before, as_stored[src])
    world.tensor("w", values if src == "bfloat16" else values.view(np.float32), src)
    world.hold("r0", "w", (0,), (1,))
    world.hold("r1", "w", (1,), (3,))
    world.buffer("p", 3, label=dst)
    world.copy("w", ...)
    made = world.plan()
    (got,) = world.run(made)
    assert got.view(as_stored[dst]).tolist() == after
    assert made.economics.converts


@given(st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_d4_fused_casts_land_each_at_its_own_offset(n_first: int, n_second: int, columns: bool) -> None:
    """Two float32 views of one parameter from bfloat16 sources, fused on rows or on columns."""
    world = World()
    shape = (lambda n: (2, n)) if columns else (lambda n: (n, 2))
    world.ramp("one", *shape(n_first))
    world.tensor("two", np.arange(0x4000, 0x4000 + 2 * n_second).reshape(shape(n_second)))
    world.hold("a", "one")
    world.hold("b", "two")
    world.buffer("p", *shape(n_first + n_second), label="float32")
    axis = (lambda part: np.s_[:, part]) if columns else (lambda part: np.s_[part])
    world.copy("one", ..., 0, axis(slice(0, n_first)))
    world.copy("two", ..., 0, axis(slice(n_first, None)))
    (got,) = world.run(world.plan())
    both = np.concatenate([world.arrays["one"], world.arrays["two"]], axis=1 if columns else 0)
    assert np.array_equal(got.view(np.uint32), both.astype(np.uint32) << 16)


@pytest.mark.parametrize(
    ("src", "dst"), [("float32", "int32"), ("int32", "float32"), ("bool", "bfloat16"), ("int64", "int32")]
)
def test_casts_between_integers_and_floats_are_refused_unless_named(src: str, dst: str) -> None:
    part = ShardPart.from_shards(Holder("a"), [Shard("w", src, (2,), (0,), (2,))], [16])
    reads = ReadTable.build([Buffer("p", (2,), dst)], [ReadRequest("w", (2,), src, (0,), (1,), (2,), 0, 0, (1,))])
    with pytest.raises(DTypeError) as caught:
        plan(ShardTable([part]), reads)
    assert src in str(caught.value)
    assert dst in str(caught.value)
    assert plan(ShardTable([part]), reads, PlanOptions(allow_casts=frozenset({(src, dst)}))).n_waves >= 1


@pytest.mark.parametrize(("src", "dst"), [("int4", "float32"), ("float32", "int4"), ("float32", "float8_e8m0fnu")])
def test_casts_that_cannot_be_done_are_refused_even_if_named(src: str, dst: str) -> None:
    part = ShardPart.from_shards(Holder("a"), [Shard("w", src, (2,), (0,), (2,))], [16])
    reads = ReadTable.build([Buffer("p", (2,), dst)], [ReadRequest("w", (2,), src, (0,), (1,), (2,), 0, 0, (1,))])
    with pytest.raises(DTypeError):
        plan(ShardTable([part]), reads, PlanOptions(allow_casts=frozenset({(src, dst)})))
