"""Program order around the engine's own loader: whoever writes an element last has the last word."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.world import Array, World

from reshard.planner import Plan
from reshard.planner.coverage import engine_coverage
from reshard.planner.execute import execute, run_loader
from reshard.planner.proof import prove_blocks
from reshard.planner.requests import Materialised

STEP = st.tuples(st.sampled_from(["copy", "fill", "loader"]), st.integers(0, 15), st.integers(1, 16), st.integers(1, 3))


def run(world: World, made: Plan) -> Array:
    """Execute, then run a loader that writes the negative of what it is given (into all that capture saw)."""
    raw = [np.full(answer.nbytes, 0xA5, np.uint8) for answer in world.answers]
    buffers = execute(made, world.memory(), raw)
    places = {i: row for i, row in enumerate(world.requests) if row.kind == "materialised"}

    def load(request: Materialised, values: np.ndarray) -> None:
        asked = places[request.request]
        at = asked.dst_offset_elems + np.arange(asked.count[0]) * asked.dst_stride_elems[0]
        buffers[request.destination].view("i2")[at] = -values.view("i2")

    run_loader(made, buffers, load)
    return buffers[0].view("i2")


def world_of(steps: list[tuple[str, int, int, int]]) -> World:
    world = World()
    world.buffer("p", 16, label="int16")
    for i, (kind, first, n, step) in enumerate(steps):
        target = np.s_[first : first + n * step : step]
        size = len(range(16)[target])
        if kind == "fill":
            world.fill(900 + i, 0, target)
            continue
        world.tensor(f"w.{i}", np.arange(16) + 100 * (i + 1), "int16")
        world.hold("r0", f"w.{i}")
        world.copy(f"w.{i}", np.s_[:size], 0, target, kind="materialised" if kind == "loader" else "copy")
        if kind == "loader":
            world.answers[0][target] = -world.arrays[f"w.{i}"][:size]
    return world


@given(st.lists(STEP, min_size=1, max_size=6))
def test_the_last_in_order_wins_whether_it_is_a_loader_or_not(steps: list[tuple[str, int, int, int]]) -> None:
    world = world_of(steps)
    made = world.plan()
    prove_blocks(made)
    np.testing.assert_array_equal(run(world, made), world.answers[0])
    untouched = world.answers[0] == np.full(2, 0xA5, np.uint8).view("i2")[0]
    assert made.certificate.unwritten_bytes == 2 * int(untouched.sum())
    coverage = engine_coverage(made, {"p": 32})
    assert coverage.dest_bytes + coverage.filled_bytes == 32 - made.certificate.unwritten_bytes


def test_a_later_copy_over_a_loader_is_named() -> None:
    made = world_of([("loader", 0, 8, 1), ("copy", 2, 2, 1), ("fill", 4, 1, 1)]).plan()
    (staged,) = made.materialised
    assert (staged.later, staged.own_elems) == ((1, 2), 5)
    assert made.certificate.unwritten_bytes == 16


def test_equal_orders_around_a_loader_are_an_error() -> None:
    world = world_of([("loader", 0, 8, 1), ("copy", 2, 2, 1)])
    world.requests[1] = replace(world.requests[1], order=0)
    with pytest.raises(ValueError, match="equal program order 0"):
        world.plan()
