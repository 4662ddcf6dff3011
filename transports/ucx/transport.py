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
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt

from reshard.transports.base import Allocation, Capabilities
from reshard.transports.beacon import BEACON_BYTES, Beacon, beacon_image, check_beacon
from reshard.transports.common import CommonTransport
from reshard.transports.devicemem import allocate_device
from reshard.transports.endpoint import Endpoint
from reshard.transports.errors import (
    PeerError,
    TransferError,
    TransferTimeoutError,
    TransportError,
    TransportUnavailableError,
)
from reshard.transports.hostmem import PAGE_BYTES, allocate_pages
from reshard.transports.identity import ProcessIdentity
from reshard.transports.ledger import Entry
from reshard.transports.lists import ConnectedPeer, Work
from reshard.transports.regions import U64, MemoryKind, Region
from reshard.transports.rows import ADDRESS, NBYTES
from reshard.transports.shared import SharedPages
from reshard.transports.transfer import Call, Slice
from reshard.transports.ucx.callbacks import callbacks_of
from reshard.transports.ucx.context import MEMORY_TYPES, Context, MappedMemory
from reshard.transports.ucx.describe import emulated
from reshard.transports.ucx.gets import Gets
from reshard.transports.ucx.lane import Lane, all_settled
from reshard.transports.ucx.library import load_library
from reshard.transports.ucx.payload import UcxAddress, decode_address, encode_address
from reshard.transports.ucx.worker import ServingThread, Worker
from reshard.transports.watch import PeerWatch

_log = logging.getLogger(__name__)

_BUSY_S = 0.004
_IDLE_S = 0.001
_ABORT_S = 0.1
"""How long one attempt to abort waits; `wait_quarantine` makes as many as its deadline allows."""
_HANG_UP_S = 2.0

_LEFT: list[UcxTransport | UcxPeer] = []
"""What was closed while its worker could not be destroyed: what UCX may touch is never freed."""


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
            callbacks.serve_identity(self._serving.handle, callbacks.new_token(), self.incarnation)
            self._address = self._serving.address()
            self._beacon_map = self._context.map(Region.of(self._beacon_page.array))
            undo.callback(self._context.unmap, self._beacon_map)
            self._server = ServingThread(self._serving)
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
        return self._context.map(region)

    def _deregister(self, region: Region, native: object) -> None:
        self._context.unmap(cast(MappedMemory, native))

    def _payload(self) -> bytes:
        keys = tuple(cast(MappedMemory, entry.native).key for entry in self._ledger.entries())
        page = self._beacon_page
        return encode_address(
            UcxAddress(self._process, self._address, page.address, page.fd, self._beacon_map.key, keys)
        )

    def _withdrawn(self, generation: int) -> None:
        self._beacon.withdraw(generation)

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
            if emulated(native.lane.transports()):
                _log.info(
                    "reads from peer %r are a software emulation by its process, over %s",
                    peer.name,
                    native.lane.transports(),
                )
        except BaseException:
            native.close(_HANG_UP_S)
            raise
        return native

    def _hang_up(self, native: object) -> None:
        cast(UcxPeer, native).close(_HANG_UP_S)

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
        memh = _handles(work.local_entries)[work.local_region]
        rkey = native.keys(work.remote_region)
        kind = MEMORY_TYPES[work.local_memory]
        sides = (work.local[:, ADDRESS], work.local[:, NBYTES], work.remote[:, ADDRESS])
        local, nbytes, remote = (np.ascontiguousarray(column) for column in sides)
        ffi = self._context.library.ffi
        slices: list[Slice] = []
        for start, stop in pairwise(work.cuts):
            at = slice(start, stop)
            one_memh, one_rkey = (c if len(c) == 1 else c[at] for c in (memh, rkey))
            gets = Gets(ffi, (local[at], nbytes[at], remote[at]), one_memh, one_rkey, kind)
            slices.append(GetSlice(native.lane, gets))
        return slices

    def close(self) -> None:
        """See `Transport.close`. Serving ends first: where UCX emulates reads it would send memory being unmapped."""
        if self._forked_from:
            return
        with self._end:
            self._beacon.close()
            if self._server.close():
                self._serving.close()
            super().close()

    def _shut_down(self) -> None:
        if not all_settled(self._context, _HANG_UP_S) or self._serving.handle:
            _LEFT.append(self)  # it still has peers, or a lane: freeing what UCX uses would crash the process
            return
        self._context.unmap(self._beacon_map)
        self._context.close()


class GetSlice:
    """A part of a list, driven by whoever posts and polls it."""

    __slots__ = ("_gets", "_lane")

    native_s: ClassVar[float] = 0.0
    """UCX does not measure."""

    def __init__(self, lane: Lane, gets: Gets) -> None:
        self._lane = lane
        self._gets = gets

    @property
    def moved(self) -> bool:
        """See `Slice.moved`."""
        return self._gets.moved

    def post(self) -> bool:
        """Start, and work on it for a bounded time; see `Slice.post`."""
        if not self._gets.chunks or self._lane.alive:
            self._gets.rewind()
        return self._lane.drive(self._gets, _BUSY_S, 0.0)

    def poll(self) -> bool:
        """Work on it for a bounded time; see `Slice.poll`."""
        return self._lane.drive(self._gets, _BUSY_S, _IDLE_S)

    def close(self) -> None:
        """Nothing to free: requests belong to the lane."""


class BeaconGate(GetSlice):
    """Fetches the peer's beacon and compares it with its endpoint message; each list has one of its own."""

    __slots__ = ("_endpoint", "_healthy", "_image", "_peer")

    def __init__(self, peer: UcxPeer, endpoint: Endpoint, image: npt.NDArray[np.uint8], gets: Gets) -> None:
        super().__init__(peer.lane, gets)
        self._peer = peer
        self._endpoint = endpoint
        self._healthy = beacon_image(endpoint)
        self._image = image

    def post(self) -> bool:
        """Ask; see `Slice.post`."""
        return self._checked(super().post)

    def poll(self) -> bool:
        """See `Slice.poll`; raises `PeerError` if the peer is not as its endpoint says."""
        return self._checked(super().poll)

    def close(self) -> None:
        """Give the image back, unless it may still be written."""
        if not self._gets.chunks:
            self._peer.return_image(self._image)

    def _checked(self, drive: Callable[[], bool]) -> bool:
        name = self._lane.peer
        try:
            here = drive()
        except TransferError as error:
            raise PeerError(f"peer {name!r} does not serve any more: {error}", peer=name) from error
        if here and not self._image.tobytes().startswith(self._healthy):
            check_beacon(self._image, self._endpoint, name)
        return here


class UcxPeer:
    """A native connection: the lane, the regions' keys as far as they were needed, and room for images of the beacon.

    Raises
    ------
    PeerError
        If the peer is gone or another process has taken its place.
    TransferTimeoutError
        If it does not say who it is before ``deadline``.
    """

    def __init__(
        self, context: Context, peer: ConnectedPeer, address: UcxAddress, watch: PeerWatch | None, deadline: float
    ) -> None:
        self._context = context
        self.watch = watch
        self._endpoint = peer.endpoint
        self._packed = address.keys
        self._keys = np.zeros(len(address.keys), np.uint64)
        self._beacon = address.beacon_address
        self._lock = threading.Lock()
        self._images: list[npt.NDArray[np.uint8]] = []
        self._pages: dict[int, tuple[npt.NDArray[np.uint8], MappedMemory]] = {}
        try:
            self.lane = Lane(context, peer.name, address.worker, address.process)
        except BaseException:
            if watch is not None:
                watch.close()
            raise
        try:
            if self.lane.identify(deadline) != peer.endpoint.incarnation:
                raise PeerError(
                    f"peer {peer.name!r} is not there any more: another process has taken its address", peer=peer.name
                )
            self._beacon_key = self.lane.unpack(address.beacon_key)
        except BaseException:
            self.close(_HANG_UP_S)
            raise

    def gate(self) -> BeaconGate:
        """Return a gate for one list.

        Raises
        ------
        PeerError
            If the connection is closed.
        """
        with self._lock:
            if not self.lane.alive:
                raise PeerError(f"the connection to peer {self.lane.peer!r} is closed", peer=self.lane.peer)
            if not self._images:
                page = allocate_pages(PAGE_BYTES)
                self._pages[_page(page)] = page, self._context.map(Region.of(page))
                self._images += list(page.reshape(-1, BEACON_BYTES))
            image = self._images.pop()
            memory = self._pages[_page(image)][1]
        columns = (int(image.ctypes.data), BEACON_BYTES, self._beacon, memory.handle, self._beacon_key)
        at, nbytes, remote, memh, key = (np.array([value], np.uint64) for value in columns)
        gets = Gets(self._context.library.ffi, (at, nbytes, remote), memh, key, MEMORY_TYPES["dram"])
        return BeaconGate(self, self._endpoint, image, gets)

    def return_image(self, image: npt.NDArray[np.uint8]) -> None:
        """Take back what a gate had."""
        self._images.append(image)

    def keys(self, region: npt.NDArray[np.intp]) -> U64:
        """Return the unpacked key of each row's region, shape as ``region``."""
        for index in np.unique(region):
            if not self._keys[index]:
                self._keys[index] = self.lane.unpack(self._packed[index])
        return self._keys[region]

    def close(self, timeout_s: float) -> bool:
        """Disconnect; return whether that is done within ``timeout_s``, so that nothing writes any more. Idempotent."""
        if self.watch is not None:
            self.watch.close()
        settled = self.lane.close(timeout_s)
        with self._lock:
            if not settled:
                if self not in _LEFT:
                    _LEFT.append(self)
                return False
            for _, mapped in self._pages.values():
                self._context.unmap(mapped)
            self._pages.clear()
            self._images.clear()
            if self in _LEFT:
                _LEFT.remove(self)
        return True


def _native(peer: ConnectedPeer) -> UcxPeer:
    if not isinstance(peer.native, UcxPeer):
        raise PeerError(f"peer {peer.name!r} is not connected", peer=peer.name)
    return peer.native


def _page(array: npt.NDArray[np.uint8]) -> int:
    return int(array.ctypes.data) // PAGE_BYTES


def _handles(entries: list[Entry]) -> U64:
    return np.array([cast(MappedMemory, entry.native).handle for entry in entries], np.uint64)
