"""Records: one line each, stable markers and schemas; throughput floor and ceiling (case T4)."""

from __future__ import annotations

import json
import logging
import math

import pytest

from reshard.refit import settings
from reshard.refit.errors import ImpossibleThroughputError
from reshard.refit.records import MARKERS, DiscoveryRecord, check_throughput, emit, implied_gbps

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
