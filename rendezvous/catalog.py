"""Which tables and name sets are here, by digest? As objects within a process, or as encoded blobs of a store.

Both answer what a decision needs: which published names did no member of a group consume. Sets of names are
content-addressed and change seldom, so the answer is remembered.
"""

from __future__ import annotations

import asyncio
import fnmatch
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from reshard.planner.cuts import Cuts
from reshard.planner.shards import ShardPart
from reshard.rendezvous import limits
from reshard.rendezvous.blobs import canonical_bytes, geometries_of, names_of, parse_content, part_of, tensors_of
from reshard.rendezvous.converts import (
    cuts_from_message,
    geometries_from_message,
    names_from_message,
    part_from_message,
    tensors_from_message,
)
from reshard.rendezvous.errors import InvalidRequestError, StaleError
from reshard.rendezvous.lru import Lru
from reshard.rendezvous.optional import protobuf, tables_pb
from reshard.rendezvous.store import BLOB_IDLE_S, Store

__all__ = ["BlobCatalog", "Catalog", "ObjectCatalog"]

M = TypeVar("M", bound="protobuf.Message")
V = TypeVar("V")
Unconsumed = tuple[str, ...]
_LARGE_ROWS = 100_000


class Catalog(Protocol):
    """Where the broker looks up tables and sets of names by digest."""

    async def n_rows(self, table: bytes) -> int | None:
        """Return the number of rows of a table, None if it is not here."""
        ...

    async def load_names(self, tables: Sequence[bytes], name_sets: Sequence[bytes]) -> None:
        """Make :meth:`unconsumed` answerable for these; StaleError names what is not here."""
        ...

    def unconsumed(
        self, tables: Sequence[bytes], name_sets: Sequence[bytes], allowed: Sequence[str]
    ) -> Sequence[str] | None:
        """Return names of `tables` in none of `name_sets` that no pattern allows; None if not loaded."""
        ...

    async def sweep(self, tables: Iterable[bytes], others: Iterable[bytes]) -> None:
        """Forget what is long unused, but for `tables` with their dictionaries, and `others`."""
        ...


class _Names:
    """Names by table digest and by set digest, and what a decision asks of them."""

    def __init__(self) -> None:
        # as many as one decision may ask for: else it could never have all of them at once
        self._of_table: Lru[bytes, frozenset[str]] = Lru(limits.MAX_SLOTS)
        self._of_set: Lru[bytes, frozenset[str]] = Lru(limits.MAX_MEMBERS)
        self._answers: Lru[tuple[tuple[bytes, ...], tuple[bytes, ...], tuple[str, ...]], Unconsumed] = Lru(256)

    def unconsumed(
        self, tables: Sequence[bytes], name_sets: Sequence[bytes], allowed: Sequence[str]
    ) -> Sequence[str] | None:
        """Return names of `tables` in none of `name_sets` that no pattern allows; None if not loaded."""
        key = (tuple(tables), tuple(name_sets), tuple(allowed))
        known = self._answers.get(key)
        if known is not None:
            return known
        distinct: dict[int, frozenset[str]] = {}  # ranks share dictionaries, and so these sets
        for digest in tables:
            names = self._of_table.get(digest)
            if names is None:
                return None
            distinct[id(names)] = names
        published: set[str] = set().union(*distinct.values())
        for digest in name_sets:
            names = self._of_set.get(digest)
            if names is None:
                return None
            published -= names
        for pattern in allowed:
            published.difference_update(fnmatch.filter(published, pattern))
        answer = tuple(sorted(published))
        self._answers.put(key, answer)
        return answer


class ObjectCatalog(_Names):
    """Tables as objects, for the in-process rendezvous. What no record names goes an hour after its last use.

    Parameters
    ----------
    clock
        Seconds, monotonic; a test may pass its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._parts: dict[bytes, ShardPart] = {}
        self._sets: dict[bytes, frozenset[str]] = {}
        self._cuts: dict[bytes, Cuts] = {}
        self._used_s: dict[bytes, float] = {}

    def _use(self, digest: bytes) -> None:
        self._used_s[digest] = self._clock()

    def put_part(self, part: ShardPart) -> bytes:
        """Keep a table."""
        self._parts.setdefault(part.digest, part)
        self._use(part.digest)
        return part.digest

    def get_part(self, digest: bytes) -> ShardPart:
        """Return a table; StaleError if it is not here."""
        part = self._parts.get(digest)
        if part is None:
            raise StaleError(f"table {digest.hex()[:16]}... is not here")
        self._use(digest)
        return part

    def put_names(self, digest: bytes, names: Iterable[str]) -> None:
        """Keep a set of names."""
        self._sets.setdefault(digest, frozenset(names))
        self._use(digest)

    def put_cuts(self, cuts: Cuts) -> bytes:
        """Keep a receiver's cuts."""
        self._cuts.setdefault(cuts.digest, cuts)
        self._use(cuts.digest)
        return cuts.digest

    def get_cuts(self, digest: bytes) -> Cuts:
        """Return a receiver's cuts."""
        return self._cuts[digest]

    async def n_rows(self, table: bytes) -> int | None:
        """Return the number of rows of a table, None if it is not here."""
        return len(self.get_part(table)) if table in self._parts else None

    async def load_names(self, tables: Sequence[bytes], name_sets: Sequence[bytes]) -> None:
        """Make :meth:`unconsumed` answerable."""
        for digest in tables:
            self._of_table.put(digest, frozenset(self.get_part(digest).tensors.names_list))
        for digest in name_sets:
            if digest not in self._sets:
                raise StaleError(f"name set {digest.hex()[:16]}... is not here")
            self._use(digest)
            self._of_set.put(digest, self._sets[digest])

    async def sweep(self, tables: Iterable[bytes], others: Iterable[bytes]) -> None:
        """Forget what is unused for an hour, but for `tables` and `others`."""
        keep = {*tables, *others}
        horizon = self._clock() - BLOB_IDLE_S
        for digest in [digest for digest, used_s in self._used_s.items() if used_s < horizon and digest not in keep]:
            del self._used_s[digest]
            for contents in (self._parts, self._sets, self._cuts):
                contents.pop(digest, None)


class _Dictionaries(Generic[M, V]):
    """Dictionaries of one kind: how they are read, and those decoded last."""

    def __init__(self, parse: Callable[[bytes], M], n_rows: Callable[[M], int], build: Callable[[M, bytes], V]) -> None:
        self.parse = parse
        self.n_rows = n_rows
        self.build = build
        self.kept: Lru[bytes, V] = Lru(64)


class BlobCatalog(_Names):
    """Tables as encoded messages in a store, checked before they are kept."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._tensors = _Dictionaries(tensors_of, lambda message: message.n_tensors, tensors_from_message)
        self._geometries = _Dictionaries(geometries_of, lambda message: message.n_geometries, geometries_from_message)
        self._of_dict: Lru[bytes, frozenset[str]] = Lru(1024)
        self._large = asyncio.Lock()
        self._heads: Lru[bytes, tuple[int, bytes, bytes]] = Lru(4096)  # part: rows, tensors, geometries

    async def _decode(self, n_rows: int, decode: Callable[[], V]) -> V:
        """Decode; what is large in a thread, so that the loop goes on, and one at a time, so that memory is bounded."""
        if n_rows < _LARGE_ROWS:
            return decode()
        async with self._large:
            return await asyncio.to_thread(decode)

    async def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return those of `digests` that are not here."""
        found = await self._store.has_blobs(digests)
        return [digest for digest, here in zip(digests, found, strict=True) if not here]

    async def get(self, digest: bytes) -> bytes:
        """Return the encoded content under a digest; StaleError if it is not here."""
        blob = await self._store.get_blob(digest)
        if blob is None:
            raise StaleError(f"content {digest.hex()[:16]}... is not here")
        return blob

    async def put_table(
        self, part_digest: bytes, tensors_digest: bytes, geometries_digest: bytes, contents: Mapping[bytes, bytes]
    ) -> list[bytes]:
        """Check and keep a table and those dictionaries that `contents` holds; the part last: none is seen in part.

        Returns
        -------
        Digests that are neither here nor in `contents`; if there are any, the part was not kept.
        """
        digests = (tensors_digest, geometries_digest, part_digest)
        missing = [digest for digest in await self.missing(digests) if digest not in contents]
        tensors = await self._put_dictionary(self._tensors, tensors_digest, contents)
        geometries = await self._put_dictionary(self._geometries, geometries_digest, contents)
        if missing or part_digest not in contents or tensors is None or geometries is None:
            return missing
        message = part_of(contents[part_digest])
        if (message.tensors_digest, message.geometries_digest) != (tensors_digest, geometries_digest):
            raise InvalidRequestError("part.tensors_digest", "the part names other dictionaries than its header")
        dicts = (tensors, geometries)
        part = await self._decode(message.n_rows, lambda: part_from_message(message, *dicts, part_digest))
        await self._store.put_blob(part_digest, canonical_bytes(message))
        self._heads.put(part_digest, (len(part), tensors_digest, geometries_digest))
        return []

    async def _put_dictionary(
        self, kind: _Dictionaries[M, V], digest: bytes, contents: Mapping[bytes, bytes]
    ) -> V | None:
        """Check and keep a dictionary that `contents` holds, and return it; None if it is neither there nor here."""
        known = kind.kept.get(digest)
        if known is not None and digest not in contents:
            return known
        stored = await self._store.get_blob(digest)
        blob = contents.get(digest) or stored
        if blob is None:
            return None
        message = kind.parse(blob)
        content = canonical_bytes(message)
        if known is not None and content == stored:
            return known  # many ranks send at once what each was told is missing
        dictionary = await self._decode(kind.n_rows(message), lambda: kind.build(message, digest))
        if stored is None:
            await self._store.put_blob(digest, content)
        kind.kept.put(digest, dictionary)
        return dictionary

    async def put_names(self, digest: bytes, blob: bytes) -> None:
        """Check and keep a set of names."""
        if not await self.missing([digest]):
            return
        message = names_of(blob)
        self._of_set.put(digest, names_from_message(message, digest))
        await self._store.put_blob(digest, canonical_bytes(message))

    async def put_cuts(self, digest: bytes, blob: bytes) -> None:
        """Check and keep a receiver's cuts; with no bytes, only see that they are here."""
        if not blob:
            if await self.missing([digest]):
                raise StaleError(f"cuts {digest.hex()[:16]}... are not here; send them")
            return
        message = tables_pb.CutTable()
        parse_content("cuts", message, blob)
        cuts_from_message(message, digest)
        await self._store.put_blob(digest, canonical_bytes(message))

    async def head(self, part_digest: bytes) -> tuple[int, bytes, bytes] | None:
        """Return a part's number of rows and the digests of its two dictionaries; None if it is not here."""
        head = self._heads.get(part_digest)
        if head is not None and (await self._store.has_blobs([part_digest]))[0]:
            return head
        blob = await self._store.get_blob(part_digest)
        if blob is None:
            return None
        message = part_of(blob)
        head = (message.n_rows, message.tensors_digest, message.geometries_digest)
        self._heads.put(part_digest, head)
        return head

    async def n_rows(self, table: bytes) -> int | None:
        """Return the number of rows of a table, None if it is not here."""
        head = await self.head(table)
        return head[0] if head is not None else None

    async def load_names(self, tables: Sequence[bytes], name_sets: Sequence[bytes]) -> None:
        """Make :meth:`unconsumed` answerable."""
        for table in tables:
            if self._of_table.get(table) is not None:
                continue
            head = await self.head(table)
            if head is None:
                raise StaleError(f"table {table.hex()[:16]}... is not here")
            tensors = await self._put_dictionary(self._tensors, head[1], {})
            if tensors is None:
                raise StaleError(f"the dictionary of table {table.hex()[:16]}... is not here")
            names = self._of_dict.get(head[1]) or frozenset(tensors.names_list)
            self._of_dict.put(head[1], names)
            self._of_table.put(table, names)
        for digest in name_sets:
            if self._of_set.get(digest) is None:
                self._of_set.put(digest, names_from_message(names_of(await self.get(digest)), digest))

    async def sweep(self, tables: Iterable[bytes], others: Iterable[bytes]) -> None:
        """Forget content long unused, but for `tables` with their dictionaries, and `others`."""
        keep = set(others)
        for table in tables:
            head = await self.head(table)
            keep.add(table)
            keep.update(head[1:] if head is not None else ())
        await self._store.sweep_blobs(keep)
