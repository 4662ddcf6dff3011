"""The transport protocol: what a receiver may ask of whatever moves bytes.

A transport reads peers' registered memory one-sidedly.  The way of one read:

1. ``allocate``/``register`` local memory; ``endpoint()`` is what the owner of the data publishes;
2. ``connect`` to a peer by its endpoint message;
3. ``prepare`` a list of rows once for each source buffer;
4. ``post`` it and ``wait``, at each refit (`read` does both for a group of peers, and the error handling).

Rows are C-contiguous ``uint64`` arrays, one row a descriptor, the same number on both sides:

    (N, 3)   address, nbytes, device
    (N, 5)   address, nbytes, device, stride_bytes, count        a strided row: ``count`` runs, each side its
    own stride

Row *i* of the local list receives row *i* of the remote list: equal ``nbytes`` and, if strided, equal
``count``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from reshard.transports.endpoint import Endpoint
from reshard.transports.errors import TransportError
from reshard.transports.regions import U64, MemoryKind, Region
from reshard.transports.values import Allocation, Capabilities, PeerStats, TransferStats, check_timeout

__all__ = [
    "U64",
    "Allocation",
    "Capabilities",
    "MemoryKind",
    "Peer",
    "PeerStats",
    "Prepared",
    "Region",
    "Registration",
    "Transfer",
    "TransferStats",
    "Transport",
    "check_timeout",
    "read",
]


class _Closing(Protocol):
    """``close`` is idempotent, releases everything and never raises."""

    def close(self) -> None: ...


class Registration(_Closing, Protocol):
    """Registered regions; ``close`` withdraws those that no other registration shares."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """What this registration covers."""
        ...


class Peer(_Closing, Protocol):
    """A connection; ``close`` disconnects and frees the name."""

    @property
    def name(self) -> str:
        """What errors and statistics call it."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """The message that it was connected by."""
        ...


class Prepared(_Closing, Protocol):
    """A list of rows, ready to be posted again and again, never twice at once."""

    @property
    def peer(self) -> Peer:
        """Whom it reads from."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that one posting moves."""
        ...

    @property
    def n_descriptors(self) -> int:
        """Runs handed to the native library, after merging."""
        ...


class Transfer(Protocol):
    """One posting of a prepared list."""

    @property
    def prepared(self) -> Prepared:
        """The list that was posted."""
        ...

    @property
    def state(self) -> str:
        """``"active"``, ``"done"``, ``"failed"`` or ``"abandoned"``."""
        ...


@runtime_checkable
class Transport(Protocol):
    """Reads registered memory of other processes.

    All methods may be called from any thread; one prepared list is used by one thread at a time.
    """

    @property
    def name(self) -> str:
        """Backend name, as in the registry and in endpoint messages."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do."""
        ...

    def allocate(self, nbytes: int, *, memory: MemoryKind = "dram", device: int = 0) -> Allocation:
        """Return page-aligned memory whose pages have been touched.

        Raises
        ------
        RegistrationError
            If there is no such memory.
        """
        ...

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register memory, by allocation, for serving and as destination.

        Registering the same region twice counts references; another size at the same address is registered
        anew.

        Raises
        ------
        RegistrationError
            With nothing left registered.
        """
        ...

    def endpoint(self) -> bytes:
        """Return the message that peers pass to `connect`; it lists the regions registered now."""
        ...

    def connect(self, endpoint: bytes, *, timeout_s: float, name: str = "") -> Peer:
        """Connect to a peer.

        Parameters
        ----------
        endpoint : bytes
            The peer's message; hostile until checked.
        timeout_s : float
            Finite, over 0.
        name : str
            What to call the peer in errors and statistics.  It is claimed before anything is dialled.

        Raises
        ------
        ValueError
            For a bad timeout.
        EndpointError
            For a bad message.
        PeerError
            If the peer is gone, has restarted since, or the name is taken.
        TransferTimeoutError
            If the deadline passes.
        """
        ...

    def prepare(self, peer: Peer, local: U64, remote: U64) -> Prepared:
        """Check rows against both region tables and build the native list, merging adjacent rows.

        Raises
        ------
        ValueError
            If the arrays are malformed or do not match row by row.
        RegistrationError
            If a row is outside of what is registered, naming it.
        PeerError
            If the peer is closed or has failed.
        """
        ...

    def post(self, prepared: Prepared, *, timeout_s: float = 10.0) -> Transfer:
        """Start reading.

        Parameters
        ----------
        prepared : Prepared
        timeout_s : float
            For what may have to be done first: connecting again after a quarantine was lifted.  Finite, over 0.

        Raises
        ------
        TransferTimeoutError
            If that takes longer.
        PoisonedMemoryError
            If a destination is quarantined.
        PeerError
            If the peer is closed, failed or stale.
        TransferError
            If this list is already in flight.
        """
        ...

    def wait(self, transfers: Sequence[Transfer], *, timeout_s: float, finish_others: bool = False) -> TransferStats:
        """Wait for all of them.

        Parameters
        ----------
        transfers : sequence of Transfer
        timeout_s : float
            Finite, over 0.
        finish_others : bool
            After a failure, let the others complete; else they are cancelled and drained.

        Raises
        ------
        TransferTimeoutError
            When the deadline passes: the rest is abandoned, its destinations are poisoned where a write may
            still land.
        PeerError, TransferError
            The first failure, after all others ended or the deadline passed; ``failures`` has every peer's
            state.
        """
        ...

    def cancel(self, transfers: Sequence[Transfer]) -> None:
        """Post nothing more of these transfers, drain what is in flight for a moment, and abandon the rest."""
        ...

    def quarantined(self) -> tuple[Region, ...]:
        """Return the local ranges that an abandoned read may still change."""
        ...

    def wait_quarantine(self, *, timeout_s: float) -> None:
        """Return once no write can land in quarantined memory any more; it may then be used again.

        Raises
        ------
        TransferTimeoutError
            If that cannot be had within the deadline; the quarantine stands.
        """
        ...

    def close(self) -> None:
        """Close all that it opened: transfers, lists, peers, registrations; idempotent, never raises."""
        ...


def read(
    transport: Transport, lists: Sequence[Prepared], *, timeout_s: float, finish_others: bool = False
) -> TransferStats:
    """Post every list, wait for all, and leave none in flight.

    On return or raise nothing is active: each transfer is done, failed, cancelled (and drained), or abandoned with its
    destination quarantined.

    Parameters
    ----------
    transport : Transport
    lists : sequence of Prepared
    timeout_s : float
        One deadline over all, finite and over 0.
    finish_others : bool
        After a failure, post and finish the others (their data is good; only the failed peer's rows must be read again
        from elsewhere); else they are cancelled and drained.

    Raises
    ------
    TransportError
        The first failure, with every peer's state in ``failures``.
    """
    deadline = time.monotonic() + check_timeout(timeout_s)
    transfers: list[Transfer] = []
    refused: list[TransportError] = []
    try:
        for prepared in lists:
            try:
                left = max(deadline - time.monotonic(), 1e-3)
                transfers.append(transport.post(prepared, timeout_s=left))
            except TransportError as error:
                error.failures.setdefault(prepared.peer.name, f"refused: {error}")
                refused.append(error)
                if not finish_others:
                    transport.cancel(transfers)
                    break
        left = max(deadline - time.monotonic(), 1e-3)
        stats = transport.wait(transfers, timeout_s=left, finish_others=finish_others)
    except TransportError as error:
        if not refused:
            raise
        refused.append(error)
    except BaseException:
        transport.cancel(transfers)
        raise
    else:
        if not refused:
            return stats
        refused[0].failures.update({name: "done" for name in stats.per_peer if name not in refused[0].failures})
    for other in refused[1:]:
        for name, state in other.failures.items():
            refused[0].failures.setdefault(name, state)
    raise refused[0]
