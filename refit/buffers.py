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
from reshard.refit.digests import DIGEST_BYTES, digest_many
from reshard.refit.header import HEADER_BYTES, SeqLock

if TYPE_CHECKING:
    from reshard.rendezvous.types import VersionKey
    from reshard.transports import Transport

__all__ = ["DATA", "DIGESTS", "HEADER", "PublishBuffer", "digest_region_bytes"]

U8 = npt.NDArray[np.uint8]
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
    """

    def __init__(self, transport: Transport, data_bytes: int, n_cells: int) -> None:
        self.n_cells = n_cells
        digests = digest_region_bytes(n_cells)
        data_at = _PAGE + -(-digests // _PAGE) * _PAGE
        self._allocation = transport.allocate(data_at + max(data_bytes, 1))
        try:
            self._registration = transport.register([self._allocation.region])
        except BaseException:
            self._allocation.close()
            raise
        memory = self._allocation.array
        self.seqlock = SeqLock(memory[:HEADER_BYTES])
        self.digests: U64 = memory[_PAGE : _PAGE + digests].view("<u8").reshape(-1, 2)
        self.data: U8 = memory[data_at : data_at + data_bytes]
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
        digest_many(self.data, grid.offset_bytes, grid.nbytes, grid.tags, out)
        return out

    def close(self) -> None:
        """Withdraw the registration and drop the memory; idempotent."""
        self._registration.close()
        empty = np.zeros(0, np.uint8)
        self.data = empty
        self.digests = np.zeros((0, 2), np.uint64)
        self._allocation.close()
