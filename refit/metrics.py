"""Counters and histograms of refits for Prometheus, and spans for OpenTelemetry, where those packages are installed.

Nothing is imported before it is needed, and an absent package is no error: metrics are for those who installed the
extra ``reshard[metrics]``. `enable` says which of the two to use; nothing is observed before it is called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from reshard.planner.errors import require
from reshard.refit.records import StagesRecord

logger = logging.getLogger(__name__)

__all__ = ["disable", "enable", "observe_refit"]

_OBSERVERS: list[Callable[[StagesRecord], None]] = []


def enable(*, prometheus: bool = False, opentelemetry: bool = False, registry: object = None) -> None:
    """Observe refits from now on.

    Parameters
    ----------
    prometheus
        Count in a registry of ``prometheus_client``.
    opentelemetry
        One span a refit with one child a stage, through the global tracer provider.
    registry
        A ``prometheus_client.CollectorRegistry``; its default one if None.

    Raises
    ------
    MissingDependencyError
        Naming the extra, if the package is not installed.
    """
    if prometheus:
        _OBSERVERS.append(_prometheus(registry))
    if opentelemetry:
        _OBSERVERS.append(_opentelemetry())


def disable() -> None:
    """Observe nothing any more."""
    _OBSERVERS.clear()


def observe_refit(record: StagesRecord) -> None:
    """Tell the observers of one refit; what one of them raises is logged, and changes nothing."""
    for observe in tuple(_OBSERVERS):
        try:
            observe(record)
        except Exception:
            logger.exception("an observer of refits failed on %s", record.line())


def _prometheus(registry: object) -> Callable[[StagesRecord], None]:
    client = require("prometheus_client", extra="metrics")
    where = client.REGISTRY if registry is None else registry
    labels = ("model", "member")
    refits = client.Counter("reshard_refits", "Refits by outcome.", (*labels, "outcome"), registry=where)
    moved = client.Counter("reshard_refit_wire_bytes", "Bytes read from publishers.", labels, registry=where)
    verified = client.Counter("reshard_refit_verified_bytes", "Bytes verified.", labels, registry=where)
    failovers = client.Counter("reshard_refit_failovers", "Holders given up for replicas.", labels, registry=where)
    step = client.Gauge("reshard_serving_step", "Step that is served.", labels, registry=where)
    seconds = client.Histogram(
        "reshard_refit_stage_seconds",
        "Seconds by stage.",
        (*labels, "stage"),
        buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
        registry=where,
    )

    def observe(record: StagesRecord) -> None:
        own = (record.model, record.member)
        refits.labels(*own, record.outcome).inc()
        moved.labels(*own).inc(record.wire_bytes)
        verified.labels(*own).inc(record.verified_bytes)
        failovers.labels(*own).inc(record.failovers)
        if record.outcome == "served":
            step.labels(*own).set(record.step)
        for stage, spent in record.stages_s.items():
            seconds.labels(*own, stage).observe(spent)

    return observe


def _opentelemetry() -> Callable[[StagesRecord], None]:
    trace = require("opentelemetry.trace", extra="metrics")

    def observe(record: StagesRecord) -> None:
        tracer = trace.get_tracer("reshard.refit")
        end_ns = time.time_ns()
        start_ns = end_ns - int(record.total_s * 1e9)
        attributes = {
            "reshard.model": record.model,
            "reshard.member": record.member,
            "reshard.epoch": record.epoch,
            "reshard.step": record.step,
            "reshard.outcome": record.outcome,
            "reshard.cold": record.cold,
            "reshard.wire_bytes": record.wire_bytes,
            "reshard.verified_bytes": record.verified_bytes,
        }
        span = tracer.start_span("refit", start_time=start_ns, attributes=attributes)
        inside = trace.set_span_in_context(span)
        at_ns = start_ns
        for stage, spent in record.stages_s.items():
            child = tracer.start_span(f"refit.{stage}", context=inside, start_time=at_ns)
            at_ns += int(spent * 1e9)
            child.end(end_time=at_ns)
        span.end(end_time=end_ns)

    return observe
