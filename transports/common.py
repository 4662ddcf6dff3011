"""The protocol, once: everything that does not depend on the native library.

`CommonTransport` posts lists, drives them under a deadline and closes. Below it, `Quarantine` keeps what may still be
written, `Holding` keeps registrations, peers and lists, and `Hooks` says what a backend supplies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from logging import getLogger
from types import TracebackType
from typing import Self

from reshard.transports.base import Prepared, Transfer, TransferStats, check_timeout
from reshard.transports.driver import backoff
from reshard.transports.errors import PeerError, TransferError, TransferTimeoutError
from reshard.transports.holding import GRACE_S, RECONNECT_S
from reshard.transports.lists import PreparedList
from reshard.transports.outcome import failed, stats, timed_out
from reshard.transports.quarantine import Quarantine
from reshard.transports.transfer import ListTransfer

logger = getLogger(__name__)

CLOSE_S = 5.0
"""How long `close` tries to lift a quarantine."""

_IMMORTAL: list[object] = []
"""What a transport that closed under a quarantine leaves: memory that may still be written is never freed."""


class CommonTransport(Quarantine):
    """Base of the backends; see the module and `Hooks`."""

    def post(self, prepared: Prepared, *, timeout_s: float = RECONNECT_S) -> ListTransfer:
        """See `Transport.post`."""
        check_timeout(timeout_s)
        if not isinstance(prepared, PreparedList) or not prepared.belongs_to(self):
            raise TypeError(f"post: got {type(prepared).__name__}, expected a list prepared by this transport")
        with self._lock:
            self._check_postable(prepared)
            transfer = self._claim(prepared) if prepared.epoch == self._epoch else None
            prepared.building = transfer is None
        if transfer is None:
            self._build_again(prepared, time.monotonic() + timeout_s)
            with self._lock:
                self._check_postable(prepared)
                transfer = self._claim(prepared)
        if transfer.inline:
            try:
                while transfer.step() and transfer.state == "active":
                    pass
            except BaseException:  # an interrupt: nobody else knows of it
                transfer.cancel()
                self._drain([transfer], time.monotonic() + GRACE_S)
                raise
        else:
            self._driver.submit(transfer)
        return transfer

    def _build_again(self, prepared: PreparedList, deadline: float) -> None:
        """Build a list for the agent of now; others find it in flight meanwhile."""
        try:
            with self._native_work(deadline):
                self._build_native(prepared, deadline)
        finally:
            with self._lock:
                prepared.building = False
                self._free_if_idle(prepared)

    def _check_postable(self, prepared: PreparedList) -> None:
        peer = prepared.peer
        busy = prepared.busy is not None or prepared.building
        well = not (self._closing or peer.closed or peer.failed or prepared.closed or busy)
        if well and not (self._poisoned or self._n_rebuilding):
            return
        self._check_open()
        self._check_peer(peer)
        if prepared.closed:
            raise TransferError(f"the list for peer {peer.name!r} is closed", peer=peer.name)
        if busy:
            raise TransferError(f"the list for peer {peer.name!r} is in flight already", peer=peer.name)
        self._check_poison(prepared)

    def _claim(self, prepared: PreparedList) -> ListTransfer:
        if prepared.gate is None:
            name = prepared.peer.name
            raise TransferError(f"the list for peer {name!r} lost its native side; post it again", peer=name)
        transfer = ListTransfer(prepared, prepared.gate, prepared.slices, self._ended)
        prepared.busy = transfer
        self._active.add(transfer)
        return transfer

    def wait(self, transfers: Sequence[Transfer], *, timeout_s: float, finish_others: bool = False) -> TransferStats:
        """See `Transport.wait`."""
        deadline = time.monotonic() + check_timeout(timeout_s)
        mine = self._own_transfers(transfers)
        if self._forked_from:
            self._check_open()
        stopped = False
        pauses = backoff()
        while True:
            moved = False
            for transfer in mine:
                if transfer.inline and transfer.state == "active":
                    moved |= transfer.step()
            open_ = [transfer for transfer in mine if transfer.state == "active"]
            if not open_:
                break
            if not stopped and not finish_others and any(t.state in ("failed", "abandoned") for t in mine):
                stopped = True
                for transfer in open_:
                    transfer.cancel()
            left = deadline - time.monotonic()
            if left <= 0:
                for transfer in open_:
                    transfer.cancel()
                self._drain(open_, time.monotonic() + GRACE_S)
                if all(transfer.state == "done" for transfer in mine):
                    break
                raise timed_out(mine, open_, timeout_s)
            if moved:
                pauses = backoff()
                continue
            pause = next(pauses) if any(t.inline for t in open_) else left
            if pause:
                with self._moved:
                    if all(t.state == "active" for t in open_):
                        self._pause(min(pause, left))
        if any(transfer.state != "done" for transfer in mine):
            raise failed(mine)
        return stats(mine)

    def cancel(self, transfers: Sequence[Transfer]) -> None:
        """See `Transport.cancel`."""
        mine = [transfer for transfer in self._own_transfers(transfers) if transfer.state == "active"]
        if self._forked_from:
            return
        for transfer in mine:
            transfer.cancel()
        self._drain(mine, time.monotonic() + GRACE_S)

    def _ended(self, transfer: ListTransfer) -> None:
        """Take note that nothing of a transfer is in flight any more; called by the thread that drove it."""
        with self._lock:
            prepared = transfer.prepared
            self._active.discard(transfer)
            if transfer.state == "abandoned":
                return  # `wait_quarantine` decides
            if transfer.error is not None:
                transfer.state = "failed"
                if transfer.failed_in_flight and not self._settles(transfer.error):
                    self._poisoned.append(transfer)
                if isinstance(transfer.error, PeerError) or transfer.refused or transfer in self._poisoned:
                    prepared.peer.failed = prepared.peer.failed or str(transfer.error)
            else:
                transfer.state = "cancelled" if transfer.cancelled else "done"
            if transfer not in self._poisoned:
                prepared.busy = None
                if prepared.closed:
                    self._free_if_idle(prepared)
            if self._n_waiting:
                self._moved.notify_all()

    def _drain(self, transfers: Sequence[ListTransfer], deadline: float) -> None:
        """Let cancelled transfers end, and abandon those that do not."""
        pauses = backoff()
        while any(t.state == "active" for t in transfers) and time.monotonic() < deadline:
            moved = sum(t.step() for t in transfers if t.inline)
            if not moved and (pause := next(pauses)):
                with self._moved:
                    if any(t.state == "active" for t in transfers):
                        self._pause(pause)
        with self._moved:
            for transfer in transfers:
                if transfer.state == "active":
                    transfer.state, transfer.ended = "abandoned", time.monotonic()
                    self._active.discard(transfer)
                    peer = transfer.prepared.peer
                    # A thread that is at work on it may be about to post.
                    if transfer.posted or transfer.posting:
                        self._poisoned.append(transfer)
                    else:
                        transfer.prepared.busy = None
                    peer.failed = peer.failed or "a read from it was abandoned"
            self._moved.notify_all()

    # --- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Transport.close`; in a forked child it does nothing."""
        if self._forked_from:
            return
        with self._moved:
            if self._closing:  # by another thread: it is closed when that one says so
                stop = time.monotonic() + 3 * CLOSE_S
                while not self._closed and (left := stop - time.monotonic()) > 0:
                    self._pause(left)
                return
            self._closing = True
            self._stop_serving()
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        if self.quarantined():
            try:
                self.wait_quarantine(timeout_s=CLOSE_S)
            except TransferTimeoutError as error:
                logger.warning("transport %r closes under a quarantine: %s", self.name, error)
        stopped = self._driver.close(CLOSE_S)
        with self._moved:
            stop = time.monotonic() + CLOSE_S
            while (self._n_native or self._n_releasing) and (left := stop - time.monotonic()) > 0:
                self._pause(left)
            self._closed = True
            self._moved.notify_all()
            if self._poisoned or not stopped or self._n_native or self._n_releasing:
                _IMMORTAL.append((self, self._ledger.all_entries(), list(self._poisoned)))
                return
            for entry in self._ledger.take_all():
                self._deregister(entry.region, entry.native)
            self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- checks ---

    def _own_transfers(self, transfers: Sequence[Transfer]) -> list[ListTransfer]:
        mine = []
        for transfer in transfers:
            if not isinstance(transfer, ListTransfer) or not transfer.prepared.belongs_to(self):
                raise TypeError(f"wait: got {type(transfer).__name__}, expected transfers that this transport posted")
            mine.append(transfer)
        return mine
