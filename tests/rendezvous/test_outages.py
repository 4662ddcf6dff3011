"""What does a caller see while the service is away, and after it came back?"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.ports import lasting_port
from tests.rendezvous.conftest import START_S, RedisServer, mortal
from tests.rendezvous.support import MODEL, publish, receiver, trainer, wait

from reshard.rendezvous.client import Rendezvous
from reshard.rendezvous.errors import (
    InvalidRequestError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
)
from reshard.rendezvous.faults import error_from_detail
from reshard.rendezvous.link import Link
from reshard.rendezvous.optional import pb
from reshard.rendezvous.service import Server, serve
from reshard.rendezvous.types import Decision

pytest.importorskip("grpc", reason="grpcio is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_an_outage_is_an_error_and_within_the_deadline() -> None:
    with Rendezvous.connect("127.0.0.1:1") as client:
        for call in (
            lambda: client.describe(timeout_s=1.5),
            lambda: client.get_tables([b"\0" * 32], timeout_s=1.5),
            lambda: client.open_epoch(MODEL, "run", timeout_s=1.5),
            lambda: list(client.watch_versions(MODEL, timeout_s=1.5)),
        ):
            started = time.monotonic()
            with pytest.raises(RendezvousUnavailableError, match=r"127\.0\.0\.1:1"):
                call()
            assert time.monotonic() - started < 30.0


def test_an_outage_that_the_deadline_cuts_short_stays_an_outage() -> None:
    """The last attempt is under way at the deadline: what it could not hear does not hide why there were others."""

    async def attempts(*failures: Exception) -> None:
        link, left = Link("127.0.0.1:1", None, None), iter(failures)

        async def call(left_s: float) -> None:
            raise next(left)

        try:
            await link.retry("Describe", call, 5.0)
        finally:
            await link.close()

    outage, silence = RendezvousUnavailableError("refused"), RendezvousTimeoutError("no answer")
    said = RendezvousTimeoutError("2 of 3 slots", missing_slots=("t2",), waited_s=0.2)
    with pytest.raises(RendezvousUnavailableError, match="refused"):
        asyncio.run(attempts(outage, silence))
    with pytest.raises(RendezvousTimeoutError, match="2 of 3"):
        asyncio.run(attempts(outage, said))
    with pytest.raises(RendezvousTimeoutError, match="no answer"):
        asyncio.run(attempts(silence))


def test_errors_of_a_later_version_are_of_the_tree() -> None:
    error = error_from_detail(pb.Error(kind=99, message="something new").SerializeToString())
    assert (type(error), str(error)) == (RendezvousError, "something new")
    with pytest.raises(InvalidRequestError, match="are no Error"):
        error_from_detail(b"\xff\xff")


def test_calls_wait_out_a_server_that_comes_late() -> None:
    address = f"127.0.0.1:{lasting_port()}"
    servers: list[Server] = []
    timer = threading.Timer(0.5, lambda: servers.append(serve(listen=address)))
    timer.start()
    try:
        with Rendezvous.connect(address) as client:
            assert client.open_epoch(MODEL, "run", timeout_s=60.0) == 0
    finally:
        timer.join()
        for server in servers:
            server.close(1.0)


def test_a_restarted_memory_server_says_unknown() -> None:
    """REFIT.md: a member in doubt then quarantines."""
    address = f"127.0.0.1:{lasting_port()}"
    server = serve(listen=address)
    try:
        with Rendezvous.connect(address) as client:
            worker = trainer(client, "t0", ttl_s=15.0)
            publish(client, 1, {"t0": worker})
            txn = wait(client, "r0", receiver(client, "r0")).transaction
            server.close(0.5)
            server = serve(listen=address)
            facts = client.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
            assert facts.decision is Decision.UNKNOWN
            assert client.ask_decision(txn).decision is Decision.UNKNOWN
            assert client.installed(txn, "r0", True, timeout_s=30.0).outcome is Decision.UNKNOWN
            deadline = time.monotonic() + 60.0
            while not worker.lost and time.monotonic() < deadline:
                time.sleep(0.05)
            assert worker.lost, "the service does not know it any more"
    finally:
        server.close(0.5)


def test_what_went_during_an_outage_is_told_after_it() -> None:
    address = f"127.0.0.1:{lasting_port()}"
    server = serve(listen=address)
    try:
        with Rendezvous.connect(address) as client:
            publish(client, 1, {"t0": trainer(client, "t0")})
            events = client.watch_versions(MODEL, timeout_s=60.0)
            first = next(events)
            assert (first.key.step, first.offered) == (1, True)
            server.close(0.5)
            server = serve(listen=address)
            again = next(events)
            assert (again.uid, again.offered) == (first.uid, False)
            publish(client, 2, {"t0": trainer(client, "t0")})
            assert next(events).key.step == 2
            events.close()
    finally:
        server.close(0.5)


@pytest.mark.redis
def test_r8_a_member_in_doubt_learns_the_one_decision(redis_process: RedisServer, redis_url: str) -> None:
    """The server dies before a member hears, and comes back: the decision is the one that was recorded."""
    address = f"127.0.0.1:{lasting_port()}"
    server = ServerProcess(address, redis_url)
    try:
        with Rendezvous.connect(address) as client, Rendezvous.connect(address) as other:
            publish(client, 1, {"t0": trainer(client, "t0", ttl_s=300.0)})
            txn = wait(client, "r0", receiver(client, "r0", ttl_s=300.0)).transaction
            wait(other, "r1", receiver(other, "r1", ttl_s=300.0))
            answers: list[object] = []

            def vote_first() -> None:
                try:
                    answers.append(client.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=6.0))
                except (RendezvousTimeoutError, RendezvousUnavailableError) as error:
                    answers.append(error)

            thread = threading.Thread(target=vote_first)
            thread.start()
            deadline = time.monotonic() + 60.0
            while other.describe().transactions[0].voted != ("r0",):
                assert time.monotonic() < deadline, answers
                time.sleep(0.02)
            server.kill()
            thread.join(60.0)
            assert isinstance(answers[0], RendezvousUnavailableError | RendezvousTimeoutError), "in doubt"
            server.start()
            assert client.ask_decision(txn, timeout_s=60.0).decision is Decision.PENDING
            assert other.vote(txn, "r1", True, wire_bytes=0, timeout_s=60.0).decision is Decision.COMMIT
            server.kill()
            redis_process.kill()
            redis_process.start()
            server.start()
            assert client.ask_decision(txn, timeout_s=60.0).decision is Decision.COMMIT
            done = threading.Thread(target=client.installed, args=(txn, "r0", True), kwargs={"timeout_s": 60.0})
            done.start()
            assert other.installed(txn, "r1", True, timeout_s=60.0).outcome is Decision.SERVE
            done.join(60.0)
    finally:
        server.kill()


class ServerProcess:
    """``serve`` in a process of its own, that can be killed."""

    def __init__(self, address: str, store: str) -> None:
        self._code = f"from reshard.rendezvous.service import serve; serve({address!r}, store={store!r}).wait()"
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self._process = subprocess.Popen([*mortal(), sys.executable, "-c", self._code], env=env)
        host, _, port = self._address.rpartition(":")
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host, int(port)), 0.2).close()
                return
            except OSError:
                assert self._process.poll() is None, "the server ended at once"
                time.sleep(0.02)
        raise AssertionError("the server did not bind in time")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10.0)
            self._process = None
