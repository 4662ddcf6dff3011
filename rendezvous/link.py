"""How does one call get through? A channel, and calls on it that are sent again after an outage, until their deadline.

All calls of the service may be repeated, so a call that met an outage is sent again after a growing, jittered pause.
What is left of an outage at the deadline is RendezvousUnavailableError. Bytes that keepalive pings find to lead nowhere
count as an outage too.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from reshard.planner.errors import require
from reshard.rendezvous import limits
from reshard.rendezvous.blobs import parse_content
from reshard.rendezvous.errors import (
    InvalidRequestError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
)
from reshard.rendezvous.exposure import check_tls_files, is_loopback, read_pem, split_address
from reshard.rendezvous.faults import error_from_status
from reshard.rendezvous.optional import grpc, protobuf
from reshard.rendezvous.tablecache import TableCache
from reshard.rendezvous.types import TLSFiles

__all__ = ["FIRST_PAUSE_S", "MAX_PAUSE_S", "Calls", "Link", "inner_s"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound="protobuf.Message")
_SERVICE = "/reshard.proto.v1.RendezvousService/"
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class Link:
    """Calls to the service at ``host:port``.

    Parameters
    ----------
    address
        ``host:port``.
    token
        Bearer token to send with each call.
    tls
        None speaks plain text.

    Attributes
    ----------
    grace_s
        How long to wait beyond a deadline for a service that ended its own wait in time, to hear what it saw; seconds.
    """

    grace_s = 0.5

    def __init__(self, address: str, token: str | None, tls: TLSFiles | None) -> None:
        require("grpc", extra="rendezvous")
        split_address("address", address)
        self.address = address
        if token and tls is None and not is_loopback(address.rpartition(":")[0]):
            _log.warning("the bearer token goes to %s in plain text; give TLS files", address)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = _open_channel(address, tls)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def unary(
        self,
        name: str,
        request: protobuf.Message | Callable[[float], protobuf.Message],
        response: type[M],
        timeout_s: float,
        *,
        waits: bool = False,
    ) -> M:
        """Send a request and return the response; a callable request is given the seconds left.

        `waits` gives a service that waits for others, and ends that in time, :attr:`grace_s` to say what it saw.
        """
        method = self._channel.unary_unary(_SERVICE + name, _same, _same)
        grace_s = self.grace_s if waits else 0.0

        async def call(left_s: float) -> M:
            message = request(left_s) if callable(request) else request
            raw = await method(message.SerializeToString(), timeout=left_s + grace_s, metadata=self._metadata)
            return _parsed(response, raw)

        return await self.retry(name, call, timeout_s)

    async def upload(
        self, name: str, requests: Callable[[], Sequence[bytes] | Iterator[bytes]], response: type[M], timeout_s: float
    ) -> M:
        """Send a stream of requests, which is made anew for each attempt, and return the response."""
        method = self._channel.stream_unary(_SERVICE + name, _same, _same)

        async def call(left_s: float) -> M:
            return _parsed(response, await method(iter(requests()), timeout=left_s, metadata=self._metadata))

        return await self.retry(name, call, timeout_s)

    async def stream(
        self, name: str, request: protobuf.Message, response: type[M], timeout_s: float, *, waits: bool = False
    ) -> AsyncIterator[M]:
        """Yield a server stream's messages; the stream is cancelled when the caller stops listening.

        `waits` as in :meth:`unary`.
        """
        timeout_s += self.grace_s if waits else 0.0
        method = self._channel.unary_stream(_SERVICE + name, _same, _same)
        call = method(request.SerializeToString(), timeout=timeout_s, metadata=self._metadata)
        try:
            async for raw in call:
                yield _parsed(response, raw)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error, self.address, name) from None
        finally:
            call.cancel()

    async def retry(self, name: str, call: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
        """Run `call` with the seconds left, again after each outage, until the deadline."""
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_PAUSE_S
        outage: RendezvousUnavailableError | None = None
        while True:
            failure: RendezvousError
            try:
                return await call(max(deadline - time.monotonic(), 0.001))
            except grpc.aio.AioRpcError as error:
                failure = error_from_status(error, self.address, name)
            except (RendezvousUnavailableError, RendezvousTimeoutError) as error:
                failure = error
            left_s = deadline - time.monotonic()
            if isinstance(failure, RendezvousUnavailableError):
                outage = failure
            elif outage is None or not isinstance(failure, RendezvousTimeoutError) or failure.waited_s:
                raise failure from None
            else:
                left_s = 0.0  # no service said so: the deadline cut the last attempt of an outage short
            if left_s <= pause_s:
                raise RendezvousUnavailableError(f"{outage} (for {timeout_s:.3g} s, all attempts)") from None
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def exchange(self, name: str, request: bytes, every_s: float, on_sent: Callable[[float], None]) -> None:
        """Send one message every so often on a stream, each answered, until cancelled or until the stream breaks.

        `on_sent` hears the monotonic sending time of each message that was answered.
        """
        call = self._channel.stream_stream(_SERVICE + name, _same, _same)(None, metadata=self._metadata)
        try:
            while True:
                sent_s = time.monotonic()
                await call.write(request)
                async with asyncio.timeout(max(every_s, 1.0)):
                    if await call.read() is _end_of_stream():
                        code, details = await call.code(), await call.details()
                        raise RendezvousUnavailableError(f"{name} at {self.address} ended: {code.name} {details}")
                on_sent(sent_s)
                await asyncio.sleep(max(sent_s + every_s - time.monotonic(), 0.0))
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error, self.address, name) from None
        except asyncio.InvalidStateError:
            # the service ended the stream while this side was writing; why is in its status
            raise error_from_status(await _status_of(call), self.address, name) from None
        except TimeoutError:
            raise RendezvousUnavailableError(f"{name} at {self.address} was not answered") from None
        finally:
            call.cancel()


class Calls:
    """A share of the calls to a service.

    Parameters
    ----------
    link
        Where they go.
    cache
        What this process knows.
    """

    def __init__(self, link: Link, cache: TableCache) -> None:
        self._link = link
        self.cache = cache


def inner_s(timeout_s: float) -> float:
    """The time that the service may wait, so that its answer arrives before the call's deadline."""
    return max(timeout_s - 0.2, 0.8 * timeout_s)


def _same(raw: bytes) -> bytes:
    return raw


def _parsed(kind: type[M], raw: bytes) -> M:
    message = kind()
    parse_content(message.DESCRIPTOR.name, message, raw)
    return message


def _open_channel(address: str, tls: TLSFiles | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    if bool(tls.cert) != bool(tls.key):
        raise InvalidRequestError("tls.key", "cert and key go together")
    check_tls_files(ca=tls.ca, cert=tls.cert, key=tls.key)
    credentials = grpc.ssl_channel_credentials(
        read_pem(tls.ca) if tls.ca else None,
        read_pem(tls.key) if tls.key else None,
        read_pem(tls.cert) if tls.cert else None,
    )
    name = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return grpc.aio.secure_channel(address, credentials, options=(*_CHANNEL_OPTIONS, *name))


def _end_of_stream() -> object:
    return grpc.aio.EOF  # type: ignore[attr-defined, unused-ignore]


async def _status_of(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> grpc.aio.AioRpcError:
    """The status of a call that has ended, as the error it would have raised."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details(), None
    )
