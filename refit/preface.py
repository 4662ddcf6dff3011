"""What stands before a published version's data: its header and its cells' digests, where readers look for them.

On a device both are kept in host memory too, and taken over whenever they change; everything that was written before a
header is where readers see it by the time that they see the header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.devices import Device, HostDevice, host_bytes
from reshard.refit.digests import DIGEST_BYTES
from reshard.refit.header import HEADER_BYTES, SeqLock

if TYPE_CHECKING:
    from reshard.refit.devices import Memory

__all__ = ["Preface", "digest_region_bytes"]

U64 = npt.NDArray[np.uint64]


def digest_region_bytes(n_cells: int) -> int:
    """Bytes of the digest region of ``n_cells`` cells."""
    return max(n_cells, 1) * DIGEST_BYTES


class Preface:
    """Header and digests of one buffer.

    Parameters
    ----------
    device
        Whose memory they are in.
    header, digests
        `HEADER_BYTES` and `digest_region_bytes` of registered memory.
    """

    def __init__(self, device: Device, header: Memory, digests: Memory) -> None:
        self._device = device
        self._header: Memory = header
        self._digests: Memory = digests
        self._on_host = isinstance(device, HostDevice)
        self.seqlock = SeqLock(
            host_bytes(header) if self._on_host else np.zeros(HEADER_BYTES, np.uint8),
            (lambda: None) if self._on_host else self._put_header,
        )
        raw = host_bytes(digests) if self._on_host else np.zeros(int(digests.shape[0]), np.uint8)
        self.digests: U64 = raw.view("<u8").reshape(-1, 2)
        """The digests (on a device, a host copy of them)."""

    def put_digests(self, found: U64) -> U64:
        """Write the digests of all cells, uint64[n_cells, 2]; returns them as they lie here."""
        out = self.digests[: len(found)]
        out[...] = found
        if not self._on_host:
            self._device.put(self._digests, self.digests.reshape(-1).view(np.uint8))
            self._device.synchronize()
        return out

    def close(self) -> None:
        """Let go of the memory; the lock is not to be used any more."""
        self._header = self._digests = np.zeros(0, np.uint8)
        self.digests = np.zeros((0, 2), np.uint64)
        self.seqlock = SeqLock(np.zeros(HEADER_BYTES, np.uint8))

    def _put_header(self) -> None:
        """Take the header to where readers look; all that was written before it is there by then."""
        self._device.put(self._header, self.seqlock.memory)
        self._device.synchronize()
