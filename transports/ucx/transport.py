"""The ``ucx`` backend: UCX's own C library, one-sided gets, one worker for each peer.

What is served goes through one worker with a thread of its own; each peer that is read has a `Lane`. Tearing down a
lane ends everything it began, so a time-out costs the connection to that peer and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar, cast

import numpy as np

from reshard.transports.base import Allocation, Capabilities
from reshard.transports.beacon import BEACON_BYTES, Beacon
from reshard.transports.common import CommonTransport
from reshard.transports.devicemem import allocate_device
from reshard.transports.errors import (
    PeerError,
    TransferTimeoutError,
    TransportError,
    TransportUnavailableError,
)
from reshard.transports.hostmem import allocate_pages
from reshard.transports.identity import ProcessIdentity
from reshard.transports.ledger import Entry
from reshard.transports.lists import ConnectedPeer, Work
from reshard.transports.regions import U64, MemoryKind, Region
from reshard.transports.rows import ADDRESS, NBYTES
from reshard.transports.shared import SharedPages
from reshard.transports.transfer import Call, Slice
from reshard.transports.ucx.callbacks import callbacks_of
from reshard.transports.ucx.context import MEMORY_TYPES, Context, MappedMemory
from reshard.transports.ucx.gets import Gets
from reshard.transports.ucx.lane import all_settled
from reshard.transports.ucx.library import load_library
from reshard.transports.ucx.parcels import Parcels
from reshard.transports.ucx.payload import UcxAddress, decode_address, encode_address
from reshard.transports.ucx.peers import HANG_UP_S, LEFT, GetSlice, UcxPeer
from reshard.transports.ucx.serving import ServingThread
from reshard.transports.ucx.worker import Worker
from reshard.transports.watch import PeerWatch

_log = logging.getLogger(__name__)

_ABORT_S = 0.1
"""How long one attempt to abort waits; `wait_quarantine` makes as many as its deadline allows."""


class UcxTransport(CommonTransport):
    """Reads with UCX.

    Parameters
    ----------
    tls : str
        UCX transports to use, such as ``"tcp"`` or ``"rc,cuda"``; empty for what the environment or UCX chooses.
    net_devices : str
        Network devices to use, such as ``"mlx5_0:1"``; empty likewise.
    config : mapping of str to str
        Any other UCX settings, without the ``UCX_`` prefix. All of these reach our context and nothing else.
    library : str
        See `load_library`.
    workers : int
        Threads that drive large reads; peers are read in parallel by as many. 0 for one a core, at most 8.
    map_beacon : bool
        Whether to watch peers of this host by a mapped page instead of by native reads of their beacons.

    Raises
    ------
    TransportUnavailableError
        If there is no UCX that works here.
    """

    name: ClassVar[str] = "ucx"
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=("dram", "vram"),
        one_sided=True,
        strided_rows=False,
        abort_scope="peer",
        max_runs=1 << 26,
        needs_registration=True,
        cross_process=True,
        cross_host=True,
    )

    def __init__(
        self,
        *,
        tls: str = "",
        net_devices: str = "",
        config: Mapping[str, str] | None = None,
        library: str = "",
        workers: int = 0,
        map_beacon: bool = True,
    ) -> None:
        super().__init__(workers=workers or min(len(os.sched_getaffinity(0)), 8))
        settings = dict(config or {})
        settings.update({k: v for k, v in (("TLS", tls), ("NET_DEVICES", net_devices)) if v})
        self._context = Context(load_library(library), settings)
        self._end = threading.Lock()
        self._map_beacon = map_beacon
        self._beacon_page = SharedPages(BEACON_BYTES)
        self._beacon = Beacon(self._beacon_page.array, self.incarnation)
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.close)
            self._process = ProcessIdentity.own()
            self._serving = Worker(self._context)
            undo.callback(self._serving.close)
            callbacks = callbacks_of(self._context.library)
            self._token = callbacks.new_token()
            callbacks.serve_identity(self._serving.handle, self._token, self.incarnation)
            self._address = self._serving.address()
            self._beacon_map = self._context.map(Region.of(self._beacon_page.array))
            undo.callback(self._context.unmap, self._beacon_map)
            self._server = ServingThread(self._serving)
            self._server.serve(Region.of(self._beacon_page.array))
            undo.pop_all()

    @staticmethod
    def probe() -> str:
        """Return why UCX cannot work here, or an empty string."""
        try:
            Context(load_library(), {}).close()
        except (TransportUnavailableError, ImportError) as error:
            return str(error)
        return ""

    def allocate(self, nbytes: int, *, memory: MemoryKind = "dram", device: int = 0) -> Allocation:
        """See `Transport.allocate`; device memory comes from torch."""
        self._check_open()
        if memory == "vram":
            return allocate_device(nbytes, device)
        array = allocate_pages(nbytes)
        return Allocation(array, Region(int(array.ctypes.data), nbytes, "dram", 0, array))

    def _register(self, region: Region) -> MappedMemory:
        mapped = self._context.map(region)
        self._server.serve(region)
        return mapped

    def _deregister(self, region: Region, native: object) -> None:
        self._server.withdraw(region)
        self._context.unmap(cast(MappedMemory, native))

    def _payload(self) -> bytes:
        keys = tuple(cast(MappedMemory, entry.native).key for entry in self._ledger.entries())
        page = self._beacon_page
        return encode_address(
            UcxAddress(self._process, self._address, page.address, page.fd, self._beacon_map.key, keys)
        )

    def _withdrawn(self, generation: int) -> None:
        self._beacon.withdraw(generation)
        self._server.announce(generation)

    def _dial(self, peer: ConnectedPeer, deadline: float) -> UcxPeer:
        address = decode_address(peer.endpoint.payload, len(peer.endpoint.regions))
        address.process.check(peer.name)  # sees on one host, before UCX is asked, what UCX does not see at all
        watch: PeerWatch | None = None
        if self._map_beacon and address.process.visible:
            watch = PeerWatch(peer.name, peer.endpoint, address.process, address.beacon_fd)
        native = UcxPeer(self._context, peer, address, watch, deadline)
        gate = native.gate()
        try:
            through = gate.post()
            while not through:
                if time.monotonic() >= deadline:
                    raise TransferTimeoutError(f"peer {peer.name!r} did not answer before the deadline", peer=peer.name)
                through = gate.poll()
            gate.close()
            if native.by_messages("dram", "dram"):
                _log.info("peer %r is read by messages, which its process answers, over %s", peer.name, native.routes)
        except BaseException:
            native.close(HANG_UP_S)
            raise
        return native

    def _hang_up(self, native: object) -> None:
        cast(UcxPeer, native).close(HANG_UP_S)

    def _abort(self, native: object) -> None:
        peer = cast(UcxPeer, native)
        if not peer.close(_ABORT_S):
            raise TransferTimeoutError(f"reads from peer {peer.lane.peer!r} have not ended", peer=peer.lane.peer)

    def _settles(self, error: TransportError) -> bool:
        # A lane that failed is torn down at once, so that it writes no more, unless that takes its time.
        return all_settled(self._context)

    def _gate(self, peer: ConnectedPeer) -> Slice:
        native = _native(peer)
        return Call(native.watch.check) if native.watch is not None else native.gate()

    def _build(self, peer: ConnectedPeer, work: Work) -> list[Slice]:
        native = _native(peer)
        kind = MEMORY_TYPES[work.local_memory]
        sides = (work.local[:, ADDRESS], work.local[:, NBYTES], work.remote[:, ADDRESS])
        local, nbytes, remote = (np.ascontiguousarray(column) for column in sides)
        spans = [slice(start, stop) for start, stop in pairwise(work.cuts)]
        columns = [(local[at], nbytes[at], remote[at]) for at in spans]
        if native.by_messages(work.local_memory, work.remote_memory):
            ring = native.parcel_ring()
            return [GetSlice(native.lane, Parcels(ring, each, kind)) for each in columns]
        memh = _handles(work.local_entries)[work.local_region]
        rkey = native.keys(work.remote_region)
        slices: list[Slice] = []
        for at, each in zip(spans, columns, strict=True):
            one_memh, one_rkey = (c if len(c) == 1 else c[at] for c in (memh, rkey))
            slices.append(GetSlice(native.lane, Gets(native.lane.ring, each, one_memh, one_rkey, kind)))
        return slices

    def close(self) -> None:
        """See `Transport.close`. Serving ends first: where UCX emulates reads it would send memory being unmapped."""
        if self._forked_from:
            return
        with self._end:
            self._beacon.close()
            if self._server.close():
                self._serving.close()
                callbacks_of(self._context.library).forget(self._token)
            super().close()

    def _shut_down(self) -> None:
        if not all_settled(self._context, HANG_UP_S) or self._serving.handle:
            LEFT.append(self)  # it still has peers, or a lane: freeing what UCX uses would crash the process
            return
        self._context.unmap(self._beacon_map)
        self._context.close()
        self._beacon.release()
        self._beacon_page.close()  # not when the transport is collected: a cycle keeps it until then


def _native(peer: ConnectedPeer) -> UcxPeer:
    if not isinstance(peer.native, UcxPeer):
        raise PeerError(f"peer {peer.name!r} is not connected", peer=peer.name)
    return peer.native


def _handles(entries: list[Entry]) -> U64:
    return np.array([cast(MappedMemory, entry.native).handle for entry in entries], np.uint64)
