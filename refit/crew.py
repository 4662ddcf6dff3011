"""Who works on cells while others are still being read? A few threads with one queue, and the caller at the end.

1. `Crew.feed` hands work over and returns at once; threads start with the first of it.
2. `Crew.finish` lets the caller, who has nothing left to read, help until the queue is empty.
3. `Crew.stop` drops what is queued. Both wait until no thread works any more, but not for ever: what is at work when
   their time is up is said, and its result is never used. Such a thread holds the arrays that it looks at, so that
   their memory outlives it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from reshard.refit.deadline import Deadline
from reshard.refit.errors import RefitTimeoutError

__all__ = ["Crew"]

Item = TypeVar("Item")
Tool = TypeVar("Tool")

_SHOWN = 4
_GRACE_S = 5.0
"""How long work that has become useless is waited for, at most."""


class Crew(Generic[Item, Tool]):
    """Threads that work through a queue, each with a tool of its own.

    Parameters
    ----------
    make_tool
        Makes what a thread needs to work (scratch memory); called once in each thread.
    work
        Called with an item and the thread's tool. What it raises ends the work; see `finish`.
    n_threads
        Most threads besides the caller's, at least 0.
    describe
        Names an item in messages.
    """

    def __init__(
        self,
        make_tool: Callable[[], Tool],
        work: Callable[[Item, Tool], None],
        n_threads: int,
        describe: Callable[[Item], str] = repr,
    ) -> None:
        self._make_tool, self._work, self._n_threads, self._describe = make_tool, work, n_threads, describe
        self._queue: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._at_work: dict[int, Item] = {}

    def feed(self, items: Iterable[Item]) -> None:
        """Hand work over."""
        with self._changed:
            self._queue.extend(items)
            while self._queue and len(self._threads) < self._n_threads:
                thread = threading.Thread(target=self._run, name=f"reshard-crew-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what a thread has raised so far."""
        if self._error is not None:
            raise self._error

    def finish(self, deadline: Deadline) -> None:
        """Work along until everything is done; raise the first thing that any thread raised.

        Raises
        ------
        RefitTimeoutError
            If the deadline passes before; it names what is at work then, and how much was not begun.
        """
        try:
            if self._queue:
                self._drain(self._make_tool(), deadline)
        except BaseException:
            self.stop(deadline)
            raise
        self._close(drop=False)
        self._join(deadline.left_s)
        self.check()
        left = self.at_work()
        if left or self._queue:
            n_queued = len(self._queue)
            self._close(drop=True)
            raise RefitTimeoutError(
                f"{deadline.what}: the deadline of {deadline.timeout_s:g} s passed with {len(left)} at work "
                f"({_listed(left)}) and {n_queued} not begun"
            )

    def stop(self, deadline: Deadline) -> tuple[str, ...]:
        """Drop what is queued and wait for what is being worked on, 5 s at most and 1 s at least; idempotent.

        Returns
        -------
        tuple of str
            What is still being worked on, by `describe`; empty once no thread works any more.
        """
        self._close(drop=True)
        self._join(min(max(deadline.left_s, 1.0), _GRACE_S))
        return self.at_work()

    def at_work(self) -> tuple[str, ...]:
        """What threads work on now, by `describe`."""
        alive = {thread.ident for thread in self._threads if thread.is_alive()}
        return tuple(self._describe(item) for ident, item in tuple(self._at_work.items()) if ident in alive)

    def _close(self, *, drop: bool) -> None:
        """Let threads end once the queue is empty, which it is at once with ``drop``."""
        with self._changed:
            if drop:
                self._queue.clear()
            self._closing = True
            self._changed.notify_all()

    def _join(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))

    def _drain(self, tool: Tool, deadline: Deadline | None = None) -> None:
        me = threading.get_ident()
        while self._error is None and (deadline is None or deadline.left_s > 0):
            try:
                item = self._queue.popleft()
            except IndexError:
                return
            self._at_work[me] = item
            try:
                self._work(item, tool)
            finally:
                del self._at_work[me]

    def _run(self) -> None:
        try:
            tool = self._make_tool()
            while True:
                self._drain(tool)
                with self._changed:
                    while not self._queue and not self._closing:
                        self._changed.wait()
                    if self._error is not None or not self._queue:
                        return
        except BaseException as error:  # noqa: BLE001 - raised where the caller asks
            with self._changed:
                self._error = self._error or error
                self._queue.clear()


def _listed(items: tuple[str, ...]) -> str:
    more = f" and {len(items) - _SHOWN} others" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more if items else "none"
