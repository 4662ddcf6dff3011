"""A lease that ends in the middle of a read does not stop it: header and digests say whether the bytes are good."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.refit.clocks import StoppedClock
from tests.refit.cluster import TIMEOUT_S, Cluster
from tests.refit.held_transport import HeldTransport
from tests.refit.test_in_doubt import Flaky

from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.deadline import Deadline
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import FenceTimeoutError, RefitError, TornReadError, VerificationError
from reshard.refit.lease import LeaseKeeper
from reshard.refit.publisher import Publisher
from reshard.rendezvous.errors import RendezvousError, RendezvousUnavailableError
from reshard.rendezvous.types import Lease, Manifest

SHAPE = (64, 64)
TTL_S = 0.4


def tensors(step: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(step).standard_normal(SHAPE).astype(np.float32)}


def held_reader(*, ttl_s: float = TTL_S, **settings: object) -> tuple[Cluster, HeldTransport, ArrayEngine, Flaky]:
    """A trainer with one buffer, a reader whose renewals are lost, and whose reads stay in flight until let go."""
    engine = ArrayEngine({"w": np.zeros(SHAPE, np.float32)})
    cluster = Cluster(1, engines=[engine])
    for t in (*cluster.trainer_transports, *cluster.receiver_transports):
        t.close()
    cluster.trainer_transports, wire = [HeldTransport()], HeldTransport()
    cluster.publishers = [
        Publisher(
            cluster.trainer_transports[0],
            cluster.rendezvous,
            model="m",
            slot="trainer-0",
            slots=cluster.slots,
            buffers=1,
            **settings,  # type: ignore[arg-type]
        )
    ]
    cluster.receiver_transports = [wire]
    flaky = Flaky(cluster.rendezvous)
    receiver = cluster.receiver(0, lease_ttl_s=ttl_s)
    receiver.rendezvous = receiver.bench.rendezvous = flaky  # type: ignore[assignment]
    cluster.receivers = [receiver]
    flaky.before["renew_lease"] = 10**6
    return cluster, wire, engine, flaky


def until(true: Callable[[], object], what: str) -> None:
    """Wait for something that other threads do."""
    end_s = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


def publish(cluster: Cluster, step: int) -> None:
    cluster.publishers[0].publish(epoch=0, step=step, tensors=local_tensors(tensors(step)), timeout_s=TIMEOUT_S)


def during_the_read(cluster: Cluster, wire: HeldTransport, act: Callable[[], None]) -> object:
    """Refit to version 0; once its data is in flight and the lease has ended, ``act``, and let the data land."""
    gate = wire.hold("trainer-0")
    done: list[BaseException] = []

    def later() -> None:
        try:
            until(lambda: wire.n_held, "the read is in flight")
            until(lambda: not cluster.leftovers(), "its lease has ended")
            act()
        except BaseException as error:
            done.append(error)
        finally:
            gate.set()

    thread = threading.Thread(target=later)
    thread.start()
    (result,) = cluster.refit(0, timeout_s=2 * TIMEOUT_S)
    thread.join(TIMEOUT_S)
    assert not done, done
    return result


def test_what_nobody_overwrote_is_good(caplog: pytest.LogCaptureFixture) -> None:
    cluster, wire, engine, _ = held_reader()
    with cluster:
        publish(cluster, 0)
        with caplog.at_level(logging.WARNING, "reshard.refit"):
            result = during_the_read(cluster, wire, lambda: None)
        assert not isinstance(result, BaseException)
        assert np.array_equal(engine["w"], tensors(0)["w"])
        assert "ended" in caplog.text
        assert "no holder has written" in caplog.text


@pytest.mark.parametrize("digests", [True, False])
def test_what_the_publisher_overwrote_is_refused(digests: bool) -> None:
    """Its fence passes, since the lease has ended; the seqlock alone is enough, the digests see it too."""
    cluster, wire, engine, _ = held_reader(digests=digests)
    with cluster:
        publish(cluster, 0)
        result = during_the_read(cluster, wire, lambda: publish(cluster, 1))
        assert isinstance(result, TornReadError | VerificationError)
        assert not engine["w"].any(), "nothing was installed"
        assert cluster.receivers[0].state == "empty"
        assert not cluster.leftovers()


def test_a_publisher_in_the_middle_of_writing_is_seen() -> None:
    cluster, wire, engine, _ = held_reader(digests=False)
    with cluster:
        publish(cluster, 0)

        def half() -> None:
            buffer = cluster.publishers[0]._newest
            assert buffer is not None
            buffer.seqlock.begin()
            buffer.data[:100] = 0  # type: ignore[index]

        result = during_the_read(cluster, wire, half)
        assert isinstance(result, TornReadError)
        assert not engine["w"].any()


def test_without_a_header_the_end_of_a_lease_is_the_end_of_the_read() -> None:
    cluster, wire, engine, flaky = held_reader()
    with cluster:
        publish(cluster, 0)

        def await_version(*args: object, **kwargs: object) -> Manifest:
            found = cluster.rendezvous.await_version(*args, **kwargs)  # type: ignore[arg-type]
            bare = tuple(dataclasses.replace(s, header_region=-1) for s in found.slots)
            return dataclasses.replace(found, slots=bare)

        flaky.await_version = await_version  # type: ignore[attr-defined]
        result = during_the_read(cluster, wire, lambda: None)
        assert isinstance(result, TornReadError)
        assert "holder 'trainer-0' has no header" in str(result)
        assert not engine["w"].any()


class Silent:
    """A client whose every call takes all the time that it is given, and then fails."""

    def __init__(self, clock: StoppedClock) -> None:
        self.clock = clock
        self.given: list[float] = []

    def __getattr__(self, name: str) -> object:
        def call(*args: object, timeout_s: float, **kwargs: object) -> object:
            self.given.append(timeout_s)
            self.clock.sleep(timeout_s)
            raise RendezvousUnavailableError(f"{name}: silence")

        return call


def test_a_silent_service_takes_no_more_time_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Silent(StoppedClock(monkeypatch, "reshard.refit.deadline"))
    keeper = LeaseKeeper(service, Lease("a" * 32, "b" * 32, 30.0, since_s=1e12))  # type: ignore[arg-type]
    deadline = Deadline(0.3, "a refit")
    with pytest.raises(RendezvousError):
        keeper.held(deadline)
    with pytest.raises(RefitError):
        keeper.held(deadline)
    keeper.release(deadline.left_s)
    keeper.release(deadline.left_s)
    assert service.given == pytest.approx([0.3, 0.5]), "what there was, and half a second for the goodbye"


def test_a_lease_is_renewed_while_a_long_read_goes_on() -> None:
    """It outlives its TTL, so that the publisher's fence still waits for it."""
    ttl_s = 3.0  # a third of it may pass before a renewal, two more while this machine does something else
    cluster, wire, engine, flaky = held_reader(ttl_s=ttl_s)
    with cluster:
        flaky.before.clear()
        renew, renewed = cluster.rendezvous.renew_lease, []
        cluster.rendezvous.renew_lease = lambda *a, **k: (renewed.append(1), renew(*a, **k))[1]  # type: ignore[method-assign]
        publish(cluster, 0)
        gate = wire.hold("trainer-0")
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.extend(cluster.refit(0, timeout_s=2 * TIMEOUT_S)))
        thread.start()
        until(lambda: wire.n_held, "the read is in flight")
        end_s = time.monotonic() + 1.1 * ttl_s
        until(lambda: time.monotonic() > end_s and len(renewed) >= 3, "it is renewed at each third of its TTL")
        assert cluster.leftovers(), "the lease must outlive its first TTL"
        with pytest.raises(FenceTimeoutError):
            cluster.publishers[0].publish(epoch=0, step=1, tensors=local_tensors(tensors(1)), timeout_s=0.5)
        gate.set()
        thread.join(TIMEOUT_S)
        assert not isinstance(results[0], BaseException)
        assert np.array_equal(engine["w"], tensors(0)["w"])
