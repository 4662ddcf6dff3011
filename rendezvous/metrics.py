"""What does the service count? Calls, bytes, seconds and running streams, for Prometheus over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.planner.errors import require
from reshard.rendezvous.errors import RendezvousUnavailableError
from reshard.rendezvous.exposure import split_address

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from reshard.rendezvous.endpoint import Call

__all__ = ["MetricsServer", "PrometheusTelemetry"]

_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0, 60.0, 600.0)


class PrometheusTelemetry:
    """Counters of calls, on a registry of their own (two servers in one process do not mix)."""

    def __init__(self) -> None:
        prometheus = require("prometheus_client", extra="rendezvous")
        self.registry = prometheus.CollectorRegistry()
        label = ("method",)
        self._calls = prometheus.Counter(
            "reshard_rendezvous_calls", "Finished calls.", ("method", "code"), registry=self.registry
        )
        self._running = prometheus.Gauge(
            "reshard_rendezvous_running_calls", "Calls that run or wait now.", label, registry=self.registry
        )
        self._seconds = prometheus.Histogram(
            "reshard_rendezvous_call_seconds",
            "Duration of calls, waiting included.",
            label,
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._received = prometheus.Counter(
            "reshard_rendezvous_received_bytes", "Bytes of request messages.", label, registry=self.registry
        )
        self._sent = prometheus.Counter(
            "reshard_rendezvous_sent_bytes", "Bytes of response messages.", label, registry=self.registry
        )

    def began(self, call: Call) -> None:
        """Count a call that began."""
        self._running.labels(call.method).inc()

    def ended(self, call: Call, seconds: float) -> None:
        """Count a call that ended."""
        self._running.labels(call.method).dec()
        self._calls.labels(call.method, call.code).inc()
        self._seconds.labels(call.method).observe(seconds)
        self._received.labels(call.method).inc(call.received_bytes)
        self._sent.labels(call.method).inc(call.sent_bytes)


class MetricsServer:
    """An HTTP server for the metrics."""

    def __init__(self, listen: str) -> None:
        self._host, self._port = split_address("metrics_listen", listen)
        self.telemetry = PrometheusTelemetry()
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None

    def start(self) -> str:
        """Bind and serve; returns ``host:port``."""
        prometheus = require("prometheus_client", extra="rendezvous")
        try:
            server, thread = prometheus.start_http_server(
                self._port, addr=self._host.strip("[]"), registry=self.telemetry.registry
            )
        except OSError as error:
            raise RendezvousUnavailableError(f"cannot bind metrics at {self._host}:{self._port}: {error}") from error
        self._server, self._thread = server, thread
        return f"{self._host}:{server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5.0)
            self._server = None
