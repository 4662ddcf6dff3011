"""Two server processes on one Redis are one rendezvous, also while the connection between them fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from tests.rendezvous.conftest import RedisServer
from tests.rendezvous.support import MODEL, make_part, make_record, receiver, trainer, wait

from reshard.rendezvous import state
from reshard.rendezvous.client import Rendezvous
from reshard.rendezvous.keys import model_key
from reshard.rendezvous.service import serve
from reshard.rendezvous.types import Decision, VersionKey

pytest.importorskip("grpc", reason="grpcio is not installed")


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
        thread.join(110.0)
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

    monkeypatch.setattr(redis_store, "_CALL_S", 2.0)

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
                return await watch.changed([str(model_key(MODEL))], 60.0)
        finally:
            await store.close()
            await other.close()
            server.close()

    assert asyncio.run(asyncio.wait_for(hear(), 100.0))
