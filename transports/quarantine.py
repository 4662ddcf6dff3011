"""The quarantine: memory that an abandoned read may still change, and how it is lifted.

A transfer that was abandoned, or that failed where the backend cannot promise that its other parts have ended, poisons
its destination.  No list that writes there is posted, and its registration and its owner stay alive, until
`Quarantine.wait_quarantine` has torn down what `Capabilities.abort_scope` says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from reshard.transports.base import check_timeout
from reshard.transports.driver import backoff
from reshard.transports.errors import PoisonedMemoryError, TransferTimeoutError, TransportError
from reshard.transports.holding import Holding
from reshard.transports.lists import PreparedList
from reshard.transports.regions import Region
from reshard.transports.transfer import ListTransfer


class Quarantine(Holding):
    """See the module."""

    def quarantined(self) -> tuple[Region, ...]:
        """See `Transport.quarantined`."""
        with self._lock:
            return tuple(region for transfer in self._poisoned for region in transfer.prepared.destinations)

    def wait_quarantine(self, *, timeout_s: float) -> None:
        """See `Transport.wait_quarantine`."""
        deadline = time.monotonic() + check_timeout(timeout_s)
        scope = self.capabilities.abort_scope
        pauses = backoff()
        refused: TransportError | None = None
        with self._lock:
            if not self._poisoned:
                return
            if self._forked_from:
                self._check_open()
            self._n_rebuilding += scope == "agent"
        try:
            while True:
                with self._lock:
                    poisoned, healthy = list(self._poisoned), list(self._active)
                if not poisoned:
                    return
                for transfer in (*poisoned, *(t for t in healthy if t.inline)):
                    transfer.step()
                # What has ended by itself, and what the backend calls settled, needs nothing torn down.
                self._clear([t for t in poisoned if t.quiet and not (t.error and not self._settles(t.error))])
                with self._lock:
                    poisoned, healthy = list(self._poisoned), list(self._active)
                    in_post = [t for t in (*poisoned, *healthy) if t.posting]
                    if poisoned and scope == "agent" and not healthy and not in_post and not self._n_native:
                        try:
                            self._tear_down()
                        except TransportError as error:
                            refused = error  # something still refers to it: the quarantine stands
                        else:
                            self._clear(poisoned)
                            return
                if poisoned and scope == "peer" and self._aborting.acquire(blocking=False):
                    try:
                        refused = self._abort_peers(poisoned)
                    finally:
                        self._aborting.release()
                    if refused is None:
                        continue
                if time.monotonic() >= deadline:
                    names = ", ".join(sorted({t.prepared.peer.name for t in poisoned}))
                    waits_for = ", ".join(sorted({t.prepared.peer.name for t in healthy})) or "a native call"
                    raise TransferTimeoutError(
                        f"wait_quarantine: after {timeout_s} s writes from {names} may still land; "
                        f"tearing down waits for {waits_for}",
                        poisoned=[(r.address, r.stop) for r in self.quarantined()],
                    ) from refused
                if pause := next(pauses):
                    time.sleep(pause)
        finally:
            with self._moved:
                self._n_rebuilding -= scope == "agent"
                self._moved.notify_all()

    def _abort_peers(self, poisoned: Sequence[ListTransfer]) -> TransportError | None:
        """Abort the peers of what is poisoned; return why one of them does not end yet.

        Without the lock: others read from healthy peers meanwhile.
        """
        refused: TransportError | None = None
        for peer in {transfer.prepared.peer for transfer in poisoned}:
            theirs = [transfer for transfer in poisoned if transfer.prepared.peer is peer]
            if any(transfer.posting for transfer in theirs):
                refused = TransferTimeoutError(
                    f"a thread is inside a native call for peer {peer.name!r}", peer=peer.name
                )
                continue
            try:
                if peer.native is not None:
                    self._abort(peer.native)
            except TransportError as error:
                refused = error
                continue
            peer.native = None
            self._clear(theirs)
        return refused

    def _tear_down(self) -> None:
        for peer in self._peers.values():
            for prepared in peer.lists:
                prepared.free_native()
            peer.native = None
        for transfer in self._poisoned:
            transfer.prepared.free_native()
        self._epoch += 1
        self._rebuild()

    def _clear(self, transfers: Sequence[ListTransfer]) -> None:
        """Lift the quarantine of transfers that can write no more."""
        natives: list[object] = []
        with self._moved:
            for transfer in transfers:
                if transfer not in self._poisoned:
                    continue
                self._poisoned.remove(transfer)
                transfer.retire()
                prepared, peer = transfer.prepared, transfer.prepared.peer
                prepared.busy = None
                self._free_if_idle(prepared)
                still = any(other.prepared.peer is peer for other in (*self._poisoned, *self._active))
                if peer.closed and not still and peer.native is not None:
                    natives.append(peer.native)
                    peer.native = None
            self._moved.notify_all()
        for native in natives:
            self._hang_up(native)

    def _check_poison(self, prepared: PreparedList) -> None:
        if self._n_rebuilding:
            raise PoisonedMemoryError("a quarantine is being lifted; post again after wait_quarantine returns")
        for transfer in self._poisoned:
            for bad in transfer.prepared.destinations:
                for region in prepared.destinations:
                    if region.address < bad.stop and bad.address < region.stop:
                        raise PoisonedMemoryError(
                            f"destination [{region.address:#x}, {region.stop:#x}) may still be written by an "
                            f"abandoned read from {transfer.prepared.peer.name!r} into "
                            f"[{bad.address:#x}, {bad.stop:#x}); call wait_quarantine first",
                            peer=prepared.peer.name,
                        )
