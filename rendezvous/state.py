"""Which workers live, which versions are complete, who holds a lease on them?

Pure transitions over a :class:`~reshard.rendezvous.view.View`: no I/O and no clock; time is ``view.now``. A
worker is lost from the moment its TTL passes, whoever looks; nothing waits for a reaper. What a version goes
through:

1. STAGING: opened by its first publisher; named slots are filled one by one.
2. READY, atomically with the last slot, if every slot's worker lives and all roots that were claimed equal are;
   else REFUSED. A READY version with a lost worker is withdrawn: it stays READY on record, never offered again.
3. RETIRING: admission is closed; no new lease.
4. Gone, once retired and free of live leases: its records are deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reshard.rendezvous import limits
from reshard.rendezvous.errors import (
    EqualityError,
    InvalidRequestError,
    LeaseError,
    RendezvousError,
    StaleError,
    VersionError,
    WorkerLostError,
)
from reshard.rendezvous.records import (
    Beat,
    Layout,
    LeaseBook,
    LeaseRow,
    Model,
    Progress,
    Run,
    Slot,
    SlotProgress,
    Version,
    VersionRef,
    VersionState,
    Worker,
    beat_key,
    leases_key,
    model_key,
    progress_key,
    slot_key,
    version_key,
    worker_key,
)
from reshard.rendezvous.types import SlotRecord, VersionKey, WorkerInfo
from reshard.rendezvous.view import View

__all__ = [
    "beat",
    "close_admission",
    "close_worker",
    "grant_lease",
    "live_leases",
    "lost_slots",
    "open_epoch",
    "open_version",
    "publish_slot",
    "register",
    "release_lease",
    "renew_lease",
    "require_worker",
    "retire",
    "slot_records",
]

_MAX_RUNS = 64  # run ids remembered per model, newest last


def register(view: View, worker_id: str, info: WorkerInfo, ttl_s: float) -> None:
    """Record a process life under its fresh id.

    Saying the same again is the same; an id is never taken over.
    """
    known = view.get(worker_key(worker_id))
    if known is not None and (known.info != info or known.ttl_s != ttl_s):
        raise InvalidRequestError("worker.id", f"{worker_id} belongs to {known.info.name!r} already")
    if known is None:
        view.put(worker_key(worker_id), Worker(worker_id, info, ttl_s, view.now))
        view.put(beat_key(worker_id), Beat(worker_id, view.now, view.now + ttl_s))


def beat(view: View, worker_id: str) -> float:
    """Prolong a live worker by its TTL, which is returned. A lost worker stays lost: WorkerLostError."""
    worker = require_worker(view, worker_id)
    view.put(beat_key(worker_id), Beat(worker_id, view.now, view.now + worker.ttl_s))
    return worker.ttl_s


def close_worker(view: View, worker_id: str) -> None:
    """End a worker at once, as if its TTL had passed."""
    worker = view.get(worker_key(worker_id), watch=False)
    if worker is not None and _expires_at(view, worker_id) > view.now:
        view.put(beat_key(worker_id), Beat(worker_id, view.now, view.now))
        view.put(worker_key(worker_id), worker)  # wakes those whom this concerns; a beat wakes nobody


def require_worker(view: View, worker_id: str, *, role: str = "", model: str = "") -> Worker:
    """Return the record of a live worker, or raise WorkerLostError."""
    worker = view.get(worker_key(worker_id), watch=False)
    if worker is None:
        raise WorkerLostError(f"worker {worker_id} is unknown to this service; register anew")
    if _expires_at(view, worker_id) <= view.now:
        raise WorkerLostError(
            f"worker {worker.info.name!r} ({worker_id}) sent no heartbeat within its {worker.ttl_s:g} s; register anew"
        )
    if role and worker.info.role != role:
        raise InvalidRequestError("worker_id", f"{worker.info.name!r} is a {worker.info.role}, not a {role}")
    if model and worker.info.model != model:
        raise InvalidRequestError(
            "worker_id", f"{worker.info.name!r} is registered for model {worker.info.model!r}, not {model!r}"
        )
    return worker


def open_epoch(view: View, model_name: str, run_id: str) -> int:
    """Return the epoch of a run, allocated at its first call; a new epoch retires all versions of the old ones."""
    model = _model(view, model_name)
    for run in model.runs:
        if run.run_id == run_id:
            if run.epoch < model.epoch:
                raise VersionError(
                    f"run {run_id!r} has epoch {run.epoch} of {model_name!r}, which epoch {model.epoch} replaced"
                )
            return run.epoch
    if model.epoch >= limits.MAX_STEP:
        raise VersionError(f"epoch {model.epoch} of {model_name!r} is the last one; choose another model name")
    model = _new_epoch(view, model, model.epoch + 1)
    view.put(model_key(model_name), replace(model, runs=(*model.runs[1 - _MAX_RUNS :], Run(run_id, model.epoch))))
    return model.epoch


def open_version(view: View, key: VersionKey, slots: Sequence[str], layout_epoch: int, new_uid: str) -> str:
    """Open a version, or agree with whoever did: same slots, same layout epoch. Returns its uid."""
    model = _model(view, key.model)
    if key.epoch < model.epoch:
        raise VersionError(f"{key}: epoch {key.epoch} was replaced by epoch {model.epoch}")
    if key.epoch > model.epoch + limits.MAX_EPOCH_JUMP:
        raise VersionError(f"{key}: epoch {key.epoch} is far beyond epoch {model.epoch}; get one from open_epoch")
    if key.epoch > model.epoch:
        model = _new_epoch(view, model, key.epoch)
    if key.step < model.step:
        raise VersionError(f"{key}: step {key.step} goes back; step {model.step} was opened in this epoch")
    if key.step == model.step:
        return _agree(view, model, key, slots, layout_epoch)
    version = Version(new_uid, key, layout_epoch, tuple(slots), view.now)
    view.put(version_key(new_uid), version)
    view.put(
        model_key(key.model),
        replace(
            model,
            step=key.step,
            versions=(*model.versions, VersionRef(new_uid, key.epoch, key.step)),
        ),
    )
    return new_uid


def _agree(view: View, model: Model, key: VersionKey, slots: Sequence[str], layout_epoch: int) -> str:
    uid = next((ref.uid for ref in model.versions if (ref.epoch, ref.step) == (key.epoch, key.step)), "")
    version = view.get(version_key(uid), watch=False) if uid else None
    if version is None:
        raise StaleError(f"{key} was opened before and is gone; a step is published once")
    if set(version.slots) != set(slots):
        more, fewer = sorted(set(slots) - set(version.slots)), sorted(set(version.slots) - set(slots))
        raise VersionError(
            f"{key}: publishers disagree on its slots: it was opened with {len(version.slots)}, "
            f"now {len(slots)} are said; added {more[:10]}, left out {fewer[:10]}"
        )
    if version.layout_epoch != layout_epoch:
        raise VersionError(
            f"{key}: publishers disagree on its layout epoch: opened with {version.layout_epoch}, got {layout_epoch}"
        )
    return version.uid


def publish_slot(view: View, uid: str, record: SlotRecord, n_rows: int) -> RendezvousError | None:
    """Fill a slot; the last one makes the version READY, or REFUSED if roots claimed equal differ.

    Returns
    -------
    None, or an error for the publisher that goes together with a change of state which must be kept.
    """
    if view.get(version_key(uid)) is None and _filled_before(view, uid, record):
        return None
    version = require_version(view, uid)
    key = version.key
    worker = require_worker(view, record.worker_id, role="trainer", model=key.model)
    if record.slot not in version.slots:
        raise VersionError(f"{key} has no slot {record.slot!r}; it expects {_sample(version.slots)}")
    if _check_refill(view, version, record, worker):
        refused = version.state is VersionState.REFUSED
        return EqualityError(version.reason, holders=version.holders) if refused else None
    if version.state is not VersionState.STAGING:
        raise StaleError(f"{key} is {version.state.value}; slot {record.slot!r} cannot be filled any more")
    if record.empty and n_rows:
        raise InvalidRequestError("record.empty", f"slot {record.slot!r} says empty, its table has {n_rows} rows")
    if not n_rows and not record.empty:
        offered = dict.fromkeys((*version.offered_empty, record.slot))
        view.put(version_key(uid), replace(version, offered_empty=tuple(offered)))
        return VersionError(
            f"{key}: slot {record.slot!r} was offered a table with no rows; if this rank holds nothing, "
            "publish it with empty=True"
        )
    _advance_slot(view, version, record)
    view.put(slot_key(uid, record.slot), Slot(uid, record))
    version = replace(
        version,
        filled={**version.filled, record.slot: record.worker_id},
        offered_empty=tuple(slot for slot in version.offered_empty if slot != record.slot),
    )
    return _complete(view, version)


def _filled_before(view: View, uid: str, record: SlotRecord) -> bool:
    """Tell whether a version that is gone had this slot from this worker: whoever missed the answer asks again."""
    worker = view.get(worker_key(record.worker_id), watch=False)
    progress = view.get(progress_key(worker.info.model), watch=False) if worker is not None else None
    last = progress.slots.get(record.slot) if progress is not None else None
    return (
        last is not None
        and (last.uid, last.worker_id) == (uid, record.worker_id)
        and last.layout.table_digest == record.table_digest
    )


def _check_refill(view: View, version: Version, record: SlotRecord, worker: Worker) -> bool:
    """Tell whether the slot is filled by this very record already; refuse a second table for it."""
    holder_id = version.filled.get(record.slot, "")
    if not holder_id:
        return False
    if holder_id != record.worker_id:
        if _expires_at(view, holder_id) > view.now:
            holder = view.get(worker_key(holder_id), watch=False)
            name = holder.info.name if holder else holder_id
            raise VersionError(
                f"{version.key}: slot {record.slot!r} is filled by {name!r} ({holder_id}); "
                f"{worker.info.name!r} ({record.worker_id}) publishes it too",
                holders=(name, worker.info.name),
            )
        return False
    slot = view.get(slot_key(version.uid, record.slot), watch=False)
    if slot is not None and slot.record == record:
        return True
    raise VersionError(
        f"{version.key}: slot {record.slot!r} was published before with another table, other memory or "
        "other digests; a slot is published once a version",
        holders=(record.slot,),
    )


def _advance_slot(view: View, version: Version, record: SlotRecord) -> None:
    """Note how far the slot got; refuse a step back and a layout that changed unannounced."""
    key = version.key
    progress = view.get(progress_key(key.model), watch=False)
    if progress is None or progress.epoch != key.epoch:
        progress = Progress(key.epoch)
    last = progress.slots.get(record.slot)
    layout = Layout(version.layout_epoch, record.table_digest)
    if last is not None:
        if key.step < last.step:
            raise VersionError(f"{key}: slot {record.slot!r} published step {last.step} before")
        if layout.layout_epoch < last.layout.layout_epoch:
            raise VersionError(
                f"{key}: slot {record.slot!r} goes back from layout epoch {last.layout.layout_epoch} "
                f"to {layout.layout_epoch}"
            )
        if layout.layout_epoch == last.layout.layout_epoch and layout != last.layout:
            raise VersionError(
                f"{key}: slot {record.slot!r} changed its table within layout epoch {layout.layout_epoch}; "
                "a new layout needs a new layout epoch"
            )
    slots = {**progress.slots, record.slot: SlotProgress(key.step, layout, version.uid, record.worker_id)}
    view.put(progress_key(key.model), Progress(key.epoch, slots))


def _complete(view: View, version: Version) -> RendezvousError | None:
    """Store the version; make it READY or REFUSED if its last slot has come and all its workers live."""
    if len(version.filled) == len(version.slots):
        dead = {slot for slot, worker_id in version.filled.items() if _expires_at(view, worker_id) <= view.now}
        for slot in dead:
            view.delete(slot_key(version.uid, slot))
        filled = {slot: worker for slot, worker in version.filled.items() if slot not in dead}
        version = replace(version, filled=filled)
    if len(version.filled) < len(version.slots):
        view.put(version_key(version.uid), version)
        return None
    model = _model(view, version.key.model)
    unequal = _unequal_roots(slot_records(view, version))
    if unequal is not None:
        refused = replace(version, state=VersionState.REFUSED, reason=str(unequal), holders=unequal.holders)
        view.put(version_key(version.uid), refused)
        view.put(model_key(model.model), model)  # wakes those who wait for this version
        return unequal
    view.put(version_key(version.uid), replace(version, state=VersionState.READY))
    versions = []
    for ref in model.versions:
        if ref.uid == version.uid:
            versions.append(replace(ref, ready=True))
        elif not ref.ready and ref.step < version.key.step and _is_staging(view, ref.uid):
            _delete_version(view, ref.uid)  # its slots moved on: steps never go back, so it never completes
        else:
            versions.append(ref)
    view.put(model_key(model.model), replace(model, versions=tuple(versions)))
    return None


def _unequal_roots(records: Iterable[SlotRecord]) -> EqualityError | None:
    first: dict[str, SlotRecord] = {}
    for record in records:
        for name, root in record.roots.items():
            other = first.setdefault(name, record)
            if other.roots[name] != root:
                return EqualityError(
                    f"slots {other.slot!r} and {record.slot!r} claim equal content for {name!r} and differ: "
                    f"{other.roots[name].hex()[:16]}... and {root.hex()[:16]}...",
                    holders=(other.slot, record.slot),
                )
    return None


def slot_records(view: View, version: Version) -> list[SlotRecord]:
    """Return the records of a version's filled slots, in the order of its slots."""
    names = [slot for slot in version.slots if slot in version.filled]
    found = view.get_many([slot_key(version.uid, slot) for slot in names], watch=False)
    return [slot.record for slot in found if slot is not None]


def lost_slots(view: View, version: Version) -> tuple[str, ...]:
    """Name the filled slots whose worker is lost now; also says when that may change."""
    beats = view.get_many([beat_key(worker_id) for worker_id in version.filled.values()], watch=False)
    lost = []
    for slot, record in zip(version.filled, beats, strict=True):
        if record is None or record.expires_at <= view.now:
            lost.append(slot)
        else:
            view.wake_at(record.expires_at)
            view.watch(worker_key(version.filled[slot]))
    return tuple(lost)


def require_version(view: View, uid: str) -> Version:
    """Return a version's record, or raise StaleError."""
    version = view.get(version_key(uid))
    if version is None:
        raise StaleError(f"version {uid} is gone, or was never opened here")
    return version


def close_admission(view: View, uid: str) -> None:
    """Grant no new leases on the version. Idempotent; a version that is gone counts as closed."""
    version = view.get(version_key(uid))
    if version is None or version.state in (VersionState.RETIRING, VersionState.REFUSED):
        return  # a refused one offers nothing, and goes on saying why
    view.put(version_key(uid), replace(version, state=VersionState.RETIRING))
    model = _model(view, version.key.model)
    refs = tuple(replace(ref, ready=False) if ref.uid == uid else ref for ref in model.versions)
    view.put(model_key(model.model), replace(model, versions=refs))


def retire(view: View, uid: str) -> bool:
    """Close admission and let the version go once no lease on it lives. Returns whether it is gone."""
    close_admission(view, uid)
    version = view.get(version_key(uid))
    if version is None:
        return True
    if live_leases(view, uid):
        view.put(version_key(uid), replace(version, drop=True))
        return False
    _delete_version(view, uid)
    _forget_ref(view, version.key.model, uid)
    return True


def live_leases(view: View, uid: str) -> Mapping[str, LeaseRow]:
    """Return the leases that have not ended, by id; also says when the next one ends."""
    book = view.get(leases_key(uid))
    if book is None:
        return {}
    live = {lease_id: row for lease_id, row in book.rows.items() if row.expires_at > view.now}
    if live:
        view.wake_at(min(row.expires_at for row in live.values()))
    return live


def grant_lease(view: View, uid: str, lease_id: str, row: LeaseRow) -> None:
    """Record a lease on an offered version; leases that ended are dropped on the way."""
    view.put(leases_key(uid), LeaseBook(uid, {**live_leases(view, uid), lease_id: row}))


def renew_lease(view: View, uid: str, lease_id: str, ttl_s: float) -> None:
    """Prolong a live lease, also while the version retires. LeaseError if it has ended."""
    live = live_leases(view, uid)
    row = live.get(lease_id)
    if row is None:
        raise LeaseError(f"lease {lease_id} on version {uid} has ended or never was; what was read under it is void")
    renewed = replace(row, expires_at=view.now + ttl_s)
    view.put(leases_key(uid), LeaseBook(uid, {**live, lease_id: renewed}))


def release_lease(view: View, uid: str, lease_id: str) -> None:
    """End a lease; one that has ended is no error. The last one lets a retired version go."""
    live = dict(live_leases(view, uid))
    live.pop(lease_id, None)
    version = view.get(version_key(uid))
    if version is None or (version.drop and not live):
        _delete_version(view, uid)
        if version is not None:
            _forget_ref(view, version.key.model, uid)
    else:
        view.put(leases_key(uid), LeaseBook(uid, live))


def _new_epoch(view: View, model: Model, epoch: int) -> Model:
    """Start an epoch: versions of the old one are closed, and go unless a lease on them lives."""
    kept = []
    for ref in model.versions:
        version = view.get(version_key(ref.uid), watch=False)
        if version is not None and live_leases(view, ref.uid):
            view.put(version_key(ref.uid), replace(version, state=VersionState.RETIRING, drop=True))
            kept.append(replace(ref, ready=False))
        else:
            _delete_version(view, ref.uid)
    view.delete(progress_key(model.model))
    return replace(model, epoch=epoch, step=-1, versions=tuple(kept))


def _delete_version(view: View, uid: str) -> None:
    version = view.get(version_key(uid), watch=False)
    if version is not None:
        for slot in version.filled:
            view.delete(slot_key(uid, slot))
        view.delete(version_key(uid))
    view.delete(leases_key(uid))


def _forget_ref(view: View, model_name: str, uid: str) -> None:
    model = _model(view, model_name)
    refs = tuple(ref for ref in model.versions if ref.uid != uid)
    if len(refs) != len(model.versions):
        view.put(model_key(model_name), replace(model, versions=refs))


def _is_staging(view: View, uid: str) -> bool:
    version = view.get(version_key(uid), watch=False)
    return version is not None and version.state is VersionState.STAGING


def _model(view: View, name: str) -> Model:
    return view.get(model_key(name)) or Model(name)


def _expires_at(view: View, worker_id: str) -> float:
    record = view.get(beat_key(worker_id), watch=False)
    return record.expires_at if record is not None else float("-inf")


def _sample(names: Sequence[str], at_most: int = 10) -> str:
    shown = ", ".join(repr(name) for name in names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"
