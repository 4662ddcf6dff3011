"""What is forgotten, when, and what is not: the rules of retention one by one; names used once leave nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest
from tests.rendezvous.redis_records import read_records
from tests.rendezvous.support import make_part

from reshard.rendezvous import broker, codec, hints, joining, retention, state, sweeping, transactions
from reshard.rendezvous.catalog import ObjectCatalog
from reshard.rendezvous.errors import StaleError
from reshard.rendezvous.joining import Granted, Join
from reshard.rendezvous.keys import (
    Key,
    group_key,
    hints_key,
    last_use_key,
    model_key,
    progress_key,
    transaction_key,
    version_key,
    worker_key,
)
from reshard.rendezvous.records import Group, Hint, Hints, Progress, Record, Vote
from reshard.rendezvous.store import MemoryStore, Ran, Store
from reshard.rendezvous.types import Decision, SlotRecord, VersionKey, WorkerInfo
from reshard.rendezvous.view import View

T = TypeVar("T")
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
TTL_S = 10.0


class Service:
    """Transitions on a store, at a time of the test's own."""

    def __init__(self, store: Store, read: Callable[[], dict[str, Record]], loop: asyncio.AbstractEventLoop) -> None:
        self.name = store.name
        self.now = 1000.0
        self.records = read
        self.loop = loop
        self.ids = (f"{number:032x}" for number in range(1, 1 << 30))
        self._store = store

    async def run(self, transition: Callable[[View], T]) -> Ran[T]:
        def at_this_time(view: View) -> T:
            view.now = self.now
            return transition(view)

        return await self._store.run(at_this_time)

    async def names(self, kind: str) -> list[str]:
        return await self._store.names(kind)

    def do(self, transition: Callable[[View], T]) -> T:
        return self.loop.run_until_complete(self.run(transition)).value

    def get(self, key: Key) -> Record | None:
        return self.records().get(str(key))

    def sweep(self) -> tuple[set[bytes], set[bytes]]:
        return self.loop.run_until_complete(sweeping.sweep(self))  # type: ignore[arg-type]

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.sweep()

    def register(self, role: str, name: str, model: str = "m", ttl_s: float = TTL_S) -> str:
        worker_id = next(self.ids)
        self.do(lambda view: state.register(view, worker_id, WorkerInfo(role, model, "host", name), ttl_s))
        return worker_id

    def publish(self, step: int, slots: dict[str, str], model: str = "m") -> str:
        """A complete version; `slots` are worker ids by slot."""
        key, uid = VersionKey(model, 0, step), next(self.ids)
        self.do(lambda view: state.open_version(view, key, list(slots), 0, uid))
        for slot, worker_id in slots.items():
            at = np.array([4096], np.uint64), np.array([64], np.int64)
            record = SlotRecord(slot, worker_id, "host", {"memory": b"endpoint"}, bytes(32), *at)
            assert self.do(lambda view, record=record: state.publish_slot(view, uid, record, 5)) is None
        return uid

    def join(self, members: dict[str, str], member: str, group: str = "g", model: str = "m") -> Granted:
        wish = Join(
            model, group, tuple(members), member, members[member], None, None, None, 20.0, 30.0,
            next(self.ids), next(self.ids),
        )  # fmt: skip
        granted = self.do(lambda view: joining.join(view, wish))
        assert isinstance(granted, Granted), granted
        return granted

    def refit(self, members: dict[str, str], group: str = "g", model: str = "m") -> str:
        """A whole transaction, to SERVE."""
        for member in members:
            granted = self.join(members, member, group, model)
            self.do(lambda view, granted=granted: state.release_lease(view, granted.version.uid, granted.lease_id))
        txn_id, vote = granted.transaction, Vote(True, wire_bytes=1)
        for member, worker in members.items():
            self.do(lambda v, m=member, w=worker: transactions.cast_vote(v, txn_id, m, w, vote, lambda *_: ()))
        for member, worker in members.items():
            facts = self.do(lambda v, m=member, w=worker: transactions.install(v, txn_id, m, w, True, ""))
        assert facts.outcome is Decision.SERVE
        return txn_id

    def ask(self, txn_id: str) -> Decision:
        return self.do(lambda view: transactions.ask(view, txn_id)).decision


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    loop = asyncio.new_event_loop()
    if request.param == "memory":
        store = MemoryStore()
        yield Service(store, lambda: dict(store.records), loop)
    else:
        from reshard.rendezvous.redis_store import RedisStore

        url = request.getfixturevalue("store_url")
        shared = loop.run_until_complete(RedisStore.open(url))
        yield Service(shared, lambda: read_records(url), loop)
        loop.run_until_complete(shared.close())
    loop.close()


@pytest.fixture
def store_url(store_servers: Callable[[str], object]) -> str:
    from tests.rendezvous.conftest import RedisServer, emptied

    server = store_servers("redis")
    assert isinstance(server, RedisServer)
    return emptied(server)


def test_names_that_are_used_once_leave_nothing(service: Service) -> None:
    for number in range(12):
        model = f"model-{number}"
        trainer, old = service.register("trainer", "t", model), service.register("receiver", "r", model)
        service.do(lambda view, model=model: state.open_epoch(view, model, "run"))
        service.publish(0, {f"slot-{number}": trainer}, model)
        for life in range(3):  # groups are named by the life of a process, members too
            service.refit({f"r-{life}": old}, f"group-{number}-{life}", model)
        service.do(lambda view, model=model: hints.put_hint(view, model, Hint("g", "r", bytes(32))))
        half = service.register("receiver", "half", model)
        service.join({"half": half, "never": ""}, "half", f"half-{number}", model)
        service.register("receiver", "r", f"awaited in vain {number}")
    n_before = len(service.records())
    assert n_before > 12 * 15
    for _ in range(2):
        service.later(2 * HOUR_S)
    left = {key.partition(":")[0] for key in service.records()}
    assert left == {"model", "progress", "hints", "use"}, "after an hour only models are known"
    assert len(service.records()) == (4 + 1) * 12
    service.later(8 * DAY_S)
    assert service.records() == {}
    assert service.sweep() == (set(), set())


@pytest.mark.redis
def test_redis_holds_no_key_of_names_that_are_used_once(store_url: str) -> None:
    import redis

    from reshard.rendezvous.redis_store import RedisStore

    loop = asyncio.new_event_loop()
    store = loop.run_until_complete(RedisStore.open(store_url))
    service = Service(store, lambda: read_records(store_url), loop)
    for number in range(5):
        model = f"model-{number}"
        service.publish(0, {"s": service.register("trainer", "t", model)}, model)
        service.refit({"r": service.register("receiver", "r", model)}, f"group-{number}", model)
    for _ in range(2):
        service.later(8 * DAY_S)
    with redis.Redis.from_url(store_url) as client:
        left = {key.decode() for key in client.keys("*")}
    loop.run_until_complete(store.close())
    loop.close()
    assert left == {"{reshard}:clock", "{reshard}:counter"}


def test_a_model_goes_on_where_it_was_within_a_week_and_begins_anew_after_it(service: Service) -> None:
    run = lambda name: service.do(lambda view: state.open_epoch(view, "m", name))  # noqa: E731
    assert [run("one"), run("two")] == [0, 1]
    service.later(6 * DAY_S)
    assert run("two") == 1, "used again within its retention: no epoch goes back"
    service.later(6 * DAY_S)
    assert run("three") == 2, "each use counts"
    service.later(8 * DAY_S)
    assert service.records() == {}
    assert run("four") == 0


def test_a_model_is_kept_as_long_as_a_worker_of_it_lives(service: Service) -> None:
    service.do(lambda view: state.open_epoch(view, "m", "run"))
    waiting = service.register("receiver", "r", ttl_s=30 * DAY_S)
    for _ in range(20):
        service.later(DAY_S)
    assert service.get(model_key("m")) is not None
    service.do(lambda view: state.close_worker(view, waiting))
    service.later(2 * HOUR_S)
    assert service.get(worker_key(waiting)) is None
    assert service.get(model_key("m")) is not None
    service.later(8 * DAY_S)
    assert service.records() == {}


def test_a_version_under_a_live_lease_outlives_the_idle_model_that_it_is_of(service: Service) -> None:
    uid = service.publish(0, {"s": service.register("trainer", "t")})
    reader = service.register("receiver", "r")
    granted = service.join({"r": reader}, "r")
    service.do(lambda view: state.renew_lease(view, uid, granted.lease_id, 9 * DAY_S))
    service.later(8.5 * DAY_S)
    assert service.get(version_key(uid)) is not None
    assert service.get(model_key("m")) is not None
    service.do(lambda view: state.renew_lease(view, uid, granted.lease_id, 5.0))
    service.later(31.0)  # the group's transaction was ended by the first sweep, and is kept until its deadline
    assert service.records() == {}


def test_a_member_lost_for_less_than_an_hour_may_still_ask(service: Service) -> None:
    service.publish(0, {"s": service.register("trainer", "t", ttl_s=HOUR_S)})
    members = {"a": service.register("receiver", "a"), "b": service.register("receiver", "b")}
    for member in members:
        granted = service.join(members, member)
    vote = Vote(True, wire_bytes=1)
    for member, worker in members.items():
        service.do(
            lambda v, m=member, w=worker: transactions.cast_vote(v, granted.transaction, m, w, vote, lambda *_: ())
        )
    service.later(0.5 * HOUR_S)  # both stopped before they heard: the sweep has told them lost, and quarantined them
    facts = service.do(lambda view: transactions.ask(view, granted.transaction))
    assert (facts.decision, facts.outcome) == (Decision.COMMIT, Decision.QUARANTINE)
    service.later(HOUR_S)
    assert service.ask(granted.transaction) is Decision.UNKNOWN
    assert service.get(group_key("m", "g")) is None


def test_a_living_group_keeps_its_newest_transaction_alone(service: Service) -> None:
    slots = {"s": service.register("trainer", "t", ttl_s=30 * DAY_S)}
    members = {name: service.register("receiver", name, ttl_s=30 * DAY_S) for name in "ab"}
    done = []
    for step in range(4):
        service.publish(step, slots)
        done.append(service.refit(members))
    service.later(2 * DAY_S)
    kept = {key for key in service.records() if key.startswith(("txn:", "ballot:"))}
    assert kept == {f"txn:{done[-1]}", f"ballot:{done[-1]}"}
    group = service.get(group_key("m", "g"))
    assert isinstance(group, Group)
    assert group.serving == VersionKey("m", 0, 3)


def test_an_aborted_transaction_is_kept_until_its_deadline_for_members_on_their_way(service: Service) -> None:
    service.publish(0, {"s": service.register("trainer", "t", ttl_s=HOUR_S)})
    members = {"a": service.register("receiver", "a"), "b": service.register("receiver", "b", ttl_s=HOUR_S)}
    granted = service.join(members, "a")
    service.now += TTL_S
    service.sweep()  # decides by the loss of `a`
    assert service.ask(granted.transaction) is Decision.ABORT
    service.now += 5.0
    service.sweep()
    wish = Join("m", "g", ("a", "b"), "b", members["b"], None, None, None, 20.0, 30.0, *[next(service.ids)] * 2)
    answer = service.do(lambda view: joining.join(view, wish))
    assert granted.transaction in str(answer)


def test_what_an_open_decision_may_ask_for_is_kept_though_its_version_is_gone(service: Service) -> None:
    uid = service.publish(0, {"s": service.register("trainer", "t")})
    members = {name: service.register("receiver", name, ttl_s=30 * DAY_S) for name in "ab"}
    for member, worker in members.items():
        wish = Join(
            "m", "g", tuple(members), member, worker, None, None, None, 20.0, 5 * HOUR_S,
            next(service.ids), next(service.ids),
        )  # fmt: skip
        granted = service.do(lambda view, wish=wish: joining.join(view, wish))
        assert isinstance(granted, Granted)
    vote = Vote(True, names_digest=b"n" * 32, wire_bytes=1)
    txn_id, worker = granted.transaction, members["a"]
    service.do(lambda view: transactions.cast_vote(view, txn_id, "a", worker, vote, lambda *_: ()))
    service.later(2 * HOUR_S)
    assert service.get(version_key(uid)) is None, "its worker is lost"
    assert service.sweep() == ({bytes(32)}, {b"n" * 32})
    service.later(4 * HOUR_S)
    assert service.ask(txn_id) is Decision.ABORT
    assert service.sweep() == (set(), set())


def test_a_group_forgets_members_that_it_has_no_more(service: Service) -> None:
    slots = {"s": service.register("trainer", "t", ttl_s=30 * DAY_S)}
    for step in range(20):
        service.publish(step, slots)
        service.refit({f"member-{step}": service.register("receiver", f"member-{step}", ttl_s=60.0)})
        service.later(2 * HOUR_S)
        service.do(lambda view: state.beat(view, slots["s"]))
    group = service.get(group_key("m", "g"))
    assert group is None, "its last member is lost"
    service.publish(20, slots)
    for number in range(10):
        name = f"newest-{number}"
        txn_id = service.refit({name: service.register("receiver", name, ttl_s=HOUR_S)})
        service.now += 1.5 * HOUR_S
        service.sweep()
        assert service.get(transaction_key(txn_id)) is not None
    group = service.get(group_key("m", "g"))
    assert isinstance(group, Group)
    assert len(group.joined) <= 2


def test_new_cut_hints_leave_out_groups_that_are_forgotten(service: Service) -> None:
    def put(group: str, byte: int) -> int:
        return service.do(lambda view: hints.put_hint(view, "m", Hint(group, "r", bytes([byte]) * 32)))

    def groups() -> list[str]:
        record = service.get(hints_key("m"))
        assert isinstance(record, Hints)
        return [hint.group for hint in record.sets[0].hints]

    service.publish(0, {"s": service.register("trainer", "t", ttl_s=30 * DAY_S)})
    service.refit({"r": service.register("receiver", "r", ttl_s=30 * DAY_S)}, "lives")
    service.refit({"r": service.register("receiver", "r")}, "ends")
    assert [put("lives", 1), put("ends", 2), put("early", 3)] == [1, 2, 3]
    service.later(0.5 * HOUR_S)
    assert put("new", 4) == 4
    assert groups() == ["early", "ends", "lives", "new"]
    service.later(1.2 * HOUR_S)
    assert put("new", 4) == 4, "nothing new is said, so no layout changes"
    assert groups() == ["early", "ends", "lives", "new"]
    assert put("newer", 5) == 5
    assert groups() == ["lives", "new", "newer"], "`new` said so again within the hour"
    pinned = service.do(lambda view: sweeping.pinned_hints(view, "m"))
    assert pinned == {bytes([byte]) * 32 for byte in range(1, 6)}, "older sets are kept for publishers that took them"


def test_slots_of_old_steps_are_forgotten_beyond_a_bound(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_MAX_PAST_SLOTS", 25)
    worker_id = service.register("trainer", "t", ttl_s=30 * DAY_S)
    for step in range(6):
        uid = service.publish(step, {f"{step}-{number}": worker_id for number in range(10)})
        service.do(lambda view, uid=uid: state.retire(view, uid))
    progress = service.get(progress_key("m"))
    assert isinstance(progress, Progress)
    steps = Counter(at.step for at in progress.slots.values())
    assert steps == {5: 10, 4: 10, 3: 10, 2: 5}


def test_a_record_of_an_older_writer_is_read_with_defaults() -> None:
    old = b'{"model":"m","sets":[{"layout_epoch":3,"hints":[{"group":"g","member":"r","digest":"%s"}]}]}' % (b"00" * 32)
    found = codec.decode(Hints, old)
    assert found.sets[0].hints == (Hint("g", "r", bytes(32)),)
    assert found.sets[0].hints[0].said_at == 0.0


def test_a_model_of_an_older_writer_is_idle_a_week_from_the_first_sweep(service: Service) -> None:
    service.do(lambda view: state.open_epoch(view, "m", "run"))
    service.do(lambda view: view.delete(last_use_key("m")))
    service.now += 30 * DAY_S
    service.sweep()
    assert service.get(model_key("m")) is not None
    service.later(8 * DAY_S)
    assert service.records() == {}


def test_objects_of_the_process_are_forgotten_an_hour_after_their_last_use() -> None:
    now = 0.0
    catalog = ObjectCatalog(lambda: now)
    part, other = make_part("a"), make_part("b", (4, 8))
    catalog.put_part(part)
    catalog.put_part(other)
    catalog.put_names(bytes(32), ["w"])
    sweep = lambda *tables: asyncio.run(catalog.sweep(tables, ()))  # noqa: E731
    now = HOUR_S
    sweep()
    assert catalog.get_part(part.digest) is part, "and so it is used"
    now += 1.0
    sweep(other.digest)
    assert asyncio.run(catalog.n_rows(other.digest)) == len(other), "a version names it"
    with pytest.raises(StaleError, match="name set 0000"):
        asyncio.run(catalog.load_names([part.digest], [bytes(32)]))
    now += HOUR_S + 1.0
    sweep()
    assert asyncio.run(catalog.n_rows(part.digest)) is None


def test_a_server_goes_on_sweeping_after_a_sweep_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = iter([StaleError("the store is away"), ValueError("a record that is none"), None, None])

    async def run() -> None:
        twice = asyncio.Event()

        async def sweep(store: Store) -> tuple[set[bytes], set[bytes]]:
            fault = next(faults, None)
            if fault is not None:
                raise fault
            twice.set()
            return set(), set()

        monkeypatch.setattr(broker, "sweep", sweep)
        monkeypatch.setattr(broker, "_SWEEP_EVERY_S", 0.01)
        service = broker.Broker(MemoryStore(), ObjectCatalog())
        service.start()
        async with asyncio.timeout(30.0):
            await twice.wait()
        await service.close()

    asyncio.run(run())
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [StaleError, ValueError]
