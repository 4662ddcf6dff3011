"""The cells of the fault matrix, and what each of them must come to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

STEPS: Final = (
    "discover",
    "capture",
    "plan",
    "certify",
    "connect",
    "allocate",
    "read",
    "verify",
    "release",
    "vote",
    "install",
    "check",
    "serve",
)
FAULTS: Final = (
    "trainer killed",
    "receiver killed",
    "server killed",
    "network stall",
    "server silent",
    "wrong bytes",
    "late digest",
    "slow rank",
    "out of staging memory",
    "SIGTERM",
)
SLOTS: Final = ("trainer-0", "trainer-1")
MEMBERS: Final = ("tp0", "tp1")
VICTIM: Final = "tp1"
"""The member that is stopped at the step."""
STRUCK_TRAINER: Final = "trainer-1"

_ASKS = ("discover", "read", "vote", "install", "serve")
"""Steps in, or right before, which the service is asked."""
_BEFORE_ALLOCATION = STEPS[: STEPS.index("allocate") + 1]
_NOTHING_READ = {
    "shadow": STEPS[: STEPS.index("read") + 1],
    "stream": (*_BEFORE_ALLOCATION, "vote", "install", "read"),
}
"""Steps at whose beginning the victim has read nothing of the new version."""
_UNDECIDED = {"shadow": STEPS[: STEPS.index("vote") + 1], "stream": (*_BEFORE_ALLOCATION, "vote")}
"""Steps at whose beginning the group cannot have decided COMMIT."""
_SPOILS = ("wrong bytes", "late digest")
_OUT_OF_REACH = ("server killed", "network stall", "server silent")


@dataclass(frozen=True, slots=True)
class Combination:
    """One cell of the matrix."""

    step: str
    fault: str
    install: str = "shadow"
    transport: str = "memory"

    def __str__(self) -> str:
        how = [part for part, usual in ((self.install, "shadow"), (self.transport, "memory")) if part != usual]
        return f"{self.step}:{self.fault}" + (f" ({', '.join(how)})" if how else "")

    @property
    def skipped(self) -> str:
        """Why it cannot be tried; empty if it can."""
        if self.fault == "out of staging memory" and self.step not in _BEFORE_ALLOCATION:
            return "nothing is allocated after the stage 'allocate'"
        if self.fault == "server silent" and self.step not in _ASKS:
            return f"the service is asked nothing between the steps {', '.join(_ASKS)}"
        return ""

    @property
    def must_fail(self) -> bool:
        """Whether no rank may come to serve the new version: what it needs is gone, or is not what was published."""
        if self.fault in ("network stall", "slow rank"):
            return False
        if self.fault in ("trainer killed", *_SPOILS):
            return self.step in _NOTHING_READ[self.install]
        return True

    @property
    def must_succeed(self) -> bool:
        """Whether every rank must come to serve the new version."""
        return self.fault == "slow rank"

    @property
    def keeps_old(self) -> bool:
        """Whether every survivor must serve the old version in the end, not merely nothing.

        It fails before the group's decision, and the service is there to say so.
        """
        if not self.must_fail or self.fault in _OUT_OF_REACH or self.step not in _UNDECIDED[self.install]:
            return False
        if self.install == "shadow":
            return True
        # In stream mode bytes are read after the decision; before it, only their holders are looked at.
        return self.fault not in _SPOILS and (self.fault != "trainer killed" or self.step != "vote")

    @property
    def can_release(self) -> bool:
        """Whether the service hears the survivors when they give their leases back."""
        return self.fault not in _OUT_OF_REACH

    @property
    def evidence(self) -> tuple[tuple[str, ...], str]:
        """That the fault struck: whose errors are looked at, and what one of them must say."""
        if not self.must_fail:
            return (), ""
        if self.fault in _SPOILS:
            return MEMBERS, "VerificationError"
        if self.fault == "trainer killed":
            return MEMBERS, STRUCK_TRAINER
        return ((VICTIM,), "MemoryError") if self.fault == "out of staging memory" else ((), "")


def combinations(install: str = "shadow", transport: str = "memory") -> Iterator[Combination]:
    """The whole matrix."""
    for step in STEPS:
        for fault in FAULTS:
            yield Combination(step, fault, install, transport)
