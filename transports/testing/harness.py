"""What the tests of the contract share: the peer, readers of it, expectations with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from reshard.transports.base import Allocation, Peer, Prepared, Transport, read
from reshard.transports.peer_process import PeerProcess, pattern
from reshard.transports.regions import U64
from reshard.transports.registry import open_transport

KIB, MIB = 1 << 10, 1 << 20
SERVED_BYTES = 8 * MIB
LARGE_BYTES = 72 * MIB
"""More than one slice, so that a deadline or a death falls in the middle of the reading."""
SLACK_S = 20.0
"""How late an error may come on a loaded machine: what waits without a deadline comes later, or never."""
LONG_S = 60.0
"""The deadline of what succeeds, or fails by a fact: it passes only where the machine stands still."""


@contextlib.contextmanager
def raises(*kinds: type[BaseException], within_s: float = SLACK_S) -> Iterator[list[BaseException]]:
    """Expect one of ``kinds`` within ``within_s`` seconds; yields a list that will hold it."""
    caught: list[BaseException] = []
    start = time.monotonic()
    try:
        yield caught
    except kinds as error:
        caught.append(error)
    took = time.monotonic() - start
    names = " or ".join(kind.__name__ for kind in kinds)
    if not caught:
        raise AssertionError(f"expected {names}, nothing was raised")
    if took > within_s:
        raise AssertionError(f"{type(caught[0]).__name__} came after {took:.2f} s, expected within {within_s} s")


def rows(*columns: npt.ArrayLike) -> U64:
    """Return rows from their columns (address, nbytes, and so on), each a scalar or an array; device 0."""
    address, nbytes, *more = np.broadcast_arrays(*(np.asarray(column, np.uint64) for column in columns))
    stack = [address, nbytes, np.zeros_like(address), *more]
    return np.ascontiguousarray(np.stack([column.reshape(-1) for column in stack], axis=1))


class Reader:
    """A transport with a registered destination, connected to one peer."""

    def __init__(self, contract: ContractBase, endpoint: bytes, nbytes: int, name: str = "served") -> None:
        self.transport: Transport = contract.open()
        try:
            self.target: Allocation = self.transport.allocate(nbytes)
            self.address = self.target.region.address
            self.registration = self.transport.register([self.target.region])
            self.peer: Peer = self.transport.connect(endpoint, timeout_s=LONG_S, name=name)
        except BaseException:
            self.transport.close()
            raise

    def whole(self, remote: int, nbytes: int) -> Prepared:
        """Prepare one row over everything."""
        return self.transport.prepare(self.peer, rows(self.address, nbytes), rows(remote, nbytes))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()


class WatchedPeer(PeerProcess):
    """A peer that ends as it is told to: if it crashes, the test that it happens in has failed."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        code, expected = self.close(), -signal.SIGKILL if self.killed else 0
        if error is None and code != expected:
            raise AssertionError(f"peer process {self.pid} ended with code {code}, expected {expected}")


class ContractBase:
    """See the module.

    Attributes
    ----------
    backend : str
        Name in the registry.
    settings : mapping
        Settings of every transport that is opened.
    environment : mapping of str to str
        Added to the environment of the peers.
    """

    backend: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, object]] = {}
    environment: ClassVar[Mapping[str, str]] = {}
    _shared: ClassVar[WatchedPeer | None] = None
    endpoint: ClassVar[bytes] = b""
    remote: ClassVar[int] = 0
    data: ClassVar[npt.NDArray[np.uint8]] = np.zeros(0, np.uint8)

    @classmethod
    def setup_class(cls) -> None:
        """Start the peer that the tests without faults share."""
        if cls.backend:
            cls._shared = cls.start()
            cls.endpoint, cls.remote = cls._shared.serve(SERVED_BYTES, 1)
            cls.data = pattern(SERVED_BYTES, 1)

    @classmethod
    def teardown_class(cls) -> None:
        """Stop it; it must have survived every test."""
        if cls._shared is not None:
            code = cls._shared.close()
            cls._shared = None
            if code:
                raise AssertionError(f"the shared peer ended with code {code}, expected 0")

    @classmethod
    def open(cls) -> Transport:
        """Open a transport of this backend."""
        return open_transport(cls.backend, **cls.settings)

    @classmethod
    def start(cls) -> WatchedPeer:
        """Start a peer process."""
        return WatchedPeer(cls.backend, cls.settings, environment=cls.environment)

    def reader(self, nbytes: int = SERVED_BYTES) -> Reader:
        """Return a reader of the shared peer."""
        return Reader(self, self.endpoint, nbytes)

    def still_reads(self, transport: Transport) -> None:
        """A healthy peer is read as if nothing had happened."""
        target = transport.allocate(MIB)
        registration = transport.register([target.region])
        peer = transport.connect(self.endpoint, timeout_s=LONG_S, name="healthy")
        prepared = transport.prepare(peer, rows(target.region.address, MIB), rows(self.remote, MIB))
        read(transport, [prepared], timeout_s=LONG_S)
        if not np.array_equal(target.array, self.data[:MIB]):
            raise AssertionError("a healthy peer was read wrong")
        peer.close()
        registration.close()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
