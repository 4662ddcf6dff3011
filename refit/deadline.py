"""One monotonic deadline for a whole public call, handed down to each step of it."""

from __future__ import annotations

import math
import time

from reshard.refit.errors import RefitTimeoutError

__all__ = ["Deadline", "check_timeout"]


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """Return ``timeout_s`` if it is a finite number over 0, else raise ValueError."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {type(timeout_s).__name__}")
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise ValueError(f"{name} must be finite and over 0 seconds, got {timeout_s!r}")
    return float(timeout_s)


class Deadline:
    """Counts down from ``timeout_s`` seconds, starting now.

    Parameters
    ----------
    timeout_s
        Finite, over 0.
    what
        Named in the error, for instance ``"refit of member 'tp0'"``.
    """

    __slots__ = ("_end_s", "timeout_s", "what")

    def __init__(self, timeout_s: float, what: str) -> None:
        self.timeout_s = check_timeout(timeout_s)
        self.what = what
        self._end_s = time.monotonic() + self.timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left; negative once it has passed."""
        return self._end_s - time.monotonic()

    def remaining(self, stage: str) -> float:
        """Seconds left, for a wait in ``stage``.

        Raises
        ------
        RefitTimeoutError
            If none are left.
        """
        left = self.left_s
        if left <= 0:
            raise RefitTimeoutError(f"{self.what}: the deadline of {self.timeout_s:g} s passed at stage {stage!r}")
        return left
