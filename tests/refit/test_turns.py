"""One call at a time on a receiver, its end in good order, and the same calls for asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster, holds, tp_cluster, weights
from tests.refit.test_in_doubt import Flaky

from reshard.refit import turns
from reshard.refit.clock import STAGES
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import InDoubtError, RefitAborted, RefitError, RefitTimeoutError
from reshard.refit.receiver import Receiver
from reshard.refit.report import RefitReport


def is_released(receiver: Receiver) -> bool:
    """Whether nothing is held any more: peers, memory, plan, registration at the rendezvous."""
    here = any(not worker.lost and receiver.member == worker.name for worker in receiver.rendezvous.describe().workers)
    return not (receiver.reader.links.names() or receiver.reader.arenas.all() or receiver.bench.planned or here)


def by_refit(cluster: Cluster) -> RefitReport | BaseException:
    return cluster.refit(0)[0]


def by_load(cluster: Cluster) -> RefitReport | BaseException:
    other = threading.Thread(target=cluster.receivers[1].refit, args=(0,), kwargs={"timeout_s": TIMEOUT_S})
    other.start()
    try:
        return cluster.receivers[0].load(0, timeout_s=TIMEOUT_S)
    finally:
        other.join(TIMEOUT_S)


def by_asyncio(cluster: Cluster) -> RefitReport | BaseException:
    async def both() -> RefitReport:
        reports = await asyncio.gather(*(r.arefit(0, timeout_s=TIMEOUT_S) for r in cluster.receivers))
        return reports[0]

    return asyncio.run(both())


@pytest.mark.parametrize("refit", [by_refit, by_load, by_asyncio])
@pytest.mark.parametrize("stage", [s for s in STAGES if s != "load"])
def test_a_close_from_its_own_hook_takes_effect_when_the_refit_ends(
    stage: str, refit: Callable[[Cluster], RefitReport | BaseException]
) -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        receiver = cluster.receivers[0]
        closed: list[str] = []

        def hook(name: str) -> None:
            if name == stage:
                receiver.close()
                closed.append(name)

        receiver._on_stage = hook
        report = refit(cluster)
        assert isinstance(report, RefitReport), report
        assert closed == [stage]
        assert is_released(receiver)
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]
        assert [r.check_serving().step for r in cluster.receivers] == [0, 0]
        assert not cluster.leftovers()
        with pytest.raises(RefitError, match=r"'tp0': the receiver is closed, refit\(\) came after that"):
            receiver.refit(0, timeout_s=1.0)
        with pytest.raises(RefitError, match=r"the receiver is closed, resolve\(\) came after that"):
            receiver.resolve(timeout_s=1.0)


@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_a_close_from_the_engine_or_on_a_change_of_state(install: str) -> None:
    with tp_cluster(receiver_settings={"install": install}) as cluster:
        cluster.publish(0, weights(0))
        first, second = cluster.receivers
        first._on_state = lambda state: first.close()
        engine = cluster.engines[1]
        what = "install" if install == "shadow" else "write_live"
        real = getattr(engine, what)
        setattr(engine, what, lambda buffers: (second.close(), real(buffers)))
        cluster.refit_ok(0)
        assert all(is_released(r) for r in cluster.receivers)
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]


def test_a_close_in_a_refit_that_fails_releases_all_and_keeps_the_error() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        receiver = cluster.receivers[0]

        def hook(name: str) -> None:
            if name == "read":
                assert cluster.all_joined()
                receiver.close()
                raise MemoryError("no room")

        receiver._on_stage = hook
        first, second = cluster.refit(0)
        assert isinstance(first, MemoryError)
        assert isinstance(second, RefitAborted)
        assert is_released(receiver)
        assert not cluster.leftovers()


def test_calls_from_within_a_refit_are_refused_at_once() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        receiver = cluster.receivers[0]
        refused: list[str] = []

        def verify_off(**_: float) -> None:
            receiver.verify = "off"

        def hook(name: str) -> None:
            if name != "read":
                return
            for call in (receiver.resolve, lambda **more: receiver.refit(0, **more), verify_off):
                since = time.monotonic()
                with pytest.raises(RefitError, match="member 'tp0' is refitting already") as caught:
                    call(timeout_s=600.0)
                assert time.monotonic() - since < 60
                refused.append(str(caught.value).partition(": ")[2])

        receiver._on_stage = hook
        cluster.refit_ok(0)
        came = "came from within that refit"
        assert refused == [f"resolve() {came}", f"refit() {came}", f"verify = 'off' {came}"]
        assert receiver.verify == "full"


def test_a_refit_that_comes_while_another_threads_close_waits_hears_that_it_is_closed() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        receiver = cluster.receivers[0]
        heard: list[str] = []
        closer = threading.Thread(target=receiver.close)

        def hook(name: str) -> None:
            if name != "read":
                return
            closer.start()
            while not receiver._turns._closed:
                time.sleep(0.005)
            late = threading.Thread(target=lambda: heard.append(refused(receiver)))
            late.start()
            late.join(TIMEOUT_S)

        receiver._on_stage = hook
        cluster.refit_ok(0)
        closer.join(TIMEOUT_S)
        assert heard == ["member 'tp0': the receiver is closed, refit() came after that"]
        assert is_released(receiver)


def refused(receiver: Receiver) -> str:
    with pytest.raises(RefitError) as caught:
        receiver.refit(0, timeout_s=1.0)
    return str(caught.value)


@contextmanager
def hanging(timeout_s: float = TIMEOUT_S) -> Iterator[tuple[Receiver, threading.Event, threading.Thread]]:
    """A receiver whose hook does not return in the middle of a refit, until it is told to."""
    engine = ArrayEngine({name: np.zeros_like(w) for name, w in weights(0).items()})
    with Cluster(2, engines=[engine]) as cluster:
        cluster.publish(0, weights(0))
        receiver = cluster.receivers[0]
        hangs, go_on = threading.Event(), threading.Event()

        def hook(name: str) -> None:
            if name == "vote":
                hangs.set()
                assert go_on.wait(TIMEOUT_S)

        def refit() -> None:
            with suppress(RefitError):
                receiver.refit(0, timeout_s=timeout_s)

        receiver._on_stage = hook
        thread = threading.Thread(target=refit)
        thread.start()
        try:
            assert hangs.wait(TIMEOUT_S)
            yield receiver, go_on, thread
        finally:
            go_on.set()
            thread.join(TIMEOUT_S)
        assert not cluster.leftovers()


@pytest.mark.parametrize("how", ["close", "aclose"])
def test_a_close_gives_up_a_call_that_does_not_return_and_frees_nothing_under_it(how: str) -> None:
    with hanging() as (receiver, go_on, thread):
        held = receiver.reader.links.names(), receiver.reader.arenas.all()
        assert all(held)
        close = receiver.close if how == "close" else lambda **more: asyncio.run(receiver.aclose(**more))
        with pytest.raises(RefitTimeoutError, match=r"close\(\) waited 0.2 s for refit\(\) .* nothing was freed"):
            close(timeout_s=0.2)
        assert (receiver.reader.links.names(), receiver.reader.arenas.all()) == held
        go_on.set()
        thread.join(TIMEOUT_S)
        assert receiver.check_serving().step == 0, "the refit was not broken off"
        assert is_released(receiver)
        with pytest.raises(RefitError, match="the receiver is closed"):
            receiver.refit(0, timeout_s=1.0)
        receiver.close(timeout_s=1.0)


def test_a_close_waits_until_the_calls_own_deadline_and_a_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "GRACE_S", 0.1)
    with (
        hanging(timeout_s=1.0) as (receiver, _, _),
        pytest.raises(RefitTimeoutError, match=r"its deadline and 0.1 s more for refit\(\) in another thread"),
    ):
        receiver.close()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_close_has_a_finite_time(timeout_s: float) -> None:
    with tp_cluster() as cluster, pytest.raises(ValueError, match="timeout_s must be finite and over 0"):
        cluster.receivers[0].close(timeout_s=timeout_s)


# -- asyncio


def test_more_members_than_the_loop_has_threads() -> None:
    """Members wait for each other's votes: one that had to wait for a thread would abort the group."""
    n = 40  # the loop's own pool has at most 32
    engines = [ArrayEngine({"w": np.zeros(4, np.float32)}) for _ in range(n)]

    async def all_of(cluster: Cluster) -> list[RefitReport]:
        return await asyncio.gather(*(r.arefit(0, timeout_s=TIMEOUT_S) for r in cluster.receivers))

    with Cluster(1, engines=engines) as cluster:
        cluster.publish(0, {"w": np.arange(4, dtype=np.float32)})
        assert [r.version.step for r in asyncio.run(all_of(cluster))] == [0] * n
        assert all(e["w"].tolist() == [0, 1, 2, 3] for e in engines)


def test_the_loop_goes_on_while_a_refit_and_its_close_are_waited_for() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        receiver = cluster.receivers[0]
        reading, go_on = threading.Event(), threading.Event()

        def hook(name: str) -> None:
            if name == "read":
                reading.set()
                assert go_on.wait(TIMEOUT_S)

        receiver._on_stage = hook

        async def scenario() -> list[RefitReport]:
            refits = [asyncio.create_task(r.arefit(0, timeout_s=TIMEOUT_S)) for r in cluster.receivers]
            while not reading.is_set():
                await asyncio.sleep(0.01)
            closing = asyncio.create_task(receiver.aclose())
            await asyncio.sleep(0.1)
            assert not closing.done(), "it waits for the refit"
            assert not is_released(receiver)
            go_on.set()
            reports = await asyncio.gather(*refits)
            await closing
            return reports

        assert [r.version.step for r in asyncio.run(scenario())] == [0, 0]
        assert is_released(receiver)


def test_a_cancelled_task_leaves_the_refit_to_its_end() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        receiver = cluster.receivers[0]
        reading, go_on = threading.Event(), threading.Event()

        def hook(name: str) -> None:
            if name == "read":
                reading.set()
                assert go_on.wait(TIMEOUT_S)

        receiver._on_stage = hook

        async def scenario() -> None:
            first, second = (asyncio.create_task(r.arefit(0, timeout_s=TIMEOUT_S)) for r in cluster.receivers)
            while not reading.is_set():
                await asyncio.sleep(0.01)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            with pytest.raises(RefitError, match="refitting already"):
                await receiver.arefit(0, timeout_s=1.0)
            go_on.set()
            await second
            await receiver.aclose()

        asyncio.run(scenario())
        assert [r.check_serving().step for r in cluster.receivers] == [0, 0]
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]
        assert is_released(receiver)
        assert not cluster.leftovers()


def test_load_and_resolve_are_awaitable_too() -> None:
    engine = ArrayEngine({name: np.zeros_like(w) for name, w in weights(0).items()})
    with Cluster(2, engines=[engine]) as cluster:
        cluster.publish(0, weights(0))
        receiver = cluster.receivers[0]
        report = asyncio.run(receiver.aload(0, timeout_s=TIMEOUT_S))
        assert report.cold
        assert not receiver.reader.links.names()
        cluster.publish(1, weights(1))
        flaky = Flaky(cluster.rendezvous)
        receiver.rendezvous = flaky  # type: ignore[assignment]
        flaky.after["vote"] = 1
        flaky.before["ask_decision"] = 10**6
        receiver.transaction_timeout_s = TIMEOUT_S
        with pytest.raises(InDoubtError):
            asyncio.run(receiver.arefit(1, timeout_s=3.0))
        flaky.before.clear()
        assert asyncio.run(receiver.aresolve(timeout_s=TIMEOUT_S)) == receiver.state != "in_doubt"
