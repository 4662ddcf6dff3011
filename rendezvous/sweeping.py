"""What may be forgotten, and when? Housekeeping that no answer depends on.

Workers are lost, leases end and versions are withdrawn at query time; sweeping only frees what is long past: workers
lost for an hour, versions that can never be offered again, and encoded tables that no live version names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from reshard.rendezvous.records import VersionState, beat_key, hints_key, leases_key, model_key, version_key, worker_key
from reshard.rendezvous.state import live_leases, lost_slots, retire, slot_records
from reshard.rendezvous.store import Store
from reshard.rendezvous.view import View

__all__ = ["sweep", "sweep_model", "sweep_worker"]

_KEEP_LOST_S = 3600.0


def sweep_worker(view: View, worker_id: str) -> bool:
    """Forget a worker that has been lost for an hour; tells whether it did."""
    record = view.get(beat_key(worker_id), watch=False)
    if record is not None and record.expires_at + _KEEP_LOST_S > view.now:
        return False
    view.delete(worker_key(worker_id))
    view.delete(beat_key(worker_id))
    return True


def sweep_model(view: View, model_name: str) -> set[bytes]:
    """Let versions go that can never be offered again; return the tables that the others name."""
    model = view.get(model_key(model_name), watch=False)
    tables: set[bytes] = set()
    for ref in model.versions if model is not None else ():
        version = view.get(version_key(ref.uid), watch=False)
        if version is None:
            continue
        lost = lost_slots(view, version)
        over = version.opened_at + _KEEP_LOST_S < view.now and (
            bool(lost)
            or version.state is VersionState.REFUSED
            or (not version.filled and ref.step < (model.step if model else 0))
        )
        done = version.drop and not live_leases(view, ref.uid)
        if over or done:
            retire(view, ref.uid)
        else:
            tables.update(record.table_digest for record in slot_records(view, version))
            book = view.get(leases_key(ref.uid), watch=False)
            live = live_leases(view, ref.uid)
            if book is not None and len(live) < len(book.rows):
                view.put(leases_key(ref.uid), replace(book, rows=dict(live)))
    return tables


def pinned_hints(view: View, model_name: str) -> set[bytes]:
    """Return the digests of all cuts that a model's hints name."""
    hints = view.get(hints_key(model_name), watch=False)
    return {hint.digest for kept in (hints.sets if hints is not None else ()) for hint in kept.hints}


async def sweep(store: Store) -> tuple[set[bytes], set[bytes]]:
    """Sweep all records once; return the digests of the tables, and of other content, that must stay."""
    for worker_id in await store.names("worker"):
        await store.run(partial(sweep_worker, worker_id=worker_id))
    tables: set[bytes] = set()
    cuts: set[bytes] = set()
    for model in await store.names("model"):
        tables |= (await store.run(partial(sweep_model, model_name=model))).value
    for model in await store.names("hints"):
        cuts |= (await store.run(partial(pinned_hints, model_name=model))).value
    return tables, cuts
