"""How does a process life stay alive? :class:`AsyncWorker`: its heartbeat outlives broken streams, within its TTL."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from reshard.rendezvous.backend import Backend
from reshard.rendezvous.errors import RendezvousError, WorkerLostError
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.types import WorkerInfo

__all__ = ["AnyWorker", "AsyncWorker", "noting_lost"]

_log = logging.getLogger(__name__)


class AnyWorker(Protocol):
    """What calls need of a worker, be it for asyncio or for threads."""

    @property
    def id(self) -> str:
        """The fresh id of this process life."""
        ...

    @property
    def info(self) -> WorkerInfo:
        """What was registered."""
        ...

    @property
    def lost(self) -> bool:
        """Whether it is lost, as far as is known here."""
        ...


class AsyncWorker:
    """A registered process life. Its heartbeat runs until it is closed or lost."""

    def __init__(
        self,
        backend: Backend,
        on_closed: Callable[[AsyncWorker], None],
        worker_id: str,
        info: WorkerInfo,
        ttl_s: float,
        retry_hint: RetryHint | None,
    ) -> None:
        self.id = worker_id
        self.info = info
        self.ttl_s = ttl_s
        self.retry_hint = retry_hint  # what the service suggests for dials and lease requests
        self._backend = backend
        self._on_closed = on_closed
        self._lost = False
        self._alive_until_s = time.monotonic() + ttl_s
        self._task = asyncio.get_running_loop().create_task(self._beat_forever())

    @property
    def lost(self) -> bool:
        """Whether the service said so, or no beat was acknowledged within the TTL. It stays so: register anew."""
        return self._lost or time.monotonic() >= self._alive_until_s

    def note_lost(self) -> None:
        """Know it lost from an answer of the service, before the next beat would."""
        self._lost = True

    async def close(self) -> None:
        """Stop the heartbeat and tell the service, if it can be reached."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self.lost:
            try:
                await self._backend.unregister(self.id, 2.0)
            except RendezvousError as error:
                _log.info("worker %s could not be ended, its TTL will: %s", self.info.name, error)
        self._lost = True
        self._on_closed(self)

    async def _beat_forever(self) -> None:
        def on_sent(sent_s: float) -> None:
            self._alive_until_s = sent_s + self.ttl_s

        backoff_s = 0.05
        while not self.lost:
            started = time.monotonic()
            try:
                await self._backend.heartbeat(self.id, self.ttl_s / 3, on_sent)
            except WorkerLostError as error:
                _log.warning("worker %s: %s", self.info.name, error)
                self._lost = True
            except RendezvousError as error:
                _log.info("heartbeat of %s broke, it is resumed: %s", self.info.name, error)
                backoff_s = 0.05 if time.monotonic() - started > 1.0 else min(backoff_s * 2, 1.0)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
        self._lost = True


@contextmanager
def noting_lost(workers: Iterable[AsyncWorker], worker_id: str) -> Iterator[None]:
    """A call of a worker's: where the service says that it is lost, the worker knows, and its owner registers anew."""
    try:
        yield
    except WorkerLostError:
        for worker in workers:
            if worker.id == worker_id:
                worker.note_lost()
        raise
