"""Publishing in place, by cut hints, and from what a receiver serves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster, expected, holds, shards_of, tp_cluster, tp_engine, weights

from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.engines.arrays import ArrayEngine, take
from reshard.refit.errors import FenceTimeoutError, PublishError, RefitAborted, TornReadError, VerificationError
from reshard.refit.inplace import InPlacePublisher
from reshard.refit.receiver import Receiver
from reshard.refit.serving import ServeOn
from reshard.refit.tensors import LocalTensor


def in_place(cluster: Cluster, model: dict[str, np.ndarray]) -> list[InPlacePublisher]:
    """Both trainers publish their live rows."""
    return [
        InPlacePublisher(
            cluster.trainer_transports[i],
            cluster.rendezvous,
            model="m",
            slot=cluster.slots[i],
            slots=cluster.slots,
            tensors=shards_of(model, i, 2),
        )
        for i in range(2)
    ]


def test_live_weights_version_after_version() -> None:
    model = weights(0)
    with tp_cluster() as cluster:
        publishers = in_place(cluster, model)
        for step in range(4):
            for p in publishers:
                p.publish(epoch=0, step=step, timeout_s=TIMEOUT_S)
            reports = cluster.refit_ok(step)
            assert all(holds(cluster.engines[r], model, r) for r in range(2))  # type: ignore[arg-type]
            assert all(r.cold == (step == 0) for r in reports)
            for p in publishers:
                p.fence(timeout_s=TIMEOUT_S)
            for w in model.values():
                w += 1
        for p in publishers:
            p.close()
            p.close()


def test_the_fence_waits_for_leases_and_admits_no_more() -> None:
    with tp_cluster() as cluster:
        publishers = in_place(cluster, weights(0))
        for p in publishers:
            p.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        worker = cluster.receivers[0].worker()
        manifest = cluster.rendezvous.await_version(
            "m", group="other", members=["x"], member="x", worker=worker, want=0, timeout_s=TIMEOUT_S
        )
        with pytest.raises(FenceTimeoutError, match="still being read"):
            publishers[0].fence(timeout_s=1.0)
        with pytest.raises(PublishError, match="fence it before"):
            publishers[0].publish(epoch=0, step=1, timeout_s=TIMEOUT_S)
        (error, _) = cluster.refit(0, timeout_s=0.5)
        assert isinstance(error, Exception), "admission is closed"
        cluster.rendezvous.release_lease(manifest.lease)
        for p in publishers:
            p.fence(timeout_s=TIMEOUT_S)
            p.close()


def test_a_write_under_a_lease_is_seen_by_digests_and_by_torch() -> None:
    """D7, in place."""
    live = torch.arange(64, dtype=torch.float32)
    engine = ArrayEngine({"w": np.zeros(64, np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        publisher = InPlacePublisher(
            cluster.trainer_transports[0],
            cluster.rendezvous,
            model="m",
            slot="trainer-0",
            slots=["trainer-0"],
            tensors=[LocalTensor("w", "float32", (64,), (0,), live)],
        )
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        live.add_(1)
        (error,) = cluster.refit(0)
        assert isinstance(error, VerificationError)
        assert not engine["w"].any()
        with pytest.raises(PublishError, match="'w' was written while it was offered"):
            publisher.fence(timeout_s=TIMEOUT_S)
        publisher.publish(epoch=0, step=1, timeout_s=TIMEOUT_S)
        cluster.refit_ok(1)
        assert engine["w"].tolist() == live.tolist()
        publisher.close()


def test_a_header_that_moves_during_the_read_voids_it() -> None:
    with tp_cluster() as cluster:
        publishers = in_place(cluster, weights(0))
        for p in publishers:
            p.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        lock = publishers[1]._seqlock
        reader = cluster.receivers[0].reader
        headers = reader._headers

        def watched(when: str, *args: object) -> object:
            found = headers(when, *args)  # type: ignore[arg-type]
            if when == "before":
                lock.begin()
                lock.commit(0, 0)
            return found

        reader._headers = watched  # type: ignore[method-assign, assignment]
        first, second = cluster.refit(0)
        assert isinstance(first, TornReadError)
        assert isinstance(second, RefitAborted | TornReadError)
        for p in publishers:
            p.close()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (LocalTensor("w", "float32", (2, 4), (0, 0), np.zeros((2, 8), np.float32)[:, ::2]), "not contiguous in memory"),
        (LocalTensor("w", "float32", (4, 2), (0, 0), torch.zeros(2, 4).t()), "not contiguous in memory"),
    ],
)
def test_what_cannot_be_published_in_place_is_named(tensor: LocalTensor, message: str) -> None:
    with Cluster(1) as cluster, pytest.raises(PublishError, match=f"'w' is {message}"):
        InPlacePublisher(
            cluster.trainer_transports[0], cluster.rendezvous, model="m", slot="a", slots=["a"], tensors=[tensor]
        )


def test_views_of_one_allocation_are_registered_once() -> None:
    flat = np.arange(32, dtype=np.float32)
    tensors = local_tensors({"a": flat[:8].reshape(2, 4), "b": flat[8:]})
    engine = ArrayEngine({"a": np.zeros((2, 4), np.float32), "b": np.zeros(24, np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        publisher = InPlacePublisher(
            cluster.trainer_transports[0],
            cluster.rendezvous,
            model="m",
            slot="trainer-0",
            slots=["trainer-0"],
            tensors=tensors,
        )
        assert publisher._sizes.tolist()[0] == flat.nbytes
        assert len(publisher._sizes) == 3
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
        assert engine["b"].tolist() == flat[8:].tolist()
        publisher.close()


def test_cut_hints_make_wire_bytes_useful_bytes_and_everything_verifiable() -> None:
    with tp_cluster(publisher_settings={"cut_hints": True}) as cluster:
        cluster.publish(0, weights(0))
        before = cluster.refit_ok(0)
        assert any(r.wire_bytes > r.useful_bytes for r in before)
        assert all(r.verified_bytes < r.received_bytes for r in before)
        epoch = cluster.publishers[0].newest_layout_epoch()
        assert epoch > 0
        for r in cluster.receivers:
            r.require_verified = True
        for step in (1, 2):
            cluster.publish(step, weights(step), layout_epoch=epoch)
            after = cluster.refit_ok(step)
            assert all(holds(cluster.engines[r], weights(step), r) for r in range(2))  # type: ignore[arg-type]
            assert all(r.wire_bytes == r.useful_bytes == r.verified_bytes for r in after)
        assert not any(r.cold for r in after)


def test_a_new_replica_joins_from_what_a_group_serves() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        served = [ServeOn(r) for r in cluster.receivers]
        for s in served:
            s.publish(timeout_s=TIMEOUT_S)
        for t in cluster.trainer_transports:
            t.close()
        late = tp_engine(1)
        joined = Receiver(
            cluster.receiver_transports[0],
            cluster.rendezvous,
            late,
            model="m@g",
            group="late",
            members=["late"],
            member="late",
            allow_unconsumed=["*"],
        )
        with joined:
            report = joined.load(0, timeout_s=TIMEOUT_S)
        assert all(np.array_equal(late[n], w) for n, w in expected(weights(0), 1).items())
        assert report.verified_bytes > 0
        for s in served:
            s.close()


def test_a_refit_fences_what_is_served_on() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        served = ServeOn(cluster.receivers[0])
        other = ServeOn(cluster.receivers[1])
        served.publish(timeout_s=TIMEOUT_S)
        other.publish(timeout_s=TIMEOUT_S)
        for step in (1, 2, 3):
            cluster.publish(step, weights(step))
            cluster.refit_ok(step)
        assert served._uid == ""
        assert not cluster.leftovers()
        served.publish(timeout_s=TIMEOUT_S)
        served.close()
        other.close()


def test_what_is_no_longer_as_published_is_refused_with_why() -> None:
    engine = ArrayEngine(
        {"w": np.zeros((4, 4), np.float64), "t": np.zeros((4, 2), np.float32)},
        layout={"w": [take("w")], "t": [take("t", axes=(1, 0))]},
    )
    with Cluster(1, engines=[engine]) as cluster:
        model = {"w": np.ones((4, 4), np.float32), "t": np.arange(8, dtype=np.float32).reshape(2, 4)}
        cluster.publish(0, model)
        cluster.refit_ok(0)
        with ServeOn(cluster.receivers[0]) as serve:
            with pytest.raises(PublishError, match="float32 kept as float64") as caught:
                serve.publish(timeout_s=TIMEOUT_S)
            assert "scattered in t" in str(caught.value)
            engine.keeps_load_layout = False  # type: ignore[attr-defined]
            with pytest.raises(PublishError, match="kernel layouts"):
                serve.publish(timeout_s=TIMEOUT_S)


def test_of_two_buffers_one_is_read_while_the_other_is_written() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        worker = cluster.receivers[0].worker()
        manifest = cluster.rendezvous.await_version(
            "m", group="others", members=["x"], member="x", worker=worker, want=0, timeout_s=5.0
        )
        buffers = [p._newest for p in cluster.publishers]
        before = [b.data.copy() for b in buffers if b is not None]  # type: ignore[union-attr]
        for i, p in enumerate(cluster.publishers):
            p.publish(epoch=0, step=1, tensors=shards_of(weights(1), i, 2), timeout_s=5.0)
        assert all(np.array_equal(b.data, old) for b, old in zip(buffers, before, strict=True))  # type: ignore[union-attr]
        with pytest.raises(FenceTimeoutError):
            cluster.publishers[0].publish(epoch=0, step=2, tensors=shards_of(weights(2), 0, 2), timeout_s=1.0)
        cluster.rendezvous.release_lease(manifest.lease)


def test_a_second_thread_is_refused_while_one_publishes() -> None:
    with tp_cluster() as cluster:
        publisher = cluster.publishers[0]
        with publisher._busy, pytest.raises(PublishError, match="is being published in another thread"):
            publisher.publish(epoch=0, step=0, tensors=shards_of(weights(0), 0, 2), timeout_s=1.0)
