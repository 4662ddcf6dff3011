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

from itertools import repeat

import numpy as np
import numpy.typing as npt

from reshard.transports.regions import U64
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.library import Library

CHUNK = 256
"""Gets posted between two looks at the clock."""
N_CHUNKS = 4
_ALIGN = 64
_ERROR_FLOOR_INT = (1 << 64) + d.ERR_LAST
_ERROR_FLOOR = np.uint64(_ERROR_FLOOR_INT)


class RequestRing:
    """``N_CHUNKS`` chunks of ``CHUNK`` preallocated requests with their parameters.

    Parameters
    ----------
    library : Library
    request_bytes : int
        What UCX needs in front of a request, from the context.
    """

    def __init__(self, library: Library, request_bytes: int) -> None:
        self._get = library.ucp.ucp_get_nbx
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
        self._params_at: list[int] = (
            self._params.ctypes.data + params_bytes * np.arange(n_slots, dtype=np.uint64)
        ).tolist()

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
        self._status_of = self._status.data
        self._used = [0] * N_CHUNKS
        self._free = list(range(N_CHUNKS))

    @property
    def n_free(self) -> int:
        """Chunks that can be posted now."""
        return len(self._free)

    def n_busy(self) -> int:
        """Return how many requests are in flight."""
        return int(np.count_nonzero(self._status == d.INPROGRESS))

    def post(
        self,
        endpoint: int,
        local: U64,
        nbytes: U64,
        remote: U64,
        memh: U64,
        rkey: U64,
        memory_type: npt.NDArray[np.int32],
    ) -> int:
        """Post up to `CHUNK` gets and return the chunk's number; there must be a free one.

        Parameters
        ----------
        endpoint : int
            UCX endpoint handle.
        local, nbytes, remote : ndarray of uint64, shape (N,), 1 <= N <= CHUNK
        memh, rkey, memory_type : ndarray, shape (N,) or (1,)
            Local memory handle, unpacked remote key, UCX memory type of the local memory.
        """
        chunk = self._free.pop()
        first, n = chunk * CHUNK, len(local)
        slots = slice(first, first + n)
        self._used[chunk] = n
        self._status[slots] = d.INPROGRESS
        self._memh[slots] = memh
        self._memory_type[slots] = memory_type
        returned = np.array(
            list(
                map(
                    self._get,
                    repeat(endpoint),
                    local.tolist(),
                    nbytes.tolist(),
                    remote.tolist(),
                    repeat(int(rkey[0])) if len(rkey) == 1 else rkey.tolist(),
                    self._params_at[slots],
                )
            ),
            np.uint64,
        )
        # A get that ended at once has no callback: it returns 0 or the error in the place of the request.
        at_once = (returned == 0) | (returned >= _ERROR_FLOOR)
        if at_once.any():
            self._status[slots][at_once] = returned[at_once].astype(np.int64).astype(np.int8)
        return chunk

    def post_one(
        self, endpoint: int, local: int, nbytes: int, remote: int, memh: int, rkey: int, memory_type: int
    ) -> int:
        """Do as `post` for a single get, at a tenth of the cost."""
        chunk = self._free.pop()
        first = chunk * CHUNK
        self._used[chunk] = 1
        self._status_of[first] = d.INPROGRESS
        params = self._params_rows[chunk]
        params.memh = memh
        params.memory_type = memory_type
        returned = self._get(endpoint, local, nbytes, remote, rkey, self._params_at[first])
        if returned == 0 or returned >= _ERROR_FLOOR_INT:
            self._status_of[first] = returned - (1 << 64) if returned else d.OK
        return chunk

    def in_flight(self, chunk: int) -> bool:
        """Return whether a request of the chunk has not ended."""
        first, n = chunk * CHUNK, self._used[chunk]
        if n == 1:
            return self._status_of[first] == d.INPROGRESS
        return bool((self._status[first : first + n] == d.INPROGRESS).any())

    def release(self, chunk: int) -> int:
        """Take back a chunk that is not in flight; return its worst status."""
        first, n = chunk * CHUNK, self._used[chunk]
        self._free.append(chunk)
        return int(self._status_of[first]) if n == 1 else int(self._status[first : first + n].min())
