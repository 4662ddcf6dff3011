"""Refits counted by Prometheus and traced by OpenTelemetry, where they are installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.refit.cluster import tp_cluster, weights

from reshard.refit import metrics


@pytest.fixture(autouse=True)
def _silent_again() -> Iterator[None]:
    yield
    metrics.disable()


def test_prometheus() -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    registry = client.CollectorRegistry()
    metrics.enable(prometheus=True, registry=registry)
    with tp_cluster() as cluster:
        for step in range(2):
            cluster.publish(step, weights(step))
            cluster.refit_ok(step)
    own = {"model": "m", "member": "tp1"}
    assert registry.get_sample_value("reshard_refits_total", {**own, "outcome": "served"}) == 2
    assert registry.get_sample_value("reshard_serving_step", own) == 1
    assert registry.get_sample_value("reshard_refit_wire_bytes_total", own) > 1000
    assert registry.get_sample_value("reshard_refit_stage_seconds_count", {**own, "stage": "read"}) == 2


def test_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    metrics.enable(opentelemetry=True)
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
    spans = exporter.get_finished_spans()
    refits = [s for s in spans if s.name == "refit"]
    assert len(refits) == 2
    assert {s.attributes["reshard.outcome"] for s in refits} == {"served"}
    children = {s.name for s in spans if s.parent is not None and s.parent.span_id == refits[0].context.span_id}
    assert {"refit.read", "refit.vote", "refit.install"} <= children


def test_nothing_is_observed_before_it_is_enabled() -> None:
    assert metrics._OBSERVERS == []


def test_an_observer_that_fails_does_not_fail_the_refit(caplog: pytest.LogCaptureFixture) -> None:
    def fail(record: object) -> None:
        raise ConnectionError("no collector")

    metrics._OBSERVERS.append(fail)
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        assert all(r.check_serving().step == 0 for r in cluster.receivers)
    assert "an observer of refits failed on REFIT_STAGES" in caplog.text
