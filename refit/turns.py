"""Whose turn is it? One call at a time on a receiver, from any thread, and its end in good order.

A close never breaks a call off. From another thread it waits for the call under way, until that call's own deadline and
`GRACE_S` more unless it is told otherwise; from the call itself (a hook, an engine) it takes effect as the call ends,
whichever way that is. So does a close that has waited long enough: nothing is freed under a call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reshard.refit.deadline import Deadline, check_timeout
from reshard.refit.errors import RefitError, RefitTimeoutError

__all__ = ["GRACE_S", "Turns"]

GRACE_S = 10.0
"""How long after its deadline a call may take to end, before a close gives it up."""

_LOOK_S = 1.0


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
        self._ending = threading.Lock()
        self._owner = 0
        self._what = ""
        self._until: Deadline | None = None
        self._closed = False
        self._at_the_end: Callable[[], None] | None = None

    @contextmanager
    def take(self, what: str, deadline: Deadline | None = None, *, until: Deadline | None = None) -> Iterator[None]:
        """Do something while nobody else does.

        Parameters
        ----------
        what
            For messages, such as ``resolve()``.
        deadline
            Until when the call under way in another thread is waited for; not at all if None.
        until
            When it should be done itself; ``deadline`` if None.

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
        self._what, self._until = what, until if until is not None else deadline
        try:
            self._require_open(what)
            self._owner = threading.get_ident()
            yield
        finally:
            self._end()

    def close(self, release: Callable[[], None], timeout_s: float | None = None) -> None:
        """Let no further call begin, and call ``release`` (idempotent) once none is under way.

        Parameters
        ----------
        timeout_s
            How long a call in another thread is waited for; until its deadline and `GRACE_S` more if None.

        Raises
        ------
        RefitTimeoutError
            It is under way still: ``release`` will be called as it ends.
        """
        if timeout_s is not None:
            check_timeout(timeout_s)
        self._closed = True
        if self._owner == threading.get_ident():
            self._at_the_end = release
            return
        if not self._wait(time.monotonic(), timeout_s):
            with self._ending:  # it may have ended just now
                ended = self._lock.acquire(blocking=False)
                if not ended:
                    self._at_the_end = release
            if not ended:
                allowed = f"{timeout_s:g} s" if timeout_s is not None else f"its deadline and {GRACE_S:g} s more"
                raise RefitTimeoutError(
                    f"{self._who}: close() waited {allowed} for {self._what} in another thread, which has not "
                    "returned (a hook or the engine may hang); nothing was freed: its connections, registered memory, "
                    "lease and registration at the rendezvous stay, and are given up if it ever returns"
                )
        self._what, self._until = "close()", None
        try:
            release()
        finally:
            self._lock.release()

    def _wait(self, since_s: float, timeout_s: float | None) -> bool:
        """Take the lock; False where the call under way had its time."""
        while True:
            waited_s = time.monotonic() - since_s
            if timeout_s is not None:
                left_s = timeout_s - waited_s
            elif self._until is not None:
                left_s = self._until.left_s + GRACE_S
            else:
                left_s = GRACE_S - waited_s
            if left_s <= 0:
                return self._lock.acquire(blocking=False)
            if self._lock.acquire(timeout=min(left_s, _LOOK_S)):
                return True

    def _end(self) -> None:
        """Do what was left for the end, and let others have their turn."""
        try:
            while (last := self._last()) is not None:
                last()
        except BaseException:
            self._owner = 0
            self._lock.release()
            raise

    def _last(self) -> Callable[[], None] | None:
        """What is to be done at the end; where there is nothing (more), the turn is over."""
        with self._ending:
            last, self._at_the_end = self._at_the_end, None
            if last is None:
                self._owner = 0
                self._until = None
                self._lock.release()
            return last

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise RefitError(f"{self._who}: the receiver is closed, {what} came after that")
