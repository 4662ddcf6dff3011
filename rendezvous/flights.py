"""How do several callers share one fetch? Each waits under its own deadline, and none inherits another's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from reshard.rendezvous.errors import RendezvousTimeoutError, RendezvousUnavailableError

__all__ = ["Flights"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Flights(Generic[K, V]):
    """Work under way, by key, on one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[K, asyncio.Future[V]] = {}

    async def join(self, what: str, key: K, work: Callable[[float], Awaitable[V]], deadline_s: float) -> V:
        """Return what `work` of this key returns, whoever started it.

        Parameters
        ----------
        what
            For errors.
        work
            Gets the seconds that it has.
        deadline_s
            Of this caller, on ``time.monotonic()``. If work that another started ends by that one's deadline, it is
            begun again.

        Raises
        ------
        RendezvousTimeoutError
            This caller's deadline passed.
        RendezvousError
            What `work` raised.
        """
        started_s = time.monotonic()
        while True:
            flight = self._under_way.get(key)
            mine = flight is None
            left_s = max(deadline_s - time.monotonic(), 0.001)
            if flight is None:
                flight = self._begin(key, work(left_s))
            done, _ = await asyncio.wait([flight], timeout=left_s + (0.5 if mine else 0.0))
            if not done:
                raise RendezvousTimeoutError(
                    f"{what}: not done within {deadline_s - started_s:.3g} s", waited_s=deadline_s - started_s
                )
            try:
                return flight.result()
            except (RendezvousTimeoutError, RendezvousUnavailableError):
                if mine or time.monotonic() >= deadline_s:
                    raise

    def _begin(self, key: K, work: Awaitable[V]) -> asyncio.Future[V]:
        flight = asyncio.ensure_future(work)
        self._under_way[key] = flight

        def landed(done: asyncio.Future[V]) -> None:
            self._under_way.pop(key, None)
            if not done.cancelled():
                done.exception()  # if nobody waits any more, nobody need hear

        flight.add_done_callback(landed)
        return flight
