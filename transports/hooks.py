"""What a backend supplies: the native hooks, and the state that the common implementation keeps for it.

A backend subclasses `reshard.transports.common.CommonTransport` and fills these in.  Each hook is called with checked
arguments, raises mapped errors (`reshard.transports.errors`), and needs no locking of the common state.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from abc import ABC, abstractmethod
from typing import ClassVar

from reshard.transports import rows
from reshard.transports.base import Allocation, Capabilities
from reshard.transports.driver import Driver
from reshard.transports.errors import OwnFaultError, RegistrationError, TransportError
from reshard.transports.hostmem import populate
from reshard.transports.ledger import Ledger
from reshard.transports.lists import ConnectedPeer, Work
from reshard.transports.regions import MemoryKind, Region
from reshard.transports.transfer import ListTransfer, Slice

_LIVE: weakref.WeakSet[Hooks] = weakref.WeakSet()


class Hooks(ABC):
    """The hooks.

    Parameters
    ----------
    workers : int
        Threads that post large lists.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    slice_bytes: ClassVar[int] = rows.SLICE_BYTES
    """Budget of one slice; see `rows.cut_runs`."""

    def __init__(self, *, workers: int = 1) -> None:
        self.incarnation = os.urandom(16)
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._ledger = Ledger(self._register_checked, self._deregister, self._withdrawn)
        self._peers: dict[str, ConnectedPeer] = {}
        self._active: set[ListTransfer] = set()
        self._poisoned: list[ListTransfer] = []
        self._driver = Driver(f"reshard-{self.name}", workers)
        self._epoch = 0
        self._n_rebuilding = 0
        self._aborting = threading.Lock()
        self._n_native = 0
        self._n_releasing = 0
        self._n_waiting = 0
        self._closing = False
        self._closed = False
        self._forked_from = 0
        _LIVE.add(self)

    @abstractmethod
    def allocate(self, nbytes: int, *, memory: MemoryKind = "dram", device: int = 0) -> Allocation:
        """See `Transport.allocate`."""

    def _register(self, region: Region) -> object:
        """Register a region natively and return a handle; by default there is nothing to do."""
        return None

    def _deregister(self, region: Region, native: object) -> None:  # noqa: B027 - optional
        """Undo that; never raises."""

    @abstractmethod
    def _payload(self) -> bytes:
        """Return the backend's part of the endpoint message."""

    @abstractmethod
    def _withdrawn(self, generation: int) -> None:
        """Announce a new generation (`Beacon.withdraw`), before memory is withdrawn."""

    @abstractmethod
    def _dial(self, peer: ConnectedPeer, deadline: float) -> object:
        """Connect, prove that the peer is who its endpoint says, and return a native connection.

        A `struct.error` counts as a malformed payload.
        """

    def _stop_serving(self) -> None:  # noqa: B027 - optional
        """Announce the end (`Beacon.close`): called first by `close`, before any memory is withdrawn; never raises."""

    def _hang_up(self, native: object) -> None:  # noqa: B027 - optional
        """Disconnect; never raises."""

    @abstractmethod
    def _gate(self, peer: ConnectedPeer) -> Slice:
        """Return a slice that completes if the peer is as its endpoint says, and else raises `PeerError`."""

    @abstractmethod
    def _build(self, peer: ConnectedPeer, work: Work) -> list[Slice]:
        """Build the native list, one slice between any two cuts."""

    def _settles(self, error: TransportError) -> bool:
        """Whether a transfer that failed with ``error`` can no longer write."""
        return True

    def _abort(self, native: object) -> None:
        """Tear down a connection so that nothing it began can write (abort scope ``peer``).

        Called without the lock, again and again within the caller's deadline while it raises a `TransportError`; each
        call should take a tenth of a second at most.
        """
        raise NotImplementedError

    def _rebuild(self) -> None:
        """Destroy the native agent and with it all connections; make another (abort scope ``agent``)."""
        raise NotImplementedError

    @abstractmethod
    def _shut_down(self) -> None:
        """Free everything native; called once; never raises."""

    def _register_checked(self, region: Region) -> object:
        if region.memory not in self.capabilities.memory_kinds:
            raise RegistrationError(
                f"transport {self.name!r}: got {region.memory} memory, "
                f"expected one of {', '.join(self.capabilities.memory_kinds)}"
            )
        if region.memory == "dram":
            populate(region.address, region.nbytes)
        return self._register(region)

    def _check_open(self) -> None:
        if self._forked_from:
            raise OwnFaultError(
                f"transport {self.name!r} was opened by process {self._forked_from} and is of no use in its fork "
                f"{os.getpid()}; open one in a process that was started anew"
            )
        if self._closing:
            raise OwnFaultError(f"transport {self.name!r} is closed")

    def _disown(self, parent: int) -> None:
        """Make it useless in a forked child, whose native libraries share descriptors with the parent's.

        Nothing native may be used or freed there: UCX would take the parent's sockets out of the event set of both.
        """
        self._forked_from = parent
        self._closing = self._closed = True
        self._lock = threading.RLock()  # the old one may have been held by a thread that the child does not have
        self._moved = threading.Condition(self._lock)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # not even the interpreter's end frees it


def _disown_all() -> None:
    for transport in list(_LIVE):
        transport._disown(os.getppid())


os.register_at_fork(after_in_child=_disown_all)
