"""How does a worker talk to the rendezvous from threads? :class:`Rendezvous`.

It has the calls of :class:`~reshard.rendezvous.aio.AsyncRendezvous` and runs them on an event loop in a daemon thread
that all synchronous clients of the process share. It may be used from any thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import TypeVar

from reshard.planner.cuts import Cuts
from reshard.planner.shards import ShardPart
from reshard.rendezvous.aio import CALL_S, AsyncRendezvous, AsyncWorker
from reshard.rendezvous.broker import VersionEvent
from reshard.rendezvous.descriptions import Description
from reshard.rendezvous.errors import RendezvousError
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.types import (
    CutHints,
    Facts,
    Lease,
    Manifest,
    Progress,
    SlotRecord,
    TLSFiles,
    VersionKey,
    WorkerInfo,
)

__all__ = ["AsyncRendezvous", "Rendezvous", "TLSFiles", "Worker"]

T = TypeVar("T")


class _LoopThread:
    """One event loop in a daemon thread, shared by the synchronous clients of a process."""

    _lock = threading.Lock()
    _shared: _LoopThread | None = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="reshard-rendezvous", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> _LoopThread:
        """Return this process' thread; a forked child gets its own."""
        with cls._lock:
            if cls._shared is None or cls._shared.pid != os.getpid():
                cls._shared = cls()
            return cls._shared

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` on the loop and wait for it; an interrupt here cancels it there."""
        if self.pid != os.getpid():
            work.close()
            raise RendezvousError("this client was made before a fork; make one in each process")
        if threading.current_thread() is self._thread:
            work.close()
            raise RendezvousError("the synchronous client was called on its own loop thread; use AsyncRendezvous there")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class Worker:
    """A registered process life, for threads. Its heartbeat runs until it is closed or lost."""

    def __init__(self, worker: AsyncWorker, thread: _LoopThread) -> None:
        self._worker = worker
        self._thread = thread

    @property
    def id(self) -> str:
        """The fresh id of this process life."""
        return self._worker.id

    @property
    def info(self) -> WorkerInfo:
        """What was registered."""
        return self._worker.info

    @property
    def retry_hint(self) -> RetryHint | None:
        """How often the service suggests to try a dial or a lease request."""
        return self._worker.retry_hint

    @property
    def lost(self) -> bool:
        """Whether the service counts it as lost, as far as is known here."""
        return self._worker.lost

    def close(self) -> None:
        """Stop the heartbeat and tell the service."""
        self._thread.call(self._worker.close())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Rendezvous:
    """The rendezvous' calls, for any thread.

    See :class:`~reshard.rendezvous.aio.AsyncRendezvous`, whose parameters and errors these are.
    """

    def __init__(self, client: AsyncRendezvous, thread: _LoopThread) -> None:
        self._client = client
        self._thread = thread

    @classmethod
    def in_process(cls) -> Rendezvous:
        """A rendezvous of this process alone, with no server and no optional package; its threads share the object."""
        return cls(AsyncRendezvous.in_process(), _LoopThread.shared())

    @classmethod
    def connect(cls, address: str, *, token: str | None = None, tls: TLSFiles | None = None) -> Rendezvous:
        """A client of the service at ``host:port``. Nothing is sent yet."""
        thread = _LoopThread.shared()

        async def build() -> AsyncRendezvous:
            return AsyncRendezvous.connect(address, token=token, tls=tls)

        return cls(thread.call(build()), thread)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def register(self, info: WorkerInfo, *, ttl_s: float = 10.0, timeout_s: float = CALL_S) -> Worker:
        """Register this process life under a fresh id, and keep it alive."""
        worker = self._thread.call(self._client.register(info, ttl_s=ttl_s, timeout_s=timeout_s))
        return Worker(worker, self._thread)

    def put_table(self, part: ShardPart, *, timeout_s: float = CALL_S) -> bytes:
        """Put a table; returns its digest."""
        return self._thread.call(self._client.put_table(part, timeout_s=timeout_s))

    def get_tables(self, digests: Sequence[bytes], *, timeout_s: float = CALL_S) -> dict[bytes, ShardPart]:
        """Get tables by digest."""
        return self._thread.call(self._client.get_tables(digests, timeout_s=timeout_s))

    def open_epoch(self, model: str, run_id: str, *, timeout_s: float = CALL_S) -> int:
        """Give a run of a trainer its epoch."""
        return self._thread.call(self._client.open_epoch(model, run_id, timeout_s=timeout_s))

    def open_version(
        self, key: VersionKey, slots: Sequence[str], *, layout_epoch: int = 0, timeout_s: float = CALL_S
    ) -> str:
        """Open a version, or agree with whoever did. Returns its uid."""
        work = self._client.open_version(key, slots, layout_epoch=layout_epoch, timeout_s=timeout_s)
        return self._thread.call(work)

    def publish_slot(self, uid: str, record: SlotRecord, worker: Worker, *, timeout_s: float = CALL_S) -> None:
        """Fill a slot of a version; the last one makes it ready."""
        self._thread.call(self._client.publish_slot(uid, record, worker, timeout_s=timeout_s))

    def await_version(
        self,
        model: str,
        *,
        group: str,
        members: Sequence[str],
        member: str,
        worker: Worker,
        want: VersionKey | int | str = "latest",
        after: VersionKey | None = None,
        lease_ttl_s: float = 30.0,
        transaction_timeout_s: float = 600.0,
        timeout_s: float,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Manifest:
        """Wait for a complete version, join the group's transaction to it, and take a lease, in one call."""
        return self._thread.call(
            self._client.await_version(
                model,
                group=group,
                members=members,
                member=member,
                worker=worker,
                want=want,
                after=after,
                lease_ttl_s=lease_ttl_s,
                transaction_timeout_s=transaction_timeout_s,
                timeout_s=timeout_s,
                on_progress=on_progress,
            )
        )

    def watch_versions(self, model: str, *, timeout_s: float) -> Iterator[VersionEvent]:
        """Yield versions of a model as they become offered, and again when they no longer are, for `timeout_s`."""
        events = self._client.watch_versions(model, timeout_s=timeout_s)
        try:
            while (event := self._thread.call(_next(events))) is not None:
                yield event
        finally:
            self._thread.call(_close(events))

    def renew_lease(self, lease: Lease, *, ttl_s: float | None = None, timeout_s: float = CALL_S) -> Lease:
        """Prolong a lease; the returned one counts from the moment this was sent."""
        return self._thread.call(self._client.renew_lease(lease, ttl_s=ttl_s, timeout_s=timeout_s))

    def release_lease(self, lease: Lease, *, timeout_s: float = CALL_S) -> None:
        """End a lease; one that has ended is no error."""
        self._thread.call(self._client.release_lease(lease, timeout_s=timeout_s))

    def close_admission(self, uid: str, *, timeout_s: float = CALL_S) -> None:
        """Grant no new leases on a version."""
        self._thread.call(self._client.close_admission(uid, timeout_s=timeout_s))

    def wait_leases(self, uid: str, *, timeout_s: float) -> None:
        """Wait until no lease on a version lives."""
        self._thread.call(self._client.wait_leases(uid, timeout_s=timeout_s))

    def retire(self, uid: str, *, timeout_s: float = CALL_S) -> bool:
        """Close admission and let the version go with its last lease; tells whether it is gone now."""
        return self._thread.call(self._client.retire(uid, timeout_s=timeout_s))

    def vote(
        self,
        transaction: str,
        member: str,
        yes: bool,
        *,
        reason: str = "",
        plan_digest: bytes = b"",
        names_consumed: Sequence[str] = (),
        allow_unconsumed: Sequence[str] = (),
        wire_bytes: int = 0,
        timeout_s: float,
    ) -> Facts:
        """Vote, and wait for the decision."""
        return self._thread.call(
            self._client.vote(
                transaction,
                member,
                yes,
                reason=reason,
                plan_digest=plan_digest,
                names_consumed=names_consumed,
                allow_unconsumed=allow_unconsumed,
                wire_bytes=wire_bytes,
                timeout_s=timeout_s,
            )
        )

    def installed(self, transaction: str, member: str, ok: bool, *, reason: str = "", timeout_s: float) -> Facts:
        """Say whether installing succeeded, and wait for the outcome."""
        return self._thread.call(self._client.installed(transaction, member, ok, reason=reason, timeout_s=timeout_s))

    def ask_decision(self, transaction: str, *, wait_s: float = 0.0, timeout_s: float = CALL_S) -> Facts:
        """Ask for a transaction's facts."""
        return self._thread.call(self._client.ask_decision(transaction, wait_s=wait_s, timeout_s=timeout_s))

    def put_cuts(self, model: str, cuts: Cuts, *, group: str, member: str, timeout_s: float = CALL_S) -> int:
        """Say where a receiver cuts the source tensors; returns the first layout epoch whose hints include it."""
        return self._thread.call(self._client.put_cuts(model, cuts, group=group, member=member, timeout_s=timeout_s))

    def get_cuts(self, model: str, *, layout_epoch: int | None = None, timeout_s: float = CALL_S) -> CutHints:
        """Get the hints of all receivers of a model, of one layout epoch (None: the newest)."""
        return self._thread.call(self._client.get_cuts(model, layout_epoch=layout_epoch, timeout_s=timeout_s))

    def describe(self, *, timeout_s: float = CALL_S) -> Description:
        """Describe everything that the service knows."""
        return self._thread.call(self._client.describe(timeout_s=timeout_s))

    def close(self) -> None:
        """End the workers registered here, and the connection."""
        self._thread.call(self._client.close())


async def _next(events: AsyncGenerator[VersionEvent, None]) -> VersionEvent | None:
    return await anext(events, None)


async def _close(events: AsyncGenerator[VersionEvent, None]) -> None:
    await events.aclose()
