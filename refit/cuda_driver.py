"""What torch does not offer of the CUDA driver: flushing GPUDirect writes.

A peer's network card writes past the processor into a GPU's memory. That its completion was seen on the host does not
always mean that kernels on the GPU see the bytes: where the GPU's ordering attribute does not promise it,
``cuFlushGPUDirectRDMAWrites`` does (CUDA Driver API, the entries of that name and ``CUGPUDirectRDMAWritesOrdering``).
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Protocol

from reshard.refit.errors import RefitError

logger = logging.getLogger(__name__)

__all__ = ["CudaDriver", "DriverLibrary", "load_driver"]

_FLUSH_OPTIONS, _WRITES_ORDERING = 117, 118
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, ..._WRITES_ORDERING."""
_OPTION_HOST = 1
_ORDERED_FOR_OWNER = 100
_TARGET_CURRENT_CONTEXT, _SCOPE_OWNER = 0, 100


class DriverLibrary(Protocol):
    """The entries of ``libcuda`` that are used; each returns a CUresult, 0 for success."""

    def cuDeviceGet(self, device: object, ordinal: int) -> int:  # noqa: N802
        """The handle of a device by its ordinal."""
        ...

    def cuDeviceGetAttribute(self, value: object, attribute: int, device: object) -> int:  # noqa: N802
        """One integer attribute of a device."""
        ...

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:  # noqa: N802
        """Block until remote writes are visible to ``scope``."""
        ...


@cache
def load_driver() -> DriverLibrary:
    """``libcuda`` of this machine.

    Raises
    ------
    RefitError
        If there is none.
    """
    try:
        library: DriverLibrary = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RefitError(f"the CUDA driver cannot be loaded: {error}") from error
    return library


class CudaDriver:
    """One GPU, seen through the driver. The calling thread's current context must be the GPU's.

    Parameters
    ----------
    number
        The GPU's ordinal.
    library
        `load_driver` by default.
    """

    def __init__(self, number: int, library: DriverLibrary | None = None) -> None:
        self.number = number
        self._library = library if library is not None else load_driver()
        device = ctypes.c_int(0)
        self._check(self._library.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
        self.ordered = self._attribute(device, _WRITES_ORDERING) >= _ORDERED_FOR_OWNER
        """Whether the GPU sees peers' writes in order by itself, so that no flush is needed."""
        self.can_flush = bool(self._attribute(device, _FLUSH_OPTIONS) & _OPTION_HOST)
        if not self.ordered and not self.can_flush:
            logger.warning(
                "GPU %d neither orders GPUDirect writes nor offers a flush from the host; what peers wrote is made "
                "visible by the launch of the next kernel alone",
                number,
            )

    def flush(self) -> None:
        """Make visible to this GPU's kernels what peers have written into its memory.

        Raises
        ------
        RefitError
            If the driver refuses: the bytes must not be used.
        """
        if self.can_flush and not self.ordered:
            result = self._library.cuFlushGPUDirectRDMAWrites(_TARGET_CURRENT_CONTEXT, _SCOPE_OWNER)
            self._check(result, "cuFlushGPUDirectRDMAWrites")

    def _attribute(self, device: ctypes.c_int, attribute: int) -> int:
        value = ctypes.c_int(0)
        self._check(
            self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), f"attribute {attribute}"
        )
        return value.value

    def _check(self, result: int, call: str) -> None:
        if result:
            raise RefitError(f"GPU {self.number}: the CUDA driver answers {call} with error {result}")
