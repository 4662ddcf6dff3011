"""Does a group change to a version together? The two facts of a transaction.

Pure transitions, as in :mod:`reshard.rendezvous.state`. The life of a transaction:

1. It is opened, and joined by each member with a lease: :mod:`reshard.rendezvous.joining`.
2. COMMIT when all members voted yes and their votes fit together; ABORT at the first no, lost member, member that
   cannot join because the version is no longer offered, or at the deadline.
3. After COMMIT, SERVE when all members installed; QUARANTINE at the first failure, lost member, or at the second
   deadline.

A fact is written once. It is forgotten only when each member has joined a later transaction of the group, or its
worker has been lost for an hour (:mod:`reshard.rendezvous.retention`): a member joins only after it learned the facts
before, so none that may still ask is left without an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from reshard.rendezvous.errors import TransactionError
from reshard.rendezvous.keys import ballot_key, beat_key, group_key, transaction_key, version_key, worker_key
from reshard.rendezvous.liveness import lost_slots
from reshard.rendezvous.records import Ballot, Beat, Transaction, Version, Vote
from reshard.rendezvous.types import Decision, Facts
from reshard.rendezvous.view import View

__all__ = ["Unconsumed", "ask", "cast_vote", "decide", "install", "name_lost", "settle"]

#: (table digests, digests of name sets, allowed patterns) -> published names that nobody consumed
Unconsumed = Callable[[Sequence[bytes], Sequence[bytes], Sequence[str]], Sequence[str]]


def cast_vote(view: View, txn_id: str, member: str, worker_id: str, vote: Vote, unconsumed: Unconsumed) -> Facts:
    """Count a member's vote; the last yes decides COMMIT or, if the votes do not fit together, ABORT."""
    txn = view.get(transaction_key(txn_id))
    if txn is None:
        return Facts(Decision.UNKNOWN, Decision.UNKNOWN, f"transaction {txn_id} is unknown to this service")
    ballot = view.get(ballot_key(txn_id), watch=False) or Ballot(txn_id)
    _check_member(txn, ballot, member, worker_id)
    earlier = ballot.votes.get(member)
    if earlier is not None and earlier != vote:
        raise TransactionError(f"{member!r} voted before in transaction {txn_id}, and otherwise")
    txn = settle(view, txn)
    if txn.decision is not Decision.PENDING:
        return _facts(txn)
    if earlier is None:
        ballot = replace(ballot, votes={**ballot.votes, member: vote})
        view.put(ballot_key(txn_id), ballot)
    if not vote.yes:
        why = f": {vote.reason}" if vote.reason else ""
        return _facts(decide(view, txn, ballot, Decision.ABORT, f"{member!r} voted no{why}"))
    if len(ballot.votes) < len(txn.members):
        return _facts(txn)
    flaw = _find_flaw(txn, ballot, unconsumed)
    return _facts(decide(view, txn, ballot, Decision.ABORT if flaw else Decision.COMMIT, flaw))


def _find_flaw(txn: Transaction, ballot: Ballot, unconsumed: Unconsumed) -> str:
    """Say why a unanimous yes does not make a COMMIT; empty if it does."""
    votes = ballot.votes
    reference = txn.members[0]
    for member in txn.members[1:]:
        if votes[member].identity != votes[reference].identity:
            return f"{reference!r} and {member!r} read different things under {txn.key}"
    if sum(vote.wire_bytes for vote in votes.values()) == 0:
        return f"the plans of all {len(txn.members)} members hold zero bytes"
    allowed = tuple(dict.fromkeys(p for vote in votes.values() for p in vote.allow_unconsumed))
    if "*" in allowed:
        return ""
    names = tuple(dict.fromkeys(vote.names_digest for vote in votes.values()))
    left = unconsumed(ballot.tables, names, allowed)
    if left:
        shown = ", ".join(repr(name) for name in left[:10])
        return f"{len(left)} published tensors were consumed by no member: {shown}"
    return ""


def install(view: View, txn_id: str, member: str, worker_id: str, ok: bool, reason: str) -> Facts:
    """Count a member's word on its installation; the last ok decides SERVE, the first failure QUARANTINE."""
    txn = view.get(transaction_key(txn_id))
    if txn is None:
        return Facts(Decision.UNKNOWN, Decision.UNKNOWN, f"transaction {txn_id} is unknown to this service")
    ballot = view.get(ballot_key(txn_id), watch=False) or Ballot(txn_id)
    _check_member(txn, ballot, member, worker_id)
    txn = settle(view, txn)
    if txn.outcome is not Decision.PENDING:
        return _facts(txn)
    if txn.decision is not Decision.COMMIT:
        raise TransactionError(f"{member!r} cannot have installed: transaction {txn_id} is {txn.decision.value}")
    if ballot.installed.get(member, ok) != ok:
        raise TransactionError(f"{member!r} said otherwise before about installing in transaction {txn_id}")
    ballot = replace(ballot, installed={**ballot.installed, member: ok})
    view.put(ballot_key(txn_id), ballot)
    if not ok:
        why = f": {reason}" if reason else ""
        return _facts(decide(view, txn, ballot, Decision.QUARANTINE, f"{member!r} failed to install{why}"))
    if len(ballot.installed) == len(txn.members):
        return _facts(decide(view, txn, ballot, Decision.SERVE, ""))
    return _facts(txn)


def ask(view: View, txn_id: str) -> Facts:
    """Return the facts so far, deciding those whose time has come; UNKNOWN if there is no such transaction."""
    txn = view.get(transaction_key(txn_id))
    if txn is None:
        return Facts(Decision.UNKNOWN, Decision.UNKNOWN, f"transaction {txn_id} is unknown to this service")
    return _facts(settle(view, txn))


def settle(view: View, txn: Transaction) -> Transaction:
    """Decide what time alone decides: a lost member or a passed deadline."""
    if txn.finished:
        return txn
    ballot = view.get(ballot_key(txn.id), watch=False) or Ballot(txn.id)
    voting = txn.decision is Decision.PENDING
    done: Mapping[str, object] = ballot.votes if voting else ballot.installed
    verdict = Decision.ABORT if voting else Decision.QUARANTINE
    workers = {member: ballot.joined[member] for member in txn.members if member in ballot.joined}
    beats = view.get_many([beat_key(worker) for worker in workers.values()], watch=False)
    for member, record in zip(workers, beats, strict=True):
        if record is None or record.expires_at <= view.now:
            return decide(view, txn, ballot, verdict, f"{member!r} is lost: {_silence(view, record)}")
        view.wake_at(record.expires_at)
        view.watch(worker_key(workers[member]))
    if txn.deadline <= view.now:
        missing = [member for member in txn.members if member not in done]
        what = "votes" if voting else "installations"
        return decide(
            view, txn, ballot, verdict, f"the deadline of {txn.timeout_s:g} s passed without the {what} of {missing}"
        )
    view.wake_at(txn.deadline)
    return txn


def _silence(view: View, record: Beat | None) -> str:
    return "unregistered" if record is None else f"no heartbeat for {view.now - record.seen_at:.1f} s"


def decide(view: View, txn: Transaction, ballot: Ballot, verdict: Decision, reason: str) -> Transaction:
    """Record a fact, once: the first if it is open, else the second."""
    if txn.decision is Decision.PENDING:
        if verdict is Decision.ABORT:
            version = view.get(version_key(txn.uid), watch=False)
            lost = lost_slots(view, version) if version is not None else ()
            if version is not None and lost:
                reason = f"{reason}; {name_lost(view, version, lost)}"
        txn = replace(txn, decision=verdict, reason=reason, deadline=view.now + txn.timeout_s, decided_at=view.now)
    elif txn.decision is Decision.COMMIT and txn.outcome is Decision.PENDING:
        txn = replace(txn, outcome=verdict, reason=reason)
    else:
        raise TransactionError(f"transaction {txn.id} is {txn.decision.value}, {txn.outcome.value} already")
    view.put(transaction_key(txn.id), txn)
    if txn.finished:
        _close(view, txn)
    return txn


def _close(view: View, txn: Transaction) -> None:
    key = group_key(txn.key.model, txn.group)
    group = view.get(key)
    if group is None or group.current != txn.id:
        return
    group = replace(group, current="", history=(*group.history, txn.id))
    if txn.outcome is Decision.SERVE:
        group = replace(group, serving=txn.key, quarantined=False)
    elif txn.outcome is Decision.QUARANTINE:
        group = replace(group, serving=None, quarantined=True)
    view.put(key, group)


def _check_member(txn: Transaction, ballot: Ballot, member: str, worker_id: str) -> None:
    if member not in txn.members:
        raise TransactionError(f"{member!r} is no member of transaction {txn.id}; members: {list(txn.members)[:16]}")
    if ballot.joined.get(member) != worker_id:
        raise TransactionError(f"{member!r} joined transaction {txn.id} as another worker than {worker_id}")


def _facts(txn: Transaction) -> Facts:
    return Facts(txn.decision, txn.outcome, txn.reason)


def name_lost(view: View, version: Version, lost: Sequence[str]) -> str:
    """``lost slots 'trainer-2' (host)``, for people."""
    named = []
    for slot in lost[:10]:
        worker = view.get(worker_key(version.filled[slot]), watch=False)
        named.append(f"{slot!r} ({worker.info.host})" if worker else repr(slot))
    more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
    return f"lost slots {', '.join(named)}{more}"
