"""In what portions are a wave's rows read, and with which one is each cell complete?

One wave can be all there is: rows that go straight to their place need no staging. So that cells are verified while
others are read, a wave is read in *batches* of equal shares of every holder's rows.

1. `split_wave` cuts each holder's rows into as many portions as there are batches; rows longer than a fraction of a
   portion are cut too (they stay adjacent, so transports join what meets again in one list).
2. `complete_with` says for each cell the batch of the last row that touches it, by address: the cells' shapes and
   the rows' order do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from reshard.planner.bind import PeerRows

__all__ = ["BATCH_BYTES", "Portion", "complete_with", "n_batches", "split_wave"]

U64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

BATCH_BYTES = 64 << 20
"""Least bytes of a batch: what one costs (a post, a wait) is small against reading as much."""
_MOST = 8
_SHARE_BYTES = 4 << 20
_ROWS_A_PORTION = 4


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows of one holder in one batch: uint64[N, 3] of address, bytes, device on either side."""

    holder: str
    local: U64
    remote: U64


def n_batches(wave: Sequence[PeerRows], batch_bytes: int) -> int:
    """How many batches a wave is read in: at most 8, of at least ``batch_bytes``; one if that is 0.

    Where there are many holders, no more than leaves each a few MiB a batch.
    """
    if batch_bytes <= 0 or not wave:
        return 1
    least = max(batch_bytes, min(_SHARE_BYTES, batch_bytes) * len(wave))
    return max(1, min(_MOST, sum(rows.n_bytes for rows in wave) // least))


def split_wave(wave: Sequence[PeerRows], n: int) -> list[list[Portion]]:
    """The rows of a wave in ``n`` batches, each with its share of every holder's bytes, in the rows' order."""
    out: list[list[Portion]] = [[] for _ in range(n)]
    for rows in wave:
        if n == 1:
            out[0].append(Portion(rows.holder.name, rows.local, rows.remote))
            continue
        share = -(-rows.n_bytes // n)
        local, remote = _cut_long(rows.local, rows.remote, max(share // _ROWS_A_PORTION, 1))
        ends = np.cumsum(local[:, 1].astype(np.int64))
        cuts = np.searchsorted(ends, np.arange(1, n) * share, side="left") + 1
        edges = [0, *np.minimum(cuts, len(local)).tolist(), len(local)]
        for batch in range(n):
            first, last = edges[batch], edges[batch + 1]
            if first < last:
                out[batch].append(Portion(rows.holder.name, local[first:last], remote[first:last]))
    return out


def _cut_long(local: U64, remote: U64, most_bytes: int) -> tuple[U64, U64]:
    """Rows of at most ``most_bytes``, rounded up to a page."""
    most = -(-most_bytes // 4096) * 4096
    nbytes = local[:, 1].astype(np.int64)
    if not len(nbytes) or int(nbytes.max()) <= most:
        return local, remote
    pieces = np.maximum(-(-nbytes // most), 1)
    at = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    size = np.minimum(np.repeat(nbytes, pieces) - at * most, most)
    cut: list[U64] = []
    for side in (local, remote):
        rows = np.repeat(side, pieces, axis=0)
        rows[:, 0] += (at * most).astype(np.uint64)
        rows[:, 1] = size.astype(np.uint64)
        cut.append(rows)
    return cut[0], cut[1]


def complete_with(rows: Sequence[tuple[int, U64]], start: U64, nbytes: Int64, last: int) -> Int64:
    """The number of the batch with which each range of one holder's memory has arrived.

    Parameters
    ----------
    rows
        (batch, remote rows) of the holder, uint64[N, 3].
    start, nbytes : uint64[n], int64[n]
        Ranges of remote memory, at the addresses of the rows.
    last
        Taken for ranges that no row touches.

    Returns
    -------
    int64[n]
        The greatest batch of all rows that touch the range. Where rows overlap it may be greater, never smaller.
    """
    if not rows:
        return np.full(len(start), last, np.int64)
    first = np.concatenate([r[:, 0] for _, r in rows])
    stop = first + np.concatenate([r[:, 1] for _, r in rows])
    batch = np.repeat(np.array([b for b, _ in rows], np.int64), [len(r) for _, r in rows])
    if bool((first[1:] < first[:-1]).any()):
        order = np.argsort(first, kind="stable")
        first, stop, batch = first[order], stop[order], batch[order]
    lo = np.searchsorted(np.maximum.accumulate(stop), start, side="right")
    hi = np.searchsorted(first, start + nbytes.astype(np.uint64), side="left")
    spans = np.stack([lo, np.maximum(hi, lo)], axis=1).reshape(-1)
    found = np.maximum.reduceat(np.append(batch, -1), spans)[::2] if len(spans) else np.zeros(0, np.int64)
    return np.where(hi > lo, found, last)
