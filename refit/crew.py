"""Who works on cells while others are still being read? A few threads with one queue, and the caller at the end.

1. `Crew.feed` hands work over and returns at once; threads start with the first of it.
2. `Crew.finish` lets the caller, who has nothing left to read, help until the queue is empty.
3. `Crew.stop` drops what is queued. Both return only when no thread works any more, so that the memory that they
   looked at may be given back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["Crew"]

Item = TypeVar("Item")
Tool = TypeVar("Tool")


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
    """

    def __init__(self, make_tool: Callable[[], Tool], work: Callable[[Item, Tool], None], n_threads: int) -> None:
        self._make_tool, self._work, self._n_threads = make_tool, work, n_threads
        self._queue: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

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

    def finish(self) -> None:
        """Work along until everything is done; raise the first thing that any thread raised."""
        try:
            if self._queue:
                self._drain(self._make_tool())
        except BaseException:
            self.stop()
            raise
        self._join()
        self.check()

    def stop(self) -> None:
        """Drop what is queued and wait for what is being worked on; idempotent."""
        with self._changed:
            self._queue.clear()
        self._join()

    def _join(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _drain(self, tool: Tool) -> None:
        while self._error is None:
            try:
                item = self._queue.popleft()
            except IndexError:
                return
            self._work(item, tool)

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
