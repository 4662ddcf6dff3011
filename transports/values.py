"""What a transport is asked with and answers with: deadlines, capabilities, statistics, memory.

They are plain values; `reshard.transports.base` has the protocol that they are of, and gives them their public names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from reshard.transports.regions import MemoryKind, Region

AbortScope = Literal["peer", "agent", "none"]


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """Return ``timeout_s`` if it is a finite number over 0.

    Raises
    ------
    ValueError
        For 0, negative, infinite and NaN.
    """
    if type(timeout_s) is float and 0.0 < timeout_s < math.inf:
        return timeout_s
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise ValueError(f"{name}: got {timeout_s!r}, expected a finite number of seconds over 0")
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise ValueError(f"{name}: got {timeout_s!r}, expected a finite number of seconds over 0")
    return float(timeout_s)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do.

    Attributes
    ----------
    memory_kinds : tuple of str
        Kinds that it can read from and write to.
    one_sided : bool
        The peer's Python takes no part in a read.
    strided_rows : bool
        (N, 5) lists reach the native library as they are; otherwise they are expanded into runs.
    abort_scope : "peer", "agent" or "none"
        What must be torn down until an abandoned read can no longer write: the connection to its peer, the
        whole native agent (healthy peers drain first), or nothing helps but waiting.
    max_runs : int
        Most runs in one prepared list.
    needs_registration : bool
        Destinations must be registered before they are used.
    cross_process, cross_host : bool
        Reach.
    """

    memory_kinds: tuple[MemoryKind, ...]
    one_sided: bool
    strided_rows: bool
    abort_scope: AbortScope
    max_runs: int
    needs_registration: bool
    cross_process: bool
    cross_host: bool


class PeerStats(NamedTuple):
    """One peer's share.

    Attributes
    ----------
    bytes, n_descriptors : int
        Payload, and runs handed to the native library.
    seconds : float
        From the first post to the last completion.
    post_seconds : float
        Inside native posts, which over CMA is the copy itself.
    native_seconds : float
        The native library's own measure, 0.0 where it has none or telemetry is off.
    """

    bytes: int
    n_descriptors: int
    seconds: float
    post_seconds: float = 0.0
    native_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Outcome of one ``wait``.

    Attributes
    ----------
    bytes : int
        Payload bytes that landed.
    seconds : float
        From the first post to the last completion.
    n_descriptors : int
        Runs handed to the native library, after merging.
    per_peer : mapping of str to PeerStats
        By peer name.
    """

    bytes: int
    seconds: float
    n_descriptors: int
    per_peer: Mapping[str, PeerStats] = field(default_factory=dict)

    @property
    def gbytes_per_s(self) -> float:
        """Payload rate in 10**9 bytes per second; 0.0 for an empty transfer."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Allocation:
    """Memory that a transport can serve to other processes; a context manager.

    Attributes
    ----------
    array : ndarray of uint8, shape (nbytes,)
        A view of it.  For device memory (``region.memory == "vram"``) an array of length 0: use
        ``region.owner``.
    region : Region
        Ready for `Transport.register`; it keeps the memory alive, so closing an allocation under a
        registration or a quarantine frees nothing until that ends.
    """

    __slots__ = ("_closed", "array", "region")

    def __init__(self, array: npt.NDArray[np.uint8], region: Region) -> None:
        self.array = array
        self.region = region
        self._closed = False

    def close(self) -> None:
        """Drop this reference to the memory; idempotent."""
        if not self._closed:
            self._closed = True
            self.array = np.zeros(0, np.uint8)
            self.region = Region(self.region.address, 0, self.region.memory, self.region.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
