"""A publisher's registered memory: one allocation for header, cell digests and data of a version.

    +--------+------------------+---------------------------+
    | header | digests, 16 B a  | data, laid out as the     |
    | 64 B   | cell             | layout's part says        |
    +--------+------------------+---------------------------+
    0        4096               4096 + padded digests

The three are regions 0 (data), 1 (digests) and 2 (header) of the shard table, in one registration. Memory is
allocated and registered once and used again for as long as the layout stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.cells import CellGrid
from reshard.refit.devices import HOST, CellRows, Device
from reshard.refit.header import HEADER_BYTES, SeqLock
from reshard.refit.preface import Preface, digest_region_bytes

if TYPE_CHECKING:
    from reshard.refit.devices import Memory
    from reshard.rendezvous.types import VersionKey
    from reshard.transports import Transport

__all__ = ["DATA", "DIGESTS", "HEADER", "PublishBuffer"]

U64 = npt.NDArray[np.uint64]

DATA, DIGESTS, HEADER = 0, 1, 2
"""Region numbers."""
_PAGE = 4096


class PublishBuffer:
    """One buffer that a version can be in.

    Parameters
    ----------
    transport
        Allocates and registers the memory.
    data_bytes, n_cells
        What the layout needs.
    device
        Whose memory it is.
    """

    def __init__(self, transport: Transport, data_bytes: int, n_cells: int, device: Device = HOST) -> None:
        self.n_cells = n_cells
        self.device = device
        digests = digest_region_bytes(n_cells)
        data_at = _PAGE + -(-digests // _PAGE) * _PAGE
        size = data_at + max(data_bytes, 1)
        self._allocation = transport.allocate(size, memory=device.memory, device=device.number)
        try:
            self._registration = transport.register([self._allocation.region])
        except BaseException:
            self._allocation.close()
            raise
        self._pinned = device.lock(self._allocation.region)
        memory = device.bytes_of(self._allocation)
        self._preface = Preface(device, memory[:HEADER_BYTES], memory[_PAGE : _PAGE + digests])
        self.data: Memory = memory[data_at : data_at + data_bytes]
        base = self._allocation.region.address
        self.region_bases = np.array([base + data_at, base + _PAGE, base], np.uint64)
        self.region_bytes = np.array([data_bytes, digests, HEADER_BYTES], np.int64)
        self.uid = ""
        """The version that readers may find in the buffer; empty while there can be none."""
        self.version: VersionKey | None = None
        """What it is called."""

    def hold(self, uid: str) -> None:
        """Readers may come for this version from now on; for none where ``uid`` is empty."""
        self.uid = uid

    @property
    def seqlock(self) -> SeqLock:
        """Of its header."""
        return self._preface.seqlock

    @property
    def digests(self) -> U64:
        """The digests as readers see them: uint64[n_cells, 2] (on a device, a host copy)."""
        return self._preface.digests

    def digest(self, grid: CellGrid) -> U64:
        """Digest every cell of the data into the digest region; returns uint64[n_cells, 2]."""
        rows = CellRows(self.data, grid.offset_bytes, grid.nbytes, grid.tags)
        return self._preface.put_digests(self.device.digest_cells([rows]))

    def close(self) -> None:
        """Withdraw the registration and drop the memory; idempotent."""
        self._registration.close()
        self._preface.close()
        self.data = np.zeros(0, np.uint8)
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.close()
        self._allocation.close()
