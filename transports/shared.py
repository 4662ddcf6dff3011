"""Memory that other processes can map, and mapping it.

Memory is an anonymous file (``memfd``): it has no name in any file system, so a killed process leaves
nothing behind.  A peer opens it through ``/proc/<pid>/fd/<n>``.  The file is sealed against shrinking before
it is served, and a peer checks that: otherwise its owner could take pages away under a mapping, which is a
SIGBUS for the reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from reshard.transports.errors import PeerError, RegistrationError, blamed
from reshard.transports.hostmem import check_available, populate

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedPages:
    """An anonymous file, mapped; the descriptor is closed with the last reference, or by `close`.

    Attributes
    ----------
    fd : int
    array : ndarray of uint8, shape (nbytes,)
        Page-aligned, zeroed and resident.
    """

    __slots__ = ("__weakref__", "_close", "address", "array", "fd", "nbytes")

    def __init__(self, nbytes: int) -> None:
        check_available(nbytes)
        size = max(nbytes, 1)
        try:
            fd = os.memfd_create("reshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise RegistrationError(f"allocate: no file for {nbytes} bytes of shared memory: {error}") from error
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            pages = mmap.mmap(fd, size)
            self.array: npt.NDArray[np.uint8] = np.frombuffer(pages, np.uint8)[:nbytes]
            self.address = int(self.array.ctypes.data)
            populate(self.address, size)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise RegistrationError(f"allocate: no {nbytes} bytes of shared memory: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.nbytes = nbytes
        self._close = weakref.finalize(self, os.close, fd)

    def close(self) -> None:
        """Give the descriptor back, and the pages unless somebody else refers to them; idempotent.

        After that ``array`` is empty.
        """
        self.array = np.zeros(0, np.uint8)
        self._close()


def map_from(pid: int, fd: int, nbytes: int, peer: str) -> npt.NDArray[np.uint8]:
    """Map the first ``nbytes`` of another process's sealed file, to read only.

    Raises
    ------
    PeerError
        If there is no such process or file, it is too small, not sealed, or may not be opened.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # By now the number may be a FIFO's, or a terminal's.
        mine = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise blamed(error, peer, f"cannot open {path}") from error
    try:
        size = os.fstat(mine).st_size
        seals = 0
        with contextlib.suppress(OSError):  # not a file that can be sealed
            seals = fcntl.fcntl(mine, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or size < nbytes:
            raise PeerError(
                f"peer {peer!r}: {path} is not what its endpoint says: {size} bytes, seals {seals:#x}, "
                f"expected at least {nbytes} bytes, sealed against shrinking",
                peer=peer,
            )
        pages = mmap.mmap(mine, nbytes, prot=mmap.PROT_READ)
    except PeerError:
        raise
    except OSError as error:
        raise blamed(error, peer, f"cannot map {nbytes} bytes of {path}") from error
    except ValueError as error:
        raise PeerError(f"peer {peer!r}: cannot map {nbytes} bytes of {path}: {error}", peer=peer) from error
    finally:
        os.close(mine)
    array = np.frombuffer(pages, np.uint8)
    populate(int(array.ctypes.data), nbytes)
    return array
