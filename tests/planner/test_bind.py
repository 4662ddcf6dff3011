"""Absolute rows: what they move, how they are grouped, and addresses at the end of 64 bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.world import World
from tests.reference import UNTOUCHED, Scenario, expected_buffers, memory_of, n_bytes
from tests.strategies import read_table, scenarios, shard_table

from reshard.planner import (
    Buffer,
    CostModel,
    Holder,
    Plan,
    PlanError,
    PlanOptions,
    ReadRequest,
    ReadTable,
    Shard,
    ShardPart,
    ShardTable,
    plan,
    run_copies,
    run_fills,
)

Bytes = npt.NDArray[np.uint8]

OPTIONS = st.builds(
    PlanOptions,
    max_runs_per_block=st.sampled_from([1, 3, 64]),
    strided_rows=st.booleans(),
    instances=st.just(2),
    instance=st.integers(0, 1),
)

TOP = 1 << 64


class FlatMemory:
    """An address space: arrays placed at addresses, read and written by absolute rows only."""

    def __init__(self) -> None:
        self.places: list[tuple[int, Bytes]] = []

    def place(self, address: int, array: Bytes) -> int:
        self.places.append((address, array))
        return address

    def slice(self, address: int, size: int) -> Bytes:
        for base, array in self.places:
            if base <= address and address + size <= base + len(array):
                return array[address - base : address - base + size]
        raise IndexError(f"[{address:#x}, {address + size:#x}) is in no array")


def runs(row: npt.NDArray[np.uint64]) -> list[tuple[int, int]]:
    """(address, bytes) of each run of a row of three or five columns."""
    values = [int(v) for v in row]
    if len(values) == 3:
        return [(values[0], values[1])]
    address, size, _, stride, count = values
    return [(address + k * stride, size) for k in range(count)]


def bases_of(made: Plan, top: bool) -> tuple[dict[str, npt.NDArray[np.uint64]], npt.NDArray[np.uint64], int]:
    """Bases for all regions, buffers and staging: low, or ending exactly at 2^64."""
    at = 1 << 20
    sizes: dict[str, list[int]] = {h.name: r.tolist() for h, r in zip(made.holders, made.region_bytes, strict=True)}
    everything = sum(sum(s) for s in sizes.values()) + int(made.buffer_bytes.sum()) + made.staging_bytes
    if top:
        at = TOP - everything
    sources: dict[str, npt.NDArray[np.uint64]] = {}

    def take(size: int) -> int:
        nonlocal at
        begin = at
        at += size
        return begin if begin < TOP else 0

    destinations = np.array([take(n) for n in made.buffer_bytes.tolist()], np.uint64)
    staging = take(made.staging_bytes)
    for name, of in sizes.items():
        sources[name] = np.array([take(n) for n in of], np.uint64)
    return sources, destinations, staging


def run_bound(
    made: Plan, memory: Mapping[str, list[bytearray]], buffers: list[Bytes], *, strided: bool, top: bool
) -> None:
    sources, destinations, staging_base = bases_of(made, top)
    bound = made.bind(sources, destinations, staging_base, strided=strided, local_device=3)
    space = FlatMemory()
    staging = np.zeros(made.staging_bytes, np.uint8)
    space.place(staging_base, staging)
    for base, buffer in zip(destinations.tolist(), buffers, strict=True):
        space.place(base, buffer)
    for holder in made.holders:
        for base, region in zip(sources[holder.name].tolist(), memory[holder.name], strict=True):
            space.place(base, np.frombuffer(region, np.uint8))
    assert len(bound.waves) == made.n_waves
    for wave, peers in enumerate(bound.waves):
        names = [peer.holder.name for peer in peers]
        assert names == sorted(set(names), key=names.index)
        for peer in peers:
            width = 5 if strided else 3
            for rows in (peer.local, peer.remote):
                assert rows.dtype == np.uint64
                assert rows.flags.c_contiguous
                assert rows.shape == (len(peer.local), width)
            assert np.array_equal(peer.local[:, 1], peer.remote[:, 1])
            assert (peer.local[:, 2] == 3).all()
            assert (peer.remote[:, 2] == peer.holder.device).all()
            assert (peer.local[:, 1] > 0).all()
            if strided:
                assert np.array_equal(peer.local[:, 4], peer.remote[:, 4])
            for local, remote in zip(peer.local, peer.remote, strict=True):
                for (to, size), (origin, _) in zip(runs(local), runs(remote), strict=True):
                    space.slice(to, size)[:] = space.slice(origin, size)
        run_copies(made, wave, staging, buffers)
    run_fills(made, buffers)


@pytest.mark.parametrize("top", [False, True], ids=["low", "ending at 2^64"])
@pytest.mark.parametrize("strided", [False, True], ids=["three columns", "five columns"])
@given(scenario=scenarios(), options=OPTIONS)
def test_moving_bytes_by_absolute_rows_equals_slicing(
    strided: bool, top: bool, scenario: Scenario, options: PlanOptions
) -> None:
    made = plan(shard_table(scenario), read_table(scenario), options)
    buffers = [np.full(n_bytes(b.dtype, b.shape), UNTOUCHED, np.uint8) for b in scenario.buffers]
    run_bound(made, memory_of(scenario), buffers, strided=strided, top=top)
    assert [b.tobytes() for b in buffers] == expected_buffers(scenario)


def column_world(n_rows: int = 64) -> World:
    world = World()
    world.ramp("w", n_rows, 8)
    world.hold("a", "w", (0,), (n_rows // 2,))
    world.hold("b", "w", (n_rows // 2,), (n_rows,))
    world.buffer("p", n_rows, 4)
    world.copy("w", np.s_[:, 2:6])
    return world


def exact_plan(world: World, **changed: object) -> Plan:
    return world.plan(max_runs_per_block=1 << 20, cost=CostModel(descriptor_s=0.0), **changed)


def test_five_columns_describe_a_series_in_one_row() -> None:
    made = exact_plan(column_world())
    sources, destinations, staging = bases_of(made, False)
    flat = made.bind(sources, destinations, staging).waves[0]
    strided = made.bind(sources, destinations, staging, strided=True).waves[0]
    assert [len(peer.local) for peer in flat] == [32, 32]
    assert [len(peer.local) for peer in strided] == [1, 1]
    assert strided[0].remote[0, 3:].tolist() == [16, 32]
    assert [peer.n_bytes for peer in flat] == [peer.n_bytes for peer in strided] == [256, 256]


@given(st.integers(1, 5000))
def test_expansion_in_pieces_has_no_seams(n_rows: int) -> None:
    """Runs are expanded in cache-sized pieces by differences and a running sum; every address is checked."""
    n_rows *= 2
    made = exact_plan(column_world(n_rows))
    sources, destinations, staging = bases_of(made, True)
    peers = made.bind(sources, destinations, staging).waves[0]
    rows = np.arange(n_rows // 2, dtype=np.uint64)
    for number, peer in enumerate(peers):
        if n_rows == 2:
            continue
        assert np.array_equal(peer.remote[:, 0], sources[peer.holder.name][0] + rows * np.uint64(16) + np.uint64(4))
        first = destinations[0] + np.uint64(number * n_rows // 2 * 8)
        assert np.array_equal(peer.local[:, 0], first + rows * np.uint64(8))
        assert (peer.local[:, 1] == 8).all()


@pytest.mark.parametrize("what", ["region", "buffer", "staging"])
def test_ranges_that_pass_the_end_of_memory_are_refused(what: str) -> None:
    made = column_world().plan(max_runs_per_block=1)
    sources, destinations, staging = bases_of(made, False)
    if what == "region":
        sources["b"] = np.array([TOP - 32 * 16 + 1], np.uint64)
    elif what == "buffer":
        destinations = np.array([TOP - 64 * 8 + 1], np.uint64)
    else:
        staging = TOP - made.staging_bytes + 1
    assert made.staging_bytes > 0
    with pytest.raises(PlanError, match=r"2\*\*64"):
        made.bind(sources, destinations, staging)


def test_bases_that_are_missing_or_no_addresses_are_refused() -> None:
    made = column_world().plan()
    sources, destinations, staging = bases_of(made, False)
    with pytest.raises(PlanError, match="'b'"):
        made.bind({"a": sources["a"]}, destinations, staging)
    with pytest.raises(PlanError, match="'b'"):
        made.bind({**sources, "b": np.zeros(0, np.uint64)}, destinations, staging)
    with pytest.raises(PlanError, match="destination"):
        made.bind(sources, destinations[:0], staging)
    with pytest.raises(PlanError):
        made.bind(sources, destinations.astype(np.float64), staging)
    with pytest.raises(PlanError):
        made.bind({**sources, "a": np.array([-4096])}, destinations, staging)
    with pytest.raises(PlanError):
        made.bind(sources, destinations, -1)
    with pytest.raises(PlanError):
        made.bind(sources, destinations, TOP)


@pytest.mark.parametrize("n_elems", [1 << 40, (1 << 40) + 8])
def test_two_to_the_forty_elements_do_not_overflow(n_elems: int) -> None:
    """A stacked tensor of 2^40 elements over four holders, read in part from each side of 2^31 and 2^32."""
    rows = n_elems // 8
    cut = [0, 3 * rows // 8, rows // 2, 7 * rows // 8, rows]
    parts = [
        ShardPart.from_shards(
            Holder(f"r{i}"),
            [Shard("experts", "float32", (rows, 8), (cut[i], 0), (cut[i + 1], 8))],
            [(cut[i + 1] - cut[i]) * 32],
        )
        for i in range(4)
    ]
    whole = ReadRequest("experts", (rows, 8), "float32", (0, 0), (1, 1), (rows, 8), 0, 0, (8, 1))
    made = plan(ShardTable(parts), ReadTable.build([Buffer("p", (rows, 8), "float32")], [whole]))
    assert made.certificate.written_bytes == made.economics.wire_bytes == rows * 32
    assert made.economics.n_descriptors == 4
    base = TOP - rows * 32
    sources = {f"r{i}": np.array([TOP - (cut[i + 1] - cut[i]) * 32], np.uint64) for i in range(4)}
    bound = made.bind(sources, np.array([base], np.uint64))
    for i, peer in enumerate(bound.waves[0]):
        assert peer.local.tolist() == [[base + cut[i] * 32, (cut[i + 1] - cut[i]) * 32, 0]]
        assert peer.remote[0, 0] == sources[f"r{i}"][0]
    columns = ReadRequest("experts", (rows, 8), "float32", (0, 3), (1, 1), (rows, 2), 0, 0, (2, 1))
    reads = ReadTable.build([Buffer("p", (rows, 2), "float32")], [columns])
    spans = plan(ShardTable(parts), reads, PlanOptions(max_runs_per_block=1 << 50))
    assert spans.certificate.written_bytes == rows * 8
    assert spans.economics.n_runs == rows


def test_binding_again_after_regions_moved_changes_addresses_only() -> None:
    made = column_world().plan()
    sources, destinations, staging = bases_of(made, False)
    moved = {name: bases + np.uint64(1 << 30) for name, bases in sources.items()}
    before = made.bind(sources, destinations, staging).waves[0]
    after = made.bind(moved, destinations, staging).waves[0]
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a.local, b.local)
        assert np.array_equal(a.remote[:, 0] + np.uint64(1 << 30), b.remote[:, 0])
        assert np.array_equal(a.remote[:, 1:], b.remote[:, 1:])


def test_neighbours_that_continue_each_other_are_one_row() -> None:
    """Gate and up of one rank, contiguous on both sides, and layers that follow one another in one buffer."""
    world = World()
    for name in ("gate", "up"):
        world.ramp(name, 4, 8)
        world.hold("a", name)
    world.buffer("gate_up", 8, 8)
    world.copy("gate", ..., 0, np.s_[:4])
    world.copy("up", ..., 0, np.s_[4:])
    made = world.check()
    rows = made.rows(0)
    assert len(rows) == 1
    assert rows.run_bytes.tolist() == [128]
