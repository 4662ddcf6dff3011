"""Who waits for which records? Subscriptions within one event loop.

A watch collects the keys that changed since it was last asked; it is set before the waiter reads, so a change
between reading and waiting is seen. One change wakes each watch at most once until that has looked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["LocalWatch", "Watchers"]


class LocalWatch:
    """One waiter's subscription."""

    __slots__ = ("_changed", "_event", "_everything", "_keys")

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._keys: frozenset[str] | None = None
        self._changed: set[str] = set()
        self._everything = False

    def touch(self, keys: Iterable[str]) -> None:
        """Note changes; wakes the waiter if it waits for one of them."""
        if self._keys is None:
            self._changed.update(keys)  # it is reading: what it will wait for is not known yet
        elif not self._keys.isdisjoint(keys):
            self._event.set()

    def touch_all(self) -> None:
        """Wake the waiter whatever it waits for: changes may have been missed."""
        self._everything = True
        self._event.set()

    async def changed(self, keys: Iterable[str], timeout_s: float) -> bool:
        """Wait until one of `keys` changed since the last call; False if `timeout_s` passed first."""
        wanted = frozenset(keys)
        hit = self._everything or not wanted.isdisjoint(self._changed)
        if not hit and timeout_s > 0:
            self._keys = wanted
            self._event.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
                hit = True
            except TimeoutError:
                hit = False
            finally:
                self._keys = None
        self._changed.clear()
        self._everything = False
        return hit


class Watchers:
    """All subscriptions of a store."""

    def __init__(self) -> None:
        self._watches: set[LocalWatch] = set()

    @contextmanager
    def subscribe(self) -> Iterator[LocalWatch]:
        """Register a watch for the duration of the block."""
        watch = LocalWatch()
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def notify(self, keys: Iterable[str]) -> None:
        """Tell every watch that `keys` changed (beats aside: nobody waits for one)."""
        changed = [key for key in keys if not key.startswith("beat:")]
        if changed:
            for watch in self._watches:
                watch.touch(changed)

    def notify_all(self) -> None:
        """Wake every watch."""
        for watch in self._watches:
            watch.touch_all()
