"""Arbitrary strided destinations in one buffer: whatever is accepted is exact, whatever is refused overlaps."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import assume, event, example, given
from hypothesis import strategies as st
from tests.reference import (
    UNTOUCHED,
    RefBuffer,
    RefRequest,
    RefShard,
    RefTensor,
    Scenario,
    expected_buffers,
    memory_of,
    n_elems,
    steps_of,
    totals,
    writers,
)
from tests.strategies import read_table, shard_table

from reshard.planner import OverlapError, PlanError, plan
from reshard.planner.execute import execute


@st.composite
def destinations(draw: st.DrawFn) -> Scenario:
    """Up to four copies or fills with any strides that stay inside one small buffer of one to three dims."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    total = n_elems(shape)
    natural = [n_elems(shape[axis + 1 :]) for axis in range(len(shape))]
    scenario = Scenario(buffers=[RefBuffer("p", "uint8", shape)], region_bytes={"a": [0]})
    for number in range(draw(st.integers(1, 4))):
        count, stride, low, high = [], [], 0, 0
        for _ in range(draw(st.integers(0, 3))):
            c = draw(st.integers(1, 5))
            s = draw(st.one_of(st.sampled_from(natural), st.integers(-7, 7)))
            if c > 1:
                low, high = low + min(0, s * (c - 1)), high + max(0, s * (c - 1))
            count.append(c)
            stride.append(s if c > 1 else 0)
        if high - low >= total:
            continue
        offset = draw(st.integers(-low, total - 1 - high))
        value = bytes([200 + number]) if draw(st.integers(0, 3)) == 0 else None
        rank = len(count)
        order = draw(st.sampled_from([0, number, number, number]))
        name = "" if value else f"w.{number}"
        if value is None:
            scenario.tensors[name] = RefTensor(name, "uint8", tuple(count))
            scenario.content[name] = bytes((number * 50 + i) % 251 for i in range(n_elems(count)))
            scenario.shards.append(RefShard("a", name, (0,) * rank, tuple(count), 0, scenario.region_bytes["a"][0]))
            scenario.region_bytes["a"][0] += n_elems(count)
        scenario.requests.append(
            RefRequest(name, (0,) * rank, (1,) * rank, tuple(count), 0, offset, tuple(stride), order, value)
        )
    assume(scenario.requests)
    return scenario


def copies_of(shape: tuple[int, ...], *views: tuple[tuple[int, ...], tuple[int, ...], int, int]) -> Scenario:
    """A scenario of copies given as (count, stride, offset, order)."""
    scenario = Scenario(buffers=[RefBuffer("p", "uint8", shape)], region_bytes={"a": [0]})
    for number, (count, stride, offset, order) in enumerate(views):
        name, zeros = f"w.{number}", (0,) * len(count)
        scenario.tensors[name] = RefTensor(name, "uint8", count)
        scenario.content[name] = bytes((number * 50 + i) % 251 for i in range(n_elems(count)))
        scenario.shards.append(RefShard("a", name, zeros, count, 0, scenario.region_bytes["a"][0]))
        scenario.region_bytes["a"][0] += n_elems(count)
        scenario.requests.append(RefRequest(name, zeros, (1,) * len(count), count, 0, offset, stride, order))
    return scenario


@given(destinations())
@example(copies_of((6, 2), ((3, 2), (4, 1), 0, 0), ((3, 2), (4, 1), 2, 0)))
@example(copies_of((6, 2), ((6, 2), (2, 1), 0, 0), ((3, 2), (4, 1), 2, 1)))
@example(copies_of((12,), ((4,), (3,), 0, 0), ((4,), (3,), 1, 0), ((4,), (3,), 2, 0)))
@example(copies_of((12,), ((6,), (2,), 0, 0), ((4,), (3,), 0, 1)))
@example(copies_of((3, 4), ((6,), (1,), 3, 0), ((3,), (4,), 0, 1)))
@example(copies_of((2, 5), ((4,), (-1,), 4, 0), ((2, 2), (5, 1), 1, 1)))
def test_accepted_writes_are_exact_and_refused_ones_overlap(scenario: Scenario) -> None:
    _, clash = writers(scenario)
    again = any(len({e for _, e in steps_of(r)}) < n_elems(r.count) for r in scenario.requests)
    try:
        made = plan(shard_table(scenario), read_table(scenario))
    except OverlapError:
        event("overlap refused")
        assert clash or again
        return
    except PlanError:
        event("cut refused")
        sets = [{e for _, e in steps_of(r)} for r in scenario.requests]
        assert any(a & b for a, b in itertools.combinations(sets, 2))
        return
    event("accepted")
    assert not clash
    assert not again
    buffer = np.full(n_elems(scenario.buffers[0].shape), UNTOUCHED, np.uint8)
    execute(made, {"a": [np.frombuffer(memory_of(scenario)["a"][0], np.uint8)]}, [buffer])
    assert buffer.tobytes() == expected_buffers(scenario)[0]
    want = totals(scenario)
    certificate = made.certificate
    assert (certificate.written_bytes, certificate.filled_bytes) == (want.written, want.filled)
    assert certificate.unwritten_bytes == want.unwritten
    assert made.economics.useful_bytes == want.written
