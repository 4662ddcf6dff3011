"""Shares of a wave, and the batch with which a cell is there, against brute force; the threads that work on cells."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.planner import Holder
from reshard.planner.bind import PeerRows
from reshard.refit.batches import complete_with, n_batches, split_wave
from reshard.refit.crew import Crew
from reshard.refit.deadline import Deadline
from reshard.refit.errors import RefitTimeoutError

Rows = list[tuple[int, int, int]]


@st.composite
def remote_rows(draw: st.DrawFn, *, overlapping: bool = False) -> Rows:
    """(local, remote, bytes), remote ranges in any order."""
    sizes = draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=12))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    rows, local, remote = [], 1 << 20, 1 << 30
    for size, gap in zip(sizes, gaps, strict=True):
        rows.append((local, remote, size))
        local += size + gap
        remote += size + gap if not overlapping else draw(st.integers(1, size))
    return draw(st.permutations(rows))


def peer_rows(rows: Rows, name: str = "a") -> PeerRows:
    local = np.array([[a, n, 0] for a, _, n in rows], np.uint64).reshape(-1, 3)
    remote = np.array([[b, n, 0] for _, b, n in rows], np.uint64).reshape(-1, 3)
    return PeerRows(Holder(name), "dram", local, remote)


def joined(rows: Rows) -> Rows:
    """Neighbours in the list that are adjacent on both sides, as one."""
    out: Rows = []
    for a, b, n in rows:
        if out and out[-1][0] + out[-1][2] == a and out[-1][1] + out[-1][2] == b:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + n)
        else:
            out.append((a, b, n))
    return out


@given(remote_rows(), remote_rows(), st.integers(1, 8))
def test_batches_hold_all_rows_in_order_in_equal_shares(first: Rows, second: Rows, n: int) -> None:
    batches = split_wave([peer_rows(first, "a"), peer_rows(second, "b")], n)
    assert len(batches) == n
    for name, rows in (("a", first), ("b", second)):
        mine = [[p for p in batch if p.holder == name] for batch in batches]
        assert all(len(portions) <= 1 for portions in mine)
        back = [
            (int(a), int(b), int(size))
            for portions in mine
            for p in portions
            for (a, size, _), (b, _, _) in zip(p.local.tolist(), p.remote.tolist(), strict=True)
        ]
        assert joined(back) == joined(rows)
        total = sum(size for _, _, size in rows)
        for portions in mine[:-1]:
            taken = sum(int(p.local[:, 1].sum()) for p in portions)
            assert taken <= -(-total // n) + 2 * 4096 + -(-total // n) // 4, "a share and one piece at most"


@given(st.booleans(), st.data(), st.integers(1, 8))
def test_a_cell_is_complete_with_the_last_row_that_touches_it(overlapping: bool, data: st.DataObject, n: int) -> None:
    rows = data.draw(remote_rows(overlapping=overlapping))
    batches = split_wave([peer_rows(rows)], n)
    numbered = [(i, p.remote) for i, batch in enumerate(batches) for p in batch]
    low, high = min(b for _, b, _ in rows), max(b + size for _, b, size in rows)
    cells = data.draw(st.lists(st.tuples(st.integers(low - 9, high), st.integers(1, 9_000)), min_size=1, max_size=9))
    start, nbytes = np.array([a for a, _ in cells], np.uint64), np.array([size for _, size in cells], np.int64)
    got = complete_with(numbered, start, nbytes, 99)
    for (a, size), batch in zip(cells, got.tolist(), strict=True):
        touching = [
            i for i, remote in numbered for b, m, _ in remote.tolist() if int(b) < a + size and a < int(b) + int(m)
        ]
        if overlapping:
            assert batch >= max(touching, default=0)
        else:
            assert batch == max(touching, default=99)


def test_no_cells_and_no_rows() -> None:
    none = np.zeros(0, np.uint64)
    assert complete_with([(0, peer_rows([(0, 0, 8)]).remote)], none, none.astype(np.int64), 3).shape == (0,)
    assert complete_with([], np.array([7], np.uint64), np.array([1]), 3).tolist() == [3]


@pytest.mark.parametrize(
    ("holder_mib", "batch_mib", "expected"),
    [
        pytest.param([1024], 64, 8, id="at-most-eight"),
        pytest.param([130], 64, 2, id="of-at-least-a-batch"),
        pytest.param([63], 64, 1, id="small"),
        pytest.param([1024], 0, 1, id="off"),
        pytest.param([8] * 256, 64, 2, id="many-holders-small-shares"),
        pytest.param([], 64, 1, id="nothing"),
    ],
)
def test_how_many_batches(holder_mib: list[int], batch_mib: int, expected: int) -> None:
    wave = [peer_rows([(0, 0, mib << 20)], str(i)) for i, mib in enumerate(holder_mib)]
    assert n_batches(wave, batch_mib << 20) == expected


# -- threads


def collect(n_threads: int, seen: list[int]) -> Crew[int, int]:
    return Crew(lambda: 0, lambda item, tool: seen.append(item), n_threads)


@pytest.mark.parametrize("n_threads", [0, 1, 3])
def test_a_crew_does_everything_once(n_threads: int) -> None:
    seen: list[int] = []
    crew = collect(n_threads, seen)
    for k in range(5):
        crew.feed(range(10 * k, 10 * k + 10))
    crew.finish(Deadline(20.0, "test"))
    assert sorted(seen) == list(range(50))


def test_the_first_error_ends_the_work() -> None:
    def work(item: int, tool: int) -> None:
        if item == 3:
            raise ValueError("three")
        seen.append(item)

    seen: list[int] = []
    crew = Crew(lambda: 0, work, 1)
    crew.feed(range(4))
    for _ in range(1000):
        try:
            crew.check()
        except ValueError:
            break
        time.sleep(0.005)
    crew.feed(range(10, 20))
    with pytest.raises(ValueError, match="three"):
        crew.finish(Deadline(20.0, "test"))
    assert seen == [0, 1, 2]


def test_stopping_waits_for_the_item_at_work_and_drops_the_rest() -> None:
    started, release = threading.Event(), threading.Event()
    seen: list[int] = []

    def work(item: int, tool: int) -> None:
        started.set()
        assert release.wait(20)
        seen.append(item)

    crew = Crew(lambda: 0, work, 1)
    crew.feed([1, 2, 3])
    assert started.wait(20)
    stopper = threading.Thread(target=crew.stop, args=(Deadline(20.0, "test"),))
    stopper.start()
    stopper.join(0.2)
    assert stopper.is_alive(), "item 1 is still being worked on"
    release.set()
    stopper.join(20)
    assert not stopper.is_alive()
    assert seen == [1]
    assert crew.stop(Deadline(20.0, "test")) == ()


def test_a_crew_is_waited_for_until_the_deadline_and_what_is_left_is_said() -> None:
    started, release = threading.Event(), threading.Event()
    seen: list[int] = []

    def work(item: int, tool: int) -> None:
        if item == 1:
            started.set()
            assert release.wait(20)
        seen.append(item)

    crew = Crew(lambda: 0, work, 1, lambda item: f"item {item}")
    crew.feed([1])
    assert started.wait(20)
    try:
        with pytest.raises(
            RefitTimeoutError, match=r"a refit: the deadline of 0\.2 s passed with 1 at work \(item 1\) and 0 not begun"
        ):
            crew.finish(Deadline(0.2, "a refit"))
        assert crew.stop(Deadline(0.2, "a refit")) == ("item 1",), "a second is waited, and no more"
    finally:
        release.set()
    assert crew.stop(Deadline(20.0, "a refit")) == ()
    assert seen == [1]


def test_a_deadline_that_has_passed_leaves_work_undone_and_says_how_much() -> None:
    seen: list[int] = []
    crew = collect(0, seen)
    crew.feed(range(7))
    deadline = Deadline(1e-6, "a refit")
    while deadline.left_s > 0:
        time.sleep(0.001)
    with pytest.raises(RefitTimeoutError, match=r"with 0 at work \(none\) and 7 not begun"):
        crew.finish(deadline)
    assert seen == []
