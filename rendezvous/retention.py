"""How long is what remembered? The rules by which records may be forgotten without changing an answer that counts.

1. A worker is known until an hour after it was lost.
2. A transaction is kept while a member may ask for its facts: one that joined it, has joined no later one of the group,
   and is known. The group's newest one is also kept until its deadline, since a member on its way to it may still have
   to hear that it was aborted. A group is forgotten with its last transaction.
3. A model (its epoch, step, runs, how far its slots got, cut hints) is kept for a week after its last use: a call for
   it, or a worker of it that is known. Used again within that time it goes on where it was; later it begins anew.

Pure, as :mod:`reshard.rendezvous.state`; :mod:`reshard.rendezvous.sweeping` applies them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from reshard.rendezvous.keys import ballot_key, beat_key, last_use_key, transaction_key
from reshard.rendezvous.records import Beat, Group, LastUse, Progress, SlotProgress
from reshard.rendezvous.view import View

__all__ = ["KEEP_LOST_S", "KEEP_MODEL_S", "bound_slots", "is_idle", "is_known", "prune_group", "use_model"]

KEEP_LOST_S = 3600.0  # a worker after it was lost, and a version after it was opened that can never be offered again
KEEP_MODEL_S = 7 * 86400.0  # a model after its last use
_USE_GRAIN_S = 3600.0  # uses within this time of the noted one are not noted: most calls write nothing more
_MAX_PAST_SLOTS = 1024  # slots of a model that its newest complete version has not, and whose last step is remembered


def is_known(beat: Beat | None, now: float) -> bool:
    """Whether a worker lives or was lost less than an hour ago."""
    return beat is not None and beat.expires_at + KEEP_LOST_S > now


def use_model(view: View, model_name: str) -> None:
    """Note that a model is in use."""
    last = view.get(last_use_key(model_name), watch=False)
    if last is None or last.used_at + _USE_GRAIN_S <= view.now:
        view.put(last_use_key(model_name), LastUse(model_name, view.now))


def is_idle(view: View, model_name: str) -> bool:
    """Whether a model was not used for a week. One without a note of its use is noted as used now."""
    last = view.get(last_use_key(model_name), watch=False)
    if last is None:
        use_model(view, model_name)
        return False
    return last.used_at + _USE_GRAIN_S + KEEP_MODEL_S <= view.now


def prune_group(view: View, group: Group, members: Iterable[str]) -> Group:
    """Delete the group's finished transactions for which no member may ask, and return the group without them.

    Parameters
    ----------
    members
        Of the transaction that is open or about to be; of them, and of those of the transactions kept, the group goes
        on knowing what they joined.
    """
    kept: list[str] = []
    concerned = set(members)
    for txn_id in group.history:
        txn = view.get(transaction_key(txn_id), watch=False)
        ballot = view.get(ballot_key(txn_id), watch=False)
        if txn is None:
            continue
        joined = ballot.joined if ballot is not None else {}
        may_ask = [worker for member, worker in joined.items() if group.joined.get(member, 0) <= txn.seq]
        beats = view.get_many([beat_key(worker) for worker in may_ask], watch=False)
        awaited = txn_id == group.history[-1] and view.now < txn.deadline
        if awaited or any(is_known(beat, view.now) for beat in beats):
            kept.append(txn_id)
            concerned.update(txn.members)
        else:
            view.delete(transaction_key(txn_id))
            view.delete(ballot_key(txn_id))
    known = {member: seq for member, seq in group.joined.items() if member in concerned}
    return replace(group, history=tuple(kept), joined=known)


def bound_slots(progress: Progress, current: Iterable[str]) -> Progress:
    """Forget the slots at the oldest steps, if more than 1,024 are not `current`; else return what was given."""
    now = set(current)
    past = {slot: at for slot, at in progress.slots.items() if slot not in now}
    if len(past) <= _MAX_PAST_SLOTS:
        return progress

    def step_of(row: tuple[str, SlotProgress]) -> int:
        return row[1].step

    newest = dict(sorted(past.items(), key=step_of, reverse=True)[:_MAX_PAST_SLOTS])
    kept = {slot: at for slot, at in progress.slots.items() if slot in now or slot in newest}
    return Progress(progress.epoch, kept)
