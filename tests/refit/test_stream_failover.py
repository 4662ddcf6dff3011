"""Holders that fail in ``stream`` mode: before the vote nothing is touched, after COMMIT replicas are read first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster, weights
from tests.refit.test_failover import at_stage, publish

from reshard.planner.options import PlanOptions
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import HolderLostError, QuarantinedError, RefitAborted
from reshard.refit.retry import RetryPolicy

SETTINGS: dict[str, object] = {"install": "stream", "stream_bytes": 512, "retry": RetryPolicy(2, 0.01)}


def streaming(n: int, **settings: object) -> tuple[Cluster, ArrayEngine]:
    """``n`` trainers that all hold the whole model, and an engine that is streamed into, part after part."""
    engine = ArrayEngine({name: np.zeros_like(w) for name, w in weights(1).items()}, commit="copy")
    return Cluster(n, engines=[engine], receiver_settings={**SETTINGS, **settings}), engine


def at_write(cluster: Cluster, number: int, act: Callable[[], None]) -> None:
    """Do something before the ``number``-th part is written into the live weights."""
    engine = cluster.engines[0]
    write, seen = engine.write_live, []  # type: ignore[attr-defined]

    def hook(buffers: object) -> None:
        seen.append(1)
        if len(seen) == number:
            act()
        write(buffers)

    engine.write_live = hook  # type: ignore[attr-defined]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("policy", ["first", "spread"])
def test_replicas_take_over_between_the_parts(warm: bool, part: int, policy: str) -> None:
    cluster, engine = streaming(3, options=PlanOptions(policy=policy))
    with cluster:
        publish(cluster, weights(1), 0)
        if warm:
            cluster.refit_ok(0)
        publish(cluster, weights(2), 1)
        at_write(cluster, part, cluster.trainer_transports[0].close)
        (report,) = cluster.refit_ok(1)
        assert "trainer-0" in report.failovers
        assert all(np.array_equal(engine[name], w) for name, w in weights(2).items())
        assert "trainer-0" not in cluster.receivers[0].reader.links.names()
        assert not cluster.leftovers()


def test_what_no_replica_holds_quarantines_and_says_who_had_it() -> None:
    cluster, engine = streaming(1)
    with cluster:
        publish(cluster, weights(1), 0)
        cluster.refit_ok(0)
        publish(cluster, weights(2), 1)
        at_write(cluster, 1, cluster.trainer_transports[0].close)
        (error,) = cluster.refit(1)
        assert isinstance(error, QuarantinedError)
        assert isinstance(error.__cause__, HolderLostError)
        assert error.__cause__.holders == ("trainer-0",)
        assert cluster.receivers[0].state == "quarantined"
        assert not cluster.leftovers()
        assert engine.paused


@pytest.mark.parametrize("stage", ["connect", "allocate", "vote"])
def test_a_holder_lost_before_the_vote_touches_nothing(stage: str) -> None:
    """A warm connection to a dead holder is noticed before anybody says yes."""
    cluster, engine = streaming(1)
    with cluster:
        publish(cluster, weights(1), 0)
        cluster.refit_ok(0)
        publish(cluster, weights(2), 1)
        before = "allocate" if stage == "vote" else stage
        cluster.receivers[0]._on_stage = at_stage(before, cluster.trainer_transports[0].close)
        (error,) = cluster.refit(1)
        assert isinstance(error, HolderLostError | RefitAborted)
        assert cluster.receivers[0].check_serving().step == 0
        assert all(np.array_equal(engine[name], w) for name, w in weights(1).items())
        assert not engine.paused
        assert not cluster.leftovers()


def test_a_quarantined_rank_takes_no_partial_refit() -> None:
    """What the partial refit leaves as it is may be of any version."""
    cluster, engine = streaming(2)
    with cluster:
        publish(cluster, weights(1), 0)
        cluster.refit_ok(0)
        publish(cluster, weights(2), 1)

        def lose_all() -> None:
            raise MemoryError("in the middle of the install")

        write = engine.write_live
        at_write(cluster, 2, lose_all)
        (error,) = cluster.refit(1)
        assert isinstance(error, QuarantinedError)
        engine.write_live = write  # type: ignore[method-assign]
        (error,) = cluster.refit(1, only=["q"], timeout_s=TIMEOUT_S)
        assert isinstance(error, QuarantinedError)
        assert "refit in full" in str(error)
        assert cluster.receivers[0].state == "quarantined"
        publish(cluster, weights(3), 2)
        cluster.refit_ok(2)
        assert all(np.array_equal(engine[name], w) for name, w in weights(3).items())
