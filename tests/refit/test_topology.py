"""What changes between refits is noticed by digest or address: replanned, redialled, the old peers released."""

from __future__ import annotations

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster, holds, shards_of, tp_cluster, tp_engine, weights

from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.receiver import Receiver
from reshard.rendezvous.errors import VersionError
from reshard.transports import open_transport


def by_columns(model: dict[str, np.ndarray], index: int) -> list[object]:
    """Another sharding of the same tensors: halves of the last dim."""
    pieces, starts = {}, {}
    for name, w in model.items():
        half = -(-w.shape[-1] // 2)
        first, last = (0, half) if index == 0 else (half, w.shape[-1])
        pieces[name] = w[..., first:last]
        starts[name] = (*(0,) * (w.ndim - 1), first)
    return local_tensors(pieces, shapes={n: w.shape for n, w in model.items()}, starts=starts)  # type: ignore[return-value]


def test_a_restarted_trainer_has_new_addresses() -> None:
    with tp_cluster() as cluster:
        for step in range(2):
            cluster.publish(step, weights(step))
            cluster.refit_ok(step)
        old = [r.reader.links.peer("trainer-1") for r in cluster.receivers]
        cluster.publishers[1].close()
        cluster.trainer_transports[1].close()
        cluster.trainer_transports[1] = open_transport("memory")
        cluster.publishers[1] = cluster.publisher(1)
        cluster.publish(2, weights(2))
        reports = cluster.refit_ok(2)
        assert all(holds(cluster.engines[r], weights(2), r) for r in range(2))  # type: ignore[arg-type]
        assert all(r.cold and not r.failovers and not r.new_registrations for r in reports)
        assert "plan" not in reports[0].stages, "the table is the same, so the plan is"
        assert all(r.reader.links.peer("trainer-1") is not p for r, p in zip(cluster.receivers, old, strict=True))
        cluster.publish(3, weights(3))
        assert not any(r.cold for r in cluster.refit_ok(3))


def test_a_table_that_changes_needs_a_new_layout_epoch_and_is_replanned() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        before = cluster.receivers[0].bench.planned
        columns = by_columns(weights(1), 0)
        with pytest.raises(VersionError, match="layout"):
            cluster.publishers[0].publish(epoch=0, step=1, tensors=columns, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
        for i, p in enumerate(cluster.publishers):
            p.publish(epoch=0, step=2, tensors=by_columns(weights(2), i), layout_epoch=1, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
        reports = cluster.refit_ok(2)
        assert all(holds(cluster.engines[r], weights(2), r) for r in range(2))  # type: ignore[arg-type]
        assert all(r.cold for r in reports)
        assert cluster.receivers[0].bench.planned is not before
        for i, p in enumerate(cluster.publishers):
            p.publish(epoch=0, step=3, tensors=by_columns(weights(3), i), layout_epoch=1, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
        assert not any(r.cold for r in cluster.refit_ok(3))


def test_a_trainer_that_grows_starts_a_new_epoch() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        for p in cluster.publishers:
            p.close()
        cluster.slots = [f"trainer-{i}" for i in range(3)]
        cluster.trainer_transports.append(open_transport("memory"))
        cluster.publishers = [cluster.publisher(i) for i in range(3)]
        for i, p in enumerate(cluster.publishers):
            p.publish(epoch=1, step=0, tensors=shards_of(weights(5), i, 3), layout_epoch=1, timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
        assert all(holds(cluster.engines[r], weights(5), r) for r in range(2))  # type: ignore[arg-type]
        assert set(cluster.receivers[0].reader.links.names()) == set(cluster.slots)


def test_a_receiver_that_joins_late_and_one_that_leaves() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.receivers[1].close()
        alone = tp_engine(1)
        late = Receiver(
            cluster.receiver_transports[1],
            cluster.rendezvous,
            alone,
            model="m",
            group="late",
            members=["only"],
            member="only",
            allow_unconsumed=["*"],
        )
        with late:
            report = late.refit(0, timeout_s=TIMEOUT_S)
            assert report.cold
            assert holds(alone, weights(0), 1)
            cluster.publish(1, weights(1))
            assert not late.refit(1, timeout_s=TIMEOUT_S).cold
            assert holds(alone, weights(1), 1)
        assert not cluster.leftovers()


def test_peers_that_a_new_plan_does_not_need_are_released() -> None:
    with Cluster(2, engines=[tp_engine(0), tp_engine(1)]) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        everything = shards_of(weights(1), 0, 1)
        cluster.publishers[0].publish(epoch=0, step=1, tensors=everything, layout_epoch=1, timeout_s=TIMEOUT_S)
        cluster.publishers[1].publish(epoch=0, step=1, tensors=[], empty=True, layout_epoch=1, timeout_s=TIMEOUT_S)
        cluster.refit_ok(1)
        assert [r.reader.links.names() for r in cluster.receivers] == [("trainer-0",)] * 2
        assert all(holds(cluster.engines[r], weights(1), r) for r in range(2))  # type: ignore[arg-type]
