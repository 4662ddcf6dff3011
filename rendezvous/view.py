"""How does a transition see the store? As a consistent snapshot with buffered writes.

A transition is a plain function of a :class:`View`. It reads and writes records and either returns or raises;
the store then applies all its writes at once or, if it raised or a record that it read has changed meanwhile,
none. The view notes which records were read with interest (`watch`), and the earliest time at which the
passing of time alone could change the answer (`wake_at`), so that a waiter knows when to look again: on a
change of those records, or then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from reshard.rendezvous.keys import Key
from reshard.rendezvous.records import R, Record

__all__ = ["NotLoadedError", "View"]


class NotLoadedError(LookupError):
    """The snapshot lacks keys; the store loads them and runs the transition again. Never leaves a store."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(", ".join(keys))
        self.keys = tuple(keys)


class View:
    """A snapshot of the store at time `now` (seconds), with buffered writes.

    Parameters
    ----------
    now
        The store's clock.
    load
        Gives the record under a key's text, None if there is none; may raise :class:`NotLoadedError`.
    """

    __slots__ = ("_load", "now", "reads", "wake_s", "watched", "writes")

    def __init__(self, now: float, load: Callable[[str], Record | None]) -> None:
        self.now = now
        self.reads: set[str] = set()
        self.watched: set[str] = set()
        self.writes: dict[str, Record | None] = {}
        self.wake_s = math.inf
        self._load = load

    def get(self, key: Key[R], *, watch: bool = True) -> R | None:
        """Return the record under `key`, or None; `watch` makes a waiter look again when it changes."""
        text = str(key)
        if text in self.writes:
            return cast("R | None", self.writes[text])
        record = self._load(text)
        self.reads.add(text)
        if watch:
            self.watched.add(text)
        return cast("R | None", record)

    def get_many(self, keys: Iterable[Key[R]], *, watch: bool = True) -> list[R | None]:
        """Return several records; a store that must fetch them does so at once."""
        found: list[R | None] = []
        absent: list[str] = []
        for key in keys:
            try:
                found.append(self.get(key, watch=watch))
            except NotLoadedError as error:
                absent.extend(error.keys)
        if absent:
            raise NotLoadedError(absent)
        return found

    def put(self, key: Key[R], record: R) -> None:
        """Replace the record under `key`, when the transition ends."""
        self.writes[str(key)] = record

    def delete(self, key: Key[R]) -> None:
        """Remove the record under `key`, when the transition ends."""
        self.writes[str(key)] = None

    def watch(self, key: Key[R]) -> None:
        """Make a waiter look again when the record under `key` is written, without reading it."""
        self.watched.add(str(key))

    def wake_at(self, time_s: float) -> None:
        """Say that the answer may change at `time_s` even if no record does."""
        self.wake_s = min(self.wake_s, time_s)
