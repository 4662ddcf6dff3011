"""Every cell that a plan reads whole is verified wherever it lands, none that is read in part, and no byte is missed.

Plans of arbitrary scenarios are carried out on bytes; what a cell's digest covers is compared with what was read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.planner.test_properties import OPTIONS, arrays, plan_of
from tests.reference import UNTOUCHED, Scenario, memory_of
from tests.strategies import scenarios

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
)
from reshard.planner.execute import run_copies, run_fills
from reshard.refit.checks import Check, Checks, build_checks
from reshard.refit.deadline import Deadline
from reshard.refit.devices import HOST, CellRows, Device
from reshard.refit.digests import root_of
from reshard.refit.errors import VerificationError
from reshard.refit.torch_device import TorchDevice
from reshard.refit.verify import Verifier

Bytes = np.ndarray
Flip = tuple[Check, int] | None
"""A check, and which byte of it is flipped once it has landed."""


def rows_of(made: Plan, wave: int):
    """(holder, source bytes as region and flat indices, buffer, destination indices) of each row of a wave."""
    rows = made.rows(wave)
    counts, runs = (np.atleast_1d(c).tolist() for c in (rows.count, rows.run_bytes))
    columns = zip(
        rows.holder.tolist(),
        rows.region.tolist(),
        rows.src_offset_bytes.tolist(),
        rows.dst_buffer.tolist(),
        rows.dst_offset_bytes.tolist(),
        counts,
        runs,
        rows.src_stride_bytes.tolist(),
        rows.dst_stride_bytes.tolist(),
        strict=True,
    )
    for holder, region, src, buffer, dst, count, run, src_stride, dst_stride in columns:
        at = np.arange(run)
        source = (src + np.arange(count)[:, None] * src_stride + at).reshape(-1)
        target = (dst + np.arange(count)[:, None] * dst_stride + at).reshape(-1)
        yield holder, region, source, buffer, target


def landing_of(check: Check, byte: int) -> tuple[int, int]:
    """Buffer and address of a cell's byte number ``byte``, from its pieces."""
    inner = check.pieces[0].inner
    element = np.unravel_index(byte // inner, check.shape) if check.shape else ()
    for piece in reversed(check.pieces):  # of pieces that overlap the last one counts
        index = []
        for dim, e in enumerate(element):
            s = piece.at[dim] if piece.at else slice(0, check.shape[dim], 1)
            if int(e) not in range(s.start, s.stop, s.step or 1):
                break
            index.append((int(e) - s.start) // (s.step or 1))
        else:
            at = sum(i * stride for i, stride in zip(index, piece.strides, strict=True))
            return piece.buffer, piece.offset + at + byte % inner
    raise AssertionError("no piece holds the byte")


def carried_out(
    scenario: Scenario,
    made: Plan,
    checks: Checks,
    flip: Flip,
    device: Device,
    *,
    lands_wrong: tuple[int, int, int] | None = None,
    into: list[Bytes] | None = None,
) -> Verifier:
    """Read, verify and copy as a receiver does, with one byte flipped on its way.

    ``lands_wrong`` is a wave, one of its rows and a byte of it, which is flipped as it lands; ``into`` gets buffers.
    """
    memory = arrays(memory_of(scenario))
    digests = {}
    for name, grid in zip(checks.names, checks.grids, strict=True):
        cells = range(len(grid))
        columns = (grid.offset_bytes, grid.nbytes, grid.tags)
        rows = [CellRows(memory[name][int(grid.region[i])], *(c[i : i + 1] for c in columns)) for i in cells]
        digests[name] = HOST.digest_cells(rows)
    buffers = [] if into is None else into
    buffers += [np.full(n, UNTOUCHED, np.uint8) for n in made.buffer_bytes.tolist()]
    arena = np.zeros(made.staging_bytes, np.uint8)
    verifier = Verifier(checks, "full", (0, 0), Deadline(30.0, "a test"), device)
    with verifier:
        verifier.trust(digests, {name: root_of(d) for name, d in digests.items()})
        given_to = [torch.from_numpy(b) for b in (arena, *buffers)] if device is not HOST else [arena, *buffers]
        verifier.begin(given_to[0], given_to[1:], None)
        run_fills(made, buffers)
        for wave in range(made.n_waves):
            for number, (holder, region, source, buffer, target) in enumerate(rows_of(made, wave)):
                place = arena if buffer < 0 else buffers[buffer]
                place[target] = memory[made.holders[holder].name][region][source]
                if lands_wrong is not None and lands_wrong[:2] == (wave, number):
                    place[target[lands_wrong[2]]] ^= 1
            if flip is not None and flip[0].wave == wave:
                arena[landing_of(*flip)[1]] ^= 1
            verifier.check_staged(wave)
            verifier.settle()
            run_copies(made, wave, arena, buffers)
        if flip is not None and flip[0].wave < 0:
            buffer, at = landing_of(*flip)
            buffers[buffer][at] ^= 1
        verifier.finish()
    return verifier


@pytest.mark.parametrize("device", [HOST, TorchDevice("cpu")], ids=["host", "torch"])
@settings(max_examples=30, deadline=None)
@given(scenarios(), OPTIONS, st.data())
def test_what_is_verified_is_what_was_read(
    device: Device, scenario: Scenario, options: PlanOptions, data: st.DataObject
) -> None:
    try:
        made = plan_of(scenario, options)
    except PlanError:
        assume(False)
    checks = build_checks(made)
    verifier = carried_out(scenario, made, checks, None, device)
    assert verifier.n_cells == len(checks.checks), "no false alarm, and none left out"
    received = sum(target.size for wave in range(made.n_waves) for *_, target in rows_of(made, wave))
    assert verifier.verified_bytes <= received, "no byte counts twice"
    if checks.checks:
        check = data.draw(st.sampled_from(checks.checks))
        byte = data.draw(st.integers(0, check.nbytes - 1))
        with pytest.raises(VerificationError, match="cells do not have"):
            carried_out(scenario, made, checks, (check, byte), device)


@settings(max_examples=60, deadline=None)
@given(scenarios(), OPTIONS)
def test_a_cell_read_whole_into_place_is_checked_and_one_read_in_part_is_counted(
    scenario: Scenario, options: PlanOptions
) -> None:
    try:
        made = plan_of(scenario, options)
    except PlanError:
        assume(False)
    checks = build_checks(made)
    read = [[np.zeros(n, np.int64) for n in sizes.tolist()] for sizes in made.region_bytes]
    direct = [[np.zeros(n, np.int64) for n in sizes.tolist()] for sizes in made.region_bytes]
    for wave in range(made.n_waves):
        for holder, region, source, buffer, _ in rows_of(made, wave):
            np.add.at(read[holder][region], source, 1)
            if buffer >= 0:
                np.add.at(direct[holder][region], source, 1)
    checked = {(c.holder, c.cell) for c in checks.checks}
    for h, grid in enumerate(checks.grids):
        for cell in range(len(grid)):
            at, n = int(grid.offset_bytes[cell]), int(grid.nbytes[cell])
            mine = slice(at, at + n)
            seen, placed = read[h][int(grid.region[cell])][mine], direct[h][int(grid.region[cell])][mine]
            if (h, cell) in checked:
                assert seen.all(), "only what was read whole can be checked"
            elif (placed == 1).all() and (seen == 1).all():
                pytest.fail(f"{checks.describe(h, cell)} was read whole, once, into place, and is not checked")
            if placed.any() and (h, cell) not in checked:
                assert (h, cell) in checks.partial
            if not seen.any():
                assert (h, cell) not in checks.partial


@settings(max_examples=80, deadline=None)
@given(scenarios(), OPTIONS, st.data())
def test_no_wrong_byte_gets_into_a_buffer_unless_its_cell_is_said_to_be_unverified(
    scenario: Scenario, options: PlanOptions, data: st.DataObject
) -> None:
    try:
        made = plan_of(scenario, options)
    except PlanError:
        assume(False)
    checks = build_checks(made)
    rows = [(w, i, row) for w in range(made.n_waves) for i, row in enumerate(rows_of(made, w)) if row[2].size]
    assume(rows)
    wave, number, (holder, region, source, _, _) = data.draw(st.sampled_from(rows))
    byte = data.draw(st.integers(0, source.size - 1))
    right: list[Bytes] = []
    wrong: list[Bytes] = []
    carried_out(scenario, made, checks, None, HOST, into=right)
    try:
        carried_out(scenario, made, checks, None, HOST, lands_wrong=(wave, number, byte), into=wrong)
    except VerificationError:
        return
    if any(bool((a != b).any()) for a, b in zip(right, wrong, strict=True)):
        grid, at = checks.grids[holder], int(source[byte])
        hit = (grid.region == region) & (grid.offset_bytes <= at) & (at < grid.offset_bytes + grid.nbytes)
        (cell,) = np.flatnonzero(hit).tolist()
        assert (holder, cell) in checks.partial, checks.describe(holder, cell)


@settings(max_examples=25, deadline=None)
@given(scenarios(), OPTIONS)
def test_the_bytes_said_to_be_verified_are_those_whose_change_is_seen(scenario: Scenario, options: PlanOptions) -> None:
    try:
        made = plan_of(scenario, options)
    except PlanError:
        assume(False)
    checks = build_checks(made)
    landed = [
        (wave, number, byte)
        for wave in range(made.n_waves)
        for number, row in enumerate(rows_of(made, wave))
        for byte in range(row[2].size)
    ]
    assume(0 < len(landed) <= 96)
    n_seen = 0
    for one in landed:
        try:
            carried_out(scenario, made, checks, None, HOST, lands_wrong=one)
        except VerificationError:
            n_seen += 1
    assert n_seen == checks.proves_bytes


def published(shape: tuple[int, ...], dtype: str = "uint8") -> tuple[ShardTable, Bytes]:
    """One shard that is a whole tensor, and its bytes."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    shard = Shard("w", dtype, shape, (0,) * len(shape), shape)
    return ShardTable([ShardPart.from_shards(Holder("t0"), [shard], [nbytes])]), np.arange(nbytes, dtype=np.uint8)


def takes(
    sources: ShardTable, requests: Sequence[tuple[tuple[int, ...], ...]], options: PlanOptions, dtype: str = "uint8"
) -> Plan:
    """A plan of requests (start, step, count), each into a buffer of its own, as they come."""
    shape = sources.tensors.shape_of(0)
    buffers, reads = [], []
    for i, (start, step, count) in enumerate(requests):
        strides = tuple(math.prod(count[d + 1 :]) for d in range(len(count)))
        buffers.append(Buffer(f"p{i}", count, dtype))
        reads.append(ReadRequest("w", shape, dtype, start, step, count, i, 0, strides))
    return plan(sources, ReadTable.build(buffers, reads), options)


EXACT = PlanOptions(cost=CostModel(descriptor_s=0.0))
STAGED = PlanOptions(max_runs_per_block=1)
WIDER = replace(STAGED, round_spans=True)
"""One descriptor for more than one run; wider spans."""


@pytest.mark.parametrize(
    ("requests", "options", "n_checks", "waves"),
    [
        pytest.param([((0, 0), (2, 1), (16, 4)), ((1, 0), (2, 1), (16, 4))], STAGED, 1, {0}, id="interleaved rows"),
        pytest.param([((0, 0), (2, 1), (16, 4))], WIDER, 1, {0}, id="one half of the interleaved rows"),
        pytest.param([((0, 1), (1, 1), (32, 2))], WIDER, 1, {0}, id="a column slice"),
        pytest.param([((0, 0), (1, 1), (32, 2)), ((0, 2), (1, 1), (32, 2))], STAGED, 1, {0}, id="two column slices"),
        pytest.param([((0, 0), (1, 1), (32, 4)), ((3, 0), (1, 1), (9, 4))], EXACT, 2, {-1}, id="twice, once in part"),
        pytest.param(
            [((0, 0), (1, 1), (5, 4)), ((5, 0), (1, 1), (27, 4)), ((0, 0), (1, 1), (9, 4)), ((9, 0), (1, 1), (23, 4))],
            EXACT,
            2,
            {-1},
            id="twice, cut at other rows",
        ),
    ],
)
@pytest.mark.parametrize("device", [HOST, TorchDevice("cpu")], ids=["host", "torch"])
def test_what_is_whole_only_together_is_verified(
    device: Device,
    requests: Sequence[tuple[tuple[int, ...], ...]],
    options: PlanOptions,
    n_checks: int,
    waves: set[int],
) -> None:
    sources, data = published((32, 4))
    made = takes(sources, requests, options)
    checks = build_checks(made)
    assert (checks.partial, len(checks.checks), {c.wave for c in checks.checks}) == ((), n_checks, waves)
    every_byte_counts(made, checks, data, device)


def test_interleaved_rows_of_a_tensor_that_fills_several_waves_are_verified_where_they_end_up() -> None:
    """Spans of half the budget each: no wave has the cell whole, so it is put together from the buffers."""
    sources, data = published((4096, 4))
    requests = [((i, 0), (2, 1), (2048, 4)) for i in range(2)]
    made = takes(sources, requests, replace(STAGED, staging_bytes=8192))
    assert made.n_waves > 1
    checks = build_checks(made)
    assert checks.partial == ()
    (check,) = checks.checks
    assert check.wave == -1
    assert check.after_wave == made.n_waves - 1, "it is there once the last copies are done"
    every_byte_counts(made, checks, data, HOST, tried_of_each=4, unused=True)


def every_byte_counts(
    made: Plan, checks: Checks, data: Bytes, device: Device, *, tried_of_each: int = 0, unused: bool = False
) -> None:
    """Whatever wrong byte gets into a buffer is seen (all are tried, or some of each row).

    With ``unused`` some are read only since others around them are, and are not copied: they prove nothing.
    """
    digests = HOST.digest_cells([CellRows(data, g.offset_bytes, g.nbytes, g.tags) for g in checks.grids])

    def receive(wrong: tuple[int, int, int] | None) -> tuple[int, bytes]:
        buffers = [np.zeros(n, np.uint8) for n in made.buffer_bytes.tolist()]
        arena = np.zeros(made.staging_bytes, np.uint8)
        given_to = [torch.from_numpy(b) for b in (arena, *buffers)] if device is not HOST else [arena, *buffers]
        with Verifier(checks, "full", (0, 0), Deadline(30.0, "a test"), device) as verifier:
            verifier.trust({"t0": digests}, {"t0": root_of(digests)})
            verifier.begin(given_to[0], given_to[1:], None)
            for wave in range(made.n_waves):
                for number, (_, _, source, buffer, target) in enumerate(rows_of(made, wave)):
                    place = arena if buffer < 0 else buffers[buffer]
                    place[target] = data[source]
                    if wrong is not None and wrong[:2] == (wave, number):
                        place[target[wrong[2]]] ^= 1
                verifier.check_staged(wave)
                verifier.settle()
                run_copies(made, wave, arena, buffers)
            verifier.finish()
        return verifier.verified_bytes, b"".join(b.tobytes() for b in buffers)

    received = [(w, i, row[2].size) for w in range(made.n_waves) for i, row in enumerate(rows_of(made, w))]
    verified_bytes, right = receive(None)
    assert verified_bytes == (data.size if unused else sum(n for *_, n in received))
    unseen = 0
    for wave, number, n in received:
        for byte in range(n) if not tried_of_each else range(0, n, -(-n // tried_of_each)):
            try:
                _, wrong = receive((wave, number, byte))
            except VerificationError:
                continue
            assert wrong == right, (wave, number, byte)
            unseen += 1
    assert bool(unseen) == unused


def test_a_cast_of_what_is_staged_in_part_is_said_to_be_unverified() -> None:
    """The one copy that stays is in another dtype; the other request's whole cell proves nothing of it."""
    sources, _ = published((32, 4), "float32")
    buffers = [Buffer("a", (32, 4), "float32"), Buffer("b", (3, 4), "bfloat16")]
    requests = [
        ReadRequest("w", (32, 4), "float32", (0, 0), (1, 1), (32, 4), 0, 0, (4, 1)),
        ReadRequest("w", (32, 4), "float32", (2, 0), (1, 1), (3, 4), 1, 0, (4, 1)),
    ]
    checks = build_checks(plan(sources, ReadTable.build(buffers, requests)))
    assert (len(checks.checks), checks.partial) == (1, ((0, 0),))


def interleaved(steps: Sequence[int]) -> tuple[Plan, np.ndarray]:
    """Gate and up rows that are published interleaved (G13), or every third row, taken apart by the engine."""
    rows = np.arange(12 * 4, dtype=np.uint8).reshape(12, 4)
    part = ShardPart.from_shards(Holder("t0"), [Shard("gate_up", "uint8", (12, 4), (0, 0), (12, 4))], [48])
    n = len(steps)
    buffers = [Buffer(f"p{i}", (12 // n, 4), "uint8") for i in range(n)]
    requests = [
        ReadRequest("gate_up", (12, 4), "uint8", (first, 0), (n, 1), (12 // n, 4), i, 0, (4, 1))
        for i, first in enumerate(steps)
    ]
    options = PlanOptions(cost=CostModel(descriptor_s=0.0))  # rows are read one by one
    return plan(ShardTable([part]), ReadTable.build(buffers, requests), options), rows


@pytest.mark.parametrize("n", [2, 3, 4])
def test_interleaved_rows_that_make_a_cell_are_one_check(n: int) -> None:
    made, rows = interleaved(range(n))
    checks = build_checks(made)
    assert checks.partial == ()
    (check,) = checks.checks
    assert len(check.pieces) == n
    buffers = [np.ascontiguousarray(rows[i::n]).reshape(-1) for i in range(n)]
    digests = HOST.digest_cells([CellRows(rows.reshape(-1), g.offset_bytes, g.nbytes, g.tags) for g in checks.grids])
    for device in (HOST, TorchDevice("cpu")):
        for wrong in (False, True):
            verifier = Verifier(checks, "full", (0, 0), Deadline(30.0, "a test"), device)
            given_to = [torch.from_numpy(b.copy()) if device is not HOST else b.copy() for b in buffers]
            if wrong:
                given_to[-1][5] ^= 1
            with verifier:
                verifier.trust({"t0": digests}, {"t0": root_of(digests)})
                verifier.begin(np.zeros(0, np.uint8), given_to, None)
                if wrong:
                    with pytest.raises(VerificationError):
                        verifier.finish()
                else:
                    verifier.finish()
                    assert verifier.verified_bytes == rows.nbytes


def test_rows_that_leave_some_out_are_no_check() -> None:
    part = ShardPart.from_shards(Holder("t0"), [Shard("w", "uint8", (12, 4), (0, 0), (12, 4))], [48])
    reads = ReadTable.build(
        [Buffer("p", (4, 4), "uint8")], [ReadRequest("w", (12, 4), "uint8", (1, 0), (3, 1), (4, 4), 0, 0, (4, 1))]
    )
    checks = build_checks(plan(ShardTable([part]), reads, PlanOptions(cost=CostModel(descriptor_s=0.0))))
    assert (checks.checks, checks.partial) == ((), ((0, 0),))


def test_a_cell_that_is_staged_once_for_two_parameters_counts_once() -> None:
    """Tied weights in another dtype: one span, cast into two buffers."""
    part = ShardPart.from_shards(Holder("t0"), [Shard("w", "bfloat16", (8, 4), (0, 0), (8, 4))], [64])
    requests = [ReadRequest("w", (8, 4), "float32", (0, 0), (1, 1), (8, 4), i, 0, (4, 1)) for i in range(2)]
    reads = ReadTable.build([Buffer(f"p{i}", (8, 4), "float32") for i in range(2)], requests)
    made = plan(ShardTable([part]), reads)
    received = sum(target.size for wave in range(made.n_waves) for *_, target in rows_of(made, wave))
    assert received == 64
    (check,) = build_checks(made).checks
    assert check.nbytes == received
