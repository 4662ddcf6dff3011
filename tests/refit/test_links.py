"""Dials: side by side, within one budget; what is given up leaves nothing behind, what was reached is kept."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.refit.clocks import StoppedClock
from tests.refit.cluster import TIMEOUT_S, tp_cluster, tp_engine, weights

from reshard.refit import links as links_module
from reshard.refit.deadline import Deadline
from reshard.refit.errors import HolderLostError, RefitAborted, RefitError
from reshard.refit.links import Links
from reshard.refit.receiver import Receiver
from reshard.refit.retry import RetryPolicy, policy_of
from reshard.refit.settings import RetrySettings
from reshard.refit.settings import retry as retry_of_environment
from reshard.rendezvous import Rendezvous
from reshard.rendezvous.types import SlotRecord
from reshard.transports import open_transport
from reshard.transports.errors import OwnFaultError, PeerError, TransferTimeoutError


class FakePeer:
    failed = ""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self.name = wire, name

    def close(self) -> None:
        self._wire.connected.discard(self.name)


@dataclass
class Wire:
    """A transport that only dials; ``answers`` says how each name does.

    One that is silent is so until its time is up; by ``clock``, if there is one, where it waits for ``others`` first.
    """

    name: str = "wire"
    answers: Mapping[str, object] = field(default_factory=dict)
    clock: StoppedClock | None = None
    others: frozenset[str] = frozenset()
    connected: set[str] = field(default_factory=set)
    dials: list[str] = field(default_factory=list)

    def connect(self, endpoint: bytes, *, timeout_s: float, name: str) -> FakePeer:
        if name in self.connected:
            raise PeerError(f"peer {name!r} is connected already", peer=name)
        self.dials.append(name)
        answer = self.answers.get(name)
        if answer == "silent":
            if self.clock is None:
                threading.Event().wait(timeout_s)
            else:
                end_s = time.monotonic() + TIMEOUT_S
                while not self.connected >= self.others:
                    assert time.monotonic() < end_s, f"only {self.connected} are dialled beside a silent one"
                    time.sleep(0.005)
                self.clock.sleep(timeout_s)
            raise TransferTimeoutError(f"{name} says nothing", peer=name)
        if isinstance(answer, Exception):
            raise answer
        self.connected.add(name)
        return FakePeer(self, name)


def record(slot: str, worker: str = "a" * 32, transport: str = "wire") -> SlotRecord:
    none = np.zeros(0, np.uint64)
    return SlotRecord(
        slot=slot,
        worker_id=worker,
        host="h",
        endpoints={transport: b"here"},
        table_digest=b"d" * 32,
        region_bases=none,
        region_bytes=none.astype(np.int64),
    )


def test_one_silent_holder_costs_neither_the_others_nor_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case T2, and the dead one comes first."""
    clock = StoppedClock(monkeypatch, "reshard.refit.deadline", "reshard.refit.retry")
    wire = Wire(answers={"a": "silent"}, clock=clock, others=frozenset("bc"))
    links = Links(wire, RetryPolicy(2, 0.01))  # type: ignore[arg-type]
    deadline = Deadline(2.0, "a refit")
    with pytest.raises(TransferTimeoutError, match="a says nothing") as caught:
        links.ensure([record(n) for n in "abc"], deadline)
    assert set(links.names()) == {"b", "c"} == wire.connected
    assert caught.value.failures["a"].startswith("failed")
    assert caught.value.failures["b"].startswith("done")
    assert wire.dials.count("a") == 2
    assert deadline.left_s == pytest.approx(1.0), "half of the time is left to read from replicas"


def test_many_silent_holders_do_not_keep_a_healthy_one_from_its_turn() -> None:
    silent = [f"s{i}" for i in range(12)]
    wire = Wire(answers=dict.fromkeys(silent, "silent"))
    links = Links(wire, RetryPolicy(1))  # type: ignore[arg-type]
    with pytest.raises(TransferTimeoutError) as caught:
        links.ensure([record(n) for n in (*silent, "well")], Deadline(3.0, "a refit"))
    assert links.names() == ("well",)
    assert sum(s.startswith("failed") for s in caught.value.failures.values()) == 12


def test_an_error_that_nobody_expected_loses_no_peer() -> None:
    answers: dict[str, object] = {"b": OSError("too many open files")}
    wire = Wire(answers=answers)
    links = Links(wire, RetryPolicy(1))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="too many open files"):
        links.ensure([record(n) for n in "abc"], Deadline(5.0, "a refit"))
    assert set(links.names()) == {"a", "c"} == wire.connected
    answers.clear()
    assert links.ensure([record(n) for n in "abc"], Deadline(5.0, "a refit")) == ("b",)
    links.close()
    assert not wire.connected


def test_want_of_descriptors_here_is_no_holders_fault() -> None:
    wire = Wire(answers={"b": OwnFaultError("24 file descriptors are left, expected at least 25")})
    links = Links(wire)  # type: ignore[arg-type]
    with pytest.raises(OwnFaultError, match="24 file descriptors") as caught:
        links.ensure([record("a"), record("b"), record("c")], Deadline(5.0, "a test"))
    assert caught.value.failures == {}
    assert links.names() == ("a", "c")


def test_a_holder_of_another_transport_is_refused_before_any_peer_is_released() -> None:
    wire = Wire()
    links = Links(wire)  # type: ignore[arg-type]
    links.ensure([record("a")], Deadline(5.0, "a refit"))
    named = r"holder 'c' offers transports \['other'\], this receiver uses '.*open both sides' transports by one name"
    with pytest.raises(RefitError, match=named):
        links.ensure([record("b"), record("c", transport="other")], Deadline(5.0, "a refit"))
    assert links.names() == ("a",)


def test_two_receivers_on_one_transport_are_told_apart() -> None:
    wire = Wire()
    one, two = Links(wire), Links(wire)  # type: ignore[arg-type]
    one.ensure([record("a")], Deadline(5.0, "a refit"))
    with pytest.raises(RefitError, match=r"holder 'a' .*another receiver.*a transport of its own"):
        two.ensure([record("a"), record("b")], Deadline(5.0, "a refit"))
    assert wire.dials == ["a"], "refused before anything was dialled"
    one.close()
    assert two.ensure([record("a")], Deadline(5.0, "a refit")) == ("a",)
    assert Links(Wire()).ensure([record("a")], Deadline(5.0, "a refit")) == ("a",)  # type: ignore[arg-type]


def test_a_second_receiver_on_a_transport_keeps_what_it_serves() -> None:
    """Case: two groups in one process that were given one transport."""
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        late = Receiver(
            cluster.receiver_transports[0],
            cluster.rendezvous,
            tp_engine(0),
            model="m",
            group="other",
            members=["x"],
            member="x",
            allow_unconsumed=["*"],
        )
        with pytest.raises(RefitError, match="a transport of its own"):
            late.refit(0, timeout_s=10.0)
        late.close()
        cluster.publish(1, weights(1))
        cluster.refit_ok(1)
        assert not cluster.leftovers()


def test_another_worker_at_the_same_endpoint_is_dialled_anew() -> None:
    """A process that registered again may have lost what it served."""
    wire = Wire()
    links = Links(wire)  # type: ignore[arg-type]
    assert links.ensure([record("a")], Deadline(5.0, "a refit")) == ("a",)
    assert links.ensure([record("a")], Deadline(5.0, "a refit")) == ()
    assert links.ensure([record("a", worker="b" * 32)], Deadline(5.0, "a refit")) == ("a",)
    assert wire.dials == ["a", "a"]
    assert wire.connected == {"a"}


def test_a_holder_given_up_is_left_with_nothing_behind() -> None:
    with tp_cluster(receiver_settings={"retry": RetryPolicy(1)}) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.trainer_transports[1].close()
        both = threading.Barrier(2, timeout=TIMEOUT_S)  # one that came after the abort would only be told of it
        for receiver in cluster.receivers:
            receiver._on_stage = lambda stage: both.wait() if stage == "connect" else None
        assert all(isinstance(e, HolderLostError | RefitAborted) for e in cluster.refit(0))
        for receiver in cluster.receivers:
            assert "trainer-1" not in receiver.reader.links.names()
        assert not cluster.leftovers()


def test_no_try_begins_after_the_policys_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoppedClock(monkeypatch, "reshard.refit.deadline", "reshard.refit.retry")
    began: list[float] = []

    def call(left_s: float) -> None:
        began.append(clock.now_s - 1000.0)
        clock.sleep(0.05)
        raise PeerError("no", peer="x")

    with pytest.raises(PeerError):
        RetryPolicy(100, 0.01, 2.0, deadline_s=0.15).run(call, PeerError, Deadline(30.0, "a dial"), "connect")
    assert began == pytest.approx([0.0, 0.06, 0.13]), "the next one would begin after 0.22 s"


def test_the_policy_is_the_callers_then_the_environments_then_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    suggested = RetryPolicy(7, 0.5, 3.0, 4.0, 60.0)
    assert policy_of(RetrySettings(), None) == RetryPolicy()
    assert policy_of(RetrySettings(), suggested) == suggested
    monkeypatch.setenv("RESHARD_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("RESHARD_RETRY_DEADLINE_S", "9")
    assert policy_of(retry_of_environment(), suggested) == RetryPolicy(2, 0.5, 3.0, 4.0, 9.0)
    for name, text in (("ATTEMPTS", "1.5"), ("ATTEMPTS", "0"), ("FACTOR", "0.5"), ("BACKOFF_S", "soon")):
        with monkeypatch.context() as inner:
            inner.setenv(f"RESHARD_RETRY_{name}", text)
            with pytest.raises(ValueError, match=f"RESHARD_RETRY_{name}"):
                retry_of_environment()


def test_a_receiver_takes_the_policy_that_the_service_suggests() -> None:
    with tp_cluster() as cluster:
        receiver, given = cluster.receivers[0], cluster.receiver(1, retry=RetryPolicy(9))
        register = cluster.rendezvous.register

        def suggesting(*args: object, **kwargs: object) -> object:
            worker = register(*args, **kwargs)  # type: ignore[arg-type]

            class Suggesting:
                retry_hint = RetryPolicy(5, 0.25)

                def __getattr__(self, name: str) -> object:
                    return getattr(worker, name)

            return Suggesting()

        cluster.rendezvous.register = suggesting  # type: ignore[method-assign, assignment]
        try:
            receiver.worker()
            given.worker()
        finally:
            cluster.rendezvous.register = register  # type: ignore[method-assign]
        assert receiver.retry == RetryPolicy(5, 0.25) == receiver.reader.links.retry
        assert given.retry == RetryPolicy(9) == given.reader.links.retry
        given.close()


def test_the_suggestion_travels_from_a_real_service() -> None:
    pytest.importorskip("grpc", reason="the rendezvous service needs grpcio")
    from reshard.rendezvous.retries import RetryHint
    from reshard.rendezvous.service import serve

    hint = RetryHint(attempts=4, backoff_s=0.125, factor=1.5, max_backoff_s=1.0, deadline_s=20.0)
    with serve(listen="127.0.0.1:0", retry_hint=hint) as server, tp_cluster() as cluster:
        client = Rendezvous.connect(server.address)
        receiver = cluster.receiver(0)
        receiver.rendezvous = client
        receiver.worker()
        assert receiver.retry == RetryPolicy(4, 0.125, 1.5, 1.0, 20.0) == receiver.reader.links.retry
        receiver.close()
        client.close()


@pytest.mark.parametrize("name", ["backoff_s", "factor", "max_backoff_s", "deadline_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_retry_policy_is_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"retry\.{name}: (expected a finite number, got|-1 lies outside)"):
        RetryPolicy(**{name: value})  # type: ignore[arg-type]


def test_an_interrupted_caller_leaves_no_peer_that_nobody_knows() -> None:
    interrupted = threading.Event()

    class Slow(Wire):
        def connect(self, endpoint: bytes, *, timeout_s: float, name: str) -> FakePeer:
            if name == "slow":
                os.kill(os.getpid(), signal.SIGINT)
                assert interrupted.wait(TIMEOUT_S), "the main thread was not interrupted while it waited"
            return super().connect(endpoint, timeout_s=timeout_s, name=name)

    def interrupt(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    wire = Slow()
    links = Links(wire)  # type: ignore[arg-type]
    records = [record("fast"), record("slow")]
    before = signal.signal(signal.SIGINT, interrupt)  # a run in the background inherits that it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            links.ensure(records, Deadline(10.0, "test"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert wire.connected == set(links.names()) == {"fast", "slow"}
    assert links.ensure(records, Deadline(10.0, "test")) == ()
    links.close()
    assert not wire.connected


def test_a_receiver_may_be_made_while_another_one_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread of a group makes its own, and all look at who is connected on their transport."""

    class Interrupted(weakref.WeakSet[Links]):
        """Has another thread come between two steps of whoever looks through it."""

        def __iter__(self) -> Iterator[Links]:
            for found in super().__iter__():
                thread = threading.Thread(target=lambda: made.append(Links(transport)))
                thread.start()
                thread.join(0.05)
                yield found

    made: list[Links] = []
    with open_transport("memory") as transport:
        monkeypatch.setattr(links_module, "_ALL", Interrupted())
        first, second = Links(transport), Links(transport)
        first._require_free(["a holder"])
        second.close()
        first.close()
