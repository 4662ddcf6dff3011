"""Buffers as torch tensors, and the work on them on one stream: GPUs, and torch's CPU tensors where there is none.

What a CUDA stream, the flush and the device-wide wait are is in `Runtime`; the CPU's does nothing, and tests give
one that records. Everything else is the same code on either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from reshard.planner.dtypes import BY_CODE
from reshard.planner.errors import require
from reshard.refit import settings
from reshard.refit.checks import STAGING, Check
from reshard.refit.cuda_driver import driver_of
from reshard.refit.digests_torch import digest_cells
from reshard.refit.engines.places import torch_dtype
from reshard.refit.errors import RefitError
from reshard.refit.tensors import is_torch
from reshard.refit.torch_views import Strided, copy_runs, elements_of, put_elements

if TYPE_CHECKING:
    import torch

    from reshard.planner import Plan
    from reshard.refit.devices import CellRows, Memory
    from reshard.refit.pinning import Pinned
    from reshard.transports.base import Allocation
    from reshard.transports.regions import MemoryKind, Region

__all__ = ["CpuRuntime", "CudaRuntime", "Runtime", "TorchDevice"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


class Runtime(Protocol):
    """A stream, and what else of a device's runtime is needed."""

    def on_stream(self) -> AbstractContextManager[object]:
        """Work that is enqueued inside goes on the stream."""
        ...

    def synchronize(self) -> None:
        """Wait for the stream."""
        ...

    def synchronize_device(self) -> None:
        """Wait for all streams of the device."""
        ...

    def flush(self) -> None:
        """Make peers' writes visible to what is enqueued next."""
        ...


class CpuRuntime:
    """Torch on the CPU: work is done when the call returns."""

    def on_stream(self) -> AbstractContextManager[object]:
        """See `Runtime.on_stream`."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def synchronize_device(self) -> None:
        """Nothing is under way."""

    def flush(self) -> None:
        """Host memory is coherent."""


class CudaRuntime:
    """One stream of one GPU, beside the streams that torch and the engine use.

    Parameters
    ----------
    number
        The GPU's ordinal.
    """

    def __init__(self, number: int) -> None:
        require("torch", extra="torch")
        import torch

        self._torch_stream = torch.cuda.Stream(device=number)  # type: ignore[no-untyped-call]
        self._number = number
        self._driver = driver_of(number)

    def on_stream(self) -> AbstractContextManager[object]:
        """See `Runtime.on_stream`."""
        import torch

        return torch.cuda.stream(self._torch_stream)

    def synchronize(self) -> None:
        """See `Runtime.synchronize`."""
        self._torch_stream.synchronize()

    def synchronize_device(self) -> None:
        """See `Runtime.synchronize_device`."""
        import torch

        torch.cuda.synchronize(self._number)

    def flush(self) -> None:
        """See `Runtime.flush`."""
        self._driver.flush()


class TorchDevice:
    """See `reshard.refit.devices.Device`.

    Parameters
    ----------
    device
        ``"cuda:1"``, or ``"cpu"`` for torch's own CPU tensors over host memory.
    runtime
        Its stream; a new one by default.

    Raises
    ------
    RefitError
        A device that is neither, or memory that cannot be registered.
    """

    def __init__(self, device: str, *, runtime: Runtime | None = None) -> None:
        require("torch", extra="torch")
        import torch

        self._device = torch.device(device)
        if self._device.type not in ("cuda", "cpu"):
            raise RefitError(f"device {device!r}: expected 'cpu' or 'cuda:N'")
        self.memory: MemoryKind = "dram"
        self.number = 0
        self.in_bulk = True
        if self._device.type == "cuda":
            if variable := settings.expandable_segments():
                raise RefitError(
                    f"device {device!r}: memory in expandable CUDA segments cannot be registered; unset "
                    f"expandable_segments in {variable}"
                )
            self.memory = "vram"
            self.number = self._device.index if ":" in device else torch.cuda.current_device()
            self._device = torch.device("cuda", self.number)
            runtime = runtime if runtime is not None else CudaRuntime(self.number)
        self._runtime: Runtime = runtime if runtime is not None else CpuRuntime()

    # -- memory

    def bytes_of(self, allocation: Allocation) -> Memory:
        """See `Device.bytes_of`."""
        import torch

        if self.memory == "dram":
            return torch.from_numpy(allocation.array)
        owner = allocation.region.owner
        if not is_torch(owner):
            raise RefitError(f"a transport's device memory must be a torch tensor, got {type(owner).__name__}")
        tensor: torch.Tensor = owner  # type: ignore[assignment]
        return tensor[: allocation.region.nbytes]

    def lock(self, region: Region) -> Pinned | None:
        """See `Device.lock`: a GPU's memory needs no lock, and torch's CPU tensors stand for a GPU's."""
        return None

    def fill(self, memory: Memory, value: int) -> None:
        """See `Device.fill`."""
        with self._runtime.on_stream():
            self._own(memory).fill_(value)

    def put(self, memory: Memory, data: U8) -> None:
        """See `Device.put`."""
        import torch

        with self._runtime.on_stream():
            self._own(memory).copy_(torch.from_numpy(data))

    def get(self, memory: Memory) -> U8:
        """See `Device.get`."""
        with self._runtime.on_stream():
            found = self._own(memory).to("cpu", non_blocking=True)
        self._runtime.synchronize()
        raw: U8 = found.numpy()
        return raw

    # -- order

    def quiesce(self) -> None:
        """See `Device.quiesce`."""
        self._runtime.synchronize_device()

    def flush(self) -> None:
        """See `Device.flush`."""
        self._runtime.flush()

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self._runtime.synchronize()

    # -- work

    def run_fills(self, plan: Plan, buffers: Sequence[Memory]) -> None:
        """See `Device.run_fills`."""
        import torch

        fills = plan.fills
        with self._runtime.on_stream(), torch.no_grad():
            for i in range(len(fills)):
                unit = int(fills.unit[i])
                shape = tuple(int(c[i]) for c in fills.count)
                strides = tuple(int(c[i]) for c in fills.dst_stride_bytes)
                at = Strided(int(fills.dst_offset_bytes[i]), shape, strides, unit)
                if at.empty:
                    continue
                target = self._own(buffers[int(fills.buffer[i])])
                value = torch.frombuffer(bytearray(fills.values[i]), dtype=torch.uint8).to(target.device)
                copy_runs(value.expand(*shape, unit).contiguous().view(-1), _dense(shape, unit), target, at)

    def run_copies(self, plan: Plan, wave: int, staging: Memory, buffers: Sequence[Memory]) -> None:
        """See `Device.run_copies`."""
        import torch

        copies = plan.copies(wave)
        if not len(copies):
            return
        source = self._own(staging)
        with self._runtime.on_stream(), torch.no_grad():
            for i in range(len(copies)):
                target = self._own(buffers[int(copies.buffer[i])])
                count = tuple(int(c[i]) for c in copies.count)
                src_at, dst_at = int(copies.staging_offset_bytes[i]), int(copies.dst_offset_bytes[i])
                src_strides = tuple(int(c[i]) for c in copies.src_stride_bytes)
                dst_strides = tuple(int(c[i]) for c in copies.dst_stride_bytes)
                run, src_unit, dst_unit = (int(c[i]) for c in (copies.run_units, copies.src_unit, copies.dst_unit))
                src, dst = BY_CODE[int(copies.src_code[i])].label, BY_CODE[int(copies.dst_code[i])].label
                if src == dst:
                    copy_runs(
                        source,
                        Strided(src_at, count, src_strides, run * src_unit),
                        target,
                        Strided(dst_at, count, dst_strides, run * dst_unit),
                    )
                    continue
                taken = Strided(src_at, (*count, run), (*src_strides, src_unit), src_unit)
                if taken.empty:
                    continue
                values = elements_of(source, taken, torch_dtype(src)).to(torch_dtype(dst))
                put_elements(target, Strided(dst_at, (*count, run), (*dst_strides, dst_unit), dst_unit), values)

    def digest(self, checks: Sequence[Check], staging: Memory, buffers: Sequence[Memory]) -> Callable[[], U64]:
        """See `Device.digest`: cells in a row are digested where they lie, others are gathered first."""
        import torch

        in_a_row: dict[int, list[int]] = {}
        gathered: list[int] = []
        for i, check in enumerate(checks):
            first = check.pieces[0]
            if not first.at and first.contiguous():
                in_a_row.setdefault(first.buffer, []).append(i)
            else:
                gathered.append(i)
        found: list[tuple[list[int], torch.Tensor]] = []
        with self._runtime.on_stream(), torch.no_grad():
            for buffer, rows in in_a_row.items():
                memory = self._own(staging if buffer == STAGING else buffers[buffer])
                offsets = [checks[i].pieces[0].offset for i in rows]
                found.append((rows, self._digests(memory, offsets, [checks[i] for i in rows])))
            if gathered:
                cells = [checks[i] for i in gathered]
                ends = np.cumsum([-(-c.nbytes // 8) * 8 for c in cells]).tolist()
                offsets = [0, *ends[:-1]]
                scratch = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
                for check, at in zip(cells, offsets, strict=True):
                    self._gather(check, staging, buffers, scratch[at : at + check.nbytes])
                found.append((gathered, self._digests(scratch, offsets, cells)))

        def result() -> U64:
            out = np.zeros((len(checks), 2), np.uint64)
            for rows, digests in found:
                out[rows] = digests.numpy().view(np.uint64)
            return out

        return result

    def digest_cells(self, rows: Sequence[CellRows]) -> U64:
        """See `Device.digest_cells`: all rows are enqueued, and come to the host together."""
        import torch

        with self._runtime.on_stream(), torch.no_grad():
            made = [digest_cells(self._own(r.memory), r.offset_bytes, r.nbytes, r.tags) for r in rows if len(r.nbytes)]
            found = torch.cat(made).to("cpu", non_blocking=True) if made else torch.zeros(0, 2, dtype=torch.int64)
        self._runtime.synchronize()
        digests: U64 = found.numpy().view(np.uint64)
        return digests

    # -- helpers

    def _digests(self, memory: torch.Tensor, offsets: Sequence[int], cells: Sequence[Check]) -> torch.Tensor:
        """Enqueued, and their way to (pinned) host memory too."""
        tags = np.array([c.tag for c in cells], np.uint64).reshape(-1, 2)
        sizes = np.array([c.nbytes for c in cells], np.int64)
        return digest_cells(memory, np.array(offsets, np.int64), sizes, tags).to("cpu", non_blocking=True)

    def _gather(self, check: Check, staging: Memory, buffers: Sequence[Memory], into: torch.Tensor) -> None:
        """The pieces of a cell, in the cell's own order."""
        whole = _dense(check.shape, check.pieces[0].inner)
        for piece in check.pieces:
            source = Strided(piece.offset, piece.shape, piece.strides, piece.inner)
            first = [s.start for s in piece.at] or [0] * len(check.shape)
            at = sum(a * s for a, s in zip(first, whole.strides, strict=True))
            steps = [s.step or 1 for s in piece.at] or [1] * len(check.shape)
            strides = tuple(a * s for a, s in zip(steps, whole.strides, strict=True))
            target = Strided(at, piece.shape, strides, piece.inner)
            memory = self._own(staging if piece.buffer == STAGING else buffers[piece.buffer])
            copy_runs(memory, source, into, target)

    def _own(self, memory: Memory) -> torch.Tensor:
        if isinstance(memory, np.ndarray):
            import torch

            if self.memory == "dram":
                return torch.from_numpy(memory)
            raise RefitError(f"{memory.nbytes} bytes of host memory were given to {self._device}")
        if memory.device != self._device:
            raise RefitError(f"{memory.numel()} bytes on {memory.device} were given to {self._device}")
        return memory


def _dense(shape: Sequence[int], inner: int) -> Strided:
    """Row-major elements of ``inner`` bytes."""
    strides = []
    step = inner
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return Strided(0, tuple(shape), tuple(reversed(strides)), inner)
