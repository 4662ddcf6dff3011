"""Copying many rows inside one address space, without a Python step for each small one.

1. Strided rows with many runs are one strided NumPy copy each; those with few are expanded.
2. Runs of `LONG_BYTES` and more are one ``memmove`` each (what it costs to call is small against the copy).
3. Shorter runs are grouped by length; a group is gathered and scattered by two fancy-index operations over
   views whose elements are ``length`` bytes wide and one byte apart, in pieces that stay in the cache.

All addresses are valid and checked before; all copies release the GIL.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.transports import rows
from reshard.transports.regions import U64

LONG_BYTES = 16 << 10
"""Runs of at least this many bytes are copied one by one."""
_MANY_RUNS = 32
_CACHE_BYTES = 256 << 10

_Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Strided:
    dst: npt.NDArray[np.void]
    src: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class _Group:
    dst: npt.NDArray[np.void]
    dst_at: _Index
    src: npt.NDArray[np.void]
    src_at: _Index


class CopyList:
    """A list of copies, built once and run many times.

    Parameters
    ----------
    local, remote : ndarray of uint64, shape (N, 3) or (N, 5)
        Destination and source rows, both as addresses of this process.
    """

    __slots__ = ("_groups", "_long", "_strided")

    def __init__(self, local: U64, remote: U64) -> None:
        self._strided: list[_Strided] = []
        if local.shape[1] == 5:
            local, remote = self._take_strided(local, remote)
        nbytes = local[:, rows.NBYTES]
        long = nbytes >= LONG_BYTES
        self._long: list[tuple[int, int, int]] = list(
            zip(
                local[long, rows.ADDRESS].tolist(),
                remote[long, rows.ADDRESS].tolist(),
                nbytes[long].tolist(),
                strict=True,
            )
        )
        self._groups = _group(local[~long], remote[~long])

    def run(self) -> None:
        """Copy everything."""
        for dst, src, nbytes in self._long:
            ctypes.memmove(dst, src, nbytes)
        for strided in self._strided:
            strided.dst[...] = strided.src
        for group in self._groups:
            piece = max(1, _CACHE_BYTES // group.src.dtype.itemsize)
            for at in range(0, len(group.src_at), piece):
                group.dst[group.dst_at[at : at + piece]] = group.src[group.src_at[at : at + piece]]

    def _take_strided(self, local: U64, remote: U64) -> tuple[U64, U64]:
        many = local[:, rows.COUNT] >= _MANY_RUNS
        for to, of in zip(local[many].tolist(), remote[many].tolist(), strict=True):
            self._strided.append(_Strided(_column(to), _column(of)))
        return rows.expand_rows(local[~many])[0], rows.expand_rows(remote[~many])[0]


class _Window:
    """Memory at an address, as NumPy's array interface describes it."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, itemsize: int, n: int, stride: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": f"|V{itemsize}",
            "shape": (n,),
            "strides": (stride,),
        }


def _column(row: list[int]) -> npt.NDArray[np.void]:
    address, nbytes, _, stride, count = row
    return np.asarray(_Window(address, nbytes, count, stride))


def _group(local: U64, remote: U64) -> list[_Group]:
    if not len(local):
        return []
    lengths, group = np.unique(local[:, rows.NBYTES], return_inverse=True)
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], np.arange(len(lengths) + 1))
    groups = []
    for at, length in enumerate(lengths.tolist()):
        chosen = order[first[at] : first[at + 1]]
        dst, dst_at = _window(local[chosen, rows.ADDRESS], length)
        src, src_at = _window(remote[chosen, rows.ADDRESS], length)
        groups.append(_Group(dst, dst_at, src, src_at))
    return groups


def _window(address: U64, length: int) -> tuple[npt.NDArray[np.void], _Index]:
    low = int(address.min())
    at = (address - np.uint64(low)).astype(np.int64)
    return np.asarray(_Window(low, length, int(at.max()) + 1, 1)), at
