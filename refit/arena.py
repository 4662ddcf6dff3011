"""A receiver's registered memory: one allocation that holds many named buffers.

Shadow buffers, staging, and the headers and digests of the holders each have an arena. An arena is allocated and
registered once and used again at each refit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from reshard.transports import Transport

__all__ = ["Arena"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

_ALIGN = 64


class Arena:
    """Named buffers in one registered allocation.

    Parameters
    ----------
    sizes
        Name to bytes, in order.
    on_allocate
        Told the bytes of each allocation (tests count staging with it).
    """

    def __init__(
        self, transport: Transport, sizes: Mapping[str, int], *, on_allocate: Callable[[int], None] | None = None
    ) -> None:
        offsets: list[int] = []
        end = 0
        for size in sizes.values():
            offsets.append(end)
            end += -(-size // _ALIGN) * _ALIGN
        self.nbytes = max(end, 1)
        if on_allocate is not None:
            on_allocate(self.nbytes)
        self._allocation = transport.allocate(self.nbytes)
        try:
            self._registration = transport.register([self._allocation.region])
        except BaseException:
            self._allocation.close()
            raise
        memory = self._allocation.array
        self.memory: U8 = memory
        self.base = self._allocation.region.address
        self.buffers: dict[str, U8] = {
            name: memory[at : at + size] for (name, size), at in zip(sizes.items(), offsets, strict=True)
        }
        self.bases: U64 = np.array([self.base + at for at in offsets], np.uint64)

    def views(self, names: Sequence[str]) -> list[U8]:
        """Buffers by name, in the order asked."""
        return [self.buffers[name] for name in names]

    def close(self) -> None:
        """Withdraw the registration. Arrays handed out keep the memory alive as long as they live. Idempotent."""
        self._registration.close()
        self.buffers = {}
        self.memory = np.zeros(0, np.uint8)
        self._allocation.close()
