"""Debug mode: were all bytes delivered? Destinations are filled with a sentinel before a read, and looked at after it.

So a transport that says that it moved bytes and has not is found out without guessing what rate is impossible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from reshard.refit.errors import VerificationError

if TYPE_CHECKING:
    from reshard.refit.devices import Device, Memory

__all__ = ["SENTINEL", "fill_sentinel", "require_delivered"]

SENTINEL = 0xA5
"""What destinations are filled with."""
_ROW_BYTES = 64


def fill_sentinel(device: Device, buffers: Mapping[str, Memory]) -> None:
    """Fill all buffers of a device."""
    for buffer in buffers.values():
        device.fill(buffer, SENTINEL)
    device.synchronize()


def require_delivered(device: Device, buffers: Mapping[str, Memory], seeded: Collection[str]) -> None:
    """Refuse a read that left 64 bytes in a row (or a whole small buffer) as the sentinel.

    Parameters
    ----------
    seeded
        Buffers that were filled with live bytes afterwards, and are not looked at.

    Raises
    ------
    VerificationError
        Naming the first buffer and how many bytes of it.
    """
    for name, memory in buffers.items():
        if name in seeded or memory.nbytes < 8:
            continue
        buffer = device.get(memory)
        row = min(_ROW_BYTES, buffer.size)
        rows = buffer[: buffer.size // row * row].reshape(-1, row)
        untouched = np.flatnonzero((rows == SENTINEL).all(axis=1))
        if len(untouched):
            raise VerificationError(
                f"buffer {name!r}: {len(untouched) * row} bytes from byte {int(untouched[0]) * row} on still hold "
                f"the sentinel 0x{SENTINEL:02X}: they were never delivered"
            )
