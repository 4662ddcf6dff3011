"""Which workers live? Registrations and beats of process lives, and what a lost one takes with it.

Pure, as :mod:`reshard.rendezvous.state`. A worker is lost from the moment its TTL passes, whoever looks; nothing waits
for a reaper, and no beat revives it.
"""

from __future__ import annotations

from reshard.rendezvous.errors import InvalidRequestError, WorkerLostError
from reshard.rendezvous.keys import beat_key, worker_key
from reshard.rendezvous.records import Beat, Version, Worker
from reshard.rendezvous.retention import use_model
from reshard.rendezvous.types import WorkerInfo
from reshard.rendezvous.view import View

__all__ = ["beat", "close_worker", "expires_at", "lost_slots", "register", "require_worker"]


def register(view: View, worker_id: str, info: WorkerInfo, ttl_s: float) -> None:
    """Record a process life under its fresh id.

    Saying the same again is the same; an id is never taken over.
    """
    known = view.get(worker_key(worker_id))
    if known is not None and (known.info != info or known.ttl_s != ttl_s):
        raise InvalidRequestError("worker.id", f"{worker_id} belongs to {known.info.name!r} already")
    use_model(view, info.model)
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
    if worker is not None and expires_at(view, worker_id) > view.now:
        view.put(beat_key(worker_id), Beat(worker_id, view.now, view.now))
        view.put(worker_key(worker_id), worker)  # wakes those whom this concerns; a beat wakes nobody


def require_worker(view: View, worker_id: str, *, role: str = "", model: str = "") -> Worker:
    """Return the record of a live worker, or raise WorkerLostError."""
    worker = view.get(worker_key(worker_id), watch=False)
    if worker is None:
        raise WorkerLostError(f"worker {worker_id} is unknown to this service; register anew")
    if expires_at(view, worker_id) <= view.now:
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


def expires_at(view: View, worker_id: str) -> float:
    """Until when a worker counts as alive; minus infinity if it is unknown."""
    record = view.get(beat_key(worker_id), watch=False)
    return record.expires_at if record is not None else float("-inf")
