"""Host memory: pages that are there before a transfer needs them.

A first touch during a transfer runs at a fifth of a GB/s, so destinations are populated when they are
allocated and again when they are registered.  Populating also proves that a range is mapped at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

import numpy as np
import numpy.typing as npt

from reshard.transports.base import Allocation
from reshard.transports.errors import RegistrationError
from reshard.transports.regions import Region

PAGE_BYTES = mmap.PAGESIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_*, since Linux 5.14
_HUGE_BYTES = 2 << 20
_ALWAYS_BYTES = 1 << 20  # not worth asking for


def allocate_pages(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return page-aligned, private, zeroed and resident memory.

    Parameters
    ----------
    nbytes : int
        At least 0.

    Raises
    ------
    RegistrationError
        If the system has no such memory.
    """
    check_available(nbytes)
    try:
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise RegistrationError(f"allocate: no {nbytes} bytes of host memory: {error}") from error
    if nbytes >= _HUGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(pages, np.uint8)
    array[::PAGE_BYTES] = 0
    return array[:nbytes]


def available_bytes() -> int:
    """Return how much host memory could be allocated now, as far as the system and the control group tell."""
    available = 1 << 62
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        line = next((line for line in file if line.startswith("MemAvailable:")), "")
        available = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):  # "max", or not the second version
        limit, used = (int(_read(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
        available = min(available, max(limit - used, 0))
    return available


def check_available(nbytes: int) -> None:
    """Refuse what would only be found missing page by page, by the system's killer.

    Raises
    ------
    RegistrationError
        If ``nbytes`` is negative or exceeds `available_bytes`.
    """
    if nbytes < 0:
        raise RegistrationError(f"allocate: got {nbytes} bytes, expected at least 0")
    if nbytes > _ALWAYS_BYTES and nbytes > (free := available_bytes()):
        raise RegistrationError(f"allocate: no {nbytes} bytes of host memory: {free} are available")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def allocate_host(nbytes: int) -> Allocation:
    """Return `allocate_pages` as an allocation."""
    array = allocate_pages(nbytes)
    return Allocation(array, Region(int(array.ctypes.data), nbytes, "dram", 0, array))


def populate(address: int, nbytes: int) -> None:
    """Make the pages of a range resident without changing them.

    Kernels that lack the call, and read-only mappings, are left as they are.

    Raises
    ------
    RegistrationError
        If a part of the range is not mapped, or memory ran out.
    """
    start = address - address % PAGE_BYTES
    length = address + nbytes - start
    for advice in (_POPULATE_WRITE, _POPULATE_READ):
        code = _madvise(start, length, advice)
        if code == 0:
            return
        if code in (errno.ENOMEM, errno.EFAULT):
            raise RegistrationError(
                f"register [{address:#x}, {address + nbytes:#x}): the range is not wholly mapped, "
                f"or there is no memory for it: {os.strerror(code)}"
            )


def _madvise(address: int, nbytes: int, advice: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
    return ctypes.get_errno() if done else 0
