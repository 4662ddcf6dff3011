"""Page-locked host memory, for copies between the host and a GPU: they run at the bus's rate and beside other work.

A transport allocates the memory; here it is locked where it is, for as long as a `Pinned` is open
(``cudaHostRegister`` through torch). Where that fails the memory stays as it is, which is slower and nothing else.
"""

from __future__ import annotations

import logging
from typing import Protocol

from reshard.planner.errors import MissingDependencyError, require

logger = logging.getLogger(__name__)

__all__ = ["CudaRuntimeLibrary", "Pinned", "load_runtime", "pin"]

_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all contexts."""


class CudaRuntimeLibrary(Protocol):
    """The entries of the CUDA runtime that are used, as ``torch.cuda.cudart()`` has them; each returns a cudaError."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> object:  # noqa: N802
        """Lock a range of pages."""
        ...

    def cudaHostUnregister(self, address: int) -> object:  # noqa: N802
        """Unlock it."""
        ...


def load_runtime() -> CudaRuntimeLibrary | None:
    """Torch's CUDA runtime, or None where torch or a GPU is missing, or cannot be initialised."""
    try:
        torch = require("torch", extra="torch")
    except MissingDependencyError:
        return None
    try:
        library: CudaRuntimeLibrary | None = torch.cuda.cudart() if torch.cuda.is_available() else None
    except RuntimeError as error:
        logger.warning("the CUDA runtime cannot be initialised: %s", error)
        return None
    return library


class Pinned:
    """A locked range; `close` unlocks it, which must come before the memory is freed."""

    def __init__(self, address: int, library: CudaRuntimeLibrary) -> None:
        self._address = address
        self._library: CudaRuntimeLibrary | None = library

    def close(self) -> None:
        """Unlock; idempotent. A failure is logged: the memory is about to be let go in any case."""
        library, self._library = self._library, None
        if library is not None and (code := _code(library.cudaHostUnregister(self._address))):
            logger.warning("host memory at %#x cannot be unlocked: CUDA error %d", self._address, code)


def pin(address: int, nbytes: int, *, library: CudaRuntimeLibrary | None = None) -> Pinned | None:
    """Lock host memory; None, with a line in the log, where that cannot be had.

    Parameters
    ----------
    address, nbytes
        A range of whole pages of this process.
    library
        `load_runtime` by default.
    """
    found = library if library is not None else load_runtime()
    if found is None:
        logger.info("%d bytes of host memory are not page-locked: no CUDA runtime here", nbytes)
        return None
    code = _code(found.cudaHostRegister(address, nbytes, _PORTABLE))
    if code:
        logger.warning(
            "%d bytes of host memory at %#x are not page-locked (CUDA error %d): copies to and from the GPU go "
            "through the driver's own buffer, which is slower; raise the limit of locked memory (ulimit -l)",
            nbytes,
            address,
            code,
        )
        return None
    return Pinned(address, found)


def _code(answer: object) -> int:
    """A cudaError as a number: torch gives an enumeration."""
    return int(getattr(answer, "value", answer))  # type: ignore[call-overload, no-any-return]
