"""Staging: one byte budget for two waves in flight, spans shared and split, early completion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.world import World

from reshard.planner import CostModel, Plan, PlanError


def columns_world(n_layers: int, rows: int, columns: int, cut: tuple[int, int], n_holders: int = 2) -> World:
    world = World()
    for layer in range(n_layers):
        name = f"layers.{layer}.down"
        world.ramp(name, rows, columns)
        bounds = [rows * i // n_holders for i in range(n_holders + 1)]
        for holder in range(n_holders):
            world.hold(f"r{holder}", name, (bounds[holder],), (bounds[holder + 1],))
        world.buffer(f"p{layer}", rows, cut[1] - cut[0])
        world.copy(name, np.s_[:, cut[0] : cut[1]], layer)
    return world


def staged_bytes(made: Plan) -> list[int]:
    """Bytes read into staging, by wave."""
    out = []
    for wave in range(made.n_waves):
        rows = made.rows(wave)
        mine = rows.dst_buffer < 0
        out.append(int((rows.run_bytes * rows.count)[mine].sum()))
    return out


@given(
    st.integers(1, 5),
    st.integers(1, 60),
    st.integers(2, 40),
    st.sampled_from([4096, 8192, 65536]),
    st.data(),
)
def test_any_budget_gives_the_same_bytes_and_is_kept(
    n_layers: int, rows: int, columns: int, budget: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, columns - 1))
    stop = data.draw(st.integers(start + 1, columns))
    world = columns_world(n_layers, rows, columns, (start, stop), data.draw(st.integers(1, 3)))
    made = world.check(max_runs_per_block=1, staging_bytes=budget)
    assert made.staging_bytes <= budget
    for wave, n_bytes in enumerate(staged_bytes(made)):
        assert n_bytes <= budget // 2, f"wave {wave}"
    check_places(made)


def check_places(made: Plan) -> None:
    """Within a wave, and with the wave before it, no two reads share a byte of the arena."""
    before = np.zeros(made.staging_bytes, np.int64)
    for wave in range(made.n_waves):
        rows = made.rows(wave)
        now = np.zeros(made.staging_bytes, np.int64)
        for i in np.flatnonzero(rows.dst_buffer < 0).tolist():
            first = int(rows.dst_offset_bytes[i])
            now[first : first + int(rows.run_bytes[i])] += 1
        assert now.max(initial=0) <= 1
        assert not (now & before).any()
        before = now


def test_layers_complete_in_order() -> None:
    """With a budget of two layers a wave, each buffer is done no later than the next one's."""
    world = columns_world(8, 64, 16, (2, 9))
    made = world.check(max_runs_per_block=1, staging_bytes=2 * 2 * 64 * 16 * 2)
    assert made.n_waves > 2
    done: dict[int, int] = {}
    for wave in range(made.n_waves):
        for buffer in made.copies(wave).buffer.tolist():
            done[buffer] = wave
    finished = [done[buffer] for buffer in range(8)]
    assert finished == sorted(finished)
    assert finished[0] == 0


def test_exact_reads_go_with_the_wave_of_their_buffer() -> None:
    world = columns_world(6, 64, 16, (2, 9))
    for layer in range(6):
        world.ramp(f"layers.{layer}.norm", 5)
        world.hold("r0", f"layers.{layer}.norm")
        world.buffer(f"n{layer}", 5)
        world.copy(f"layers.{layer}.norm", ..., 6 + layer)
    made = world.check(max_runs_per_block=1, staging_bytes=8192)
    reads = [set(made.rows(wave).dst_buffer.tolist()) - {-1} for wave in range(made.n_waves)]
    assert set().union(*reads) == set(range(6, 12))


def test_spans_of_one_shard_that_several_requests_need_are_read_once() -> None:
    world = World()
    world.ramp("qkv", 64, 12)
    world.hold("r0", "qkv")
    for number, (start, stop) in enumerate(((0, 4), (4, 8), (8, 12))):
        world.buffer(f"p{number}", 64, stop - start)
        world.copy("qkv", np.s_[:, start:stop], number)
    made = world.check(max_runs_per_block=4)
    assert made.economics.wire_bytes == made.economics.useful_bytes == 64 * 12 * 2
    assert made.economics.n_descriptors == 1


@pytest.mark.parametrize("rows", [65, 100, 2000])
def test_a_span_over_half_the_budget_is_split(rows: int) -> None:
    world = World()
    world.ramp("w", rows, 64)
    world.hold("r0", "w")
    world.buffer("p", rows, 3)
    world.copy("w", np.s_[:, 1:4])
    made = world.check(max_runs_per_block=1, staging_bytes=16384)
    assert made.n_waves >= rows * 128 // 16384
    assert made.staging_bytes <= 16384
    assert int(made.rows(0).run_bytes.max()) <= 8192


def test_casts_are_staged_within_the_budget() -> None:
    world = World()
    world.ramp("w", 5000)
    world.hold("r0", "w")
    world.buffer("p", 5000, label="float32")
    world.copy("w", ...)
    made = world.plan(staging_bytes=4096)
    (got,) = world.run(made)
    assert np.array_equal(got.view(np.uint32), world.arrays["w"].astype(np.uint32) << 16)
    assert made.staging_bytes <= 4096
    check_places(made)


def test_a_materialised_tensor_over_the_budget_names_tensor_bytes_and_budget() -> None:
    world = World()
    world.ramp("a_log", 5000, label="float32")
    world.hold("r0", "a_log")
    world.buffer("a", 5000, label="float32")
    world.copy("a_log", ..., kind="materialised")
    with pytest.raises(PlanError, match=r"'a_log'.*20000.*4096"):
        world.plan(staging_bytes=4096)


@pytest.mark.parametrize("budget", [1, 2, 16, 64, 1000])
@pytest.mark.parametrize("cost", [CostModel(), CostModel(descriptor_s=0.0), CostModel(wire_bytes_per_s=1.0)])
@pytest.mark.parametrize("kept", ["rows", "columns", "grid"])
def test_the_descriptor_budget_holds_for_every_sharding(budget: int, cost: CostModel, kept: str) -> None:
    """The ancestor bounds dim-0 shardings only and keeps the rest unbounded; here no block is over its budget."""
    world = World()
    world.ramp("w", 96, 48)
    grid = {"rows": (4, 1), "columns": (1, 4), "grid": (3, 2)}[kept]
    for i in range(grid[0]):
        for j in range(grid[1]):
            start = (96 * i // grid[0], 48 * j // grid[1])
            stop = (96 * (i + 1) // grid[0], 48 * (j + 1) // grid[1])
            world.hold(f"r{i}{j}", "w", start, stop)
    world.buffer("p", 80, 7)
    world.copy("w", np.s_[5:85, 9:16])
    made = world.check(max_runs_per_block=budget, cost=cost)
    blocks = made.blocks
    for i in np.flatnonzero(blocks.staging_offset_bytes < 0).tolist():
        assert int(blocks.n_runs[i]) <= budget
    assert made.economics.n_descriptors <= budget * len(blocks)
    if budget == 1000 and cost.descriptor_s == 0.0:
        assert made.economics.wire_bytes == made.economics.useful_bytes
