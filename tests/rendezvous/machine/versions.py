"""Versions are opened, filled, closed and retired; leases on them are renewed and end."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.rendezvous.machine.shadow import LEASE_S, MODEL, SLOT_SETS, Shadow, ShadowVersion, refused

from reshard.rendezvous import state
from reshard.rendezvous.errors import (
    EqualityError,
    InvalidRequestError,
    LeaseError,
    StaleError,
    VersionError,
    WorkerLostError,
)
from reshard.rendezvous.records import Version
from reshard.rendezvous.types import SlotRecord, VersionKey

EMPTY = type("EMPTY", (), {})


class VersionRules(Shadow):
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
