"""How often is a dial, or a question to the rendezvous, tried again? A count and a backoff, under one deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from reshard.refit.deadline import Deadline

__all__ = ["RetryPolicy"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Tries and pauses.

    Attributes
    ----------
    attempts
        Tries in all, 1 or more.
    backoff_s, factor, max_backoff_s
        The pause before the second try, what it grows by, and where it stops growing.
    """

    attempts: int = 3
    backoff_s: float = 0.05
    factor: float = 2.0
    max_backoff_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.backoff_s < 0 or self.factor < 1 or self.max_backoff_s < 0:
            raise ValueError(f"{self}: expected attempts >= 1, pauses >= 0 and a factor >= 1")

    def run(
        self,
        call: Callable[[float], T],
        again: type[Exception] | tuple[type[Exception], ...],
        deadline: Deadline,
        what: str,
        *,
        share: bool = True,
    ) -> T:
        """Call ``call(seconds for this try)`` until it returns.

        With ``share`` the time left is shared out over the tries that are left, so that one silent peer cannot take
        all of it.

        Raises
        ------
        Exception
            The last one of type ``again``; any other at once.
        """
        pause = self.backoff_s
        for attempt in range(self.attempts):
            left = deadline.remaining(what) / (self.attempts - attempt if share else 1)
            try:
                return call(left)
            except again:
                if attempt + 1 == self.attempts or deadline.left_s <= pause:
                    raise
            threading.Event().wait(pause)
            pause = min(pause * self.factor, self.max_backoff_s)
        raise AssertionError("unreachable")
