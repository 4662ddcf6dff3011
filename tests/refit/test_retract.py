"""`InPlacePublisher.retract`: no new readers, and nothing else changes for those that read."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster, holds, tp_engine, weights
from tests.refit.test_publishing_modes import in_place

from reshard.refit.errors import FenceTimeoutError, PublishError, RefitError
from reshard.refit.inplace import InPlacePublisher
from reshard.refit.receiver import Receiver
from reshard.rendezvous.errors import RendezvousError
from reshard.rendezvous.types import Manifest
from reshard.transports import open_transport, registry


@pytest.fixture(params=["memory", "nixl"])
def cluster(request: pytest.FixtureRequest):
    """Two trainers, one rank that takes half of what they have."""
    if reason := registry.probe(request.param):
        pytest.skip(reason)
    settings = {"allow_unconsumed": ["*"]}
    with Cluster(engines=[tp_engine(0)], transport=request.param, receiver_settings=settings) as made:
        yield made


def offered(cluster: Cluster, model: dict[str, np.ndarray]) -> list[InPlacePublisher]:
    publishers = in_place(cluster, model)
    for p in publishers:
        p.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
    return publishers


def lease(cluster: Cluster, group: str = "other", *, timeout_s: float = TIMEOUT_S) -> Manifest:
    """Somebody else's lease on step 0."""
    worker = cluster.receivers[0].worker()
    return cluster.rendezvous.await_version(
        "m", group=group, members=["x"], member="x", worker=worker, want=0, timeout_s=timeout_s
    )


def newcomer(cluster: Cluster, *, timeout_s: float = 0.7) -> BaseException | None:
    """What a group that comes now is told; None if it got the version."""
    engine = tp_engine(0)
    wire = open_transport(cluster.transport)
    late = Receiver(
        wire,
        cluster.rendezvous,
        engine,
        model="m",
        group="late",
        members=["late"],
        member="late",
        allow_unconsumed=["*"],
    )
    try:
        late.refit(0, timeout_s=timeout_s)
    except (RefitError, RendezvousError) as error:
        assert not engine["qk"].any()
        return error
    finally:
        late.close()
        wire.close()
    return None


def test_a_reader_that_is_reading_ends_well_and_nobody_else_begins(cluster: Cluster) -> None:
    model = weights(0)
    publishers = offered(cluster, model)
    told: list[BaseException | None] = []

    def on_stage(stage: str) -> None:
        if stage == "read" and not told:
            for p in publishers:
                p.retract(timeout_s=TIMEOUT_S)
            told.append(newcomer(cluster))

    cluster.receivers[0]._on_stage = on_stage
    (report,) = cluster.refit_ok(0)
    assert report.verified_bytes > 0
    assert holds(cluster.engines[0], model, 0)  # type: ignore[arg-type]
    assert isinstance(told[0], RefitError | RendezvousError)
    for p in publishers:
        p.fence(timeout_s=TIMEOUT_S)  # its lease is gone
        p.close()


def test_a_live_lease_is_not_waited_for_and_stays_the_readers(cluster: Cluster) -> None:
    publishers = offered(cluster, weights(0))
    held = lease(cluster)
    since = time.monotonic()
    for p in publishers:
        p.retract(timeout_s=TIMEOUT_S)
    assert time.monotonic() - since < TIMEOUT_S / 2, "it does not wait for the lease"
    cluster.rendezvous.renew_lease(held.lease)
    with pytest.raises(FenceTimeoutError, match="still being read"):
        publishers[0].fence(timeout_s=1.0)
    waited: list[str] = []
    thread = threading.Thread(target=lambda: (publishers[0].fence(timeout_s=TIMEOUT_S), waited.append("fenced")))
    thread.start()
    assert waited == []
    cluster.rendezvous.release_lease(held.lease)
    thread.join(TIMEOUT_S)
    assert waited == ["fenced"]
    publishers[1].fence(timeout_s=TIMEOUT_S)


def test_twice_is_as_once(cluster: Cluster) -> None:
    publishers = offered(cluster, weights(0))
    for _ in range(2):
        for p in publishers:
            p.retract(timeout_s=TIMEOUT_S)
    assert newcomer(cluster) is not None
    for p in publishers:
        p.fence(timeout_s=TIMEOUT_S)


def test_one_trainers_word_is_enough(cluster: Cluster) -> None:
    """A version is all its slots: it is admitted to no more as soon as one of them is withdrawn."""
    publishers = offered(cluster, weights(0))
    publishers[1].retract(timeout_s=TIMEOUT_S)
    assert newcomer(cluster) is not None
    for p in publishers:
        p.fence(timeout_s=TIMEOUT_S)


def test_with_nothing_published_it_does_nothing(cluster: Cluster) -> None:
    model = weights(0)
    publishers = in_place(cluster, model)
    for p in publishers:
        p.retract(timeout_s=TIMEOUT_S)
        p.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
    cluster.refit_ok(0)
    assert holds(cluster.engines[0], model, 0)  # type: ignore[arg-type]
    for p in publishers:
        p.fence(timeout_s=TIMEOUT_S)
        p.retract(timeout_s=TIMEOUT_S)  # fenced: nothing is offered


def test_a_retracted_version_keeps_the_weights_until_the_fence_and_the_next_is_admitted(cluster: Cluster) -> None:
    model = weights(0)
    publishers = offered(cluster, model)
    for p in publishers:
        p.retract(timeout_s=TIMEOUT_S)
        with pytest.raises(PublishError, match="fence it before the next one"):
            p.publish(epoch=0, step=1, timeout_s=TIMEOUT_S)
        assert p._seqlock.sequence % 2 == 0, "nobody may write yet"
    for p in publishers:
        p.fence(timeout_s=TIMEOUT_S)
        assert p._seqlock.sequence % 2 == 1
    for w in model.values():
        w += 1
    for p in publishers:
        p.publish(epoch=0, step=1, timeout_s=TIMEOUT_S)
    cluster.refit_ok(1)
    assert holds(cluster.engines[0], model, 0)  # type: ignore[arg-type]
    for p in publishers:
        p.close()


def test_a_bad_timeout_or_a_closed_publisher_is_refused(cluster: Cluster) -> None:
    publishers = offered(cluster, weights(0))
    with pytest.raises(ValueError, match="timeout_s"):
        publishers[0].retract(timeout_s=0)
    assert newcomer(cluster, timeout_s=TIMEOUT_S) is None, "still offered"
    for p in publishers:
        p.close()
        with pytest.raises(PublishError, match="closed"):
            p.retract(timeout_s=TIMEOUT_S)
