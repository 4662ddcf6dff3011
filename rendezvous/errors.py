"""What can go wrong between a worker and the rendezvous, as one tree.

    ReshardError
    └── RendezvousError (RuntimeError)
        ├── RendezvousUnavailableError (ConnectionError)   the service, or its store, was not reached
        ├── RendezvousTimeoutError (TimeoutError)          a deadline passed; carries what was seen until then
        ├── AuthenticationError (PermissionError)          no token, a wrong one, an untrusted certificate
        ├── InvalidRequestError (ValueError)               a field out of its bounds; names the field
        ├── WorkerLostError                                a worker unknown to the service, or past its TTL
        ├── VersionError (ValueError)                      publishers disagree, or a step goes back
        │   └── EqualityError                              replicas or aliases claimed equal are not
        ├── StaleError (LookupError)                       a version or a table that is gone
        ├── LeaseError (LookupError)                       a lease that ended
        ├── TransactionError (ValueError)                  a vote that contradicts its transaction or itself
        │   └── AbortedError                               decided before this member joined
        └── ContractError (ValueError)                     a consensus record that breaks its contract
            └── ContractTypeError (TypeError)              ... by type

An outage is always an error of this tree and never an empty answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.planner.errors import ReshardError

__all__ = [
    "AbortedError",
    "AuthenticationError",
    "ContractError",
    "ContractTypeError",
    "EqualityError",
    "InvalidRequestError",
    "LeaseError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RendezvousUnavailableError",
    "StaleError",
    "TransactionError",
    "VersionError",
    "WorkerLostError",
]


class RendezvousError(ReshardError, RuntimeError):
    """Root of the rendezvous errors."""


class RendezvousUnavailableError(RendezvousError, ConnectionError):
    """The service, or the store behind it, could not be reached before the deadline."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """A deadline passed while the service was waiting for something.

    Attributes
    ----------
    missing_slots : tuple of str
        Slots of the awaited version that nobody had filled.
    empty_slots : tuple of str
        Slots offered an empty table whose publisher did not say ``empty``.
    lost_workers : tuple of str
        ``slot (host)`` of the publishers that missed their TTL.
    waited_s : float
        How long the service waited, seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        missing_slots: Sequence[str] = (),
        empty_slots: Sequence[str] = (),
        lost_workers: Sequence[str] = (),
        waited_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.missing_slots = tuple(missing_slots)
        self.empty_slots = tuple(empty_slots)
        self.lost_workers = tuple(lost_workers)
        self.waited_s = waited_s


class AuthenticationError(RendezvousError, PermissionError):
    """The service refused the caller's token or certificate."""


class InvalidRequestError(RendezvousError, ValueError):
    """A field lies outside its documented bounds.

    Attributes
    ----------
    field : str
        Dotted name of the field, e.g. ``record.region_bytes[3]``; for bytes that are no message, the
        message's name.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = message


class WorkerLostError(RendezvousError):
    """The worker is unknown to the service or missed its TTL; it must register anew, under a new id."""


class VersionError(RendezvousError, ValueError):
    """A version cannot be what its publisher says.

    Attributes
    ----------
    holders : tuple of str
        The slots that disagree, where two do.
    """

    def __init__(self, message: str, *, holders: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.holders = tuple(holders)


class EqualityError(VersionError):
    """Holders whose contents were claimed equal (replicas, aliases) published different digest roots."""


class StaleError(RendezvousError, LookupError):
    """A version, table or transaction that is gone, or was never there."""


class LeaseError(RendezvousError, LookupError):
    """A lease that is unknown or has ended."""


class TransactionError(RendezvousError, ValueError):
    """A vote or an answer that contradicts the group, the transaction or the member's earlier vote."""


class AbortedError(TransactionError):
    """The group's transaction was aborted before this member joined it; the message says why.

    Awaiting again opens another.
    """


class ContractError(RendezvousError, ValueError):
    """A consensus record breaks its contract.

    Attributes
    ----------
    record, field : str
        What is at fault, and where.
    got, expected : str
        In words.
    failures : Mapping of int to str
        Per rank, where the ranks of a group disagree.
    """

    def __init__(
        self,
        record: str,
        field: str,
        got: str,
        expected: str,
        failures: Mapping[int, str] | None = None,
    ) -> None:
        where = f"{record}.{field}" if field else record
        super().__init__(f"{where}: got {got}, expected {expected}")
        self.record = record
        self.field = field
        self.got = got
        self.expected = expected
        self.failures = dict(failures or {})


class ContractTypeError(ContractError, TypeError):
    """A consensus record, or a value of one, has the wrong type."""
