"""How does a client reach a service? Calls over gRPC that survive reconnects, and caches of what it knows.

Every call has one deadline. While it lasts, a call that met an outage is sent again after a growing, jittered pause:
all calls may be repeated. What remains of an outage at the deadline is RendezvousUnavailableError. Tables are kept by
digest, and the unchanging part of a version's slots by its digest, so that a warm step carries neither; clients of one
process share both.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace

from reshard.planner.cuts import Cuts
from reshard.planner.shards import ShardPart
from reshard.rendezvous import codec, limits, messages
from reshard.rendezvous.backend import Answer
from reshard.rendezvous.broker import VersionEvent
from reshard.rendezvous.catalog import Lru, parse_content
from reshard.rendezvous.converts import cuts_from_message, cuts_to_message, names_digest, names_to_message
from reshard.rendezvous.errors import (
    InvalidRequestError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
    StaleError,
)
from reshard.rendezvous.flights import Flights
from reshard.rendezvous.link import FIRST_PAUSE_S, MAX_PAUSE_S, Link
from reshard.rendezvous.optional import pb, tables_pb
from reshard.rendezvous.records import Vote
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.tablecache import Content, TableCache
from reshard.rendezvous.transactions import Join
from reshard.rendezvous.types import (
    CutHint,
    CutHints,
    Description,
    Facts,
    Progress,
    SlotRecord,
    TLSFiles,
    VersionKey,
    WorkerInfo,
)

__all__ = ["RemoteBackend"]

_GRACE_S = 0.5  # how long to wait beyond a deadline for a service that ended its wait in time, to hear what it saw
_KEPT = 4  # topologies and sets of bases that a client offers as known


class RemoteBackend:
    """Calls to the service at ``host:port``.

    Parameters
    ----------
    address
        ``host:port``.
    token
        Bearer token to send with each call.
    tls
        None speaks plain text.
    cache
        Tables and topologies; None makes one. Clients of one process may share it.
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: TLSFiles | None = None, cache: TableCache | None = None
    ) -> None:
        self._link = Link(address, token, tls)
        self.cache = cache if cache is not None else TableCache()
        self._topologies: Lru[bytes, messages.Topology] = self.cache.topologies
        self._bases: Lru[bytes, bytes] = self.cache.bases
        self._known: list[bytes] = []
        self._names_flights: Flights[tuple[str, ...], bytes] = Flights()
        self._names_put: Lru[tuple[str, ...], bytes] = Lru(8)

    async def close(self) -> None:
        """Close the channel."""
        await self._link.close()

    async def register(self, worker_id: str, info: WorkerInfo, ttl_s: float, timeout_s: float) -> RetryHint | None:
        """Record a process life."""
        request = pb.RegisterRequest(
            worker_id=messages.id_to_bytes(worker_id),
            role=pb.ROLE_TRAINER if info.role == "trainer" else pb.ROLE_RECEIVER,
            model=info.model,
            host=info.host,
            name=info.name,
            endpoints=dict(info.endpoints),
            ttl_ms=messages.s_to_ms(ttl_s),
        )
        response = await self._link.unary("Register", request, pb.RegisterResponse, timeout_s)
        return messages.hint_from_message(response.retry_hint) if response.HasField("retry_hint") else None

    async def heartbeat(self, worker_id: str, every_s: float, on_sent: Callable[[float], None]) -> None:
        """Beat until cancelled, or until the stream breaks."""
        request = pb.HeartbeatRequest(worker_id=messages.id_to_bytes(worker_id)).SerializeToString()
        await self._link.exchange("Heartbeat", request, every_s, on_sent)

    async def unregister(self, worker_id: str, timeout_s: float) -> None:
        """End a worker."""
        request = pb.UnregisterRequest(worker_id=messages.id_to_bytes(worker_id))
        await self._link.unary("Unregister", request, pb.UnregisterResponse, timeout_s)

    async def put_table(self, part: ShardPart, timeout_s: float) -> bytes:
        """Put a table: ask what is missing, then send that."""
        header = pb.TableHeader(
            part_digest=part.digest, tensors_digest=part.tensors.digest, geometries_digest=part.geometries.digest
        )
        deadline = time.monotonic() + timeout_s
        asked = await self._put_table(header, part, (), timeout_s)
        while asked:
            asked = await self._put_table(header, part, asked, deadline - time.monotonic())
        return part.digest

    async def _put_table(
        self, header: pb.TableHeader, part: ShardPart, digests: Sequence[bytes], timeout_s: float
    ) -> list[bytes]:
        contents = self.cache.encode(part, digests)

        def requests() -> Iterator[bytes]:
            yield pb.PutTableRequest(header=header).SerializeToString()
            for kind, digest, blob in contents:
                for at in range(0, len(blob), limits.CHUNK_BYTES):
                    data = blob[at : at + limits.CHUNK_BYTES]
                    chunk = pb.Chunk(kind=kind, digest=digest, total_bytes=len(blob), data=data)
                    yield pb.PutTableRequest(chunk=chunk).SerializeToString()

        return list((await self._link.upload("PutTable", requests, pb.PutTableResponse, timeout_s)).missing)

    async def get_tables(self, digests: Sequence[bytes], timeout_s: float) -> dict[bytes, ShardPart]:
        """Get tables; those in the cache are not asked for, and one fetch serves all that ask at once."""
        return await self.cache.get(digests, lambda missing, have: self._fetch(missing, have, timeout_s), timeout_s)

    async def _fetch(self, parts: Sequence[bytes], have: Sequence[bytes], timeout_s: float) -> list[Content]:
        """Fetch encoded contents: (kind, digest, blob), dictionaries before their parts."""
        request = pb.GetTablesRequest(parts=parts, have=have)

        async def collect(left_s: float) -> list[Content]:
            found: list[Content] = []
            pieces: list[bytes] = []
            size = 0
            async for response in self._link.stream("GetTables", request, pb.GetTablesResponse, left_s):
                chunk = response.chunk
                limits.check_int("chunk.total_bytes", chunk.total_bytes, at_least=0, at_most=limits.MAX_TABLE_BYTES)
                pieces.append(chunk.data)
                size += len(chunk.data)
                if size > chunk.total_bytes:
                    raise InvalidRequestError("chunk.data", f"{size} bytes came, {chunk.total_bytes} were stated")
                if size == chunk.total_bytes:
                    found.append((chunk.kind, chunk.digest, b"".join(pieces)))
                    pieces, size = [], 0
            return found

        return await self._link.retry("GetTables", collect, timeout_s)

    async def put_names(self, names: Sequence[str], timeout_s: float, *, again: bool = False) -> bytes:
        """Put a set of names, unless this client has put it before."""
        key = tuple(names)
        known = self._names_put.get(key)
        if known is not None and not again:
            return known
        digest = await self._names_flights.join(
            "PutNames", key, lambda left_s: self._put_names(key, left_s), time.monotonic() + timeout_s
        )
        self._names_put.put(key, digest)
        return digest

    async def _put_names(self, names: tuple[str, ...], timeout_s: float) -> bytes:
        digest = names_digest(names)
        ask = pb.PutNamesRequest(digest=digest).SerializeToString()
        if (await self._link.upload("PutNames", lambda: [ask], pb.PutNamesResponse, timeout_s)).missing:
            blob = names_to_message(names).SerializeToString()

            def requests() -> Iterator[bytes]:
                for at in range(0, len(blob), limits.CHUNK_BYTES):
                    data = blob[at : at + limits.CHUNK_BYTES]
                    yield pb.PutNamesRequest(digest=digest, total_bytes=len(blob), data=data).SerializeToString()

            await self._link.upload("PutNames", requests, pb.PutNamesResponse, timeout_s)
        return digest

    async def open_epoch(self, model: str, run_id: str, timeout_s: float) -> int:
        """Give a run its epoch."""
        request = pb.OpenEpochRequest(model=model, run_id=run_id)
        return (await self._link.unary("OpenEpoch", request, pb.OpenEpochResponse, timeout_s)).epoch

    async def open_version(self, key: VersionKey, slots: Sequence[str], layout_epoch: int, timeout_s: float) -> str:
        """Open a version."""
        request = pb.OpenVersionRequest(
            model=key.model, epoch=key.epoch, step=key.step, slots=slots, layout_epoch=layout_epoch
        )
        response = await self._link.unary("OpenVersion", request, pb.OpenVersionResponse, timeout_s)
        return messages.id_from_bytes("uid", response.uid)

    async def publish_slot(self, uid: str, record: SlotRecord, timeout_s: float) -> None:
        """Fill a slot."""
        request = pb.PublishSlotRequest(
            uid=messages.id_to_bytes(uid),
            slot=messages.record_to_message(record),
            region_bases=messages.bases_of([record]),
            digest_root=record.digest_root,
            roots=dict(record.roots),
        )
        await self._link.unary("PublishSlot", request, pb.PublishSlotResponse, timeout_s)

    async def await_version(self, wish: Join, timeout_s: float, on_progress: Callable[[Progress], None]) -> Answer:
        """Wait for a version, and put it together from what is known and what came."""
        deadline = time.monotonic() + timeout_s
        seen = Progress()

        async def listen(left_s: float) -> tuple[pb.Grant, float]:
            nonlocal seen
            granted_s = 0.0
            request = self._wish_to_message(wish, left_s)
            grant: pb.Grant | None = None
            async for event in self._link.stream("AwaitVersion", request, pb.AwaitVersionResponse, left_s + _GRACE_S):
                if event.HasField("grant"):
                    grant, granted_s = event.grant, time.monotonic()
                else:
                    seen = messages.progress_from_message(event.progress)
                    on_progress(seen)
            if grant is None:
                raise RendezvousUnavailableError(f"AwaitVersion at {self._link.address} ended without an answer")
            return grant, granted_s

        try:
            grant, granted_s = await self._link.retry("AwaitVersion", listen, timeout_s)
        except RendezvousTimeoutError as error:
            if error.missing_slots or not seen.message:
                raise
            raise RendezvousTimeoutError(
                f"{error}; last seen: {seen.message}",
                missing_slots=seen.missing,
                empty_slots=seen.empty,
                lost_workers=seen.lost,
                waited_s=timeout_s,
            ) from None
        return await self._answer(wish, grant, granted_s, deadline)

    def _wish_to_message(self, wish: Join, timeout_s: float) -> pb.AwaitVersionRequest:
        after = pb.Stamp(epoch=wish.after.epoch, step=wish.after.step) if wish.after is not None else None
        return pb.AwaitVersionRequest(
            model=wish.model,
            group=wish.group,
            members=wish.members,
            member=wish.member,
            worker_id=messages.id_to_bytes(wish.worker_id),
            step=wish.step,
            epoch=wish.epoch,
            after=after,
            lease_ttl_ms=messages.s_to_ms(wish.lease_ttl_s),
            transaction_timeout_ms=messages.s_to_ms(wish.transaction_timeout_s),
            timeout_ms=messages.s_to_ms(_inner(timeout_s)),
            known=self._known,
        )

    async def _answer(self, wish: Join, grant: pb.Grant, granted_s: float, deadline: float) -> Answer:
        content = (grant.topology_digest, grant.bases_digest, grant.roots)
        slots = self.cache.slots.get(content)
        if slots is None:
            slots = await self._slots(grant, deadline)
            self.cache.slots.put(content, slots)
        self._offer(grant.bases_digest)
        return Answer(
            key=VersionKey(wish.model, grant.stamp.epoch, grant.stamp.step),
            uid=messages.id_from_bytes("grant.uid", grant.uid),
            layout_epoch=grant.layout_epoch,
            slots=slots,
            transaction=messages.id_from_bytes("grant.transaction", grant.transaction),
            members=wish.members,
            lease_id=messages.id_from_bytes("grant.lease", grant.lease),
            lease_ttl_s=wish.lease_ttl_s,
            granted_s=granted_s,
            identity=messages.identity_of(grant.uid, grant.topology_digest, grant.bases_digest, grant.roots),
        )

    async def _slots(self, grant: pb.Grant, deadline: float) -> tuple[SlotRecord, ...]:
        """Put the slots together, fetching what of them is not known."""
        bases = grant.bases if grant.HasField("bases") else self._bases.get(grant.bases_digest)
        topology = self._topologies.get(grant.topology_digest)
        if bases is None:
            bases = await self._get_topology(grant.uid, grant.bases_digest, True, deadline)
        if topology is None:
            blob = await self._get_topology(grant.uid, grant.topology_digest, False, deadline)
            topology = self._topologies.get(grant.topology_digest) or messages.topology_from_bytes(blob)
        if hashlib.sha256(bases).digest() != grant.bases_digest or topology.digest != grant.topology_digest:
            raise RendezvousError("the service sent slots that do not match their digests")
        self._topologies.put(grant.topology_digest, topology)
        self._bases.put(grant.bases_digest, bases)
        return messages.slots_of(topology, bases, grant.roots)

    def _offer(self, digest: bytes) -> None:
        if digest in self._known:
            self._known.remove(digest)
        self._known.append(digest)
        del self._known[:-_KEPT]

    async def _get_topology(self, uid: bytes, digest: bytes, bases: bool, deadline: float) -> bytes:
        request = pb.GetTopologyRequest(uid=uid, bases=bases)

        async def collect(left_s: float) -> bytes:
            pieces: list[bytes] = []
            size = 0
            async for response in self._link.stream("GetTopology", request, pb.GetTopologyResponse, left_s):
                total = limits.check_int(
                    "total_bytes", response.total_bytes, at_least=0, at_most=limits.MAX_TOPOLOGY_BYTES
                )
                pieces.append(response.data)
                size += len(response.data)
                if size > total:
                    raise InvalidRequestError("topology.data", f"{size} bytes came, {total} were stated")
            return b"".join(pieces)

        async def fetch(left_s: float) -> bytes:
            return await self._link.retry("GetTopology", collect, left_s)

        return await self.cache.topology_flights.join("GetTopology", digest, fetch, deadline)

    async def watch_versions(self, model: str, timeout_s: float) -> AsyncGenerator[VersionEvent, None]:
        """Watch a model; after a reconnect only what changed meanwhile is told."""
        deadline = time.monotonic() + timeout_s
        told: dict[str, VersionEvent] = {}
        pause_s = FIRST_PAUSE_S
        while (left_s := deadline - time.monotonic()) > 0:
            request = pb.WatchVersionsRequest(model=model, timeout_ms=messages.s_to_ms(left_s))
            try:
                if told:
                    # the stream broke: it begins anew with what is offered, and says nothing of what no longer is
                    versions = (await self.describe(left_s)).versions
                    ready = {version.uid for version in versions if version.state == "ready"}
                    for uid in [uid for uid in told if uid not in ready]:
                        yield replace(told.pop(uid), offered=False)
                async for response in self._link.stream(
                    "WatchVersions", request, pb.WatchVersionsResponse, left_s + _GRACE_S
                ):
                    key = VersionKey(model, response.stamp.epoch, response.stamp.step)
                    event = VersionEvent(messages.id_from_bytes("uid", response.uid), key, response.offered)
                    pause_s = FIRST_PAUSE_S
                    if event.offered is not (event.uid in told):
                        if event.offered:
                            told[event.uid] = event
                        else:
                            told.pop(event.uid)
                        yield event
                return
            except RendezvousUnavailableError:
                if time.monotonic() + pause_s >= deadline:
                    raise
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except RendezvousTimeoutError:
                return

    async def renew_lease(self, uid: str, lease_id: str, ttl_s: float, timeout_s: float) -> None:
        """Prolong a lease."""
        request = pb.RenewLeaseRequest(
            uid=messages.id_to_bytes(uid), lease=messages.id_to_bytes(lease_id), ttl_ms=messages.s_to_ms(ttl_s)
        )
        await self._link.unary("RenewLease", request, pb.RenewLeaseResponse, timeout_s)

    async def release_lease(self, uid: str, lease_id: str, timeout_s: float) -> None:
        """End a lease."""
        request = pb.ReleaseLeaseRequest(uid=messages.id_to_bytes(uid), lease=messages.id_to_bytes(lease_id))
        await self._link.unary("ReleaseLease", request, pb.ReleaseLeaseResponse, timeout_s)

    async def close_admission(self, uid: str, timeout_s: float) -> None:
        """Grant no new leases."""
        request = pb.CloseAdmissionRequest(uid=messages.id_to_bytes(uid))
        await self._link.unary("CloseAdmission", request, pb.CloseAdmissionResponse, timeout_s)

    async def wait_leases(self, uid: str, timeout_s: float) -> None:
        """Wait for the leases' end."""

        def request(left_s: float) -> pb.WaitLeasesRequest:
            return pb.WaitLeasesRequest(uid=messages.id_to_bytes(uid), timeout_ms=messages.s_to_ms(_inner(left_s)))

        await self._link.unary("WaitLeases", request, pb.WaitLeasesResponse, timeout_s, grace_s=_GRACE_S)

    async def retire(self, uid: str, timeout_s: float) -> bool:
        """Let a version go."""
        request = pb.RetireRequest(uid=messages.id_to_bytes(uid))
        return (await self._link.unary("Retire", request, pb.RetireResponse, timeout_s)).gone

    async def vote(self, txn_id: str, member: str, worker_id: str, vote: Vote, timeout_s: float) -> Facts:
        """Vote, and wait for the decision."""

        def request(left_s: float) -> pb.VoteRequest:
            return pb.VoteRequest(
                transaction=messages.id_to_bytes(txn_id),
                member=member,
                worker_id=messages.id_to_bytes(worker_id),
                yes=vote.yes,
                reason=vote.reason,
                identity=vote.identity,
                plan_digest=vote.plan_digest,
                names_digest=vote.names_digest,
                allow_unconsumed=vote.allow_unconsumed,
                wire_bytes=vote.wire_bytes,
                timeout_ms=messages.s_to_ms(_inner(left_s)),
            )

        response = await self._link.unary("Vote", request, pb.VoteResponse, timeout_s, grace_s=_GRACE_S)
        return messages.facts_from_message(response.facts)

    async def installed(
        self, txn_id: str, member: str, worker_id: str, ok: bool, reason: str, timeout_s: float
    ) -> Facts:
        """Say how installing went, and wait for the outcome."""

        def request(left_s: float) -> pb.InstalledRequest:
            return pb.InstalledRequest(
                transaction=messages.id_to_bytes(txn_id),
                member=member,
                worker_id=messages.id_to_bytes(worker_id),
                ok=ok,
                reason=reason,
                timeout_ms=messages.s_to_ms(_inner(left_s)),
            )

        response = await self._link.unary("Installed", request, pb.InstalledResponse, timeout_s, grace_s=_GRACE_S)
        return messages.facts_from_message(response.facts)

    async def ask(self, txn_id: str, wait_s: float, timeout_s: float) -> Facts:
        """Ask for facts."""

        def request(left_s: float) -> pb.AskDecisionRequest:
            wait_ms = messages.s_to_ms(min(wait_s, _inner(left_s))) if wait_s else 0
            return pb.AskDecisionRequest(transaction=messages.id_to_bytes(txn_id), timeout_ms=wait_ms)

        response = await self._link.unary("AskDecision", request, pb.AskDecisionResponse, timeout_s + wait_s)
        return messages.facts_from_message(response.facts)

    async def put_cuts(self, model: str, group: str, member: str, cuts: Cuts, timeout_s: float) -> int:
        """Put a receiver's cuts: their digest first, and the cuts if the service lacks them."""
        deadline = time.monotonic() + timeout_s
        request = pb.PutCutsRequest(model=model, group=group, member=member, digest=cuts.digest)
        try:
            response = await self._link.unary("PutCuts", request, pb.PutCutsResponse, timeout_s)
        except StaleError:
            request.cuts = cuts_to_message(cuts).SerializeToString(deterministic=True)
            left_s = max(deadline - time.monotonic(), 0.001)
            response = await self._link.unary("PutCuts", request, pb.PutCutsResponse, left_s)
        self.cache.cuts.put(cuts.digest, cuts)
        return response.layout_epoch

    async def get_cuts(self, model: str, layout_epoch: int | None, timeout_s: float) -> CutHints:
        """Get all receivers' cuts; those in the cache are not sent."""
        known = dict(self.cache.cuts.items())
        request = pb.GetCutsRequest(model=model, layout_epoch=layout_epoch, have=list(known))

        async def collect(left_s: float) -> list[pb.GetCutsResponse]:
            stream = self._link.stream("GetCuts", request, pb.GetCutsResponse, left_s)
            return [response async for response in stream]

        answers = await self._link.retry("GetCuts", collect, timeout_s)
        if not answers:
            raise RendezvousError(f"GetCuts at {self._link.address} ended without an answer")
        head, *rows = answers
        hints = []
        for row in rows:
            cuts = known.get(row.digest)
            if cuts is None:
                message = tables_pb.CutTable()
                parse_content("cuts", message, row.cuts)
                cuts = known[row.digest] = cuts_from_message(message, row.digest)
                self.cache.cuts.put(row.digest, cuts)
            hints.append(CutHint(row.group, row.member, cuts))
        return CutHints(head.layout_epoch, tuple(hints))

    async def describe(self, timeout_s: float) -> Description:
        """Describe everything."""

        async def collect(left_s: float) -> bytes:
            stream = self._link.stream("Describe", pb.DescribeRequest(), pb.DescribeResponse, left_s)
            return b"".join([response.data async for response in stream])

        return codec.decode(Description, await self._link.retry("Describe", collect, timeout_s))


def _inner(timeout_s: float) -> float:
    """The time that the service may wait, so that its answer arrives before the call's deadline."""
    return max(timeout_s - 0.2, 0.8 * timeout_s)
