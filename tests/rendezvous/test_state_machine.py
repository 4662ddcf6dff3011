"""The rendezvous' state machine against a second, simpler account of the same rules.

Hypothesis drives publishes, heartbeats, time, process restarts, leases, retirements, votes and housekeeping in any
order. A shadow keeps what must be true in plain sets and numbers, written from the design and not from ``state.py``;
each call's answer is compared with what the shadow expects, and after each step these invariants hold: a READY version
has all its slots from live workers of one step; a version under a live lease is never gone; a lost worker is never
offered; within an epoch a step never goes back; no version is visible in part; each of a transaction's two facts is
decided once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.rendezvous.redis_records import read_records

from reshard.rendezvous import hints, joining, state, sweeping, transactions
from reshard.rendezvous.errors import (
    AbortedError,
    EqualityError,
    InvalidRequestError,
    LeaseError,
    RendezvousError,
    StaleError,
    TransactionError,
    VersionError,
    WorkerLostError,
)
from reshard.rendezvous.joining import Granted, Join, Pending
from reshard.rendezvous.records import (
    Group,
    Hint,
    Hints,
    LastUse,
    Model,
    Progress,
    Transaction,
    Version,
    VersionState,
    Vote,
)
from reshard.rendezvous.redis_store import RedisStore
from reshard.rendezvous.store import MemoryStore
from reshard.rendezvous.types import Decision, SlotRecord, VersionKey, WorkerInfo

MODEL = "model"
SLOT_SETS = [("s0",), ("s0", "s1"), ("s0", "s1", "s2")]
GROUPS = {"pair": ("a", "b"), "single": ("c",)}
TTL_S = 10.0
LEASE_S = 20.0
TRANSACTION_S = 30.0
HOUR_S = 3600.0
WEEK_S = 7 * 24 * HOUR_S
OPEN = Decision.PENDING
FINAL = {Decision.COMMIT, Decision.ABORT, Decision.SERVE, Decision.QUARANTINE}


@dataclasses.dataclass
class ShadowWorker:
    role: str
    name: str
    registered_at: float
    expires_at: float


@dataclasses.dataclass
class ShadowVersion:
    key: tuple[int, int]
    slots: tuple[str, ...]
    layout_epoch: int
    opened_at: float
    status: str = "staging"  # staging, ready, refused, closed, gone
    wanted_gone: bool = False
    filled: dict[str, SlotRecord] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class ShadowLease:
    uid: str
    expires_at: float


@dataclasses.dataclass
class ShadowTransaction:
    id: str
    uid: str
    group: str
    seq: int
    members: tuple[str, ...]
    deadline: float
    joined: dict[str, str] = dataclasses.field(default_factory=dict)
    leases: dict[str, str] = dataclasses.field(default_factory=dict)
    votes: dict[str, Vote] = dataclasses.field(default_factory=dict)
    installed: dict[str, bool] = dataclasses.field(default_factory=dict)
    decision: Decision = OPEN
    outcome: Decision = OPEN
    decided_at: float = 0.0
    forgotten: bool = False

    @property
    def finished(self) -> bool:
        return self.decision is Decision.ABORT or self.outcome is not OPEN


def identifier(number: int) -> str:
    return f"{number:032x}"


class RendezvousMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.store = MemoryStore(lambda: self.now)
        self.open()
        self.ids = map(identifier, itertools.count(1))
        self.workers: dict[str, ShadowWorker] = {}
        self.epoch = -1
        self.step = -1
        self.runs: dict[str, int] = {}
        self.versions: dict[str, ShadowVersion] = {}
        self.progress: dict[str, tuple[int, int, bytes]] = {}  # slot -> step, layout epoch, table
        self.last_filled: dict[str, tuple[str, str, bytes]] = {}  # slot -> version, worker, table
        self.leases: dict[str, ShadowLease] = {}
        self.transactions: dict[str, ShadowTransaction] = {}
        self.last_joined: dict[tuple[str, str], int] = {}  # (group, member) -> seq
        self.sequences = dict.fromkeys(GROUPS, 0)
        self.hints: list[tuple[int, dict[tuple[str, str], bytes]]] = [(0, {})]
        self.said_at: dict[tuple[str, str], float] = {}
        self.used_at = -math.inf  # the last call for the model, or sweep that found a worker of it

    def open(self) -> None:
        """Hook for other stores."""

    # --- the shadow's own rules ---

    def run(self, transition):
        return self.store.run_now(transition).value

    def snapshot(self) -> dict:
        """All records by key."""
        return dict(self.store.records)

    def alive(self, worker_id: str) -> bool:
        worker = self.workers.get(worker_id)
        return worker is not None and worker.expires_at > self.now

    def live_leases(self, uid: str) -> list[str]:
        return [lease_id for lease_id, lease in self.leases.items() if lease.uid == uid and lease.expires_at > self.now]

    def offered(self) -> dict[str, ShadowVersion]:
        return {
            uid: version
            for uid, version in self.versions.items()
            if version.status == "ready" and all(self.alive(record.worker_id) for record in version.filled.values())
        }

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.step = epoch, -1
        self.progress, self.last_filled = {}, {}
        for uid, version in self.versions.items():
            if version.status != "gone":
                self.drop(uid, version)

    def drop(self, uid: str, version: ShadowVersion) -> None:
        version.wanted_gone = True
        version.status = "closed" if self.live_leases(uid) else "gone"

    def pick(self, data, things, label: str):
        return data.draw(st.sampled_from(sorted(things)), label=label)

    # --- processes and time ---

    @initialize()
    def some_workers(self) -> None:
        for slot in SLOT_SETS[-1]:
            self.register("trainer", slot)
        for member in itertools.chain.from_iterable(GROUPS.values()):
            self.register("receiver", member)

    @rule(role=st.sampled_from(["trainer", "receiver"]), number=st.integers(0, 2))
    def restart(self, role: str, number: int) -> None:
        """A process starts anew, whether or not its former life is known to have ended."""
        self.register(role, SLOT_SETS[-1][number] if role == "trainer" else "abc"[number])

    def register(self, role: str, name: str) -> None:
        worker_id = next(self.ids)
        info = WorkerInfo(role, MODEL, f"host-{name}", name)
        for _ in range(2):  # a repeated call is the same call
            self.run(lambda view: state.register(view, worker_id, info, TTL_S))
        self.workers[worker_id] = ShadowWorker(role, name, self.now, self.now + TTL_S)
        self.used_at = self.now

    @rule(data=st.data())
    def beat(self, data) -> None:
        worker_id = self.pick(data, self.workers, "worker")
        if self.alive(worker_id):
            assert self.run(lambda view: state.beat(view, worker_id)) == TTL_S
            self.workers[worker_id].expires_at = self.now + TTL_S
        else:
            refused(WorkerLostError, lambda: self.run(lambda view: state.beat(view, worker_id)))

    @rule()
    def all_beat(self) -> None:
        for worker_id in self.workers:
            if self.alive(worker_id):
                self.run(lambda view, worker_id=worker_id: state.beat(view, worker_id))
                self.workers[worker_id].expires_at = self.now + TTL_S

    @rule(data=st.data())
    def close_worker(self, data) -> None:
        self.lose(self.pick(data, self.workers, "worker"))

    @rule(
        seconds=st.sampled_from([0.5, 3.0, 9.0, TTL_S, LEASE_S, TRANSACTION_S]),
        beating=st.sampled_from([True, True, False]),
    )
    def pass_time(self, seconds: float, beating: bool) -> None:
        """Time passes; workers beat meanwhile, or none does."""
        until = self.now + seconds
        while beating and self.now + TTL_S / 2 < until:
            self.now += TTL_S / 2
            self.all_beat()
        self.now = until
        if beating:
            self.all_beat()

    @rule()
    def sweep(self) -> None:
        """Housekeeping changes no answer; it only completes what was decided."""
        for worker_id in self.workers:
            known = self.known(worker_id)
            assert self.run(lambda view, worker_id=worker_id: sweeping.sweep_worker(view, worker_id)) is not known
            self.used_at = self.now if known else self.used_at
        for group in GROUPS:
            self.sweep_group(group)
        self.sweep_model()

    def sweep_group(self, group: str) -> None:
        gone = self.run(lambda view: sweeping.sweep_group(view, MODEL, group))
        for txn in self.transactions.values():
            if txn.group == group and not txn.forgotten:
                self.decide_by_time(txn)
        self.forget(group)
        kept = [txn for txn in self.transactions.values() if txn.group == group and not txn.forgotten]
        assert gone is not bool(kept)
        if gone:
            self.sequences[group] = 0
            self.last_joined = {key: seq for key, seq in self.last_joined.items() if key[0] != group}

    def forget(self, group: str) -> None:
        """The facts that no member may ask for any more, as the group's pruning must forget them."""
        finished = [txn for txn in self.transactions.values() if txn.group == group and txn.finished]
        for txn in finished:
            awaited = txn is finished[-1] and self.now < txn.deadline
            may_ask = any(
                self.known(worker_id) and self.last_joined.get((group, member), 0) <= txn.seq
                for member, worker_id in txn.joined.items()
            )
            txn.forgotten |= not awaited and not may_ask

    def known(self, worker_id: str) -> bool:
        """A worker that lives or was lost within the hour."""
        return self.workers[worker_id].expires_at + HOUR_S > self.now

    def sweep_model(self) -> None:
        self.run(lambda view: sweeping.sweep_model(view, MODEL))
        idle = self.used_at + WEEK_S + HOUR_S <= self.now
        for uid, version in self.versions.items():
            if version.status == "gone":
                continue
            lost = not all(self.alive(record.worker_id) for record in version.filled.values())
            passed = not version.filled and (idle or version.key[1] < self.step)
            if version.opened_at + HOUR_S < self.now and (lost or passed or version.status == "refused"):
                self.drop(uid, version)  # it could never be offered again
            if version.wanted_gone and not self.live_leases(uid):
                version.status = "gone"
        left = any(version.status != "gone" for version in self.versions.values())
        if not self.records(Model) and not self.records(Hints) and not self.records(LastUse):
            assert not left
            assert self.used_at + WEEK_S <= self.now, "forgotten within its retention"
            self.forget_model()
        else:
            assert left or not idle, "a model that was idle for over a week is kept"

    def forget_model(self) -> None:
        assert not self.records(Progress)
        self.epoch, self.step, self.runs = -1, -1, {}
        self.progress, self.last_filled = {}, {}
        self.hints, self.said_at = [(0, {})], {}

    @rule()
    def a_long_pause(self) -> None:
        """Over an hour: all workers are lost, and housekeeping forgets what can never be offered again."""
        self.now += 4000.0
        self.sweep()

    @rule(days=st.sampled_from([6.0, 8.0]), used=st.sampled_from([False, False, True]))
    def days_pass(self, days: float, used: bool) -> None:
        """Nothing happens for days: after a week without a use the model is forgotten, whole, and not before."""
        self.now += days * 24 * HOUR_S
        if used:
            self.register("receiver", "a")
        self.sweep()
        self.now += TRANSACTION_S  # a transaction that the first sweep ended is kept until its deadline
        self.sweep()
        if days > 7 and not used:
            assert not self.snapshot(), "after a week without any use a record is left"

    # --- versions ---

    @rule(run=st.sampled_from(["run 1", "run 2", "run 3"]))
    def open_epoch(self, run: str) -> None:
        known = self.runs.get(run)
        if known is not None and known < self.epoch:
            refused(VersionError, lambda: self.run(lambda view: state.open_epoch(view, MODEL, run)))
            return
        got = self.run(lambda view: state.open_epoch(view, MODEL, run))
        self.used_at = self.now
        if known is not None:
            assert got == known
            return
        assert got == self.epoch + 1
        self.runs[run] = got
        self.start_epoch(got)

    @rule(
        epoch_on=st.sampled_from([0, 0, 0, 0, 1, -1]),
        step_on=st.sampled_from([0, 0, 1, 1, 1, 3, -1]),
        slots=st.sampled_from(SLOT_SETS),
        layout_epoch=st.sampled_from([0, 0, 0, 1]),
    )
    def open_version(self, epoch_on: int, step_on: int, slots: tuple[str, ...], layout_epoch: int) -> None:
        epoch = max(0, self.epoch + epoch_on)
        step = max(0, (self.step if epoch == self.epoch else -1) + step_on)
        uid = next(self.ids)

        def transition(view):
            return state.open_version(view, VersionKey(MODEL, epoch, step), slots, layout_epoch, uid)

        if epoch < self.epoch or (epoch == self.epoch and step < self.step):
            refused(VersionError, lambda: self.run(transition))
            return
        if epoch == self.epoch and step == self.step:
            *_, (open_uid, version) = [(u, v) for u, v in self.versions.items() if v.key == (epoch, step)]
            gone = version.status == "gone"
            if gone:
                refused(StaleError, lambda: self.run(transition))
            elif (set(version.slots), version.layout_epoch) != (set(slots), layout_epoch):
                refused(VersionError, lambda: self.run(transition))
            else:
                assert self.run(transition) == open_uid
                self.used_at = self.now
            return
        assert self.run(transition) == uid
        self.used_at = self.now
        if epoch > self.epoch:
            self.start_epoch(epoch)
        self.step = step
        self.versions[uid] = ShadowVersion((epoch, step), slots, layout_epoch, self.now)

    @rule()
    def publish_a_whole_version(self) -> None:
        """The good way: all slots of the next step by live workers."""
        uid = next(self.ids)
        epoch, step = max(self.epoch, 0), self.step + 1
        slots = SLOT_SETS[1]
        layouts = [self.progress[slot][1:] for slot in slots if slot in self.progress]
        layout_epoch = max((layout for layout, _ in layouts), default=0)
        layout_epoch += any(layout == (layout_epoch, bytes([1]) * 32) for layout in layouts)
        self.run(lambda view: state.open_version(view, VersionKey(MODEL, epoch, step), slots, layout_epoch, uid))
        self.used_at = self.now
        if epoch > self.epoch:
            self.start_epoch(epoch)
        self.step = step
        self.versions[uid] = ShadowVersion((epoch, step), slots, layout_epoch, self.now)
        for slot in slots:
            worker_id = self.live_worker("trainer", slot)
            self.publish_record(uid, self.record(slot, worker_id, 0, False, 0), 5)
        assert self.versions[uid].status == "ready"

    @precondition(lambda self: any(version.status == "staging" for version in self.versions.values()))
    @rule(
        data=st.data(),
        table=st.sampled_from([0, 0, 0, 1]),
        unequal=st.sampled_from([False, False, True]),
        how_many=st.sampled_from([1, 3]),
        loss=st.sampled_from([False, False, True]),
    )
    def fill(self, data, table: int, unequal: bool, how_many: int, loss: bool) -> None:
        """Live workers fill missing slots of a version; the one that filled the first may die before the last is."""
        staging = [uid for uid, version in self.versions.items() if version.status == "staging"]
        uid = data.draw(st.sampled_from(staging[-2:]), label="version")
        version = self.versions[uid]
        for slot in [slot for slot in version.slots if slot not in version.filled][:how_many]:
            if loss and version.filled:
                self.lose(version.filled[min(version.filled)].worker_id)
            root = int(unequal and slot == version.slots[-1])
            self.publish_record(uid, self.record(slot, self.live_worker("trainer", slot), table, False, root), 5)

    def lose(self, worker_id: str) -> None:
        self.run(lambda view: state.close_worker(view, worker_id))
        self.workers[worker_id].expires_at = min(self.workers[worker_id].expires_at, self.now)

    @precondition(lambda self: any(version.filled for version in self.versions.values()))
    @rule(data=st.data(), refill=st.booleans())
    def lose_a_publisher(self, data, refill: bool) -> None:
        """A process that filled a slot dies; its successor may try to fill it anew."""
        filled = [uid for uid, version in self.versions.items() if version.filled]
        uid = data.draw(st.sampled_from(filled[-2:]), label="version")
        slot = data.draw(st.sampled_from(sorted(self.versions[uid].filled)), label="slot")
        self.lose(self.versions[uid].filled[slot].worker_id)
        if refill:
            self.publish_record(uid, self.record(slot, self.live_worker("trainer", slot), 0, False, 0), 5)

    def live_worker(self, role: str, name: str) -> str:
        """The newest live process of that name, started now if there is none."""
        for worker_id, worker in reversed(self.workers.items()):
            if (worker.role, worker.name) == (role, name) and self.alive(worker_id):
                return worker_id
        self.register(role, name)
        return list(self.workers)[-1]

    def record(self, slot: str, worker_id: str, table: int, empty: bool, root: int) -> SlotRecord:
        return SlotRecord(
            slot,
            worker_id,
            f"host-{slot}",
            {"memory": b"endpoint"},
            bytes([table]) * 32,
            np.array([4096], np.uint64),
            np.array([64], np.int64),
            empty=empty,
            roots={"replicas": bytes([root]) * 32},
        )

    @precondition(lambda self: self.versions)
    @rule(
        data=st.data(),
        slot=st.sampled_from(SLOT_SETS[-1]),
        table=st.sampled_from([0, 0, 0, 1]),
        empty=st.sampled_from([False, False, False, True]),
        n_rows=st.sampled_from([5, 5, 5, 0]),
        root=st.sampled_from([0, 0, 0, 0, 1]),
    )
    def publish(self, data, slot: str, table: int, empty: bool, n_rows: int, root: int) -> None:
        recent = list(self.versions)[-4:]
        uid = data.draw(st.sampled_from(recent), label="version")
        worker_id = self.some_worker(data, "trainer", slot)
        self.publish_record(uid, self.record(slot, worker_id, table, empty, root), n_rows)

    def some_worker(self, data, role: str, name: str) -> str:
        """Mostly a live one; else any of that name, whatever it is."""
        if data.draw(st.sampled_from([True, True, True, False]), label="live"):
            return self.live_worker(role, name)
        mine = [worker_id for worker_id, worker in self.workers.items() if worker.name == name] or list(self.workers)
        return data.draw(st.sampled_from(mine[-3:]), label="worker")

    def publish_record(self, uid: str, record: SlotRecord, n_rows: int) -> None:
        version = self.versions[uid]
        error = self.why_not(version, record, n_rows)

        def transition(view):
            return state.publish_slot(view, uid, record, n_rows)

        said = (uid, record.worker_id, record.table_digest)
        if version.status == "gone" and self.last_filled.get(record.slot) == said:
            before = self.snapshot()
            try:
                assert self.run(transition) is None, "said again, since its answer was lost"
            except StaleError:
                assert not self.alive(record.worker_id), "only of a worker long lost nothing is known any more"
            assert self.snapshot() == before
            return
        if error is not None:
            before = self.snapshot()
            if error is EMPTY:
                answer = self.run(transition)
                assert isinstance(answer, VersionError)
                assert "empty" in str(answer)
                return
            refused(error, lambda: self.run(transition))
            assert self.snapshot() == before, "a refused publish left a trace"
            return
        answer = self.run(transition)
        if version.filled.get(record.slot) == record:
            assert isinstance(answer, EqualityError) if version.status == "refused" else answer is None
            return
        version.filled[record.slot] = record
        self.progress[record.slot] = (version.key[1], version.layout_epoch, record.table_digest)
        self.last_filled[record.slot] = said
        if len(version.filled) == len(version.slots):
            for name in [s for s, r in version.filled.items() if not self.alive(r.worker_id)]:
                del version.filled[name]
        if len(version.filled) < len(version.slots):
            assert answer is None
        elif len({r.roots["replicas"] for r in version.filled.values()}) > 1:
            assert isinstance(answer, EqualityError)
            assert set(answer.holders) <= set(version.slots)
            version.status = "refused"
        else:
            assert answer is None
            version.status = "ready"
            for other in self.versions.values():
                if other.status == "staging" and other.key < version.key:
                    other.status = "gone"

    def why_not(self, version: ShadowVersion, record: SlotRecord, n_rows: int) -> type | None:
        """The error that a publish must meet, or None where it is right."""
        if version.status == "gone":
            return StaleError
        worker = self.workers[record.worker_id]
        if not self.alive(record.worker_id):
            return WorkerLostError
        if worker.role != "trainer":
            return InvalidRequestError
        if record.slot not in version.slots:
            return VersionError
        held = version.filled.get(record.slot)
        if held == record:
            return None
        if held is not None and (held.worker_id == record.worker_id or self.alive(held.worker_id)):
            return VersionError
        if version.status != "staging":
            return StaleError
        if record.empty and n_rows:
            return InvalidRequestError
        if not n_rows and not record.empty:
            return EMPTY
        if record.slot in self.progress:
            step, layout_epoch, table = self.progress[record.slot]
            if version.key[1] < step or version.layout_epoch < layout_epoch:
                return VersionError
            if version.layout_epoch == layout_epoch and record.table_digest != table:
                return VersionError
        return None

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def close_admission(self, data) -> None:
        uid = self.pick(data, self.versions, "version")
        self.run(lambda view: state.close_admission(view, uid))
        if self.versions[uid].status != "gone":
            self.versions[uid].status = "closed"

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def retire(self, data) -> None:
        uid = self.pick(data, self.versions, "version")
        gone = self.run(lambda view: state.retire(view, uid))
        assert gone is not bool(self.live_leases(uid) and self.versions[uid].status != "gone")
        if self.versions[uid].status != "gone":
            self.drop(uid, self.versions[uid])

    # --- leases ---

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), late=st.sampled_from([False, False, True]))
    def renew(self, data, late: bool) -> None:
        lease_id = self.pick(data, self.leases, "lease")
        lease = self.leases[lease_id]
        if late:
            self.now = max(self.now, lease.expires_at)
        if lease.expires_at > self.now:
            self.run(lambda view: state.renew_lease(view, lease.uid, lease_id, LEASE_S))
            lease.expires_at = self.now + LEASE_S
        else:
            refused(LeaseError, lambda: self.run(lambda view: state.renew_lease(view, lease.uid, lease_id, LEASE_S)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data) -> None:
        lease_id = self.pick(data, self.leases, "lease")
        lease = self.leases[lease_id]
        self.run(lambda view: state.release_lease(view, lease.uid, lease_id))
        lease.expires_at = min(lease.expires_at, self.now)
        version = self.versions[lease.uid]
        if version.wanted_gone and not self.live_leases(lease.uid):
            version.status = "gone"
            assert all(known.uid != lease.uid for known in self.records(Version)), "the last lease did not let it go"

    # --- transactions ---

    def current(self, group: str) -> tuple[str, ShadowTransaction] | None:
        """The group's transaction that is not finished, after the deadlines and losses that decide by themselves."""
        for txn_id, txn in self.transactions.items():
            if txn.group == group:
                self.settle(txn)
                if txn.decision is not Decision.ABORT and txn.outcome is OPEN:
                    return txn_id, txn
        return None

    def settle(self, txn: ShadowTransaction) -> None:
        """Let time decide, in the shadow and, by asking, in the record."""
        if self.decide_by_time(txn):
            self.check_facts(txn, self.run(lambda view: transactions.ask(view, txn.id)))

    def decide_by_time(self, txn: ShadowTransaction) -> bool:
        over = txn.deadline <= self.now or not all(map(self.alive, txn.joined.values()))
        if over and txn.decision is OPEN:
            self.decide(txn, Decision.ABORT)
        elif over and txn.decision is Decision.COMMIT and txn.outcome is OPEN:
            txn.outcome = Decision.QUARANTINE
        else:
            return False
        return True

    def decide(self, txn: ShadowTransaction, verdict: Decision) -> None:
        assert txn.decision is OPEN
        txn.decision = verdict
        txn.decided_at = self.now
        txn.deadline = self.now + TRANSACTION_S

    @rule(
        data=st.data(),
        member=st.sampled_from("abc"),
        step=st.sampled_from(["latest", "latest", "latest", "newest", "older", "future"]),
        after=st.booleans(),
    )
    def join(self, data, member: str, step: str, after: bool) -> None:
        worker_id = self.some_worker(data, "receiver", member)
        wanted = {"latest": None, "newest": self.step, "older": self.step - 1, "future": self.step + 1}[step]
        if wanted is not None and wanted < 0:
            wanted = None
        floor = VersionKey(MODEL, max(self.epoch, 0), max(self.step - 1, 0)) if after and wanted is None else None
        self.join_as(member, worker_id, wanted, floor)

    def join_as(self, member: str, worker_id: str, wanted: int | None, floor: VersionKey | None) -> None:
        group = next(name for name, members in GROUPS.items() if member in members)
        wish = Join(
            MODEL, group, GROUPS[group], member, worker_id, None, wanted, floor, LEASE_S, TRANSACTION_S,
            next(self.ids), next(self.ids),
        )  # fmt: skip
        open_txn = self.current(group)
        try:
            answer = self.run(lambda view: joining.join(view, wish))
        except RendezvousError as error:
            self.check_refused_join(wish, open_txn, error)
            return
        assert self.alive(worker_id)
        if open_txn is not None and open_txn[1].decision is OPEN and open_txn[1].uid not in self.offered():
            self.decide(open_txn[1], Decision.ABORT)  # nobody can join it any more
            self.check_facts(open_txn[1], self.run(lambda view: transactions.ask(view, open_txn[0])))
            open_txn = None
        missed = None if open_txn is not None else self.missed_abort(wish)
        assert isinstance(answer, AbortedError) is (missed is not None), answer
        if missed is not None:
            assert missed.id in str(answer)
            self.last_joined[group, member] = self.sequences[group]  # it is told once
        elif isinstance(answer, Pending):
            self.check_pending_join(wish, open_txn)
        else:
            if answer.transaction == wish.new_transaction:
                self.forget(group)
            self.check_granted_join(wish, open_txn, answer)

    def check_refused_join(self, wish: Join, open_txn, error: RendezvousError) -> None:
        if not self.alive(wish.worker_id):
            assert isinstance(error, WorkerLostError), error
            return
        if self.workers[wish.worker_id].role != "receiver":
            assert isinstance(error, InvalidRequestError), error
            return
        if isinstance(error, TransactionError):
            assert open_txn is not None
            txn = open_txn[1]
            assert txn.decision is OPEN
            holder = txn.joined.get(wish.member, wish.worker_id)
            other_step = wish.step is not None and self.versions[txn.uid].key[1] != wish.step
            assert holder != wish.worker_id or wish.member in txn.votes or other_step, error
            return
        # An explicit step that can never be offered: gone, refused, closed, or withdrawn.
        assert isinstance(error, StaleError | EqualityError), error
        assert wish.step is not None
        *_, version = [None, *(v for v in self.versions.values() if v.key == (self.epoch, wish.step))]
        if version is not None:
            lost = not all(self.alive(r.worker_id) for r in version.filled.values())
            assert version.status in ("gone", "refused", "closed") or (version.status == "ready" and lost), error
            assert isinstance(error, EqualityError) is (version.status == "refused")

    def missed_abort(self, wish: Join) -> ShadowTransaction | None:
        """The group's last transaction, if it was aborted while this process was on its way to it."""
        *_, last = [None, *(txn for txn in self.transactions.values() if txn.group == wish.group)]
        if last is None or last.decision is not Decision.ABORT or self.now >= last.deadline:
            return None
        if wish.step is not None and wish.step != self.versions[last.uid].key[1]:
            return None  # it was on its way to another version
        late = self.last_joined.get((wish.group, wish.member), 0) < last.seq
        return last if late and self.workers[wish.worker_id].registered_at <= last.decided_at else None

    def check_pending_join(self, wish: Join, open_txn) -> None:
        if open_txn is None:
            assert not self.candidates(wish), "a complete version was there and was not offered"
        else:
            assert open_txn[1].decision is Decision.COMMIT

    def candidates(self, wish: Join) -> list[tuple[int, int]]:
        keys = [version.key for version in self.offered().values()]
        if wish.step is not None:
            return [key for key in keys if key == (self.epoch, wish.step)]
        if wish.after is not None:
            return [key for key in keys if key > (wish.after.epoch, wish.after.step)]
        return keys

    def check_granted_join(self, wish: Join, open_txn, answer: Granted) -> None:
        uid, offered = answer.version.uid, self.offered()
        # What is offered is complete, of one step, from live workers alone, and not closed.
        assert uid in offered
        version = offered[uid]
        assert [record.slot for record in answer.slots] == list(version.slots)
        assert {record.slot: record for record in answer.slots} == version.filled
        assert (answer.version.key.epoch, answer.version.key.step) == version.key
        assert version.key[0] == self.epoch
        if open_txn is not None and open_txn[0] == answer.transaction:
            txn = open_txn[1]
            assert txn.decision is OPEN
            assert txn.uid == uid
            assert wish.member not in txn.votes
        else:
            assert open_txn is None
            assert answer.transaction == wish.new_transaction
            assert version.key == max(self.candidates(wish)), "not the newest that was asked for"
            self.sequences[wish.group] += 1
            seq, deadline = self.sequences[wish.group], self.now + TRANSACTION_S
            txn = ShadowTransaction(answer.transaction, uid, wish.group, seq, wish.members, deadline)
            self.transactions[answer.transaction] = txn
        assert txn.joined.setdefault(wish.member, wish.worker_id) == wish.worker_id
        assert txn.leases.setdefault(wish.member, answer.lease_id) == answer.lease_id
        assert set(answer.members) == set(txn.members)
        self.leases[answer.lease_id] = ShadowLease(uid, self.now + LEASE_S)
        self.last_joined[wish.group, wish.member] = txn.seq

    @rule(
        group=st.sampled_from(sorted(GROUPS)),
        how_far=st.sampled_from([3, 3, 3, 2, 1, 0]),
        loss=st.sampled_from([False] * 5 + [True]),
        rounds=st.sampled_from([1, 1, 4]),
    )
    def refit(self, group: str, how_far: int, loss: bool, rounds: int) -> None:
        """The good way of a whole group: all join, vote yes and install; a publisher may die meanwhile."""
        for _ in range(rounds):
            self.refit_once(group, how_far, loss)

    def refit_once(self, group: str, how_far: int, loss: bool) -> None:
        if not self.offered() and how_far:
            self.publish_a_whole_version()
        open_txn = self.current(group)
        for member in GROUPS[group]:
            voted = open_txn is not None and (open_txn[1].decision is not OPEN or member in open_txn[1].votes)
            if not voted:
                joined = open_txn[1].joined.get(member) if open_txn is not None else None
                self.join_as(member, joined or self.live_worker("receiver", member), None, None)
            if loss and (now_open := self.current(group)) is not None:
                self.lose(next(iter(self.versions[now_open[1].uid].filled.values())).worker_id)
        now_open = self.current(group)
        if now_open is None or set(now_open[1].joined) != set(now_open[1].members):
            return
        txn_id, txn = now_open
        for member in GROUPS[group] if how_far > 1 else ():
            if txn.decision is OPEN and member not in txn.votes:
                self.vote_as(txn_id, member, Vote(True, identity=bytes(32), wire_bytes=100), ())
        for member in GROUPS[group] if how_far > 2 and txn.decision is Decision.COMMIT else ():
            if txn.outcome is OPEN and txn.installed.get(member, True):
                self.install_as(txn_id, member, True)

    @precondition(lambda self: self.transactions)
    @rule(
        data=st.data(),
        yes=st.sampled_from([True, True, True, True, False]),
        identity=st.sampled_from([0, 0, 0, 0, 1]),
        wire_bytes=st.sampled_from([100, 100, 100, 0]),
        left=st.sampled_from([(), (), (), ("layers.0.w",)]),
    )
    def vote(self, data, yes: bool, identity: int, wire_bytes: int, left: tuple[str, ...]) -> None:
        txn_id, member = self.some_member(data)
        vote = Vote(yes, "" if yes else "it does not fit", bytes([identity]) * 32, wire_bytes=wire_bytes)
        self.vote_as(txn_id, member, vote, left)

    def some_member(self, data) -> tuple[str, str]:
        """A member of a recent transaction, which may be over."""
        txn_id = data.draw(st.sampled_from(list(self.transactions)[-3:]), label="transaction")
        return txn_id, data.draw(st.sampled_from(self.transactions[txn_id].members), label="member")

    def vote_as(self, txn_id: str, member: str, vote: Vote, left: tuple[str, ...]) -> None:
        txn = self.transactions[txn_id]
        worker_id = txn.joined.get(member, next(iter(self.workers)))

        def transition(view):
            return transactions.cast_vote(view, txn_id, member, worker_id, vote, lambda *_: left)

        if txn.forgotten:
            assert self.run(transition).decision is Decision.UNKNOWN
            return
        if member not in txn.joined or txn.votes.get(member, vote) != vote:
            refused(TransactionError, lambda: self.run(transition))
            return
        self.settle(txn)
        if txn.decision is OPEN:
            txn.votes[member] = vote
            if not vote.yes:
                self.decide(txn, Decision.ABORT)
            elif len(txn.votes) == len(txn.members):
                same = len({v.identity for v in txn.votes.values()}) == 1
                moved = sum(v.wire_bytes for v in txn.votes.values()) > 0
                self.decide(txn, Decision.COMMIT if same and moved and not left else Decision.ABORT)
        self.check_facts(txn, self.run(transition))

    @precondition(lambda self: self.transactions)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def install(self, data, ok: bool) -> None:
        txn_id, member = self.some_member(data)
        self.install_as(txn_id, member, ok)

    def install_as(self, txn_id: str, member: str, ok: bool) -> None:
        txn = self.transactions[txn_id]
        worker_id = txn.joined.get(member, next(iter(self.workers)))

        def transition(view):
            return transactions.install(view, txn_id, member, worker_id, ok, "")

        if txn.forgotten:
            assert self.run(transition).decision is Decision.UNKNOWN
            return
        self.settle(txn)
        told_otherwise = txn.outcome is OPEN and txn.installed.get(member, ok) != ok
        if member not in txn.joined or (txn.outcome is OPEN and txn.decision is not Decision.COMMIT) or told_otherwise:
            refused(TransactionError, lambda: self.run(transition))
            return
        if txn.outcome is OPEN:
            txn.installed[member] = ok
            if not ok:
                txn.outcome = Decision.QUARANTINE
            elif len(txn.installed) == len(txn.members):
                txn.outcome = Decision.SERVE
        self.check_facts(txn, self.run(transition))

    @precondition(lambda self: self.transactions)
    @rule(data=st.data())
    def ask(self, data) -> None:
        txn_id = data.draw(st.sampled_from(list(self.transactions)), label="transaction")
        txn = self.transactions[txn_id]
        facts = self.run(lambda view: transactions.ask(view, txn_id))
        if txn.forgotten:
            assert facts.decision is Decision.UNKNOWN
            return
        self.settle(txn)
        self.check_facts(txn, facts)

    def check_facts(self, txn: ShadowTransaction, facts) -> None:
        assert facts.decision is txn.decision, facts
        assert facts.outcome is (OPEN if txn.decision is Decision.ABORT else txn.outcome), facts
        assert bool(facts.reason) is (txn.decision is Decision.ABORT or txn.outcome is Decision.QUARANTINE), facts

    # --- cut hints ---

    @rule(member=st.sampled_from("abc"), digest=st.integers(0, 2))
    def put_hint(self, member: str, digest: int) -> None:
        group = next(name for name, members in GROUPS.items() if member in members)
        layout_epoch, newest = self.hints[-1]
        mine = (group, member)
        if newest.get(mine) != bytes([digest]) * 32:
            layout_epoch += 1
            others = {of: cut for of, cut in newest.items() if of == mine or not self.hint_is_forgotten(of)}
            self.hints.append((layout_epoch, others | {mine: bytes([digest]) * 32}))
            self.said_at[mine] = self.now
        elif self.said_at[mine] + HOUR_S <= self.now:
            self.said_at[mine] = self.now
        hint = Hint(group, member, bytes([digest]) * 32)
        assert self.run(lambda view: hints.put_hint(view, MODEL, hint)) == layout_epoch
        self.used_at = self.now

    def hint_is_forgotten(self, of: tuple[str, str]) -> bool:
        """Said over an hour ago, by a member of a group of which no transaction is kept."""
        kept = any(txn.group == of[0] and not txn.forgotten for txn in self.transactions.values())
        return not kept and self.said_at[of] + HOUR_S <= self.now

    @rule(back=st.integers(-1, 12))
    def get_hints(self, back: int) -> None:
        """The newest sets and the empty one are there; all ranks that take one layout epoch get one set."""
        wanted = self.hints[-1][0] - back
        known = dict([self.hints[0], *self.hints[-8:]])
        if wanted not in known:
            refused(StaleError, lambda: self.run(lambda view: hints.get_hints(view, MODEL, wanted)))
            return
        found = self.run(lambda view: hints.get_hints(view, MODEL, None if back == 0 else wanted))
        assert found.layout_epoch == wanted
        assert {(hint.group, hint.member): hint.digest for hint in found.hints} == known[wanted]

    # --- what always holds ---

    def records(self, kind: type) -> list:
        return [record for record in self.snapshot().values() if isinstance(record, kind)]

    @invariant()
    def a_version_under_a_live_lease_is_never_gone(self) -> None:
        known = {version.uid for version in self.records(Version)}
        for lease in self.leases.values():
            if lease.expires_at > self.now:
                assert lease.uid in known

    @invariant()
    def a_ready_version_has_all_its_slots(self) -> None:
        for version in self.records(Version):
            shadow = self.versions[version.uid]
            if version.state is VersionState.READY:
                assert shadow.status == "ready"
                assert set(version.filled) == set(version.slots) == set(shadow.filled)
                slots = self.run(lambda view, version=version: state.slot_records(view, version))
                assert {slot.slot: slot for slot in slots} == shadow.filled
                assert all(self.workers[w].role == "trainer" for w in version.filled.values())
            else:
                assert shadow.status != "ready"

    @invariant()
    def what_is_gone_is_gone_and_what_is_not_is_not(self) -> None:
        known = {version.uid for version in self.records(Version)}
        for uid, shadow in self.versions.items():
            if shadow.status == "gone":
                assert uid not in known or shadow.wanted_gone
            elif uid not in known:
                # Only its end may have come early: closed and free of leases, or swept after an hour.
                assert self.swept(uid, shadow), (uid, shadow)
                shadow.status = "gone"

    def swept(self, uid: str, shadow: ShadowVersion) -> bool:
        lost = not all(self.alive(record.worker_id) for record in shadow.filled.values())
        return not self.live_leases(uid) and (
            shadow.wanted_gone or lost or shadow.status == "refused" or not shadow.filled
        )

    @invariant()
    def a_step_never_goes_back_within_an_epoch(self) -> None:
        for model in self.records(Model):
            assert (model.epoch, model.step) == (self.epoch, self.step)
            for ref in model.versions:
                if ref.ready:
                    assert ref.epoch == model.epoch
                    assert ref.step <= model.step

    @invariant()
    def each_fact_is_decided_once(self) -> None:
        for txn in self.records(Transaction):
            shadow = self.transactions[txn.id]
            for seen, said in ((txn.decision, shadow.decision), (txn.outcome, shadow.outcome)):
                # The record may lag behind what time has decided (nobody asked), and never the other way.
                assert seen is said or (seen is OPEN and self.overdue(shadow)), (txn, shadow)

    def overdue(self, txn: ShadowTransaction) -> bool:
        return txn.deadline <= self.now or not all(map(self.alive, txn.joined.values())) or txn.decision in FINAL

    @invariant()
    def what_a_member_may_ask_for_is_kept_and_nothing_else(self) -> None:
        kept = {txn.id for txn in self.transactions.values() if not txn.forgotten}
        assert {txn.id for txn in self.records(Transaction)} == kept
        assert {group.group for group in self.records(Group)} == {self.transactions[txn_id].group for txn_id in kept}

    @invariant()
    def a_group_serves_one_version_that_all_its_members_installed(self) -> None:
        for group in self.records(Group):
            served = [
                txn for txn in self.transactions.values() if txn.group == group.group and txn.outcome is Decision.SERVE
            ]
            for txn in served:
                assert set(txn.installed) == set(txn.members) == set(txn.votes)
                assert all(txn.installed.values())
                assert all(vote.yes for vote in txn.votes.values())
            if group.serving is not None:
                last = served[-1]
                assert (group.serving.epoch, group.serving.step) == self.versions[last.uid].key
                assert not group.quarantined


EMPTY = type("EMPTY", (), {})


def refused(error: type, call) -> None:
    try:
        answer = call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}, got {answer!r}")


class RedisMachine(RendezvousMachine):
    """The same over Redis: two servers' stores take turns, either may be restarted, and both must behave as one."""

    url = ""

    def open(self) -> None:
        import redis

        self.loop = asyncio.new_event_loop()
        with redis.Redis.from_url(self.url) as client:
            client.flushall()
        self.stores = [self.wait(RedisStore.open(self.url)) for _ in range(2)]
        self.turns = itertools.cycle([0, 0, 1, 0, 1, 1])

    def wait(self, call):
        return self.loop.run_until_complete(asyncio.wait_for(call, 20.0))

    def run(self, transition):
        def at_shadow_time(view):
            view.now = self.now
            return transition(view)

        return self.wait(self.stores[next(self.turns)].run(at_shadow_time)).value

    def snapshot(self) -> dict:
        return read_records(self.url)

    @rule(number=st.integers(0, 1))
    def restart_server(self, number: int) -> None:
        self.wait(self.stores[number].close())
        self.stores[number] = self.wait(RedisStore.open(self.url))

    def teardown(self) -> None:
        for store in self.stores:
            self.wait(store.close())
        self.loop.close()


RendezvousMachine.TestCase.settings = settings(
    settings.default, max_examples=2 * settings.default.max_examples, stateful_step_count=60
)
TestRendezvousMachine = RendezvousMachine.TestCase


@pytest.mark.redis
@pytest.mark.timeout(300)
def test_two_servers_on_redis_behave_as_one(redis_url):
    machine = type("RedisMachineHere", (RedisMachine,), {"url": redis_url})
    few = max(8, settings.default.max_examples // 12)
    run_state_machine_as_test(machine, settings=settings(settings.default, max_examples=few, stateful_step_count=40))
