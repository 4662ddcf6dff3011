"""Prepared lists as NIXL knows them, transfer requests as slices, and the gate that reads a peer's beacon natively."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING

import numpy as np

from reshard.transports.beacon import BEACON_BYTES, beacon_image, check_beacon
from reshard.transports.endpoint import Endpoint
from reshard.transports.errors import PeerError, TransferError
from reshard.transports.lists import ConnectedPeer
from reshard.transports.nixl.agent import Agent
from reshard.transports.nixl.library import mapped, translate
from reshard.transports.regions import U64, MemoryKind
from reshard.transports.watch import PeerWatch

if TYPE_CHECKING:
    from nixl_cu12 import nixl_prepped_dlist_handle, nixl_xfer_handle

logger = getLogger(__name__)


@dataclass(slots=True)
class Link:
    """A connection of one reading agent to one serving agent."""

    agent: Agent
    remote: str
    beacon: int
    watch: PeerWatch | None


class NativeList:
    """Both sides of a prepared list; closed with the last of its slices."""

    __slots__ = ("_agent", "_local", "_open", "_remote")

    def __init__(
        self,
        agent: Agent,
        remote: str,
        rows: tuple[U64, U64],
        kinds: tuple[MemoryKind, MemoryKind],
        n_slices: int,
        peer: str,
    ) -> None:
        self._agent = agent
        self._open = n_slices
        with agent.lock, mapped(f"preparing {len(rows[0])} rows for peer {peer!r}", peer):
            native, backends = agent.native, [agent.backend]
            self._local: nixl_prepped_dlist_handle | None = native.prep_xfer_dlist(
                "NIXL_INIT_AGENT", rows[0], kinds[0].upper(), backends
            )
            self._remote: nixl_prepped_dlist_handle | None = None
            try:
                self._remote = native.prep_xfer_dlist(remote, rows[1], kinds[1].upper(), backends)
            except BaseException:
                self._local.release()  # type: ignore[no-untyped-call]
                raise

    def request(self, start: int, stop: int, peer: str) -> nixl_xfer_handle:
        """Return a transfer request of the runs ``[start, stop)``."""
        if self._local is None or self._remote is None:
            raise TransferError(f"the list for peer {peer!r} is closed", peer=peer)
        index, agent = np.arange(start, stop, dtype=np.int32), self._agent
        try:
            with agent.lock:
                return agent.native.make_prepped_xfer(
                    "READ", self._local, index, self._remote, index, b"", [agent.backend]
                )
        except Exception as error:
            raise translate(error, f"building a request of {stop - start} runs for peer {peer!r}", peer) from error

    def slice_closed(self) -> None:
        """Count a closed slice; the last one frees the lists.  Never raises."""
        self._open -= 1
        if self._open > 0:
            return
        with self._agent.lock:
            for handle in (self._local, self._remote):
                if handle is not None:
                    with contextlib.suppress(Exception):
                        handle.release()  # type: ignore[no-untyped-call]
            self._local = self._remote = None


class NixlSlice:
    """Some runs of a prepared list as one transfer request.

    Parameters
    ----------
    agent : Agent
    lists : NativeList
    start, stop : int
        Range of runs.
    peer : str
        For messages.

    Attributes
    ----------
    flying : bool
        Whether it was posted and has not been seen to end.
    """

    __slots__ = ("_agent", "_handle", "_lists", "_peer", "flying", "moved", "native_s")

    def __init__(self, agent: Agent, lists: NativeList, start: int, stop: int, peer: str) -> None:
        self._agent = agent
        self._lists = lists
        self._peer = peer
        self.flying = False
        self.moved = False
        self.native_s = 0.0
        self._handle: nixl_xfer_handle | None = lists.request(start, stop, peer)

    def post(self) -> bool:
        """See `Slice.post`."""
        agent, handle = self._agent, self._handle
        if handle is None:
            raise TransferError(f"the list for peer {self._peer!r} is closed", peer=self._peer)
        try:
            with agent.lock:
                self.flying = True
                state = agent.native.transfer(handle)
                if state == "DONE" and not agent.telemetry:
                    self.flying = False
                    return True
                return self._is_done(state, handle)
        except Exception as error:
            handle = None  # the error keeps this frame, and a handle would keep the agent
            raise translate(error, f"posting a read from peer {self._peer!r}", self._peer) from error

    def poll(self) -> bool:
        """See `Slice.poll`."""
        agent, handle = self._agent, self._handle
        if handle is None:
            raise TransferError(f"the list for peer {self._peer!r} is closed", peer=self._peer)
        try:
            with agent.lock:
                return self._is_done(agent.native.check_xfer_state(handle), handle)
        except Exception as error:
            handle = None  # as above
            raise translate(error, f"reading from peer {self._peer!r}", self._peer) from error

    def _is_done(self, state: str, handle: nixl_xfer_handle) -> bool:
        if state == "DONE":
            self.flying = False
            if self._agent.telemetry:
                self.native_s = self._agent.native.get_xfer_telemetry(handle).xferDuration / 1e6
            return True
        if state == "PROC":
            return False
        raise TransferError(f"reading from peer {self._peer!r}: NIXL says {state!r}", peer=self._peer)

    def close(self) -> None:
        """See `Slice.close`."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with self._agent.lock:
            try:
                handle.release()  # type: ignore[no-untyped-call]
            except Exception as error:  # noqa: BLE001 - an active request: only the end of its agent frees it
                logger.debug("releasing a request for peer %r: %s", self._peer, error)
                handle._released = True
        self._lists.slice_closed()


class BeaconGate:
    """Reads the peer's beacon into a slot of its own and compares it."""

    moved = False
    native_s = 0.0

    def __init__(self, link: Link, peer: ConnectedPeer) -> None:
        self._agent = link.agent
        self._endpoint: Endpoint = peer.endpoint
        self._healthy = beacon_image(peer.endpoint)
        self._peer = peer.name
        self._slot, self._image = link.agent.take_slot()
        row = np.array([[self._image.ctypes.data, BEACON_BYTES, 0]], np.uint64)
        there = np.array([[link.beacon, BEACON_BYTES, 0]], np.uint64)
        try:
            lists = NativeList(link.agent, link.remote, (row, there), ("dram", "dram"), 1, peer.name)
            try:
                self._slice = NixlSlice(link.agent, lists, 0, 1, peer.name)
            except BaseException:
                lists.slice_closed()
                raise
        except BaseException:
            link.agent.return_slot(self._slot)
            raise

    def post(self) -> bool:
        """See `Slice.post`."""
        self._image.fill(0)
        try:
            done = self._slice.post()
        except TransferError as error:
            raise PeerError(f"peer {self._peer!r} does not answer: {error}", peer=self._peer) from error
        if done and self._image.tobytes().startswith(self._healthy):
            return True
        return done and self._passes()

    def poll(self) -> bool:
        """See `Slice.poll`; a beacon that differs raises `PeerError`."""
        try:
            done = self._slice.poll()
        except TransferError as error:
            raise PeerError(f"peer {self._peer!r} does not answer: {error}", peer=self._peer) from error
        return done and self._passes()

    def _passes(self) -> bool:
        if not self._image.tobytes().startswith(self._healthy):
            check_beacon(self._image, self._endpoint, self._peer)
        return True

    def close(self) -> None:
        """Free it; its slot is used again only if nothing can land there any more."""
        flying = self._slice.flying
        self._slice.close()
        if not flying:
            self._agent.return_slot(self._slot)
