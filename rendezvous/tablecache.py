"""What does a client process know already? Tables, dictionaries and topologies by digest, and encodings made once.

One cache may serve many clients of a process. Concurrent requests for one digest become one fetch, whose result all
get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from reshard.planner.cuts import Cuts
from reshard.planner.dictionaries import TensorDict
from reshard.planner.geometries import GeometryDict
from reshard.planner.shards import ShardPart
from reshard.rendezvous.catalog import Lru, parse_content
from reshard.rendezvous.converts import (
    geometries_from_message,
    geometries_to_message,
    part_from_message,
    part_to_message,
    tensors_from_message,
    tensors_to_message,
)
from reshard.rendezvous.errors import RendezvousError
from reshard.rendezvous.optional import pb, tables_pb

if TYPE_CHECKING:
    from reshard.rendezvous.messages import Topology
    from reshard.rendezvous.types import SlotRecord

__all__ = ["Content", "TableCache"]

Content = tuple["pb.ContentKind", bytes, bytes]
Fetch = Callable[[Sequence[bytes], Sequence[bytes]], Awaitable[list[Content]]]
_KEPT_PARTS = 4096
_KEPT_DICTS = 1024


class TableCache:
    """Decoded content by digest. Use it on one event loop."""

    def __init__(self) -> None:
        self.topologies: Lru[bytes, Topology] = Lru(64)
        self.bases: Lru[bytes, bytes] = Lru(256)
        self.slots: Lru[tuple[bytes, bytes, bytes], tuple[SlotRecord, ...]] = Lru(16)
        self.cuts: Lru[bytes, Cuts] = Lru(_KEPT_DICTS)
        self._parts: Lru[bytes, ShardPart] = Lru(_KEPT_PARTS)
        self._tensors: Lru[bytes, TensorDict] = Lru(_KEPT_DICTS)
        self._geometries: Lru[bytes, GeometryDict] = Lru(_KEPT_DICTS)
        self._flights: dict[bytes, asyncio.Task[bytes]] = {}
        self._fetching = asyncio.Lock()

    async def get(self, digests: Sequence[bytes], fetch: Fetch, timeout_s: float) -> dict[bytes, ShardPart]:
        """Return tables; `fetch` gets those missing, given the dictionaries that are here."""
        found = {digest: self._parts.get(digest) for digest in digests}
        if any(part is None for part in found.values()):
            async with asyncio.timeout(timeout_s), self._fetching:
                missing = [digest for digest in found if self._parts.get(digest) is None]
                if missing:
                    for kind, digest, blob in await fetch(missing, self._dictionaries()):
                        self._decode(kind, digest, blob)
            found = {digest: self._parts.get(digest) for digest in digests}
        tables = {digest: part for digest, part in found.items() if part is not None}
        if len(tables) < len(found):
            raise RendezvousError(f"the service sent {len(tables)} of {len(found)} tables")
        return tables

    def _dictionaries(self) -> list[bytes]:
        return [*self._tensors.keys(), *self._geometries.keys()]

    def _decode(self, kind: pb.ContentKind, digest: bytes, blob: bytes) -> None:
        if kind == pb.CONTENT_KIND_TENSORS:
            tensors = tables_pb.TensorDict()
            parse_content("tensors", tensors, blob)
            self._tensors.put(digest, tensors_from_message(tensors, digest))
        elif kind == pb.CONTENT_KIND_GEOMETRIES:
            geometries = tables_pb.GeometryDict()
            parse_content("geometries", geometries, blob)
            self._geometries.put(digest, geometries_from_message(geometries, digest))
        elif kind == pb.CONTENT_KIND_PART:
            message = tables_pb.ShardPart()
            parse_content("part", message, blob)
            names, boxes = self._tensors.get(message.tensors_digest), self._geometries.get(message.geometries_digest)
            if names is None or boxes is None:
                raise RendezvousError(f"table {digest.hex()[:16]}... came without its dictionaries")
            self._parts.put(digest, part_from_message(message, names, boxes, digest))
        else:
            raise RendezvousError(f"the service sent content of unknown kind {kind}")

    def encode(self, part: ShardPart, digests: Sequence[bytes]) -> list[Content]:
        """Encode those of a part and its dictionaries that `digests` names, dictionaries first."""
        wanted = set(digests)
        contents: list[Content] = []
        if part.tensors.digest in wanted:
            blob = tensors_to_message(part.tensors).SerializeToString(deterministic=True)
            contents.append((pb.CONTENT_KIND_TENSORS, part.tensors.digest, blob))
        if part.geometries.digest in wanted:
            blob = geometries_to_message(part.geometries).SerializeToString(deterministic=True)
            contents.append((pb.CONTENT_KIND_GEOMETRIES, part.geometries.digest, blob))
        if part.digest in wanted:
            blob = part_to_message(part).SerializeToString(deterministic=True)
            contents.append((pb.CONTENT_KIND_PART, part.digest, blob))
        return contents

    async def once(self, digest: bytes, fetch: Callable[[], Awaitable[bytes]]) -> bytes:
        """Run one fetch of a digest for all who ask for it at the same time."""
        flight = self._flights.get(digest)
        if flight is None:
            flight = asyncio.ensure_future(fetch())
            self._flights[digest] = flight
            flight.add_done_callback(lambda _: self._flights.pop(digest, None))
        return await asyncio.shield(flight)
