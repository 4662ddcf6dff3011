"""Members vote, install and ask: each fact is decided once."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.rendezvous.machine.shadow import GROUPS, OPEN, Shadow, ShadowTransaction, refused

from reshard.rendezvous import transactions
from reshard.rendezvous.errors import TransactionError
from reshard.rendezvous.records import Vote
from reshard.rendezvous.types import Decision


class DecisionRules(Shadow):
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
