"""Which box of a tensor is a shard? `GeometryDict`: the content-addressed dictionary of boxes.

Boxes are left-padded with the interval [0, 1) in memory; digests and the wire see them unpadded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from reshard.planner.classify import Int64, column
from reshard.planner.digesting import digest_dims
from reshard.planner.errors import TableError

MAX_NDIM: Final = 8


def padded_dims(rows: Sequence[Sequence[int]], n_dims: int, pad: int) -> tuple[Int64, ...]:
    """Rows of different rank as `n_dims` columns, right-aligned."""
    full = np.full((n_dims, len(rows)), pad, np.int64)
    for i, row in enumerate(rows):
        if len(row):
            full[n_dims - len(row) :, i] = row
    return tuple(column(full[d], f"dim {d}") for d in range(n_dims))


@dataclass(frozen=True, eq=False)
class GeometryDict:
    """G boxes: half-open, in global elements of whichever tensor a shard names.

    Parameters
    ----------
    ndim : int64[G]
    start, stop : tuple of D int64[G]
        Left-padded with [0, 1).

    Raises
    ------
    TableError
        A negative start, a stop before its start, a rank over 8.
    """

    ndim: Int64
    start: tuple[Int64, ...]
    stop: tuple[Int64, ...]

    def __post_init__(self) -> None:
        fix = object.__setattr__
        fix(self, "ndim", column(self.ndim, "ndim"))
        fix(self, "start", tuple(column(c, f"start[{d}]") for d, c in enumerate(self.start)))
        fix(self, "stop", tuple(column(c, f"stop[{d}]") for d, c in enumerate(self.stop)))
        n, n_dims = len(self.ndim), len(self.start)
        if len(self.stop) != n_dims or n_dims > MAX_NDIM:
            raise TableError(
                f"geometry dictionary: {n_dims} start and {len(self.stop)} stop columns; expected equal and at most 8",
                got=len(self.stop),
                expected=n_dims,
            )
        for c in (*self.start, *self.stop):
            if len(c) != n:
                raise TableError(
                    f"geometry dictionary: a column has {len(c)} rows; expected {n}", got=len(c), expected=n
                )
        if n and (int(self.ndim.min()) < 0 or int(self.ndim.max()) > n_dims):
            raise TableError(
                f"geometry dictionary: rank {int(self.ndim.max())}; expected 0 to {n_dims}",
                got=int(self.ndim.max()),
                expected=n_dims,
            )
        for d, (a, b) in enumerate(zip(self.start, self.stop, strict=True)):
            padding = self.ndim < n_dims - d
            wrong = (a < 0) | (b < a) | (padding & ((a != 0) | (b != 1)))
            if wrong.any():
                bad = int(np.argmax(wrong))
                real = d - (n_dims - int(self.ndim[bad]))
                raise TableError(
                    f"geometry {bad} dim {real}: [{int(a[bad])}, {int(b[bad])}); expected 0 <= start <= stop",
                    dim=real,
                    got=(int(a[bad]), int(b[bad])),
                    expected="0 <= start <= stop",
                )

    @classmethod
    def build(cls, boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> GeometryDict:
        """From (start, stop) pairs."""
        pairs = list(boxes)
        for start, stop in pairs:
            if len(start) != len(stop) or len(start) > MAX_NDIM:
                raise TableError(
                    f"box {tuple(start)} to {tuple(stop)}: ranks {len(start)} and {len(stop)}; "
                    "expected equal, at most 8",
                    got=len(stop),
                    expected=len(start),
                )
        n_dims = max((len(start) for start, _ in pairs), default=0)
        return cls(
            column([len(start) for start, _ in pairs], "ndim"),
            padded_dims([start for start, _ in pairs], n_dims, 0),
            padded_dims([stop for _, stop in pairs], n_dims, 1),
        )

    def __len__(self) -> int:
        return len(self.ndim)

    @property
    def n_dims(self) -> int:
        """Number of (padded) dim columns."""
        return len(self.start)

    @cached_property
    def volume(self) -> Int64:
        """int64[G]: elements of each box (an untrusted box may wrap here; no tensor it fits in can)."""
        out = np.ones(len(self), np.int64)
        for a, b in zip(self.start, self.stop, strict=True):
            out *= b - a
        return column(out, "volume")

    @cached_property
    def has_empty(self) -> bool:
        """Some box has no element."""
        return bool((self.volume == 0).any())

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that address the content."""
        hasher = hashlib.sha256(b"reshard.GeometryDict.2\0")
        digest_dims(hasher, self.ndim, self.start)
        digest_dims(hasher, self.ndim, self.stop)
        return hasher.digest()
