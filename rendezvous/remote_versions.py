"""How does a client learn of versions? It awaits or watches them, and puts a grant together from what it knows.

The unchanging part of a version's slots and the region bases are kept by digest, so that a warm grant carries neither.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from reshard.rendezvous import codec, limits, messages
from reshard.rendezvous.backend import Answer
from reshard.rendezvous.broker import VersionEvent
from reshard.rendezvous.descriptions import Description
from reshard.rendezvous.errors import (
    InvalidRequestError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
)
from reshard.rendezvous.joining import Join
from reshard.rendezvous.link import FIRST_PAUSE_S, MAX_PAUSE_S, Calls, Link, inner_s
from reshard.rendezvous.optional import pb
from reshard.rendezvous.tablecache import TableCache
from reshard.rendezvous.types import Progress, SlotRecord, VersionKey

__all__ = ["VersionCalls"]

_KEPT = 4  # topologies and sets of bases that a client offers as known


class VersionCalls(Calls):
    """The calls that tell of versions."""

    def __init__(self, link: Link, cache: TableCache) -> None:
        super().__init__(link, cache)
        self._known: list[bytes] = []

    async def await_version(self, wish: Join, timeout_s: float, on_progress: Callable[[Progress], None]) -> Answer:
        """Wait for a version, and put it together from what is known and what came."""
        deadline = time.monotonic() + timeout_s
        seen = Progress()

        async def listen(left_s: float) -> tuple[pb.Grant, float]:
            nonlocal seen
            granted_s = 0.0
            request = self._wish_to_message(wish, left_s)
            grant: pb.Grant | None = None
            async for event in self._link.stream("AwaitVersion", request, pb.AwaitVersionResponse, left_s, waits=True):
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
            timeout_ms=messages.s_to_ms(inner_s(timeout_s)),
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
        bases = grant.bases if grant.HasField("bases") else self.cache.bases.get(grant.bases_digest)
        topology = self.cache.topologies.get(grant.topology_digest)
        if bases is None:
            bases = await self._get_topology(grant.uid, grant.bases_digest, True, deadline)
        if topology is None:
            blob = await self._get_topology(grant.uid, grant.topology_digest, False, deadline)
            topology = self.cache.topologies.get(grant.topology_digest) or messages.topology_from_bytes(blob)
        if hashlib.sha256(bases).digest() != grant.bases_digest or topology.digest != grant.topology_digest:
            raise RendezvousError("the service sent slots that do not match their digests")
        self.cache.topologies.put(grant.topology_digest, topology)
        self.cache.bases.put(grant.bases_digest, bases)
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
                    "WatchVersions", request, pb.WatchVersionsResponse, left_s, waits=True
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

    async def describe(self, timeout_s: float) -> Description:
        """Describe everything."""

        async def collect(left_s: float) -> bytes:
            stream = self._link.stream("Describe", pb.DescribeRequest(), pb.DescribeResponse, left_s)
            return b"".join([response.data async for response in stream])

        return codec.decode(Description, await self._link.retry("Describe", collect, timeout_s))
