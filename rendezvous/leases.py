"""Who reads a version now? Leases that keep it from going, each live until its time ends.

Pure, as :mod:`reshard.rendezvous.state`. Ending one may let its version go: see :mod:`reshard.rendezvous.retiring`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard.rendezvous.errors import LeaseError
from reshard.rendezvous.keys import leases_key
from reshard.rendezvous.records import LeaseBook, LeaseRow
from reshard.rendezvous.view import View

__all__ = ["grant_lease", "live_leases", "renew_lease"]


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
