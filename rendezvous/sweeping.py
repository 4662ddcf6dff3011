"""What may be forgotten now? Housekeeping that no answer depends on, by the rules of `reshard.rendezvous.retention`.

Workers are lost, leases end and versions are withdrawn at query time; sweeping only frees what is long past, one
transition a record, in this order, since each may free what the next one needs:

1. Workers lost for an hour; those that are known are a use of their model.
2. Groups: what time alone decides is decided, facts that no member may ask for go, and the group with the last of them.
3. Models: versions that can never be offered again; the model itself, if it is idle and no version is left.
4. Encoded tables, cuts and sets of names that no record needs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from reshard.rendezvous.keys import (
    ballot_key,
    beat_key,
    group_key,
    hints_key,
    last_use_key,
    leases_key,
    model_key,
    progress_key,
    transaction_key,
    version_key,
    worker_key,
)
from reshard.rendezvous.records import Version, VersionState
from reshard.rendezvous.retention import KEEP_LOST_S, is_idle, is_known, prune_group, use_model
from reshard.rendezvous.state import live_leases, lost_slots, retire, slot_records
from reshard.rendezvous.store import Store
from reshard.rendezvous.transactions import settle
from reshard.rendezvous.view import View

__all__ = ["sweep", "sweep_group", "sweep_model", "sweep_worker"]


def sweep_worker(view: View, worker_id: str) -> bool:
    """Forget a worker that has been lost for an hour; tells whether it did."""
    worker = view.get(worker_key(worker_id), watch=False)
    if is_known(view.get(beat_key(worker_id), watch=False), view.now):
        if worker is not None:
            use_model(view, worker.info.model)
        return False
    view.delete(worker_key(worker_id))
    view.delete(beat_key(worker_id))
    return True


def sweep_group(view: View, model_name: str, group_name: str) -> bool:
    """Forget facts of a group that no member may ask for, and the group with the last of them; tells whether it did."""
    key = group_key(model_name, group_name)
    group = view.get(key, watch=False)
    if group is None:
        return True
    txn = view.get(transaction_key(group.current), watch=False) if group.current else None
    if txn is not None:
        txn = settle(view, txn)
        group = view.get(key, watch=False) or group  # settling may have finished the transaction
    is_open = txn is not None and not txn.finished
    pruned = prune_group(view, group, txn.members if txn is not None and is_open else ())
    if not is_open and not pruned.history:
        view.delete(key)
        return True
    if pruned != group:
        view.put(key, pruned)
    return False


def sweep_model(view: View, model_name: str) -> set[bytes]:
    """Let versions go that can never be offered again, and an idle model with the last of them.

    Returns
    -------
    Digests of the tables that the versions left name.
    """
    model = view.get(model_key(model_name), watch=False)
    hints = view.get(hints_key(model_name), watch=False)
    if model is None and hints is None and view.get(last_use_key(model_name), watch=False) is None:
        return set()  # forgotten meanwhile
    idle = is_idle(view, model_name)
    tables: set[bytes] = set()
    left = False
    for ref in model.versions if model is not None else ():
        version = view.get(version_key(ref.uid), watch=False)
        if version is None:
            continue
        passed = not version.filled and (idle or ref.step < (model.step if model is not None else 0))
        if _may_go(view, version, passed) and retire(view, ref.uid):
            continue
        left = True
        tables.update(record.table_digest for record in slot_records(view, version))
        book = view.get(leases_key(ref.uid), watch=False)
        live = live_leases(view, ref.uid)
        if book is not None and len(live) < len(book.rows):
            view.put(leases_key(ref.uid), replace(book, rows=dict(live)))
    if idle and not left:
        view.delete(model_key(model_name))
        view.delete(progress_key(model_name))
        view.delete(hints_key(model_name))
        view.delete(last_use_key(model_name))
    return tables


def _may_go(view: View, version: Version, passed: bool) -> bool:
    """Whether a version was retired, or can never be offered again, an hour after it was opened."""
    if version.drop:
        return not live_leases(view, version.uid)
    never = passed or version.state is VersionState.REFUSED or bool(lost_slots(view, version))
    return never and version.opened_at + KEEP_LOST_S < view.now


def pinned_ballot(view: View, model_name: str, group_name: str) -> tuple[set[bytes], set[bytes]]:
    """Return the digests of the tables and sets of names that an open transaction's decision may ask for."""
    group = view.get(group_key(model_name, group_name), watch=False)
    ballot = view.get(ballot_key(group.current), watch=False) if group is not None and group.current else None
    if ballot is None:
        return set(), set()
    return set(ballot.tables), {vote.names_digest for vote in ballot.votes.values() if vote.names_digest}


def pinned_hints(view: View, model_name: str) -> set[bytes]:
    """Return the digests of all cuts that a model's hints name."""
    hints = view.get(hints_key(model_name), watch=False)
    return {hint.digest for kept in (hints.sets if hints is not None else ()) for hint in kept.hints}


async def sweep(store: Store) -> tuple[set[bytes], set[bytes]]:
    """Sweep all records once; return the digests of the tables, and of other content, that must stay."""
    for worker_id in await store.names("worker"):
        await store.run(partial(sweep_worker, worker_id=worker_id))
    tables: set[bytes] = set()
    others: set[bytes] = set()
    for name in await store.names("group"):
        model, group = name.split("\0", 1)
        await store.run(partial(sweep_group, model_name=model, group_name=group))
        asked, consumed = (await store.run(partial(pinned_ballot, model_name=model, group_name=group))).value
        tables |= asked
        others |= consumed
    models = {name for kind in ("model", "hints", "use") for name in await store.names(kind)}
    for model in sorted(models):
        tables |= (await store.run(partial(sweep_model, model_name=model))).value
        others |= (await store.run(partial(pinned_hints, model_name=model))).value
    return tables, others
