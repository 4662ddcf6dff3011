"""How often is a dial, or a question to the rendezvous, tried again? A count, a backoff, one deadline over all.

The rendezvous may suggest a policy when a worker registers; ``RESHARD_RETRY_*`` override it one by one, and a policy
that the caller gives overrides both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from reshard.refit.deadline import Deadline
from reshard.rendezvous.retries import RetryHint

if TYPE_CHECKING:
    from reshard.refit.settings import RetrySettings

__all__ = ["RetryPolicy", "policy_of"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy(RetryHint):
    """Tries and pauses, with the fields, units, defaults and bounds of what a rendezvous may suggest.

    Each try begins within the call's own deadline; `deadline_s`, if it is not 0, ends them earlier: no try begins later
    than that after the first.
    """

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


def policy_of(said: RetrySettings, hint: RetryHint | None) -> RetryPolicy:
    """The policy that the environment and the rendezvous come to.

    Parameters
    ----------
    said
        `reshard.refit.settings.retry`; what it leaves open is the hint's.
    hint
        What the service suggested when this worker registered, if anything; what it leaves open is `RetryPolicy()`'s.
    """
    given = {field.name: getattr(hint, field.name) for field in fields(hint)} if hint is not None else {}
    given |= {field.name: value for field in fields(said) if (value := getattr(said, field.name)) is not None}
    return RetryPolicy(**given)
