"""A plan that was tampered with after planning does not pass its proof; one that was not, does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.test_properties import OPTIONS, plan_of
from tests.planner.world import World
from tests.reference import Scenario
from tests.strategies import scenarios

from reshard.planner import Holder, Plan, PlanOptions, ReshardError, Shard, ShardPart, ShardTable, plan
from reshard.planner.proof import prove_blocks


@given(scenarios(), OPTIONS)
def test_every_plan_passes_the_proof_of_each_block(scenario: Scenario, options: PlanOptions) -> None:
    prove_blocks(plan_of(scenario, options))


def changed(values: np.ndarray, row: int, by: int) -> np.ndarray:
    out = values.copy()
    out[row % len(out)] += by
    return out


COLUMNS: list[tuple[str, str]] = [
    ("pieces", "lo"), ("pieces", "count"), ("pieces", "box"), ("pieces", "request"),
    ("layout", "src_offset"), ("layout", "dst_offset"), ("layout", "run"), ("layout", "n_runs"), ("layout", "count"),
    ("layout", "src_stride"), ("layout", "dst_stride"),
    ("fetches", "n_bytes"), ("fetches", "src_offset"), ("fetches", "staging"), ("fetches", "box"),
    ("items", "piece"), ("items", "fetch"), ("items", "src_offset"), ("items", "box"), ("items", "cls"),
    ("", "mode"), ("", "piece_fetch"),
]  # fmt: skip


@given(scenarios(), OPTIONS, st.sampled_from(COLUMNS), st.integers(0, 1 << 16), st.sampled_from([-7, -1, 1, 2]))
def test_a_template_that_was_changed_fails_the_proof(
    scenario: Scenario, options: PlanOptions, place: tuple[str, str], row: int, by: int
) -> None:
    made = plan_of(scenario, options)
    where, name = place
    owner = getattr(made.templates, where) if where else made.templates
    values = getattr(owner, name)
    if isinstance(values, (list, tuple)):
        dim = row % len(values)
        if not len(values[dim]) or harmless(made, where, name, dim, row % len(values[dim]), by):
            return
        wrong: object = [*values[:dim], changed(values[dim], row, by), *values[dim + 1 :]]
    else:
        if not len(values) or harmless(made, where, name, -1, row % len(values), by):
            return
        wrong = changed(values, row, by)
    owner = dataclasses.replace(owner, **{name: wrong})
    templates = dataclasses.replace(made.templates, **{where: owner}) if where else owner
    with pytest.raises((ReshardError, IndexError)):
        prove_blocks(dataclasses.replace(made, templates=templates))


def harmless(made: Plan, where: str, name: str, dim: int, row: int, by: int) -> bool:
    """Changes that change no byte: a stride along a dim of one element, a fetch that reads a little too much."""
    if name == "mode":
        return bool(made.templates.mode[row]) and bool(made.templates.mode[row] + by)
    layout = made.templates.layout
    if (where, name) in (("layout", "src_stride"), ("layout", "dst_stride")):
        return int(layout.count[dim][row]) == 1
    return (where, name) in (("fetches", "n_bytes"), ("fetches", "staging"), ("fetches", "src_offset"))


SEGMENT: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "tensor": lambda v, row: changed(v, row, 1),
    "src_offset": lambda v, row: changed(v, row, 1),
    "item": lambda v, row: changed(v, row, 1),
    "n_members": lambda v, row: changed(v, row, 1),
}


@given(scenarios(), OPTIONS, st.sampled_from(sorted(SEGMENT)), st.integers(0, 1 << 16))
def test_a_block_that_was_changed_fails_the_proof(
    scenario: Scenario, options: PlanOptions, name: str, row: int
) -> None:
    made = plan_of(scenario, options)
    if not made.segments:
        return
    number = row % len(made.segments)
    segment = made.segments[number]
    wrong = dataclasses.replace(segment, **{name: SEGMENT[name](getattr(segment, name), row)})
    segments = (*made.segments[:number], wrong, *made.segments[number + 1 :])
    with pytest.raises((ReshardError, IndexError, ValueError)):
        prove_blocks(dataclasses.replace(made, segments=segments))


@given(scenarios(), OPTIONS, st.integers(0, 1 << 16), st.booleans())
def test_a_holder_left_out_or_served_twice_fails_the_proof(
    scenario: Scenario, options: PlanOptions, row: int, twice: bool
) -> None:
    made = plan_of(scenario, options)
    if not made.segments:
        return
    number = row % len(made.segments)
    again = (made.segments[number],) * (2 if twice else 0)
    segments = (*made.segments[:number], *again, *made.segments[number + 1 :])
    with pytest.raises(ReshardError, match="contradicts"):
        prove_blocks(dataclasses.replace(made, segments=segments))


def test_two_units_in_one_place_of_the_arena_fail_the_proof() -> None:
    world = World()
    for name in ("a", "b"):
        world.ramp(name, 128, 64)
        world.hold("r0", name)
        world.buffer(f"p.{name}", 128)
        world.copy(name, np.s_[:, 1], len(world.buffers) - 1)
    made = world.plan()
    assert len(made.waves.unit_offset) > 1
    prove_blocks(made)
    waves = dataclasses.replace(made.waves, unit_offset=made.waves.unit_offset * 0)
    with pytest.raises(ReshardError, match="share staging"):
        prove_blocks(dataclasses.replace(made, waves=waves))


def spread_world(replicas: int, n_tensors: int) -> World:
    world = World()
    for t in range(n_tensors):
        world.ramp(f"w.{t}", 4)
        world.buffer(f"p.{t}", 4)
        world.copy(f"w.{t}", ..., t)
    for r in range(replicas):
        for t in range(n_tensors):
            world.hold(f"r{r:03d}", f"w.{t}", group=0)
    return world


@pytest.mark.parametrize(("replicas", "instances"), [(69, 44), (49, 49), (47, 31), (55, 37)])
def test_no_member_falls_between_the_last_replica_and_the_first(replicas: int, instances: int) -> None:
    """A receiver whose sweep starts in mid window wraps around in the very middle of a member."""
    world = spread_world(replicas, 3)
    sources, reads = world.sources(), world.reads()
    for instance in range(instances):
        for member in range(4):
            options = PlanOptions(instance=instance, instances=instances, member=member, members=4)
            made = plan(sources, reads, options)
            prove_blocks(made)
            assert made.economics.wire_bytes == made.economics.useful_bytes == 24


def test_a_part_changed_behind_the_plan_fails_the_proof() -> None:
    part = ShardPart.from_shards(Holder("r0"), [Shard("w", "uint8", (6,), (0,), (6,), 0, 2)], [8])
    other = ShardPart.from_shards(Holder("r0"), [Shard("w", "uint8", (6,), (0,), (6,), 0, 1)], [8])
    world = World()
    world.tensor("w", np.arange(6), "uint8")
    world.buffer("p", 6, label="uint8")
    world.copy("w", ...)
    made = plan(ShardTable([part]), world.reads())
    prove_blocks(made)
    with pytest.raises(ReshardError, match="starts elsewhere"):
        prove_blocks(dataclasses.replace(made, sources=ShardTable([other])))
