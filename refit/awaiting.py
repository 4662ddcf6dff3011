"""A receiver's calls for asyncio: each runs in a thread of its own, and the loop goes on meanwhile.

A task that is cancelled does not break its refit off: the thread goes on to the refit's end, by its deadline, and the
receiver refuses other calls until then. `AsyncCalls.aclose` waits for it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from reshard.refit.report import RefitReport
    from reshard.refit.standing import ServingState
    from reshard.rendezvous.types import VersionKey

__all__ = ["AsyncCalls", "in_a_thread"]

Result = TypeVar("Result")
Wanted = Literal["latest"] | int


class Calls(Protocol):
    """What `AsyncCalls` makes awaitable."""

    @property
    def member(self) -> str: ...
    def refit(
        self, version: Wanted | VersionKey, *, after: VersionKey | None, only: Sequence[str], timeout_s: float
    ) -> RefitReport: ...
    def load(self, version: Wanted | VersionKey, *, only: Sequence[str], timeout_s: float) -> RefitReport: ...
    def resolve(self, *, timeout_s: float) -> ServingState: ...
    def close(self, *, timeout_s: float | None) -> None: ...


class AsyncCalls:
    """The calls of `reshard.refit.receiver.Receiver`, awaitable; parameters and errors are those of the calls."""

    async def arefit(
        self: Calls,
        version: Wanted | VersionKey = "latest",
        *,
        after: VersionKey | None = None,
        only: Sequence[str] = (),
        timeout_s: float,
    ) -> RefitReport:
        """`Receiver.refit`."""
        return await in_a_thread(self.member, lambda: self.refit(version, after=after, only=only, timeout_s=timeout_s))

    async def aload(
        self: Calls, version: Wanted | VersionKey = "latest", *, only: Sequence[str] = (), timeout_s: float
    ) -> RefitReport:
        """`Receiver.load`."""
        return await in_a_thread(self.member, lambda: self.load(version, only=only, timeout_s=timeout_s))

    async def aresolve(self: Calls, *, timeout_s: float) -> ServingState:
        """`Receiver.resolve`."""
        return await in_a_thread(self.member, lambda: self.resolve(timeout_s=timeout_s))

    async def aclose(self: Calls, *, timeout_s: float | None = None) -> None:
        """`Receiver.close`; a refit under way is waited for without holding up the loop."""
        await in_a_thread(self.member, lambda: self.close(timeout_s=timeout_s))


async def in_a_thread(name: str, call: Callable[[], Result]) -> Result:
    """Await ``call()``, made in a new thread with the caller's context variables.

    The loop's own pool is not used: members of one group wait for each other, and it may have too few threads for all.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=f"reshard-{name}")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, contextvars.copy_context().run, call)
    finally:
        pool.shutdown(wait=False)
