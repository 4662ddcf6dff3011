"""Why is there no version yet, and who is here? Read-only transitions whose answers are meant for people.

A timeout that only says "not ready" costs an hour: these name the slots that are missing, the publishers that lag at an
older step, those that were lost or offered an empty table, and versions that were refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.rendezvous.descriptions import (
    Description,
    GroupStatus,
    LeaseStatus,
    SlotStatus,
    TransactionStatus,
    VersionStatus,
    WorkerStatus,
)
from reshard.rendezvous.keys import (
    ballot_key,
    beat_key,
    group_key,
    leases_key,
    model_key,
    progress_key,
    transaction_key,
    version_key,
    worker_key,
)
from reshard.rendezvous.records import Beat, Group, LeaseBook, Model, Transaction, Version, VersionState, Worker
from reshard.rendezvous.records import (
    Progress as SlotSteps,
)
from reshard.rendezvous.state import lost_slots
from reshard.rendezvous.types import Progress, VersionKey
from reshard.rendezvous.view import View

__all__ = ["describe", "explain_wait"]

_SAMPLE = 16


def explain_wait(
    view: View, model_name: str, step: int | None, epoch: int | None, after: VersionKey | None
) -> Progress:
    """Say how far the version got that a receiver waits for: that step, or else the newest not yet installed."""
    model = view.get(model_key(model_name), watch=False)
    if model is None or not model.versions:
        return Progress(message=f"no version of {model_name!r} is open")
    floor = (after.epoch, after.step) if after is not None else (-1, -1)
    wanted_epoch = model.epoch if epoch is None else epoch
    for ref in sorted(model.versions, key=lambda ref: (ref.epoch, ref.step), reverse=True):
        fits = (ref.epoch, ref.step) == (wanted_epoch, step) if step is not None else (ref.epoch, ref.step) > floor
        version = view.get(version_key(ref.uid), watch=False) if fits else None
        if version is not None:
            return _explain_version(view, version)
    newest = max((ref.epoch, ref.step) for ref in model.versions)
    wish = (
        f"step {step} of epoch {wanted_epoch}" if step is not None else f"any after epoch {floor[0]}, step {floor[1]}"
    )
    return Progress(message=f"{wish} is not open; the newest version is epoch {newest[0]}, step {newest[1]}")


def _explain_version(view: View, version: Version) -> Progress:
    missing = [slot for slot in version.slots if slot not in version.filled]
    lost = lost_slots(view, version)
    said = [f"{version.key} is {version.state.value}: {len(version.filled)} of {len(version.slots)} slots filled"]
    if missing:
        steps = view.get(progress_key(version.key.model), watch=False)
        said.append(f"missing {_lagging(missing, steps, version.key)}")
    if version.offered_empty:
        said.append(
            f"{len(version.offered_empty)} empty (a table with no rows, not published as empty=True): "
            f"{_some(version.offered_empty)}"
        )
    if lost:
        said.append(f"lost {_some(lost)}: {_silent(view, version, lost)}")
    if version.reason:
        said.append(version.reason)
    return Progress(
        n_filled=len(version.filled),
        n_slots=len(version.slots),
        missing=tuple(missing[:_SAMPLE]),
        lost=tuple(lost[:_SAMPLE]),
        empty=version.offered_empty[:_SAMPLE],
        message="; ".join(said),
    )


def _lagging(missing: Sequence[str], steps: SlotSteps | None, key: VersionKey) -> str:
    named = []
    for slot in missing[:_SAMPLE]:
        last = steps.slots.get(slot) if steps is not None and steps.epoch == key.epoch else None
        named.append(f"{slot!r} (at step {last.step})" if last is not None else repr(slot))
    more = f" and {len(missing) - _SAMPLE} more" if len(missing) > _SAMPLE else ""
    return ", ".join(named) + more


def _silent(view: View, version: Version, lost: Sequence[str]) -> str:
    record = view.get(beat_key(version.filled[lost[0]]), watch=False)
    return f"no heartbeat for {view.now - record.seen_at:.1f} s" if record is not None else "unregistered"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SAMPLE} more" if len(names) > _SAMPLE else ""
    return ", ".join(repr(name) for name in names[:_SAMPLE]) + more


def describe(
    view: View,
    *,
    store: str,
    server_id: str,
    workers: Sequence[str],
    models: Sequence[str],
    groups: Sequence[str],
    transactions: Sequence[str],
) -> Description:
    """Describe everything; the arguments are the names of all records of each kind."""
    found = [model for model in view.get_many([model_key(name) for name in models]) if model is not None]
    uids = [ref.uid for model in found for ref in model.versions]
    versions = [version for version in view.get_many([version_key(uid) for uid in uids]) if version is not None]
    books = {book.uid: book for book in view.get_many([leases_key(uid) for uid in uids]) if book is not None}
    people = [w for w in view.get_many([worker_key(worker_id) for worker_id in workers]) if w is not None]
    beats = dict(zip(workers, view.get_many([beat_key(worker_id) for worker_id in workers]), strict=True))
    steps = dict(zip(models, view.get_many([progress_key(name) for name in models]), strict=True))
    parties = [g for g in view.get_many([group_key(*name.split("\0", 1)) for name in groups]) if g is not None]
    changes = [t for t in view.get_many([transaction_key(name) for name in transactions]) if t is not None]
    return Description(
        store=store,
        server_id=server_id,
        workers=tuple(_worker(view, worker, beats.get(worker.id)) for worker in people),
        versions=tuple(
            _version(view, version, steps.get(version.key.model), books.get(version.uid), beats) for version in versions
        ),
        leases=tuple(lease for book in books.values() for lease in _leases(view, book)),
        transactions=tuple(_transaction(view, change) for change in changes),
        groups=tuple(_group(party, found) for party in parties),
    )


def _worker(view: View, worker: Worker, record: Beat | None) -> WorkerStatus:
    info = worker.info
    return WorkerStatus(
        id=worker.id,
        role=info.role,
        model=info.model,
        host=info.host,
        name=info.name,
        ttl_s=worker.ttl_s,
        age_s=view.now - worker.registered_at,
        silent_s=view.now - (record.seen_at if record is not None else worker.registered_at),
        lost=_is_lost(view, record),
    )


def _is_lost(view: View, record: Beat | None) -> bool:
    return record is None or record.expires_at <= view.now


def _version(
    view: View, version: Version, steps: SlotSteps | None, book: LeaseBook | None, beats: dict[str, Beat | None]
) -> VersionStatus:
    slots, any_lost = [], False
    for slot in version.slots:
        worker_id = version.filled.get(slot, "")
        lost = bool(worker_id) and _is_lost(view, beats.get(worker_id))
        any_lost |= lost
        state = "lost" if lost else "filled" if worker_id else "missing"
        last = steps.slots.get(slot) if steps is not None and steps.epoch == version.key.epoch else None
        slots.append(SlotStatus(slot, state, worker_id, last.step if last is not None else -1))
    withdrawn = any_lost and version.state is VersionState.READY
    return VersionStatus(
        uid=version.uid,
        version=version.key,
        state="withdrawn" if withdrawn else version.state.value,
        layout_epoch=version.layout_epoch,
        slots=tuple(slots),
        n_leases=sum(row.expires_at > view.now for row in book.rows.values()) if book is not None else 0,
        age_s=view.now - version.opened_at,
    )


def _leases(view: View, book: LeaseBook) -> list[LeaseStatus]:
    return [
        LeaseStatus(lease_id, book.uid, row.holder, row.worker_id, row.expires_at - view.now)
        for lease_id, row in book.rows.items()
        if row.expires_at > view.now
    ]


def _transaction(view: View, txn: Transaction) -> TransactionStatus:
    ballot = view.get(ballot_key(txn.id))
    return TransactionStatus(
        id=txn.id,
        group=txn.group,
        version=txn.key,
        members=txn.members,
        joined=tuple(ballot.joined) if ballot is not None else (),
        voted=tuple(ballot.votes) if ballot is not None else (),
        installed=tuple(member for member, ok in ballot.installed.items() if ok) if ballot is not None else (),
        decision=txn.decision,
        outcome=txn.outcome,
        reason=txn.reason,
        remaining_s=0.0 if txn.finished else txn.deadline - view.now,
    )


def _group(group: Group, models: Sequence[Model]) -> GroupStatus:
    ready = [
        (ref.epoch, ref.step) for model in models if model.model == group.model for ref in model.versions if ref.ready
    ]
    lag = 0
    if ready and group.serving is not None and group.serving.epoch == max(ready)[0]:
        lag = max(max(ready)[1] - group.serving.step, 0)
    return GroupStatus(group.model, group.group, group.members, group.serving, group.quarantined, lag)
