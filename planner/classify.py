"""Which rows of a table are equal? Exact classes of rows without sorting.

1. Hash every row with one multiply-add a column.
2. Let the first row that falls into a hash slot represent it; compare every row with its representative
   *exactly*.
3. Rows that differ from their representative try again with other slots; what is left after some rounds is
   sorted.

Classes are therefore never a matter of hash luck: the hash only proposes, the columns decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

_ROUNDS: Final = 6


def _odd_weights(n: int, seed: int) -> UInt64:
    """Fixed odd 64-bit weights (splitmix64 of the index)."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, n + 1, dtype=np.uint64) + np.uint64(seed << 16)) * np.uint64(0x9E3779B97F4A7C15)
        out: UInt64 = mix64(z) | np.uint64(1)
        return out


def mix64(z: UInt64) -> UInt64:
    """The splitmix64 finaliser, a bijection of 64-bit words that spreads every bit."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out: UInt64 = z ^ (z >> np.uint64(31))
        return out


WEIGHTS: Final[UInt64] = _odd_weights(256, 1)
_SPREAD: Final[UInt64] = _odd_weights(_ROUNDS, 2)


def hash_rows(columns: Sequence[Int64]) -> UInt64:
    """One 64-bit word a row: the sum of the columns times fixed odd weights, modulo 2**64."""
    total: UInt64 = columns[0].view(np.uint64) * WEIGHTS[0]
    for i, column in enumerate(columns[1:], 1):
        total += column.view(np.uint64) * WEIGHTS[i & 255]
    return total


def propose(hashes: UInt64, pending: Int64, round_no: int) -> Int64:
    """For each pending row the first pending row in its hash slot."""
    n_bits = max(4, int(4 * len(pending)).bit_length())
    slot = ((hashes * _SPREAD[round_no]) >> np.uint64(64 - n_bits)).view(np.int64)
    table = np.empty(1 << n_bits, np.int64)
    table[slot[::-1]] = pending[::-1]
    out: Int64 = table[slot]
    return out


def representatives(columns: Sequence[Int64]) -> Int64:
    """The first row that equals each row, in all columns.

    Parameters
    ----------
    columns : sequence of int64[N]
        At least one.

    Returns
    -------
    int64[N]
        Non-increasing work: about 10 ns a row and column.
    """
    n = len(columns[0])
    rep = np.arange(n, dtype=np.int64)
    if n == 0:
        return rep
    hashes = hash_rows(columns)
    pending = rep
    for round_no in range(_ROUNDS):
        candidate = propose(hashes if len(pending) == n else hashes[pending], pending, round_no)
        same = np.ones(len(pending), np.bool_)
        for column in columns:
            same &= column[candidate] == column[pending] if len(pending) < n else column[candidate] == column
        if same.all():
            if len(pending) == n:
                return candidate
            rep[pending] = candidate
            return rep
        if len(pending) == n:
            rep = np.where(same, candidate, rep)
        else:
            rep[pending[same]] = candidate[same]
        pending = np.flatnonzero(~same) if len(pending) == n else pending[~same]
    order = pending[np.lexsort([column[pending] for column in columns])]
    new = np.ones(len(order), np.bool_)
    if len(order):
        new[1:] = np.any([column[order[1:]] != column[order[:-1]] for column in columns], axis=0)
        group = np.cumsum(new) - 1
        first = np.full(int(group[-1]) + 1, n, np.int64)
        np.minimum.at(first, group, order)
        rep[order] = first[group]
    return rep


def classify(columns: Sequence[Int64]) -> tuple[Int64, Int64]:
    """Number the classes of equal rows by first appearance.

    Returns
    -------
    class_id : int64[N]
    first : int64[C]
        The first row of each class.

    Examples
    --------
    >>> class_id, first = classify([np.array([7, 7, 3]), np.array([1, 1, 1])])
    >>> class_id.tolist(), first.tolist()
    ([0, 0, 1], [0, 2])
    """
    rep = representatives(columns)
    is_first = rep == np.arange(len(rep))
    number = np.cumsum(is_first) - 1
    return number[rep], np.flatnonzero(is_first)


def column(values: npt.ArrayLike, what: str) -> Int64:
    """A read-only contiguous int64 column (a view where `values` already is one).

    Raises
    ------
    TypeError
        The values are not integers, or not one-dimensional.
    """
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64).reshape(-1)
    if array.dtype.kind not in "iu" or array.ndim != 1 or (array.dtype == np.uint64 and bool((array >> 63).any())):
        raise TypeError(f"column {what}: got {array.dtype} of shape {array.shape}, expected one-dimensional int64")
    out = np.ascontiguousarray(array, dtype=np.int64).view()
    out.flags.writeable = False
    return out


def ragged_arange(counts: Int64) -> Int64:
    """0..counts[0]-1, 0..counts[1]-1, ... in one array.

    >>> ragged_arange(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    n = int(ends[-1]) if len(ends) else 0
    return np.arange(n, dtype=np.int64) - np.repeat(ends - counts, counts)
