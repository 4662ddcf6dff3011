"""A GPU made of host memory: torch tensors that say that they lie on it, its driver, its device, its transport.

Addresses are real ones of this process, so what is registered as device memory can be read; everything that tells the
two kinds apart (registration, rows, table, stream, driver) sees a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import torch
from tests.refit.held_transport import HeldTransport

from reshard.refit.cuda_driver import CudaDriver
from reshard.refit.torch_device import TorchDevice
from reshard.transports import backend as b

NUMBER = 1
INVALID_VALUE = 1
MAPPED, RDMA_CAPABLE, BLOCK_ID, BUFFER_ID = 13, 15, 20, 7


class GpuTensor(torch.Tensor):
    """A host tensor that says that it is on GPU 1."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it says that it is."""
        return torch.device("cuda", NUMBER)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as one of the GPU, over the same memory."""
    return tensor.as_subclass(GpuTensor)


class FakeContexts:
    """The part of ``libcuda`` that has to do with contexts: what needs one asks `require_context`."""

    PRIMARY = 4242

    def __init__(self) -> None:
        self.local = threading.local()

    @property
    def stack(self) -> list[int]:
        """The calling thread's contexts; none in a new thread."""
        if not hasattr(self.local, "stack"):
            self.local.stack = []
        return self.local.stack

    def require_context(self) -> None:
        """Fail unless the GPU's context is the calling thread's current one."""
        assert self.stack[-1:] == [self.PRIMARY], "the driver was asked without the GPU's context"

    def cuInit(self, flags):
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = self.PRIMARY
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.stack.pop()
        return 0


class FakeLibrary(FakeContexts):
    """``libcuda`` that knows some segments: base, bytes, and whether memory is behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: dict[int, int] = {}
        self.block: dict[int, int] = {}
        self.rdma_capable = True
        self.knows_blocks = True
        self.failure = 0
        self.asked: list[int] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor's memory one allocation of the GPU."""
        self.segments[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        self.block[tensor.data_ptr()] = len(self.block) + 100
        return tensor

    def sleep(self) -> None:
        """Take the memory away; the addresses stay."""
        self.block.clear()

    def wake(self) -> None:
        """Put other memory behind the addresses."""
        self.block = {base: 500 + i for i, base in enumerate(self.segments)}

    def _base(self, address: int) -> int | None:
        return next((base for base, n in self.segments.items() if base <= address < base + n), None)

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = 100
        return 0

    def cuFlushGPUDirectRDMAWrites(self, target, scope):
        return 0

    def cuPointerGetAttribute(self, value, attribute, address):
        self.require_context()
        self.asked.append(attribute)
        if self.failure:
            return self.failure
        base = self._base(address.value)
        if base is None:
            return INVALID_VALUE
        if attribute == MAPPED:
            value._obj.value = int(base in self.block)
        elif attribute == RDMA_CAPABLE:
            value._obj.value = int(self.rdma_capable)
        elif attribute == BLOCK_ID and self.knows_blocks:
            value._obj.value = self.block[base]
        elif attribute == BUFFER_ID:
            value._obj.value = 7000 + self.block[base]
        else:
            return INVALID_VALUE
        return 0

    def cuMemGetAddressRange_v2(self, base, nbytes, address):
        self.require_context()
        found = self._base(address.value)
        if found is None:
            return INVALID_VALUE
        base._obj.value, nbytes._obj.value = found, self.segments[found]
        return 0


def driver(library: FakeLibrary) -> CudaDriver:
    """The driver of GPU 1 over a fake library."""
    return CudaDriver(NUMBER, library)


class RecordingRuntime:
    """A stream that writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Work that is enqueued inside."""
        self.log.append("enqueue")
        yield

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.log.append("synchronize")

    def synchronize_device(self) -> None:
        """Wait for all streams."""
        self.log.append("quiesce")

    def flush(self) -> None:
        """Make peers' writes visible."""
        self.log.append("flush")


class FakeGpu(TorchDevice):
    """The device of `GpuTensor`; its stream records."""

    def __init__(self) -> None:
        self.runtime = RecordingRuntime()
        super().__init__("cpu", runtime=self.runtime)
        self.memory, self.number = "vram", NUMBER
        self._device = torch.device("cuda", NUMBER)

    def _own(self, memory):
        return super()._own(memory).as_subclass(torch.Tensor)


class GpuTransport(HeldTransport):
    """Serves and reads the fake GPU's memory too."""

    name = "fake-gpu"
    capabilities = b.Capabilities(("dram", "vram"), True, False, "none", 1 << 24, True, False, False)

    def allocate(self, nbytes: int, *, memory: b.MemoryKind = "dram", device: int = 0) -> b.Allocation:
        """Host memory, or the GPU's, whose owner is a tensor."""
        if memory == "dram":
            return b.allocate_host(nbytes)
        tensor = on_gpu(torch.zeros(max(nbytes, 1), dtype=torch.uint8))
        return b.Allocation(np.zeros(0, np.uint8), b.Region(tensor.data_ptr(), nbytes, "vram", device, tensor))
