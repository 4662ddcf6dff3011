"""Which version does a group change to? A member's await: it joins its group's transaction, or opens one.

Pure, as :mod:`reshard.rendezvous.state`.

1. The first member's await finds an offered version, opens the transaction on it and fixes its members. Each member
   that joins gets a lease in the same transition.
2. A member that asks for what can never be offered again hears why; one that came too late for an aborted transaction
   hears of that, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reshard.rendezvous.errors import AbortedError, EqualityError, StaleError, TransactionError
from reshard.rendezvous.keys import ballot_key, group_key, model_key, transaction_key, version_key
from reshard.rendezvous.leases import grant_lease
from reshard.rendezvous.liveness import lost_slots, require_worker
from reshard.rendezvous.publishing import slot_records
from reshard.rendezvous.records import Ballot, Group, LeaseRow, Transaction, Version, VersionRef, VersionState
from reshard.rendezvous.retention import prune_group
from reshard.rendezvous.transactions import decide, name_lost, settle
from reshard.rendezvous.types import Decision, SlotRecord, VersionKey
from reshard.rendezvous.view import View

__all__ = ["Granted", "Join", "Pending", "join"]


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
    group = prune_group(view, group, wish.members)
    view.put(key, replace(group, members=wish.members, seq=txn.seq, current=txn.id))
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
        decide(view, txn, ballot, Decision.ABORT, f"{txn.key} is retired; {wish.member!r} can no longer join")
        return None
    if lost_slots(view, version):
        decide(view, txn, ballot, Decision.ABORT, f"{wish.member!r} can no longer join {txn.key}")
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
            raise StaleError(f"{version.key} was withdrawn: {name_lost(view, version, lost)}")
