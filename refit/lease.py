"""Keep a version's memory in place while it is read: renew the lease, know when it ended, release it once.

On the reader's clock a lease ends at the last renewal's *sending* + TTL - margin. A thread renews it at a third of
its TTL; `LeaseKeeper.held` is asked after the last read. The end of a lease does not stop a read: whether what was
read after it was overwritten is for the publishers' headers and digests to say.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from reshard.refit.deadline import Deadline
from reshard.rendezvous.errors import LeaseError, RendezvousError

if TYPE_CHECKING:
    from reshard.rendezvous import Lease, Rendezvous

logger = logging.getLogger(__name__)

__all__ = ["LeaseKeeper"]

_GOODBYE_S = 5.0


class LeaseKeeper:
    """Renews one lease, from `start` on until it is released.

    Making one starts nothing: whoever keeps it knows it before anything is under way that must be ended, also where an
    interrupt (Ctrl-C) comes in between.

    Parameters
    ----------
    margin_s
        How long before the service the reader takes the lease as ended; a tenth of the TTL, at least 50 ms, by default.
    """

    def __init__(self, rendezvous: Rendezvous, lease: Lease, *, margin_s: float | None = None) -> None:
        self._rendezvous = rendezvous
        self._lease = lease
        self._margin_s = max(lease.ttl_s / 10, 0.05) if margin_s is None else margin_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._goodbye: threading.Thread | None = None
        self._thread = threading.Thread(target=self._renew, name="reshard-lease", daemon=True)

    def start(self) -> None:
        """Renew from now on; once."""
        self._thread.start()

    @property
    def lease(self) -> Lease:
        """The lease as last renewed."""
        with self._lock:
            return self._lease

    def held(self, deadline: Deadline) -> str:
        """Renew once more, after the last read; empty if the lease has held up to now, else how it ended.

        Raises
        ------
        RendezvousError, RefitTimeoutError
            The service does not answer, so that nobody knows.
        """
        lease = self.lease
        left = lease.remaining_s(time.monotonic(), margin_s=self._margin_s)
        if left <= 0:
            return (
                f"it ended {-left:.3f} s before the last read did (ttl {lease.ttl_s:g} s, margin {self._margin_s:g} s)"
            )
        try:
            self._rendezvous.renew_lease(lease, timeout_s=deadline.remaining("renew the lease"))
        except LeaseError as error:
            return f"it ended before the last read did: {error}"
        return ""

    def begin_release(self, left_s: float = _GOODBYE_S) -> None:
        """Stop renewing and send the release, without waiting for its answer; idempotent.

        Parameters
        ----------
        left_s
            Seconds that the caller has left. At most so many, and `_GOODBYE_S`, are given to the service, but half a
            one even if there are none. A service that is out of reach lets the lease expire.
        """
        self._stop.set()
        if self._goodbye is None:
            within_s = min(max(left_s, 0.5), _GOODBYE_S)
            self._goodbye = threading.Thread(
                target=self._release, args=(within_s,), name="reshard-lease-end", daemon=True
            )
            self._goodbye.start()

    def release(self, left_s: float = _GOODBYE_S) -> None:
        """`begin_release`, and wait for the end of it; idempotent."""
        self.begin_release(left_s)
        if self._goodbye is not None and self._goodbye.is_alive():
            self._goodbye.join(min(max(left_s, 0.5), _GOODBYE_S))
        if self._thread.is_alive():
            self._thread.join(timeout=min(max(left_s, 0.1), 1.0))

    def _release(self, within_s: float) -> None:
        try:
            self._rendezvous.release_lease(self.lease, timeout_s=within_s)
        except RendezvousError as error:
            logger.debug("releasing lease %s: %s", self.lease.id, error)

    def _renew(self) -> None:
        while not self._stop.wait(self.lease.ttl_s / 3):
            try:
                renewed = self._rendezvous.renew_lease(self.lease, timeout_s=max(self.lease.ttl_s / 3, 0.1))
            except RendezvousError as error:
                logger.debug("renewing lease %s: %s", self.lease.id, error)
                continue
            with self._lock:
                self._lease = renewed
