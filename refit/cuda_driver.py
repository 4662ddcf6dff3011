"""What torch does not offer of the CUDA driver: flushing GPUDirect writes, and what stands behind an address.

A peer's network card writes past the processor into a GPU's memory. That its completion was seen on the host does not
always mean that kernels on the GPU see the bytes: where the GPU's ordering attribute does not promise it,
``cuFlushGPUDirectRDMAWrites`` does (CUDA Driver API, the entries of that name and ``CUGPUDirectRDMAWritesOrdering``).

An address outlives its memory where an allocator unmaps without giving up the range, as sleeping engines do (vLLM's
``CuMemAllocator``), and it may come back with other memory behind it. ``cuPointerGetAttribute`` tells
(``CUpointer_attribute``: MAPPED, MEMORY_BLOCK_ID, BUFFER_ID, IS_GPU_DIRECT_RDMA_CAPABLE).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator
from functools import cache
from typing import Protocol

from reshard.refit.errors import RefitError

logger = logging.getLogger(__name__)

__all__ = ["CudaDriver", "DriverLibrary", "driver_of", "load_driver"]

_FLUSH_OPTIONS, _WRITES_ORDERING = 117, 118
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, ..._WRITES_ORDERING."""
_OPTION_HOST = 1
_ORDERED_FOR_OWNER = 100
_TARGET_CURRENT_CONTEXT, _SCOPE_OWNER = 0, 100
_BUFFER_ID, _MAPPED, _RDMA_CAPABLE, _MEMORY_BLOCK_ID = 7, 13, 15, 20
"""CU_POINTER_ATTRIBUTE_..."""
_INVALID_VALUE = 1
"""What the driver says of an address that it does not know, and of an attribute that it does not know yet."""


class DriverLibrary(Protocol):
    """The entries of ``libcuda`` that are used; each returns a CUresult, 0 for success."""

    def cuInit(self, flags: int) -> int:  # noqa: N802
        """Initialise the driver; does nothing where that was done."""
        ...

    def cuDevicePrimaryCtxRetain(self, context: object, device: object) -> int:  # noqa: N802
        """The context that the CUDA runtime, and so torch, uses on a device."""
        ...

    def cuCtxPushCurrent_v2(self, context: object) -> int:  # noqa: N802
        """Make a context the calling thread's current one."""
        ...

    def cuCtxPopCurrent_v2(self, context: object) -> int:  # noqa: N802
        """Make the one before it current again."""
        ...

    def cuDeviceGet(self, device: object, ordinal: int) -> int:  # noqa: N802
        """The handle of a device by its ordinal."""
        ...

    def cuDeviceGetAttribute(self, value: object, attribute: int, device: object) -> int:  # noqa: N802
        """One integer attribute of a device."""
        ...

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:  # noqa: N802
        """Block until remote writes are visible to ``scope``."""
        ...

    def cuPointerGetAttribute(self, value: object, attribute: int, address: object) -> int:  # noqa: N802
        """One attribute of an address."""
        ...

    def cuMemGetAddressRange_v2(self, base: object, nbytes: object, address: object) -> int:  # noqa: N802
        """The allocation that an address is in."""
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
    """One GPU, seen through the driver, from any thread: each call is made in the GPU's primary context.

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
        self._context = ctypes.c_void_p()
        self._check(self._library.cuInit(0), "cuInit")
        self._check(self._library.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
        retained = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device)
        self._check(retained, "cuDevicePrimaryCtxRetain")  # for as long as the process lives, as torch does
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
            with self._current():
                result = self._library.cuFlushGPUDirectRDMAWrites(_TARGET_CURRENT_CONTEXT, _SCOPE_OWNER)
            self._check(result, "cuFlushGPUDirectRDMAWrites")

    def backing(self, address: int) -> int | None:
        """An id of the memory behind an address, the same as long as the memory is; None where there is none.

        Ids are the driver's, unique in this process; 0 where the driver gives none.

        Raises
        ------
        RefitError
            If the driver fails, as after an illegal access.
        """
        if not self._of_pointer(_MAPPED, address, ctypes.c_int(0)):
            return None
        return (
            self._of_pointer(_MEMORY_BLOCK_ID, address, ctypes.c_uint64(0))
            or self._of_pointer(_BUFFER_ID, address, ctypes.c_uint64(0))
            or 0
        )

    def can_be_registered(self, address: int) -> bool:
        """Whether network cards may reach the memory; True where the driver is too old to say."""
        said = self._of_pointer(_RDMA_CAPABLE, address, ctypes.c_int(0))
        return said is None or bool(said)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Base and bytes of the allocation that an address is in.

        Raises
        ------
        RefitError
            If it is in none.
        """
        base, nbytes = ctypes.c_uint64(0), ctypes.c_size_t(0)
        with self._current():
            result = self._library.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address)
            )
        self._check(result, f"cuMemGetAddressRange of {address:#x}")
        return base.value, nbytes.value

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """The GPU's context as the calling thread's: a thread that is new has none."""
        self._check(self._library.cuCtxPushCurrent_v2(self._context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._check(self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), "cuCtxPopCurrent")

    def _of_pointer(self, attribute: int, address: int, value: ctypes.c_int | ctypes.c_uint64) -> int | None:
        """An attribute of an address; None where the driver does not know the one or the other."""
        with self._current():
            result = self._library.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address))
        if result == _INVALID_VALUE:
            return None
        self._check(result, f"pointer attribute {attribute} of {address:#x}")
        return int(value.value)

    def _attribute(self, device: ctypes.c_int, attribute: int) -> int:
        value = ctypes.c_int(0)
        self._check(
            self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), f"attribute {attribute}"
        )
        return value.value

    def _check(self, result: int, call: str) -> None:
        if result:
            raise RefitError(f"GPU {self.number}: the CUDA driver answers {call} with error {result}")


@cache
def driver_of(number: int) -> CudaDriver:
    """The driver of one GPU, in the context that torch uses.

    Raises
    ------
    RefitError
        If there is no driver or no such GPU.
    """
    return CudaDriver(number)
