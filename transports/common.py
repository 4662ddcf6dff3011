"""The protocol, once: everything that does not depend on the native library.

`CommonTransport` keeps the ledger of registrations and the claims on names, checks rows against both region
tables, cuts lists into slices, drives them under a deadline, and holds the quarantine.  A backend supplies
the native hooks (those that raise `NotImplementedError` or are abstract); each is called with checked
arguments, raises mapped errors, and needs no locking of this class.

The quarantine: a transfer that was abandoned, or that failed where the backend cannot promise that its other
parts have ended, poisons its destination.  No list that writes there is posted, its registration and its
owner stay alive, until `wait_quarantine` has torn down what `Capabilities.abort_scope` says.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from logging import getLogger
from types import TracebackType
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from reshard.transports import rows
from reshard.transports.base import (
    Allocation,
    Capabilities,
    Peer,
    PeerStats,
    Prepared,
    Transfer,
    TransferStats,
    check_timeout,
)
from reshard.transports.driver import Driver, backoff
from reshard.transports.endpoint import Endpoint, decode_endpoint, encode_endpoint
from reshard.transports.errors import (
    PeerError,
    PoisonedMemoryError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
    TransportError,
)
from reshard.transports.hostmem import populate
from reshard.transports.ledger import Entry, Ledger
from reshard.transports.lists import ConnectedPeer, ListRegistration, PreparedList, Work
from reshard.transports.regions import KIND_NAMES, U64, MemoryKind, Region
from reshard.transports.transfer import ListTransfer, Slice

logger = getLogger(__name__)

GRACE_S = 0.1
"""How long, past a deadline, native work in flight may take to end before its destination counts as
poisoned."""
RECONNECT_S = 10.0
"""Deadline of connecting a healthy peer again after the native agent was rebuilt."""

CLOSE_S = 5.0
"""How long `close` tries to lift a quarantine."""

_IMMORTAL: list[object] = []
"""What a transport that closed under a quarantine leaves: memory that may still be written must never be
freed."""


class CommonTransport(ABC):
    """Base of the backends.

    Parameters
    ----------
    workers : int
        Threads that post large lists.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    slice_bytes: ClassVar[int] = rows.SLICE_BYTES
    """Budget of one slice; see `rows.cut_runs`."""

    def __init__(self, *, workers: int = 1) -> None:
        self.incarnation = os.urandom(16)
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._ledger = Ledger(self._register_checked, self._deregister, self._withdrawn)
        self._peers: dict[str, ConnectedPeer] = {}
        self._active: set[ListTransfer] = set()
        self._poisoned: list[ListTransfer] = []
        self._driver = Driver(f"reshard-{self.name}", workers)
        self._epoch = 0
        self._rebuilding = False
        self._closed = False

    # --- what a backend supplies ------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int, *, memory: MemoryKind = "dram", device: int = 0) -> Allocation:
        """See `Transport.allocate`."""

    @abstractmethod
    def _register(self, region: Region) -> object:
        """Register a region natively and return a handle."""

    @abstractmethod
    def _deregister(self, region: Region, native: object) -> None:
        """Undo that; never raises."""

    @abstractmethod
    def _payload(self) -> bytes:
        """Return the backend's part of the endpoint message."""

    def _withdrawn(self, generation: int) -> None:  # noqa: B027 - a backend without a beacon has nothing to say
        """Announce a new generation, before memory is withdrawn."""

    @abstractmethod
    def _dial(self, peer: ConnectedPeer, deadline: float) -> object:
        """Connect, prove that the peer is who its endpoint says, and return a native connection."""

    @abstractmethod
    def _hang_up(self, native: object) -> None:
        """Disconnect; never raises."""

    @abstractmethod
    def _gate(self, peer: ConnectedPeer) -> Slice:
        """Return a slice that completes if the peer is as its endpoint says, and else raises `PeerError`."""

    @abstractmethod
    def _build(self, peer: ConnectedPeer, work: Work) -> list[Slice]:
        """Build the native list, one slice between any two cuts."""

    def _settles(self, error: TransportError) -> bool:
        """Whether a transfer that failed with ``error`` can no longer write."""
        return True

    def _abort(self, native: object) -> None:
        """Tear down a connection so that nothing it began can write (abort scope ``peer``)."""
        raise NotImplementedError

    def _rebuild(self) -> None:
        """Destroy the native agent and with it all connections; make another (abort scope ``agent``)."""
        raise NotImplementedError

    @abstractmethod
    def _shut_down(self) -> None:
        """Free everything native; called once; never raises."""

    # --- memory -----------------------------------------------------------------------------------------

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

    def _register_checked(self, region: Region) -> object:
        if region.memory not in self.capabilities.memory_kinds:
            raise RegistrationError(
                f"transport {self.name!r}: got {region.memory} memory, "
                f"expected one of {', '.join(self.capabilities.memory_kinds)}"
            )
        if region.memory == "dram":
            populate(region.address, region.nbytes)
        return self._register(region)

    def withdraw(self, entries: list[Entry]) -> None:
        """End one registration of each entry; called by `ListRegistration.close`."""
        with self._lock:
            if entries and not self._closed:
                self._ledger.remove(entries)

    # --- peers ------------------------------------------------------------------------------------------

    def connect(self, endpoint: bytes, *, timeout_s: float, name: str = "") -> ConnectedPeer:
        """See `Transport.connect`."""
        deadline = time.monotonic() + check_timeout(timeout_s)
        decoded = decode_endpoint(endpoint, backend=self.name)
        peer = ConnectedPeer(self, name or f"{self.name}:{decoded.incarnation.hex()[:12]}", decoded)
        with self._lock:
            self._check_open()
            if peer.name in self._peers:
                raise PeerError(f"peer {peer.name!r} is connected already; close it first", peer=peer.name)
            self._peers[peer.name] = peer
        try:
            self._dial_again(peer, deadline)
        except BaseException:
            with self._lock:
                peer.closed = True
                self._peers.pop(peer.name, None)
            raise
        return peer

    def _dial_again(self, peer: ConnectedPeer, deadline: float) -> None:
        epoch = self._epoch
        peer.native = self._dial(peer, deadline)
        peer.epoch = epoch

    def close_peer(self, peer: ConnectedPeer) -> None:
        """Disconnect; called by `ConnectedPeer.close`."""
        with self._lock:
            if peer.closed:
                return
            peer.closed = True
            if self._peers.get(peer.name) is peer:
                del self._peers[peer.name]
            lists = list(peer.lists)
        for prepared in lists:
            self.close_list(prepared)
        with self._lock:
            if any(transfer.prepared.peer is peer for transfer in self._poisoned):
                return  # `_clear` hangs up
            native, peer.native = peer.native, None
            if native is not None and peer.epoch == self._epoch:
                self._hang_up(native)

    # --- lists ------------------------------------------------------------------------------------------

    def prepare(self, peer: Peer, local: U64, remote: U64) -> PreparedList:
        """See `Transport.prepare`."""
        connected = self._own_peer(peer)
        local, remote = rows.pair_rows(local, remote)
        caps = self.capabilities
        rows.count_runs(local, caps.max_runs)
        here, there = f"transport {self.name!r}, local rows", f"peer {connected.name!r}, remote rows"
        extent = rows.extents(local, here)
        with self._lock:
            self._check_open()
            table, entries = self._ledger.table(), self._ledger.entries()
            at = table.locate(local[:, rows.ADDRESS], extent, local[:, rows.DEVICE], whose=here)
            served = connected.endpoint.regions
            from_at = served.locate(
                remote[:, rows.ADDRESS], rows.extents(remote, there), remote[:, rows.DEVICE], whose=there
            )
            spans = rows.envelopes(local, extent, at)
            held = [entries[region] for region, _, _ in spans]
            self._ledger.hold(held)
        try:
            destinations = [
                Region(start, stop - start, entry.region.memory, entry.region.device, entry.region.owner)
                for entry, (_, start, stop) in zip(held, spans, strict=True)
            ]
            nbytes = rows.total_bytes(local)
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
            self._build_native(prepared)
        except BaseException:
            with self._lock:
                self._ledger.release(held)
            raise
        with self._lock:
            connected.lists.add(prepared)
        return prepared

    def _build_native(self, prepared: PreparedList) -> None:
        peer, epoch = prepared.peer, self._epoch
        if peer.epoch != epoch:
            self._dial_again(peer, time.monotonic() + RECONNECT_S)
        prepared.free_native()
        prepared.gate = self._gate(peer)
        prepared.slices = self._build(peer, prepared.work) if prepared.n_descriptors else []
        prepared.epoch = epoch

    def close_list(self, prepared: PreparedList) -> None:
        """Free a list; called by `PreparedList.close`."""
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
        if not prepared.closed or prepared.busy is not None:
            return
        prepared.free_native()
        prepared.peer.lists.discard(prepared)
        held, prepared.held = prepared.held, []
        if not self._closed:
            self._ledger.release(held)

    # --- reading ----------------------------------------------------------------------------------------

    def post(self, prepared: Prepared) -> ListTransfer:
        """See `Transport.post`."""
        if not isinstance(prepared, PreparedList) or not prepared.belongs_to(self):
            raise TypeError(f"post: got {type(prepared).__name__}, expected a list prepared by this transport")
        peer = prepared.peer
        with self._lock:
            self._check_open()
            self._check_peer(peer)
            if prepared.closed:
                raise TransferError(f"the list for peer {peer.name!r} is closed", peer=peer.name)
            if prepared.busy is not None:
                raise TransferError(f"the list for peer {peer.name!r} is in flight already", peer=peer.name)
            self._check_poison(prepared)
            stale = prepared.epoch != self._epoch
        if stale:
            self._build_native(prepared)
        with self._lock:
            self._check_poison(prepared)
            if prepared.gate is None:
                raise TransferError(f"the list for peer {peer.name!r} was not built", peer=peer.name)
            transfer = ListTransfer(prepared, prepared.gate, prepared.slices, self._ended)
            prepared.busy = transfer
            self._active.add(transfer)
        if transfer.inline:
            while transfer.step() and transfer.state == "active":
                pass
        else:
            self._driver.submit(transfer)
        return transfer

    def wait(self, transfers: Sequence[Transfer], *, timeout_s: float, finish_others: bool = False) -> TransferStats:
        """See `Transport.wait`."""
        deadline = time.monotonic() + check_timeout(timeout_s)
        mine = self._own_transfers(transfers)
        failed = False
        pauses = backoff()
        while True:
            moved = False
            for transfer in mine:
                if transfer.inline and transfer.state == "active":
                    moved |= transfer.step()
            open_ = [transfer for transfer in mine if transfer.state == "active"]
            if not open_:
                break
            if not failed and not finish_others and any(t.state in ("failed", "abandoned") for t in mine):
                failed = True
                for transfer in open_:
                    transfer.cancel()
            left = deadline - time.monotonic()
            if left <= 0:
                for transfer in open_:
                    transfer.cancel()
                self._drain(open_, time.monotonic() + GRACE_S)
                raise self._timed_out(mine, open_, timeout_s)
            if moved:
                pauses = backoff()
                continue
            pause = next(pauses) if any(t.inline for t in open_) else left
            if pause:
                with self._moved:
                    if all(t.state == "active" for t in open_):
                        self._moved.wait(min(pause, left))
        bad = next((t for t in mine if t.error is not None), None) or next((t for t in mine if t.state != "done"), None)
        if bad is not None:
            raise self._with_states(bad, mine)
        return _stats(mine)

    def _ended(self, transfer: ListTransfer) -> None:
        """Take note that nothing of a transfer is in flight any more; called by the thread that drove it."""
        with self._moved:
            prepared = transfer.prepared
            self._active.discard(transfer)
            if transfer.state == "abandoned":
                return  # `wait_quarantine` decides
            if transfer.error is not None:
                transfer.state = "failed"
                if transfer.failed_in_flight and not self._settles(transfer.error):
                    self._poisoned.append(transfer)
                if isinstance(transfer.error, PeerError) or transfer in self._poisoned:
                    prepared.peer.failed = prepared.peer.failed or str(transfer.error)
            else:
                transfer.state = "cancelled" if transfer.cancelled else "done"
            if transfer not in self._poisoned:
                prepared.busy = None
                self._free_if_idle(prepared)
            self._moved.notify_all()

    def _drain(self, transfers: Sequence[ListTransfer], deadline: float) -> None:
        """Let cancelled transfers end, and abandon those that do not."""
        pauses = backoff()
        while any(t.state == "active" for t in transfers) and time.monotonic() < deadline:
            moved = sum(t.step() for t in transfers if t.inline)
            if not moved and (pause := next(pauses)):
                with self._moved:
                    if any(t.state == "active" for t in transfers):
                        self._moved.wait(pause)
        with self._moved:
            for transfer in transfers:
                if transfer.state == "active":
                    transfer.state, transfer.ended = "abandoned", time.monotonic()
                    self._active.discard(transfer)
                    peer = transfer.prepared.peer
                    if transfer.posted:
                        self._poisoned.append(transfer)
                    else:
                        transfer.prepared.busy = None
                    peer.failed = peer.failed or "a read from it was abandoned"
            self._moved.notify_all()

    # --- quarantine -------------------------------------------------------------------------------------

    def quarantined(self) -> tuple[Region, ...]:
        """See `Transport.quarantined`."""
        with self._lock:
            return tuple(region for transfer in self._poisoned for region in transfer.prepared.destinations)

    def wait_quarantine(self, *, timeout_s: float) -> None:
        """See `Transport.wait_quarantine`."""
        deadline = time.monotonic() + check_timeout(timeout_s)
        scope = self.capabilities.abort_scope
        pauses = backoff()
        with self._moved:
            self._rebuilding = True
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
                    if poisoned and scope == "peer" and not any(t.posting for t in poisoned):
                        for peer in {t.prepared.peer for t in poisoned}:
                            if peer.native is not None:
                                self._abort(peer.native)
                                peer.native = None
                        self._clear(poisoned)
                        return
                    if poisoned and scope == "agent" and not healthy and not in_post:
                        self._tear_down()
                        self._clear(poisoned)
                        return
                if time.monotonic() >= deadline:
                    names = ", ".join(sorted({t.prepared.peer.name for t in poisoned}))
                    waits_for = ", ".join(sorted({t.prepared.peer.name for t in healthy})) or "a native call"
                    raise TransferTimeoutError(
                        f"wait_quarantine: after {timeout_s} s writes from {names} may still land; "
                        f"tearing down waits for {waits_for}",
                        poisoned=[(r.address, r.stop) for r in self.quarantined()],
                    )
                if pause := next(pauses):
                    time.sleep(pause)
        finally:
            with self._moved:
                self._rebuilding = False

    def _tear_down(self) -> None:
        for peer in self._peers.values():
            for prepared in peer.lists:
                prepared.free_native()
            peer.native = None
        for transfer in self._poisoned:
            transfer.prepared.free_native()
        self._rebuild()
        self._epoch += 1

    def _clear(self, transfers: Sequence[ListTransfer]) -> None:
        """Lift the quarantine of transfers that can write no more."""
        with self._moved:
            for transfer in transfers:
                if transfer not in self._poisoned:
                    continue
                self._poisoned.remove(transfer)
                transfer.retire()
                prepared, peer = transfer.prepared, transfer.prepared.peer
                prepared.busy = None
                self._free_if_idle(prepared)
                still = any(other.prepared.peer is peer for other in self._poisoned)
                if peer.closed and not still and peer.native is not None:
                    native, peer.native = peer.native, None
                    self._hang_up(native)
            self._moved.notify_all()

    # --- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            if self._closed:
                return
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        if self.quarantined():
            try:
                self.wait_quarantine(timeout_s=CLOSE_S)
            except TransferTimeoutError as error:
                logger.warning("transport %r closes under a quarantine: %s", self.name, error)
        stopped = self._driver.close(CLOSE_S)
        with self._lock:
            self._closed = True
            if self._poisoned or not stopped:
                _IMMORTAL.append((self, self._ledger.all_entries(), list(self._poisoned)))
                return
            for entry in self._ledger.all_entries():
                self._deregister(entry.region, entry.native)
            self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- checks -----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"transport {self.name!r} is closed")

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
            self._check_peer(peer)
        return peer

    def _own_transfers(self, transfers: Sequence[Transfer]) -> list[ListTransfer]:
        mine = []
        for transfer in transfers:
            if not isinstance(transfer, ListTransfer) or not transfer.prepared.belongs_to(self):
                raise TypeError(f"wait: got {type(transfer).__name__}, expected transfers that this transport posted")
            mine.append(transfer)
        return mine

    def _check_poison(self, prepared: PreparedList) -> None:
        if self._rebuilding:
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

    # --- errors -----------------------------------------------------------------------------------------

    def _timed_out(self, mine: list[ListTransfer], late: list[ListTransfer], timeout_s: float) -> TransferTimeoutError:
        states = _states(mine)
        names = ", ".join(dict.fromkeys(transfer.prepared.peer.name for transfer in late))
        poisoned = [
            (region.address, region.stop)
            for transfer in late
            if transfer.state == "abandoned"
            for region in transfer.prepared.destinations
        ]
        note = "; their destinations are quarantined" if poisoned else "; nothing is in flight any more"
        error = TransferTimeoutError(
            f"after {timeout_s} s still reading from {names}{note} (all peers: {_listing(states)})",
            peer=late[0].prepared.peer.name,
            failures=states,
            poisoned=poisoned,
        )
        error.__cause__ = next((transfer.error for transfer in mine if transfer.error is not None), None)
        return error

    def _with_states(self, bad: ListTransfer, mine: list[ListTransfer]) -> TransportError:
        error, states = bad.error, _states(mine)
        if error is None:
            name = bad.prepared.peer.name
            error = TransferError(f"the read from peer {name!r} was {bad.state}", peer=name)
        error.failures.update(states)
        if len(states) > 1:
            error.add_note(f"all peers: {_listing(states)}")
        return error


def _one_kind(kind: npt.NDArray[np.uint8], at: npt.NDArray[np.intp], whose: str) -> MemoryKind:
    kinds = np.unique(kind[at]) if len(at) > 1 else kind[at]
    if len(kinds) > 1:
        raise ValueError(f"{whose}: dram and vram in one list, expected one kind; prepare two lists")
    return KIND_NAMES[int(kinds[0])] if len(kinds) else "dram"


def _states(transfers: Sequence[ListTransfer]) -> dict[str, str]:
    rank = {"done": 0, "cancelled": 1, "active": 2, "failed": 3, "abandoned": 4}
    worst: dict[str, str] = {}
    for transfer in transfers:
        name = transfer.prepared.peer.name
        state = f"failed: {transfer.error}" if transfer.error is not None else transfer.state
        if name not in worst or rank[state.partition(":")[0]] > rank[worst[name].partition(":")[0]]:
            worst[name] = state
    return worst


def _listing(states: dict[str, str]) -> str:
    return ", ".join(f"{name}: {state}" for name, state in states.items())


def _stats(transfers: Sequence[ListTransfer]) -> TransferStats:
    if not transfers:
        return TransferStats(0, 0.0, 0)
    per_peer: dict[str, list[ListTransfer]] = {}
    for transfer in transfers:
        per_peer.setdefault(transfer.prepared.peer.name, []).append(transfer)
    return TransferStats(
        sum(t.prepared.nbytes for t in transfers),
        max(t.ended for t in transfers) - min(t.began for t in transfers),
        sum(t.prepared.n_descriptors for t in transfers),
        {
            name: PeerStats(
                sum(t.prepared.nbytes for t in group),
                sum(t.prepared.n_descriptors for t in group),
                max(t.ended for t in group) - min(t.began for t in group),
                sum(t.post_seconds for t in group),
                sum(t.native_seconds for t in group),
            )
            for name, group in per_peer.items()
        },
    )
