"""How often is a dial, or a question to the rendezvous, tried again? A count, a backoff, one deadline over all.

The rendezvous may suggest a policy when a worker registers; ``RESHARD_RETRY_*`` override it one by one, and a policy
that the caller gives overrides both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from reshard.refit.deadline import Deadline

if TYPE_CHECKING:
    from reshard.refit.settings import RetrySettings

__all__ = ["RetryPolicy", "policy_of"]

T = TypeVar("T")


class Suggestion(Protocol):
    """What a rendezvous may suggest when a worker registers; units and meaning as in `RetryPolicy`."""

    @property
    def attempts(self) -> int: ...
    @property
    def backoff_s(self) -> float: ...
    @property
    def factor(self) -> float: ...
    @property
    def max_backoff_s(self) -> float: ...
    @property
    def deadline_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Tries and pauses.

    Attributes
    ----------
    attempts
        Tries in all, 1 or more.
    backoff_s, factor, max_backoff_s
        The pause before the second try, what it grows by (1 or more), and where it stops growing; seconds.
    deadline_s
        No try begins later than this many seconds after the first; 0 leaves it to the call's own deadline.
    """

    attempts: int = 3
    backoff_s: float = 0.05
    factor: float = 2.0
    max_backoff_s: float = 2.0
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        pauses = (self.backoff_s, self.max_backoff_s, self.deadline_s)
        finite = all(math.isfinite(value) for value in (*pauses, self.factor))
        if not finite or self.attempts < 1 or min(pauses) < 0 or self.factor < 1:
            raise ValueError(f"{self}: expected attempts >= 1, finite pauses and deadline >= 0, a finite factor >= 1")

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

        With ``share`` the time left is shared out over the tries that are left, so that a silent peer is asked more
        than once. All tries together may take all of ``deadline``.

        Raises
        ------
        Exception
            The last one of type ``again``; any other at once.
        """
        pause = self.backoff_s
        since = time.monotonic()
        for attempt in range(self.attempts):
            left = deadline.remaining(what) / (self.attempts - attempt if share else 1)
            try:
                return call(left)
            except again:
                late = self.deadline_s and time.monotonic() + pause - since > self.deadline_s
                if attempt + 1 == self.attempts or deadline.left_s <= pause or late:
                    raise
            time.sleep(pause)
            pause = min(pause * self.factor, self.max_backoff_s)
        raise AssertionError("unreachable")


def policy_of(said: RetrySettings, hint: Suggestion | None) -> RetryPolicy:
    """The policy that the environment and the rendezvous come to.

    Parameters
    ----------
    said
        `reshard.refit.settings.retry`; what it leaves open is the hint's.
    hint
        What the service suggested when this worker registered, if anything; what it leaves open is `RetryPolicy()`'s.
    """
    policy = RetryPolicy()
    if hint is not None:
        policy = RetryPolicy(hint.attempts, hint.backoff_s, hint.factor, hint.max_backoff_s, hint.deadline_s)
    return replace(
        policy,
        attempts=said.attempts if said.attempts is not None else policy.attempts,
        backoff_s=said.backoff_s if said.backoff_s is not None else policy.backoff_s,
        factor=said.factor if said.factor is not None else policy.factor,
        max_backoff_s=said.max_backoff_s if said.max_backoff_s is not None else policy.max_backoff_s,
        deadline_s=said.deadline_s if said.deadline_s is not None else policy.deadline_s,
    )
