"""What does the service answer to each call? Messages in, broker calls, messages out.

The methods here see parsed messages and raise errors of the tree; :mod:`reshard.rendezvous.endpoint` does what is
common to all calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from reshard.rendezvous import codec, limits, messages
from reshard.rendezvous.broker import Broker, new_id
from reshard.rendezvous.catalog import BlobCatalog
from reshard.rendezvous.errors import InvalidRequestError, StaleError
from reshard.rendezvous.joining import Granted, Join
from reshard.rendezvous.lru import Lru
from reshard.rendezvous.optional import pb
from reshard.rendezvous.records import Hint
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.types import Progress, SlotRecord, VersionKey
from reshard.rendezvous.uploads import Pieces, Uploads

__all__ = ["Handlers", "Send"]

M = TypeVar("M")
Send = Callable[[M], Awaitable[None]]

_INLINE_BASES_BYTES = 256 << 10
_MAX_KNOWN = 16
_MAX_DIGESTS = 65536  # of a GetTables


@dataclass(frozen=True, slots=True)
class _Packed:
    """A complete version as it is sent. Its slots never change, so it is packed once."""

    topology: bytes
    topology_digest: bytes
    bases: bytes
    bases_digest: bytes
    roots: bytes


class Handlers:
    """One method a call of ``RendezvousService``."""

    def __init__(self, broker: Broker, catalog: BlobCatalog, retry_hint: RetryHint | None = None) -> None:
        self._retry_hint = messages.hint_to_message(retry_hint) if retry_hint is not None else None
        self._broker = broker
        self._catalog = catalog
        self._uploads = Uploads()
        self._packed: Lru[str, _Packed] = Lru(64)

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """Record a process life."""
        info = messages.worker_from_message(request)
        ttl_s = messages.ms_to_s("ttl_ms", request.ttl_ms, at_most=limits.MAX_TTL_S)
        await self._broker.register(messages.id_from_bytes("worker_id", request.worker_id), info, ttl_s)
        return pb.RegisterResponse(retry_hint=self._retry_hint)

    async def heartbeat(self, requests: AsyncIterator[pb.HeartbeatRequest], send: Send[pb.HeartbeatResponse]) -> None:
        """Prolong a worker's life with each message."""
        worker_id = ""
        async for request in requests:
            sender = messages.id_from_bytes("worker_id", request.worker_id)
            if worker_id and sender != worker_id:
                raise InvalidRequestError("worker_id", "a heartbeat stream belongs to one worker")
            worker_id = sender
            await self._broker.beat(worker_id)
            await send(pb.HeartbeatResponse())

    async def unregister(self, request: pb.UnregisterRequest) -> pb.UnregisterResponse:
        """End a worker."""
        await self._broker.close_worker(messages.id_from_bytes("worker_id", request.worker_id))
        return pb.UnregisterResponse()

    async def put_table(self, requests: AsyncIterator[pb.PutTableRequest]) -> pb.PutTableResponse:
        """Keep a table, or say what of it is missing."""
        first = await anext(requests, None)
        if first is None or not first.HasField("header"):
            raise InvalidRequestError("header", "the first message must be a header")
        header = first.header
        part = limits.check_digest("header.part_digest", header.part_digest)
        tensors = limits.check_digest("header.tensors_digest", header.tensors_digest)
        geometries = limits.check_digest("header.geometries_digest", header.geometries_digest)
        digests = (part, tensors, geometries)
        pieces: dict[bytes, Pieces] = {}
        with self._uploads.begin() as upload:
            async for request in requests:
                if not request.HasField("chunk"):
                    raise InvalidRequestError("chunk", "only the first message is a header")
                chunk = request.chunk
                if chunk.digest not in digests:
                    raise InvalidRequestError("chunk.digest", "the header does not name this digest")
                if chunk.digest not in pieces:
                    pieces[chunk.digest] = Pieces("chunk", chunk.total_bytes, upload)
                pieces[chunk.digest].add(chunk.total_bytes, chunk.data)
            contents = {digest: piece.whole() for digest, piece in pieces.items()}
            if not contents:
                return pb.PutTableResponse(missing=await self._catalog.missing(digests))
            return pb.PutTableResponse(missing=await self._catalog.put_table(part, tensors, geometries, contents))

    async def get_tables(self, request: pb.GetTablesRequest, send: Send[pb.GetTablesResponse]) -> None:
        """Send tables and those of their dictionaries that the caller lacks."""
        limits.check_int("parts", len(request.parts), at_least=1, at_most=_MAX_DIGESTS)
        limits.check_int("have", len(request.have), at_least=0, at_most=_MAX_DIGESTS)
        parts = [limits.check_digest(f"parts[{i}]", digest) for i, digest in enumerate(request.parts)]
        sent = {limits.check_digest(f"have[{i}]", digest) for i, digest in enumerate(request.have)}
        kinds = (pb.CONTENT_KIND_TENSORS, pb.CONTENT_KIND_GEOMETRIES, pb.CONTENT_KIND_PART)
        for part in parts:
            head = await self._catalog.head(part)
            if head is None:
                raise StaleError(f"table {part.hex()[:16]}... is not here")
            for kind, digest in zip(kinds, (head[1], head[2], part), strict=True):
                if digest in sent:
                    continue
                sent.add(digest)
                blob = await self._catalog.get(digest)
                for at in range(0, len(blob), limits.CHUNK_BYTES) or (0,):
                    data = blob[at : at + limits.CHUNK_BYTES]
                    chunk = pb.Chunk(kind=kind, digest=digest, total_bytes=len(blob), data=data)
                    await send(pb.GetTablesResponse(chunk=chunk))

    async def put_names(self, requests: AsyncIterator[pb.PutNamesRequest]) -> pb.PutNamesResponse:
        """Keep a set of names, or say that it is missing."""
        with self._uploads.begin() as upload:
            digest, pieces = b"", Pieces("names", 0, upload)
            async for request in requests:
                if not digest:
                    digest = limits.check_digest("digest", request.digest)
                    pieces = Pieces("names", request.total_bytes, upload)
                elif request.digest != digest:
                    raise InvalidRequestError("digest", "a stream carries one set")
                pieces.add(request.total_bytes, request.data)
            limits.check_digest("digest", digest)
            if not pieces.n_bytes:
                return pb.PutNamesResponse(missing=bool(await self._catalog.missing([digest])))
            await self._catalog.put_names(digest, pieces.whole())
            return pb.PutNamesResponse()

    async def open_epoch(self, request: pb.OpenEpochRequest) -> pb.OpenEpochResponse:
        """Give a run its epoch."""
        model = limits.check_name("model", request.model)
        return pb.OpenEpochResponse(
            epoch=await self._broker.open_epoch(model, limits.check_name("run_id", request.run_id))
        )

    async def open_version(self, request: pb.OpenVersionRequest) -> pb.OpenVersionResponse:
        """Open a version."""
        if not request.HasField("step"):
            raise InvalidRequestError("step", "no step is given; step 0 must be said")
        key = VersionKey(request.model, request.epoch, request.step)
        slots = limits.check_names("slots", request.slots, at_most=limits.MAX_SLOTS)
        layout_epoch = limits.check_int("layout_epoch", request.layout_epoch, at_least=0, at_most=limits.MAX_STEP)
        uid = await self._broker.open_version(key, slots, layout_epoch)
        return pb.OpenVersionResponse(uid=messages.id_to_bytes(uid))

    async def publish_slot(self, request: pb.PublishSlotRequest) -> pb.PublishSlotResponse:
        """Fill a slot."""
        uid = messages.id_from_bytes("uid", request.uid)
        if not request.HasField("slot"):
            raise InvalidRequestError("record", "no slot is given")
        bases = messages.uint64s("record.region_bases", request.region_bases)
        record = messages.record_from_message(request.slot, bases, request.digest_root, dict(request.roots))
        await self._broker.publish_slot(uid, record)
        return pb.PublishSlotResponse()

    async def close_admission(self, request: pb.CloseAdmissionRequest) -> pb.CloseAdmissionResponse:
        """Grant no new leases."""
        await self._broker.close_admission(messages.id_from_bytes("uid", request.uid))
        return pb.CloseAdmissionResponse()

    async def wait_leases(self, request: pb.WaitLeasesRequest) -> pb.WaitLeasesResponse:
        """Wait for the leases' end."""
        uid = messages.id_from_bytes("uid", request.uid)
        await self._broker.wait_leases(uid, messages.ms_to_s("timeout_ms", request.timeout_ms))
        return pb.WaitLeasesResponse()

    async def retire(self, request: pb.RetireRequest) -> pb.RetireResponse:
        """Let a version go."""
        return pb.RetireResponse(gone=await self._broker.retire(messages.id_from_bytes("uid", request.uid)))

    async def await_version(self, request: pb.AwaitVersionRequest, send: Send[pb.AwaitVersionResponse]) -> None:
        """Send progress now and then, and at last a grant."""
        wish, timeout_s = _wish(request)
        known = {limits.check_digest(f"known[{i}]", digest) for i, digest in enumerate(request.known[:_MAX_KNOWN])}

        async def report(progress: Progress) -> None:
            await send(pb.AwaitVersionResponse(progress=messages.progress_to_message(progress)))

        granted = await self._broker.await_version(wish, timeout_s, report)
        await send(pb.AwaitVersionResponse(grant=self._grant(granted, known)))

    def _grant(self, granted: Granted, known: set[bytes]) -> pb.Grant:
        version = granted.version
        packed = self._pack(version.uid, granted.slots)
        grant = pb.Grant(
            uid=messages.id_to_bytes(version.uid),
            stamp=pb.Stamp(epoch=version.key.epoch, step=version.key.step),
            layout_epoch=version.layout_epoch,
            transaction=messages.id_to_bytes(granted.transaction),
            lease=messages.id_to_bytes(granted.lease_id),
            topology_digest=packed.topology_digest,
            bases_digest=packed.bases_digest,
            roots=packed.roots,
        )
        if packed.bases_digest not in known and len(packed.bases) <= _INLINE_BASES_BYTES:
            grant.bases = packed.bases
        return grant

    def _pack(self, uid: str, records: Sequence[SlotRecord]) -> _Packed:
        packed = self._packed.get(uid)
        if packed is None:
            topology, bases = messages.topology_to_bytes(records), messages.bases_of(records)
            digest = hashlib.sha256
            packed = _Packed(
                topology, digest(topology).digest(), bases, digest(bases).digest(), messages.roots_of(records)
            )
            self._packed.put(uid, packed)
        return packed

    async def get_topology(self, request: pb.GetTopologyRequest, send: Send[pb.GetTopologyResponse]) -> None:
        """Send what of a version's slots seldom changes, or all their region bases."""
        uid = messages.id_from_bytes("uid", request.uid)
        packed = self._packed.get(uid) or self._pack(uid, await self._broker.version_slots(uid))
        blob = packed.bases if request.bases else packed.topology
        for at in range(0, len(blob), limits.CHUNK_BYTES) or (0,):
            await send(pb.GetTopologyResponse(total_bytes=len(blob), data=blob[at : at + limits.CHUNK_BYTES]))

    async def watch_versions(self, request: pb.WatchVersionsRequest, send: Send[pb.WatchVersionsResponse]) -> None:
        """Tell of versions as they come and go."""
        model = limits.check_name("model", request.model)
        timeout_s = messages.ms_to_s("timeout_ms", request.timeout_ms)
        async with aclosing(self._broker.watch_versions(model, timeout_s)) as events:
            async for event in events:
                stamp = pb.Stamp(epoch=event.key.epoch, step=event.key.step)
                uid = messages.id_to_bytes(event.uid)
                await send(pb.WatchVersionsResponse(uid=uid, stamp=stamp, offered=event.offered))

    async def renew_lease(self, request: pb.RenewLeaseRequest) -> pb.RenewLeaseResponse:
        """Prolong a lease."""
        uid, lease = messages.id_from_bytes("uid", request.uid), messages.id_from_bytes("lease", request.lease)
        ttl_s = messages.ms_to_s("ttl_ms", request.ttl_ms, at_most=limits.MAX_TTL_S)
        await self._broker.renew_lease(uid, lease, ttl_s)
        return pb.RenewLeaseResponse()

    async def release_lease(self, request: pb.ReleaseLeaseRequest) -> pb.ReleaseLeaseResponse:
        """End a lease."""
        uid, lease = messages.id_from_bytes("uid", request.uid), messages.id_from_bytes("lease", request.lease)
        await self._broker.release_lease(uid, lease)
        return pb.ReleaseLeaseResponse()

    async def vote(self, request: pb.VoteRequest) -> pb.VoteResponse:
        """Count a vote, and answer with the decision."""
        facts = await self._broker.vote(
            messages.id_from_bytes("transaction", request.transaction),
            limits.check_name("member", request.member),
            messages.id_from_bytes("worker_id", request.worker_id),
            messages.vote_from_message(request),
            messages.ms_to_s("timeout_ms", request.timeout_ms),
        )
        return pb.VoteResponse(facts=messages.facts_to_message(facts))

    async def installed(self, request: pb.InstalledRequest) -> pb.InstalledResponse:
        """Count an installation, and answer with the outcome."""
        facts = await self._broker.installed(
            messages.id_from_bytes("transaction", request.transaction),
            limits.check_name("member", request.member),
            messages.id_from_bytes("worker_id", request.worker_id),
            request.ok,
            limits.check_name("reason", request.reason, empty_ok=True),
            messages.ms_to_s("timeout_ms", request.timeout_ms),
        )
        return pb.InstalledResponse(facts=messages.facts_to_message(facts))

    async def ask_decision(self, request: pb.AskDecisionRequest) -> pb.AskDecisionResponse:
        """Answer with a transaction's facts."""
        txn_id = messages.id_from_bytes("transaction", request.transaction)
        wait_s = messages.ms_to_s("timeout_ms", request.timeout_ms) if request.timeout_ms else 0.0
        return pb.AskDecisionResponse(facts=messages.facts_to_message(await self._broker.ask(txn_id, wait_s)))

    async def put_cuts(self, request: pb.PutCutsRequest) -> pb.PutCutsResponse:
        """Keep where a receiver cuts."""
        model = limits.check_name("model", request.model)
        hint = Hint(
            limits.check_name("group", request.group),
            limits.check_name("member", request.member),
            limits.check_digest("digest", request.digest),
        )
        await self._catalog.put_cuts(hint.digest, request.cuts)
        return pb.PutCutsResponse(layout_epoch=await self._broker.put_hint(model, hint))

    async def get_cuts(self, request: pb.GetCutsRequest, send: Send[pb.GetCutsResponse]) -> None:
        """Send where all receivers of a model cut; what is equal or known is sent once or not at all."""
        limits.check_int("have", len(request.have), at_least=0, at_most=_MAX_DIGESTS)
        sent = {limits.check_digest(f"have[{i}]", digest) for i, digest in enumerate(request.have)}
        wanted = request.layout_epoch if request.HasField("layout_epoch") else None
        found = await self._broker.get_hints(limits.check_name("model", request.model), wanted)
        await send(pb.GetCutsResponse(layout_epoch=found.layout_epoch))
        for hint in found.hints:
            response = pb.GetCutsResponse(
                layout_epoch=found.layout_epoch, group=hint.group, member=hint.member, digest=hint.digest
            )
            if hint.digest not in sent:
                sent.add(hint.digest)
                response.cuts = await self._catalog.get(hint.digest)
            await send(response)

    async def describe(self, request: pb.DescribeRequest, send: Send[pb.DescribeResponse]) -> None:
        """Send everything."""
        blob = codec.encode(await self._broker.describe())
        for at in range(0, len(blob), limits.CHUNK_BYTES):
            await send(pb.DescribeResponse(data=blob[at : at + limits.CHUNK_BYTES]))


def _wish(request: pb.AwaitVersionRequest) -> tuple[Join, float]:
    model = limits.check_name("model", request.model)
    after = None
    if request.HasField("after"):
        after = VersionKey(model, request.after.epoch, request.after.step)
    step = request.step if request.HasField("step") else None
    epoch = request.epoch if request.HasField("epoch") else None
    if epoch is not None and step is None:
        raise InvalidRequestError("epoch", "an epoch is given without a step")
    for name, value in (("step", step), ("epoch", epoch)):
        if value is not None:
            limits.check_int(name, value, at_least=0, at_most=limits.MAX_STEP)
    limits.check_int("known", len(request.known), at_least=0, at_most=_MAX_KNOWN)
    wish = Join(
        model=model,
        group=limits.check_name("group", request.group),
        members=limits.check_names("members", request.members, at_most=limits.MAX_MEMBERS),
        member=limits.check_name("member", request.member),
        worker_id=messages.id_from_bytes("worker_id", request.worker_id),
        epoch=epoch,
        step=step,
        after=after,
        lease_ttl_s=messages.ms_to_s("lease_ttl_ms", request.lease_ttl_ms, at_most=limits.MAX_TTL_S),
        transaction_timeout_s=messages.ms_to_s("transaction_timeout_ms", request.transaction_timeout_ms),
        new_transaction=new_id(),
        new_lease=new_id(),
    )
    return wish, messages.ms_to_s("timeout_ms", request.timeout_ms)
