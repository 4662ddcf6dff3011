"""How does a rendezvous become a server? A broker on a store, behind gRPC, with health, reflection and metrics.

1. The bind is checked: outside loopback it needs TLS and (client CA or token), or to be told that it is insecure.
2. The store is opened, the broker started, the endpoint registered.
3. Health says SERVING. On close it says NOT_SERVING, waiting calls are ended as UNAVAILABLE so that their callers come
   back, and running ones get a grace.

The server runs on an event loop in a thread of its own, so that the command line, tests and child processes use it
alike.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from reshard.rendezvous import limits
from reshard.rendezvous.broker import Broker
from reshard.rendezvous.catalog import BlobCatalog
from reshard.rendezvous.errors import RendezvousError, RendezvousUnavailableError
from reshard.rendezvous.exposure import TokenFile, check_exposure, check_tls_files, read_pem, without_secrets
from reshard.rendezvous.optional import grpc, require_service_packages
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.store import MemoryStore, Store

if TYPE_CHECKING:
    from grpc_health.v1.health.aio import HealthServicer  # type: ignore[import-untyped, unused-ignore]

    from reshard.rendezvous.endpoint import Endpoint
    from reshard.rendezvous.metrics import MetricsServer

__all__ = ["ServeOptions", "Server", "serve"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_START_S = 30.0
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 100_000),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Settings of a service.

    Parameters
    ----------
    listen
        ``host:port``; port 0 lets the system choose.
    store
        ``memory``, or ``redis://host:port/db`` (``rediss://`` for TLS).
    tls_cert, tls_key
        PEM files of the server.
    client_ca
        PEM file: clients must show a certificate that it signed.
    token_file
        File with one bearer token a line; it is read again when it changes.
    insecure
        Allow a bind outside loopback without the above.
    metrics_listen
        ``host:port`` of Prometheus metrics over HTTP; empty for none.
    retry_hint
        How often receivers should try a dial or a lease request; their own settings override it. None suggests none.
    """

    listen: str = "127.0.0.1:0"
    store: str = "memory"
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    token_file: str | None = None
    insecure: bool = False
    metrics_listen: str = ""
    retry_hint: RetryHint | None = None


def serve(
    listen: str = "127.0.0.1:0",
    *,
    store: str = "memory",
    tls_cert: str | None = None,
    tls_key: str | None = None,
    client_ca: str | None = None,
    token_file: str | None = None,
    insecure: bool = False,
    metrics_listen: str = "",
    retry_hint: RetryHint | None = None,
) -> Server:
    """Start a service and return it running. Parameters as in :class:`ServeOptions`.

    Raises
    ------
    RendezvousError
        A bind that is not allowed or not possible, unreadable files, a store that is not reached.
    """
    files = (tls_cert, tls_key, client_ca, token_file)
    options = ServeOptions(listen, store, *files, insecure, metrics_listen, retry_hint)
    check_exposure(options)
    require_service_packages()
    return Server(options)


class Server:
    """A running service. Close it, or use it as a context manager."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.address = ""
        self.metrics_address = ""
        self._loop = asyncio.new_event_loop()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reshard-serve", daemon=True)
        self._thread.start()
        try:
            self._running = self._call(_Running.start(options), _START_S)
        except BaseException:
            self._stop_loop()
            raise
        self.address = self._running.address
        self.metrics_address = self._running.metrics_address
        _log.info("rendezvous serves at %s on store %s", self.address, without_secrets(options.store))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server is closed; False if `timeout_s` passed first."""
        return self._closed.wait(timeout_s)

    def close(self, grace_s: float = 5.0) -> None:
        """Shut down: waiting calls end at once as UNAVAILABLE, running ones get `grace_s`. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            try:
                self._call(self._running.stop(grace_s), grace_s + 10.0)
            finally:
                self._stop_loop()
                self._closed.set()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[object, object, T], timeout_s: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()


class _Running:
    """The parts of a running service, on its loop."""

    def __init__(self, server: grpc.aio.Server, broker: Broker, endpoint: Endpoint, health: HealthServicer) -> None:
        self._server = server
        self._broker = broker
        self._endpoint = endpoint
        self._health = health
        self._metrics: MetricsServer | None = None
        self.address = ""
        self.metrics_address = ""

    @classmethod
    async def start(cls, options: ServeOptions) -> _Running:
        """Open the store, bind and begin to serve."""
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        from reshard.rendezvous.endpoint import SERVICE, Endpoint
        from reshard.rendezvous.handlers import Handlers

        guard = TokenFile(options.token_file) if options.token_file else None
        metrics = None
        if options.metrics_listen:
            from reshard.rendezvous.metrics import MetricsServer

            metrics = MetricsServer(options.metrics_listen)
        store = await open_store(options.store)  # last of what may refuse: it would have to be closed
        catalog = BlobCatalog(store)
        broker = Broker(store, catalog)
        handlers = Handlers(broker, catalog, options.retry_hint)
        endpoint = Endpoint(handlers, guard, metrics.telemetry if metrics is not None else None)
        server = grpc.aio.server(options=_CHANNEL_OPTIONS)
        server.add_generic_rpc_handlers((endpoint.handler(),))
        servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        running = cls(server, broker, endpoint, servicer)
        host, _, _ = options.listen.rpartition(":")
        try:
            if options.tls_cert and options.tls_key:
                check_tls_files(ca=options.client_ca, cert=options.tls_cert, key=options.tls_key)
                roots = read_pem(options.client_ca) if options.client_ca else None
                pair = (read_pem(options.tls_key), read_pem(options.tls_cert))
                credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)
                port = server.add_secure_port(options.listen, credentials)
            else:
                port = server.add_insecure_port(options.listen)
            if port == 0:
                raise RendezvousUnavailableError(f"cannot bind {options.listen}")
            running.address = f"{host}:{port}"
            if metrics is not None:
                running._metrics = metrics
                running.metrics_address = metrics.start()
            broker.start()
            await server.start()
            for name in ("", SERVICE):
                await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        except BaseException as error:
            await running.stop(0.0)
            if isinstance(error, RuntimeError) and not isinstance(error, RendezvousError):
                raise RendezvousUnavailableError(f"cannot bind {options.listen}: {error}") from error
            raise
        return running

    async def stop(self, grace_s: float) -> None:
        """Stop serving."""
        await self._health.enter_graceful_shutdown()
        self._endpoint.drain()
        await self._server.stop(grace_s)
        await self._broker.close()
        if self._metrics is not None:
            self._metrics.close()


async def open_store(url: str) -> Store:
    """Open the store that ``--store`` names.

    Raises
    ------
    RendezvousError
        An unknown kind of store, or one that is not reached.
    """
    if url == "memory":
        return MemoryStore()
    if url.startswith(("redis://", "rediss://", "unix://")):
        from reshard.rendezvous.redis_store import RedisStore

        return await RedisStore.open(url)
    raise RendezvousError(f"unknown store {without_secrets(url)!r}; expected 'memory' or 'redis://host:port/db'")
