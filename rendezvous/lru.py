"""What was used last? A mapping of bounded size that forgets what was not."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Lru"]

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A mapping that keeps what was used last, up to a number of entries."""

    def __init__(self, at_most: int) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._at_most = at_most

    def get(self, key: K) -> V | None:
        """Return an entry, or None."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def drop(self, key: K) -> None:
        """Forget an entry, if it is there."""
        self._entries.pop(key, None)

    def items(self) -> list[tuple[K, V]]:
        """Return all entries."""
        return list(self._entries.items())

    def keys(self) -> list[K]:
        """Return the keys of all entries."""
        return list(self._entries)

    def put(self, key: K, value: V) -> None:
        """Keep an entry, dropping the one used longest ago if there are too many."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._at_most:
            self._entries.popitem(last=False)
