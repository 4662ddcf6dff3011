"""The reader's side of reads by messages: a list cut into parcels, and the parcels in flight.

`Parcels` and `ParcelRing` have the faces of `gets.Gets` and `requests.RequestRing`, so that a `Lane` drives either.
What one parcel brings is one message that UCX scatters over its rows, so rows cost no Python call each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from reshard.transports.errors import TransferError
from reshard.transports.regions import U64
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.library import ERROR_FLOOR
from reshard.transports.ucx.messages import (
    ALL_BITS,
    IN_FLIGHT,
    MAX_PARCEL_BYTES,
    MAX_PARCEL_ROWS,
    READ,
    READ_HEADER,
    READER_BYTES,
    ROW_BYTES,
    describe,
)

if TYPE_CHECKING:
    from reshard.transports.ucx.callbacks import Callbacks
    from reshard.transports.ucx.library import Library


def cut_parcels(local: U64, nbytes: U64, remote: U64) -> tuple[U64, U64, list[int]]:
    """Cut rows so that no parcel has more bytes or more rows than one message may.

    Parameters
    ----------
    local, nbytes, remote : ndarray of uint64, shape (N,), N >= 1
        No row is empty.

    Returns
    -------
    here, there : ndarray of uint64, shape (M, 2), M >= N
        (address, bytes) of each row on either side; long rows are in pieces.
    cuts : list of int
        ``[0, ..., M]``; a parcel lies between two.

    Examples
    --------
    >>> one = np.array([100], np.uint64)
    >>> here, there, cuts = cut_parcels(one, np.array([MAX_PARCEL_BYTES + 8], np.uint64), one)
    >>> here.tolist(), cuts
    ([[100, 4194304], [4194404, 8]], [0, 1, 2])
    """
    stops = np.cumsum(nbytes)
    edges = np.arange(0, int(stops[-1]), MAX_PARCEL_BYTES, dtype=np.uint64)
    bounds = np.union1d(edges, stops)
    begins = bounds[:-1]
    row = np.searchsorted(stops, begins, side="right")
    offset = begins - (stops - nbytes)[row]
    sizes = np.diff(bounds)
    here, there = (np.stack([column[row] + offset, sizes], axis=1) for column in (local, remote))
    firsts = [*np.searchsorted(begins, edges).tolist(), len(begins)]
    cuts = [at for first, stop in pairwise(firsts) for at in range(first, stop, MAX_PARCEL_ROWS)]
    return here, there, [*cuts, len(begins)]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one message asks for, ready for UCX.

    Attributes
    ----------
    buffer : cffi pointer
    count : int
        Where its rows land: address and bytes of the only row, or an array of ``ucp_dt_iov_t`` and its length.
    scattered : bool
        Which of these.
    there : cffi pointer
        Its rows in the owner's memory.
    there_bytes : int
        Of that array.
    nbytes : int
        What it brings.
    """

    buffer: object
    count: int
    scattered: bool
    there: object
    there_bytes: int
    nbytes: int


class ParcelRing:
    """The parcels in flight on one connection; see `RequestRing`.

    Parameters
    ----------
    library : Library
    callbacks : Callbacks
    worker : int
        UCX worker that receives; its endpoint's owner is the only one who sends to it.
    endpoint : int
        UCX endpoint of the owner.

    Attributes
    ----------
    reader : bytes
        Its number.
    """

    def __init__(self, library: Library, callbacks: Callbacks, worker: int, endpoint: int) -> None:
        self.reader = os.urandom(READER_BYTES)
        self.cast: Callable[[str, int], object] = library.ffi.cast
        self._ucp = library.ucp
        self._callbacks = callbacks
        self._worker = worker
        self._endpoint = endpoint
        # Not from 0: an owner may still send what it owes to a reader that had this address before.
        self._tag = int.from_bytes(os.urandom(7), "little")
        self._running: dict[int, tuple[int, object]] = {}
        self._ended: dict[int, int] = {}
        self._params = library.ffi.new("ucp_request_param_t *")

    @property
    def n_free(self) -> int:
        """Parcels that can be asked for now: what has ended takes no place, even if its list does not ask after it."""
        if len(self._running) == IN_FLIGHT:
            for number in list(self._running):
                self.in_flight(number)
        return IN_FLIGHT - len(self._running)

    def n_busy(self) -> int:
        """Return 0: receives that have not ended go with their worker, which may be destroyed at any time."""
        return 0

    def post(self, parcel: Parcel, memory_type: int, held: object) -> int:
        """Ask for a parcel and return its number, which is its tag; one must be free.

        Parameters
        ----------
        parcel : Parcel
        memory_type : int
            UCX's number of the kind of local memory.
        held : object
            Keeps the parcel's arrays alive.
        """
        self._tag += 1
        number, params = self._tag, self._params
        describe(params, parcel.scattered, memory_type)
        returned = self._ucp.ucp_tag_recv_nbx(self._worker, parcel.buffer, parcel.count, number, ALL_BITS, params)
        if 0 < returned < ERROR_FLOOR:
            self._running[number] = returned, held
            header = READ_HEADER.pack(self.reader, number, parcel.nbytes)
            self._callbacks.send(self._endpoint, READ, header, parcel.there, parcel.there_bytes)
        else:  # nothing was asked for, so nothing can have come
            self._ended[number] = returned - (1 << 64) if returned else d.ERR_IO_ERROR
        return number

    def in_flight(self, number: int) -> bool:
        """Return whether a parcel has not ended."""
        if number not in self._running:
            return False
        request = self._running[number][0]
        status = self._ucp.ucp_request_check_status(request)
        if status == d.INPROGRESS:
            return True
        self._ucp.ucp_request_free(request)
        self._ended[number] = status
        del self._running[number]
        return False

    def release(self, number: int) -> int:
        """Forget a parcel that is not in flight; return its status."""
        return self._ended.pop(number)


class Parcels:
    """Rows that are read by messages, and how far they are; see `Gets`.

    Parameters
    ----------
    ring : ParcelRing
        Of the lane that will drive them.
    local, nbytes, remote : ndarray of uint64, shape (N,)
    memory_type : int
        UCX's number of the kind of local memory.

    Attributes
    ----------
    ring, moved, size, next, chunks
        As of `Gets`, counted in parcels.
    """

    __slots__ = ("_held", "_memory_type", "_parcels", "chunks", "moved", "next", "ring", "size")

    def __init__(self, ring: ParcelRing, columns: tuple[U64, U64, U64], memory_type: int) -> None:
        self.ring = ring
        here, there, cuts = cut_parcels(*columns)
        self._held = here, there
        self._memory_type = memory_type
        self._parcels: list[Parcel] = []
        here_at, there_at = int(here.ctypes.data), int(there.ctypes.data)
        for start, stop in pairwise(cuts):
            rows = ring.cast("void *", there_at + start * ROW_BYTES)
            n_bytes = int(here[start:stop, 1].sum())
            if stop == start + 1:
                buffer, count = ring.cast("void *", int(here[start, 0])), n_bytes
            else:
                buffer, count = ring.cast("void *", here_at + start * ROW_BYTES), stop - start
            self._parcels.append(Parcel(buffer, count, stop > start + 1, rows, (stop - start) * ROW_BYTES, n_bytes))
        self.moved = False
        self.next = 0
        self.size = len(self._parcels)
        self.chunks: list[int] = []

    def rewind(self) -> None:
        """See `Gets.rewind`."""
        if self.chunks:
            raise TransferError(f"{len(self.chunks)} parcels of this list are in flight already")
        self.next = 0

    def post_next(self, endpoint: object) -> int:
        """Ask for the next parcel and return its number; the ring must have a free one."""
        number = self.ring.post(self._parcels[self.next], self._memory_type, self._held)
        self.chunks.append(number)
        self.next += 1
        return number
