"""How does content travel between a client and a service? Tables, sets of names and cuts, each by its digest.

What a side has already is not sent: a digest is offered first, and the content follows if it is missing. Clients of one
process share one cache of what they know.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from reshard.planner.cuts import Cuts
from reshard.planner.shards import ShardPart
from reshard.rendezvous import limits
from reshard.rendezvous.blobs import parse_content
from reshard.rendezvous.converts import cuts_from_message, cuts_to_message, names_digest, names_to_message
from reshard.rendezvous.errors import InvalidRequestError, RendezvousError, StaleError
from reshard.rendezvous.flights import Flights
from reshard.rendezvous.link import Calls, Link
from reshard.rendezvous.lru import Lru
from reshard.rendezvous.optional import pb, tables_pb
from reshard.rendezvous.tablecache import Content, TableCache
from reshard.rendezvous.types import CutHint, CutHints

__all__ = ["ContentCalls"]


class ContentCalls(Calls):
    """The calls that carry content."""

    def __init__(self, link: Link, cache: TableCache) -> None:
        super().__init__(link, cache)
        self._names_flights: Flights[tuple[str, ...], bytes] = Flights()
        self._names_put: Lru[tuple[str, ...], bytes] = Lru(8)

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
