"""Records: one line each, stable markers and schemas; throughput floor and ceiling (case T4)."""

from __future__ import annotations

import dataclasses
import json
import logging
import math

import numpy as np
import pytest
from tests.refit.cluster import Cluster

from reshard.refit import settings
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import ImpossibleThroughputError
from reshard.refit.records import (
    MARKERS,
    CoverageRecord,
    DiscoveryRecord,
    ImpossibleThroughputRecord,
    Record,
    SlowThroughputRecord,
    StagesRecord,
    check_throughput,
    emit,
    implied_gbps,
)

CONTEXT = {"rank": 1, "step": 7}


def test_markers_are_the_documented_ones() -> None:
    assert set(MARKERS) == {
        "REFIT_COVERAGE",
        "REFIT_STAGES",
        "REFIT_SLOW_THROUGHPUT",
        "REFIT_IMPOSSIBLE_THROUGHPUT",
        "REFIT_DISCOVERY",
    }


def test_a_record_is_one_line_with_sorted_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="reshard.refit")
    emit(DiscoveryRecord(0, "tp0", "m\nn", 0, 7, 4, 1, 10, 40, 1, True, 0.25))
    (line,) = (r.getMessage() for r in caplog.records)
    marker, _, body = line.partition(" ")
    parsed = json.loads(body)
    assert marker == "REFIT_DISCOVERY"
    assert "\n" not in line
    assert list(parsed) == sorted(parsed)
    assert parsed["schema"] == "refit-discovery-v1"
    assert parsed["slots_empty"] == 1


def test_over_the_ceiling_is_a_record_and_an_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESHARD_MAX_GBPS", "190.8")
    with pytest.raises(ImpossibleThroughputError) as caught:
        check_throughput(40_611_246_080, 0.839641, CONTEXT)
    assert round(caught.value.implied_gbps, 1) == 386.9
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    body = json.loads(record.getMessage().partition(" ")[2])
    assert body["ceiling_gbps"] == 190.8
    assert round(body["implied_gbps"], 1) == 386.9
    assert body["context"] == CONTEXT


def test_the_ceiling_itself_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_MAX_GBPS", "8")
    assert check_throughput(10**9, 1.0, CONTEXT) is None
    with pytest.raises(ImpossibleThroughputError):
        check_throughput(10**9, 0.0, CONTEXT)


def test_under_the_floor_warns_and_goes_on(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_MIN_GBPS", "80")
    record = check_throughput(10**9, 1.0, CONTEXT)
    assert record is not None
    body = json.loads(caplog.records[0].getMessage().partition(" ")[2])
    assert caplog.records[0].getMessage().startswith("REFIT_SLOW_THROUGHPUT ")
    assert {k: body[k] for k in ("wire_bytes", "wire_s", "implied_gbps", "floor_gbps", "shortfall_x")} == {
        "wire_bytes": 10**9,
        "wire_s": 1.0,
        "implied_gbps": 8.0,
        "floor_gbps": 80.0,
        "shortfall_x": 10.0,
    }
    assert check_throughput(0, 1.0, CONTEXT) is None


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "fast"])
@pytest.mark.parametrize("name", ["RESHARD_MIN_GBPS", "RESHARD_MAX_GBPS"])
def test_a_rate_that_is_none_is_off_and_says_so(
    name: str, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    assert check_throughput(10**12, 1e-6, CONTEXT) is None
    assert f"{name}='{text}'" in caplog.text
    assert "the check is off" in caplog.text


def test_unset_rates_are_off(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARD_MIN_GBPS", raising=False)
    monkeypatch.delenv("RESHARD_MAX_GBPS", raising=False)
    assert check_throughput(10**12, 1e-6, CONTEXT) is None
    assert not caplog.records


def test_implied_rates() -> None:
    assert implied_gbps(0, 0.0) == 0.0
    assert implied_gbps(10**9, 2.0) == 4.0
    assert math.isinf(implied_gbps(1, 0.0))


@pytest.mark.parametrize("text", ["1.5", "-0.1", "nan", "most"])
def test_a_floor_outside_zero_to_one_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_COVERAGE_FLOOR", text)
    with pytest.raises(ValueError, match=r"a fraction in \[0.0, 1.0\]"):
        settings.coverage_floor(None)


def test_settings_are_read_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARD_COVERAGE_FLOOR", raising=False)
    monkeypatch.delenv("RESHARD_REQUIRE_FULL_COVERAGE", raising=False)
    assert settings.coverage_floor(None) == 0.995
    assert settings.coverage_floor(0.5) == 0.5
    assert not settings.require_full_coverage(None)
    monkeypatch.setenv("RESHARD_REQUIRE_FULL_COVERAGE", "1")
    assert settings.require_full_coverage(None)
    assert not settings.require_full_coverage(False)
    monkeypatch.setenv("RESHARD_REQUIRE_FULL_COVERAGE", "perhaps")
    with pytest.raises(ValueError, match="RESHARD_REQUIRE_FULL_COVERAGE='perhaps'"):
        settings.require_full_coverage(None)


FIELDS = {
    CoverageRecord: """
        converts copies_captured coverage_pct descriptor_savings descriptors dest_bytes engine_bytes engine_params
        extra_wire_bytes fallback filled_bytes full_pull_sources params_installed params_never_written
        params_never_written_sample params_part_written params_part_written_sample planned_wire_bytes rank
        unbounded_sources unsupported unsupported_causes unsupported_sample""",
    StagesRecord: """
        cold descriptors epoch failovers implied_gbps member mode model new_registrations outcome rank received_bytes
        stages_s step total_s useful_bytes verified_bytes wire_bytes wire_s""",
    SlowThroughputRecord: "context floor_gbps implied_gbps shortfall_x wire_bytes wire_s",
    ImpossibleThroughputRecord: "ceiling_gbps context excess_x implied_gbps wire_bytes wire_s",
    DiscoveryRecord: """
        changed epoch member model rank seconds shards slots slots_empty step tables_fetched tensors""",
}
"""What `docs/refit.md` and readers of logs rely on: a schema's fields change only with its label."""


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.marker)
def test_the_fields_of_a_schema_are_fixed(kind: type[Record]) -> None:
    assert sorted(f.name for f in dataclasses.fields(kind)) == FIELDS[kind].split()
    assert kind.schema == f"{kind.marker.lower().replace('_', '-')}-v1"


def test_all_records_are_pinned() -> None:
    assert {kind.marker for kind in FIELDS} == set(MARKERS)


def test_a_whole_refit_emits_each_record_with_all_its_fields(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen as a reader of the log sees them, in the order in which they come."""
    monkeypatch.setenv("RESHARD_MIN_GBPS", "1e9")
    caplog.set_level(logging.INFO, logger="reshard.refit")
    engine = ArrayEngine({"w": np.zeros(4, np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        cluster.publish(0, {"w": np.ones(4, np.float32)})
        cluster.refit_ok(0)
        monkeypatch.setenv("RESHARD_MIN_GBPS", "0")
        monkeypatch.setenv("RESHARD_MAX_GBPS", "1e-9")
        cluster.publish(1, {"w": np.ones(4, np.float32)})
        assert isinstance(cluster.refit(1)[0], ImpossibleThroughputError)
    seen = []
    for line in (r for r in caplog.records if r.name == "reshard.refit" and r.getMessage().startswith("REFIT_")):
        marker, _, body = line.getMessage().partition(" ")
        parsed = json.loads(body)
        kind = next(kind for kind in FIELDS if kind.marker == marker)
        assert sorted(parsed) == sorted(["schema", *FIELDS[kind].split()])
        assert parsed["schema"] == kind.schema
        seen.append((marker, line.levelname))
    assert seen == [
        ("REFIT_COVERAGE", "INFO"),
        ("REFIT_DISCOVERY", "INFO"),
        ("REFIT_SLOW_THROUGHPUT", "WARNING"),
        ("REFIT_STAGES", "INFO"),
        ("REFIT_DISCOVERY", "INFO"),
        ("REFIT_IMPOSSIBLE_THROUGHPUT", "WARNING"),
        ("REFIT_STAGES", "WARNING"),
    ]
