"""Memory that goes and comes back while its addresses stay, as that of an engine in sleep mode does."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_FIXED = 0x10
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Napping:
    """Some pages of this process; they are given back when it is collected."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.address = self._map(None, mmap.PROT_READ | mmap.PROT_WRITE, 0)

    def array(self, dtype: type | str, shape: tuple[int, ...], *, at: int = 0) -> np.ndarray:
        """An array over them, ``at`` bytes in."""
        count = int(np.prod(shape))
        raw = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(self.address + at)
        return np.frombuffer(raw, dtype).reshape(shape)

    def sleep(self) -> None:
        """Take the memory away and keep the addresses, as a virtual memory reservation does."""
        self._map(self.address, 0, _FIXED)

    def wake(self) -> None:
        """Put fresh, zeroed memory behind them."""
        self._map(self.address, mmap.PROT_READ | mmap.PROT_WRITE, _FIXED)

    def _map(self, address: int | None, rights: int, flags: int) -> int:
        found = _LIBC.mmap(address, self.nbytes, rights, _ANONYMOUS | flags, -1, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        return int(found)

    def hole(self, at: int) -> None:
        """Unmap one page altogether."""
        _LIBC.munmap(ctypes.c_void_p(self.address + at), ctypes.c_size_t(mmap.PAGESIZE))

    def __del__(self) -> None:
        _LIBC.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes))
