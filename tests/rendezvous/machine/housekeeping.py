"""Sweeping, and pauses after which something may be forgotten: what must be, and what must not."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.rendezvous.machine.shadow import GROUPS, HOUR_S, MODEL, TRANSACTION_S, WEEK_S, Shadow

from reshard.rendezvous import sweeping
from reshard.rendezvous.records import Hints, LastUse, Model, Progress


class HousekeepingRules(Shadow):
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
