"""Whose turn is it? One call at a time on a receiver, from any thread, and its end in good order.

A close never breaks a call off. From another thread it waits for the call under way; from the call itself (a hook, an
engine) it takes effect as the call ends, whichever way that is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reshard.refit.deadline import Deadline
from reshard.refit.errors import RefitError, RefitTimeoutError

__all__ = ["Turns"]


class Turns:
    """Calls on one object, one after the other.

    Parameters
    ----------
    who
        For messages, such as ``member 'tp0'``.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._lock = threading.Lock()
        self._owner = 0
        self._closed = False
        self._at_the_end: Callable[[], None] | None = None

    @contextmanager
    def take(self, what: str, deadline: Deadline | None = None) -> Iterator[None]:
        """Do something while nobody else does.

        Parameters
        ----------
        what
            For messages, such as ``resolve()``.
        deadline
            Until when the call under way in another thread is waited for; not at all if None.

        Raises
        ------
        RefitError
            Another call is under way, in this thread or (without ``deadline``) in any; or it was closed.
        RefitTimeoutError
            Another thread's call outlives the deadline.
        """
        if self._owner == threading.get_ident():
            raise RefitError(f"{self._who} is refitting already: {what} came from within that refit")
        self._require_open(what)
        if deadline is None:
            if not self._lock.acquire(blocking=False):
                raise RefitError(f"{self._who} is refitting already: {what} came during a refit")
        elif not self._lock.acquire(timeout=max(deadline.left_s, 0.0)):
            raise RefitTimeoutError(
                f"{deadline.what}: a refit in another thread was still under way after {deadline.timeout_s:g} s"
            )
        try:
            self._require_open(what)
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                last, self._at_the_end = self._at_the_end, None
                try:
                    if last is not None:
                        last()
                finally:
                    self._owner = 0
        finally:
            self._lock.release()

    def close(self, release: Callable[[], None]) -> None:
        """Let no further call begin, and call ``release`` (idempotent) once none is under way."""
        self._closed = True
        if self._owner == threading.get_ident():
            self._at_the_end = release
            return
        with self._lock:
            release()

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise RefitError(f"{self._who}: the receiver is closed, {what} came after that")
