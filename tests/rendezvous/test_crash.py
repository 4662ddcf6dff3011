"""A server on Redis is killed with SIGKILL at random moments while trainers publish and receivers refit.

After each kill, and before the server is back, the records in Redis are read as they lie and must be whole. The clients
are never told: they go on by themselves. A child of one warm process serves, so that a restart takes milliseconds and
many kills fit into the run.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'reshard[rendezvous]'")
from tests.ports import lasting_port
from tests.rendezvous.conftest import RedisServer
from tests.rendezvous.redis_records import read_records
from tests.rendezvous.support import MODEL, make_part, make_record, receiver, trainer

from reshard.rendezvous.client import Rendezvous, Worker
from reshard.rendezvous.errors import RendezvousTimeoutError, RendezvousUnavailableError
from reshard.rendezvous.keys import slot_key
from reshard.rendezvous.records import LeaseBook, Model, Transaction, Version, VersionState
from reshard.rendezvous.types import Decision, Facts, Manifest, VersionKey

ROOT = Path(__file__).parents[2]
SLOTS = ("t0", "t1")
MEMBERS = ("r0", "r1")
CALL_S = 40.0
TTL_S = 300.0
OPEN = Decision.PENDING

# Forks a server for each line it reads, and prints the child's process id once it serves.
NURSERY = """
import ctypes, os, sys
import grpc, redis.asyncio
import reshard.rendezvous.endpoint, reshard.rendezvous.handlers, reshard.rendezvous.redis_store
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
address, store = sys.argv[1:]
def end_with_parent():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
end_with_parent()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        end_with_parent()
        from reshard.rendezvous.service import serve
        server = serve(address, store=store)
        print(os.getpid(), flush=True)
        server.wait()
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


class MortalServer:
    """A server that dies often. Each life is a fork of one process that has imported everything."""

    def __init__(self, store: str) -> None:
        self.address = f"127.0.0.1:{lasting_port()}"
        self.n_kills = 0
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", NURSERY, self.address, store],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._child = 0

    def start(self) -> None:
        self._nursery.stdin.write("serve\n")
        self._nursery.stdin.flush()
        line = self._nursery.stdout.readline()
        assert line.strip().isdigit(), f"the server did not start: {line!r}"
        self._child = int(line)

    def kill(self) -> None:
        os.kill(self._child, signal.SIGKILL)
        assert self._nursery.stdout.readline() == "dead\n"
        self._child = 0
        self.n_kills += 1

    def close(self) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
        self._nursery.kill()
        self._nursery.communicate(timeout=10.0)


class Ledger:
    """What was seen in Redis before: facts never change, and steps never go back."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.facts: dict[str, tuple[Decision, Decision]] = {}
        self.step = -1

    def check(self) -> None:
        """Read all records, while no server runs, and check that they are whole and consistent with what was seen."""
        records = read_records(self.url)
        versions = {r.uid: r for r in records.values() if isinstance(r, Version)}
        for version in versions.values():
            assert set(version.filled) <= set(version.slots)
            if version.state is VersionState.READY:
                assert set(version.filled) == set(SLOTS)
            for slot, worker_id in version.filled.items():
                record = records[str(slot_key(version.uid, slot))].record
                assert (record.slot, record.worker_id) == (slot, worker_id)
                assert record.region_bases.tolist() == [base_of(version.key.step)], "a slot of another step"
        for key in records:
            if key.startswith("slot:"):
                uid, _, slot = key.removeprefix("slot:").partition(":")
                assert slot in versions[uid].filled, f"an orphan: {key}"
        for model in (r for r in records.values() if isinstance(r, Model)):
            refs = {ref.uid: ref for ref in model.versions}
            assert set(refs) == set(versions), "the model's list and the versions differ"
            for uid, ref in refs.items():
                assert ref.ready is (versions[uid].state is VersionState.READY)
                assert ref.step <= model.step
            assert model.step >= self.step
            self.step = model.step
        now_s = time.time()
        for book in (r for r in records.values() if isinstance(r, LeaseBook)):
            live = [row for row in book.rows.values() if row.expires_at > now_s]
            assert not live or book.uid in versions, "a version under a live lease is gone"
        for txn in (r for r in records.values() if isinstance(r, Transaction)):
            decision, outcome = self.facts.get(txn.id, (OPEN, OPEN))
            assert decision in (OPEN, txn.decision), "a decision changed"
            assert outcome in (OPEN, txn.outcome), "an outcome changed"
            assert txn.outcome is OPEN or txn.decision is Decision.COMMIT
            self.facts[txn.id] = txn.decision, txn.outcome


def base_of(step: int) -> int:
    return 4096 * (step + 1)


class Assassin(threading.Thread):
    """Kills at random moments until told to stop, and starts again what it killed.

    With one server, that. With two and their Redis, any of the three, and at times all at once.
    """

    def __init__(self, servers: list[MortalServer], ledger: Ledger, redis: RedisServer | None, seed: int) -> None:
        super().__init__(name="assassin")
        self.servers = servers
        self.ledger = ledger
        self.redis = redis
        self.random = random.Random(seed)
        self.stop = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.wait(self.random.uniform(0.02, 0.5)):
                way = self.random.randrange(4) if self.redis is not None else 0
                victims = [self.random.choice(self.servers)] if way == 1 else self.servers if way != 2 else []
                for server in victims:
                    server.kill()
                try:
                    if self.redis is not None and way >= 2:
                        self.redis.kill()
                        self.stop.wait(self.random.uniform(0.0, 0.3))
                        self.redis.start()
                    if victims == self.servers:
                        self.ledger.check()
                finally:
                    for server in victims:
                        server.start()
        except BaseException as error:
            self.failure = error


class Job:
    """Two trainers and two receivers, each with a connection of its own."""

    def __init__(self, addresses: list[str]) -> None:
        at = itertools.cycle(addresses)
        self.clients = {name: Rendezvous.connect(next(at)) for name in (*SLOTS, *MEMBERS)}
        self.workers: dict[str, Worker] = {}
        for name, client in self.clients.items():
            register = trainer if name in SLOTS else receiver
            self.workers[name] = register(client, name, ttl_s=TTL_S)
        self.threads = ThreadPoolExecutor(4)
        self.joined = threading.Barrier(len(MEMBERS))

    def close(self) -> None:
        self.threads.shutdown()
        for client in self.clients.values():
            client.close()

    def cycle(self, step: int) -> Decision:
        """Publish a step, refit both receivers to it, retire it; returns what both members learned."""
        uids = [self.threads.submit(self.publish, slot, step) for slot in SLOTS]
        refits = [self.threads.submit(self.refit, member, step) for member in MEMBERS]
        assert len({uid.result(2 * CALL_S) for uid in uids}) == 1
        learned = [refit.result(4 * CALL_S) for refit in refits]
        (one_uid, one_txn, one_facts), (other_uid, other_txn, other_facts) = learned
        assert (one_uid, one_txn) == (other_uid, other_txn) == (uids[0].result(), one_txn)
        assert (one_facts.decision, one_facts.outcome) == (other_facts.decision, other_facts.outcome)
        client = self.clients[SLOTS[0]]
        client.wait_leases(one_uid, timeout_s=CALL_S)
        assert client.retire(one_uid, timeout_s=CALL_S)
        return one_facts.outcome if one_facts.decision is Decision.COMMIT else one_facts.decision

    def publish(self, slot: str, step: int) -> str:
        client, worker = self.clients[slot], self.workers[slot]
        number = SLOTS.index(slot)
        uid = client.open_version(VersionKey(MODEL, 0, step), SLOTS, timeout_s=CALL_S)
        digest = client.put_table(make_part(slot, (4 * number, 4 * number + 4)), timeout_s=CALL_S)
        record = make_record(slot, worker.id, digest, base=base_of(step))
        client.publish_slot(uid, record, worker, timeout_s=CALL_S)
        return uid

    def refit(self, member: str, step: int) -> tuple[str, str, Facts]:
        client = self.clients[member]
        manifest = client.await_version(
            MODEL,
            group="g",
            members=MEMBERS,
            member=member,
            worker=self.workers[member],
            want=step,
            lease_ttl_s=60.0,
            transaction_timeout_s=120.0,
            timeout_s=CALL_S,
        )
        self.check(manifest, step)
        lease = client.renew_lease(manifest.lease, timeout_s=CALL_S)
        self.joined.wait(CALL_S)
        if member == MEMBERS[0]:
            # It holds a lease: whatever the server went through, the version does not go before it is released.
            assert not client.retire(manifest.uid, timeout_s=CALL_S)
            client.renew_lease(lease, timeout_s=CALL_S)
        facts = self.learn(
            client,
            manifest.transaction,
            lambda: client.vote(
                manifest.transaction, member, True, names_consumed=["w"], wire_bytes=1, timeout_s=CALL_S
            ),
            lambda facts: facts.decision is OPEN,
        )
        client.release_lease(lease, timeout_s=CALL_S)
        if facts.decision is Decision.COMMIT:
            facts = self.learn(
                client,
                manifest.transaction,
                lambda: client.installed(manifest.transaction, member, True, timeout_s=CALL_S),
                lambda facts: facts.outcome is OPEN,
            )
        return manifest.uid, manifest.transaction, facts

    def check(self, manifest: Manifest, step: int) -> None:
        assert manifest.version == VersionKey(MODEL, 0, step)
        assert [slot.slot for slot in manifest.slots] == list(SLOTS)
        assert [slot.worker_id for slot in manifest.slots] == [self.workers[slot].id for slot in SLOTS]
        assert {int(slot.region_bases[0]) for slot in manifest.slots} == {base_of(step)}

    @staticmethod
    def learn(client: Rendezvous, transaction: str, say, still_open) -> Facts:
        """Say it; in doubt, ask until the fact is known."""
        try:
            facts = say()
        except (RendezvousTimeoutError, RendezvousUnavailableError):
            facts = client.ask_decision(transaction, wait_s=5.0, timeout_s=CALL_S)
        deadline = time.monotonic() + CALL_S
        while still_open(facts):
            assert time.monotonic() < deadline, facts
            facts = client.ask_decision(transaction, wait_s=5.0, timeout_s=CALL_S)
        return facts


def run_under_fire(
    redis_url: str, n_cycles: int, n_kills: int, seed: int, *, n_servers: int = 1, redis: RedisServer | None = None
) -> None:
    """Run cycles while servers are killed at random; more of them where none was killed so often."""
    servers, ledger = [MortalServer(redis_url) for _ in range(n_servers)], Ledger(redis_url)
    assassin = Assassin(servers, ledger, redis, seed)

    def killed() -> int:
        return sum(server.n_kills for server in servers)

    try:
        for server in servers:
            server.start()
        job = Job([server.address for server in servers])
        try:
            assassin.start()
            outcomes = []
            while len(outcomes) < n_cycles or (killed() < n_kills and len(outcomes) < 20 * n_cycles):
                outcomes.append(job.cycle(len(outcomes)))
        finally:
            assassin.stop.set()
            if assassin.is_alive():
                assassin.join(60.0)
            if redis is not None:  # what a thread started ends with it: see `mortal`
                redis.kill()
                redis.start()
            if assassin.failure is not None:
                raise assassin.failure
            workers = list(job.workers.values())
            assert not any(worker.lost for worker in workers), "a worker was lost, though it beat"
            job.close()
        assert set(outcomes) == {Decision.SERVE}, outcomes
        for server in servers:
            server.kill()
        ledger.check()
        records = read_records(redis_url)
        assert not [r for r in records.values() if isinstance(r, Version)], "all versions were retired"
        assert ledger.step == len(outcomes) - 1
        assert killed() >= n_kills
    finally:
        for server in servers:
            server.close()


@pytest.mark.redis
@pytest.mark.timeout(180)
def test_a_few_cycles_under_fire(redis_url: str) -> None:
    run_under_fire(redis_url, 15, n_kills=3, seed=1)


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("redis_process", ["redis"], indirect=True)
def test_two_hundred_cycles_under_fire(redis_url: str) -> None:
    run_under_fire(redis_url, 200, n_kills=21, seed=2)


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_servers_and_their_redis_under_fire(redis_url: str, redis_process: RedisServer) -> None:
    run_under_fire(redis_url, 60, n_kills=21, seed=3, n_servers=2, redis=redis_process)
