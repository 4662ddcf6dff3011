"""A publisher that does not hear whether its slot was filled takes the version for published until it knows better."""

from __future__ import annotations

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster
from tests.refit.test_in_doubt import Flaky

from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import FenceTimeoutError, PublishError
from reshard.refit.header import Header
from reshard.refit.inplace import InPlacePublisher
from reshard.refit.retry import RetryPolicy
from reshard.refit.serving import ServeOn
from reshard.rendezvous.errors import RendezvousUnavailableError, VersionError
from reshard.rendezvous.types import Manifest

SHAPE = (8, 16)


def tensors(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(SHAPE, float(step), np.float32)}


def cluster_of_one() -> Cluster:
    return Cluster(1, engines=[ArrayEngine({"w": np.zeros(SHAPE, np.float32)})])


def unheard(cluster: Cluster, *, n: int = 10**6) -> Flaky:
    """Every answer to ``publish_slot`` of the first publisher is lost from now on, ``n`` times."""
    flaky = Flaky(cluster.rendezvous)
    offering = cluster.publishers[0]._offering
    offering.rendezvous = flaky  # type: ignore[assignment]
    offering._retry = RetryPolicy(2, 0.01)
    flaky.after["publish_slot"] = n
    return flaky


def publish(cluster: Cluster, step: int, *, timeout_s: float = TIMEOUT_S) -> object:
    return cluster.publishers[0].publish(epoch=0, step=step, tensors=local_tensors(tensors(step)), timeout_s=timeout_s)


def reader(cluster: Cluster, step: int) -> Manifest:
    """Somebody with a lease on a version."""
    worker = cluster.receivers[0].worker()
    return cluster.rendezvous.await_version(
        "m", group="others", members=["x"], member="x", worker=worker, want=step, timeout_s=5.0
    )


def test_one_lost_answer_is_asked_for_again() -> None:
    with cluster_of_one() as cluster:
        unheard(cluster, n=1)
        publish(cluster, 0)
        cluster.refit_ok(0)
        assert np.array_equal(cluster.engines[0]["w"], tensors(0)["w"])  # type: ignore[index]


def test_the_next_version_waits_for_the_readers_of_one_that_may_be_out() -> None:
    with cluster_of_one() as cluster:
        publish(cluster, 0)
        flaky = unheard(cluster)
        with pytest.raises(RendezvousUnavailableError):
            publish(cluster, 1)
        flaky.after.clear()
        manifest = reader(cluster, 1)
        with pytest.raises(FenceTimeoutError):
            publish(cluster, 2, timeout_s=1.0)
        held = next(b for b in cluster.publishers[0]._buffers if b.version is not None and b.version.step == 1)
        assert np.array_equal(held.data[:512].view(np.float32), tensors(1)["w"].reshape(-1)[:128])
        cluster.rendezvous.release_lease(manifest.lease)
        publish(cluster, 2)
        cluster.refit_ok(2)


def test_publishing_the_same_version_again_learns_the_answer_and_copies_nothing() -> None:
    with cluster_of_one() as cluster:
        publish(cluster, 0)
        flaky = unheard(cluster)
        with pytest.raises(RendezvousUnavailableError):
            publish(cluster, 1)
        sequences = [b.seqlock.sequence for b in cluster.publishers[0]._buffers]
        flaky.after.clear()
        again = publish(cluster, 1)
        assert again.uid == next(v.uid for v in cluster.rendezvous.describe().versions if v.version.step == 1)  # type: ignore[attr-defined]
        assert [b.seqlock.sequence for b in cluster.publishers[0]._buffers] == sequences
        cluster.refit_ok(1)
        publish(cluster, 2)
        cluster.refit_ok(2)
        assert np.array_equal(cluster.engines[0]["w"], tensors(2)["w"])  # type: ignore[index]


def test_a_slot_that_never_reached_the_service_costs_nothing() -> None:
    with cluster_of_one() as cluster:
        publish(cluster, 0)
        flaky = unheard(cluster, n=0)
        flaky.before["publish_slot"] = 10**6
        with pytest.raises(RendezvousUnavailableError):
            publish(cluster, 1)
        flaky.before.clear()
        publish(cluster, 2)
        cluster.refit_ok(2)


def test_a_refused_version_is_not_the_publishers_to_end() -> None:
    """Two publishers of one slot: the second one's next version must not retire what the first has published."""
    with cluster_of_one() as cluster:
        publish(cluster, 0)
        second = cluster.publisher(0)
        for step in (0, 0):
            with pytest.raises(VersionError, match="publishes it too"):
                second.publish(epoch=0, step=step, tensors=local_tensors(tensors(0)), timeout_s=TIMEOUT_S)
        assert not any(b.uid for b in second._buffers)
        cluster.refit_ok(0)
        second.close()


def test_the_fence_in_place_waits_for_the_readers_of_what_may_be_out() -> None:
    with cluster_of_one() as cluster:
        flaky = Flaky(cluster.rendezvous)
        live = tensors(0)["w"]
        publisher = InPlacePublisher(
            cluster.trainer_transports[0],
            flaky,  # type: ignore[arg-type]
            model="m",
            slot="trainer-0",
            slots=["trainer-0"],
            tensors=local_tensors({"w": live}),
        )
        publisher._offering._retry = RetryPolicy(1)
        flaky.after["publish_slot"] = 1
        with pytest.raises(RendezvousUnavailableError):
            publisher.publish(epoch=0, step=0, timeout_s=5.0)
        manifest = reader(cluster, 0)
        with pytest.raises(FenceTimeoutError):
            publisher.fence(timeout_s=1.0)
        assert publisher._seqlock.sequence % 2 == 0, "nobody has written"
        cluster.rendezvous.release_lease(manifest.lease)
        publisher.fence(timeout_s=5.0)
        assert publisher._seqlock.sequence % 2 == 1
        publisher.publish(epoch=0, step=1, timeout_s=5.0)
        cluster.refit_ok(1)
        publisher.close()


def test_a_fence_of_nothing_still_marks_the_header() -> None:
    with cluster_of_one() as cluster:
        publisher = InPlacePublisher(
            cluster.trainer_transports[0],
            cluster.rendezvous,
            model="m",
            slot="trainer-0",
            slots=["trainer-0"],
            tensors=local_tensors(tensors(0)),
        )
        publisher.fence(timeout_s=1.0)
        header = Header.parse(publisher._seqlock.memory.tobytes(), holder="trainer-0")
        assert header.sequence % 2 == 1
        publisher.publish(epoch=0, step=0, timeout_s=5.0)
        with pytest.raises(PublishError, match="fence it before"):
            publisher.publish(epoch=0, step=1, timeout_s=5.0)
        cluster.refit_ok(0)
        publisher.close()


def test_serving_on_holds_its_memory_where_the_answer_was_lost() -> None:
    with cluster_of_one() as cluster:
        publish(cluster, 0)
        cluster.refit_ok(0)
        served = ServeOn(cluster.receivers[0])
        flaky = Flaky(cluster.rendezvous)
        served._offering.rendezvous = flaky  # type: ignore[assignment]
        served._offering._retry = RetryPolicy(1)
        flaky.after["publish_slot"] = 1
        with pytest.raises(RendezvousUnavailableError):
            served.publish(timeout_s=5.0)
        assert served._meta is not None, "readers may be reading it"
        again = served.publish(timeout_s=5.0)
        assert again.uid == served.publish(timeout_s=5.0).uid
        served.close()
