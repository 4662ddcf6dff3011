"""Executing a plan on bytes equals slicing the arrays: the planner against ``tests/reference.py``."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reference import (
    UNTOUCHED,
    Scenario,
    expected_buffers,
    memory_of,
    missing,
    n_bytes,
    totals,
    writers,
)
from tests.strategies import read_table, scenarios, shard_parts, shard_table

from reshard.planner import (
    CostModel,
    CoverageError,
    OverlapError,
    Plan,
    PlanError,
    PlanOptions,
    ShardTable,
    plan,
)
from reshard.planner.execute import execute

Bytes = npt.NDArray[np.uint8]

OPTIONS = st.builds(
    PlanOptions,
    policy=st.sampled_from(["spread", "first", "nearest"]),
    instances=st.just(3),
    instance=st.integers(0, 2),
    max_runs_per_block=st.sampled_from([1, 2, 5, 64]),
    staging_bytes=st.sampled_from([4096, 256 << 20]),
    strided_rows=st.booleans(),
    round_spans=st.booleans(),
    cost=st.sampled_from(
        [CostModel(), CostModel(descriptor_s=1.0), CostModel(descriptor_s=0.0), CostModel(copy_bytes_per_s=1.0)]
    ),
)


def arrays(memory: Mapping[str, list[bytearray]]) -> dict[str, list[Bytes]]:
    return {holder: [np.frombuffer(r, np.uint8) for r in regions] for holder, regions in memory.items()}


def run(scenario: Scenario, made: Plan) -> list[bytes]:
    """Execute a plan on the scenario's memory, into buffers that hold the sentinel."""
    buffers = [np.full(n_bytes(b.dtype, b.shape), UNTOUCHED, np.uint8) for b in scenario.buffers]
    execute(made, arrays(memory_of(scenario)), buffers)
    return [buffer.tobytes() for buffer in buffers]


def plan_of(scenario: Scenario, options: PlanOptions) -> Plan:
    return plan(shard_table(scenario), read_table(scenario), options)


@given(scenarios(), OPTIONS)
def test_executing_the_plan_equals_slicing_the_arrays(scenario: Scenario, options: PlanOptions) -> None:
    assert run(scenario, plan_of(scenario, options)) == expected_buffers(scenario)


@given(scenarios(), OPTIONS)
def test_the_certificate_counts_what_the_reference_counts(scenario: Scenario, options: PlanOptions) -> None:
    certificate = plan_of(scenario, options).certificate
    want = totals(scenario)
    assert certificate.written_bytes == want.written
    assert certificate.filled_bytes == want.filled
    assert certificate.unwritten_bytes == want.unwritten


@given(scenarios(), OPTIONS)
def test_each_byte_has_one_writer(scenario: Scenario, options: PlanOptions) -> None:
    """Count writes to every destination byte, over direct rows, local copies and fills, from the plan itself."""
    made = plan_of(scenario, options)
    counts = write_counts(made, scenario)
    owners, _ = writers(scenario)
    for number, (buffer, owner) in enumerate(zip(scenario.buffers, owners, strict=True)):
        item = n_bytes(buffer.dtype, (1,))
        expected = np.zeros(n_bytes(buffer.dtype, buffer.shape), np.int64)
        for element in owner:
            expected[element * item : (element + 1) * item] = 1
        assert np.array_equal(counts[number], expected), f"buffer {buffer.name}"


def write_counts(made: Plan, scenario: Scenario) -> list[npt.NDArray[np.int64]]:
    """Walk direct rows, local copies and fills, adding one to every destination byte that each writes."""
    counts = [np.zeros(n_bytes(b.dtype, b.shape), np.int64) for b in scenario.buffers]
    for wave in range(made.n_waves):
        rows = made.rows(wave)
        for i in np.flatnonzero(rows.dst_buffer >= 0).tolist():
            shape, strides = (int(rows.count[i]),), (int(rows.dst_stride_bytes[i]),)
            add(counts[rows.dst_buffer[i]], int(rows.dst_offset_bytes[i]), shape, strides, int(rows.run_bytes[i]))
        copies = made.copies(wave)
        for i in range(len(copies)):
            unit = int(copies.dst_unit[i])
            shape = (*(int(c[i]) for c in copies.count), int(copies.run_units[i]))
            strides = (*(int(s[i]) for s in copies.dst_stride_bytes), unit)
            add(counts[copies.buffer[i]], int(copies.dst_offset_bytes[i]), shape, strides, unit)
    fills = made.fills
    for i in range(len(fills)):
        shape, strides = tuple(int(c[i]) for c in fills.count), tuple(int(s[i]) for s in fills.dst_stride_bytes)
        add(counts[fills.buffer[i]], int(fills.dst_offset_bytes[i]), shape, strides, int(fills.unit[i]))
    return counts


def add(
    counts: npt.NDArray[np.int64], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], unit: int
) -> None:
    for k in itertools.product(*map(range, shape)):
        first = offset + sum(i * s for i, s in zip(k, strides, strict=True))
        if not 0 <= first <= len(counts) - unit:
            raise IndexError(f"bytes [{first}, {first + unit}) are outside a buffer of {len(counts)}")
        counts[first : first + unit] += 1


@given(scenarios(), OPTIONS, st.integers(0, 2**32 - 1))
def test_the_order_of_parts_and_of_requests_does_not_matter(
    scenario: Scenario, options: PlanOptions, seed: int
) -> None:
    made = plan_of(scenario, options)
    parts = shard_parts(scenario)
    random.Random(seed).shuffle(parts)
    again = plan(ShardTable(parts), read_table(scenario), options)
    assert again.digest == made.digest
    shuffled = dataclasses.replace(
        scenario, requests=random.Random(seed).sample(scenario.requests, len(scenario.requests))
    )
    assert run(scenario, plan(ShardTable(parts), read_table(shuffled), options)) == expected_buffers(scenario)


@given(scenarios(), st.data())
def test_a_missing_shard_is_a_coverage_error_that_names_the_missing_boxes(
    scenario: Scenario, data: st.DataObject
) -> None:
    dropped = data.draw(st.sampled_from(range(len(scenario.shards))))
    gone = scenario.shards[dropped]
    left = [s for s in scenario.shards if (s.tensor, s.start, s.stop) != (gone.tensor, gone.start, gone.stop)]
    short = dataclasses.replace(scenario, shards=left)
    asked = any(request.tensor == gone.tensor for request in scenario.requests)
    if asked and not any(shard.tensor == gone.tensor for shard in left):
        with pytest.raises(PlanError, match=gone.tensor):
            plan_of(short, PlanOptions())
        return
    gaps = missing(short)
    if not gaps:
        assert run(short, plan_of(short, PlanOptions())) == expected_buffers(scenario)
        return
    with pytest.raises(CoverageError) as caught:
        plan_of(short, PlanOptions())
    assert caught.value.tensor in gaps
    assert caught.value.tensor in str(caught.value)
    named = caught.value.missing
    assert named
    for point in gaps[caught.value.tensor]:
        inside = [all(a <= x < b for x, (a, b) in zip(point, box, strict=True)) for box in named]
        assert any(inside), f"{point} is missing and not named in {named}"


@given(scenarios(overwrites=False, fills=False), st.data())
def test_two_writers_without_an_order_are_an_overlap_error(scenario: Scenario, data: st.DataObject) -> None:
    twice = data.draw(st.sampled_from(scenario.requests))
    clashing = dataclasses.replace(scenario, requests=[*scenario.requests, twice])
    with pytest.raises(OverlapError) as caught:
        plan_of(clashing, PlanOptions())
    assert scenario.buffers[twice.buffer].name in str(caught.value)
    ordered = dataclasses.replace(twice, order=7)
    again = dataclasses.replace(scenario, requests=[*scenario.requests, ordered])
    assert run(again, plan_of(again, PlanOptions())) == expected_buffers(scenario)
