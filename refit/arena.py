"""A receiver's registered memory: one allocation, on the host or a device, that holds many named buffers.

Shadow buffers, staging, and the headers and digests of the holders each have an arena. An arena is allocated and
registered once and used again at each refit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.devices import HOST, Device

if TYPE_CHECKING:
    from reshard.refit.devices import Memory
    from reshard.transports import Transport

__all__ = ["Arena"]

U64 = npt.NDArray[np.uint64]

_ALIGN = 64


class Arena:
    """Named buffers in one registered allocation.

    Parameters
    ----------
    sizes
        Name to bytes, in order.
    device
        Whose memory it is; the host's by default.
    on_allocate
        Told the bytes of each allocation (tests count staging with it).
    """

    def __init__(
        self,
        transport: Transport,
        sizes: Mapping[str, int],
        *,
        device: Device = HOST,
        on_allocate: Callable[[int], None] | None = None,
    ) -> None:
        offsets: list[int] = []
        end = 0
        for size in sizes.values():
            offsets.append(end)
            end += -(-size // _ALIGN) * _ALIGN
        self.nbytes = max(end, 1)
        if on_allocate is not None:
            on_allocate(self.nbytes)
        self._allocation = transport.allocate(self.nbytes, memory=device.memory, device=device.number)
        try:
            self._registration = transport.register([self._allocation.region])
        except BaseException:
            self._allocation.close()
            raise
        memory = device.bytes_of(self._allocation)
        self.memory: Memory = memory
        self.base = self._allocation.region.address
        self.buffers: dict[str, Memory] = {
            name: memory[at : at + size] for (name, size), at in zip(sizes.items(), offsets, strict=True)
        }
        self.bases: U64 = np.array([self.base + at for at in offsets], np.uint64)

    def views(self, names: Sequence[str]) -> list[Memory]:
        """Buffers by name, in the order asked."""
        return [self.buffers[name] for name in names]

    def close(self) -> None:
        """Withdraw the registration. Arrays handed out keep the memory alive as long as they live. Idempotent."""
        self._registration.close()
        self.buffers = {}
        self.memory = np.zeros(0, np.uint8)
        self._allocation.close()
