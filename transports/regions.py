"""Which memory may be addressed: one region, and the sorted table of all regions of one process.

A `RegionTable` answers one question, vectorised: does every row lie inside one region?  Regions may overlap
(memory registered twice, once by each of two owners); a row that would span two adjacent regions is refused,
since no native memory handle covers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from reshard.transports.errors import RegistrationError

U64 = npt.NDArray[np.uint64]
MemoryKind = Literal["dram", "vram"]
KIND_NAMES: tuple[MemoryKind, ...] = ("dram", "vram")
"""Memory kinds; the index of a name is its code in an endpoint message."""

_ADDRESS_LIMIT = (1 << 64) - 1
_BLOCK = 1 << 13
"""Rows that are looked at together: what is computed of them stays in the cache and needs no new pages."""


def blocks(n_rows: int) -> Iterator[slice]:
    """Yield slices that cover ``n_rows`` rows, so that no check of a long list fills memory of its length."""
    return (slice(start, start + _BLOCK) for start in range(0, n_rows, _BLOCK))


@dataclass(frozen=True, slots=True)
class Region:
    """One allocation, registered as a whole.

    Parameters
    ----------
    address : int
        First byte, in the owner's address space.
    nbytes : int
        Size in bytes; 0 is allowed and is never handed to a native library.
    memory : "dram" or "vram"
        Kind of memory.
    device : int
        Device ordinal; 0 for host memory.
    owner : object
        Whatever keeps the memory allocated (an array, a tensor).  Referenced for as long as the region is
        registered or quarantined.

    Raises
    ------
    RegistrationError
        If the range is negative, wraps around the address space, starts at address 0 or has an unknown kind.
    """

    address: int
    nbytes: int
    memory: MemoryKind = "dram"
    device: int = 0
    owner: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.memory not in KIND_NAMES:
            raise RegistrationError(f"region memory: got {self.memory!r}, expected one of {KIND_NAMES}")
        if self.nbytes < 0 or self.address < 0 or self.address + self.nbytes > _ADDRESS_LIMIT:
            raise RegistrationError(
                f"region: got address {self.address:#x} with {self.nbytes} bytes, "
                "expected a range that ends before 2**64"
            )
        if self.nbytes and not self.address:
            raise RegistrationError(f"region: {self.nbytes} bytes at address 0")
        if not 0 <= self.device < 1 << 32:
            raise RegistrationError(f"region device: got {self.device}, expected 0 <= device < 2**32")

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.address + self.nbytes

    @staticmethod
    def of(array: npt.NDArray[np.generic]) -> Region:
        """Return the region of a C-contiguous host array, which it keeps alive."""
        if not array.flags.c_contiguous:
            raise RegistrationError("region of an array: expected a C-contiguous array")
        return Region(int(array.ctypes.data), int(array.nbytes), "dram", 0, array)


_WIDE = 256
"""Rows that are laid side by side, so that one pass reduces all their columns in registers."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and greatest of each column of rows (address, nbytes, device): they settle most checks of a long list.

    Attributes
    ----------
    address, nbytes, device : (int, int)
        Least and greatest.
    """

    address: tuple[int, int]
    nbytes: tuple[int, int]
    device: tuple[int, int]

    @staticmethod
    def of(rows: U64) -> Bounds:
        """Return those of an array of shape (N, 3), C-contiguous, N at least 1."""
        whole = len(rows) - len(rows) % _WIDE
        wide, rest = rows[:whole].reshape(-1, _WIDE * 3), rows[whole:]
        ends = []
        for reduce in (np.minimum.reduce, np.maximum.reduce):
            parts = [part for part in (wide, rest) if len(part)]
            ends.append(
                reduce(np.concatenate([reduce(part, axis=0).reshape(-1, 3) for part in parts]), axis=0).tolist()
            )
        low, high = ends
        return Bounds(*zip(low, high, strict=True))


@dataclass(frozen=True, slots=True)
class RegionTable:
    """Sorted, read-only columns of regions.

    Attributes
    ----------
    address, nbytes : ndarray of uint64, shape (R,)
        Ascending by (address, nbytes).
    kind : ndarray of uint8, shape (R,)
        Index into `KIND_NAMES`.
    device : ndarray of uint32, shape (R,)
    """

    address: U64
    nbytes: U64
    kind: npt.NDArray[np.uint8]
    device: npt.NDArray[np.uint32]
    _reach: U64 = field(init=False, repr=False, compare=False)
    _reach_index: npt.NDArray[np.intp] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stop = self.address + self.nbytes
        # A row is inside some region exactly if it ends before the furthest stop of all regions that start
        # before it.
        reach = np.maximum.accumulate(stop) if len(stop) else stop
        index = (
            np.maximum.accumulate(np.where(stop == reach, np.arange(len(stop)), 0))
            if len(stop)
            else np.zeros(0, np.intp)
        )
        for column in (self.address, self.nbytes, self.kind, self.device, reach, index):
            column.flags.writeable = False
        object.__setattr__(self, "_reach", reach)
        object.__setattr__(self, "_reach_index", index)

    def __len__(self) -> int:
        return len(self.address)

    @staticmethod
    def build(regions: Iterable[Region]) -> RegionTable:
        """Build a table; zero-length regions are left out."""
        kept = sorted((r for r in regions if r.nbytes), key=lambda r: (r.address, r.nbytes))
        return RegionTable(
            np.array([r.address for r in kept], np.uint64),
            np.array([r.nbytes for r in kept], np.uint64),
            np.array([KIND_NAMES.index(r.memory) for r in kept], np.uint8),
            np.array([r.device for r in kept], np.uint32),
        )

    def locate(
        self, address: U64, nbytes: U64, device: U64, *, whose: str, bounds: Bounds | None = None
    ) -> npt.NDArray[np.intp]:
        """Return, for each row, the index of a region that contains it.

        Parameters
        ----------
        address, nbytes, device : ndarray of uint64, shape (N,)
            Rows to place; ``nbytes`` is at least 1.
        whose : str
            Names the side in error messages, such as ``"peer 'trainer-3'"``.
        bounds : Bounds, optional
            Those of the rows, where the caller knows them.

        Returns
        -------
        ndarray of intp, shape (N,) or (1,)
            Shape (1,) where one region contains all rows.

        Raises
        ------
        RegistrationError
            Naming the first row that lies outside, or on another device than its region.
        """
        if not len(address):
            return np.zeros(0, np.intp)
        if not len(self):
            raise RegistrationError(
                f"{whose}: row 0 at {int(address[0]):#x} ({int(nbytes[0])} bytes): no region is registered"
            )
        low, last = bounds.address if bounds else (int(address.min()), int(address.max()))
        guess = int(np.searchsorted(self.address, np.uint64(low), side="right")) - 1
        if guess >= 0:
            at = int(self._reach_index[guess])
            stop = int(self.address[at]) + int(self.nbytes[at])
            # Reductions settle the common case: everything in one region.
            if last + (bounds.nbytes[1] if bounds else int(nbytes.max())) <= stop or (
                last < stop
                and all(bool((nbytes[row] <= np.uint64(stop) - address[row]).all()) for row in blocks(len(address)))
            ):
                if bounds and bounds.device == (self.device[at], self.device[at]):
                    return np.array([at], np.intp)
                return self._on_device(np.array([at], np.intp), device, whose)
        place = np.searchsorted(self.address, address, side="right") - 1
        before = place < 0
        place[before] = 0
        reach = self._reach[place]
        outside = before | (address >= reach) | (nbytes > reach - address)
        if outside.any():
            row = int(outside.argmax())
            raise RegistrationError(
                f"{whose}: row {row} [{int(address[row]):#x}, {int(address[row]) + int(nbytes[row]):#x}) "
                f"({int(nbytes[row])} bytes) is not inside one registered region; "
                f"{self._near(int(address[row]))}"
            )
        return self._on_device(self._reach_index[place], device, whose)

    def _on_device(self, index: npt.NDArray[np.intp], device: U64, whose: str) -> npt.NDArray[np.intp]:
        expected = self.device[index]
        for block in blocks(len(device)):
            wrong = device[block] != (expected[block] if len(expected) > 1 else expected)
            if wrong.any():
                row = block.start + int(wrong.argmax())
                should = int(expected[row if len(expected) > 1 else 0])
                raise RegistrationError(f"{whose}: row {row} device: got {int(device[row])}, expected {should}")
        return index

    def _near(self, address: int) -> str:
        at = int(np.searchsorted(self.address, np.uint64(address), side="right")) - 1
        near = [i for i in (at, at + 1) if 0 <= i < len(self)]
        spans = ", ".join(f"[{int(self.address[i]):#x}, {int(self.address[i]) + int(self.nbytes[i]):#x})" for i in near)
        return f"nearest of {len(self)} regions: {spans}"
