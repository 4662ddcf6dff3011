"""Overlapping layouts: cut into disjoint boxes where their publishers claim equal content, refused otherwise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reference import UNTOUCHED, Scenario, expected_buffers, locations, memory_of, missing, n_bytes, totals
from tests.strategies import read_table, shard_table, two_layout_scenarios

from reshard.planner import ConflictError, CoverageError, OverlapError, PlanError, PlanOptions, plan
from reshard.planner.execute import execute

OPTIONS = st.builds(
    PlanOptions,
    policy=st.sampled_from(["spread", "first", "nearest"]),
    instances=st.just(2),
    instance=st.integers(0, 1),
    max_runs_per_block=st.sampled_from([1, 64]),
)


@given(two_layout_scenarios(), OPTIONS)
def test_claimed_layouts_fill_each_others_gaps_and_nothing_is_read_twice(
    scenario: Scenario, options: PlanOptions
) -> None:
    published = {shard.tensor for shard in scenario.shards}
    if any(request.tensor not in published for request in scenario.requests):
        with pytest.raises(PlanError):
            plan(shard_table(scenario), read_table(scenario), options)
        return
    if missing(scenario):
        with pytest.raises(CoverageError):
            plan(shard_table(scenario), read_table(scenario), options)
        return
    made = plan(shard_table(scenario), read_table(scenario), options)
    memory = {h: [np.frombuffer(r, np.uint8) for r in regions] for h, regions in memory_of(scenario).items()}
    buffers = [np.full(n_bytes(b.dtype, b.shape), UNTOUCHED, np.uint8) for b in scenario.buffers]
    execute(made, memory, buffers)
    assert [b.tobytes() for b in buffers] == expected_buffers(scenario)
    assert made.economics.useful_bytes == totals(scenario).written


@given(two_layout_scenarios(replicas=False), st.sampled_from(["no claim", "claims differ", "one layout"]))
def test_overlap_without_a_claim_is_refused(scenario: Scenario, how: str) -> None:
    change = {
        "no claim": lambda s: dataclasses.replace(s, claim=""),
        "claims differ": lambda s: dataclasses.replace(s, claim=s.layout),
        "one layout": lambda s: dataclasses.replace(s, layout="same"),
    }[how]
    unclaimed = dataclasses.replace(scenario, shards=[change(s) for s in scenario.shards])
    asked = {request.tensor for request in scenario.requests}
    published = {shard.tensor for shard in scenario.shards}
    overlap = any(len(places) > 1 for name in asked & published for places in locations(unclaimed, name).values())
    if overlap:
        with pytest.raises((OverlapError, ConflictError, CoverageError, PlanError)) as caught:
            plan(shard_table(unclaimed), read_table(unclaimed))
        if asked <= published and not missing(unclaimed):
            assert isinstance(caught.value, OverlapError | ConflictError)
            assert len(set(caught.value.holders)) >= 1
    elif asked <= published and not missing(unclaimed):
        plan(shard_table(unclaimed), read_table(unclaimed))
