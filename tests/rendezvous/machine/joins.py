"""Members await a version: who gets which, who waits, who hears why not."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.rendezvous.machine.shadow import (
    GROUPS,
    LEASE_S,
    MODEL,
    OPEN,
    TRANSACTION_S,
    Shadow,
    ShadowLease,
    ShadowTransaction,
)

from reshard.rendezvous import joining, transactions
from reshard.rendezvous.errors import (
    AbortedError,
    EqualityError,
    InvalidRequestError,
    RendezvousError,
    StaleError,
    TransactionError,
    WorkerLostError,
)
from reshard.rendezvous.joining import Granted, Join, Pending
from reshard.rendezvous.types import Decision, VersionKey


class JoinRules(Shadow):
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
