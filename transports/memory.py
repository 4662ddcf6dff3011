"""The ``memory`` transport: mapped shared memory between processes of one host, plain copies within one.

It needs nothing but Linux and NumPy, and it is what the contract tests compare the others with.

- *Across processes* only memory from `MemoryTransport.allocate` can be read.  The endpoint message names
  each region's file descriptor; the reader maps it.  Other registered memory can be a destination, and can
  be read within the process.
- *Who is there*: the reader holds a process descriptor (so a reused pid cannot deceive it), compares start
  time, boot and pid name space, and the beacon, before each list and after each slice.
"""

from __future__ import annotations

import os
import struct
import weakref
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from reshard.transports import rows
from reshard.transports.base import Allocation, Capabilities
from reshard.transports.beacon import BEACON_BYTES, Beacon, check_beacon
from reshard.transports.common import CommonTransport
from reshard.transports.copying import CopyList
from reshard.transports.errors import EndpointError, PeerError, RegistrationError
from reshard.transports.identity import ProcessIdentity
from reshard.transports.lists import ConnectedPeer, Work
from reshard.transports.regions import MemoryKind, Region, RegionTable
from reshard.transports.shared import SharedPages, map_from
from reshard.transports.transfer import Call, Slice
from reshard.transports.watch import PeerWatch

# after the process: the control descriptor; then a descriptor and an offset for each region
_CONTROL = struct.Struct("<i")
_HEAD_BYTES = ProcessIdentity.NBYTES + _CONTROL.size

_LIVE: weakref.WeakValueDictionary[bytes, MemoryTransport] = weakref.WeakValueDictionary()


@dataclass(slots=True)
class _Connection:
    """The way to one peer; ``owner`` is set within one process, the rest across processes."""

    owner: weakref.ref[MemoryTransport] | None = None
    watch: PeerWatch | None = None
    fds: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    offsets: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    mapped: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)


class MemoryTransport(CommonTransport):
    """See the module.

    Parameters
    ----------
    workers : int
        Threads that copy large lists; 0 means one for every two processors, at most 4.
    """

    name: ClassVar[str] = "memory"
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=("dram",),
        one_sided=True,
        strided_rows=True,
        abort_scope="none",
        max_runs=1 << 26,
        needs_registration=True,
        cross_process=True,
        cross_host=False,
    )

    def __init__(self, *, workers: int = 0) -> None:
        super().__init__(workers=workers or max(1, min(4, (os.cpu_count() or 1) // 2)))
        self._control = SharedPages(BEACON_BYTES)
        self._beacon = Beacon(self._control.array, self.incarnation)
        self._allocated: weakref.WeakSet[SharedPages] = weakref.WeakSet()
        _LIVE[self.incarnation] = self

    @staticmethod
    def probe() -> str:
        """Return why it cannot work here, or an empty string."""
        missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
        return f"this system has no {' and no '.join(missing)} (it needs Linux 5.3)" if missing else ""

    def allocate(self, nbytes: int, *, memory: MemoryKind = "dram", device: int = 0) -> Allocation:
        """Return shared memory; see `Transport.allocate`."""
        if memory != "dram":
            raise RegistrationError(f"transport 'memory': got {memory} memory, expected dram")
        with self._lock:
            self._check_open()
        pages = SharedPages(nbytes)
        with self._lock:  # `_register` looks through it
            self._allocated.add(pages)
        return Allocation(pages.array, Region(pages.address, nbytes, "dram", 0, pages))

    def _register(self, region: Region) -> object:
        for pages in self._allocated:
            if pages.address <= region.address and region.stop <= pages.address + pages.nbytes:
                return pages
        return None

    def _withdrawn(self, generation: int) -> None:
        self._beacon.withdraw(generation)

    def _payload(self) -> bytes:
        head = ProcessIdentity.own().pack() + _CONTROL.pack(self._control.fd)
        entries = self._ledger.entries()
        fds = np.full(len(entries), -1, "<i4")
        offsets = np.zeros(len(entries), "<u8")
        for at, entry in enumerate(entries):
            if isinstance(entry.native, SharedPages):
                fds[at], offsets[at] = entry.native.fd, entry.region.address - entry.native.address
        return head + fds.tobytes() + offsets.tobytes()

    def _dial(self, peer: ConnectedPeer, deadline: float) -> object:
        payload, n_regions = peer.endpoint.payload, len(peer.endpoint.regions)
        if len(payload) != _HEAD_BYTES + 12 * n_regions:
            raise EndpointError(f"endpoint payload: got {len(payload)} bytes, expected {_HEAD_BYTES + 12 * n_regions}")
        process = ProcessIdentity.unpack(payload)
        (control,) = _CONTROL.unpack_from(payload, ProcessIdentity.NBYTES)
        owner = _LIVE.get(peer.endpoint.incarnation)
        if owner is not None and process.pid == os.getpid():
            connection = _Connection(owner=weakref.ref(owner))
            with owner._lock:
                self._check(connection, peer)
                _require_served(owner, peer)
            return connection
        if not process.visible:
            raise PeerError(
                f"peer {peer.name!r} lives on another host or in another container (pid name space); "
                "transport 'memory' reaches processes that see each other only",
                peer=peer.name,
            )
        offsets_at = _HEAD_BYTES + 4 * n_regions
        return _Connection(
            watch=PeerWatch(peer.name, peer.endpoint, process, control),
            fds=np.frombuffer(payload, "<i4", n_regions, _HEAD_BYTES),
            offsets=np.frombuffer(payload, "<u8", n_regions, offsets_at),
        )

    def _check(self, connection: _Connection, peer: ConnectedPeer) -> None:
        if connection.watch is not None:
            connection.watch.check()
            return
        owner = connection.owner() if connection.owner is not None else None
        if owner is None or not len(beacon := owner._control.array):
            raise PeerError(f"peer {peer.name!r} has closed its transport", peer=peer.name)
        check_beacon(beacon, peer.endpoint, peer.name)

    def _hang_up(self, native: object) -> None:
        if isinstance(native, _Connection):
            native.mapped.clear()
            if native.watch is not None:
                native.watch.close()

    def _gate(self, peer: ConnectedPeer) -> Slice:
        connection = _connection(peer)
        return Call(lambda: self._check(connection, peer))

    def _build(self, peer: ConnectedPeer, work: Work) -> list[Slice]:
        connection = _connection(peer)
        remote = work.remote
        used = np.unique(work.remote_region).tolist()
        kept: tuple[object, ...]
        if connection.watch is not None:
            moved = np.zeros(len(work.remote_table), np.uint64)
            for region in used:
                base = self._map(connection, connection.watch, peer, region)
                moved[region] = (base - int(work.remote_table.address[region])) % 2**64  # the sum below wraps, too
            remote = remote.copy()
            remote[:, rows.ADDRESS] += moved[work.remote_region]
            kept = tuple(connection.mapped[region] for region in used)
        else:
            kept = tuple(self._owners(connection, [int(work.remote_table.address[region]) for region in used]))
        return [
            self._copy(connection, peer, CopyList(*rows.between(work.local, remote, start, stop)), kept)
            for start, stop in zip(work.cuts[:-1], work.cuts[1:], strict=True)
        ]

    def _copy(self, connection: _Connection, peer: ConnectedPeer, copies: CopyList, kept: tuple[object, ...]) -> Slice:
        """Return a slice that keeps the source's memory, or its mapping, for as long as it lives."""

        def run(kept: tuple[object, ...] = kept) -> None:
            copies.run()
            self._check(connection, peer)  # what was withdrawn meanwhile is void

        return Call(run)

    def _owners(self, connection: _Connection, addresses: list[int]) -> list[object]:
        owner = connection.owner() if connection.owner is not None else None
        if owner is None:
            return []
        with owner._lock:
            return [entry.region.owner for entry in owner._ledger.entries() if entry.region.address in addresses]

    def _map(self, connection: _Connection, watch: PeerWatch, peer: ConnectedPeer, region: int) -> int:
        array = connection.mapped.get(region)
        fd, offset = int(connection.fds[region]), int(connection.offsets[region])
        table = peer.endpoint.regions
        if array is None:
            if fd < 0:
                raise RegistrationError(
                    f"peer {peer.name!r}: region {region} at {int(table.address[region]):#x} is private to its "
                    "process; transport 'memory' reads other processes' memory only if Transport.allocate made it"
                )
            array = map_from(watch.pid, fd, offset + int(table.nbytes[region]), peer.name)
            # Opened by number: only now that the beacon still holds is it certain to be this transport's
            # file.
            watch.check()
            connection.mapped[region] = array
        return int(array.ctypes.data) + offset

    def _stop_serving(self) -> None:
        self._beacon.close()

    def _shut_down(self) -> None:
        _LIVE.pop(self.incarnation, None)
        self._beacon.release()
        self._control.close()  # not when the transport is collected: a cycle keeps it until then


def _require_served(owner: MemoryTransport, peer: ConnectedPeer) -> None:
    """Refuse a message that names what its owner, in this process, does not serve: the copy would take any address."""
    served = set(_spans(owner._ledger.table()))
    if wrong := [span for span in _spans(peer.endpoint.regions) if span not in served]:
        address, nbytes = wrong[0]
        raise EndpointError(
            f"endpoint regions: {nbytes} bytes at {address:#x} are not what peer {peer.name!r} in this process serves",
            peer=peer.name,
        )


def _spans(table: RegionTable) -> list[tuple[int, int]]:
    return list(zip(table.address.tolist(), table.nbytes.tolist(), strict=True))


def _connection(peer: ConnectedPeer) -> _Connection:
    if not isinstance(peer.native, _Connection):
        raise PeerError(f"peer {peer.name!r} is not connected", peer=peer.name)
    return peer.native
