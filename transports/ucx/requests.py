"""Many gets in flight, with no Python call for each completion.

UCX lets the caller provide the memory of a request, and calls back ``(request, status, user_data)`` when it ends. A
Python callback would cost a microsecond each and need the GIL in the middle of a copy, and asking for the status of
each request costs two more native calls. So the callback is libc's ``memset(request, status, 1)``: it stores the
status, one signed byte, at the request itself. Each request lies in one array with room for UCX in front of that
byte, and one comparison of a strided numpy view tells whether all of a chunk have ended, and how.

A `RequestRing` belongs to one worker. Its memory must outlive every request, so it is dropped only after the
worker.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import cast

import numpy as np
import numpy.typing as npt

from reshard.transports.regions import U64
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.library import ERROR_FLOOR, Library

Listed = tuple[list[object], list[int], list[object]]
"""Local addresses, bytes and remote addresses as the native call takes them."""
CHUNK = 256
"""Gets posted between two looks at the clock."""
N_CHUNKS = 4
_NOBODY = -1
_ALIGN = 64
_ERROR_FLOOR = np.uint64(ERROR_FLOOR)


class RequestRing:
    """``N_CHUNKS`` chunks of ``CHUNK`` preallocated requests with their parameters.

    Parameters
    ----------
    library : Library
    request_bytes : int
        What UCX needs in front of a request, from the context.
    """

    def __init__(self, library: Library, request_bytes: int) -> None:
        self._ffi = library.ffi
        self.cast: Callable[[str, int], object] = library.ffi.cast
        self._column = library.ffi.typeof("void **")
        self._get: Callable[..., int] = library.ucp.ucp_get_nbx
        n_slots = CHUNK * N_CHUNKS
        front = -(-request_bytes // _ALIGN) * _ALIGN
        stride = front + _ALIGN
        self._memory = np.zeros((n_slots + 1) * stride, np.uint8)
        start = -self._memory.ctypes.data % _ALIGN
        requests = self._memory.ctypes.data + start + front + stride * np.arange(n_slots, dtype=np.uint64)
        slots = self._memory[start : start + n_slots * stride].reshape(n_slots, stride)
        self._status: npt.NDArray[np.int8] = slots[:, front].view(np.int8)

        ffi = library.ffi
        params_bytes = ffi.sizeof("ucp_request_param_t")
        self._params = np.zeros((n_slots, params_bytes), np.uint8)
        params_at = self._params.ctypes.data + params_bytes * np.arange(n_slots, dtype=np.uint64)
        self._params_at = self._pointers(params_at)

        def column(name: str, dtype: str) -> npt.NDArray[np.generic]:
            at = ffi.offsetof("ucp_request_param_t", name)
            return self._params[:, at : at + np.dtype(dtype).itemsize].view(dtype)[:, 0]

        column("op_attr_mask", "u4")[:] = (
            d.OP_FIELD_REQUEST | d.OP_FIELD_CALLBACK | d.OP_FIELD_USER_DATA | d.OP_FIELD_MEMORY_TYPE | d.OP_FIELD_MEMH
        )
        column("request", "u8")[:] = requests
        column("cb", "u8")[:] = library.store_status
        column("user_data", "u8")[:] = 1  # memset's third argument: one byte
        self._memory_type = column("memory_type", "i4")
        self._memh = column("memh", "u8")
        self._params_rows = [ffi.cast("ucp_request_param_t *", at) for at in self._params_at[::CHUNK]]
        self._requests: list[int] = requests.tolist()
        self._status_of = self._status.data
        self._used = [0] * N_CHUNKS
        self._free = list(range(N_CHUNKS))
        self._ticket = 0
        self._holders = [_NOBODY] * N_CHUNKS
        self._ended: dict[int, int] = {}

    @property
    def n_free(self) -> int:
        """Chunks that can be posted now: what has ended takes no place, even if its list does not ask after it."""
        if not self._free:
            for ticket in [ticket for ticket in self._holders if not self.in_flight(ticket)]:
                self._ended[ticket] = self.release(ticket)
        return len(self._free)

    def n_busy(self) -> int:
        """Return how many requests are in flight."""
        return int(np.count_nonzero(self._status == d.INPROGRESS))

    def post(
        self,
        endpoint: object,
        columns: tuple[U64, U64, U64] | Listed,
        memh: U64,
        rkey: object,
        memory_type: int,
    ) -> int:
        """Post up to `CHUNK` gets and return their ticket, a number that is never used again; a chunk must be free.

        Parameters
        ----------
        endpoint : cffi pointer
            UCX endpoint.
        columns : tuple of ndarray of uint64, shape (N,), 1 <= N <= CHUNK
            Local address, bytes, remote address; contiguous. Or what `listed` makes of them.
        memh : ndarray of uint64, shape (N,) or (1,)
            Local memory handle.
        rkey : cffi pointer, or ndarray of uint64, shape (N,)
            Unpacked remote key of all gets, or of each.
        memory_type : int
            UCX's number of the kind of local memory.
        """
        local, nbytes, remote = self.listed(columns)
        chunk = self._free.pop()
        first, n = chunk * CHUNK, len(local)
        slots = slice(first, first + n)
        self._used[chunk] = n
        self._status[slots] = d.INPROGRESS
        self._memh[slots] = memh
        self._memory_type[slots] = memory_type
        returned = list(
            map(
                self._get,
                repeat(endpoint),
                local,
                nbytes,
                remote,
                self._pointers(rkey) if isinstance(rkey, np.ndarray) else repeat(rkey),
                self._params_at[slots],
            )
        )
        if returned != self._requests[slots]:
            # A get that ended at once has no callback: it returns 0 or the error in the place of the request.
            told = np.array(returned, np.uint64)
            at_once = (told == 0) | (told >= _ERROR_FLOOR)
            self._status[slots][at_once] = told[at_once].astype(np.int64).astype(np.int8)
        return self._hold(chunk)

    def listed(self, columns: tuple[U64, U64, U64] | Listed) -> Listed:
        """Return columns as lists, to be kept where they are posted again: a quarter of the cost of a post is this."""
        local, nbytes, remote = columns
        if isinstance(local, list):
            return cast(Listed, columns)
        return self._pointers(local), cast(U64, nbytes).tolist(), self._pointers(cast(U64, remote))

    def post_one(
        self, endpoint: object, local: object, nbytes: int, remote: object, memh: int, rkey: object, memory_type: int
    ) -> int:
        """Do as `post` for a single get, with all addresses as cffi pointers, at a tenth of the cost."""
        chunk = self._free.pop()
        first = chunk * CHUNK
        self._used[chunk] = 1
        self._status_of[first] = d.INPROGRESS
        params = self._params_rows[chunk]
        params.memh = memh
        params.memory_type = memory_type
        returned = self._get(endpoint, local, nbytes, remote, rkey, params)
        if returned == 0 or returned >= ERROR_FLOOR:
            self._status_of[first] = returned - (1 << 64) if returned else d.OK
        return self._hold(chunk)

    def _hold(self, chunk: int) -> int:
        self._ticket += N_CHUNKS
        ticket = self._holders[chunk] = self._ticket + chunk
        return ticket

    def _pointers(self, column: U64) -> list[object]:
        """Return a contiguous column of addresses as cffi pointers."""
        found: list[object] = self._ffi.unpack(self._ffi.cast(self._column, column.ctypes.data), len(column))
        return found

    def in_flight(self, ticket: int) -> bool:
        """Return whether a get of the ticket has not ended."""
        chunk = ticket % N_CHUNKS
        if self._holders[chunk] != ticket:
            return False
        first, n = chunk * CHUNK, self._used[chunk]
        if n == 1 or self._status_of[first + n - 1] == d.INPROGRESS:  # mostly they end in order
            return self._status_of[first + n - 1] == d.INPROGRESS
        return bool((self._status[first : first + n] == d.INPROGRESS).any())

    def release(self, ticket: int) -> int:
        """Forget a ticket that is not in flight; return its worst status."""
        chunk = ticket % N_CHUNKS
        if self._holders[chunk] != ticket:
            return self._ended.pop(ticket)
        first, n = chunk * CHUNK, self._used[chunk]
        self._holders[chunk] = _NOBODY
        self._free.append(chunk)
        return int(self._status_of[first]) if n == 1 else int(self._status[first : first + n].min())
