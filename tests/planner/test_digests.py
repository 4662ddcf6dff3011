"""What a digest is of: everything that determines a table or a plan, and nothing else."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.planner.world import World
from tests.reference import Scenario
from tests.strategies import read_table, scenarios, shard_parts, shard_table

from reshard.planner import Holder, PlanError, PlanOptions, ShardPart, ShardTable, plan
from reshard.planner.options import CostModel

ROOT = Path(__file__).resolve().parents[2]


@given(scenarios(), st.data())
def test_a_change_of_any_column_changes_the_parts_digest(scenario: Scenario, data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(shard_parts(scenario)))
    assume(len(part))
    name = data.draw(st.sampled_from(["offset_bytes", "replica_group", "region_bytes"]))
    values = np.array(getattr(part, name))
    values[data.draw(st.integers(0, len(values) - 1))] += 1
    roomy = np.array(part.region_bytes) + 1
    try:
        changed = dataclasses.replace(part, **{name: values})
    except ValueError:
        changed = dataclasses.replace(part, **{"region_bytes": roomy, name: values})
    assert changed.digest != part.digest


@pytest.mark.parametrize(
    "change",
    [{"layout": "other"}, {"claim": "other"}, {"layout": "a", "claim": "b"}],
    ids=["layout", "claim", "both"],
)
@given(scenario=scenarios())
def test_layout_and_claim_are_part_of_it_and_the_holder_is_not(change: dict[str, str], scenario: Scenario) -> None:
    (part, *_) = shard_parts(scenario)
    assert dataclasses.replace(part, **change).digest != part.digest
    assert part.with_holder(Holder("somebody else")).digest == part.digest
    joined, apart = dataclasses.replace(part, layout="ab", claim=""), dataclasses.replace(part, layout="a", claim="b")
    assert joined.digest != apart.digest


@given(scenarios())
def test_padding_is_not_part_of_it(scenario: Scenario) -> None:
    (part, *_) = shard_parts(scenario)
    tensors, boxes = part.tensors, part.geometries
    n, g = len(tensors), len(boxes)
    wider = dataclasses.replace(tensors, shape=(np.ones(n, np.int64), *tensors.shape))
    roomier = dataclasses.replace(
        boxes, start=(np.zeros(g, np.int64), *boxes.start), stop=(np.ones(g, np.int64), *boxes.stop)
    )
    assert wider.digest == tensors.digest
    assert roomier.digest == boxes.digest
    assert dataclasses.replace(part, tensors=wider, geometries=roomier).digest == part.digest


@given(scenarios())
def test_a_plan_is_the_same_whatever_the_padding(scenario: Scenario) -> None:
    parts = []
    for part in shard_parts(scenario):
        tensors = part.tensors
        n = len(tensors)
        wider = dataclasses.replace(tensors, shape=(np.ones(n, np.int64), np.ones(n, np.int64), *tensors.shape))
        parts.append(dataclasses.replace(part, tensors=wider))
    made, again = plan(shard_table(scenario), read_table(scenario)), plan(ShardTable(parts), read_table(scenario))
    assert again.digest == made.digest
    assert again.economics.wire_bytes == made.economics.wire_bytes
    for wave in range(made.n_waves):
        a, b = made.rows(wave), again.rows(wave)
        for name in a.__dataclass_fields__:
            assert np.array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(policy="first"),
        PlanOptions(instances=2),
        PlanOptions(instances=2, instance=1),
        PlanOptions(max_runs_per_block=63),
        PlanOptions(staging_bytes=8192),
        PlanOptions(cost=CostModel(descriptor_s=1.0)),
        PlanOptions(strided_rows=True),
        PlanOptions(trust_equal_boxes=True),
        PlanOptions(allow_casts=frozenset({("int32", "float32")})),
        PlanOptions(aliases={"a": "b"}),
        PlanOptions(receiver_host="node-1"),
    ],
    ids=str,
)
def test_options_are_part_of_the_plans_digest(options: PlanOptions) -> None:
    world = World()
    world.ramp("w", 4)
    world.hold("a", "w")
    world.buffer("p", 4)
    world.copy("w", ...)
    assert plan(world.sources(), world.reads(), options).digest != world.plan().digest


def test_digests_do_not_depend_on_the_process() -> None:
    """Hash randomisation must not reach them: two interpreters with other seeds agree."""
    code = (
        "from benchmarks.workloads import *\n"
        "tensors = specs('llama-3.1-70b')[:40]\n"
        "made = __import__('reshard.planner', fromlist=['plan']).plan(shard_table(fsdp(tensors, 4)),"
        " read_table(engine_rank('llama-3.1-70b', tensors, tp=8, rank=1)))\n"
        "print(made.digest.hex(), made.sources.parts[0].digest.hex(), made.reads.digest.hex())"
    )
    seen = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        seen.add(done.stdout)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"policy": "nearby"},
        {"instance": 1},
        {"instance": -1, "instances": 2},
        {"instances": 0},
        {"max_runs_per_block": 0},
        {"staging_bytes": 0},
        {"staging_bytes": -1},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="expected"):
        PlanOptions(**bad)


@pytest.mark.parametrize("bad", [{"descriptor_s": -1.0}, {"wire_bytes_per_s": 0.0}, {"copy_bytes_per_s": float("nan")}])
def test_cost_models_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="expected"):
        CostModel(**bad)


def test_part_of_no_rows_has_a_digest() -> None:
    a, b = ShardPart.from_shards(Holder("a"), [], []), ShardPart.from_shards(Holder("b"), [], [])
    assert a.digest == b.digest
    assert ShardPart.from_shards(Holder("a"), [], [8]).digest != a.digest
