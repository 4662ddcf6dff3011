"""Did these bytes arrive as they left? One 128-bit digest for each cell, in one pass over the bytes.

The bytes of a cell are taken as little-endian 32-bit lanes, zero-extended (a short tail is padded with zeros), each
lane times a fixed odd 64-bit weight, summed modulo 2**64; twice, with two seeds; and dtype and shape are added
after the sums.

Why the weights look as they do. The low 33 bits of weight ``i`` are ``2 * p(i) + 1``, with ``p`` a seeded nonlinear
bijection of 32-bit numbers, the upper 31 bits are a hash of ``i``:

- odd: a change inside one lane is a difference under 2**32 times a unit, never 0;
- pairwise distinct modulo 2**33: swapping two lanes that differ by ``d`` changes the sum by ``d * (w_i - w_j)``,
  which holds at most 31 + 32 factors of two, never 64; so does swapping two elements of at most 4 bytes at equal
  places of two lanes;
- elements at different places of two lanes swap to ``d * (2**a * w_i - 2**b * w_j)`` with ``a != b``: an odd number
  times less than 2**24, never 0;
- nonlinear: flipping the signs of several top lanes adds ``2**31`` times a signed sum of weights, which vanishes
  modulo 2**33 with probability 2**-32 a seed (for arithmetic progressions four flips always can).

This module is the NumPy form, which takes two lanes at a time as one 64-bit word; `reshard.refit.digests_torch` and
`reshard.refit.digests_triton` give the same numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from reshard.planner.dtypes import dtype as parse_dtype

__all__ = [
    "CELL_BYTES",
    "DIGEST_BYTES",
    "MOST_THREADS",
    "SEEDS",
    "Digester",
    "cell_tag",
    "digest_bytes",
    "digest_many",
    "n_cpus",
    "root_of",
    "weights",
    "worker_threads",
]

U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

CELL_BYTES = 1 << 20
"""Most bytes of one cell."""
DIGEST_BYTES = 16
"""Bytes of one cell's digest: two little-endian uint64."""
SEEDS = (0x5265_7368_6172_6431, 0xC0DE_2B1D_9E37_79B9)
"""The two seeds; changing them changes every digest."""

MOST_THREADS = 8
"""Threads that digest at once."""
_HALF = np.uint64(32)
_M1, _M2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def _mix32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """A nonlinear bijection of 32-bit numbers: xor-shifts and odd multiplications ("lowbias32" of C. Wellons)."""
    x = x ^ (x >> np.uint32(16))
    x = x * _M1
    x = x ^ (x >> np.uint32(15))
    x = x * _M2
    return x ^ (x >> np.uint32(16))


def _mix64(x: U64) -> U64:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cache
def weights(seed: int) -> U64:
    """The weights of one seed, uint64 of shape (CELL_BYTES / 4,), read-only."""
    index = np.arange(CELL_BYTES // 4, dtype=np.uint32)
    low = _mix32(index ^ np.uint32(seed & 0xFFFFFFFF)).astype(np.uint64) << np.uint64(1) | np.uint64(1)
    high = _mix64(index.astype(np.uint64) + np.uint64(seed)) << np.uint64(33)
    made = high | low
    made.flags.writeable = False
    return made


@lru_cache(maxsize=65_536)
def cell_tag(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """What binds dtype and shape: two uint64, added to the two sums."""
    text = f"reshard.cell.1|{parse_dtype(dtype).label}|{','.join(map(str, shape))}".encode()
    raw = hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


@cache
def _word_weights(seed: int) -> tuple[U64, U64]:
    """Weights for lanes taken two at a time, each uint64 of shape (CELL_BYTES / 8,), read-only.

    A word is ``low + 2**32 * high``, so ``w0 * low + w1 * high = w0 * word + (w1 - 2**32 * w0) * high``: the low lanes
    never have to be taken apart from the high ones.
    """
    even, odd = weights(seed)[0::2].copy(), weights(seed)[1::2]
    of_high = odd - (even << np.uint64(32))
    even.flags.writeable = of_high.flags.writeable = False
    return even, of_high


class Digester:
    """Digests cells one after the other, each in one pass through the cache; belongs to one thread at a time."""

    __slots__ = ("_aligned", "_high")

    def __init__(self) -> None:
        self._high = np.empty(0, np.uint64)
        self._aligned = np.empty(0, np.uint64)

    def digest(self, data: U8, tag: Sequence[int] | U64, out: U64) -> None:
        """Digest one cell.

        Parameters
        ----------
        data
            uint8 of shape (n,), contiguous, 0 < n <= CELL_BYTES.
        tag
            The two numbers of `cell_tag`.
        out
            uint64 of shape (2,), written.
        """
        n = data.size
        if n > CELL_BYTES:
            raise ValueError(f"a cell has at most {CELL_BYTES} bytes, got {n}")
        n_words = n >> 3
        sums = [int(tag[0]), int(tag[1])]
        if n_words:
            words = self._words(data, n_words)
            if self._high.size < n_words:
                self._high = np.empty(n_words, np.uint64)
            high = np.right_shift(words, _HALF, out=self._high[:n_words])
            for k, seed in enumerate(SEEDS):
                of_word, of_high = _word_weights(seed)
                sums[k] += int(np.einsum("i,i->", words, of_word[:n_words]))
                sums[k] += int(np.einsum("i,i->", high, of_high[:n_words]))
        for at in range(8 * n_words, n, 4):
            lane = int.from_bytes(data[at : at + 4].tobytes(), "little")
            for k, seed in enumerate(SEEDS):
                sums[k] += lane * int(weights(seed)[at >> 2])
        out[0] = sums[0] & 0xFFFFFFFFFFFFFFFF
        out[1] = sums[1] & 0xFFFFFFFFFFFFFFFF

    def _words(self, data: U8, n_words: int) -> U64:
        """The first 64-bit words of a cell; a copy only where its address is no multiple of 8."""
        raw = data[: 8 * n_words]
        words: U64 = raw.view(np.uint64)
        if words.flags.aligned:
            return words
        if self._aligned.size < n_words:
            self._aligned = np.empty(n_words, np.uint64)
        self._aligned[:n_words].view(np.uint8)[...] = raw
        return self._aligned[:n_words]


def digest_many(data: U8, offset_bytes: Int64, nbytes: Int64, tags: U64, out: U64) -> None:
    """Digest many cells of one buffer, on as many threads as there are CPUs and work.

    Parameters
    ----------
    data
        uint8 of shape (n,), contiguous.
    offset_bytes, nbytes : int64[n_cells]
        Where the cells lie.
    tags, out : uint64[n_cells, 2]
        What `cell_tag` says of each; the digests, written.
    """
    cells = list(zip(offset_bytes.tolist(), nbytes.tolist(), range(len(nbytes)), strict=True))
    n_threads = worker_threads(int(nbytes.sum()))

    def work(share: list[tuple[int, int, int]]) -> None:
        digester = Digester()
        for at, size, i in share:
            digester.digest(data[at : at + size], tags[i], out[i])

    if n_threads == 1:
        work(cells)
        return
    with ThreadPoolExecutor(n_threads, thread_name_prefix="reshard-digest") as pool:
        # list() so that what a thread raises is raised here
        list(pool.map(work, (cells[k::n_threads] for k in range(n_threads))))


def worker_threads(nbytes: int) -> int:
    """How many threads digesting ``nbytes`` is worth: one for each 8 MiB, at most 8 and one a CPU."""
    return max(1, min(n_cpus(), MOST_THREADS, nbytes >> 23))


def n_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def digest_bytes(data: U8, dtype: str, shape: Sequence[int]) -> bytes:
    """Digest of one cell given as contiguous bytes: 16 bytes.

    Examples
    --------
    >>> a = np.array([1, 0, 2], np.uint16)
    >>> digest_bytes(a.view(np.uint8), "uint16", (3,)) == digest_bytes(a[::-1].copy().view(np.uint8), "uint16", (3,))
    False
    """
    out = np.zeros(2, np.uint64)
    Digester().digest(data, cell_tag(dtype, tuple(int(n) for n in shape)), out)
    return out.astype("<u8").tobytes()


def root_of(digests: U64, prefix: bytes = b"") -> bytes:
    """32 bytes over the digests of many cells (uint64 of shape (n, 2)), after ``prefix``."""
    hasher = hashlib.sha256(b"reshard.root.1\0")
    hasher.update(prefix)
    hasher.update(np.ascontiguousarray(digests, "<u8").tobytes())
    return hasher.digest()
