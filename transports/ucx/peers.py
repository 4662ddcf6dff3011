"""A connection to one peer as the protocol sees it: the lane, its gate, and the slices that drive it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from reshard.transports.beacon import BEACON_BYTES, beacon_image, check_beacon
from reshard.transports.endpoint import Endpoint
from reshard.transports.errors import PeerError, TransferError
from reshard.transports.hostmem import PAGE_BYTES, allocate_pages
from reshard.transports.lists import ConnectedPeer
from reshard.transports.regions import U64, MemoryKind, Region
from reshard.transports.ucx.context import MEMORY_TYPES, Context, MappedMemory
from reshard.transports.ucx.describe import one_sided
from reshard.transports.ucx.gets import Gets
from reshard.transports.ucx.lane import Lane
from reshard.transports.ucx.parcels import ParcelRing, Parcels
from reshard.transports.ucx.payload import UcxAddress
from reshard.transports.watch import PeerWatch

BUSY_S = 0.004
IDLE_S = 0.001
HANG_UP_S = 2.0

LEFT: list[object] = []
"""What was closed while its worker could not be destroyed: what UCX may touch is never freed."""


class GetSlice:
    """A part of a list, driven by whoever posts and polls it."""

    __slots__ = ("_gets", "_lane")

    native_s: ClassVar[float] = 0.0
    """UCX does not measure."""

    def __init__(self, lane: Lane, gets: Gets | Parcels) -> None:
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
        return self._lane.drive(self._gets, BUSY_S, 0.0)

    def poll(self) -> bool:
        """Work on it for a bounded time; see `Slice.poll`."""
        return self._lane.drive(self._gets, BUSY_S, IDLE_S)

    def close(self) -> None:
        """Nothing to free: requests belong to the lane."""


class BeaconGate(GetSlice):
    """Fetches the peer's beacon and compares it with its endpoint message; each list has one of its own."""

    __slots__ = ("_endpoint", "_healthy", "_image", "_peer")

    def __init__(self, peer: UcxPeer, endpoint: Endpoint, image: npt.NDArray[np.uint8], gets: Gets | Parcels) -> None:
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
        self._beacon_handle = 0
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
            self.routes = self.lane.transports()
            self._beacon_key = address.beacon_key
        except BaseException:
            self.close(HANG_UP_S)
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
        kind = MEMORY_TYPES["dram"]
        at, nbytes, remote = (_one(value) for value in (int(image.ctypes.data), BEACON_BYTES, self._beacon))
        if self.by_messages("dram", "dram"):
            return BeaconGate(self, self._endpoint, image, Parcels(self.parcel_ring(), (at, nbytes, remote), kind))
        with self._lock:
            if not self._beacon_handle:
                self._beacon_handle = self.lane.unpack(self._beacon_key)
        gets = Gets(self.lane.ring, (at, nbytes, remote), _one(memory.handle), _one(self._beacon_handle), kind)
        return BeaconGate(self, self._endpoint, image, gets)

    def parcel_ring(self) -> ParcelRing:
        """Return what drives reads by messages from it; see `Lane.parcel_ring`."""
        return self.lane.parcel_ring(self._endpoint.generation)

    def by_messages(self, local_memory: MemoryKind, remote_memory: MemoryKind) -> bool:
        """Return whether memory of these kinds is read by messages, because UCX would emulate reads of it."""
        return not one_sided(self.routes, local_memory, remote_memory)

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
                if self not in LEFT:
                    LEFT.append(self)
                return False
            for _, mapped in self._pages.values():
                self._context.unmap(mapped)
            self._pages.clear()
            self._images.clear()
            if self in LEFT:
                LEFT.remove(self)
        return True


def _one(value: int) -> U64:
    return np.array([value], np.uint64)


def _page(array: npt.NDArray[np.uint8]) -> int:
    return int(array.ctypes.data) // PAGE_BYTES
