"""What does a client need of the other side? One protocol, over gRPC or straight into a broker of the same process."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from reshard.planner.cuts import Cuts
from reshard.planner.shards import ShardPart
from reshard.rendezvous.broker import Broker, VersionEvent
from reshard.rendezvous.catalog import ObjectCatalog
from reshard.rendezvous.converts import names_digest
from reshard.rendezvous.descriptions import Description
from reshard.rendezvous.errors import RendezvousError
from reshard.rendezvous.joining import Join
from reshard.rendezvous.records import Hint, Vote
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.store import MemoryStore
from reshard.rendezvous.types import CutHint, CutHints, Facts, Progress, SlotRecord, VersionKey, WorkerInfo

__all__ = ["CLOSED", "Answer", "Backend", "LocalBackend"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A granted version.

    `identity` is 32 bytes over what was granted, which members' votes must agree on; `granted_s` is when the grant
    came, on ``time.monotonic()``.
    """

    key: VersionKey
    uid: str
    layout_epoch: int
    slots: tuple[SlotRecord, ...]
    transaction: str
    members: tuple[str, ...]
    lease_id: str
    lease_ttl_s: float
    granted_s: float
    identity: bytes


class Backend(Protocol):
    """Every call bounds its own time by `timeout_s` and raises only errors of the rendezvous' tree."""

    async def register(self, worker_id: str, info: WorkerInfo, ttl_s: float, timeout_s: float) -> RetryHint | None:
        """Record a process life; the answer is what the service suggests."""
        ...

    async def heartbeat(self, worker_id: str, every_s: float, on_sent: Callable[[float], None]) -> None:
        """Beat until cancelled. `on_sent` hears the monotonic sending time of each acknowledged beat.

        Raises
        ------
        WorkerLostError
            The service says so.
        RendezvousUnavailableError
            The stream broke; the caller may try again.
        """
        ...

    async def unregister(self, worker_id: str, timeout_s: float) -> None:
        """End a worker."""
        ...

    async def put_table(self, part: ShardPart, timeout_s: float) -> bytes:
        """Put a table."""
        ...

    async def get_tables(self, digests: Sequence[bytes], timeout_s: float) -> dict[bytes, ShardPart]:
        """Get tables."""
        ...

    async def put_names(self, names: Sequence[str], timeout_s: float, *, again: bool = False) -> bytes:
        """Put a set of names; `again` sends it even if it was sent before."""
        ...

    async def open_epoch(self, model: str, run_id: str, timeout_s: float) -> int:
        """Give a run its epoch."""
        ...

    async def open_version(self, key: VersionKey, slots: Sequence[str], layout_epoch: int, timeout_s: float) -> str:
        """Open a version."""
        ...

    async def publish_slot(self, uid: str, record: SlotRecord, timeout_s: float) -> None:
        """Fill a slot."""
        ...

    async def await_version(self, wish: Join, timeout_s: float, on_progress: Callable[[Progress], None]) -> Answer:
        """Wait for a version."""
        ...

    def watch_versions(self, model: str, timeout_s: float) -> AsyncGenerator[VersionEvent, None]:
        """Watch a model."""
        ...

    async def renew_lease(self, uid: str, lease_id: str, ttl_s: float, timeout_s: float) -> None:
        """Prolong a lease."""
        ...

    async def release_lease(self, uid: str, lease_id: str, timeout_s: float) -> None:
        """End a lease."""
        ...

    async def close_admission(self, uid: str, timeout_s: float) -> None:
        """Grant no new leases."""
        ...

    async def wait_leases(self, uid: str, timeout_s: float) -> None:
        """Wait for the leases' end."""
        ...

    async def retire(self, uid: str, timeout_s: float) -> bool:
        """Let a version go."""
        ...

    async def vote(self, txn_id: str, member: str, worker_id: str, vote: Vote, timeout_s: float) -> Facts:
        """Vote."""
        ...

    async def installed(
        self, txn_id: str, member: str, worker_id: str, ok: bool, reason: str, timeout_s: float
    ) -> Facts:
        """Say how installing went."""
        ...

    async def ask(self, txn_id: str, wait_s: float, timeout_s: float) -> Facts:
        """Ask for facts."""
        ...

    async def put_cuts(self, model: str, group: str, member: str, cuts: Cuts, timeout_s: float) -> int:
        """Put a receiver's cuts."""
        ...

    async def get_cuts(self, model: str, layout_epoch: int | None, timeout_s: float) -> CutHints:
        """Get all receivers' cuts."""
        ...

    async def describe(self, timeout_s: float) -> Description:
        """Describe everything."""
        ...

    async def close(self) -> None:
        """Release the connection."""
        ...


class LocalBackend:
    """A broker of this process, on a store in memory. Tables are shared as the objects they are."""

    def __init__(self) -> None:
        self._catalog = ObjectCatalog()
        self._broker = Broker(MemoryStore(), self._catalog)

    async def register(self, worker_id: str, info: WorkerInfo, ttl_s: float, timeout_s: float) -> RetryHint | None:
        """Record a process life."""
        self._broker.start()
        await self._broker.register(worker_id, info, ttl_s)
        return None

    async def heartbeat(self, worker_id: str, every_s: float, on_sent: Callable[[float], None]) -> None:
        """Beat until cancelled."""
        while True:
            sent_s = time.monotonic()
            await self._broker.beat(worker_id)
            on_sent(sent_s)
            await asyncio.sleep(every_s)

    async def unregister(self, worker_id: str, timeout_s: float) -> None:
        """End a worker."""
        await self._broker.close_worker(worker_id)

    async def put_table(self, part: ShardPart, timeout_s: float) -> bytes:
        """Put a table."""
        return self._catalog.put_part(part)

    async def get_tables(self, digests: Sequence[bytes], timeout_s: float) -> dict[bytes, ShardPart]:
        """Get tables."""
        return {digest: self._catalog.get_part(digest) for digest in digests}

    async def put_names(self, names: Sequence[str], timeout_s: float, *, again: bool = False) -> bytes:
        """Put a set of names."""
        digest = names_digest(names)
        self._catalog.put_names(digest, names)
        return digest

    async def open_epoch(self, model: str, run_id: str, timeout_s: float) -> int:
        """Give a run its epoch."""
        return await self._broker.open_epoch(model, run_id)

    async def open_version(self, key: VersionKey, slots: Sequence[str], layout_epoch: int, timeout_s: float) -> str:
        """Open a version."""
        return await self._broker.open_version(key, slots, layout_epoch)

    async def publish_slot(self, uid: str, record: SlotRecord, timeout_s: float) -> None:
        """Fill a slot."""
        await self._broker.publish_slot(uid, record)

    async def await_version(self, wish: Join, timeout_s: float, on_progress: Callable[[Progress], None]) -> Answer:
        """Wait for a version."""

        async def report(progress: Progress) -> None:
            on_progress(progress)

        granted = await self._broker.await_version(wish, timeout_s, report)
        version = granted.version
        return Answer(
            key=version.key,
            uid=version.uid,
            layout_epoch=version.layout_epoch,
            slots=granted.slots,
            transaction=granted.transaction,
            members=granted.members,
            lease_id=granted.lease_id,
            lease_ttl_s=granted.lease_ttl_s,
            granted_s=time.monotonic(),
            identity=hashlib.sha256(version.uid.encode()).digest(),
        )

    def watch_versions(self, model: str, timeout_s: float) -> AsyncGenerator[VersionEvent, None]:
        """Watch a model."""
        return self._broker.watch_versions(model, timeout_s)

    async def renew_lease(self, uid: str, lease_id: str, ttl_s: float, timeout_s: float) -> None:
        """Prolong a lease."""
        await self._broker.renew_lease(uid, lease_id, ttl_s)

    async def release_lease(self, uid: str, lease_id: str, timeout_s: float) -> None:
        """End a lease."""
        await self._broker.release_lease(uid, lease_id)

    async def close_admission(self, uid: str, timeout_s: float) -> None:
        """Grant no new leases."""
        await self._broker.close_admission(uid)

    async def wait_leases(self, uid: str, timeout_s: float) -> None:
        """Wait for the leases' end."""
        await self._broker.wait_leases(uid, timeout_s)

    async def retire(self, uid: str, timeout_s: float) -> bool:
        """Let a version go."""
        return await self._broker.retire(uid)

    async def vote(self, txn_id: str, member: str, worker_id: str, vote: Vote, timeout_s: float) -> Facts:
        """Vote."""
        return await self._broker.vote(txn_id, member, worker_id, vote, timeout_s)

    async def installed(
        self, txn_id: str, member: str, worker_id: str, ok: bool, reason: str, timeout_s: float
    ) -> Facts:
        """Say how installing went."""
        return await self._broker.installed(txn_id, member, worker_id, ok, reason, timeout_s)

    async def ask(self, txn_id: str, wait_s: float, timeout_s: float) -> Facts:
        """Ask for facts."""
        return await self._broker.ask(txn_id, wait_s)

    async def put_cuts(self, model: str, group: str, member: str, cuts: Cuts, timeout_s: float) -> int:
        """Put a receiver's cuts."""
        return await self._broker.put_hint(model, Hint(group, member, self._catalog.put_cuts(cuts)))

    async def get_cuts(self, model: str, layout_epoch: int | None, timeout_s: float) -> CutHints:
        """Get all receivers' cuts."""
        found = await self._broker.get_hints(model, layout_epoch)
        hints = (CutHint(row.group, row.member, self._catalog.get_cuts(row.digest)) for row in found.hints)
        return CutHints(found.layout_epoch, tuple(hints))

    async def describe(self, timeout_s: float) -> Description:
        """Describe everything."""
        return await self._broker.describe()

    async def close(self) -> None:
        """Forget everything."""
        await self._broker.close()


class _Closed:
    """The backend of a closed client."""

    async def close(self) -> None:
        """Nothing is left to release."""

    def __getattr__(self, name: str) -> object:
        raise RendezvousError(f"{name}: this client is closed; make another")


CLOSED = cast("Backend", _Closed())
"""The backend of a client that was closed: every call raises RendezvousError."""
