"""Debug mode: were all bytes delivered? Destinations are filled with a sentinel before a read, and looked at after it.

So a transport that says that it moved bytes and has not is found out without guessing what rate is impossible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from reshard.refit.errors import VerificationError

__all__ = ["SENTINEL", "fill_sentinel", "require_delivered"]

U8 = npt.NDArray[np.uint8]

SENTINEL = 0xA5
"""What destinations are filled with."""
_ROW_BYTES = 64


def fill_sentinel(buffers: Mapping[str, U8]) -> None:
    """Fill all buffers."""
    for buffer in buffers.values():
        buffer[:] = SENTINEL


def require_delivered(buffers: Mapping[str, U8], seeded: Collection[str]) -> None:
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
    for name, buffer in buffers.items():
        if name in seeded or buffer.size < 8:
            continue
        row = min(_ROW_BYTES, buffer.size)
        rows = buffer[: buffer.size // row * row].reshape(-1, row)
        untouched = np.flatnonzero((rows == SENTINEL).all(axis=1))
        if len(untouched):
            raise VerificationError(
                f"buffer {name!r}: {len(untouched) * row} bytes from byte {int(untouched[0]) * row} on still hold "
                f"the sentinel 0x{SENTINEL:02X}: they were never delivered"
            )
