"""What of a table goes into its digest? Columns in their fewest bytes: hashing costs little, and values say all."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from reshard.planner.classify import Int64

_HEAD = struct.Struct("<qqB")
_SHORT = 32
_U64 = 2**64


def digest_column(hasher: hashlib._Hash, values: Int64) -> None:
    """Feed a column: rows, least value, bytes a row, and what each value is above the least, little-endian.

    The bytes a row are 0, 1, 2, 4 or 8, as few as hold the greatest difference. A short column goes as it is: 8 bytes
    a row above 0.
    """
    n = len(values)
    if n <= _SHORT:
        hasher.update(_HEAD.pack(n, 0, 8) + values.astype("<i8", copy=False).tobytes())
        return
    low, high = int(values.min()), int(values.max())
    width = next(width for width in (0, 1, 2, 4, 8) if high - low < 1 << 8 * width)
    hasher.update(_HEAD.pack(n, low, width))
    if width:
        above = values.view(np.uint64) - np.uint64(low % _U64)
        hasher.update(above.astype(f"<u{width}", copy=False).tobytes())


def digest_dims(hasher: hashlib._Hash, ndim: Int64, columns: Sequence[Int64]) -> None:
    """Feed per-dim columns unpadded: the ranks, then only the cells that exist, dim by dim from the last."""
    digest_column(hasher, ndim)
    top = int(ndim.max()) if len(ndim) else 0
    for back, dim in zip(range(1, top + 1), reversed(columns), strict=False):
        exists = ndim >= back
        digest_column(hasher, dim if exists.all() else dim[exists])
