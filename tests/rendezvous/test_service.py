"""The service around the calls: who may bind and call, health, reflection, metrics, logs, shutdown, reconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rendezvous.conftest import RedisServer, free_port, mortal
from tests.rendezvous.support import MODEL, make_part, make_record, publish, receiver, trainer, wait

from reshard.planner.errors import MissingDependencyError
from reshard.rendezvous import state
from reshard.rendezvous.aio import AsyncRendezvous
from reshard.rendezvous.client import Rendezvous
from reshard.rendezvous.errors import (
    AuthenticationError,
    InvalidRequestError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
)
from reshard.rendezvous.exposure import is_loopback
from reshard.rendezvous.faults import error_from_detail
from reshard.rendezvous.link import Link
from reshard.rendezvous.optional import pb
from reshard.rendezvous.records import model_key
from reshard.rendezvous.service import Server, serve
from reshard.rendezvous.types import Decision, TLSFiles, VersionKey, WorkerInfo

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("listen", "extra", "lacks"),
    [
        ("0.0.0.0:0", {}, "lacks TLS .* and a client CA or a token"),
        ("[::]:0", {}, "lacks TLS"),
        ("node-3:0", {}, "lacks TLS"),
        ("0.0.0.0:0", {"token_file": "t"}, "lacks TLS"),
        ("0.0.0.0:0", {"tls_cert": "c", "tls_key": "k"}, "lacks a client CA or a token"),
        ("127.0.0.1:0", {"tls_cert": "c"}, "tls_key: .*go together"),
        ("127.0.0.1:0", {"client_ca": "c"}, "client_ca: .*needs"),
        ("127.0.0.1", {}, "no host:port"),
        ("127.0.0.1:70000", {}, "no host:port"),
        ("::1:0", {}, "in brackets"),
    ],
)
def test_binds_that_are_refused(listen: str, extra: dict[str, str], lacks: str) -> None:
    with pytest.raises(InvalidRequestError, match=lacks):
        serve(listen=listen, **extra)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("[::]", False), ("10.0.0.1", False), ("localhost.evil.example", False), ("", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_told_to_be_insecure_it_binds() -> None:
    with serve(listen="0.0.0.0:0", insecure=True) as server:
        port = server.address.rpartition(":")[2]
        with Rendezvous.connect(f"127.0.0.1:{port}") as client:
            assert client.describe().store == "memory"


def test_a_taken_port_and_unknown_stores_are_named() -> None:
    with serve() as server, pytest.raises(RendezvousUnavailableError, match="cannot bind"):
        serve(listen=server.address)
    with pytest.raises(RendezvousError, match="unknown store 'etcd'"):
        serve(store="etcd")
    with pytest.raises(RendezvousUnavailableError, match="the store is not reached"):
        serve(store="redis://127.0.0.1:1/0")


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("first\nsecond\n")
    with serve(token_file=str(file)) as server:
        for token in ("first", "second"):
            with Rendezvous.connect(server.address, token=token) as client:
                client.describe()
        for token, fault in ((None, "no bearer token"), ("third", "not one that this service knows"), ("", "no")):
            with (
                Rendezvous.connect(server.address, token=token) as client,
                pytest.raises(AuthenticationError, match=fault),
            ):
                client.describe()
        file.write_text("third\n")
        time.sleep(1.2)
        with Rendezvous.connect(server.address, token="third") as client:
            client.describe()
        with Rendezvous.connect(server.address, token="first") as client, pytest.raises(AuthenticationError):
            client.describe()
    file.write_text("\n")
    with pytest.raises(RendezvousError, match="holds no token"):
        serve(token_file=str(file))


def test_tls_and_mutual_tls(certificates: Path) -> None:
    def path(name: str) -> str:
        return str(certificates / name)

    with serve(tls_cert=path("server.pem"), tls_key=path("server.key")) as server:
        with Rendezvous.connect(server.address, tls=TLSFiles(ca=path("ca.pem"))) as client:
            client.describe()
        with (
            Rendezvous.connect(server.address, tls=TLSFiles(ca=path("stranger.pem"))) as client,
            pytest.raises(RendezvousUnavailableError),
        ):
            client.describe(timeout_s=2.0)
        with Rendezvous.connect(server.address) as client, pytest.raises(RendezvousUnavailableError):
            client.describe(timeout_s=2.0)
    settings = {"tls_cert": path("server.pem"), "tls_key": path("server.key"), "client_ca": path("ca.pem")}
    with serve(listen="0.0.0.0:0", **settings) as server:  # type: ignore[arg-type]
        address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
        pair = TLSFiles(path("ca.pem"), path("client.pem"), path("client.key"))
        with Rendezvous.connect(address, tls=pair) as client:
            client.describe()
        with (
            Rendezvous.connect(address, tls=TLSFiles(ca=path("ca.pem"))) as client,
            pytest.raises(RendezvousUnavailableError),
        ):
            client.describe(timeout_s=2.0)
    with pytest.raises(RendezvousError, match="cannot read"):
        serve(tls_cert=path("none.pem"), tls_key=path("server.key"))
    with pytest.raises(RendezvousError, match="holds no PEM"):
        serve(tls_cert=path("ext"), tls_key=path("server.key"))
    with pytest.raises(InvalidRequestError, match="cert and key go together"):
        Rendezvous.connect("127.0.0.1:1", tls=TLSFiles(cert=path("client.pem")))


def test_health_and_reflection() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    server = serve()
    try:
        with grpc.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "reshard.proto.v1.RendezvousService"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=10)
            listed = {service.name for service in answer.list_services_response.service}
            assert "reshard.proto.v1.RendezvousService" in listed
            symbol = "reshard.proto.v1.RendezvousService"
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
            (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=10)
            assert answer.file_descriptor_response.file_descriptor_proto
    finally:
        server.close(1.0)


def test_metrics_and_access_log(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    caplog.set_level(logging.INFO, "reshard.rendezvous.access")
    with serve(metrics_listen="127.0.0.1:0") as server, Rendezvous.connect(server.address) as client:
        client.open_epoch(MODEL, "run")
        with pytest.raises(InvalidRequestError):
            client._thread.call(client._client.backend.open_epoch("", "run", 5.0))
        # a call is counted right after its answer was sent
        calls = 'reshard_rendezvous_calls_total{code="%s",method="OpenEpoch"} 1.0'
        text, deadline = "", time.monotonic() + 10.0
        while calls % "INVALID_ARGUMENT" not in text and time.monotonic() < deadline:
            with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as response:
                text = response.read().decode()
    assert calls % "OK" in text
    assert calls % "INVALID_ARGUMENT" in text
    assert 'reshard_rendezvous_call_seconds_count{method="OpenEpoch"} 2.0' in text
    lines = [json.loads(record.message) for record in caplog.records if record.name == "reshard.rendezvous.access"]
    lines = [line for line in lines if line["method"] == "OpenEpoch"]
    assert [line["code"] for line in lines] == ["OK", "INVALID_ARGUMENT"]
    assert lines[1]["error"] == "model: empty name"
    assert all(line["in"] > 0 and line["ms"] >= 0 and line["peer"] for line in lines)


def test_a_closing_server_ends_waits_at_once() -> None:
    server = serve()
    client = Rendezvous.connect(server.address)
    try:
        reader = receiver(client, "r0")
        failures: list[BaseException] = []

        def await_it() -> None:
            try:
                wait(client, "r0", reader, timeout_s=3.0)
            except RendezvousError as error:
                failures.append(error)

        thread = threading.Thread(target=await_it)
        thread.start()
        time.sleep(0.5)
        started = time.monotonic()
        server.close(grace_s=60.0)
        assert time.monotonic() - started < 30.0, "the wait had a grace of 60 s, and is ended at once"
        assert server.wait(0.1)
        server.close()
        thread.join(60.0)
        assert [type(failure) for failure in failures] == [RendezvousUnavailableError]
    finally:
        client.close()
        server.close()


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
            assert time.monotonic() - started < 15.0


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


def test_a_token_in_plain_text_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for address, warned in (("127.0.0.1:1", 0), ("node-3.example:1", 1)):
        caplog.clear()
        Rendezvous.connect(address, token="secret").close()
        said = [record.getMessage() for record in caplog.records if "plain text" in record.getMessage()]
        assert len(said) == warned
        assert not any("secret" in text for text in said)


def test_errors_of_a_later_version_are_of_the_tree() -> None:
    error = error_from_detail(pb.Error(kind=99, message="something new").SerializeToString())
    assert (type(error), str(error)) == (RendezvousError, "something new")
    with pytest.raises(InvalidRequestError, match="are no Error"):
        error_from_detail(b"\xff\xff")


def test_calls_wait_out_a_server_that_comes_late() -> None:
    address = f"127.0.0.1:{free_port()}"
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
    address = f"127.0.0.1:{free_port()}"
    server = serve(listen=address)
    try:
        with Rendezvous.connect(address) as client:
            worker = trainer(client, "t0", ttl_s=9.0)
            publish(client, 1, {"t0": worker})
            txn = wait(client, "r0", receiver(client, "r0")).transaction
            server.close(0.5)
            server = serve(listen=address)
            facts = client.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
            assert facts.decision is Decision.UNKNOWN
            assert client.ask_decision(txn).decision is Decision.UNKNOWN
            assert client.installed(txn, "r0", True, timeout_s=30.0).outcome is Decision.UNKNOWN
            deadline = time.monotonic() + 40.0
            while not worker.lost and time.monotonic() < deadline:
                time.sleep(0.05)
            assert worker.lost, "the service does not know it any more"
    finally:
        server.close(0.5)


def test_what_went_during_an_outage_is_told_after_it() -> None:
    address = f"127.0.0.1:{free_port()}"
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
    address = f"127.0.0.1:{free_port()}"
    server = ServerProcess(address, redis_url)
    try:
        with Rendezvous.connect(address) as client, Rendezvous.connect(address) as other:
            publish(client, 1, {"t0": trainer(client, "t0", ttl_s=60.0)})
            txn = wait(client, "r0", receiver(client, "r0", ttl_s=60.0)).transaction
            wait(other, "r1", receiver(other, "r1", ttl_s=60.0))
            answers: list[object] = []

            def vote_first() -> None:
                try:
                    answers.append(client.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=2.0))
                except (RendezvousTimeoutError, RendezvousUnavailableError) as error:
                    answers.append(error)

            thread = threading.Thread(target=vote_first)
            thread.start()
            deadline = time.monotonic() + 30.0
            while other.describe().transactions[0].voted != ("r0",) and time.monotonic() < deadline:
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
            done = threading.Thread(target=client.installed, args=(txn, "r0", True), kwargs={"timeout_s": 20.0})
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
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host, int(port)), 0.2).close()
                return
            except OSError:
                assert self._process.poll() is None, "the server ended at once"
                time.sleep(0.02)
        raise AssertionError("the server did not bind within 30 s")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10.0)
            self._process = None


@pytest.fixture
def two_servers(redis_url: str) -> Iterator[tuple[Rendezvous, Rendezvous]]:
    with (
        serve(store=redis_url) as one,
        serve(store=redis_url) as two,
        Rendezvous.connect(one.address) as a,
        Rendezvous.connect(two.address) as b,
    ):
        yield a, b


@pytest.mark.redis
def test_two_servers_are_one_rendezvous(two_servers: tuple[Rendezvous, Rendezvous]) -> None:
    one, two = two_servers
    key = VersionKey(MODEL, 0, 1)
    left, right = trainer(one, "t0"), trainer(two, "t1")
    readers = {"r0": (one, receiver(one, "r0")), "r1": (two, receiver(two, "r1"))}
    results: dict[str, tuple[str, str, Decision]] = {}

    def refit(member: str) -> None:
        client, worker = readers[member]
        manifest = wait(client, member, worker, timeout_s=60.0)
        tables = client.get_tables([slot.table_digest for slot in manifest.slots])
        assert len(tables) == 2
        client.release_lease(manifest.lease)
        names = ["w"] if member == "r0" else []
        facts = client.vote(manifest.transaction, member, True, names_consumed=names, wire_bytes=1, timeout_s=60.0)
        assert facts.decision is Decision.COMMIT, facts
        facts = client.installed(manifest.transaction, member, True, timeout_s=60.0)
        results[member] = (manifest.uid, manifest.transaction, facts.outcome)

    threads = [threading.Thread(target=refit, args=(member,)) for member in readers]
    for thread in threads:
        thread.start()
    uid = one.open_version(key, ["t0", "t1"])
    assert two.open_version(key, ["t1", "t0"]) == uid
    for client, worker, slot, rows in ((one, left, "t0", (0, 4)), (two, right, "t1", (4, 8))):
        digest = client.put_table(make_part(slot, rows))
        client.publish_slot(uid, make_record(slot, worker.id, digest), worker)
    for thread in threads:
        thread.join(90.0)
    assert set(results) == {"r0", "r1"}
    assert len(set(results.values())) == 1
    assert results["r0"][2] is Decision.SERVE
    assert one.describe().groups == two.describe().groups


@pytest.mark.redis
def test_many_writers_on_two_servers_lose_nothing(two_servers: tuple[Rendezvous, Rendezvous]) -> None:
    slots = [f"t{i:02d}" for i in range(24)]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        client = two_servers[i % 2]
        try:
            worker = trainer(client, slots[i])
            for step in range(3):
                uid = client.open_version(VersionKey(MODEL, 0, step), slots)
                digest = client.put_table(make_part(slots[i], (2 * i, 2 * i + 2)))
                client.publish_slot(uid, make_record(slots[i], worker.id, digest, 4096 * (step + 1)), worker)
                for event in client.watch_versions(MODEL, timeout_s=60.0):
                    if event.offered and event.key.step == step:
                        break
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(slots))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert failures == []
    manifest = wait(two_servers[0], "r0", receiver(two_servers[1], "r0"), ("r0",))
    assert manifest.version.step == 2
    assert [record.slot for record in manifest.slots] == slots


class DeafRelay:
    """A TCP relay whose connections can go silent without ending, as behind a lost NAT entry."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._hearing = asyncio.Event()
        self._hearing.set()

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._relay, "127.0.0.1", 0)

    def deafen(self) -> None:
        """Silence the connections there are; new ones hear."""
        self._hearing.clear()
        self._hearing = asyncio.Event()
        self._hearing.set()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        hearing = self._hearing
        try:
            await asyncio.gather(self._pump(reader, back, hearing), self._pump(there, writer, hearing))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            back.close()
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, hearing: asyncio.Event) -> None:
        while data := await source.read(65536):
            await hearing.wait()
            sink.write(data)
            await sink.drain()
        sink.close()


@pytest.mark.redis
def test_a_silent_subscription_is_noticed_and_renewed(
    redis_process: RedisServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reshard.rendezvous import redis_store

    monkeypatch.setattr(redis_store, "_CALL_S", 0.5)

    async def hear() -> bool:
        relay = DeafRelay(redis_process.port)
        server = await relay.serve()
        port = server.sockets[0].getsockname()[1]
        store = await redis_store.RedisStore.open(f"redis://127.0.0.1:{port}/0")
        other = await redis_store.RedisStore.open(redis_url)
        try:
            async with store.watch() as watch:
                relay.deafen()
                await other.run(lambda view: state.open_epoch(view, MODEL, "run"))
                return await watch.changed([str(model_key(MODEL))], 20.0)
        finally:
            await store.close()
            await other.close()
            server.close()

    assert asyncio.run(asyncio.wait_for(hear(), 40.0))


async def refit_async(client: AsyncRendezvous) -> Decision:
    async with client:
        worker = await client.register(WorkerInfo("trainer", MODEL, "h", "t0", {"memory": b"x"}))
        reader = await client.register(WorkerInfo("receiver", MODEL, "h", "r0"))
        waiting = asyncio.create_task(
            client.await_version(MODEL, group="g", members=["r0"], member="r0", worker=reader, timeout_s=30.0)
        )
        await asyncio.sleep(0.05)
        digest = await client.put_table(make_part("t0"))
        epoch = await client.open_epoch(MODEL, "run")
        uid = await client.open_version(VersionKey(MODEL, epoch, 0), ["t0"])
        await client.publish_slot(uid, make_record("t0", worker.id, digest), worker)
        manifest = await waiting
        tables = await client.get_tables([digest])
        assert tables[digest].digest == digest
        lease = await client.renew_lease(manifest.lease)
        await client.release_lease(lease)
        txn = manifest.transaction
        await client.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
        facts = await client.installed(txn, "r0", True, timeout_s=30.0)
        assert (await client.ask_decision(txn)).outcome is facts.outcome
        await client.close_admission(uid)
        await client.wait_leases(uid, timeout_s=5.0)
        assert await client.retire(uid)
        assert len((await client.describe()).workers) == 2
        return facts.outcome


def test_asyncio_has_the_same_calls() -> None:
    assert asyncio.run(refit_async(AsyncRendezvous.in_process())) is Decision.SERVE

    async def remote(address: str) -> Decision:
        return await refit_async(AsyncRendezvous.connect(address))

    with serve() as server:
        assert asyncio.run(remote(server.address)) is Decision.SERVE
    public = {name for name in dir(Rendezvous) if not name.startswith("_")}
    assert public == {name for name in dir(AsyncRendezvous) if not name.startswith("_")} - {"forget"}


def test_a_process_may_end_without_closing_anything() -> None:
    code = (
        "import sys\n"
        "from reshard.rendezvous import Rendezvous, WorkerInfo\n"
        "client = Rendezvous.connect(sys.argv[1])\n"
        "worker = client.register(WorkerInfo('trainer', 'm', 'h', 't'))\n"
        "local = Rendezvous.in_process()\n"
        "other = local.register(WorkerInfo('trainer', 'm', 'h', 't'))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with serve() as server:
        command = [sys.executable, "-c", code, server.address]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_client_does_not_cross_a_fork() -> None:
    client = Rendezvous.in_process()
    client._thread.pid -= 1  # as the child of a fork would see it
    try:
        with pytest.raises(RendezvousError, match="made before a fork"):
            client.describe()
    finally:
        client._thread.pid += 1
        client.close()


def test_without_grpc_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "from reshard.rendezvous import Rendezvous\n"
        "Rendezvous.in_process().close()\n"
        "Rendezvous.connect('127.0.0.1:1')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "pip install 'reshard[rendezvous]'" in ran.stderr
    assert MissingDependencyError.__name__ in ran.stderr
