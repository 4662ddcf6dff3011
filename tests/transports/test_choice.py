"""What "auto" takes: by what the machine has, said once, and told apart from the other side's choice."""

from __future__ import annotations

import doctest
import logging
from pathlib import Path

import pytest

from reshard.transports import Availability, EndpointError, choice, doctor, open_transport, registry
from reshard.transports.choice import Choice, Machine, choose, look, order
from reshard.transports.doctor import DoctorReport, HostReport, render
from reshard.transports.registry import probe

NIXL_FIRST, UCX_FIRST = ("nixl", "ucx", "memory"), ("ucx", "nixl", "memory")


@pytest.mark.parametrize(
    ("machine", "names", "why"),
    [
        (Machine(), UCX_FIRST, "no RDMA and no GPU"),
        (Machine(rdma=("mlx5_0", "mlx5_1")), NIXL_FIRST, "RDMA over mlx5_0, mlx5_1"),
        (Machine(gpus=("nvidia0",)), NIXL_FIRST, "no RDMA, and device memory (nvidia0)"),
        (Machine(rdma=("efa_0",), gpus=("nvidia0",)), NIXL_FIRST, "RDMA over efa_0"),
    ],
)
def test_the_order_follows_from_what_is_there(machine: Machine, names: tuple[str, ...], why: str) -> None:
    tried, because = order(machine)
    assert tried == names
    assert why in because


@pytest.mark.parametrize(
    ("machine", "broken", "name"),
    [
        (Machine(), (), "ucx"),
        (Machine(), ("ucx",), "nixl"),
        (Machine(), ("ucx", "nixl"), "memory"),
        (Machine(rdma=("mlx5_0",)), (), "nixl"),
        (Machine(rdma=("mlx5_0",)), ("nixl",), "ucx"),
        (Machine(rdma=("mlx5_0",)), ("nixl", "ucx"), "memory"),
        (Machine(), ("ucx", "nixl", "memory"), ""),
    ],
)
def test_the_first_that_works_is_taken_and_the_others_are_named(
    machine: Machine, broken: tuple[str, ...], name: str
) -> None:
    taken = choose(machine, lambda tried: f"no {tried} today" if tried in broken else "")
    assert taken.name == name
    assert [part for part in taken.reason.split("; ") if "does not work here" in part] == [
        f"{tried} does not work here: no {tried} today" for tried in order(machine)[0] if tried in broken
    ]
    assert taken.reason.startswith(order(machine)[1]) is bool(name)


def test_the_examples_hold() -> None:
    results = doctest.testmod(choice)
    assert results.attempted
    assert not results.failed


def test_looking_at_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    infiniband, devices = tmp_path / "infiniband", tmp_path / "dev"
    assert look(infiniband, devices) == Machine()
    for device, state in (("mlx5_1", "4: ACTIVE"), ("mlx5_0", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = infiniband / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    devices.mkdir()
    for name in ("nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (devices / name).touch()
    assert look(infiniband, devices) == Machine(("mlx5_0", "mlx5_1"), ("nvidia0", "nvidia10"))
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_1:1")
    assert look(infiniband, devices).rdma == ("mlx5_1",)
    monkeypatch.setenv("UCX_TLS", "tcp,cma")  # then NIXL reads other hosts over TCP, whatever hangs in this one
    assert look(infiniband, devices).rdma == ()


@pytest.mark.parametrize("machine", [Machine(), Machine(rdma=("mlx5_0",))])
def test_auto_opens_it_and_says_so_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "look", lambda: machine)
    monkeypatch.setattr(registry, "_told", set())
    expected = next(name for name in order(machine)[0] if not probe(name))
    with caplog.at_level(logging.INFO, "reshard.transports.registry"):
        for _ in range(2):
            with open_transport("auto") as transport:
                assert transport.name == expected
    (said,) = [record.getMessage() for record in caplog.records if record.name == "reshard.transports.registry"]
    assert said.startswith(f"open_transport('auto') takes {expected!r}: {order(machine)[1]}")


@pytest.mark.parametrize("owners", ["nixl", "memory"])
def test_sides_that_chose_differently_are_both_named(owners: str) -> None:
    for name in (owners, "ucx"):
        if reason := probe(name):
            pytest.skip(f"{name} does not work here: {reason}")
    with open_transport(owners) as owner, open_transport("ucx") as reader:
        owner.register([owner.allocate(4096).region])
        with pytest.raises(EndpointError, match=rf"got '{owners}', expected 'ucx'.*open both by one name") as caught:
            reader.connect(owner.endpoint(), timeout_s=60.0, name="owner")
        assert "instead of 'auto'" in str(caught.value)


def test_the_doctor_says_what_auto_takes_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Availability("nixl", True), Availability("ucx", False, "no libucp"), Availability("memory", True))
    monkeypatch.setattr(doctor, "available", lambda: rows)
    monkeypatch.setattr(doctor, "_native", lambda name, host: ("", (), ()))
    monkeypatch.setattr(doctor, "look", lambda infiniband: Machine())
    report = doctor.examine(measured=False)
    assert report.auto.name == "nixl"
    assert "auto      nixl: no RDMA and no GPU" in render(report)
    assert "ucx does not work here: no libucp" in render(report)
    nothing = DoctorReport(HostReport(1, -1, 0, ()), (), Choice("", "nixl does not work here: gone"))
    assert "auto      nothing works: nixl does not work here: gone" in render(nothing)
