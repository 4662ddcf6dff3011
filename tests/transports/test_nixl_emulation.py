"""Where NIXL's reads are emulated, it is said: at connecting, once of each peer, and by the doctor."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from reshard.transports import doctor, open_transport
from reshard.transports.nixl.emulation import LIMIT, active_ports, emulated
from reshard.transports.peer_process import PeerProcess
from reshard.transports.registry import probe

needs_nixl = pytest.mark.skipif(bool(probe("nixl")), reason=f"nixl does not work here: {probe('nixl')}")


def ports(folder: Path, **states: str) -> frozenset[str]:
    for device, state in states.items():
        port = folder / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    return active_ports(folder)


def test_only_active_ports_count(tmp_path):
    assert ports(tmp_path, mlx5_0="4: ACTIVE", mlx5_1="1: DOWN", efa_0="4: ACTIVE") == {"mlx5_0", "efa_0"}
    assert active_ports(tmp_path / "nowhere") == frozenset()


@pytest.mark.parametrize(
    ("tls", "one_host", "between_hosts"),
    [
        (None, False, False),
        ("all", False, False),
        ("tcp", True, True),
        ("tcp,cma", False, True),
        ("sm,tcp,self", False, True),
        ("rc,tcp", False, False),
        ("rc_x, sm", False, False),
        ("ib", False, False),
        ("ud", True, True),
        ("^cma", False, False),
        ("^tcp", False, False),
        ("^cma,ib", True, True),
        ("^sm,ib", True, True),
        ("^ib", False, True),
        ("^all", True, True),
    ],
)
def test_what_ucx_may_use(tls, one_host, between_hosts):
    """With a port of RDMA; over it, one host's processes are read without emulation, too."""
    environment = {} if tls is None else {"UCX_TLS": tls}
    active = frozenset({"mlx5_0"})
    assert emulated(visible=True, environment=environment, options={}, active=active) is one_host
    assert emulated(visible=False, environment=environment, options={}, active=active) is between_hosts
    assert emulated(visible=False, environment=environment, options={}, active=frozenset())


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({"UCX_NET_DEVICES": "eth0"}, {}, True),
        ({"UCX_NET_DEVICES": "eth0, mlx5_0:1"}, {}, False),
        ({"UCX_NET_DEVICES": "all"}, {}, False),
        ({"UCX_NET_DEVICES": "^eth0,eth1"}, {}, False),
        ({"UCX_NET_DEVICES": "^mlx5_0:1"}, {}, True),
        ({"UCX_NET_DEVICES": "^all"}, {}, True),
        ({"UCX_NET_DEVICES": "eth0"}, {"ucx_devices": "mlx5_0"}, False),
        ({}, {"ucx_devices": "mlx5_7"}, True),
    ],
)
def test_which_devices_it_may_use(environment, options, expected):
    active = frozenset({"mlx5_0"})
    assert emulated(visible=False, environment=environment, options=options, active=active) is expected
    assert not emulated(visible=True, environment=environment, options=options, active=active)


@needs_nixl
@pytest.mark.parametrize(("tls", "times"), [("tcp", 1), ("", 0)])
def test_a_reader_is_told_once_of_each_peer(tls, times, monkeypatch, caplog):
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    with PeerProcess("nixl") as process, open_transport("nixl") as transport:
        message, _ = process.serve(4096, 1)
        with caplog.at_level(logging.WARNING, "reshard.transports.nixl"):
            for name in ("first", "second"):
                transport.connect(message, timeout_s=60.0, name=name).close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"peer 'first': UCX emulates reads from it in software: {LIMIT}"] * times


@needs_nixl
def test_the_doctor_says_it_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    said = f"UCX emulates NIXL's reads in software: {LIMIT}"

    def warnings() -> list[str]:
        return [text for text in doctor.examine(measured=False).backend("nixl").warnings if LIMIT in text]

    monkeypatch.delenv("UCX_TLS", raising=False)
    assert warnings() == [f"between hosts {said}"]
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert warnings() == [f"between hosts {said}", f"on one host {said}"]
    monkeypatch.delenv("UCX_TLS")
    ports(tmp_path, mlx5_0="4: ACTIVE")
    assert warnings() == []
