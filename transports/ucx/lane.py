"""A connection to one peer: its own worker, its endpoint, and the gets in flight on it.

Each peer has its own worker, so that peers are read in parallel by as many threads, and so that tearing down one
(the only way to be sure that an abandoned read writes no more) touches no other.

1. The endpoint handles errors in ``PEER`` mode with a callback: without one UCX ends the process when a peer dies.
2. After any error the endpoint is dead: no get is posted on it again.
3. `close` may be called from any thread. It makes `drive` return, closes the endpoint by force and destroys the
   worker: then the lane is *settled* and writes no more. It waits for that as long as it is told to, and where reads do
   not end by then it is called again; nobody else is kept meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NoReturn

from reshard.transports.errors import PeerError, TransferTimeoutError, TransportError
from reshard.transports.identity import ProcessIdentity
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.callbacks import callbacks_of
from reshard.transports.ucx.context import Context
from reshard.transports.ucx.endpoints import close_endpoint, create_endpoint, endpoint_transports
from reshard.transports.ucx.failures import why_it_failed
from reshard.transports.ucx.gets import Gets
from reshard.transports.ucx.inbox import Inbox
from reshard.transports.ucx.messages import HELLO, REFUSE, hello, reason_of
from reshard.transports.ucx.parcels import ParcelRing, Parcels
from reshard.transports.ucx.requests import RequestRing
from reshard.transports.ucx.worker import Worker

_log = logging.getLogger(__name__)

_SPIN = 16
_SHORT = 4
"""Calls of the progress function that a list of one get may take before it is driven as others are."""
_BURST = 16
"""Calls of the progress function between two looks at what has ended."""
_NAP_S = 0.01
_DIE_S = 0.1
"""How long a lane that fails keeps the thread that drives it, which may have other peers to drive."""
_CLOSE_S = 2.0
"""How long the endpoint may take to close before the worker is destroyed without that."""

_UNSETTLED: list[Lane] = []
"""Lanes that are being torn down: UCX may still use their memory, so it is not freed."""


def all_settled(context: Context, timeout_s: float = 0.0) -> bool:
    """Return whether no lane of a context is half torn down; else the context, and what is mapped in it, must stay.

    Each that is gets ``timeout_s`` to end.
    """
    settled = [lane.close(timeout_s) for lane in list(_UNSETTLED) if lane.context is context]
    return all(settled)


class Lane:
    """A connection to one peer.

    Parameters
    ----------
    context : Context
    peer : str
        For messages.
    address : bytes
        The peer's UCX worker address.
    process : ProcessIdentity
        The peer's process, to tell why a read failed.

    Attributes
    ----------
    settled : bool
        It is torn down, and writes no more.

    Raises
    ------
    PeerError
        If UCX cannot reach the address.
    TransportError
        If UCX cannot open a worker.
    """

    def __init__(self, context: Context, peer: str, address: bytes, process: ProcessIdentity) -> None:
        self.peer = peer
        self.context = context
        self._process = process
        self.library = context.library
        self._lock = threading.Lock()
        self._closing = False
        self._death: TransportError | None = None
        self._keys: list[int] = []
        self._endpoint = 0
        self._ending = 0
        self._ending_since = 0.0
        self._told = False
        self._worker = Worker(context)
        self._progress = self.library.ucp.ucp_worker_progress
        self.ring = RequestRing(self.library, context.request_bytes)
        self._parcels: ParcelRing | None = None
        self._address = b""
        self._refusals = Inbox()
        self._callbacks = callbacks_of(self.library)
        self._token = self._callbacks.new_token()
        try:
            self._endpoint = create_endpoint(
                self.library, self._worker.handle, address, self._callbacks.on_failure, self._token
            )
        except TransportError as error:
            self.close(_CLOSE_S)
            raise PeerError(f"peer {peer!r} cannot be reached: {error}", peer=peer) from error
        self._endpoint_at = self.library.ffi.cast("void *", self._endpoint)

    def identify(self, deadline: float) -> bytes:
        """Ask the peer who it is, before any of its memory is read.

        Parameters
        ----------
        deadline : float
            On `time.monotonic`.

        Returns
        -------
        bytes
            Its transport's incarnation.

        Raises
        ------
        PeerError
            If the connection fails.
        TransferTimeoutError
            If there is no answer in time: the process is stopped, or is none of ours.
        """
        with self._lock:
            self._require_alive()
            self._callbacks.ask_identity(self._worker.handle, self._endpoint, self._token)
            while not (answer := self._callbacks.answer(self._token)):
                if failed := self._callbacks.failure(self._token):
                    self._die(failed, "connecting")
                if time.monotonic() >= deadline:
                    raise TransferTimeoutError(
                        f"peer {self.peer!r} did not say who it is before the deadline", peer=self.peer
                    )
                if not self._worker.progress() and self._worker.arm():
                    self._worker.wait_event(min(max(deadline - time.monotonic(), 0.0), _NAP_S))
        return answer

    def unpack(self, key: bytes) -> int:
        """Unpack a region's key for this endpoint; it is destroyed with the lane.

        Raises
        ------
        PeerError
            If UCX refuses it: damaged, or of memory that no common transport reaches.
        """
        ffi = self.library.ffi
        handle = ffi.new("uintptr_t *")
        with self._lock:
            self._require_alive()
            status = self.library.ucp.ucp_ep_rkey_unpack(self._endpoint, ffi.from_buffer(key), handle)
            if status != d.OK:
                raise self._error(status, "ucp_ep_rkey_unpack")
            self._keys.append(int(handle[0]))
        return int(handle[0])

    def parcel_ring(self, generation: int) -> ParcelRing:
        """Return what drives reads by messages; the first time the peer is told whom to answer.

        Parameters
        ----------
        generation : int
            Of the peer's endpoint message.

        Raises
        ------
        PeerError
            If the lane is closed or dead.
        """
        with self._lock:
            self._require_alive()
            if self._parcels is None:
                worker = self._worker
                self._refusals = self._callbacks.receive(worker.handle, self._token, (REFUSE,))
                self._parcels = ParcelRing(self.library, self._callbacks, worker.handle, self._endpoint)
                self._address = worker.address()  # stays until it is sent
                address = self.library.ffi.from_buffer(self._address)
                greeting = hello(self._parcels.reader, generation, self._address)
                self._callbacks.send(self._endpoint, HELLO, greeting, address, len(self._address))
            return self._parcels

    def drive(self, gets: Gets | Parcels, busy_s: float, idle_s: float) -> bool:
        """Post and progress.

        Returns once all of ``gets`` have landed, after ``busy_s`` while there is work, or after sleeping for at
        most ``idle_s`` while there is none. What is in flight stays in flight, so call again.

        Returns
        -------
        bool
            Whether they have all landed. ``gets.moved`` tells whether this call did native work.

        Raises
        ------
        TransferError
            If a get failed. The lane is dead then, and writes nothing any more.
        PeerError
            If the peer is gone, or the lane was aborted or died before.
        """
        gets.moved = False
        if gets.size == 1 and not gets.next and self._get_one(gets):
            return True
        stop = time.monotonic() + busy_s
        idle, slept = 0, idle_s <= 0
        while True:
            self._enter()
            try:
                self._require_alive()
                done, moved = self._round(gets, stop)
                gets.moved |= moved
                if done:
                    return True
                idle = 0 if moved else idle + 1
                if idle >= _SPIN:
                    if slept or gets.moved:
                        return False
                    slept = True
                    if not self._worker.arm():
                        continue
            finally:
                self._lock.release()
            if idle >= _SPIN:
                # Outside of the lock: another thread may post on this lane, or abort it.
                self._worker.wait_event(idle_s)
            elif time.monotonic() >= stop:
                return False

    def close(self, timeout_s: float) -> bool:
        """Disconnect and destroy the worker; return whether it is `settled` within ``timeout_s``, or call again.

        From any thread, idempotent, never raises.
        """
        stop = time.monotonic() + timeout_s
        self._closing = True  # makes a `drive` of another thread return after its round
        if self._lock.acquire(timeout=timeout_s):
            try:
                self._tear_down(stop)
            finally:
                self._lock.release()
        return self.settled

    @property
    def settled(self) -> bool:
        """See the class."""
        return not self._worker.handle

    @property
    def alive(self) -> bool:
        """Whether gets can be posted."""
        return self._death is None and not self._closing and self._endpoint != 0

    def transports(self) -> tuple[tuple[str, str], ...]:
        """Return the (transport, device) pairs that the endpoint uses, such as ``("cma", "memory")``."""
        with self._lock:
            self._require_alive()
            status, names = endpoint_transports(self.library, self._endpoint)
            if status != d.OK:
                raise self._error(status, "ucp_ep_query")
        return names

    def _enter(self) -> None:
        """Take the lock, but do not wait for one who tears the lane down."""
        if self._lock.acquire(blocking=False):
            return
        while not self._lock.acquire(timeout=_NAP_S):
            self._require_alive()

    def _get_one(self, gets: Gets | Parcels) -> bool:
        """Read a list of one get as long as nothing hinders it; return whether it has landed, else go on with `drive`.

        Kept short: it is what a refit costs for each peer that has one small list.
        """
        if not self._lock.acquire(False):
            return False
        try:
            if not self.alive or not (ring := gets.ring).n_free:
                return False
            chunk = gets.post_next(self._endpoint_at)
            gets.moved = True
            for _ in range(_SHORT):
                self._progress(self._worker.handle)
                if not ring.in_flight(chunk):
                    gets.chunks.clear()
                    self._check(ring.release(chunk))
                    return True
            return False
        finally:
            self._lock.release()

    def _check(self, worst: int) -> None:
        """Let the lane die of a get that failed, or of its endpoint."""
        if worst < d.OK:
            self._die(worst, "ucp_get_nbx")
        if failed := self._callbacks.failure(self._token):
            self._die(failed, "endpoint")
        if self._refusals:
            reason = reason_of(self._refusals.take()[1])
            self._end_with(PeerError(f"peer {self.peer!r} refuses to be read: {reason}", peer=self.peer))

    def _round(self, gets: Gets | Parcels, stop: float) -> tuple[bool, bool]:
        """Post what fits, progress, harvest; return (all landed, something moved)."""
        ring, moved = gets.ring, False
        while gets.next < gets.size and ring.n_free:
            gets.post_next(self._endpoint_at)
            moved = True
        for _ in range(_BURST):
            if not self._progress(self._worker.handle):
                break
            moved = True
            if not gets.chunks or not ring.in_flight(gets.chunks[0]) or time.monotonic() >= stop:
                break
        for chunk in [c for c in gets.chunks if not ring.in_flight(c)]:
            gets.chunks.remove(chunk)
            moved = True
            self._check(ring.release(chunk))
        self._check(d.OK)
        return gets.next == gets.size and not gets.chunks, moved

    def _require_alive(self) -> None:
        if self._death is not None:
            raise PeerError(
                f"the connection to peer {self.peer!r} died before: {self._death}", peer=self.peer
            ) from self._death
        if self._closing or not self._endpoint:
            raise PeerError(f"the connection to peer {self.peer!r} is closed", peer=self.peer)

    def _error(self, status: int, what: str) -> TransportError:
        return why_it_failed(self.library, self.peer, self._process, status, what)

    def _die(self, status: int, what: str) -> NoReturn:
        self._end_with(self._error(status, what))

    def _end_with(self, error: TransportError) -> NoReturn:
        self._death = error
        self._tear_down(time.monotonic() + _DIE_S)
        raise error

    def _tear_down(self, stop: float) -> None:
        """Go on with tearing down until it is done, or ``stop``; under the lock."""
        if self.settled:
            return
        ucp = self.library.ucp
        if self._endpoint:
            _UNSETTLED.append(self)
            endpoint, self._endpoint = self._endpoint, 0
            self._ending = close_endpoint(self.library, endpoint)
            self._ending_since = time.monotonic()
        while not (ended := self._ended()) and time.monotonic() < stop:
            self._worker.progress()
        if not ended:
            if not self._told:
                self._told = True
                _log.warning("reads from peer %r have not ended: %s are in flight", self.peer, self.ring.n_busy())
            return
        if self._ending:
            ucp.ucp_request_free(self._ending)
        for key in self._keys:
            ucp.ucp_rkey_destroy(key)
        self._keys.clear()
        self._worker.close()
        self._callbacks.forget(self._token)
        if self in _UNSETTLED:
            _UNSETTLED.remove(self)

    def _ended(self) -> bool:
        """Return whether the worker can be destroyed.

        UCX cancels what it queued for the network, but copies over CMA wait their turn, and destroying a worker in
        front of them ends the process.
        """
        running = self._ending and self.library.ucp.ucp_request_check_status(self._ending) == d.INPROGRESS
        if running and time.monotonic() < self._ending_since + _CLOSE_S:
            return False
        return not self.ring.n_busy()
