"""Are weights in memory now, and in the same memory as before? Asked once a refit, before they are touched.

An address outlives its memory: an engine that sleeps (vLLM's sleep mode, its ``CuMemAllocator``) unmaps its weights and
keeps the addresses, and when it wakes other memory is behind them. Reading such an address ends the process; a
registration made before leads to memory that is somebody else's by now.

1. `span_of` says which addresses a tensor takes.
2. `backing_of` asks what stands behind them: host addresses are looked up in ``/proc/self/maps``, in one pass over it;
   of a GPU's the driver is asked for the first and the last byte.
3. `require_mapped` raises for the first that has nothing behind it, or something else than before.

Host memory that was unmapped and mapped anew meanwhile is not told apart: it has no id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.cuda_driver import CudaDriver, driver_of
from reshard.refit.errors import UnmappedMemoryError
from reshard.refit.tensors import is_torch

if TYPE_CHECKING:
    import torch

    from reshard.refit.tensors import ArrayLike

logger = logging.getLogger(__name__)

__all__ = ["Backing", "LiveWeights", "Span", "backing_of", "require_mapped", "span_of", "spans_of"]

UInt64 = npt.NDArray[np.uint64]

MAPS = "/proc/self/maps"
Backing = tuple[int, int] | None
"""Ids of the memory behind a span's first and last byte; None where a part of it has none."""


@dataclass(frozen=True, slots=True)
class Span:
    """Addresses ``[address, address + nbytes)`` of some device (``cpu``, ``cuda:1``), and what they hold."""

    name: str
    address: int
    nbytes: int
    device: str = "cpu"

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.address + self.nbytes


def span_of(name: str, data: ArrayLike) -> Span:
    """The addresses between the first and the last element of an array or a tensor of any strides.

    Raises
    ------
    UnmappedMemoryError
        A torch tensor whose storage is smaller than the tensor, as after ``storage.resize_(0)``.
    """
    if is_torch(data):
        tensor: torch.Tensor = data  # type: ignore[assignment]
        try:
            held, address = int(tensor.untyped_storage().nbytes()), int(tensor.data_ptr())
        except (RuntimeError, NotImplementedError):
            return Span(name, 0, 0, str(tensor.device))
        item = int(tensor.element_size())
        if tensor.is_contiguous():
            nbytes = int(tensor.numel()) * item
        else:
            lengths = zip(tensor.shape, tensor.stride(), strict=True)
            nbytes = (sum((int(n) - 1) * int(s) for n, s in lengths) + 1) * item if tensor.numel() else 0
        needed = int(tensor.storage_offset()) * item + nbytes
        if nbytes and tensor.device.type != "meta" and held < needed:
            raise UnmappedMemoryError(
                f"tensor {name!r} needs {needed} bytes of its storage, which has {held}: its weights were freed "
                "(resharded, or offloaded); bring them back first",
                names=[name],
            )
        # A wrapper around other tensors says that it has bytes, and has no address.
        return Span(name, address, nbytes, str(tensor.device)) if nbytes and address else Span(name, 0, 0)
    array = np.asarray(data)
    if not array.size:
        return Span(name, 0, 0)
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    first = int(array.ctypes.data) + sum(r for r in reach if r < 0)
    return Span(name, first, sum(abs(r) for r in reach) + array.itemsize)


def backing_of(spans: Sequence[Span], *, drivers: Callable[[int], CudaDriver] | None = None) -> list[Backing]:
    """What stands behind each span; for an empty one, and on devices that are neither host nor CUDA, ``(0, 0)``.

    Parameters
    ----------
    drivers
        A GPU's driver by its ordinal.

    Raises
    ------
    RefitError
        If a GPU's driver cannot be asked.
    """
    ask = drivers if drivers is not None else driver_of
    found: list[Backing] = [(0, 0)] * len(spans)
    devices = [span.device for span in spans]
    if "cpu" in devices:
        for i in np.flatnonzero(_unmapped(_ranges(spans))).tolist():
            found[i] = None if devices[i] == "cpu" else found[i]
    for i in [i for i, device in enumerate(devices) if device != "cpu"]:
        span, (kind, _, number) = spans[i], devices[i].partition(":")
        if span.nbytes and kind == "cuda":
            driver = ask(int(number or 0))
            first, last = driver.backing(span.address), driver.backing(span.stop - 1)
            found[i] = (first, last) if first is not None and last is not None else None
    return found


def require_mapped(
    spans: Sequence[Span],
    whose: str,
    *,
    way_out: str,
    registered: Sequence[Backing] = (),
    drivers: Callable[[int], CudaDriver] | None = None,
) -> list[Backing]:
    """Raise unless all spans have memory behind them; returns what `backing_of` says.

    Parameters
    ----------
    whose
        Begins the message: ``"slot 'trainer-0'"``.
    way_out
        Ends it: what to do.
    registered
        What stood behind them when they were registered; it must be the same still.

    Raises
    ------
    UnmappedMemoryError
        Naming the first such span and how many there are.
    """
    now = backing_of(spans, drivers=drivers)
    if None in now:
        gone = [span for span, behind in zip(spans, now, strict=True) if behind is None]
        raise UnmappedMemoryError(
            f"{whose}: {_describe(gone)} not mapped: an engine that sleeps gives its memory back; {way_out}",
            names=[span.name for span in gone],
        )
    if registered:
        moved = [s for s, a, b in zip(spans, registered, now, strict=True) if a != b]
        if moved:
            raise UnmappedMemoryError(
                f"{whose}: {_describe(moved)} mapped to other memory than when it was registered: it slept and was "
                f"woken since; {way_out}",
                names=[span.name for span in moved],
            )
    return now


class LiveWeights:
    """An engine's weights, wherever they are; asked of it anew when its memory has changed.

    Parameters
    ----------
    engine
        May have ``live_spans() -> Sequence[Span]``, as those in `reshard.refit.engines` have; else nothing is known.
    whose
        Begins messages: ``"member 'tp0'"``.
    """

    def __init__(self, engine: object, whose: str) -> None:
        self._engine, self._whose = engine, whose
        self._spans: list[Span] = []
        self._host: UInt64 | None = None
        self._as_of: bytes | None = None

    def require_mapped(self, signature: bytes) -> None:
        """Raise unless they are in memory.

        Parameters
        ----------
        signature
            The engine's; what it said of its memory holds as long as this stays the same.

        Raises
        ------
        UnmappedMemoryError
            Naming the first parameter that is not.
        """
        if signature != self._as_of:
            say = getattr(self._engine, "live_spans", None)
            self._spans = list(say()) if callable(say) else []
            on_host = all(span.device == "cpu" or not span.nbytes for span in self._spans)
            self._host, self._as_of = _ranges(self._spans) if on_host else None, signature
        if self._host is not None and not _unmapped(self._host).any():
            return
        way_out = "wake it up before the refit (vLLM: wake_up(tags=['weights']))"
        require_mapped(self._spans, self._whose, way_out=way_out)


def _describe(spans: Sequence[Span]) -> str:
    first = spans[0]
    more = f" and {len(spans) - 1} more are" if len(spans) > 1 else " is"
    return f"{first.name!r} at [{first.address:#x}, {first.stop:#x}) on {first.device}{more}"


def _ranges(spans: Sequence[Span]) -> UInt64:
    """uint64[2, n]: address and bytes of each span."""
    return np.array([[span.address for span in spans], [span.nbytes for span in spans]], np.uint64)


def _unmapped(ranges: UInt64) -> npt.NDArray[np.bool_]:
    """bool[n]: which ranges are no whole part of one stretch of the host's mapped memory.

    Not those that are empty, and none where nobody can say.
    """
    address, nbytes = ranges
    starts, stops = _mapped() if nbytes.any() else ([], [])
    if not starts:
        return np.zeros(len(address), np.bool_)
    at = np.searchsorted(np.array(starts, np.uint64), address, side="right") - 1
    ends = np.array(stops, np.uint64)[np.maximum(at, 0)]
    out: npt.NDArray[np.bool_] = ((at < 0) | (address + nbytes > ends)) & (nbytes > 0)
    return out


def _mapped() -> tuple[list[int], list[int]]:
    """Readable stretches of this process's address space, adjacent ones joined; none where the system cannot say."""
    starts: list[int] = []
    stops: list[int] = []
    try:
        with open(MAPS, "rb") as lines:
            for line in lines:
                span, rights, _ = line.split(b" ", 2)
                if not rights.startswith(b"r"):
                    continue
                low, _, high = span.partition(b"-")
                start, stop = int(low, 16), int(high, 16)
                if stops and stops[-1] == start:
                    stops[-1] = stop
                else:
                    starts.append(start)
                    stops.append(stop)
    except OSError as error:
        logger.debug("%s cannot be read, so mappings are not looked at: %s", MAPS, error)
        return [], []
    return starts, stops


def spans_of(named: Iterable[tuple[str, ArrayLike]]) -> list[Span]:
    """`span_of` of each."""
    return [span_of(name, data) for name, data in named]
