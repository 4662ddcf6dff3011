"""How does a worker talk to the rendezvous from asyncio? :class:`AsyncRendezvous`.

``connect`` reaches a service, ``in_process`` is a rendezvous without a server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from reshard.planner.cuts import Cuts
from reshard.planner.shards import ShardPart
from reshard.rendezvous import limits
from reshard.rendezvous.arguments import checked_timeout, ignore, instance_of, left_s, require_live, split_want
from reshard.rendezvous.backend import CLOSED, Backend, LocalBackend
from reshard.rendezvous.broker import VersionEvent, new_id
from reshard.rendezvous.descriptions import Description
from reshard.rendezvous.errors import RendezvousError, StaleError
from reshard.rendezvous.joined import Joined
from reshard.rendezvous.joining import Join
from reshard.rendezvous.records import Vote
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
from reshard.rendezvous.worker import AnyWorker, AsyncWorker, noting_lost

__all__ = ["CALL_S", "AnyWorker", "AsyncRendezvous", "AsyncWorker"]

CALL_S = 30.0  # the deadline of a call that does not wait for others, unless told


class AsyncRendezvous:
    """The rendezvous' calls, for asyncio. Use it on one event loop.

    Every call takes `timeout_s`, seconds, finite and over 0, and raises errors of :mod:`reshard.rendezvous.errors`
    only: an outage is :class:`RendezvousUnavailableError`, never an empty answer; a field out of its bounds is
    :class:`InvalidRequestError`, a token that is missing or wrong :class:`AuthenticationError`. Beside these:

    =================  ================================================================================================
    call               raises
    =================  ================================================================================================
    get_tables         StaleError: a table is not there, or no longer
    open_epoch         VersionError: a newer epoch replaced the run's
    open_version       VersionError: publishers disagree, or the step goes back; StaleError: it was published and went
    publish_slot       WorkerLostError; VersionError: a second table, a changed layout; StaleError: the version or the
                       table is not there; EqualityError: it completed a version whose replicas differ
    await_version      see there; also WorkerLostError, TransactionError, AbortedError
    wait_leases        RendezvousTimeoutError
    renew_lease        LeaseError: it has ended
    vote, installed    RendezvousTimeoutError; TransactionError: it contradicts what was said before
    get_cuts           StaleError: hints of that layout epoch are not there
    any                RendezvousError: the client is closed
    =================  ================================================================================================
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._workers: set[AsyncWorker] = set()
        self._joined = Joined()

    @classmethod
    def in_process(cls) -> AsyncRendezvous:
        """A rendezvous of this process alone, with no server and no optional package."""
        return cls(LocalBackend())

    @classmethod
    def connect(cls, address: str, *, token: str | None = None, tls: TLSFiles | None = None) -> AsyncRendezvous:
        """A client of the service at ``host:port``. Nothing is sent yet.

        Parameters
        ----------
        address
            ``host:port``.
        token
            Bearer token, if the service wants one.
        tls
            TLS files; None speaks plain text.
        """
        from reshard.rendezvous.remote import RemoteBackend

        return cls(RemoteBackend(address, token=token, tls=tls))

    async def __aenter__(self) -> AsyncRendezvous:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def register(self, info: WorkerInfo, *, ttl_s: float = 10.0, timeout_s: float = CALL_S) -> AsyncWorker:
        """Register this process life under a fresh id, and keep it alive."""
        limits.check_ttl("ttl_s", ttl_s)
        worker_id = new_id()
        hint = await self.backend.register(
            worker_id, instance_of(WorkerInfo, "info", info), ttl_s, checked_timeout(timeout_s)
        )
        worker = AsyncWorker(self.backend, self._workers.discard, worker_id, info, ttl_s, hint)
        self._workers.add(worker)
        return worker

    async def put_table(self, part: ShardPart, *, timeout_s: float = CALL_S) -> bytes:
        """Put a table; returns its digest. What the service has already is not sent."""
        return await self.backend.put_table(part, checked_timeout(timeout_s))

    async def get_tables(self, digests: Sequence[bytes], *, timeout_s: float = CALL_S) -> dict[bytes, ShardPart]:
        """Get tables by digest. Their holder is a placeholder; see ``ShardPart.with_holder``."""
        checked = [limits.check_digest(f"digests[{i}]", digest) for i, digest in enumerate(digests)]
        return await self.backend.get_tables(checked, checked_timeout(timeout_s))

    async def open_epoch(self, model: str, run_id: str, *, timeout_s: float = CALL_S) -> int:
        """Give a run of a trainer its epoch: the same for all its ranks, a new one for each run."""
        limits.check_name("model", model)
        limits.check_name("run_id", run_id)
        return await self.backend.open_epoch(model, run_id, checked_timeout(timeout_s))

    async def open_version(
        self, key: VersionKey, slots: Sequence[str], *, layout_epoch: int = 0, timeout_s: float = CALL_S
    ) -> str:
        """Open a version with all the slots it needs, or agree with whoever did. Returns its uid."""
        names = limits.check_names("slots", slots, at_most=limits.MAX_SLOTS)
        limits.check_int("layout_epoch", layout_epoch, at_least=0, at_most=limits.MAX_STEP)
        instance_of(VersionKey, "key", key)
        return await self.backend.open_version(key, names, layout_epoch, checked_timeout(timeout_s))

    async def publish_slot(self, uid: str, record: SlotRecord, worker: AnyWorker, *, timeout_s: float = CALL_S) -> None:
        """Fill a slot of a version; the last one makes it ready."""
        limits.check_id("uid", uid)
        require_live(worker)
        instance_of(SlotRecord, "record", record)
        if record.worker_id != worker.id:
            raise RendezvousError(f"slot {record.slot!r} names worker {record.worker_id}, published by {worker.id}")
        with noting_lost(self._workers, worker.id):
            await self.backend.publish_slot(uid, record, checked_timeout(timeout_s))

    async def await_version(
        self,
        model: str,
        *,
        group: str,
        members: Sequence[str],
        member: str,
        worker: AnyWorker,
        want: VersionKey | int | str = "latest",
        after: VersionKey | None = None,
        lease_ttl_s: float = 30.0,
        transaction_timeout_s: float = 600.0,
        timeout_s: float,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Manifest:
        """Wait for a complete version, join the group's transaction to it, and take a lease, in one call.

        Parameters
        ----------
        model, group, members, member
            Which group asks, all its members, and which of them this is.
        worker
            This process life, a receiver.
        want
            ``"latest"``, a step of the current epoch, or a whole key. If the group has an open transaction, its version
            is what members get; asking for another step is a TransactionError.
        after
            With ``"latest"``: only a newer version than this opens a transaction.
        lease_ttl_s
            How long the lease lasts unless renewed.
        transaction_timeout_s
            How long the service waits for all votes, and then again for all installations.
        on_progress
            Hears now and then what is missing.

        Raises
        ------
        RendezvousTimeoutError
            Naming missing slots, lost workers and empty tables.
        EqualityError, StaleError
            The step asked for was refused, or is gone.
        """
        step, epoch = split_want(model, want)
        if after is not None:
            instance_of(VersionKey, "after", after)
        limits.check_name("model", model)
        wish = Join(
            model=model,
            group=limits.check_name("group", group),
            members=limits.check_names("members", members, at_most=limits.MAX_MEMBERS),
            member=limits.check_name("member", member),
            worker_id=require_live(worker),
            epoch=epoch,
            step=step,
            after=after,
            lease_ttl_s=limits.check_ttl("lease_ttl_s", lease_ttl_s),
            transaction_timeout_s=limits.check_timeout("transaction_timeout_s", transaction_timeout_s),
            new_transaction=new_id(),
            new_lease=new_id(),
        )
        with noting_lost(self._workers, worker.id):
            answer = await self.backend.await_version(wish, checked_timeout(timeout_s), on_progress or ignore)
        self._joined.add(answer, member, worker.id, n_workers=len(self._workers))
        return Manifest(
            version=answer.key,
            uid=answer.uid,
            layout_epoch=answer.layout_epoch,
            transaction=answer.transaction,
            members=answer.members,
            slots=answer.slots,
            lease=Lease(answer.lease_id, answer.uid, answer.lease_ttl_s, answer.granted_s),
        )

    async def watch_versions(self, model: str, *, timeout_s: float) -> AsyncGenerator[VersionEvent, None]:
        """Yield versions of a model as they become offered, and again when they no longer are, for `timeout_s`."""
        limits.check_name("model", model)
        async with aclosing(self.backend.watch_versions(model, checked_timeout(timeout_s))) as events:
            async for event in events:
                yield event

    async def renew_lease(self, lease: Lease, *, ttl_s: float | None = None, timeout_s: float = CALL_S) -> Lease:
        """Prolong a lease; the returned one counts from the moment this was sent. LeaseError if it had ended."""
        instance_of(Lease, "lease", lease)
        ttl_s = lease.ttl_s if ttl_s is None else limits.check_ttl("ttl_s", ttl_s)
        sent_s = time.monotonic()
        await self.backend.renew_lease(lease.version_uid, lease.id, ttl_s, checked_timeout(timeout_s))
        return Lease(lease.id, lease.version_uid, ttl_s, sent_s)

    async def release_lease(self, lease: Lease, *, timeout_s: float = CALL_S) -> None:
        """End a lease; one that has ended is no error."""
        instance_of(Lease, "lease", lease)
        await self.backend.release_lease(lease.version_uid, lease.id, checked_timeout(timeout_s))

    async def close_admission(self, uid: str, *, timeout_s: float = CALL_S) -> None:
        """Grant no new leases on a version."""
        await self.backend.close_admission(limits.check_id("uid", uid), checked_timeout(timeout_s))

    async def wait_leases(self, uid: str, *, timeout_s: float) -> None:
        """Wait until no lease on a version lives: with :meth:`close_admission` before it, the fence."""
        await self.backend.wait_leases(limits.check_id("uid", uid), checked_timeout(timeout_s))

    async def retire(self, uid: str, *, timeout_s: float = CALL_S) -> bool:
        """Close admission and let the version go with its last lease; tells whether it is gone now."""
        return await self.backend.retire(limits.check_id("uid", uid), checked_timeout(timeout_s))

    async def vote(
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
        """Vote, and wait for the decision.

        Parameters
        ----------
        transaction, member
            As awaited through this client.
        yes
            Ready to install; after a yes this member no longer decides by itself.
        reason
            Of a no, for people.
        plan_digest
            Kept with the vote.
        names_consumed
            Source tensors that this member's plan reads. The union over the group must cover all published names but
            those that match `allow_unconsumed`, or the decision is ABORT.
        allow_unconsumed
            ``fnmatch`` patterns of names that nobody need consume; ``*`` allows all.
        wire_bytes
            Bytes that the plan reads; a group with none is aborted.

        Returns
        -------
        Facts
            ``decision`` is COMMIT, ABORT, or UNKNOWN where the service has no record of the transaction.

        Raises
        ------
        RendezvousTimeoutError, RendezvousUnavailableError
            The decision was not learned: after a yes the member is in doubt, and must ask (:meth:`ask_decision`).
        """
        deadline = time.monotonic() + checked_timeout(timeout_s)
        part = self._joined.find(transaction, member)
        limits.check_sequence("names_consumed", names_consumed)
        digest = await self.backend.put_names(names_consumed, timeout_s) if yes else b""
        vote = Vote(
            yes=yes,
            reason=limits.check_name("reason", reason[:1024], empty_ok=True),
            identity=part.identity,
            plan_digest=limits.check_bytes("plan_digest", plan_digest, at_most=64),
            names_digest=digest,
            allow_unconsumed=limits.check_patterns("allow_unconsumed", allow_unconsumed),
            wire_bytes=limits.check_int("wire_bytes", wire_bytes, at_least=0, at_most=2**62),
        )
        try:
            return await self.backend.vote(transaction, member, part.worker_id, vote, left_s(deadline))
        except StaleError:
            if not yes:
                raise
            # the service has forgotten the set of names, after an hour without use or a restart
            await self.backend.put_names(names_consumed, left_s(deadline), again=True)
            return await self.backend.vote(transaction, member, part.worker_id, vote, left_s(deadline))

    async def installed(self, transaction: str, member: str, ok: bool, *, reason: str = "", timeout_s: float) -> Facts:
        """Say whether installing succeeded, and wait for the outcome: SERVE, QUARANTINE or UNKNOWN."""
        part = self._joined.find(transaction, member)
        reason = limits.check_name("reason", reason[:1024], empty_ok=True)
        return await self.backend.installed(transaction, member, part.worker_id, ok, reason, checked_timeout(timeout_s))

    async def ask_decision(self, transaction: str, *, wait_s: float = 0.0, timeout_s: float = CALL_S) -> Facts:
        """Ask for a transaction's facts; `wait_s` waits that long for the next one that is open."""
        limits.check_id("transaction", transaction)
        if wait_s:
            limits.check_timeout("wait_s", wait_s)
        return await self.backend.ask(transaction, wait_s, checked_timeout(timeout_s))

    async def put_cuts(self, model: str, cuts: Cuts, *, group: str, member: str, timeout_s: float = CALL_S) -> int:
        """Say where a receiver cuts the source tensors; returns the first layout epoch whose hints include it."""
        for name, value in (("model", model), ("group", group), ("member", member)):
            limits.check_name(name, value)
        return await self.backend.put_cuts(model, group, member, cuts, checked_timeout(timeout_s))

    async def get_cuts(self, model: str, *, layout_epoch: int | None = None, timeout_s: float = CALL_S) -> CutHints:
        """Get the hints of all receivers of a model, of one layout epoch (None: the newest).

        All ranks of a trainer must take the same set, and open their versions with its layout epoch.
        """
        limits.check_name("model", model)
        if layout_epoch is not None:
            limits.check_int("layout_epoch", layout_epoch, at_least=0, at_most=limits.MAX_STEP)
        return await self.backend.get_cuts(model, layout_epoch, checked_timeout(timeout_s))

    async def describe(self, *, timeout_s: float = CALL_S) -> Description:
        """Describe everything that the service knows."""
        return await self.backend.describe(checked_timeout(timeout_s))

    async def close(self) -> None:
        """End the workers registered here, and the connection."""
        await asyncio.gather(*(worker.close() for worker in tuple(self._workers)))
        self._workers.clear()
        backend, self.backend = self.backend, CLOSED
        await backend.close()
