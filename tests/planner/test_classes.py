"""Planning by class: many tensors of few geometries, with odd ones among them, against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reference import UNTOUCHED, Scenario, expected_buffers, memory_of, missing, n_bytes, totals
from tests.strategies import layered_scenarios, read_table, shard_table

from reshard.planner import CoverageError, PlanOptions, plan
from reshard.planner import classes as classes_module
from reshard.planner.execute import execute

OPTIONS = st.builds(
    PlanOptions,
    policy=st.sampled_from(["spread", "first", "nearest"]),
    instances=st.just(2),
    instance=st.integers(0, 1),
    max_runs_per_block=st.sampled_from([1, 64]),
)


def check(scenario: Scenario, options: PlanOptions) -> None:
    made = plan(shard_table(scenario), read_table(scenario), options)
    memory = {h: [np.frombuffer(r, np.uint8) for r in regions] for h, regions in memory_of(scenario).items()}
    buffers = [np.full(n_bytes(b.dtype, b.shape), UNTOUCHED, np.uint8) for b in scenario.buffers]
    execute(made, memory, buffers)
    assert [b.tobytes() for b in buffers] == expected_buffers(scenario)
    assert made.certificate.written_bytes == totals(scenario).written
    assert made.economics.useful_bytes == totals(scenario).written


@given(layered_scenarios(), OPTIONS)
def test_odd_members_are_planned_as_themselves(scenario: Scenario, options: PlanOptions) -> None:
    check(scenario, options)


@given(layered_scenarios(), OPTIONS)
def test_membership_is_never_a_matter_of_a_hash(scenario: Scenario, options: PlanOptions) -> None:
    """With every hash equal, only exact comparison can tell the members apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classes_module, "mix64", lambda z: np.zeros_like(z))
        patch.setattr(classes_module, "_hash_parts", lambda parts, n: np.zeros(n, np.uint64))
        check(scenario, options)


@given(layered_scenarios(), st.data())
def test_one_member_without_a_source_is_found_among_the_others(scenario: Scenario, data: st.DataObject) -> None:
    """Leave out one box of one layer: refused if a request needs it, whatever the other members hold."""
    gone = data.draw(st.sampled_from(scenario.shards))
    left = [s for s in scenario.shards if (s.tensor, s.start, s.stop) != (gone.tensor, gone.start, gone.stop)]
    if not any(s.tensor == gone.tensor for s in left):
        return
    short = dataclasses.replace(scenario, shards=left)
    gaps = missing(short)
    if gaps:
        with pytest.raises(CoverageError) as caught:
            plan(shard_table(short), read_table(short))
        assert set(caught.value.failures) == set(gaps)
    else:
        check(short, PlanOptions())


def test_equal_layers_share_one_template() -> None:
    """What makes planning cheap is seen in the plan, not in a clock."""
    from tests.planner.world import World

    world = World()
    for layer in range(40):
        world.ramp(f"layers.{layer}.w", 8, 4)
        for rank in range(4):
            world.hold(f"r{rank}", f"layers.{layer}.w", (2 * rank,), (2 * rank + 2,))
        world.buffer(f"p{layer}", 4, 4)
        world.copy(f"layers.{layer}.w", np.s_[2:6], layer)
    made = world.check()
    assert len(made.templates.classes) == 1
    assert len(made.templates.pieces) == 2
    assert made.economics.n_blocks == 80
