"""Explaining a plan, in both directions, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.world import World
from tests.reference import ITEM_BITS, Scenario, locations, n_bytes, points, writers
from tests.strategies import read_table, scenarios, shard_table

from reshard.planner import PlanError, PlanOptions, plan
from reshard.planner.execute import run_copies
from reshard.planner.explain import explain_byte, find_element, find_region_byte

OPTIONS = st.builds(
    PlanOptions, max_runs_per_block=st.sampled_from([1, 64]), policy=st.sampled_from(["first", "spread"])
)


@settings(max_examples=max(1, settings.default.max_examples // 3))
@given(scenarios(max_rank=3), OPTIONS)
def test_every_destination_byte_is_explained_as_the_reference_says(scenario: Scenario, options: PlanOptions) -> None:
    made = plan(shard_table(scenario), read_table(scenario), options)
    owners, _ = writers(scenario)
    held = {name: locations(scenario, name) for name in scenario.tensors}
    for buffer, owner in zip(scenario.buffers, owners, strict=True):
        size = ITEM_BITS[buffer.dtype] // 8
        for byte in range(n_bytes(buffer.dtype, buffer.shape)):
            origin = explain_byte(made, buffer.name, byte)
            write = owner.get(byte // size)
            if write is None:
                assert origin.kind == "unwritten"
                continue
            assert origin.request == write.request
            request = scenario.requests[write.request]
            if write.element is None:
                assert (origin.kind, origin.value) == ("fill", request.value)
                continue
            assert (origin.kind, origin.tensor, origin.element) == ("copy", request.tensor, write.element)
            places = [(p.holder, p.region, p.byte_offset) for p in held[request.tensor][write.element]]
            assert (origin.holder, origin.region, origin.region_offset_bytes) in places
            assert origin.element_bytes == ITEM_BITS[scenario.tensors[request.tensor].dtype] // 8
            assert origin.holder in str(origin)
            assert 0 <= origin.wave < made.n_waves
            back = find_region_byte(made, origin.holder, origin.region, origin.region_offset_bytes)
            assert (buffer.name, byte // size * size) in [(d.buffer, d.first_byte) for d in back]


@given(scenarios(max_rank=3), OPTIONS)
def test_every_source_element_is_found_where_the_reference_writes_it(scenario: Scenario, options: PlanOptions) -> None:
    made = plan(shard_table(scenario), read_table(scenario), options)
    owners, _ = writers(scenario)
    expected: dict[tuple[str, tuple[int, ...]], list[tuple[str, int]]] = {}
    for buffer, owner in zip(scenario.buffers, owners, strict=True):
        for element, write in sorted(owner.items()):
            if write.element is not None:
                key = scenario.requests[write.request].tensor, write.element
                expected.setdefault(key, []).append((buffer.name, element * (ITEM_BITS[buffer.dtype] // 8)))
    published = set(made.sources.tensors.names_list)
    for tensor in scenario.tensors.values():
        if tensor.name not in published:
            continue
        for point in points([0] * len(tensor.shape), tensor.shape):
            found = [(d.buffer, d.first_byte) for d in find_element(made, tensor.name, point)]
            assert found == expected.get((tensor.name, point), [])


def test_staged_bytes_are_explained_where_they_lie_in_the_arena() -> None:
    """Fill the arena by hand with the explained region bytes; the copies must then give the right answer."""
    world = World()
    world.ramp("w", 40, 16)
    world.hold("a", "w", (0,), (25,))
    world.hold("b", "w", (25,), (40,))
    world.buffer("p", 40, 3)
    world.copy("w", np.s_[:, 5:8])
    made = world.plan(max_runs_per_block=1)
    memory = world.memory()
    arena = np.zeros(made.staging_bytes, np.uint8)
    out = [np.zeros(240, np.uint8)]
    assert made.n_waves == 1
    for byte in range(0, 240, 2):
        origin = explain_byte(made, "p", byte)
        assert origin.staging_offset_bytes >= 0
        source = memory[origin.holder][origin.region]
        first = origin.region_offset_bytes
        arena[origin.staging_offset_bytes : origin.staging_offset_bytes + 2] = source[first : first + 2]
    run_copies(made, 0, arena, out)
    assert np.array_equal(out[0].view(np.uint16).reshape(40, 3), world.arrays["w"][:, 5:8])


def test_questions_that_have_no_answer_are_refused() -> None:
    world = World()
    world.ramp("w", 4, 2)
    world.hold("a", "w")
    world.buffer("p", 4, 2)
    world.copy("w", ...)
    made = world.plan()
    with pytest.raises(PlanError, match="'q' is not in the plan"):
        explain_byte(made, "q", 0)
    for byte in (-1, 16):
        with pytest.raises(PlanError, match="expected 0 to 15"):
            explain_byte(made, "p", byte)
    with pytest.raises(PlanError, match="published by nobody"):
        find_element(made, "ghost", (0, 0))
    for element in ((4, 0), (0, -1), (0,)):
        with pytest.raises(PlanError, match=r"inside \(4, 2\)"):
            find_element(made, "w", element)
    assert find_region_byte(made, "a", 0, 16) == []
    assert find_region_byte(made, "a", 1, 0) == []
    assert find_region_byte(made, "nobody", 0, 0) == []


def test_the_loaders_own_bytes_say_so() -> None:
    world = World()
    world.ramp("a_log", 6, label="float32")
    world.hold("r0", "a_log")
    world.buffer("a", 8, label="float32")
    world.copy("a_log", ..., 0, np.s_[:6], kind="materialised")
    made = world.plan()
    assert explain_byte(made, "a", 20).kind == "loader"
    assert explain_byte(made, "a", 24).kind == "unwritten"
    staged = made.buffers.name(made.materialised[0].buffer)
    assert explain_byte(made, staged, 4).element == (1,)
