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
from reshard.refit.devices import HOST, Device, host_bytes
from reshard.refit.digests import DIGEST_BYTES
from reshard.refit.header import HEADER_BYTES, SeqLock

if TYPE_CHECKING:
    from reshard.refit.devices import Memory
    from reshard.rendezvous.types import VersionKey
    from reshard.transports import Transport

__all__ = ["DATA", "DIGESTS", "HEADER", "PublishBuffer", "digest_region_bytes"]

U64 = npt.NDArray[np.uint64]

DATA, DIGESTS, HEADER = 0, 1, 2
"""Region numbers."""
_PAGE = 4096


def digest_region_bytes(n_cells: int) -> int:
    """Bytes of the digest region of ``n_cells`` cells."""
    return max(n_cells, 1) * DIGEST_BYTES


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
        memory = device.bytes_of(self._allocation)
        self._header = memory[:HEADER_BYTES]
        self._digest_bytes = memory[_PAGE : _PAGE + digests]
        on_host = device is HOST
        self.seqlock = SeqLock(
            host_bytes(self._header) if on_host else np.zeros(HEADER_BYTES, np.uint8),
            (lambda: None) if on_host else self._put_header,
        )
        raw = host_bytes(self._digest_bytes) if on_host else np.zeros(digests, np.uint8)
        self.digests: U64 = raw.view("<u8").reshape(-1, 2)
        """The digests (on a device, a host copy of them)."""
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

    def digest(self, grid: CellGrid) -> U64:
        """Digest every cell of the data into the digest region; returns uint64[n_cells, 2]."""
        out = self.digests[: len(grid)]
        out[...] = self.device.digest_cells(self.data, grid.offset_bytes, grid.nbytes, grid.tags)
        if self.device is not HOST:
            self.device.put(self._digest_bytes, self.digests.reshape(-1).view(np.uint8))
            self.device.synchronize()
        return out

    def _put_header(self) -> None:
        """Take the header to where readers look; all that was written before it is there by then."""
        self.device.put(self._header, self.seqlock.memory)
        self.device.synchronize()

    def close(self) -> None:
        """Withdraw the registration and drop the memory; idempotent."""
        self._registration.close()
        empty = np.zeros(0, np.uint8)
        self.data = self._header = self._digest_bytes = empty
        self.digests = np.zeros((0, 2), np.uint64)
        self._allocation.close()
