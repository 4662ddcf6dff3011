"""What is common to all calls? Parsing, authentication, errors, metrics and the access log, around each handler.

Handlers are registered for raw bytes, so that bytes which are no message are answered INVALID_ARGUMENT with the
message's name, like any other bad request. A handler's error of the tree becomes a status with a typed detail; any
other exception is logged here and answered INTERNAL, without its text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from reshard.rendezvous.blobs import parse_content
from reshard.rendezvous.errors import RendezvousError, RendezvousUnavailableError
from reshard.rendezvous.faults import DETAIL_KEY, status_of, to_detail, to_details
from reshard.rendezvous.handlers import Handlers
from reshard.rendezvous.optional import grpc, pb, protobuf

__all__ = ["SERVICE", "Call", "Endpoint", "Guard", "Telemetry"]

SERVICE = "reshard.proto.v1.RendezvousService"
_log = logging.getLogger(__name__)
_access = logging.getLogger("reshard.rendezvous.access")

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[bytes, bytes]

T = TypeVar("T")


class Guard(Protocol):
    """Who may call?"""

    def check(self, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Raise AuthenticationError unless the call's metadata carries a right token."""
        ...


@dataclass(slots=True)
class Call:
    """One call, as the access log and the metrics see it."""

    method: str
    peer: str
    started_s: float
    n_received: int = 0
    received_bytes: int = 0
    n_sent: int = 0
    sent_bytes: int = 0
    code: str = "OK"
    error: str = ""


class Telemetry(Protocol):
    """Where finished calls are counted."""

    def began(self, call: Call) -> None:
        """Count a call that began."""
        ...

    def ended(self, call: Call, seconds: float) -> None:
        """Count a call that ended."""
        ...


class Endpoint:
    """The service's calls as gRPC handlers.

    Parameters
    ----------
    handlers
        What each call does.
    guard
        None lets everybody in.
    telemetry
        None counts nothing.
    """

    def __init__(self, handlers: Handlers, guard: Guard | None, telemetry: Telemetry | None) -> None:
        self._handlers = handlers
        self._guard = guard
        self._telemetry = telemetry
        self._running: set[asyncio.Task[object]] = set()
        self._draining = False

    def handler(self) -> grpc.GenericRpcHandler[bytes, bytes]:  # pyright: ignore[reportInvalidTypeArguments]
        """Return the handler to add to a server."""
        methods = {}
        for method in pb.DESCRIPTOR.services_by_name["RendezvousService"].methods:
            methods[method.name] = self._method(method.name, method.client_streaming, method.server_streaming)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def drain(self) -> None:
        """End the calls that wait, so that their callers turn to another server or come back."""
        self._draining = True
        for task in self._running:
            task.cancel()

    def _method(self, name: str, streams_in: bool, streams_out: bool) -> grpc.RpcMethodHandler[bytes, bytes]:
        request_type: type[protobuf.Message] = getattr(pb, f"{name}Request")
        serve = getattr(self._handlers, _snake(name))

        def parse(raw: bytes, call: Call) -> protobuf.Message:
            call.n_received += 1
            call.received_bytes += len(raw)
            message = request_type()
            parse_content(request_type.DESCRIPTOR.name, message, raw)
            return message

        async def parsed(raws: AsyncIterator[bytes], call: Call) -> AsyncIterator[protobuf.Message]:
            async for raw in raws:
                yield parse(raw, call)

        async def answer(incoming: bytes | AsyncIterator[bytes], context: Context) -> bytes:
            async def work(call: Call) -> bytes:
                request = parse(incoming, call) if isinstance(incoming, bytes) else parsed(incoming, call)
                reply: protobuf.Message = await serve(request)
                return _count_out(reply, call)

            return await self._run(name, context, work)

        async def stream(incoming: bytes | AsyncIterator[bytes], context: Context) -> None:
            async def work(call: Call) -> None:
                async def send(reply: protobuf.Message) -> None:
                    await context.write(_count_out(reply, call))

                request = parse(incoming, call) if isinstance(incoming, bytes) else parsed(incoming, call)
                await serve(request, send)

            await self._run(name, context, work)

        if streams_out:
            make = grpc.stream_stream_rpc_method_handler if streams_in else grpc.unary_stream_rpc_method_handler
            return make(stream)  # type: ignore[arg-type, unused-ignore]
        make_one = grpc.stream_unary_rpc_method_handler if streams_in else grpc.unary_unary_rpc_method_handler
        return make_one(answer)  # type: ignore[arg-type, unused-ignore]

    async def _run(self, name: str, context: Context, work: Callable[[Call], Awaitable[T]]) -> T:
        call = Call(name, context.peer(), time.monotonic())
        task = asyncio.current_task()
        if task is not None:
            self._running.add(task)
        if self._telemetry is not None:
            self._telemetry.began(call)
        try:
            if self._draining:
                raise RendezvousUnavailableError("the service is shutting down")
            if self._guard is not None:
                self._guard.check(tuple(context.invocation_metadata() or ()))
            return await work(call)
        except RendezvousError as error:
            await self._refuse(context, call, error)
        except asyncio.CancelledError:
            call.code = "CANCELLED"
            if not self._draining or context.cancelled():
                raise
            if task is not None:
                task.uncancel()
            await self._refuse(context, call, RendezvousUnavailableError("the service is shutting down"))
        except MemoryError as error:
            call.code, call.error = "RESOURCE_EXHAUSTED", str(error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError):
                raise
            call.code, call.error = "INTERNAL", type(error).__name__
            _log.exception("%s failed", name)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; the service's log says more")
        finally:
            if task is not None:
                self._running.discard(task)
            self._end(call)
        raise AssertionError("context.abort always raises")  # pragma: no cover

    async def _refuse(self, context: Context, call: Call, error: RendezvousError) -> None:
        status = status_of(error)
        call.code, call.error = status.name, str(error)[:512]
        trailing = ((DETAIL_KEY, to_detail(error).SerializeToString()),)
        await context.abort(status, to_details(error), trailing)

    def _end(self, call: Call) -> None:
        seconds = time.monotonic() - call.started_s
        if self._telemetry is not None:
            self._telemetry.ended(call, seconds)
        if _access.isEnabledFor(logging.INFO):
            record = {
                "method": call.method,
                "peer": call.peer,
                "code": call.code,
                "ms": round(seconds * 1000, 3),
                "in": call.received_bytes,
                "out": call.sent_bytes,
            }
            if call.error:
                record["error"] = call.error
            _access.info("%s", json.dumps(record, sort_keys=True, ensure_ascii=False))


def _count_out(reply: protobuf.Message, call: Call) -> bytes:
    raw = reply.SerializeToString()
    call.n_sent += 1
    call.sent_bytes += len(raw)
    return raw


def _snake(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")
