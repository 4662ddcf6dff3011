"""Which version does a refit take? By number, exactly, or the latest; and what is no version at all."""

from __future__ import annotations

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster

from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import RefitTimeoutError
from reshard.rendezvous.errors import RendezvousError
from reshard.rendezvous.types import VersionKey


def holding(epoch: int, step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(4, 100 * epoch + step, np.float32)}


def one() -> tuple[Cluster, ArrayEngine]:
    engine = ArrayEngine({"w": np.zeros(4, np.float32)})
    return Cluster(1, engines=[engine]), engine


def test_a_number_is_a_step_and_an_older_one_that_still_stands_may_be_taken() -> None:
    cluster, engine = one()
    with cluster:
        receiver = cluster.receivers[0]
        for step in (3, 7):
            cluster.publish(step, holding(0, step))
        for step in (7, 3, 7):
            report = receiver.refit(step, timeout_s=TIMEOUT_S)
            assert report.version == receiver.check_serving() == VersionKey("m", 0, step)
            assert engine["w"].tolist() == [step] * 4


def test_exactly_one_version_with_its_epoch() -> None:
    cluster, engine = one()
    with cluster:
        receiver = cluster.receivers[0]
        cluster.publish(5, holding(0, 5))
        exact = VersionKey("m", 0, 5)
        assert receiver.refit(exact, timeout_s=TIMEOUT_S).version == exact
        epoch = cluster.publishers[0].open_epoch("another run")
        cluster.publish(5, holding(epoch, 5), epoch=epoch)
        newer = VersionKey("m", epoch, 5)
        assert receiver.refit(newer, timeout_s=TIMEOUT_S).version == newer
        assert engine["w"].tolist() == [100 * epoch + 5] * 4
        assert receiver.refit(5, timeout_s=TIMEOUT_S).version == newer, "a number is a step of the present epoch"
        with pytest.raises(RendezvousError) as gone:
            receiver.refit(exact, timeout_s=2.0)
        assert "0.5" in str(gone.value)
        assert receiver.check_serving() == newer
        assert engine["w"].tolist() == [100 * epoch + 5] * 4


def test_the_latest_is_the_newest_that_is_complete() -> None:
    engine = ArrayEngine({"w": np.zeros(4, np.float32)})
    with Cluster(2, engines=[engine]) as cluster:
        receiver = cluster.receivers[0]
        for step in (0, 1):
            cluster.publish(step, holding(0, step))
        assert receiver.refit(timeout_s=TIMEOUT_S).version.step == 1
        from tests.refit.cluster import shards_of

        half = shards_of(holding(0, 2), 0, 2)
        cluster.publishers[0].publish(epoch=0, step=2, tensors=half, timeout_s=TIMEOUT_S)
        assert receiver.refit("latest", timeout_s=TIMEOUT_S).version.step == 1, "half of a version is none"
        assert engine["w"].tolist() == [1] * 4


@pytest.mark.parametrize("version", [9, VersionKey("m", 0, 9), VersionKey("m", 3, 0)])
def test_a_version_that_never_comes_is_waited_for_until_the_deadline(version: int | VersionKey) -> None:
    cluster, engine = one()
    with cluster:
        cluster.publish(0, holding(0, 1))
        cluster.refit_ok(0)
        with pytest.raises((RendezvousError, RefitTimeoutError)):
            cluster.receivers[0].refit(version, timeout_s=0.5)
        assert cluster.receivers[0].check_serving().step == 0
        assert engine["w"].tolist() == [1] * 4
        assert not cluster.leftovers()


@pytest.mark.parametrize("version", ["newest", -1, 1.5, True, None, VersionKey("other", 0, 0)])
def test_what_is_no_version_is_refused(version: object) -> None:
    cluster, _ = one()
    with cluster:
        cluster.publish(0, holding(0, 0))
        with pytest.raises((ValueError, TypeError, RendezvousError)):
            cluster.receivers[0].refit(version, timeout_s=2.0)  # type: ignore[arg-type]
        assert cluster.receivers[0].state == "empty"
        cluster.refit_ok(0)
