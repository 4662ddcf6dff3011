"""What is the state, and what may become of it? All its transitions but those of transactions and of cut hints.

Pure transitions over a :class:`~reshard.rendezvous.view.View`: no I/O and no clock; time is ``view.now``. A
worker is lost from the moment its TTL passes, whoever looks; nothing waits for a reaper. What a version goes
through:

1. STAGING: opened by its first publisher; named slots are filled one by one.
2. READY, atomically with the last slot, if every slot's worker lives and all roots that were claimed equal are;
   else REFUSED. A READY version with a lost worker is withdrawn: it stays READY on record, never offered again.
3. RETIRING: admission is closed; no new lease.
4. Gone, once retired and free of live leases: its records are deleted.

Workers are in :mod:`~reshard.rendezvous.liveness`, 1 and 2 in :mod:`~reshard.rendezvous.publishing`, 3 and 4 in
:mod:`~reshard.rendezvous.retiring`, leases in :mod:`~reshard.rendezvous.leases`; this module gathers them.
"""

from __future__ import annotations

from reshard.rendezvous.leases import grant_lease, live_leases, renew_lease
from reshard.rendezvous.liveness import beat, close_worker, lost_slots, register, require_worker
from reshard.rendezvous.publishing import open_epoch, open_version, publish_slot, require_version, slot_records
from reshard.rendezvous.retiring import close_admission, release_lease, retire

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
    "require_version",
    "require_worker",
    "retire",
    "slot_records",
]
