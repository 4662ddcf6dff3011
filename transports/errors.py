"""What can go wrong in a transport, as one tree.

    ReshardError
        TransportError                    also RuntimeError
            TransportUnavailableError     also ImportError: cannot work here; names the extra or the reason
            OwnFaultError                 this side cannot go on: closed, forked, or out of descriptors or memory
            EndpointError                 also ValueError: a message is malformed, damaged or misdirected
            RegistrationError             memory cannot be registered, or a row lies outside of what was
            PeerError                     also ConnectionError: gone, restarted, re-registered or refused
            TransferError                 the native library reported that a transfer failed
                TransferTimeoutError      also TimeoutError: the deadline passed; memory may be poisoned
                PoisonedMemoryError       a destination is quarantined: an abandoned write may still land

Each backend maps native errors to these once, with ``from``.  ``failures`` is filled where several peers
took part.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

from reshard.planner.errors import MissingDependencyError, ReshardError


class TransportError(ReshardError, RuntimeError):
    """Root of the transport errors.

    Attributes
    ----------
    peer : str
        Name of the peer concerned, empty where there is none.
    failures : dict of str to str
        State of every peer that took part, by name, where the error concerns a group of transfers.
    """

    def __init__(self, message: str, *, peer: str = "", failures: Mapping[str, str] | None = None) -> None:
        # Not super(): along a subclass's other base that would reach initialisers with other signatures.
        Exception.__init__(self, message)
        self.peer = peer
        self.failures: dict[str, str] = dict(failures or {})


class TransportUnavailableError(TransportError, MissingDependencyError):
    """The backend cannot work here: a package is missing, or its library refuses to start."""

    def __init__(self, message: str, *, package: str = "", extra: str = "") -> None:
        TransportError.__init__(self, message)
        self.package = package
        self.extra = extra


class OwnFaultError(TransportError):
    """What failed is on this side, no peer: the transport is closed or was forked, or descriptors or memory ran out."""


class EndpointError(TransportError, ValueError):
    """An endpoint message is truncated, damaged, too large, of another version, or of another backend."""


class RegistrationError(TransportError):
    """Memory could not be registered, or a row addresses memory that is not registered."""


class PeerError(TransportError, ConnectionError):
    """The peer cannot be reached, has died, has restarted, or serves other regions than its message says."""


class TransferError(TransportError):
    """A transfer failed; ``peer`` names the holder."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A deadline passed.

    Attributes
    ----------
    poisoned : tuple of (int, int)
        Half-open address ranges ``[start, stop)`` that an abandoned native write may still change.  The
        transport keeps their owners alive and refuses them as destinations until `Transport.wait_quarantine`
        returns.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: str = "",
        failures: Mapping[str, str] | None = None,
        poisoned: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(message, peer=peer, failures=failures)
        self.poisoned = tuple(poisoned)


class PoisonedMemoryError(TransferError):
    """A destination lies in quarantined memory; call `Transport.wait_quarantine` first."""


OWN_LACK = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What the system says when this process, or this host, has no more descriptors or memory: no peer is to blame."""


def blamed(error: OSError, peer: str, what: str) -> TransportError:
    """Return an error for a system call about a peer: the peer's fault, unless it is for want of something here."""
    if error.errno in OWN_LACK:
        return OwnFaultError(f"this process cannot look at peer {peer!r}: {what}: {error}")
    return PeerError(f"peer {peer!r}: {what}: {error}", peer=peer)
