"""What a failed refit leaves: memory that may still be written, peers that were only cancelled, a rank's standing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster, holds, tp_cluster, tp_engine, weights
from tests.refit.held_transport import HeldTransport
from tests.refit.test_in_doubt import Flaky, flaky_cluster

from reshard.refit.engines.arrays import ArrayEngine, take
from reshard.refit.errors import (
    HolderLostError,
    InDoubtError,
    QuarantinedError,
    RefitAborted,
    RefitError,
    RefitTimeoutError,
)
from reshard.refit.publisher import Publisher
from reshard.refit.retry import RetryPolicy
from reshard.refit.waves import failed_peers
from reshard.transports.base import Prepared
from reshard.transports.errors import PoisonedMemoryError, TransferError, TransferTimeoutError

# -- who is to blame


def test_peers_that_were_only_cancelled_are_not_blamed() -> None:
    states = {"a": "failed: gone", "b": "cancelled", "c": "done", "d": "abandoned"}
    assert failed_peers(TransferError("a is gone", peer="a", failures=states)) == {"a"}
    late = {"a": "cancelled", "b": "abandoned", "c": "done"}
    assert failed_peers(TransferTimeoutError("late", peer="a", failures=late)) == {"b"}, "a's read did end"
    assert failed_peers(TransferTimeoutError("late", peer="a", failures={"a": "cancelled"})) == {"a"}
    assert failed_peers(TransferError("refused", failures={"a": "refused: closed"})) == {"a"}


def test_poisoned_memory_blames_no_peer() -> None:
    assert failed_peers(PoisonedMemoryError("quarantined", peer="a", failures={"a": "active"})) == frozenset()


# -- memory that a late write may still change


def held_cluster(**settings: object) -> tuple[Cluster, HeldTransport]:
    """Two trainers over memory that can be held back, two ranks; the first rank's transport is returned."""
    cluster = tp_cluster(receiver_settings={"retry": RetryPolicy(1), **settings})
    for t in (*cluster.trainer_transports, *cluster.receiver_transports):
        t.close()
    cluster.trainer_transports = [HeldTransport() for _ in cluster.slots]
    cluster.publishers = [
        Publisher(t, cluster.rendezvous, model="m", slot=s, slots=cluster.slots)
        for t, s in zip(cluster.trainer_transports, cluster.slots, strict=True)
    ]
    first = HeldTransport()
    cluster.receiver_transports = [first, HeldTransport()]
    cluster.receivers = [cluster.receiver(i) for i in range(2)]
    return cluster, first


def held_at_two(**settings: object) -> tuple[Cluster, HeldTransport, threading.Event]:
    """Serves version 1 from the second arena; version 2 is published, and its data will be late."""
    cluster, wire = held_cluster(**settings)
    for step in range(2):
        cluster.publish(step, weights(step))
        cluster.refit_ok(step)
    cluster.publish(2, weights(2))
    return cluster, wire, wire.hold("trainer-0")


def test_memory_that_is_written_late_is_given_up() -> None:
    cluster, wire, gate = held_at_two(stall_s=0.2)
    with cluster:
        try:
            first, _ = cluster.refit(2, timeout_s=6.0)
            assert wire.n_held > 0
            assert isinstance(first, HolderLostError)
            assert first.holders == ("trainer-0",)
            assert wire.quarantined()
            assert not cluster.leftovers()
            reader = cluster.receivers[0].reader
            assert reader.arenas.served is not None, "what is served from was not read into, and others may read it"
            assert list(reader.arenas.shadows()) == [reader.arenas.served]
            wire.gate = None
            cluster.refit_ok(2)
            assert wire.quarantined(), "this refit had no need to wait for memory that it does not use"
            cluster.publish(3, weights(3))
            cluster.refit_ok(3)
        finally:
            gate.set()
        wire.wait_quarantine(timeout_s=TIMEOUT_S)  # what was late lands now
        assert all(holds(cluster.engines[r], weights(3), r) for r in range(2))  # type: ignore[arg-type]
        cluster.publish(4, weights(4))
        cluster.refit_ok(4)
        assert all(holds(cluster.engines[r], weights(4), r) for r in range(2))  # type: ignore[arg-type]
        assert not cluster.leftovers()


def test_memory_whose_late_writes_have_landed_is_used_again() -> None:
    cluster, wire, gate = held_at_two(stall_s=0.2)
    with cluster:
        arenas = cluster.receivers[0].reader.arenas.shadows()
        wait = wire.wait_quarantine

        def land_meanwhile(*, timeout_s: float) -> None:
            assert wire.quarantined()
            gate.set()
            wait(timeout_s=timeout_s)

        wire.wait_quarantine = land_meanwhile  # type: ignore[method-assign]
        first, _ = cluster.refit(2, timeout_s=30.0)
        assert gate.is_set()
        assert isinstance(first, HolderLostError)
        assert not wire.quarantined()
        wire.gate = None
        cluster.refit_ok(2)
        assert all(holds(cluster.engines[r], weights(2), r) for r in range(2))  # type: ignore[arg-type]
        assert cluster.receivers[0].reader.arenas.shadows() == arenas


def test_the_deadline_in_the_middle_of_a_read_is_no_different() -> None:
    cluster, wire, gate = held_at_two()
    with cluster:
        try:
            first, _ = cluster.refit(2, timeout_s=1.0)
            assert isinstance(first, Exception)
            wire.gate = None
            cluster.refit_ok(2)
        finally:
            gate.set()
        wire.wait_quarantine(timeout_s=TIMEOUT_S)
        assert all(holds(cluster.engines[r], weights(2), r) for r in range(2))  # type: ignore[arg-type]
        assert not cluster.leftovers()


@pytest.mark.parametrize("how", ["the deadline passes", "interrupted"])
def test_what_was_posted_before_a_post_that_fails_does_not_land_in_a_later_version(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of one batch are posted one after the other: those before the one that fails are on their way already."""
    cluster, wire, gate = held_at_two()
    with cluster:
        real = wire.post

        def post(prepared: Prepared, **more: float) -> object:
            posted = real(prepared, **more)
            if wire.n_held == 1:
                if how == "interrupted":
                    raise KeyboardInterrupt
                time.sleep(1.2)  # as a native post does that copies, over CMA
            return posted

        try:
            with monkeypatch.context() as patched:
                patched.setattr(wire, "post", post)
                first, _ = cluster.refit(2, timeout_s=1.0)
            assert isinstance(first, KeyboardInterrupt if how == "interrupted" else RefitTimeoutError)
            assert wire.n_held == 1
            assert not wire._active
            assert wire.quarantined()
            wire.gate = None
            cluster.publish(3, weights(3))
            cluster.refit_ok(3)
        finally:
            gate.set()
        wire.wait_quarantine(timeout_s=TIMEOUT_S)  # what was late lands now
        assert all(holds(cluster.engines[r], weights(3), r) for r in range(2))  # type: ignore[arg-type]
        assert not cluster.leftovers()


# -- cleaning up


@pytest.mark.parametrize("broken", ["bench.drop", "engine.resume"])
def test_a_cleanup_that_fails_too_hides_nothing_and_stops_nothing(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tp_cluster(receiver_settings={"install": "stream", "stream_bytes": 512}) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        receiver = cluster.receivers[0]

        def stage(name: str) -> None:
            if name == "vote":
                assert cluster.all_joined()
                owner, what = (receiver.bench, "drop") if broken == "bench.drop" else (cluster.engines[0], "resume")
                monkeypatch.setattr(owner, what, fails)
                raise RuntimeError("the first error")

        def fails(*args: object) -> None:
            raise OSError("and another")

        receiver._on_stage = stage
        first, second = cluster.refit(1)
        assert str(first) == "the first error"
        assert "the first error" in str(second)
        assert not cluster.leftovers()
        monkeypatch.undo()
        receiver._on_stage = None
        cluster.refit_ok(1)


def test_closing_waits_for_a_refit_in_another_thread() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        reading, closing = threading.Event(), threading.Event()

        def stage(name: str) -> None:
            if name == "read":
                reading.set()
                assert not closing.wait(0.3)

        receiver = cluster.receivers[0]
        receiver._on_stage = stage

        def close() -> None:
            assert reading.wait(TIMEOUT_S)
            receiver.close()
            closing.set()

        closer = threading.Thread(target=close)
        closer.start()
        cluster.refit_ok(0)
        closer.join()
        assert closing.is_set()
        assert not receiver.reader.links.names()


def test_a_load_beside_a_refit_is_refused_and_disturbs_nothing() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        receiver = cluster.receivers[0]
        seen: list[str] = []

        def stage(name: str) -> None:
            if name == "verify":
                with pytest.raises(RefitError, match="refitting already"):
                    receiver.load(0, timeout_s=1.0)
                seen.append(name)

        receiver._on_stage = stage
        cluster.refit_ok(0)
        assert seen == ["verify"]
        assert receiver.reader.links.names()
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]


# -- where a rank stands


def test_a_load_in_doubt_keeps_what_it_may_have_to_install() -> None:
    engine = ArrayEngine({n: np.zeros_like(w) for n, w in weights(0).items()})
    with Cluster(2, engines=[engine]) as cluster:
        cluster.publish(0, weights(0))
        flaky = Flaky(cluster.rendezvous)
        receiver = cluster.receivers[0]
        receiver.rendezvous = flaky  # type: ignore[assignment]
        flaky.after["vote"] = 1
        flaky.before["ask_decision"] = 10**6
        receiver.lease_ttl_s = receiver.transaction_timeout_s = TIMEOUT_S
        with pytest.raises(InDoubtError):
            receiver.load(0, timeout_s=3.0)
        flaky.before.clear()
        assert receiver.resolve(timeout_s=TIMEOUT_S) in ("serving", "quarantined")
        if receiver.state == "serving":
            assert all(np.array_equal(engine[n], w) for n, w in weights(0).items())
        assert not receiver.reader.links.names()
        assert not receiver.reader.arenas.all()
        assert not cluster.leftovers()


def test_closing_in_doubt_gives_the_lease_back() -> None:
    cluster, flaky = flaky_cluster(1)
    with cluster:
        cluster.receivers[1].close()
        receiver = cluster.receivers[1] = cluster.receiver(1, install="stream")
        receiver.rendezvous = flaky  # type: ignore[assignment]
        flaky.after["vote"] = 1
        flaky.before["ask_decision"] = 10**6
        _, second = cluster.refit(1, timeout_s=3.0)
        assert isinstance(second, InDoubtError)
        assert len(cluster.leftovers()) == 1, "stream mode holds its lease until it has read"
        receiver.close()
        assert not cluster.leftovers()
        assert not any(t.name == "reshard-lease" for t in threading.enumerate())


class _Breaks(ArrayEngine):
    broken = False

    def install(self, buffers: object) -> None:  # type: ignore[override]
        if self.broken:
            raise OSError("no room on the device")
        super().install(buffers)  # type: ignore[arg-type]


def test_a_doubt_that_ends_in_abort_does_not_lift_a_quarantine() -> None:
    """Else a partial refit would take the weights of the failed install for good ones."""
    engine = _Breaks(
        {"w": np.zeros((4, 2), np.float32), "v": np.zeros((4, 2), np.float32)},
        layout={"w": [take("w", np.s_[0:2], into=np.s_[0:2])]},
    )
    with Cluster(1, engines=[engine]) as cluster:
        whole = {"w": np.ones((4, 2), np.float32), "v": np.ones((4, 2), np.float32)}
        cluster.publish(0, whole)
        engine.broken = True
        assert isinstance(cluster.refit(0, only=["v"])[0], QuarantinedError)
        engine.broken = False
        receiver = cluster.receivers[0]
        receiver.standing.change("in_doubt")
        receiver.standing.restore()
        assert receiver.state == "quarantined"
        (error,) = cluster.refit(0)
        assert isinstance(error, QuarantinedError)
        assert "in part" in str(error)


def test_a_quarantined_engine_stays_paused_when_the_next_refit_fails_early() -> None:
    engines = [tp_engine(0), tp_engine(1)]
    settings = {"install": "stream", "stream_bytes": 512}
    with Cluster(engines=engines, receiver_settings=settings) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        buffer = cluster.publishers[0]._newest
        assert buffer is not None
        buffer.data[5] ^= 1
        assert all(isinstance(r, QuarantinedError) for r in cluster.refit(1))
        cluster.publish(2, weights(2))

        def stage(name: str) -> None:
            if name == "vote":
                assert cluster.all_joined()
                raise RuntimeError("no")

        cluster.receivers[1]._on_stage = stage
        assert all(isinstance(r, Exception) for r in cluster.refit(2))
        assert [r.state for r in cluster.receivers] == ["quarantined"] * 2
        assert all(e.paused for e in engines), "what it holds is part of two versions"
        cluster.receivers[1]._on_stage = None
        cluster.refit_ok(2)
        assert not any(e.paused for e in engines)


def test_members_that_take_different_selections_take_none() -> None:
    """Else both would say that they serve the version, and hold parts of two."""
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        results: list[BaseException | None] = [None, None]
        for r in cluster.receivers:
            r.transaction_timeout_s = 2.0  # for want of votes

        def refit(i: int, only: list[str]) -> None:
            try:
                cluster.receivers[i].refit(1, only=only, timeout_s=TIMEOUT_S)
            except Exception as error:
                results[i] = error

        threads = [threading.Thread(target=refit, args=a) for a in ((0, ["q", "k"]), (1, ["o"]))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert all(isinstance(r, RefitAborted) for r in results), results
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]
        assert [r.check_serving().step for r in cluster.receivers] == [0, 0]
        for r in cluster.receivers:
            r.transaction_timeout_s = TIMEOUT_S
        cluster.refit_ok(1, only=["q", "k"], before=cluster.in_turn)
        cluster.refit_ok(1)
        assert all(holds(cluster.engines[r], weights(1), r) for r in range(2))  # type: ignore[arg-type]
