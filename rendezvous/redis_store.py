"""How do several servers, and restarts, share one state? The store on Redis or Valkey.

1. A record is a hash of its revision and its JSON. Revisions come from one counter, so none is used twice for a key.
2. A transition runs on this process' copies of the records it reads. One script then compares their revisions and, if
   all are current, applies all writes and publishes which keys changed; else it answers with the current records and
   the transition runs again. So a transition costs one round trip, and a server that dies has applied it wholly or not
   at all.
3. Watchers subscribe before they read. What is published may be lost with the connection, so after a reconnect every
   watcher reads again.
4. Time is Redis' own (TIME with every script), so that all servers judge a TTL by one clock. Let NTP slew it: a step
   forward lets every TTL pass at once, a step back of over a minute prolongs them.

Decisions are as durable as Redis is: run it with ``appendonly yes`` and ``appendfsync always``, and ``maxmemory-policy
noeviction``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from reshard.planner.errors import require
from reshard.rendezvous import codec
from reshard.rendezvous.errors import RendezvousError, RendezvousUnavailableError
from reshard.rendezvous.lru import Lru
from reshard.rendezvous.records import KINDS, Record
from reshard.rendezvous.redis_scripts import COMMIT, LOAD
from reshard.rendezvous.store import Ran, Watch
from reshard.rendezvous.view import NotLoadedError, View
from reshard.rendezvous.watching import Watchers

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

__all__ = ["RedisStore"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_PREFIX = b"{reshard}:"  # one hash slot, so that a cluster can serve the scripts too
_CALL_S = 5.0
_BLOB_IDLE_S = 86400
_MAX_TRIES = 1000
_INDEXED = ("worker", "model", "group", "txn", "hints", "use")


@dataclass(frozen=True, slots=True)
class _Copy:
    """A record as this process last saw it."""

    revision: bytes
    record: Record | None


class RedisStore:
    """The store on Redis. Build it with :meth:`open`."""

    name = "redis"

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._copies: Lru[str, _Copy] = Lru(1 << 18)
        self._lock = asyncio.Lock()  # transitions of one server do not compete with each other
        self._watchers = Watchers()
        self._me = secrets.token_hex(8)
        self._offset_s = 0.0
        self._listener: asyncio.Task[None] | None = None
        self._subscribed = asyncio.Event()
        self._load = client.register_script(LOAD)
        self._commit = client.register_script(COMMIT)

    @classmethod
    async def open(cls, url: str) -> RedisStore:
        """Connect to ``redis://host:port/db``.

        Raises
        ------
        RendezvousUnavailableError
            It is not reached.
        """
        require("redis", extra="redis")
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        client = Redis.from_url(
            url,
            socket_timeout=_CALL_S,
            socket_connect_timeout=_CALL_S,
            socket_keepalive=True,
            health_check_interval=5,
            retry=Retry(NoBackoff(), 1),  # callers retry by themselves, within their own deadlines
        )
        store = cls(client)
        try:
            await store._fetch([])
            await store._warn_if_forgetful()
        except BaseException:
            await client.aclose()
            raise
        store._listener = asyncio.get_running_loop().create_task(store._listen_forever())
        return store

    async def run(self, transition: Callable[[View], T]) -> Ran[T]:
        """Run a transition; see :class:`~reshard.rendezvous.store.Store`."""
        async with self._lock:
            for _ in range(_MAX_TRIES):
                view = View(time.monotonic() + self._offset_s, self._lookup)
                try:
                    value = transition(view)
                except NotLoadedError as absent:
                    await self._fetch(absent.keys)
                    continue
                except RendezvousError:
                    # a refusal must not rest on outdated copies
                    if not await self._apply(view, {}):
                        continue
                    raise
                if await self._apply(view, view.writes):
                    return Ran(value, view.now, frozenset(view.watched), view.wake_s)
        raise RendezvousUnavailableError(f"the store changed under {_MAX_TRIES} attempts at one transition")

    def _lookup(self, key: str) -> Record | None:
        copy = self._copies.get(key)
        if copy is None:
            raise NotLoadedError([key])
        return copy.record

    async def _fetch(self, keys: Sequence[str]) -> None:
        reply = await self._call(self._load(keys=[_PREFIX + b"clock", *map(_record_key, keys)], args=[]))
        self._set_clock(reply)
        for key, revision, blob in zip(keys, reply[1::2], reply[2::2], strict=True):
            self._copies.put(key, _Copy(revision, _decode(key, blob)))

    async def _apply(self, view: View, writes: dict[str, Record | None]) -> bool:
        """Compare what was read and write, in one script; False if a copy was outdated, and is fresh now."""
        reads = sorted(view.reads)
        blobs = {key: codec.encode(record) if record is not None else None for key, record in writes.items()}
        args: list[bytes | int] = [len(reads)]
        for key in reads:
            copy = self._copies.get(key)
            args.append(copy.revision if copy is not None else b"?")
        for key, blob in blobs.items():
            kind, _, name = key.partition(":")
            index = _PREFIX + b"index:" + kind.encode() if kind in _INDEXED else b""
            args += [b"0" if blob is None else b"1", blob or b"", index, name.encode()]
        changed = [key for key in blobs if not key.startswith("beat:")]
        args.append(json.dumps([self._me, *changed]).encode() if changed else b"")
        ours = (_PREFIX + b"clock", _PREFIX + b"counter", _PREFIX + b"changes")
        keys = [*ours, *map(_record_key, reads), *map(_record_key, blobs)]
        try:
            reply = await self._call(self._commit(keys=keys, args=args))
        except RendezvousUnavailableError:
            for key in blobs:
                self._copies.drop(key)  # whether it was applied is not known
            raise
        self._set_clock(reply)
        if reply[1] == b"0":
            for at, revision, blob in zip(reply[2::3], reply[3::3], reply[4::3], strict=True):
                key = reads[int(at) - 1]
                self._copies.put(key, _Copy(revision, _decode(key, blob)))
            return False
        for (key, record), revision in zip(writes.items(), reply[2:], strict=True):
            self._copies.put(key, _Copy(revision, record))
        self._watchers.notify(changed)
        return True

    def _set_clock(self, reply: Sequence[bytes]) -> None:
        self._offset_s = int(reply[0]) / 1e6 - time.monotonic()

    async def _call(self, command: Awaitable[object]) -> list[bytes]:
        redis = require("redis", extra="redis")
        try:
            return cast("list[bytes]", await command)
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
            raise RendezvousUnavailableError(f"the store is not reached: {error}") from error
        except redis.exceptions.RedisError as error:
            raise RendezvousUnavailableError(f"the store refused: {error}") from error

    async def _warn_if_forgetful(self) -> None:
        redis = require("redis", extra="redis")
        try:
            settings = await self._client.config_get("append*")
        except (redis.exceptions.RedisError, OSError):
            return  # a managed Redis may forbid CONFIG; its durability is its operator's
        said = {_text(key): _text(value) for key, value in settings.items()}
        if said.get("appendonly") != "yes" or said.get("appendfsync") != "always":
            _log.warning(
                "Redis runs with appendonly %s, appendfsync %s: a crash of Redis may forget decisions; "
                "run it with appendonly yes and appendfsync always",
                said.get("appendonly"),
                said.get("appendfsync"),
            )

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Watch]:
        """Subscribe to changes, wherever they are made; see :class:`~reshard.rendezvous.store.Store`."""
        try:
            async with asyncio.timeout(_CALL_S):
                await self._subscribed.wait()
        except TimeoutError:
            raise RendezvousUnavailableError("the store is not reached: no subscription") from None
        with self._watchers.subscribe() as watch:
            yield watch

    async def _listen_forever(self) -> None:
        redis = require("redis", extra="redis")
        pause_s = 0.05
        while True:
            pubsub = self._client.pubsub(ignore_subscribe_messages=False)
            try:
                await pubsub.subscribe(_PREFIX + b"changes")
                await self._listen(pubsub)
                pause_s = 0.05
            except (redis.exceptions.RedisError, OSError, ValueError) as error:
                _log.warning("the subscription to the store broke and is renewed: %s", error)
            finally:
                self._subscribed.clear()
                await _close_quietly(pubsub)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def _listen(self, pubsub: PubSub) -> None:
        asked = False
        while True:
            message = await pubsub.get_message(timeout=_CALL_S)
            if message is None:
                # a connection that leads nowhere any more is silent too: ask, and take any word for an answer
                if asked:
                    raise ConnectionError("the subscription's connection does not answer")
                await pubsub.ping()
                asked = True
                continue
            asked = False
            if message["type"] == "subscribe":
                self._subscribed.set()
                self._watchers.notify_all()  # what happened before this subscription was not heard
            elif message["type"] == "message":
                self._hear(message["data"])

    def _hear(self, data: bytes) -> None:
        """Wake those who wait for what another server changed; all, if the message says something else."""
        try:
            said = json.loads(data)
        except ValueError:
            said = None
        if not isinstance(said, list) or not all(isinstance(word, str) for word in said):
            _log.warning("the channel of changes carries what is no list of names: %r", data[:80])
            self._watchers.notify_all()
        elif said and said[0] != self._me:
            self._watchers.notify(said[1:])

    async def names(self, kind: str) -> list[str]:
        """List the names of all records of an indexed kind."""
        found = await self._call(self._client.smembers(_PREFIX + b"index:" + kind.encode()))
        return [name.decode() for name in found]

    async def put_blob(self, digest: bytes, blob: bytes) -> None:
        """Keep a blob."""
        await self._call(self._client.set(_blob_key(digest), blob, ex=_BLOB_IDLE_S))

    async def get_blob(self, digest: bytes) -> bytes | None:
        """Return a blob, or None."""
        return cast("bytes | None", await self._call(self._client.getex(_blob_key(digest), ex=_BLOB_IDLE_S)))

    async def has_blobs(self, digests: Sequence[bytes]) -> list[bool]:
        """Tell which blobs are here; those live for another day."""
        if not digests:
            return []
        pipe = self._client.pipeline(transaction=False)
        for digest in digests:
            pipe.expire(_blob_key(digest), _BLOB_IDLE_S)
        return [bool(found) for found in await self._call(pipe.execute())]

    async def sweep_blobs(self, pinned: Iterable[bytes]) -> int:
        """Keep what is pinned for another day; Redis drops the rest by itself."""
        await self.has_blobs(list(pinned))
        return 0

    async def close(self) -> None:
        """Disconnect."""
        while self._listener is not None and not self._listener.done():
            # more than once: while it connects, redis-py takes a cancellation for a timeout
            self._listener.cancel()
            await asyncio.wait([self._listener], timeout=0.1)
        await self._client.aclose()


def _record_key(key: str) -> bytes:
    return _PREFIX + b"record:" + key.encode()


def _blob_key(digest: bytes) -> bytes:
    return _PREFIX + b"blob:" + digest.hex().encode()


def _decode(key: str, blob: bytes) -> Record | None:
    return codec.decode(KINDS[key.partition(":")[0]], blob) if blob else None


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def _close_quietly(pubsub: PubSub) -> None:
    redis = require("redis", extra="redis")
    try:
        await pubsub.aclose()  # type: ignore[no-untyped-call, unused-ignore]
    except (redis.exceptions.RedisError, OSError) as error:
        _log.debug("closing a broken subscription: %s", error)
