"""In which allocation does a live tensor lie, so that it can be registered where it is?

1. A host tensor's allocation is its storage (torch) or the array that owns the memory (NumPy).
2. A GPU tensor's is what the driver allocated (``cuMemGetAddressRange``): torch cuts many tensors from one of them, and
   each is registered once.
3. Refused, by name: tensors that are not contiguous, that lie on several devices, that span two allocations, and
   memory that network cards cannot reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from reshard.refit import settings
from reshard.refit.cuda_driver import CudaDriver, driver_of
from reshard.refit.errors import PublishError
from reshard.refit.residency import require_mapped, span_of
from reshard.refit.tensors import LocalTensor, is_torch

if TYPE_CHECKING:
    import torch

    from reshard.refit.devices import Memory

__all__ = ["Home", "bytes_at", "common_device", "homes_of"]


@dataclass(frozen=True, slots=True)
class Home:
    """An allocation, where a tensor starts in it, and what keeps it allocated."""

    base: int
    nbytes: int
    offset_bytes: int
    owner: object


def common_device(tensors: Sequence[LocalTensor]) -> str:
    """``cpu`` or ``cuda:N``: where all tensors lie.

    Raises
    ------
    PublishError
        Tensors on several devices, or on one that is neither.
    """
    places: dict[str, str] = {}
    for tensor in tensors:
        where = str(tensor.data.device) if is_torch(tensor.data) else "cpu"
        if where.partition(":")[0] not in ("cpu", "cuda"):
            raise PublishError(f"tensor {tensor.name!r} is on {where}; expected host memory or a CUDA device")
        places.setdefault(where, tensor.name)
    if len(places) > 1:
        (one, name), (other, second) = list(places.items())[:2]
        raise PublishError(
            f"tensor {name!r} is on {one} and {second!r} on {other}: one slot publishes in place from one device; "
            "give each device a slot of its own, or publish by copy"
        )
    return next(iter(places), "cpu")


def homes_of(
    tensors: Sequence[LocalTensor], whose: str, *, drivers: Callable[[int], CudaDriver] | None = None
) -> list[Home]:
    """Each tensor's allocation, in order.

    Parameters
    ----------
    whose
        Begins messages about memory that is not there: ``"slot 'trainer-0'"``.
    drivers
        A GPU's driver by its ordinal.

    Raises
    ------
    PublishError
        Not contiguous, across two allocations, or in memory that cannot be registered.
    UnmappedMemoryError
        Not in memory at all.
    """
    spans = [span_of(t.name, t.data) for t in tensors]
    require_mapped(spans, whose, way_out="wake the engine up, then publish", drivers=drivers)
    ask = drivers if drivers is not None else driver_of
    found: list[Home] = []
    for tensor, span in zip(tensors, spans, strict=True):
        if not _is_contiguous(tensor):
            raise PublishError(f"tensor {tensor.name!r} is not contiguous in memory; publish it by copy")
        if tensor.n_elems and not span.nbytes:
            raise PublishError(
                f"tensor {tensor.name!r} wraps other tensors and has no memory of its own; publish by copy"
            )
        kind, _, number = span.device.partition(":")
        if kind == "cuda" and span.nbytes:
            found.append(_on_gpu(tensor, span.address, span.nbytes, ask(int(number or 0))))
        else:
            found.append(_on_host(tensor))
    return found


def bytes_at(tensor: LocalTensor) -> Memory:
    """The bytes of a contiguous tensor where they lie: uint8 of shape (nbytes,)."""
    if is_torch(tensor.data):
        import torch

        flat: torch.Tensor = tensor.data.detach().reshape(-1)  # type: ignore[union-attr]
        raw = flat.view(torch.uint8) if flat.numel() else torch.zeros(0, dtype=torch.uint8, device=flat.device)
        return raw.numpy() if raw.device.type == "cpu" else raw
    return np.asarray(tensor.data).reshape(-1).view(np.uint8)


def _is_contiguous(tensor: LocalTensor) -> bool:
    if is_torch(tensor.data):
        return bool(tensor.data.is_contiguous())  # type: ignore[union-attr]
    return bool(np.asarray(tensor.data).flags.c_contiguous)


def _on_gpu(tensor: LocalTensor, address: int, nbytes: int, driver: CudaDriver) -> Home:
    if variable := settings.expandable_segments():
        raise PublishError(
            f"tensor {tensor.name!r} is in an expandable CUDA segment, which cannot be registered; unset "
            f"expandable_segments in {variable}, or publish by copy"
        )
    if not driver.can_be_registered(address):
        raise PublishError(
            f"tensor {tensor.name!r} is in CUDA memory that GPUDirect RDMA does not reach (memory of a virtual "
            "address range, such as expandable segments or a sleep-mode allocator without that flag); publish by copy"
        )
    base, size = driver.allocation_of(address)
    if address + nbytes > base + size:
        raise PublishError(
            f"tensor {tensor.name!r} spans two CUDA allocations: [{address:#x}, {address + nbytes:#x}) leaves "
            f"[{base:#x}, {base + size:#x}); publish by copy"
        )
    return Home(base, size, address - base, tensor.data)


def _on_host(tensor: LocalTensor) -> Home:
    if is_torch(tensor.data):
        data: torch.Tensor = tensor.data  # type: ignore[assignment]
        storage = data.untyped_storage()
        base = int(storage.data_ptr())
        return Home(base, int(storage.nbytes()), int(data.data_ptr()) - base if data.numel() else 0, data)
    array = np.asarray(tensor.data)
    owner = array
    while isinstance(owner.base, np.ndarray) and owner.base.flags.c_contiguous:
        owner = owner.base
    at = int(array.ctypes.data - owner.ctypes.data)
    return Home(int(owner.ctypes.data), int(owner.nbytes), at, owner)
