"""How does a version come to be? It is opened with all its slots, filled slot by slot, and READY at once with the last.

Pure, as :mod:`reshard.rendezvous.state`. Publishers agree on slots and layout epoch; a slot goes forward only, and
changes its table with a new layout epoch only; with the last slot, roots claimed equal are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from reshard.rendezvous import limits
from reshard.rendezvous.errors import EqualityError, InvalidRequestError, RendezvousError, StaleError, VersionError
from reshard.rendezvous.keys import model_key, progress_key, slot_key, version_key, worker_key
from reshard.rendezvous.liveness import expires_at, require_worker
from reshard.rendezvous.records import (
    Layout,
    Model,
    Progress,
    Run,
    Slot,
    SlotProgress,
    Version,
    VersionRef,
    VersionState,
    Worker,
)
from reshard.rendezvous.retention import bound_slots, use_model
from reshard.rendezvous.retiring import delete_version, find_model, start_epoch
from reshard.rendezvous.types import SlotRecord, VersionKey
from reshard.rendezvous.view import View

__all__ = ["open_epoch", "open_version", "publish_slot", "require_version", "slot_records"]

_MAX_RUNS = 64  # run ids remembered per model, newest last


def open_epoch(view: View, model_name: str, run_id: str) -> int:
    """Return the epoch of a run, allocated at its first call; a new epoch retires all versions of the old ones."""
    model = find_model(view, model_name)
    for run in model.runs:
        if run.run_id == run_id:
            if run.epoch < model.epoch:
                raise VersionError(
                    f"run {run_id!r} has epoch {run.epoch} of {model_name!r}, which epoch {model.epoch} replaced"
                )
            use_model(view, model_name)
            return run.epoch
    if model.epoch >= limits.MAX_STEP:
        raise VersionError(f"epoch {model.epoch} of {model_name!r} is the last one; choose another model name")
    use_model(view, model_name)
    model = start_epoch(view, model, model.epoch + 1)
    view.put(model_key(model_name), replace(model, runs=(*model.runs[1 - _MAX_RUNS :], Run(run_id, model.epoch))))
    return model.epoch


def open_version(view: View, key: VersionKey, slots: Sequence[str], layout_epoch: int, new_uid: str) -> str:
    """Open a version, or agree with whoever did: same slots, same layout epoch. Returns its uid."""
    model = find_model(view, key.model)
    if key.epoch < model.epoch:
        raise VersionError(f"{key}: epoch {key.epoch} was replaced by epoch {model.epoch}")
    if key.epoch > model.epoch + limits.MAX_EPOCH_JUMP:
        raise VersionError(f"{key}: epoch {key.epoch} is far beyond epoch {model.epoch}; get one from open_epoch")
    if key.epoch > model.epoch:
        model = start_epoch(view, model, key.epoch)
    if key.step < model.step:
        raise VersionError(f"{key}: step {key.step} goes back; step {model.step} was opened in this epoch")
    use_model(view, key.model)
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
        if expires_at(view, holder_id) > view.now:
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
        dead = {slot for slot, worker_id in version.filled.items() if expires_at(view, worker_id) <= view.now}
        for slot in dead:
            view.delete(slot_key(version.uid, slot))
        filled = {slot: worker for slot, worker in version.filled.items() if slot not in dead}
        version = replace(version, filled=filled)
    if len(version.filled) < len(version.slots):
        view.put(version_key(version.uid), version)
        return None
    model = find_model(view, version.key.model)
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
            delete_version(view, ref.uid)  # its slots moved on: steps never go back, so it never completes
        else:
            versions.append(ref)
    view.put(model_key(model.model), replace(model, versions=tuple(versions)))
    progress = view.get(progress_key(model.model), watch=False)
    if progress is not None:
        view.put(progress_key(model.model), bound_slots(progress, version.slots))
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


def require_version(view: View, uid: str) -> Version:
    """Return a version's record, or raise StaleError."""
    version = view.get(version_key(uid))
    if version is None:
        raise StaleError(f"version {uid} is gone, or was never opened here")
    return version


def _is_staging(view: View, uid: str) -> bool:
    version = view.get(version_key(uid), watch=False)
    return version is not None and version.state is VersionState.STAGING


def _sample(names: Sequence[str], at_most: int = 10) -> str:
    shown = ", ".join(repr(name) for name in names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"
