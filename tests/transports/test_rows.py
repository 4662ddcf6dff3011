"""Rows and regions: fast against slow, for shapes that Hypothesis chooses."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.transports import rows as r
from reshard.transports.copying import LONG_BYTES, CopyList
from reshard.transports.errors import RegistrationError
from reshard.transports.regions import Bounds, Region, RegionTable

BASE = 1 << 20
ONE = np.zeros(1, np.intp)
U64S = st.integers(0, 2**64 - 1)


def table(*spans: tuple[int, int]) -> RegionTable:
    return RegionTable.build(Region(BASE + start, nbytes) for start, nbytes in spans)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6),
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 12)), min_size=1, max_size=8),
)
def test_locate_finds_a_region_that_contains_the_row_or_names_the_first_that_has_none(
    spans: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> None:
    found = table(*spans)
    address = np.array([BASE + start for start, _ in wanted], np.uint64)
    nbytes = np.array([size for _, size in wanted], np.uint64)
    lost = [
        at for at, (start, size) in enumerate(wanted) if not any(a <= start and start + size <= a + n for a, n in spans)
    ]
    device = np.zeros(len(wanted), np.uint64)
    if lost:
        with pytest.raises(RegistrationError, match=rf"x: row {lost[0]} "):
            found.locate(address, nbytes, device, whose="x")
        return
    index = found.locate(address, nbytes, device, whose="x")
    assert len(index) in (1, len(wanted))
    for at, (start, size) in enumerate(wanted):
        region = index[at if len(index) > 1 else 0]
        begin = int(found.address[region]) - BASE
        assert begin <= start
        assert start + size <= begin + int(found.nbytes[region])


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 3)), min_size=1, max_size=9
    ),
    st.integers(0, 600),
)
def test_bounds_are_the_least_and_the_greatest(rows: list[tuple[int, int, int]], n_between: int) -> None:
    listed = [rows[0]] * n_between + rows
    found = Bounds.of(np.array(listed, np.uint64))
    columns = list(zip(*listed, strict=True))
    assert [found.address, found.nbytes, found.device] == [(min(column), max(column)) for column in columns]


@pytest.mark.parametrize("n", [1, 255, 256, 257, 2 * 8192 + 1])
@pytest.mark.parametrize("fault", ["none", "below", "beyond", "long", "device", "sizes"])
def test_one_bad_row_of_many_is_found_wherever_it_is(n: int, fault: str) -> None:
    """Long lists are settled by their bounds and looked at in blocks: a row must not be lost between them."""
    found = RegionTable.build([Region(BASE, 1 << 20)])
    for at in {0, n // 2, n - 1}:
        mine = np.zeros((n, 3), np.uint64)
        mine[:, r.ADDRESS], mine[:, r.NBYTES] = BASE + np.arange(n) * 16, 16
        theirs = mine.copy()
        column, value, message = {
            "none": (r.DEVICE, 0, ""),
            "below": (r.ADDRESS, BASE - 1, f"x: row {at} "),
            "beyond": (r.ADDRESS, BASE + (1 << 20) - 15, f"x: row {at} "),
            "long": (r.NBYTES, (1 << 64) - 1, f"x: row {at} "),
            "device": (r.DEVICE, 1, f"x: row {at} device: got 1, expected 0"),
            "sizes": (r.NBYTES, 15, f"row {at} nbytes: local has 15, remote 16"),
        }[fault]
        mine[at, column] = value
        for bounds in (None, r.bounds_of(mine)):
            arguments = (mine[:, r.ADDRESS], mine[:, r.NBYTES], mine[:, r.DEVICE])
            if fault in {"none", "sizes"}:
                index = found.locate(*arguments, whose="x", bounds=bounds)
                stop = BASE + 16 * n - (1 if fault == "sizes" and at == n - 1 else 0)
                assert r.envelopes(mine, mine[:, r.NBYTES], index, bounds) == [(0, BASE, stop)]
            else:
                with pytest.raises(RegistrationError, match=message):
                    found.locate(*arguments, whose="x", bounds=bounds)
        if fault in {"sizes", "long"}:
            with pytest.raises(ValueError, match=f"row {at} nbytes"):
                r.pair_rows(mine, theirs)


@pytest.mark.parametrize("at", [0, 4, 8190, 8191, 8192, 16383])
def test_two_rows_that_touch_are_joined_wherever_they_are(at: int) -> None:
    n = 2 * 8192 + 1
    mine = np.zeros((n, 3), np.uint64)
    mine[:, r.ADDRESS], mine[:, r.NBYTES] = BASE + np.arange(n) * 32, 16
    mine[at + 1 :, r.ADDRESS] -= np.uint64(16)
    merged, other, *_ = r.merge_adjacent(mine, mine.copy(), ONE, ONE)
    assert len(merged) == len(other) == n - 1
    assert merged[at].tolist() == [BASE + 32 * at, 32, 0]
    apart = mine.copy()
    apart[at + 1 :, r.ADDRESS] += np.uint64(16)
    assert len(r.merge_adjacent(mine, apart, ONE, ONE)[0]) == n


@given(st.integers(1, 2000), st.integers(1, 1 << 22), st.integers(1 << 21, 1 << 28))
def test_runs_that_are_alike_are_cut_as_others_are(n: int, size: int, budget: int) -> None:
    mine = np.zeros((n, 3), np.uint64)
    mine[:, r.NBYTES] = size
    weight = np.cumsum(np.full(n, size + r.RUN_COST_BYTES))
    n_parts = -(-int(weight[-1]) // budget)
    targets = [part * int(weight[-1]) // n_parts for part in range(1, n_parts)]
    cuts = {int(np.searchsorted(weight, target, side="right")) for target in targets}
    assert r.cut_runs(mine, budget) == [0, *sorted(cuts - {0, n}), n]


def test_locate_at_both_ends_of_the_address_space() -> None:
    top = 2**64 - 1
    found = RegionTable.build([Region(top - 15, 15), Region(4096, 16)])
    zero = np.zeros(1, np.uint64)
    for address, nbytes, good in (
        (top - 15, 15, True),
        (top - 15, 16, False),
        (top - 16, 1, False),
        (top, 1, False),
        (4096, 16, True),
        (4095, 1, False),
        (4112, 1, False),
        (4096, 2**64 - 1, False),
    ):
        arguments = np.array([address], np.uint64), np.array([nbytes], np.uint64), zero
        if good:
            found.locate(*arguments, whose="x")
        else:
            with pytest.raises(RegistrationError):
                found.locate(*arguments, whose="x")


@pytest.mark.parametrize("bad", [(0, 1), (-1, 4), (2**64 - 4, 4), (16, -1), (2**64, 0)])
def test_regions_that_cannot_be(bad: tuple[int, int]) -> None:
    with pytest.raises(RegistrationError):
        Region(*bad)


strided = st.lists(
    st.tuples(*(st.integers(0, top) for top in (500, 500, 9, 30, 30, 7))),
    max_size=8,
)


def both(cases: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    local = np.array([(BASE + to, n, 0, s, c) for to, _, n, s, _, c in cases], np.uint64).reshape(-1, 5)
    remote = np.array([(BASE + of, n, 0, s, c) for _, of, n, _, s, c in cases], np.uint64).reshape(-1, 5)
    return local, remote


def runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Every run as (address, nbytes), one at a time."""
    if rows.shape[1] == 3:
        return [(int(a), int(n)) for a, n, _ in rows]
    return [(int(a) + k * int(s), int(n)) for a, n, _, s, c in rows for k in range(int(c))]


@given(strided)
def test_expanded_rows_are_the_runs_in_order(cases: list[tuple[int, ...]]) -> None:
    local, remote, *_ = r.pair_rows(*both(cases))
    expected = [run for run in runs(both(cases)[0]) if run[1]]
    assert runs(local) == expected
    flat, (column,) = r.expand_rows(local, np.arange(len(local)))
    assert runs(flat) == expected
    assert len(column) == (len(flat) if len(local) != 1 else 1)
    assert r.count_runs(local, 10_000) == len(expected)
    assert r.total_bytes(local) == r.total_bytes(local, r.bounds_of(local)) == sum(n for _, n in expected)
    for (address, *_), extent in zip(local.tolist(), r.extents(local, "x").tolist(), strict=True):
        inside = [a + n for a, n in expected if a >= address]
        assert address + extent <= max(inside, default=address + extent)
    assert runs(r.expand_rows(remote)[0]) == [run for run in runs(both(cases)[1]) if run[1]]


@given(strided, st.integers(1, 200))
def test_cuts_lose_and_repeat_nothing(cases: list[tuple[int, ...]], budget: int) -> None:
    local, remote, *_ = r.pair_rows(*both(cases))
    for mine, theirs in ((local, remote), (r.expand_rows(local)[0], r.expand_rows(remote)[0])):
        cuts = r.cut_runs(mine, budget * 1000)
        assert cuts[0] == 0
        assert cuts == sorted(set(cuts))
        assert cuts[-1] == len(runs(mine))
        pieces = [r.between(mine, theirs, a, b) for a, b in pairwise(cuts)]
        assert [run for piece, _ in pieces for run in runs(piece)] == runs(mine)
        assert [run for _, piece in pieces for run in runs(piece)] == runs(theirs)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=12), st.booleans())
def test_merging_and_splitting_keep_every_byte(gaps: list[tuple[int, int]], one_region: bool) -> None:
    to, of, local, remote = BASE, BASE + 999, [], []
    for gap, nbytes in gaps:
        to, of = to + (gap == 1), of + (gap >= 3)
        local.append((to, nbytes, 0))
        remote.append((of, nbytes, 0))
        to, of = to + nbytes, of + nbytes
    mine, theirs = np.array(local, np.uint64), np.array(remote, np.uint64)
    region = ONE if one_region else np.arange(len(mine)) // 3

    def pairs(a: np.ndarray, b: np.ndarray) -> list[tuple[int, int]]:
        return [(int(x) + k, int(y) + k) for (x, n, _), (y, _, _) in zip(a, b, strict=True) for k in range(int(n))]

    expected = pairs(mine, theirs)
    merged = r.merge_adjacent(mine, theirs, region, ONE)
    assert pairs(merged[0], merged[1]) == expected
    if not one_region:
        where = dict(zip(mine[:, 0].tolist(), region.tolist(), strict=True))
        assert [where[int(a)] for a in merged[0][:, 0]] == merged[2].tolist()
    split = r.split_long(*merged, 2)
    assert pairs(split[0], split[1]) == expected
    assert int(split[0][:, 1].max()) <= 2


def test_merging_stops_at_regions_and_at_gaps_on_either_side() -> None:
    mine = np.array([(0, 4, 0), (4, 4, 0), (8, 4, 0), (20, 4, 0)], np.uint64)
    theirs = np.array([(100, 4, 0), (104, 4, 0), (108, 4, 0), (112, 4, 0)], np.uint64)
    merged = r.merge_adjacent(mine, theirs, np.array([0, 0, 1, 1]), ONE)
    assert merged[0][:, :2].tolist() == [[0, 8], [8, 4], [20, 4]]
    assert merged[1][:, :2].tolist() == [[100, 8], [108, 4], [112, 4]]


def test_strided_rows_that_wrap_around_are_refused() -> None:
    wide = np.array([(1, 1, 0, 2**63, 3)], np.uint64)
    with pytest.raises(ValueError, match="row 0: 3 runs"):
        r.extents(wide, "x")
    with pytest.raises(ValueError, match="at most 10"):
        r.count_runs(np.array([(1, 1, 0, 0, 2**64 - 1), (1, 1, 0, 0, 2)], np.uint64), 10)


lengths = st.sampled_from([1, 2, 3, 8, 16, 100, LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 5])


@given(st.data())
def test_copies_are_those_of_one_loop(data: st.DataObject) -> None:
    size = 1 << 18
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    target, expected = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    mine, theirs = [], []
    at = 0
    for _ in range(data.draw(st.integers(0, 10))):
        nbytes = data.draw(lengths)
        count = data.draw(st.sampled_from([1, 2, 31, 32, 40])) if nbytes <= 100 else 1
        gap, skip = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
        if at + count * (nbytes + gap) > size:
            break
        of = data.draw(st.integers(0, size - count * (nbytes + skip) - nbytes))
        mine.append((target.ctypes.data + at, nbytes, 0, nbytes + gap, count))
        theirs.append((source.ctypes.data + of, nbytes, 0, nbytes + skip, count))
        for run in range(count):
            begin, end = at + run * (nbytes + gap), of + run * (nbytes + skip)
            expected[begin : begin + nbytes] = source[end : end + nbytes]
        at += count * (nbytes + gap)
    local, remote = (np.array(side, np.uint64).reshape(-1, 5) for side in (mine, theirs))
    for form in ((local, remote), (r.expand_rows(local)[0], r.expand_rows(remote)[0])):
        target[:] = 0
        CopyList(*form).run()
        assert np.array_equal(target, expected)
