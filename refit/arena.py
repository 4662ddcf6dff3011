"""A receiver's registered memory: one allocation, on the host or a device, that holds many named buffers.

Shadow buffers, staging, and the headers and digests of the holders each have an arena. An arena is allocated and
registered once and used again at each refit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.devices import HOST, Device
from reshard.refit.residency import Span, backing_of, require_mapped

if TYPE_CHECKING:
    from reshard.refit.devices import Memory
    from reshard.transports import Transport

__all__ = ["Arena", "aligned", "extent_bytes", "require_arenas"]

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
            end += aligned(size)
        self.nbytes = max(end, 1)
        if on_allocate is not None:
            on_allocate(self.nbytes)
        where = "cpu" if device.memory == "dram" else f"cuda:{device.number}"
        self._allocation = transport.allocate(self.nbytes, memory=device.memory, device=device.number)
        self.base = self._allocation.region.address
        self.span = Span(next(iter(sizes), "arena"), self.base, self.nbytes, where)
        """Its addresses."""
        try:
            (self.backing,) = backing_of([self.span])
            """What stood behind them when they were registered."""
            self._registration = transport.register([self._allocation.region])
        except BaseException:
            self._allocation.close()
            raise
        self._pinned = device.lock(self._allocation.region)
        memory = device.bytes_of(self._allocation)
        self.memory: Memory = memory
        self.offsets = dict(zip(sizes, offsets, strict=True))
        """Where each buffer starts in it, bytes."""
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
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.close()
        self.buffers = {}
        self.memory = np.zeros(0, np.uint8)
        self._allocation.close()


def aligned(nbytes: int) -> int:
    """Bytes that a buffer takes in an arena."""
    return -(-nbytes // _ALIGN) * _ALIGN


def extent_bytes(sizes: Iterable[int]) -> int:
    """Bytes of an arena of buffers of these sizes."""
    return sum(aligned(size) for size in sizes)


def require_arenas(arenas: Sequence[Arena], whose: str) -> None:
    """Raise unless all arenas have the memory that was registered.

    Raises
    ------
    UnmappedMemoryError
        Naming the first; it is of no use any more, also once the engine is awake.
    """
    require_mapped(
        [arena.span for arena in arenas],
        whose,
        way_out="wake the engine up and refit again: the buffers are allocated and registered anew then",
        registered=[arena.backing for arena in arenas],
    )
