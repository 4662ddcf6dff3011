"""What a backend does on this host, measured: between this process and one that is started for it.

Three numbers, each the median of several reads: bytes a second at 1 MiB pieces, seconds a descriptor (scattered runs of
256 bytes, so small that copying them costs nothing), and seconds for one small read with everything around it. They are
of one host; over a network the first is another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from reshard.transports.base import Transport, check_timeout, read
from reshard.transports.errors import TransferError, TransferTimeoutError
from reshard.transports.peer_process import PeerProcess, pattern
from reshard.transports.regions import U64
from reshard.transports.registry import open_transport

PIECE_BYTES = 1 << 20
SMALL_BYTES = 256
N_SMALL = 16384
REPEATS = 5
MIN_BYTES = 4 * N_SMALL * SMALL_BYTES
"""Least memory that `measure` needs: small runs must lie apart."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Outcome of `measure`.

    Attributes
    ----------
    bytes_per_s : float
        Payload, in pieces of 1 MiB.
    descriptor_s : float
        Seconds a descriptor, amortised over a long list.
    latency_s : float
        One read of 256 bytes, from post to return, all checks included.
    prepare_s : float
        Seconds a run to prepare a list, once.
    """

    bytes_per_s: float
    descriptor_s: float
    latency_s: float
    prepare_s: float


def measure(
    backend: str, *, nbytes: int = 64 << 20, timeout_s: float = 60.0, settings: Mapping[str, object] | None = None
) -> Rates:
    """Measure a backend.

    Parameters
    ----------
    backend : str
        Name in the registry.
    nbytes : int
        Memory to serve and to read into, at least `MIN_BYTES`.
    timeout_s : float
        Over all of it, but for the start of the other process.
    settings : mapping
        Of both transports.

    Raises
    ------
    ValueError
        For too little memory, or a bad timeout.
    TransportError
        If the backend does not work, or brings wrong bytes.
    """
    if nbytes < MIN_BYTES:
        raise ValueError(f"nbytes: got {nbytes}, expected at least {MIN_BYTES}")
    check_timeout(timeout_s)
    settings = dict(settings or {})
    with PeerProcess(backend, settings) as process:
        endpoint, remote = process.serve(nbytes, 1)
        transport = open_transport(backend, **settings)
        try:
            return _measure(transport, endpoint, remote, nbytes, time.monotonic() + timeout_s)
        finally:
            transport.close()


def measure_copy(nbytes: int = 64 << 20) -> float:
    """Return bytes a second of a strided copy in this process: what staging costs."""
    rows = nbytes // 8192
    source, target = np.ones((rows, 8192), np.uint8), np.zeros((rows, 4096), np.uint8)

    def copy() -> None:
        target[:] = source[:, :4096]

    return target.nbytes / _median(copy)


def _measure(transport: Transport, endpoint: bytes, remote: int, nbytes: int, deadline: float) -> Rates:
    target = transport.allocate(nbytes)
    transport.register([target.region])
    peer = transport.connect(endpoint, timeout_s=_left(deadline, transport.name), name="measured")
    local = target.region.address
    order = np.random.default_rng(0)

    def reading(piece: int, n: int, gap: int) -> tuple[float, float]:
        step = np.arange(n, dtype=np.uint64) * np.uint64(piece + gap)
        here = _rows(np.uint64(local) + step, piece)
        there = _rows(np.uint64(remote) + step[order.permutation(n)], piece)
        start = time.perf_counter()
        prepared = transport.prepare(peer, here, there)
        prepare_s = time.perf_counter() - start
        seconds = _median(lambda: read(transport, [prepared], timeout_s=_left(deadline, transport.name)))
        prepared.close()
        return seconds, prepare_s

    n_pieces = nbytes // PIECE_BYTES
    large_s, _ = reading(PIECE_BYTES, n_pieces, 0)
    bytes_per_s = n_pieces * PIECE_BYTES / large_s
    small_s, prepare_s = reading(SMALL_BYTES, N_SMALL, SMALL_BYTES)
    latency_s, _ = reading(SMALL_BYTES, 1, 0)
    whole = transport.prepare(
        peer, _rows(np.array([local], np.uint64), nbytes), _rows(np.array([remote], np.uint64), nbytes)
    )
    read(transport, [whole], timeout_s=_left(deadline, transport.name))
    if not np.array_equal(target.array, pattern(nbytes, 1)):
        raise TransferError(f"transport {transport.name!r} brought other bytes than were served", peer="measured")
    return Rates(bytes_per_s, max(small_s - latency_s, 0.0) / N_SMALL, latency_s, prepare_s / N_SMALL)


def _rows(address: U64, nbytes: int) -> U64:
    rows = np.zeros((len(address), 3), np.uint64)
    rows[:, 0], rows[:, 1] = address, nbytes
    return rows


def _left(deadline: float, name: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TransferTimeoutError(f"measuring transport {name!r} took longer than its deadline")
    return left


def _median(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
