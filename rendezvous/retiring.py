"""How does a version go? Its admission is closed, its leases end, its records are deleted.

Pure, as :mod:`reshard.rendezvous.state`. A new epoch closes all versions of the one before.
"""

from __future__ import annotations

from dataclasses import replace

from reshard.rendezvous.keys import leases_key, model_key, progress_key, slot_key, version_key
from reshard.rendezvous.leases import live_leases
from reshard.rendezvous.records import LeaseBook, Model, VersionState
from reshard.rendezvous.view import View

__all__ = ["close_admission", "delete_version", "find_model", "release_lease", "retire", "start_epoch"]


def close_admission(view: View, uid: str) -> None:
    """Grant no new leases on the version. Idempotent; a version that is gone counts as closed."""
    version = view.get(version_key(uid))
    if version is None or version.state in (VersionState.RETIRING, VersionState.REFUSED):
        return  # a refused one offers nothing, and goes on saying why
    view.put(version_key(uid), replace(version, state=VersionState.RETIRING))
    model = find_model(view, version.key.model)
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
    delete_version(view, uid)
    _forget_ref(view, version.key.model, uid)
    return True


def release_lease(view: View, uid: str, lease_id: str) -> None:
    """End a lease; one that has ended is no error. The last one lets a retired version go."""
    live = dict(live_leases(view, uid))
    live.pop(lease_id, None)
    version = view.get(version_key(uid))
    if version is None or (version.drop and not live):
        delete_version(view, uid)
        if version is not None:
            _forget_ref(view, version.key.model, uid)
    else:
        view.put(leases_key(uid), LeaseBook(uid, live))


def start_epoch(view: View, model: Model, epoch: int) -> Model:
    """Start an epoch: versions of the old one are closed, and go unless a lease on them lives."""
    kept = []
    for ref in model.versions:
        version = view.get(version_key(ref.uid), watch=False)
        if version is not None and live_leases(view, ref.uid):
            view.put(version_key(ref.uid), replace(version, state=VersionState.RETIRING, drop=True))
            kept.append(replace(ref, ready=False))
        else:
            delete_version(view, ref.uid)
    view.delete(progress_key(model.model))
    return replace(model, epoch=epoch, step=-1, versions=tuple(kept))


def delete_version(view: View, uid: str) -> None:
    """Delete a version with its slots and leases."""
    version = view.get(version_key(uid), watch=False)
    if version is not None:
        for slot in version.filled:
            view.delete(slot_key(uid, slot))
        view.delete(version_key(uid))
    view.delete(leases_key(uid))


def _forget_ref(view: View, model_name: str, uid: str) -> None:
    model = find_model(view, model_name)
    refs = tuple(ref for ref in model.versions if ref.uid != uid)
    if len(refs) != len(model.versions):
        view.put(model_key(model_name), replace(model, versions=refs))


def find_model(view: View, name: str) -> Model:
    """Return a model's record, an empty one if there is none."""
    return view.get(model_key(name)) or Model(name)
