"""Holding: memory by registration, peers by name, lists by peer; each given back in any order, also after a failure.

The ledger counts references.  A name is claimed before its peer is dialled.  A list is checked against both region
tables, merged and cut before it becomes native, and holds the registrations that it writes to.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from reshard.transports import rows
from reshard.transports.base import Peer, check_timeout
from reshard.transports.endpoint import Endpoint, decode_endpoint, encode_endpoint
from reshard.transports.errors import EndpointError, PeerError, TransferTimeoutError
from reshard.transports.hooks import Hooks
from reshard.transports.lists import ConnectedPeer, ListRegistration, PreparedList, Work
from reshard.transports.regions import KIND_NAMES, U64, MemoryKind, Region
from reshard.transports.transfer import ListTransfer

GRACE_S = 0.1
"""How long, past a deadline, native work in flight may take to end before its destination counts as poisoned."""
REBUILD_POLL_S = 0.05
RECONNECT_S = 10.0
"""Deadline of connecting a healthy peer again after the native agent was rebuilt, where the caller gives none."""


class Holding(Hooks):
    """See the module."""

    def register(self, regions: Sequence[Region]) -> ListRegistration:
        """See `Transport.register`."""
        with self._lock:
            self._check_open()
            return ListRegistration(self, tuple(regions), self._ledger.add(regions))

    def endpoint(self) -> bytes:
        """See `Transport.endpoint`."""
        with self._lock:
            self._check_open()
            payload = self._payload()
            table = self._ledger.table()
            return encode_endpoint(Endpoint(self.name, self.incarnation, self._ledger.generation, table, payload))

    def withdraw(self, registration: ListRegistration) -> None:
        """End what it holds; called by `ListRegistration.close`."""
        with self._lock:
            entries = registration.take()
            if entries and not self._closed:
                self._ledger.remove(entries)

    @contextlib.contextmanager
    def _native_work(self, deadline: float = math.inf) -> Iterator[None]:
        """Count a thread that is inside the backend without the lock: neither a rebuild nor the end comes under it."""
        with self._moved:
            while self._n_rebuilding and not self._closing:
                if time.monotonic() >= deadline:
                    raise TransferTimeoutError(
                        f"transport {self.name!r}: a quarantine is being lifted, and was not within the deadline"
                    )
                self._pause(REBUILD_POLL_S)
            self._check_open()
            self._n_native += 1
        try:
            yield
        finally:
            with self._moved:
                self._n_native -= 1
                self._moved.notify_all()

    @contextlib.contextmanager
    def _releasing(self) -> Iterator[None]:
        """Count a thread that gives something back: the end does not come under it."""
        with self._lock:
            self._n_releasing += 1
        try:
            yield
        finally:
            with self._moved:
                self._n_releasing -= 1
                self._moved.notify_all()

    def _pause(self, seconds: float) -> None:
        """Sleep, under the lock, until something ends or time is up."""
        self._n_waiting += 1
        try:
            self._moved.wait(seconds)
        finally:
            self._n_waiting -= 1

    # --- peers ------------------------------------------------------------------------------------------

    def connect(self, endpoint: bytes, *, timeout_s: float, name: str = "") -> ConnectedPeer:
        """See `Transport.connect`."""
        deadline = time.monotonic() + check_timeout(timeout_s)
        if not isinstance(name, str):
            raise TypeError(f"connect: name is {type(name).__name__}, expected str")
        decoded = decode_endpoint(endpoint, backend=self.name)
        peer = ConnectedPeer(self, name or f"{self.name}:{decoded.incarnation.hex()[:12]}", decoded)
        with self._lock:
            self._check_open()
            if peer.name in self._peers:
                raise PeerError(f"peer {peer.name!r} is connected already; close it first", peer=peer.name)
            self._peers[peer.name] = peer
        try:
            with self._native_work(deadline):
                self._dial_again(peer, deadline)
        except BaseException:
            with self._lock:
                peer.closed = True
                if self._peers.get(peer.name) is peer:
                    del self._peers[peer.name]
            raise
        return peer

    def _dial_again(self, peer: ConnectedPeer, deadline: float) -> None:
        epoch = self._epoch
        try:
            native = self._dial(peer, deadline)
        except struct.error as error:
            raise EndpointError(f"peer {peer.name!r}: endpoint payload: {error}", peer=peer.name) from error
        with self._lock:
            closed = peer.closed  # by another thread, while there was nothing yet to disconnect
            if not closed:
                peer.native, peer.epoch = native, epoch
        if closed:
            self._hang_up(native)
            raise PeerError(f"peer {peer.name!r} was closed while it was connected", peer=peer.name)

    def close_peer(self, peer: ConnectedPeer) -> None:
        """Disconnect; called by `ConnectedPeer.close`."""
        if self._forked_from:
            return
        with self._releasing():
            self._close_peer(peer)

    def _close_peer(self, peer: ConnectedPeer) -> None:
        with self._lock:
            if peer.closed:
                return
            peer.closed = True
            if self._peers.get(peer.name) is peer:
                del self._peers[peer.name]
            lists = list(peer.lists)
            active = [transfer for transfer in self._active if transfer.prepared.peer is peer]
        if active:  # all together: each on its own would have a moment of its own
            for transfer in active:
                transfer.cancel()
            self._drain(active, time.monotonic() + GRACE_S)
        for prepared in lists:
            self._close_list(prepared)
        with self._lock:
            if any(transfer.prepared.peer is peer for transfer in self._poisoned):
                return  # `_clear` hangs up
            native, peer.native = peer.native, None
            stale = native is None or peer.epoch != self._epoch
        if not stale:  # without the lock: it may take its time, and others read meanwhile
            self._hang_up(native)

    # --- lists ------------------------------------------------------------------------------------------

    def prepare(self, peer: Peer, local: U64, remote: U64) -> PreparedList:
        """See `Transport.prepare`."""
        connected = self._own_peer(peer)
        local, remote, bounds, bounds_there = rows.pair_rows(local, remote)
        caps = self.capabilities
        rows.count_runs(local, caps.max_runs)
        here, there = f"transport {self.name!r}, local rows", f"peer {connected.name!r}, remote rows"
        extent = rows.extents(local, here)
        with self._lock:
            self._check_open()
            table, entries = self._ledger.table(), self._ledger.entries()
            at = table.locate(local[:, rows.ADDRESS], extent, local[:, rows.DEVICE], whose=here, bounds=bounds)
            served = connected.endpoint.regions
            from_at = served.locate(
                remote[:, rows.ADDRESS],
                rows.extents(remote, there),
                remote[:, rows.DEVICE],
                whose=there,
                bounds=bounds_there,
            )
            spans = rows.envelopes(local, extent, at, bounds)
            held = [entries[region] for region, _, _ in spans]
            self._ledger.hold(held)
        try:
            destinations = [
                Region(start, stop - start, entry.region.memory, entry.region.device, entry.region.owner)
                for entry, (_, start, stop) in zip(held, spans, strict=True)
            ]
            nbytes = rows.total_bytes(local, bounds)
            strided = local.shape[1] == 5
            if strided and not (caps.strided_rows and int(local[:, rows.NBYTES].max(initial=0)) <= self.slice_bytes):
                local, (at, from_at) = rows.expand_rows(local, at, from_at)
                remote, _ = rows.expand_rows(remote)
                strided = False
            if not strided:
                local, remote, at, from_at = rows.merge_adjacent(local, remote, at, from_at)
                local, remote, at, from_at = rows.split_long(local, remote, at, from_at, self.slice_bytes)
            work = Work(
                local=local,
                remote=remote,
                local_region=at,
                remote_region=from_at,
                local_entries=entries,
                remote_table=served,
                cuts=rows.cut_runs(local, self.slice_bytes),
                local_memory=_one_kind(table.kind, at, here),
                remote_memory=_one_kind(served.kind, from_at, there),
            )
            prepared = PreparedList(self, connected, work, held, destinations, nbytes)
            with self._native_work():
                self._build_native(prepared, time.monotonic() + RECONNECT_S)
                with self._lock:
                    try:  # meanwhile it may have been closed, or have failed
                        self._check_open()
                        self._check_peer(connected)
                    except BaseException:
                        prepared.free_native()
                        raise
                    connected.lists.add(prepared)
        except BaseException:
            with self._lock:
                self._ledger.release(held)
            raise
        return prepared

    def _build_native(self, prepared: PreparedList, deadline: float) -> None:
        peer, epoch = prepared.peer, self._epoch
        with peer.dialling:
            if peer.epoch != epoch:
                self._dial_again(peer, deadline)
        prepared.free_native()
        try:
            prepared.gate = self._gate(peer)
            prepared.slices = self._build(peer, prepared.work) if prepared.n_descriptors else []
        except BaseException:
            prepared.free_native()
            raise
        prepared.epoch = epoch

    def close_list(self, prepared: PreparedList) -> None:
        """Free a list; called by `PreparedList.close`."""
        if self._forked_from:
            return
        with self._releasing():
            self._close_list(prepared)

    def _close_list(self, prepared: PreparedList) -> None:
        with self._lock:
            if prepared.closed:
                return
            prepared.closed = True
            transfer = prepared.busy
        if transfer is not None and transfer.state == "active":
            transfer.cancel()
            self._drain([transfer], time.monotonic() + GRACE_S)
        with self._lock:
            self._free_if_idle(prepared)

    def _free_if_idle(self, prepared: PreparedList) -> None:
        if not prepared.closed or prepared.busy is not None or prepared.building:
            return
        prepared.free_native()
        prepared.peer.lists.discard(prepared)
        held, prepared.held = prepared.held, []
        if not self._closed:
            self._ledger.release(held)

    @abstractmethod
    def _drain(self, transfers: Sequence[ListTransfer], deadline: float) -> None:
        """Let cancelled transfers end, and abandon those that do not."""

    def _check_peer(self, peer: ConnectedPeer) -> None:
        if peer.closed:
            raise PeerError(f"peer {peer.name!r} is closed", peer=peer.name)
        if peer.failed:
            raise PeerError(
                f"peer {peer.name!r} failed before: {peer.failed}; close it and connect again", peer=peer.name
            )

    def _own_peer(self, peer: Peer) -> ConnectedPeer:
        if not isinstance(peer, ConnectedPeer) or not peer.belongs_to(self):
            raise TypeError(f"got {type(peer).__name__}, expected a peer that this transport connected")
        with self._lock:
            self._check_open()
            self._check_peer(peer)
        return peer


def _one_kind(kind: npt.NDArray[np.uint8], at: npt.NDArray[np.intp], whose: str) -> MemoryKind:
    kinds = np.unique(kind[at]) if len(at) > 1 else kind[at]
    if len(kinds) > 1:
        raise ValueError(f"{whose}: dram and vram in one list, expected one kind; prepare two lists")
    return KIND_NAMES[int(kinds[0])] if len(kinds) else "dram"
