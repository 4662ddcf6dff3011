"""How often should a receiver try a dial or a lease request? What a service suggests; receivers may override it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from reshard.rendezvous import limits
from reshard.rendezvous.errors import InvalidRequestError

__all__ = ["RetryHint"]

_MAX_ATTEMPTS = 1000
_MAX_FACTOR = 100.0


@dataclass(frozen=True, slots=True)
class RetryHint:
    """Tries and pauses, as registration answers them.

    Parameters
    ----------
    attempts
        Tries in all, 1 or more.
    backoff_s, factor, max_backoff_s
        The pause before the second try, what it grows by (1 or more), and where it stops growing; seconds.
    deadline_s
        One deadline over all tries, seconds; 0 suggests none.

    Raises
    ------
    InvalidRequestError
        Naming the field.
    """

    attempts: int = 3
    backoff_s: float = 0.05
    factor: float = 2.0
    max_backoff_s: float = 2.0
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        limits.check_int("retry.attempts", self.attempts, at_least=1, at_most=_MAX_ATTEMPTS)
        for name, low, high in (
            ("backoff_s", 0.0, limits.MAX_TTL_S),
            ("factor", 1.0, _MAX_FACTOR),
            ("max_backoff_s", 0.0, limits.MAX_TTL_S),
            ("deadline_s", 0.0, limits.MAX_TIMEOUT_S),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidRequestError(f"retry.{name}", f"expected a finite number, got {value!r:.80}")
            if not low <= value <= high:
                raise InvalidRequestError(f"retry.{name}", f"{value:g} lies outside [{low:g}, {high:g}]")

    @classmethod
    def parse(cls, text: str) -> RetryHint:
        """Read ``attempts=5,backoff_s=0.1,deadline_s=20``, what is not named as by default.

        >>> RetryHint.parse("attempts=5,max_backoff_s=1").attempts
        5
        """
        known = [field.name for field in fields(cls)]
        given: dict[str, float] = {}
        for entry in text.split(","):
            name, equals, value = (piece.strip() for piece in entry.partition("="))
            if name not in known or not equals or name in given:
                raise InvalidRequestError(
                    "retry", f"got {entry!r:.80}, expected NAME=NUMBER once of {', '.join(known)}"
                )
            try:
                given[name] = int(value) if name == "attempts" else float(value)
            except ValueError:
                raise InvalidRequestError(f"retry.{name}", f"{value!r:.80} is no number") from None
        return cls(**given)  # type: ignore[arg-type]
