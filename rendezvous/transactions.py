"""Which version does a group change to, and does it: the two facts of a transaction.

Pure transitions, as in :mod:`reshard.rendezvous.state`. The life of a transaction:

1. The first member's await finds an offered version, opens the transaction on it and fixes its members. Each member
   that joins gets a lease in the same transition.
2. COMMIT when all members voted yes and their votes fit together; ABORT at the first no, lost member, member that
   cannot join because the version is no longer offered, or at the deadline.
3. After COMMIT, SERVE when all members installed; QUARANTINE at the first failure, lost member, or at the second
   deadline.

A fact is written once. It is forgotten only when each member has joined a later transaction of the group, or
its worker is lost: a member joins only after it learned the facts before, so none that may still ask is left
without an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.rendezvous.errors import AbortedError, EqualityError, StaleError, TransactionError
from reshard.rendezvous.records import (
    Ballot,
    Beat,
    Group,
    LeaseRow,
    Transaction,
    Version,
    VersionRef,
    VersionState,
    Vote,
    ballot_key,
    beat_key,
    group_key,
    model_key,
    transaction_key,
    version_key,
    worker_key,
)
from reshard.rendezvous.state import grant_lease, lost_slots, require_worker, slot_records
from reshard.rendezvous.types import Decision, Facts, SlotRecord, VersionKey
from reshard.rendezvous.view import View

__all__ = ["Granted", "Join", "Pending", "ask", "cast_vote", "install", "join", "settle"]

#: (table digests, digests of name sets, allowed patterns) -> published names that nobody consumed
Unconsumed = Callable[[Sequence[bytes], Sequence[bytes], Sequence[str]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Join:
    """A member's wish: a version of `model` for `group`; `step` None is the latest, `epoch` None the current one."""

    model: str
    group: str
    members: tuple[str, ...]
    member: str
    worker_id: str
    epoch: int | None
    step: int | None
    after: VersionKey | None
    lease_ttl_s: float
    transaction_timeout_s: float
    new_transaction: str
    new_lease: str


@dataclass(frozen=True, slots=True)
class Granted:
    """What a member gets: the version with its slots, the group's transaction, a lease."""

    version: Version
    slots: tuple[SlotRecord, ...]
    transaction: str
    members: tuple[str, ...]
    lease_id: str
    lease_ttl_s: float


@dataclass(frozen=True, slots=True)
class Pending:
    """Nothing yet; `reason` says what is waited for."""

    reason: str


def join(view: View, wish: Join) -> Granted | Pending | AbortedError:
    """Join the group's transaction, opening it if there is none, and take a lease on its version.

    A member that comes after the group's transaction was aborted without it hears of that, once, instead of opening
    another that those who know of the abort may never join; not so one that asks for another version's number.

    Returns
    -------
    An AbortedError is for the caller to raise; the state that goes with it is kept.
    """
    require_worker(view, wish.worker_id, role="receiver", model=wish.model)
    if wish.member not in wish.members:
        raise TransactionError(f"member {wish.member!r} is not among the members of {wish.group!r}")
    key = group_key(wish.model, wish.group)
    group = view.get(key) or Group(wish.model, wish.group, wish.members)
    txn = view.get(transaction_key(group.current)) if group.current else None
    if txn is not None:
        txn = settle(view, txn)
        joined = _join_open(view, wish, txn)
        if joined is not None:
            return joined
        group = view.get(key) or group  # settling may have finished the transaction
        txn = view.get(transaction_key(txn.id))
        if txn is not None and not txn.finished:
            return Pending(f"transaction {txn.id} of group {wish.group!r} is committed and not finished")
    missed = _missed_abort(view, wish, group)
    if missed is not None:
        view.put(key, replace(group, joined={**group.joined, wish.member: group.seq}))
        return AbortedError(f"transaction {missed.id} to {missed.key} was aborted: {missed.reason}")
    chosen = _choose(view, wish)
    if chosen is None:
        return Pending("no complete version")
    txn = Transaction(
        id=wish.new_transaction,
        group=wish.group,
        seq=group.seq + 1,
        uid=chosen.uid,
        key=chosen.key,
        members=wish.members,
        timeout_s=wish.transaction_timeout_s,
        deadline=view.now + wish.transaction_timeout_s,
    )
    view.put(transaction_key(txn.id), txn)
    group = replace(
        group,
        members=wish.members,
        seq=txn.seq,
        current=txn.id,
        history=_prune(view, group),
    )
    view.put(key, group)
    # kept with the ballot: the publisher may let the version go as soon as its leases end, before the last vote
    tables = tuple(dict.fromkeys(record.table_digest for record in slot_records(view, chosen)))
    return _enter(view, wish, txn, Ballot(txn.id, tables), chosen)


def _missed_abort(view: View, wish: Join, group: Group) -> Transaction | None:
    """Return the group's last transaction if it was aborted while this member was on its way to it."""
    txn = view.get(transaction_key(group.history[-1]), watch=False) if group.history else None
    if txn is None or txn.decision is not Decision.ABORT or wish.member not in txn.members or not _may_mean(wish, txn):
        return None
    if group.joined.get(wish.member, 0) >= txn.seq or view.now >= txn.deadline:
        return None
    worker = require_worker(view, wish.worker_id)
    return txn if worker.registered_at <= txn.decided_at else None


def _may_mean(wish: Join, txn: Transaction) -> bool:
    """Whether a member that wishes so may be on its way to this transaction's version."""
    return wish.step is None or (wish.step == txn.key.step and wish.epoch in (None, txn.key.epoch))


def _join_open(view: View, wish: Join, txn: Transaction) -> Granted | Pending | None:
    """Join `txn` if it can still be joined; None if it is over, so that another may be opened."""
    if txn.decision is not Decision.PENDING:
        return None
    if set(txn.members) != set(wish.members):
        raise TransactionError(
            f"group {wish.group!r} is in transaction {txn.id} with members {list(txn.members)[:16]}, "
            f"got {list(wish.members)[:16]}; members are fixed while a transaction is open"
        )
    if not _may_mean(wish, txn):
        raise TransactionError(
            f"group {wish.group!r} is in a transaction to {txn.key}; {wish.member!r} asks for step {wish.step}"
        )
    ballot = view.get(ballot_key(txn.id), watch=False) or Ballot(txn.id)
    holder = ballot.joined.get(wish.member, "")
    if holder and holder != wish.worker_id:
        raise TransactionError(
            f"member {wish.member!r} of group {wish.group!r} is worker {holder}, which lives; "
            f"{wish.worker_id} claims to be it too"
        )
    if wish.member in ballot.votes:
        raise TransactionError(f"{wish.member!r} has voted in transaction {txn.id}; ask for its decision first")
    version = view.get(version_key(txn.uid), watch=False)
    if version is None or version.state is not VersionState.READY:
        _decide(view, txn, ballot, Decision.ABORT, f"{txn.key} is retired; {wish.member!r} can no longer join")
        return None
    if lost_slots(view, version):
        _decide(view, txn, ballot, Decision.ABORT, f"{wish.member!r} can no longer join {txn.key}")
        return None
    return _enter(view, wish, txn, ballot, version)


def _enter(view: View, wish: Join, txn: Transaction, ballot: Ballot, version: Version) -> Granted:
    lease_id = ballot.leases.get(wish.member, wish.new_lease)
    row = LeaseRow(wish.worker_id, wish.member, view.now + wish.lease_ttl_s)
    grant_lease(view, version.uid, lease_id, row)
    if wish.member not in ballot.joined:
        ballot = replace(
            ballot,
            joined={**ballot.joined, wish.member: wish.worker_id},
            leases={**ballot.leases, wish.member: lease_id},
        )
        view.put(ballot_key(txn.id), ballot)
        key = group_key(wish.model, wish.group)
        group = view.get(key)
        if group is not None:
            view.put(key, replace(group, joined={**group.joined, wish.member: txn.seq}))
    slots = tuple(slot_records(view, version))
    return Granted(version, slots, txn.id, txn.members, lease_id, wish.lease_ttl_s)


def _choose(view: View, wish: Join) -> Version | None:
    """Pick the newest offered version that the wish allows; raise if it asks for one that can never be offered."""
    model = view.get(model_key(wish.model))
    if model is None:
        return None
    epoch = model.epoch if wish.epoch is None else wish.epoch
    candidates = [ref for ref in model.versions if ref.ready]
    if wish.step is not None:
        exact = [ref for ref in model.versions if (ref.epoch, ref.step) == (epoch, wish.step)]
        if not exact and (epoch, wish.step) <= (model.epoch, model.step):
            raise StaleError(
                f"{VersionKey(wish.model, max(epoch, 0), wish.step)} is gone or was never opened; "
                f"the model is at epoch {model.epoch}, step {model.step}"
            )
        _raise_if_dead(view, exact)
        candidates = [ref for ref in exact if ref.ready]
    elif wish.after is not None:
        floor = (wish.after.epoch, wish.after.step)
        candidates = [ref for ref in candidates if (ref.epoch, ref.step) > floor]
    for ref in sorted(candidates, key=lambda ref: (ref.epoch, ref.step), reverse=True):
        version = view.get(version_key(ref.uid), watch=False)
        if version is not None and version.state is VersionState.READY and not lost_slots(view, version):
            return version
    return None


def _raise_if_dead(view: View, refs: Sequence[VersionRef]) -> None:
    for ref in refs:
        version = view.get(version_key(ref.uid), watch=False)
        if version is None:
            continue
        if version.state is VersionState.REFUSED:
            raise EqualityError(f"{version.key} was refused: {version.reason}", holders=version.holders)
        if version.state is VersionState.RETIRING:
            raise StaleError(f"{version.key} is retiring; its admission is closed")
        lost = lost_slots(view, version)
        if version.state is VersionState.READY and lost:
            raise StaleError(f"{version.key} was withdrawn: {_name_lost(view, version, lost)}")


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
        return _facts(_decide(view, txn, ballot, Decision.ABORT, f"{member!r} voted no{why}"))
    if len(ballot.votes) < len(txn.members):
        return _facts(txn)
    flaw = _find_flaw(txn, ballot, unconsumed)
    return _facts(_decide(view, txn, ballot, Decision.ABORT if flaw else Decision.COMMIT, flaw))


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
        return _facts(_decide(view, txn, ballot, Decision.QUARANTINE, f"{member!r} failed to install{why}"))
    if len(ballot.installed) == len(txn.members):
        return _facts(_decide(view, txn, ballot, Decision.SERVE, ""))
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
            return _decide(view, txn, ballot, verdict, f"{member!r} is lost: {_silence(view, record)}")
        view.wake_at(record.expires_at)
        view.watch(worker_key(workers[member]))
    if txn.deadline <= view.now:
        missing = [member for member in txn.members if member not in done]
        what = "votes" if voting else "installations"
        return _decide(
            view, txn, ballot, verdict, f"the deadline of {txn.timeout_s:g} s passed without the {what} of {missing}"
        )
    view.wake_at(txn.deadline)
    return txn


def _silence(view: View, record: Beat | None) -> str:
    return "unregistered" if record is None else f"no heartbeat for {view.now - record.seen_at:.1f} s"


def _decide(view: View, txn: Transaction, ballot: Ballot, verdict: Decision, reason: str) -> Transaction:
    """Record a fact, once: the first if it is open, else the second."""
    if txn.decision is Decision.PENDING:
        if verdict is Decision.ABORT:
            version = view.get(version_key(txn.uid), watch=False)
            lost = lost_slots(view, version) if version is not None else ()
            if version is not None and lost:
                reason = f"{reason}; {_name_lost(view, version, lost)}"
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


def _prune(view: View, group: Group) -> tuple[str, ...]:
    """Forget finished transactions whose every member has learned the facts, or is lost; return those kept."""
    kept = []
    for txn_id in group.history:
        txn = view.get(transaction_key(txn_id), watch=False)
        ballot = view.get(ballot_key(txn_id), watch=False)
        if txn is None:
            continue
        may_ask = [
            worker
            for member, worker in (ballot.joined if ballot else {}).items()
            if group.joined.get(member, 0) <= txn.seq
        ]
        beats = view.get_many([beat_key(worker) for worker in may_ask], watch=False)
        if any(record is not None and record.expires_at > view.now for record in beats):
            kept.append(txn_id)
        else:
            view.delete(transaction_key(txn_id))
            view.delete(ballot_key(txn_id))
    return tuple(kept)


def _check_member(txn: Transaction, ballot: Ballot, member: str, worker_id: str) -> None:
    if member not in txn.members:
        raise TransactionError(f"{member!r} is no member of transaction {txn.id}; members: {list(txn.members)[:16]}")
    if ballot.joined.get(member) != worker_id:
        raise TransactionError(f"{member!r} joined transaction {txn.id} as another worker than {worker_id}")


def _facts(txn: Transaction) -> Facts:
    return Facts(txn.decision, txn.outcome, txn.reason)


def _name_lost(view: View, version: Version, lost: Sequence[str]) -> str:
    """``lost slots 'trainer-2' (host)``, for people."""
    named = []
    for slot in lost[:10]:
        worker = view.get(worker_key(version.filled[slot]), watch=False)
        named.append(f"{slot!r} ({worker.info.host})" if worker else repr(slot))
    more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
    return f"lost slots {', '.join(named)}{more}"
