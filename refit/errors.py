"""What can go wrong in a refit, as one branch of the library's error tree.

    ReshardError
      RefitError (RuntimeError)
        IncompleteRefit            the coverage gate refused a partial refit
        UnsupportedLoaderError     capture met something it can neither describe nor stage
        UnattributedWriteError     a loader wrote memory that belongs to no parameter
        UnconsumedSourceError      a published tensor that nobody took
        PublishError               a publisher refused what it was given
        UnmappedMemoryError        weights that are not in memory now (a sleeping engine), or lie in other memory
        HolderLostError            a holder failed and no replica has what it owed (also ConnectionError)
        StagingBudgetError         a materialised tensor does not fit the staging budget
        VerificationError          bytes do not match the digests of their publisher
          TornReadError            the publisher wrote its buffer while it was read
        UnverifiedError            ``require_verified`` and some bytes could not be checked
        ImpossibleThroughputError  a read was faster than the hardware allows
        RefitAborted               the group decided ABORT: the old weights serve
        InDoubtError               voted yes and the decision could not be learnt: this rank serves nothing
        QuarantinedError           weights were touched and not completed: this rank serves nothing
        FenceTimeoutError          leases outlived the fence's deadline (also TimeoutError)
        RefitTimeoutError          the refit's own deadline passed (also TimeoutError)

An error that happens before the vote leaves the old weights serving; `InDoubtError` and `QuarantinedError` are the
two that do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from reshard.planner.errors import ReshardError

__all__ = [
    "FenceTimeoutError",
    "HolderLostError",
    "ImpossibleThroughputError",
    "InDoubtError",
    "IncompleteRefit",
    "PublishError",
    "QuarantinedError",
    "RefitAborted",
    "RefitError",
    "RefitTimeoutError",
    "StagingBudgetError",
    "TornReadError",
    "UnattributedWriteError",
    "UnconsumedSourceError",
    "UnmappedMemoryError",
    "UnsupportedLoaderError",
    "UnverifiedError",
    "VerificationError",
]


class RefitError(ReshardError, RuntimeError):
    """Base of everything `reshard.refit` raises."""


class IncompleteRefit(RefitError):
    """The coverage gate is on and the plan writes too little of the engine.

    Attributes
    ----------
    coverage_pct : float
        Percent of the engine's bytes that the certificate proves written.
    never_written : tuple of str
        Sorted names of the parameters that no request writes.
    """

    def __init__(self, message: str, *, coverage_pct: float, never_written: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.coverage_pct = coverage_pct
        self.never_written = tuple(never_written)


class UnsupportedLoaderError(RefitError):
    """The engine's loader did something that capture can neither describe nor stage.

    Attributes
    ----------
    source : str
        The source tensor involved, empty where none is.
    """

    def __init__(self, message: str, *, source: str = "") -> None:
        super().__init__(message)
        self.source = source


class UnattributedWriteError(UnsupportedLoaderError):
    """The loader wrote a published tensor into memory that is no view of a parameter or buffer."""


class UnconsumedSourceError(RefitError):
    """A published tensor was taken by nobody. Attribute ``names``: the sorted names."""

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class PublishError(RefitError, ValueError):
    """A publisher was given tensors or settings that it refuses."""


class UnmappedMemoryError(RefitError):
    """Weights that are to be read or written are not mapped, or not to the memory that was registered.

    Raised before a byte is read, written or offered; what it says at the end is the way out.

    Attributes
    ----------
    names : tuple of str
        What the memory is called: tensors, parameters or buffers.
    """

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class HolderLostError(RefitError, ConnectionError):
    """Holders failed, and what they owed nobody else has; nothing was installed.

    The transport's own error is the cause.

    Attributes
    ----------
    holders : tuple of str
        Their names, sorted.
    """

    def __init__(self, holders: Collection[str], cause: Exception, gap: Exception) -> None:
        self.holders = tuple(sorted(holders))
        shown = ", ".join(map(repr, self.holders))
        super().__init__(
            f"holder{'s' if len(self.holders) > 1 else ''} {shown} failed ({type(cause).__name__}: {cause}) and "
            "no replica has "
            f"what is missing now: {gap}"
        )


class StagingBudgetError(RefitError):
    """A materialised tensor is larger than the staging budget; nothing was read."""


class VerificationError(RefitError):
    """Bytes received differ from the digests that their publisher gave.

    Attributes
    ----------
    cells : tuple of str
        The first cells that differ, as ``holder: tensor [start, stop)``.
    """

    def __init__(self, message: str, *, cells: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.cells = tuple(cells)


class TornReadError(VerificationError):
    """The publisher's buffer changed between the first and the last read of it."""


class UnverifiedError(RefitError):
    """``require_verified`` is set and some received bytes belong to no whole cell."""


class ImpossibleThroughputError(RefitError):
    """The implied rate exceeds ``RESHARD_MAX_GBPS``: the bytes cannot have moved. Nothing is installed."""

    def __init__(self, message: str, *, implied_gbps: float, ceiling_gbps: float) -> None:
        super().__init__(message)
        self.implied_gbps = implied_gbps
        self.ceiling_gbps = ceiling_gbps


class RefitAborted(RefitError):
    """The group decided ABORT; the old weights serve on every rank.

    Attributes
    ----------
    failures : dict of str to str
        Why, by member, as far as the service knows.
    """

    def __init__(self, message: str, *, failures: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class InDoubtError(RefitError):
    """Voted yes and the decision is not known yet: the rank serves nothing new until `Receiver.resolve` learns it."""


class QuarantinedError(RefitError):
    """The rank serves nothing: its weights were touched and the group did not finish. A new refit mends it."""


class RefitTimeoutError(RefitError, TimeoutError):
    """The deadline of a public call passed; the message says at which stage."""


class FenceTimeoutError(RefitError, TimeoutError):
    """Leases were still live when the fence's deadline passed."""
