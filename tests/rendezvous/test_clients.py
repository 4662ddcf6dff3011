"""What callers rely on beside the flow of a refit: who leaves is heard of, heartbeats reconnect, errors are typed."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ports import lasting_port
from tests.rendezvous.support import MODEL, make_part, make_record, publish, receiver, trainer, wait

from reshard.rendezvous import limits
from reshard.rendezvous.aio import AsyncRendezvous
from reshard.rendezvous.backend import LocalBackend
from reshard.rendezvous.client import Rendezvous
from reshard.rendezvous.errors import (
    EqualityError,
    InvalidRequestError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
    WorkerLostError,
)
from reshard.rendezvous.flights import Flights
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.types import Decision, Lease, VersionKey, WorkerInfo

LONG_S = 300.0  # a TTL that no test waits for: who hears of a loss before has been told


def test_a_slot_whose_worker_leaves_is_told_at_once(rdv: Rendezvous) -> None:
    stays, leaves = trainer(rdv, "t0", ttl_s=LONG_S), trainer(rdv, "t1", ttl_s=LONG_S)
    seen: list[tuple[int, bool]] = []
    offered = threading.Event()

    def listen() -> None:
        for event in rdv.watch_versions(MODEL, timeout_s=30.0):
            seen.append((event.key.step, event.offered))
            offered.set()
            if not event.offered:
                return

    thread = threading.Thread(target=listen)
    thread.start()
    publish(rdv, 1, {"t0": stays, "t1": leaves})
    assert offered.wait(30.0)
    leaves.close()
    thread.join(40.0)
    assert seen == [(1, True), (1, False)]


def test_a_vote_is_answered_at_once_when_a_member_leaves(rdv: Rendezvous) -> None:
    publish(rdv, 1, {"t0": trainer(rdv, "t0", ttl_s=LONG_S)})
    good, bad = receiver(rdv, "r0", ttl_s=LONG_S), receiver(rdv, "r1", ttl_s=LONG_S)
    txn = wait(rdv, "r0", good).transaction
    wait(rdv, "r1", bad)
    leaving = threading.Timer(0.3, bad.close)
    leaving.start()
    facts = rdv.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=60.0)
    leaving.join()
    assert facts.decision is Decision.ABORT
    assert "'r1' is lost" in facts.reason


def test_a_refused_version_goes_on_saying_why(rdv: Rendezvous) -> None:
    workers = {"t0": trainer(rdv, "t0"), "t1": trainer(rdv, "t1")}
    uid = rdv.open_version(VersionKey(MODEL, 0, 1), list(workers))
    for i, (slot, worker) in enumerate(workers.items()):
        record = make_record(slot, worker.id, rdv.put_table(make_part(slot)), roots={"replicas": bytes([i]) * 32})
        if i:
            with pytest.raises(EqualityError):
                rdv.publish_slot(uid, record, worker)
        else:
            rdv.publish_slot(uid, record, worker)
    rdv.close_admission(uid)
    with pytest.raises(EqualityError) as caught:
        wait(rdv, "r0", receiver(rdv, "r0"), want=1, timeout_s=30.0)
    assert caught.value.holders == ("t0", "t1")


class BreakingBackend(LocalBackend):
    """Its heartbeat streams break after one beat each."""

    def __init__(self) -> None:
        super().__init__()
        self.n_streams = 0

    async def heartbeat(self, worker_id: str, every_s: float, on_sent: Callable[[float], None]) -> None:
        self.n_streams += 1
        sent_s = time.monotonic()
        await self._broker.beat(worker_id)
        on_sent(sent_s)
        raise RendezvousUnavailableError("the stream broke")


def test_a_heartbeat_outlives_its_streams() -> None:
    async def live() -> None:
        backend = BreakingBackend()
        client = AsyncRendezvous(backend)
        worker = await client.register(WorkerInfo("trainer", MODEL, "host", "t0"), ttl_s=6.0)
        await asyncio.sleep(7.0)  # longer than that: it lives by beats of several streams
        assert not worker.lost
        assert [row.lost for row in (await client.describe()).workers] == [False]
        assert backend.n_streams > 2
        await client.close()

    asyncio.run(live())


@pytest.mark.parametrize("act", ["publish", "wait"])
def test_a_worker_that_a_call_says_is_unknown_is_lost_at_once(rdv: Rendezvous, act: str) -> None:
    """A store that was emptied forgot it. To register anew nobody waits for its next beat, a third of the TTL away."""
    worker = trainer(rdv, "t0", ttl_s=LONG_S) if act == "publish" else receiver(rdv, "r0", ttl_s=LONG_S)
    beating = worker._worker._task

    async def forget() -> None:
        beating.cancel()  # its first beat would hear of it, too
        await asyncio.gather(beating, return_exceptions=True)
        await rdv._client.backend.unregister(worker.id, 30.0)

    rdv._thread.call(forget())
    assert not worker.lost
    with pytest.raises(WorkerLostError, match=worker.id):
        publish(rdv, 1, {"t0": worker}) if act == "publish" else wait(rdv, "r0", worker)
    assert worker.lost


@pytest.mark.redis
def test_a_worker_outlives_a_restart_of_its_server(redis_url: str) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed")
    from reshard.rendezvous.service import serve

    server = serve(f"127.0.0.1:{lasting_port()}", store=redis_url)
    with Rendezvous.connect(server.address) as client:
        worker = trainer(client, "t0", ttl_s=15.0)
        server.close(0.0)
        with serve(server.address, store=redis_url):
            back_s = time.monotonic()
            beating = worker._worker
            while beating._alive_until_s - beating.ttl_s < back_s:  # until a beat since then was acknowledged
                assert not worker.lost
                time.sleep(0.05)
            assert [row.lost for row in client.describe().workers] == [False]


def test_a_closed_client_says_so(rdv: Rendezvous) -> None:
    worker = receiver(rdv, "r0")
    rdv.close()
    for call in (
        rdv.describe,
        lambda: rdv.open_epoch(MODEL, "run"),
        lambda: receiver(rdv, "r1"),
        lambda: list(rdv.watch_versions(MODEL, timeout_s=1.0)),
        lambda: rdv.get_tables([b"\0" * 32]),
    ):
        with pytest.raises(RendezvousError, match="this client is closed"):
            call()
    worker.close()
    rdv.close()


def test_a_lease_counts_from_its_grant(rdv: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a receiver downloads after the grant is the lease's time."""
    backend: Any = rdv._client.backend
    if isinstance(backend, LocalBackend):
        pytest.skip("without a server nothing is downloaded")
    fetch = backend._get_topology

    async def slowly(*args: object) -> object:
        await asyncio.sleep(1.0)
        return await fetch(*args)

    monkeypatch.setattr(backend, "_get_topology", slowly)
    publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    lease = wait(rdv, "r0", receiver(rdv, "r0"), lease_ttl_s=20.0).lease
    assert lease.remaining_s(time.monotonic()) <= 19.0


@pytest.mark.parametrize("hint", [None, RetryHint(7, 0.25, 3.0, 4.0, 30.0)])
def test_the_service_suggests_a_retry_policy(hint: RetryHint | None) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed")
    from reshard.rendezvous.service import serve

    with serve(retry_hint=hint) as server, Rendezvous.connect(server.address) as client:
        assert receiver(client, "r0").retry_hint == hint


def test_without_a_server_no_retry_policy_is_suggested() -> None:
    with Rendezvous.in_process() as client:
        assert receiver(client, "r0").retry_hint is None


@given(
    st.builds(
        RetryHint,
        st.integers(1, 1000),
        st.floats(0, 3600),
        st.floats(1, 100),
        st.floats(0, 3600),
        st.floats(0, 86400),
    )
)
def test_a_retry_policy_is_read_as_it_is_written(hint: RetryHint) -> None:
    assert RetryHint.parse(",".join(f"{name}={value!r}" for name, value in dataclasses.asdict(hint).items())) == hint


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "retry"),
        ("5", "retry"),
        ("tries=5", "retry"),
        ("attempts=5,attempts=6", "retry"),
        ("attempts=five", "retry.attempts"),
        ("attempts=0", "retry.attempts"),
        ("backoff_s=-1", "retry.backoff_s"),
        ("backoff_s=nan", "retry.backoff_s"),
        ("factor=0.5", "retry.factor"),
        ("deadline_s=inf", "retry.deadline_s"),
    ],
)
def test_a_retry_policy_that_makes_no_sense_names_its_field(text: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RetryHint.parse(text)
    assert caught.value.field == field


def test_arguments_of_other_types_are_named(rdv: Rendezvous) -> None:
    worker: Any = receiver(rdv, "r0")
    record = make_record("t0", worker.id, rdv.put_table(make_part("t0")))
    calls: list[tuple[str, Callable[..., object]]] = [
        ("slots", lambda bad: rdv.open_version(VersionKey(MODEL, 0, 1), "abc")),
        ("key", lambda bad: rdv.open_version(bad, ["t0"])),
        ("info", lambda bad: rdv.register(bad)),
        ("record", lambda bad: rdv.publish_slot("0" * 32, bad, worker)),
        ("worker", lambda bad: rdv.publish_slot("0" * 32, record, bad)),
        ("lease", lambda bad: rdv.renew_lease(bad)),
        ("lease", lambda bad: rdv.release_lease(bad)),
        ("after", lambda bad: wait(rdv, "r0", worker, after=bad)),
        ("members", lambda bad: wait(rdv, "r", worker, "r0")),  # type: ignore[arg-type]
        ("layout_epoch", lambda bad: rdv.get_cuts(MODEL, layout_epoch=bad)),
    ]
    for field, call in calls:
        for bad in (("qwen", 0, 1), "x", 3.5):
            with pytest.raises(InvalidRequestError) as caught:
                call(bad)
            assert caught.value.field == field


@pytest.mark.parametrize("layout_epoch", [-1, 2**70, True])
def test_layout_epochs_are_bounded(rdv: Rendezvous, layout_epoch: int) -> None:
    with pytest.raises(InvalidRequestError, match="layout_epoch"):
        rdv.get_cuts(MODEL, layout_epoch=layout_epoch)


def test_consumed_names_are_no_single_text(rdv: Rendezvous) -> None:
    publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    found = wait(rdv, "r0", receiver(rdv, "r0"), ("r0",))
    for extra in ({"names_consumed": "w"}, {"names_consumed": ["w"], "allow_unconsumed": "visual.*"}):
        with pytest.raises(InvalidRequestError, match="expected a sequence of names, got '"):
            rdv.vote(found.transaction, "r0", True, wire_bytes=1, timeout_s=5.0, **extra)  # type: ignore[arg-type]


def test_what_a_worker_and_a_slot_say_is_bounded_in_all() -> None:
    one = bytes(limits.MAX_ENDPOINT_BYTES)
    with pytest.raises(InvalidRequestError, match=r"worker\.endpoints: \d+ bytes in all"):
        WorkerInfo("trainer", MODEL, "host", "t0", {"a": one, "b": one, "c": one})
    WorkerInfo("trainer", MODEL, "host", "t0", {"a": one, "b": one})
    names = {f"{i}" + "n" * 4000: bytes(32) for i in range(140)}
    with pytest.raises(InvalidRequestError, match=r"record\.roots: \d+ bytes in all"):
        make_record("t0", "0" * 32, bytes(32), roots=names)


def test_every_bound_is_used() -> None:
    """A bound that nobody asks bounds nothing."""
    folder = Path(limits.__file__).parent
    code = "\n".join(path.read_text() for path in folder.glob("*.py") if path.name != "limits.py")
    inside = (folder / "limits.py").read_text()
    for name in limits.__all__:
        within = len(re.findall(rf"\b{name}\b", inside)) > 2  # beside its definition and __all__
        assert within or re.search(rf"\blimits\.{name}\b", code), name


def test_lease_objects_are_checked() -> None:
    with pytest.raises(InvalidRequestError, match=r"lease\.id"):
        Lease("not hex", "0" * 32, 5.0)


def test_one_fetch_serves_all_and_none_inherits_anothers_deadline() -> None:
    async def fly() -> None:
        flights: Flights[str, int] = Flights()
        started = 0
        release = asyncio.Event()

        async def work(left_s: float) -> int:
            nonlocal started
            started += 1
            try:
                async with asyncio.timeout(left_s):
                    await release.wait()
            except TimeoutError:
                raise RendezvousTimeoutError("work: its deadline passed") from None
            return started

        def join(seconds: float) -> asyncio.Task[int]:
            return asyncio.create_task(flights.join("work", "key", work, time.monotonic() + seconds))

        patient, hasty = join(60.0), join(0.2)
        with pytest.raises(RendezvousTimeoutError, match="not done within"):
            await hasty
        assert started == 1
        release.set()
        assert await patient == 1

        release.clear()
        hasty = join(2.0)
        while started < 2:
            assert not hasty.done()
            await asyncio.sleep(0)
        patient = join(60.0)
        with pytest.raises(RendezvousTimeoutError):
            await hasty
        await asyncio.sleep(0.05)
        release.set()
        assert await patient == 3, "the first one's work ended by its deadline, and was begun again"

    asyncio.run(fly())
