"""The doctor: what it reports of backends that work, that do not, and that fail while they are measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reshard.transports import TransferError, doctor, probing
from reshard.transports.choice import Choice
from reshard.transports.doctor import BackendReport, DoctorReport, HostReport, cost_model, examine, render
from reshard.transports.probing import MIN_BYTES, Rates, measure
from reshard.transports.registry import Availability, probe

RATES = Rates(10e9, 4e-6, 20e-6, 5e-9)
AUTO = Choice("ucx", "no RDMA")
HOST = HostReport(8, -1, 0, ("mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR)",), 5e9)


def only(monkeypatch: pytest.MonkeyPatch, *rows: Availability) -> None:
    monkeypatch.setattr(doctor, "available", lambda: rows)


@pytest.mark.parametrize("backend", ["memory", "nixl", "ucx"])
def test_measuring_a_backend(backend):
    if reason := probe(backend):
        pytest.skip(f"{backend} does not work here: {reason}")
    rates = measure(backend, nbytes=MIN_BYTES, timeout_s=100)
    assert rates.bytes_per_s > 0
    assert rates.descriptor_s >= 0
    assert rates.latency_s > 0
    assert rates.prepare_s > 0


def test_measuring_reads_real_bytes(monkeypatch):
    real = probing.pattern
    monkeypatch.setattr(probing, "pattern", lambda nbytes, seed: real(nbytes, seed + 1))
    with pytest.raises(TransferError, match="other bytes than were served"):
        measure("memory", nbytes=MIN_BYTES)


def test_measuring_refuses_too_little_memory_and_bad_deadlines():
    with pytest.raises(ValueError, match=f"at least {MIN_BYTES}"):
        measure("memory", nbytes=MIN_BYTES - 1)
    for bad in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            examine(measured=False, timeout_s=bad)


def test_a_report_without_measuring_starts_nothing(monkeypatch):
    monkeypatch.setattr(doctor, "measure", lambda *_, **__: pytest.fail("measured"))
    report = examine(measured=False)
    assert {"memory", "nixl", "ucx"} <= {backend.name for backend in report.backends}
    assert all(backend.ok or backend.reason for backend in report.backends)
    assert all(backend.rates is None for backend in report.backends)
    assert json.loads(json.dumps(report.as_dict()))["host"]["n_cpus"] == report.host.n_cpus
    for backend in report.backends:
        assert backend.name in render(report)


def test_what_does_not_work_says_why(monkeypatch):
    only(monkeypatch, Availability("ucx", False, "no usable UCX library; pip install 'reshard[ucx]'"))
    report = examine(nbytes=MIN_BYTES)
    assert report.backend("ucx").rates is None
    assert "pip install 'reshard[ucx]'" in render(report)
    with pytest.raises(KeyError, match="no backend 'nixl'"):
        report.backend("nixl")


def test_a_failure_while_measuring_is_reported_and_the_others_go_on(monkeypatch):
    only(monkeypatch, Availability("first", True), Availability("second", True))

    def measured(name: str, **_: object) -> Rates:
        if name == "first":
            raise TransferError("the cable is out")
        return RATES

    monkeypatch.setattr(doctor, "measure", measured)
    report = examine(nbytes=MIN_BYTES)
    assert not report.backend("first").ok
    assert "the cable is out" in report.backend("first").reason
    assert report.backend("second").rates == RATES


def test_rendezvous_threshold_is_warned_of(monkeypatch):
    for backend in ("nixl", "ucx"):
        if reason := probe(backend):
            pytest.skip(f"{backend} does not work here: {reason}")
    pytest.importorskip("cffi", reason="UCX is asked through cffi")
    monkeypatch.setenv("UCX_RNDV_THRESH", "8192")
    report = examine(measured=False)
    assert "set UCX_RNDV_THRESH=inf" in "".join(report.backend("nixl").warnings)
    assert "does not reach this transport" in "".join(report.backend("ucx").warnings)


def test_libraries_and_devices_are_named():
    if reason := probe("ucx"):
        pytest.skip(f"ucx does not work here: {reason}")
    found = examine(measured=False).backend("ucx")
    text = " ".join(found.details)
    assert "libucp" in text
    assert "tcp/" in text
    assert found.version.startswith("UCX 1.")


def test_host_warnings(tmp_path, monkeypatch):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    scope = tmp_path / "ptrace_scope"
    scope.write_text("2\n")
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(doctor, "_PTRACE_SCOPE", scope)
    host = doctor._host()
    assert host.nics == ("mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR)",)
    assert host.ptrace_scope == 2
    limited = doctor._host_warnings(replace(host, memlock_bytes=65536))
    assert "65536 bytes may be locked" in limited[0]
    assert "CAP_SYS_PTRACE" in limited[1]
    assert doctor._host_warnings(replace(host, memlock_bytes=-1, ptrace_scope=0)) == []
    monkeypatch.setattr(doctor, "_PTRACE_SCOPE", Path("/nowhere"))
    assert doctor._host().ptrace_scope == -1


def test_cost_model_takes_what_was_measured():
    report = DoctorReport(HOST, (BackendReport("ucx", True, rates=RATES), BackendReport("memory", True)), AUTO)
    model = cost_model(report, "ucx")
    assert (model.descriptor_s, model.wire_bytes_per_s, model.copy_bytes_per_s) == (4e-6, 10e9, 5e9)
    with pytest.raises(ValueError, match="was not measured"):
        cost_model(report, "memory")
    with pytest.raises(KeyError):
        cost_model(report, "nixl")
    assert "10.00 GB/s at 1 MiB, 4.00 us a descriptor, 20 us" in render(report)
