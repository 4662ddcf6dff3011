"""Corners: nothing to read, zero-size tensors and buffers, two names of one tensor, a box twice at one holder."""

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
    Holder,
    Plan,
    PlanOptions,
    ReadRequest,
    ReadTable,
    Shard,
    ShardPart,
    ShardTable,
    TableError,
    plan,
)
from reshard.planner.execute import execute


def whole(name: str, tensor: str, *shape: int, group: int = -1, **part: str) -> ShardPart:
    size = int(np.prod(shape))
    return ShardPart.from_shards(
        Holder(name), [Shard(tensor, "uint8", shape, (0,) * len(shape), shape, 0, 0, group)], [size], **part
    )


def is_empty(made: Plan) -> None:
    assert made.holders == ()
    assert made.certificate.written_bytes == made.economics.wire_bytes == made.staging_bytes == 0
    assert len(made.blocks) == 0
    for wave in range(made.n_waves):
        assert len(made.rows(wave)) == len(made.copies(wave)) == 0
    bound = made.bind({}, np.zeros(len(made.buffers), np.uint64))
    assert all(peers == () for peers in bound.waves)


@pytest.mark.parametrize("parts", [[], [ShardPart.from_shards(Holder("a"), [], [])], [whole("a", "w", 4)]])
def test_nothing_is_asked_for(parts: list[ShardPart]) -> None:
    is_empty(plan(ShardTable(parts), ReadTable.build([], [])))
    made = plan(ShardTable(parts), ReadTable.build([Buffer("p", (4,), "uint8")], []))
    is_empty(made)
    assert made.certificate.unwritten_bytes == 4
    assert made.certificate.never_written == ("p",)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_tensors_of_no_elements_need_no_source(shape: tuple[int, ...]) -> None:
    strides = tuple(1 for _ in shape)
    request = ReadRequest("w", shape, "uint8", (0,) * len(shape), (1,) * len(shape), shape, 0, 0, strides)
    reads = ReadTable.build([Buffer("p", shape, "uint8")], [request])
    made = plan(ShardTable([whole("a", "w", *shape)]), reads)
    is_empty(made)
    assert made.certificate.unwritten_bytes == 0
    assert execute(made, {}, [np.zeros(0, np.uint8)])[0].size == 0


@given(st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_requests_for_no_elements_read_nothing_and_block_nothing(rows: int, columns: int, fill: bool) -> None:
    """A rank whose share of a vocabulary is empty asks for [n, n)."""
    world = World()
    world.ramp("w", 4, 3)
    world.hold("a", "w")
    world.buffer("p", 4, 3)
    world.copy("w", np.s_[:2], 0, np.s_[:2])
    world.requests.append(
        ReadRequest("w", (4, 3), "bfloat16", (4 - rows if rows else 3, 0), (1, 1), (0, columns), 0, 0, (3, 1), 9)
    )
    if fill:
        world.requests.append(ReadRequest("", (), "", (0,), (1,), (0,), 0, 0, (1,), 9, "constant", b"ab"))
    assert world.check().certificate.written_bytes == 12


def test_two_names_of_one_tensor_are_both_written() -> None:
    world = World()
    world.ramp("embed", 6, 2)
    world.hold("a", "embed", (0,), (3,))
    world.hold("b", "embed", (3,), (6,))
    world.arrays["head"], world.labels["head"] = world.arrays["embed"], "bfloat16"
    for number, name in enumerate(("embed", "head")):
        world.buffer(name, 6, 2)
        world.copy(name, ..., number)
    made = world.check(aliases={"head": "embed"})
    assert made.certificate.written_bytes == 48
    assert {(a.kind, a.key) for a in made.assumptions} == {("alias", "head=embed")}


def test_an_alias_of_another_shape_is_refused() -> None:
    request = ReadRequest("head", (4, 2), "uint8", (0, 0), (1, 1), (4, 2), 0, 0, (2, 1))
    reads = ReadTable.build([Buffer("p", (4, 2), "uint8")], [request])
    with pytest.raises(TableError, match=r"'head'.*\(4, 2\).*\(2, 4\)"):
        plan(ShardTable([whole("a", "embed", 2, 4)]), reads, PlanOptions(aliases={"head": "embed"}))


def read_whole(*shape: int) -> ReadTable:
    zeros, ones = (0,) * len(shape), (1,) * len(shape)
    strides = tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))
    request = ReadRequest("w", shape, "uint8", zeros, ones, shape, 0, 0, strides)
    return ReadTable.build([Buffer("p", shape, "uint8")], [request])


@pytest.mark.parametrize("policy", ["first", "spread", "nearest"])
def test_one_holder_that_keeps_a_box_twice_claims_it_or_is_refused(policy: str) -> None:
    def twice(group: int) -> ShardPart:
        shards = [Shard("w", "uint8", (4,), (0,), (4,), 0, offset, group) for offset in (0, 4)]
        return ShardPart.from_shards(Holder("a"), shards, [8])

    with pytest.raises(ConflictError):
        plan(ShardTable([twice(-1)]), read_whole(4))
    made = plan(ShardTable([twice(2)]), read_whole(4), PlanOptions(policy=policy))
    memory = np.array([1, 2, 3, 4, 1, 2, 3, 4], np.uint8)
    (got,) = execute(made, {"a": [memory]}, [np.zeros(4, np.uint8)])
    assert got.tolist() == [1, 2, 3, 4]
    assert made.economics.wire_bytes == 4


def test_parts_of_few_and_of_many_dims_meet() -> None:
    """Dictionaries are padded each to its own rank; ids and dims must not be mixed up."""
    world = World()
    world.ramp("a", 5)
    world.ramp("b", 2, 3, 2, 2)
    world.tensor("c", 7)
    for number, name in enumerate("abc"):
        world.hold(f"r{number}", name)
        world.buffer(name, *world.arrays[name].shape)
    world.copy("a", ..., 0)
    world.copy("b", ..., 1)
    world.copy("c", ..., 2)
    assert len(world.check().holders) == 3


@given(st.permutations(["a", "b", "c", "d"]), st.integers(0, 3), st.sampled_from(["first", "spread"]))
def test_holder_names_decide_and_nothing_else(names: list[str], instance: int, policy: str) -> None:
    """The order in which parts are made or arrive changes neither plan nor digest."""
    parts = {name: whole(name, "w", 8, 4, group=0) for name in names}
    options = PlanOptions(policy=policy, instance=instance, instances=4)
    made = plan(ShardTable(parts.values()), read_whole(8, 4), options)
    again = plan(ShardTable(parts[name] for name in sorted(names)), read_whole(8, 4), options)
    assert made.digest == again.digest
    assert made.holders == again.holders


def test_nearest_keeps_to_the_receivers_host_and_else_spreads() -> None:
    parts = [whole(f"r{i}", "w", 8, group=0).with_holder(Holder(f"r{i}", host=f"node-{i // 2}")) for i in range(8)]
    for host, expected in (
        ("node-1", {"r2", "r3"}),
        ("node-3", {"r6", "r7"}),
        ("elsewhere", {f"r{i}" for i in range(8)}),
    ):
        seen = set()
        for instance in range(8):
            options = PlanOptions(policy="nearest", receiver_host=host, instance=instance, instances=8)
            seen |= {h.name for h in plan(ShardTable(parts), read_whole(8), options).holders}
        assert seen == expected


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_spread_loads_replicas_evenly(n_replicas: int, n_boxes: int, n_layers: int, instances: int) -> None:
    """Equal tensors, every instance reads all: no replica serves more than its share, rounded up by one tensor."""
    parts = []
    for replica in range(n_replicas):
        for box in range(n_boxes):
            shards = [
                Shard(f"l{layer}", "uint8", (4 * n_boxes,), (4 * box,), (4 * box + 4,), 0, 4 * layer, 1)
                for layer in range(n_layers)
            ]
            parts.append(ShardPart.from_shards(Holder(f"r{replica}.{box}"), shards, [4 * n_layers]))
    reads = ReadTable.build(
        [Buffer(f"p{layer}", (4 * n_boxes,), "uint8") for layer in range(n_layers)],
        [
            ReadRequest(f"l{layer}", (4 * n_boxes,), "uint8", (0,), (1,), (4 * n_boxes,), layer, 0, (1,))
            for layer in range(n_layers)
        ],
    )
    loads = dict.fromkeys((part.holder.name for part in parts), 0)
    for instance in range(instances):
        made = plan(ShardTable(parts), reads, PlanOptions(instance=instance, instances=instances))
        for holder, n_bytes in zip(made.holders, made.economics.holder_bytes.tolist(), strict=True):
            loads[holder.name] += n_bytes
    share = n_layers * instances / n_replicas
    assert sum(loads.values()) == 4 * n_boxes * n_layers * instances
    for name, n_bytes in loads.items():
        assert n_bytes <= 4 * (share + 1 + instances / n_replicas), name


def test_a_gap_of_a_stepped_request_is_named_where_it_is() -> None:
    """Rows 0, 3, 6 and 9 are asked for; rows [4, 8) are missing, so 6 is."""
    world = World()
    world.ramp("w", 10)
    world.hold("a", "w", (0,), (4,))
    world.hold("b", "w", (8,), (10,))
    world.buffer("p", 4)
    world.copy("w", np.s_[::3])
    with pytest.raises(CoverageError, match=r"\[6, 7\)"):
        world.plan()
