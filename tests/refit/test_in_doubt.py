"""After a yes vote a rank never decides by itself: lost answers, forgetful services, what is served meanwhile (R8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster, holds, tp_cluster, weights

from reshard.refit.errors import InDoubtError, QuarantinedError, RefitAborted, RefitTimeoutError
from reshard.rendezvous.errors import InvalidRequestError, RendezvousUnavailableError
from reshard.rendezvous.types import Decision, Facts


class Flaky:
    """A rendezvous client whose calls can be made to fail, before or after they reached the service."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.after: dict[str, int] = {}
        self.before: dict[str, int] = {}
        self.answers: dict[str, Callable[[], object]] = {}

    def __getattr__(self, name: str) -> object:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: object, **kwargs: object) -> object:
            if self.before.get(name, 0) > 0:
                self.before[name] -= 1
                raise RendezvousUnavailableError(f"{name}: cut before it was sent")
            if name in self.answers:
                return self.answers[name]()
            result = found(*args, **kwargs)
            if self.after.get(name, 0) > 0:
                self.after[name] -= 1
                raise RendezvousUnavailableError(f"{name}: the answer was lost")
            return result

        return call


def flaky_cluster(member: int) -> tuple[Cluster, Flaky]:
    """A cluster whose one member's client is flaky, serving version 0; version 1 is published."""
    cluster = tp_cluster()
    flaky = Flaky(cluster.rendezvous)
    cluster.publish(0, weights(0))
    cluster.refit_ok(0)
    cluster.receivers[member].rendezvous = flaky  # type: ignore[assignment]
    cluster.receivers[member].bench.rendezvous = flaky  # type: ignore[assignment]
    cluster.publish(1, weights(1))
    return cluster, flaky


def test_a_lost_decision_is_asked_for_and_learnt() -> None:
    cluster, flaky = flaky_cluster(1)
    with cluster:
        flaky.after["vote"] = 1
        flaky.before["ask_decision"] = 3
        states: list[str] = []
        cluster.receivers[1]._on_state = states.append
        cluster.refit_ok(1)
        assert states == ["in_doubt", "changing", "serving"]
        assert all(holds(cluster.engines[r], weights(1), r) for r in range(2))  # type: ignore[arg-type]


def test_a_rank_that_cannot_learn_serves_nothing_until_it_does() -> None:
    cluster, flaky = flaky_cluster(1)
    with cluster:
        flaky.after["vote"] = 1
        flaky.before["ask_decision"] = 10**6
        first, second = cluster.refit(1, timeout_s=4.0)
        assert isinstance(second, InDoubtError)
        assert cluster.receivers[1].state == "in_doubt"
        with pytest.raises(InDoubtError, match="serves nothing new"):
            cluster.receivers[1].check_serving()
        # The first rank installed and waits for the second's word: it does not serve version 1 alone.
        assert isinstance(first, QuarantinedError | InDoubtError)
        assert cluster.receivers[0].serving is None
        with pytest.raises(InDoubtError):
            cluster.receivers[1].resolve(timeout_s=0.2)
        flaky.before.clear()
        # The service gave the group up when the missing word was due; both ranks quarantine, and a new refit mends
        # them.
        assert cluster.receivers[1].resolve(timeout_s=TIMEOUT_S) == "quarantined"
        if cluster.receivers[0].state == "in_doubt":
            assert cluster.receivers[0].resolve(timeout_s=TIMEOUT_S) == "quarantined"
        cluster.refit_ok(1)
        assert all(holds(cluster.engines[r], weights(1), r) for r in range(2))  # type: ignore[arg-type]
        assert [r.state for r in cluster.receivers] == ["serving", "serving"]


def test_a_rank_in_doubt_that_learns_of_an_abort_serves_its_old_weights() -> None:
    cluster, flaky = flaky_cluster(0)
    with cluster:

        def stage(name: str) -> None:
            if name == "verify":
                assert cluster.all_joined()
                raise RuntimeError("no")

        cluster.receivers[1]._on_stage = stage
        flaky.after["vote"] = 1
        flaky.before["ask_decision"] = 10**6
        first, second = cluster.refit(1, timeout_s=4.0)
        assert isinstance(first, InDoubtError)
        assert isinstance(second, RuntimeError)
        flaky.before.clear()
        assert cluster.receivers[0].resolve(timeout_s=TIMEOUT_S) == "serving"
        assert cluster.receivers[0].check_serving().step == 0
        assert holds(cluster.engines[0], weights(0), 0)  # type: ignore[arg-type]


def test_a_service_that_forgot_the_transaction_means_quarantine() -> None:
    """On the memory store a restarted server answers UNKNOWN."""
    cluster, flaky = flaky_cluster(1)
    with cluster:
        flaky.after["vote"] = 1
        flaky.answers["ask_decision"] = lambda: Facts(Decision.UNKNOWN, Decision.UNKNOWN, "unknown to this service")
        _, second = cluster.refit(1, timeout_s=4.0)
        assert isinstance(second, QuarantinedError)
        assert cluster.receivers[1].state == "quarantined"
        del flaky.answers["ask_decision"]
        if cluster.receivers[0].state == "in_doubt":
            cluster.receivers[0].resolve(timeout_s=TIMEOUT_S)
        cluster.refit_ok(1)


def test_a_lost_answer_to_installed_is_asked_for() -> None:
    cluster, flaky = flaky_cluster(1)
    with cluster:
        flaky.after["installed"] = 1
        flaky.before["ask_decision"] = 2
        cluster.refit_ok(1)
        assert [r.state for r in cluster.receivers] == ["serving", "serving"]


def test_a_no_that_cannot_be_said_still_aborts_the_group() -> None:
    """The service decides when the vote is due."""
    cluster, flaky = flaky_cluster(1)
    with cluster:

        def stage(name: str) -> None:
            if name == "verify":
                assert cluster.all_joined()
                raise RuntimeError("no")

        cluster.receivers[1]._on_stage = stage
        flaky.before["vote"] = 10
        for r in cluster.receivers:
            r.transaction_timeout_s = 3.0
        first, second = cluster.refit(1)
        assert isinstance(second, RuntimeError)
        assert "tp1" in str(first)
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]
        assert cluster.receivers[0].state == "serving"


@pytest.mark.parametrize("call", ["await_version", "get_tables", "renew_lease"])
def test_an_outage_before_the_vote_is_an_error_and_leaves_nothing(call: str) -> None:
    cluster, flaky = flaky_cluster(1)
    with cluster:
        if call == "get_tables":
            cluster.receivers[1].bench.planned = None
        flaky.before[call] = 3 if call == "await_version" else 1  # a question to the rendezvous is asked three times
        _, second = cluster.refit(1, timeout_s=4.0)
        assert isinstance(second, Exception)
        assert cluster.receivers[1].check_serving().step == 0
        assert not cluster.leftovers()
        cluster.refit_ok(1, before=cluster.in_turn)
        assert np.all([holds(cluster.engines[r], weights(1), r) for r in range(2)])  # type: ignore[arg-type]


def test_resolving_waits_no_longer_than_it_may_for_another_threads_refit() -> None:
    with tp_cluster() as cluster:
        receiver = cluster.receivers[0]
        with (
            receiver._turns._lock,
            pytest.raises(RefitTimeoutError, match=r"another thread was still under way after 0\.2 s"),
        ):
            receiver.resolve(timeout_s=0.2)
        assert receiver.resolve(timeout_s=1.0) == "empty"


def test_a_deadline_that_passes_before_the_vote_is_no_doubt() -> None:
    """Nothing was said yet: it is a no, and the old weights serve."""
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))

        def stage(name: str) -> None:
            if name == "vote":
                assert cluster.all_joined()
                threading.Event().wait(1.1)

        cluster.receivers[0]._on_stage = stage
        results = cluster.refit(1, timeout_s=1.0)
        assert isinstance(results[0], RefitTimeoutError), results[0]
        assert "'vote'" in str(results[0])
        assert isinstance(results[1], RefitAborted)
        assert [r.state for r in cluster.receivers] == ["serving"] * 2
        assert [r.check_serving().step for r in cluster.receivers] == [0, 0]
        cluster.receivers[0]._on_stage = None
        cluster.refit_ok(1)


def test_a_vote_that_is_refused_is_no_doubt() -> None:
    """More patterns than a vote may carry: it was not counted, so the group need not wait for its deadline."""
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.receivers[1].allow_unconsumed = tuple(f"n{i}" for i in range(300))
        began = time.monotonic()
        first, second = cluster.refit(0, timeout_s=TIMEOUT_S)
        assert isinstance(second, InvalidRequestError), second
        assert "300" in str(second)
        assert isinstance(first, RefitAborted)
        assert "300" in str(first), "it learns why"
        assert time.monotonic() - began < TIMEOUT_S / 2
        assert [r.state for r in cluster.receivers] == ["empty"] * 2
        cluster.receivers[1].allow_unconsumed = ()
        cluster.refit_ok(0)
