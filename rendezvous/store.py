"""Where is the state kept, and how is a transition made atomic? The store protocol, and the store in memory.

A store runs transitions (see :mod:`reshard.rendezvous.view`), keeps content-addressed blobs (encoded tables),
and tells watchers when records change. The store in memory is the default: it lives and dies with its
process. Its caller runs it on one event loop, so a transition, which never awaits, is atomic by itself.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from reshard.rendezvous.records import Record
from reshard.rendezvous.view import View
from reshard.rendezvous.watching import Watchers

__all__ = ["BLOB_IDLE_S", "MemoryStore", "Ran", "Store", "Watch"]

T = TypeVar("T")
BLOB_IDLE_S = 3600.0  # a blob that no live version names is kept this long after its last use


@dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """What a transition returned, when it ran, and when to look again: a change of `watched`, or `wake_s`."""

    value: T
    now: float
    watched: frozenset[str]
    wake_s: float


class Watch(Protocol):
    """A subscription: set it on keys first, then read, then wait, so that no change between is lost."""

    async def changed(self, keys: Iterable[str], timeout_s: float) -> bool:
        """Wait until one of `keys` has changed since the last call (True), or `timeout_s` passed (False)."""
        ...


class Store(Protocol):
    """What the broker needs of a store."""

    name: str

    async def run(self, transition: Callable[[View], T]) -> Ran[T]:
        """Run a transition atomically. What it raises is raised, and then nothing was written."""
        ...

    def watch(self) -> AbstractAsyncContextManager[Watch]:
        """Subscribe to changes."""
        ...

    async def names(self, kind: str) -> list[str]:
        """List the names of all records of a kind."""
        ...

    async def put_blob(self, digest: bytes, blob: bytes) -> None:
        """Keep a blob under its digest."""
        ...

    async def get_blob(self, digest: bytes) -> bytes | None:
        """Return a blob, or None."""
        ...

    async def has_blobs(self, digests: Sequence[bytes]) -> list[bool]:
        """Tell which blobs are here, and count that as a use of them."""
        ...

    async def sweep_blobs(self, pinned: Iterable[bytes]) -> int:
        """Drop blobs not pinned and long unused; return how many."""
        ...

    async def close(self) -> None:
        """Release what the store holds."""
        ...


class MemoryStore:
    """The store in memory.

    Parameters
    ----------
    clock
        Seconds, monotonic; a test may pass its own.
    max_blob_bytes
        Bound on all blobs together; a put beyond it raises MemoryError.
    """

    name = "memory"

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, max_blob_bytes: int = 8 << 30) -> None:
        self._clock = clock
        self._records: dict[str, Record] = {}
        self._blobs: dict[bytes, bytes] = {}
        self._blob_used: dict[bytes, float] = {}
        self._blob_bytes = 0
        self._max_blob_bytes = max_blob_bytes
        self._watchers = Watchers()

    async def run(self, transition: Callable[[View], T]) -> Ran[T]:
        """Run a transition; see :class:`Store`."""
        return self.run_now(transition)

    def run_now(self, transition: Callable[[View], T]) -> Ran[T]:
        """Run a transition without an event loop (tests, single-threaded callers)."""
        view = View(self._clock(), self._records.get)
        value = transition(view)
        for key, record in view.writes.items():
            if record is None:
                self._records.pop(key, None)
            else:
                self._records[key] = record
        self._watchers.notify(view.writes)
        return Ran(value, view.now, frozenset(view.watched), view.wake_s)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Watch]:
        """Subscribe to changes; see :class:`Store`."""
        with self._watchers.subscribe() as watch:
            yield watch

    async def names(self, kind: str) -> list[str]:
        """List the names of all records of a kind."""
        prefix = f"{kind}:"
        return [key[len(prefix) :] for key in self._records if key.startswith(prefix)]

    @property
    def records(self) -> Mapping[str, Record]:
        """All records by key text (for tests and inspection)."""
        return self._records

    async def put_blob(self, digest: bytes, blob: bytes) -> None:
        """Keep a blob."""
        if digest not in self._blobs:
            if self._blob_bytes + len(blob) > self._max_blob_bytes:
                raise MemoryError(f"tables of {self._blob_bytes} bytes are kept; {len(blob)} more exceed the bound")
            self._blobs[digest] = blob
            self._blob_bytes += len(blob)
        self._blob_used[digest] = self._clock()

    async def get_blob(self, digest: bytes) -> bytes | None:
        """Return a blob, or None."""
        blob = self._blobs.get(digest)
        if blob is not None:
            self._blob_used[digest] = self._clock()
        return blob

    async def has_blobs(self, digests: Sequence[bytes]) -> list[bool]:
        """Tell which blobs are here."""
        now = self._clock()
        found = [digest in self._blobs for digest in digests]
        self._blob_used.update((digest, now) for digest, here in zip(digests, found, strict=True) if here)
        return found

    async def sweep_blobs(self, pinned: Iterable[bytes]) -> int:
        """Drop blobs not pinned and unused for an hour."""
        keep = set(pinned)
        horizon = self._clock() - BLOB_IDLE_S
        idle = [d for d, used in self._blob_used.items() if used < horizon and d not in keep]
        for digest in idle:
            self._blob_bytes -= len(self._blobs.pop(digest))
            del self._blob_used[digest]
        return len(idle)

    async def close(self) -> None:
        """Forget everything."""
        self._records.clear()
        self._blobs.clear()
        self._blob_used.clear()
        self._blob_bytes = 0
