"""Where do a rank's buffers lie, and who works on them there? One protocol, the host's memory or a GPU's.

What a receiver does with a wave is the same everywhere; only the device differs:

1. `Device.quiesce` before the first byte is read: nothing that was launched earlier uses the destinations any more.
2. Once a wave has landed, `Device.flush`: what peers wrote past the processor is visible to the device from here on.
3. `Device.digest` and `Device.run_copies` of the wave, in the order of the device's one stream.
4. One `Device.synchronize`: the digests may be looked at, and the wave's staging may be read into again.

`HostDevice` does 3 on the spot, with NumPy. `reshard.refit.torch_device.TorchDevice` enqueues it on a stream; for tests
it runs on torch's CPU tensors with a stream that records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from reshard.planner.execute import run_copies, run_fills
from reshard.refit.errors import RefitError
from reshard.refit.pinning import Pinned, pin

if TYPE_CHECKING:
    import torch

    from reshard.planner import Plan
    from reshard.refit.checks import Check
    from reshard.transports.base import Allocation
    from reshard.transports.regions import MemoryKind, Region

    Memory: TypeAlias = "npt.NDArray[np.uint8] | torch.Tensor"
    """A row of bytes: a uint8 array of the host, or a uint8 tensor of a device; one dim, contiguous."""

__all__ = [
    "HOST",
    "PINNED_HOST",
    "CellRows",
    "Device",
    "HostDevice",
    "address_of",
    "device_of_engine",
    "host_bytes",
    "tensor_of",
]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CellRows:
    """Cells that lie in one row of bytes.

    Attributes
    ----------
    memory
        The row.
    offset_bytes, nbytes : int64[n_cells]
        Where they lie in it.
    tags : uint64[n_cells, 2]
        Of `reshard.refit.digests.cell_tag`.
    """

    memory: Memory
    offset_bytes: Int64
    nbytes: Int64
    tags: U64


class Device(Protocol):
    """Memory of one kind, and the one stream of work on it. Work is done in order; `synchronize` waits for it."""

    @property
    def memory(self) -> MemoryKind:
        """What transports call this kind of memory."""
        ...

    @property
    def number(self) -> int:
        """The device's ordinal; 0 for the host."""
        ...

    @property
    def in_bulk(self) -> bool:
        """Whether `digest` does many cells at once, so that nothing is to be done while a wave is read."""
        ...

    def bytes_of(self, allocation: Allocation) -> Memory:
        """The bytes of an allocation of this device."""
        ...

    def lock(self, region: Region) -> Pinned | None:
        """Page-lock an allocation that copies between host and GPU go through; None where there is nothing to lock."""
        ...

    def quiesce(self) -> None:
        """Wait for everything launched on the device so far, by anyone in this process."""
        ...

    def flush(self) -> None:
        """Make visible to the device what peers have written into its memory."""
        ...

    def fill(self, memory: Memory, value: int) -> None:
        """Set all bytes."""
        ...

    def put(self, memory: Memory, data: U8) -> None:
        """Write host bytes into ``memory``, of the same size."""
        ...

    def get(self, memory: Memory) -> U8:
        """A host copy (or, on the host, the bytes themselves), after waiting for the work so far."""
        ...

    def run_fills(self, plan: Plan, buffers: Sequence[Memory]) -> None:
        """Write the plan's constants; as `reshard.planner.execute.run_fills`."""
        ...

    def run_copies(self, plan: Plan, wave: int, staging: Memory, buffers: Sequence[Memory]) -> None:
        """Copy (and cast) what a wave staged; as `reshard.planner.execute.run_copies`."""
        ...

    def digest(self, checks: Sequence[Check], staging: Memory, buffers: Sequence[Memory]) -> Callable[[], U64] | None:
        """Digest cells where they landed.

        Returns
        -------
        callable or None
            Gives uint64[len(checks), 2]; call it after `synchronize`. None where the host's threads do it better.
        """
        ...

    def digest_cells(self, rows: Sequence[CellRows]) -> U64:
        """Digests of all cells, uint64[n_cells, 2], in the order given; waits for them once."""
        ...

    def synchronize(self) -> None:
        """Wait for the work on this device's stream."""
        ...


class HostDevice:
    """Host memory: everything is done on the spot, and peers' writes are seen as soon as they are reported.

    Parameters
    ----------
    locked
        Whether its buffers are page-locked, since a GPU's memory is copied from or into them.
    """

    memory: MemoryKind = "dram"
    number = 0
    in_bulk = False

    def __init__(self, *, locked: bool = False) -> None:
        self.locked = locked

    def bytes_of(self, allocation: Allocation) -> Memory:
        """See `Device.bytes_of`."""
        return allocation.array

    def lock(self, region: Region) -> Pinned | None:
        """See `Device.lock`."""
        return pin(region.address, region.nbytes) if self.locked else None

    def quiesce(self) -> None:
        """Nothing is ever under way."""

    def flush(self) -> None:
        """Host memory is coherent."""

    def fill(self, memory: Memory, value: int) -> None:
        """See `Device.fill`."""
        host_bytes(memory)[:] = value

    def put(self, memory: Memory, data: U8) -> None:
        """See `Device.put`."""
        host_bytes(memory)[:] = data

    def get(self, memory: Memory) -> U8:
        """The bytes themselves."""
        return host_bytes(memory)

    def run_fills(self, plan: Plan, buffers: Sequence[Memory]) -> None:
        """See `Device.run_fills`."""
        run_fills(plan, [host_bytes(b) for b in buffers])

    def run_copies(self, plan: Plan, wave: int, staging: Memory, buffers: Sequence[Memory]) -> None:
        """See `Device.run_copies`."""
        run_copies(plan, wave, host_bytes(staging), [host_bytes(b) for b in buffers])

    def digest(self, checks: Sequence[Check], staging: Memory, buffers: Sequence[Memory]) -> None:
        """None: threads digest one cell after the other while more is read (`reshard.refit.verify`)."""

    def digest_cells(self, rows: Sequence[CellRows]) -> U64:
        """See `Device.digest_cells`."""
        from reshard.refit.digests import digest_many

        out = np.zeros((sum(len(row.nbytes) for row in rows), 2), np.uint64)
        end = 0
        for row in rows:
            first, end = end, end + len(row.nbytes)
            digest_many(host_bytes(row.memory), row.offset_bytes, row.nbytes, row.tags, out[first:end])
        return out

    def synchronize(self) -> None:
        """Nothing is ever under way."""


HOST = HostDevice()
PINNED_HOST = HostDevice(locked=True)
"""Host memory beside a GPU that the transport does not reach."""


def host_bytes(memory: Memory) -> U8:
    """``memory`` as an array.

    Raises
    ------
    RefitError
        If it lies on a device.
    """
    if isinstance(memory, np.ndarray):
        return memory
    raise RefitError(f"{memory.numel()} bytes on {memory.device} were given to what works on host memory only")


def tensor_of(memory: Memory) -> torch.Tensor:
    """``memory`` as a torch tensor, where it lies."""
    from reshard.planner.errors import require

    require("torch", extra="torch")
    import torch

    return torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory


def address_of(memory: Memory) -> int:
    """Where its first byte is, in its own device's address space."""
    return int(memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr())


def device_of_engine(engine: object, memory_kinds: Sequence[str]) -> Device:
    """The device that holds an engine's weights, if the engine says so and the transport reaches it; else the host.

    Host memory is page-locked where the weights lie on a GPU all the same: what is installed is copied to it.

    Parameters
    ----------
    engine
        May have ``destination_device() -> str`` (``"cuda:1"``, ``"cpu"``), as `reshard.refit.engines.loader` has.
    memory_kinds
        Of the transport's capabilities.
    """
    say = getattr(engine, "destination_device", None)
    where = str(say()) if callable(say) else "cpu"
    if where.partition(":")[0] != "cuda":
        return HOST
    if "vram" not in memory_kinds:
        return PINNED_HOST
    from reshard.refit.torch_device import TorchDevice

    return TorchDevice(where)
