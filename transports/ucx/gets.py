"""A list of gets as columns, and how far it is: what a `Lane` drives."""

from __future__ import annotations

from reshard.transports.errors import TransferError
from reshard.transports.regions import U64
from reshard.transports.ucx.requests import CHUNK, Listed, RequestRing

_LARGE_BYTES = 16 << 10
"""Where gets are this large on average, what is posted is kept for the next time: below 1 % of their bytes."""


class Gets:
    """Columns of length N, or 1 where all rows share a value.

    Parameters
    ----------
    ring : RequestRing
        Of the lane that will drive them.
    local, nbytes, remote : ndarray of uint64, shape (N,)
        Contiguous.
    memh, rkey : ndarray of uint64, shape (N,) or (1,)
        Local memory handles and unpacked remote keys.
    memory_type : int
        UCX's number of the kind of local memory.

    Attributes
    ----------
    moved : bool
        Whether the last `Lane.drive` did native work.
    size : int
        N.
    next : int
        First row not yet posted.
    chunks : list of int
        Tickets of the ring for what is in flight.
    """

    __slots__ = (
        "_keeps",
        "_key",
        "_listed",
        "_local",
        "_memh",
        "_memory_type",
        "_nbytes",
        "_remote",
        "_rkey",
        "_single",
        "chunks",
        "moved",
        "next",
        "ring",
        "size",
    )

    def __init__(
        self, ring: RequestRing, columns: tuple[U64, U64, U64], memh: U64, rkey: U64, memory_type: int
    ) -> None:
        self.ring = ring
        cast = ring.cast
        self._local, self._nbytes, self._remote = columns
        self._memh, self._rkey, self._memory_type = memh, rkey, memory_type
        self.moved = False
        self.next = 0
        self.size = len(self._local)
        self.chunks: list[int] = []
        self._key: object = cast("void *", int(rkey[0])) if len(rkey) == 1 else None
        self._listed: dict[int, Listed] = {}
        self._keeps = bool(self.size) and int(self._nbytes.sum()) >= self.size * _LARGE_BYTES
        self._single: tuple[object, int, object, int] | None = None
        if self.size == 1:
            at, of = (cast("void *", int(column[0])) for column in (self._local, self._remote))
            self._single = (at, int(self._nbytes[0]), of, int(memh[0]))

    def rewind(self) -> None:
        """Make it ready to be driven again.

        Raises
        ------
        TransferError
            If a part of it is in flight.
        """
        if self.chunks:
            raise TransferError(f"{len(self.chunks)} chunks of these gets are in flight already")
        self.next = 0

    def post_next(self, endpoint: object) -> int:
        """Post the next chunk and return its ticket; the ring must have a free one."""
        ring = self.ring
        if self._single is not None:
            chunk = ring.post_one(endpoint, *self._single, self._key, self._memory_type)
            self.next = 1
        else:
            at = slice(self.next, min(self.next + CHUNK, self.size))
            memh = self._memh if len(self._memh) == 1 else self._memh[at]
            key = self._key if self._key is not None else self._rkey[at]
            columns = self._listed.get(self.next)
            if columns is None:
                columns = ring.listed((self._local[at], self._nbytes[at], self._remote[at]))
                if self._keeps:
                    self._listed[self.next] = columns
            chunk = ring.post(endpoint, columns, memh, key, self._memory_type)
            self.next = at.stop
        self.chunks.append(chunk)
        return chunk
