"""What does a client process know already? Tables, dictionaries and topologies by digest, and encodings made once.

One cache may serve many clients of a process. Concurrent requests for one digest become one fetch, whose result all
get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.planner.cuts import Cuts
from reshard.planner.dictionaries import TensorDict
from reshard.planner.geometries import GeometryDict
from reshard.planner.shards import ShardPart
from reshard.rendezvous.blobs import parse_content
from reshard.rendezvous.converts import (
    geometries_from_message,
    geometries_to_message,
    part_from_message,
    part_to_message,
    tensors_from_message,
    tensors_to_message,
)
from reshard.rendezvous.errors import RendezvousError, RendezvousTimeoutError
from reshard.rendezvous.flights import Flights
from reshard.rendezvous.lru import Lru
from reshard.rendezvous.optional import pb, tables_pb

if TYPE_CHECKING:
    from reshard.rendezvous.messages import Topology
    from reshard.rendezvous.types import SlotRecord

__all__ = ["Content", "TableCache"]

Content = tuple["pb.ContentKind", bytes, bytes]
Fetch = Callable[[Sequence[bytes], Sequence[bytes]], Awaitable[list[Content]]]
_KEPT_PARTS = 4096
_KEPT_DICTS = 1024


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What came, and the dictionaries to read it with, which those that came join."""

    contents: list[Content]
    tensors: dict[bytes, TensorDict]
    geometries: dict[bytes, GeometryDict]


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
        self.topology_flights: Flights[bytes, bytes] = Flights()
        self._fetching = asyncio.Lock()

    async def get(self, digests: Sequence[bytes], fetch: Fetch, timeout_s: float) -> dict[bytes, ShardPart]:
        """Return tables; `fetch` gets those missing, given the dictionaries that are here.

        Raises
        ------
        RendezvousTimeoutError
            `timeout_s` passed while others fetched, or before all had come.
        """
        tables = self._known(digests)
        if len(tables) < len(set(digests)):
            try:
                async with asyncio.timeout(timeout_s), self._fetching:
                    tables = self._known(digests)
                    missing = [digest for digest in dict.fromkeys(digests) if digest not in tables]
                    if missing:
                        tables |= self._decode_all(await self._fetch_with(fetch, missing))
            except RendezvousError:
                raise
            except TimeoutError:
                raise RendezvousTimeoutError(f"GetTables: not all came within {timeout_s:.3g} s") from None
        lacking = sum(digest not in tables for digest in set(digests))
        if lacking:
            raise RendezvousError(f"the service did not send {lacking} of {len(set(digests))} tables")
        return {digest: tables[digest] for digest in digests}

    def _known(self, digests: Sequence[bytes]) -> dict[bytes, ShardPart]:
        found = ((digest, self._parts.get(digest)) for digest in digests)
        return {digest: part for digest, part in found if part is not None}

    async def _fetch_with(self, fetch: Fetch, missing: Sequence[bytes]) -> _Fetched:
        # taken before the fetch and kept: what is said to be here must not be dropped before its parts have come
        tensors, geometries = dict(self._tensors.items()), dict(self._geometries.items())
        return _Fetched(await fetch(missing, [*tensors, *geometries]), tensors, geometries)

    def _decode_all(self, fetched: _Fetched) -> dict[bytes, ShardPart]:
        parts: dict[bytes, ShardPart] = {}
        for kind, digest, blob in fetched.contents:
            if kind == pb.CONTENT_KIND_TENSORS:
                tensors = tables_pb.TensorDict()
                parse_content("tensors", tensors, blob)
                fetched.tensors[digest] = tensors_from_message(tensors, digest)
                self._tensors.put(digest, fetched.tensors[digest])
            elif kind == pb.CONTENT_KIND_GEOMETRIES:
                geometries = tables_pb.GeometryDict()
                parse_content("geometries", geometries, blob)
                fetched.geometries[digest] = geometries_from_message(geometries, digest)
                self._geometries.put(digest, fetched.geometries[digest])
            elif kind == pb.CONTENT_KIND_PART:
                message = tables_pb.ShardPart()
                parse_content("part", message, blob)
                names = fetched.tensors.get(message.tensors_digest)
                boxes = fetched.geometries.get(message.geometries_digest)
                if names is None or boxes is None:
                    raise RendezvousError(f"table {digest.hex()[:16]}... came without its dictionaries")
                parts[digest] = part_from_message(message, names, boxes, digest)
                self._parts.put(digest, parts[digest])
            else:
                raise RendezvousError(f"the service sent content of unknown kind {kind}")
        return parts

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
