"""A holder that fails before, during or after a read: replicas take over in the same refit, or the error names it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.refit.clocks import StoppedClock
from tests.refit.cluster import TIMEOUT_S, Cluster, weights

from reshard.planner.options import PlanOptions
from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.deadline import Deadline
from reshard.refit.engines.arrays import ArrayEngine, take
from reshard.refit.errors import HolderLostError, RefitAborted
from reshard.refit.retry import RetryPolicy
from reshard.transports.base import Prepared, Transfer
from reshard.transports.errors import OwnFaultError, PeerError, TransportError


def replicated(
    n: int, *, staging: bool = False, **settings: object
) -> tuple[Cluster, ArrayEngine, dict[str, np.ndarray]]:
    """``n`` trainers that all hold the whole model, and one engine; with ``staging`` every copy goes through it."""
    model = weights(1)
    if staging:
        engine = ArrayEngine(
            {"q": np.zeros((4, 16)), "k": np.zeros((8, 3)), "o": np.zeros((16, 8), np.float32), "norm": np.zeros(7)},
            layout={"q": [take("q", np.s_[2:6])], "k": [take("k", np.s_[:, 5:8])]},
        )
    else:
        engine = ArrayEngine({name: np.zeros_like(w) for name, w in model.items()})
    cluster = Cluster(n, engines=[engine], receiver_settings=settings)
    return cluster, engine, model


def publish(cluster: Cluster, model: dict[str, np.ndarray], step: int) -> None:
    for p in cluster.publishers:
        tensors = local_tensors(model, replica_groups=dict.fromkeys(model, 0))
        p.publish(epoch=0, step=step, tensors=tensors, timeout_s=TIMEOUT_S)


def at_stage(stage: str, act: Callable[[], None]) -> Callable[[str], None]:
    """Do something once, when a stage starts."""
    done: list[str] = []

    def hook(name: str) -> None:
        if name == stage and not done:
            done.append(name)
            act()

    return hook


@pytest.mark.parametrize("stage", ["connect", "allocate", "read"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("staging", [False, True])
def test_replicas_take_over(stage: str, warm: bool, staging: bool) -> None:
    cluster, engine, model = replicated(3, staging=staging, retry=RetryPolicy(2, 0.01))
    with cluster:
        publish(cluster, model, 0)
        if warm:
            cluster.refit_ok(0)
        model = {name: w + 1 for name, w in model.items()}
        publish(cluster, model, 1)
        receiver = cluster.receivers[0]
        receiver._on_stage = at_stage(stage, cluster.trainer_transports[0].close)
        (report,) = cluster.refit_ok(1)
        assert report.failovers == ("trainer-0",) or (warm and stage == "connect")
        expected = {"q": model["q"][2:6], "k": model["k"][:, 5:8]} if staging else {}
        for name, w in model.items():
            assert np.array_equal(engine[name], expected.get(name, w)), name
        assert report.verified_bytes > 0
        assert "trainer-0" not in receiver.reader.links.names()
        assert not cluster.leftovers()


def test_only_the_lost_rows_are_read_again() -> None:
    cluster, _, model = replicated(3)
    with cluster:
        publish(cluster, model, 0)
        (whole,) = cluster.refit_ok(0)
        assert _bytes_by_holder(cluster)["trainer-0"] > 0
        publish(cluster, model, 1)
        cluster.receivers[0]._on_stage = at_stage("read", cluster.trainer_transports[0].close)
        (report,) = cluster.refit_ok(1)
        assert report.failovers == ("trainer-0",)
        assert report.wire_bytes == whole.wire_bytes, "the others' bytes once, the lost ones' once"
        assert report.verified_bytes == report.received_bytes


@pytest.mark.parametrize("lost_at", ["data", "header"])
def test_what_a_lost_holder_delivered_counts_as_time_and_not_as_bytes(
    lost_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wave of no time would have an impossible rate; what was delivered and read again would never be verified."""
    monkeypatch.setenv("RESHARD_MAX_GBPS", "1000")
    cluster, engine, model = replicated(3, retry=RetryPolicy(1, 0.01), require_verified=True)
    with cluster:
        receiver = cluster.receivers[0]
        receiver.reader.batch_bytes = 1 << 30  # one batch: nothing else counts
        publish(cluster, model, 0)
        cluster.refit_ok(0)
        model = {name: w + 1 for name, w in model.items()}
        publish(cluster, model, 1)
        wire = cluster.receiver_transports[0]
        real_post, real_wait, seen = wire.post, wire.wait, [0]

        def lose(big: bool) -> None:
            seen[0] += big
            if seen[0] == 1:
                cluster.trainer_transports[0].close()

        def post(prepared: Prepared, **more: float) -> object:
            if lost_at == "data":
                lose(prepared.nbytes >= 256)
            return real_post(prepared, **more)  # type: ignore[arg-type]

        def wait(transfers: list[Transfer], **more: object) -> object:
            stats = real_wait(transfers, **more)  # type: ignore[arg-type]
            if lost_at == "header":
                lose(any(t.prepared.nbytes >= 256 for t in transfers))
            return stats

        monkeypatch.setattr(wire, "post", post)
        monkeypatch.setattr(wire, "wait", wait)
        (report,) = cluster.refit_ok(1)
        assert report.failovers == ("trainer-0",)
        assert report.wire_s > 0
        assert all(np.array_equal(engine[name], w) for name, w in model.items())
        assert report.verified_bytes == report.received_bytes == sum(w.nbytes for w in model.values())


def _bytes_by_holder(cluster: Cluster) -> dict[str, int]:
    planned = cluster.receivers[0].bench.planned
    assert planned is not None
    names = [h.name for h in planned.plan.holders]
    blocks = planned.plan.blocks
    totals = np.bincount(blocks.holder, weights=blocks.run_bytes * blocks.n_runs, minlength=len(names))
    return dict(zip(names, totals.astype(int).tolist(), strict=True))


def test_two_holders_lost_one_after_the_other() -> None:
    cluster, engine, model = replicated(3)
    with cluster:
        publish(cluster, model, 0)
        cluster.refit_ok(0)
        publish(cluster, model, 1)

        def both() -> None:
            cluster.trainer_transports[0].close()
            cluster.trainer_transports[2].close()

        cluster.receivers[0]._on_stage = at_stage("read", both)
        (report,) = cluster.refit_ok(1)
        assert report.failovers == ("trainer-0", "trainer-2")
        assert all(np.array_equal(engine[name], w) for name, w in model.items())


def test_what_no_replica_holds_fails_and_names_the_holder() -> None:
    engine = ArrayEngine({name: np.zeros_like(w) for name, w in weights(0).items()})
    with Cluster(2, engines=[engine], receiver_settings={"retry": RetryPolicy(2, 0.01)}) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        cluster.receivers[0]._on_stage = at_stage("read", cluster.trainer_transports[1].close)
        for stage in ("read", "connect"):
            (error,) = cluster.refit(1)
            assert isinstance(error, HolderLostError), stage
            assert error.holders == ("trainer-1",)
            assert "holder 'trainer-1' failed" in str(error)
            assert isinstance(error.__cause__, TransportError)
            assert cluster.receivers[0].check_serving().step == 0
            assert np.array_equal(engine["q"], weights(0)["q"])
            assert not cluster.leftovers()


def test_a_rank_that_needs_nothing_of_the_lost_holder_is_aborted_with_its_group() -> None:
    first = ArrayEngine({"q": np.zeros((4, 16), np.float32)}, layout={"q": [take("q", np.s_[:4])]})
    second = ArrayEngine({"q": np.zeros((4, 16), np.float32)}, layout={"q": [take("q", np.s_[4:])]})
    with Cluster(2, engines=[first, second]) as cluster:
        model = {"q": weights(0)["q"]}
        cluster.publish(0, model)
        cluster.refit_ok(0)
        cluster.publish(1, {"q": model["q"] + 1})

        def kill() -> None:
            assert cluster.all_joined()
            cluster.trainer_transports[1].close()

        cluster.receivers[1]._on_stage = at_stage("read", kill)
        a, b = cluster.refit(1)
        assert isinstance(b, HolderLostError)
        assert isinstance(a, RefitAborted)
        assert np.array_equal(first["q"], model["q"][:4])
        assert np.array_equal(second["q"], model["q"][4:])


def test_nearest_candidates_come_first() -> None:
    """The order of the replica policy decides who is tried: `first` takes trainer-0, then trainer-1."""
    cluster, _, model = replicated(3, options=PlanOptions(policy="first"), retry=RetryPolicy(1))
    with cluster:
        publish(cluster, model, 0)
        cluster.refit_ok(0)
        assert cluster.receivers[0].reader.links.names() == ("trainer-0",)
        publish(cluster, model, 1)
        cluster.receivers[0]._on_stage = at_stage("read", cluster.trainer_transports[0].close)
        (report,) = cluster.refit_ok(1)
        assert report.failovers == ("trainer-0",)


def test_retry_policy_counts_and_shares_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    StoppedClock(monkeypatch, "reshard.refit.deadline", "reshard.refit.retry")
    tries: list[float] = []

    def call(left_s: float) -> str:
        tries.append(left_s)
        if len(tries) < 3:
            raise PeerError("not yet", peer="x")
        return "connected"

    policy = RetryPolicy(3, backoff_s=0.5, factor=2.0)
    assert policy.run(call, PeerError, Deadline(9.0, "a dial"), "connect") == "connected"
    assert tries == pytest.approx([9.0 / 3, 8.5 / 2, 7.5])
    tries.clear()
    with pytest.raises(PeerError):
        RetryPolicy(2, backoff_s=0.01).run(call, PeerError, Deadline(9.0, "a dial"), "connect")
    assert len(tries) == 2
    with pytest.raises(ValueError, match=r"retry\.attempts: 0 lies outside \[1, "):
        RetryPolicy(0)


@pytest.mark.parametrize("stage", ["allocate", "read", "verify"])
def test_a_lost_holder_is_left_with_nothing_behind(stage: str) -> None:
    """Wherever it was noticed: no connection to it is kept for the next refit to trip over."""
    engine = ArrayEngine({name: np.zeros_like(w) for name, w in weights(0).items()})
    with Cluster(2, engines=[engine], receiver_settings={"retry": RetryPolicy(1)}) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        lost = PeerError("gone", peer="trainer-1", failures={"trainer-1": "failed: gone"})

        def fail() -> None:
            raise lost

        cluster.receivers[0]._on_stage = at_stage(stage, fail)
        (result,) = cluster.refit(1)
        if isinstance(result, BaseException):
            assert isinstance(result, HolderLostError)
            assert cluster.receivers[0].reader.links.names() == ("trainer-0",)
        assert not cluster.leftovers()
        cluster.receivers[0]._on_stage = None
        cluster.refit_ok(1)
        assert np.array_equal(engine["q"], weights(1)["q"])


@pytest.mark.parametrize("stage", ["connect", "allocate", "read"])
@pytest.mark.parametrize("warm", [False, True])
def test_no_holder_is_blamed_for_what_fails_on_this_side(
    stage: str, warm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is the transport's own, though replicas would have what the "lost" holder owes."""
    cluster, engine, model = replicated(2)
    with cluster:
        publish(cluster, model, 0)
        if warm:
            cluster.refit_ok(0)
        publish(cluster, {name: w + 1 for name, w in model.items()}, 1)
        receiver = cluster.receivers[0]
        receiver._on_stage = at_stage(stage, cluster.receiver_transports[0].close)
        (result,) = cluster.refit(1)
        assert isinstance(result, OwnFaultError), repr(result)
        assert "transport 'memory' is closed" in str(result)
        assert "goes on without" not in caplog.text
        assert np.array_equal(engine["q"], model["q"] if warm else np.zeros_like(model["q"]))
        assert not cluster.leftovers()
