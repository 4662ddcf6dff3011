"""The network card of a GPU, read off a sysfs tree made for the test."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from reshard.refit.errors import RefitError
from reshard.refit.nics import nics_of, transport_settings, turn_of, wanted_nics
from reshard.transports import registry
from reshard.transports.errors import TransportUnavailableError

GPU = "0000:18:00.0"
# One root complex with two switches, as in an eight-GPU server, and another one on the other socket.
PLACES = {
    GPU: "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0",
    "0000:1a:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1a:00.0",
    "0000:2b:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:03.0/0000:2b:00.0",
    "0000:3c:00.0": "pci0000:15/0000:15:05.0/0000:3b:00.0/0000:3c:00.0",
    "0000:4d:00.0": "pci0000:4a/0000:4a:01.0/0000:4d:00.0",
    "0000:9e:00.0": "pci0000:97/0000:97:01.0/0000:9e:00.0",
}
CARDS = {
    "mlx5_9": ("0000:1a:00.0", {1: "4: ACTIVE"}),
    "mlx5_1": ("0000:2b:00.0", {1: "1: DOWN", 2: "4: ACTIVE"}),
    "mlx5_2": ("0000:3c:00.0", {1: "4: ACTIVE"}),
    "mlx5_3": ("0000:4d:00.0", {1: "4: ACTIVE"}),
    "mlx5_0": ("0000:9e:00.0", {1: "4: ACTIVE"}),
}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A tree with the links that sysfs has."""
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "class/infiniband").mkdir(parents=True)
    for bus_id, place in PLACES.items():
        home = tmp_path / "devices" / place
        home.mkdir(parents=True)
        (home / "numa_node").write_text("1\n" if "97" in place else "0\n")
        (tmp_path / "bus/pci/devices" / bus_id).symlink_to(home)
    for name, (bus_id, ports) in CARDS.items():
        home = tmp_path / "devices" / PLACES[bus_id] / "infiniband" / name
        for port, state in ports.items():
            (home / "ports" / str(port)).mkdir(parents=True)
            (home / "ports" / str(port) / "state").write_text(state + "\n")
        (home / "device").symlink_to(tmp_path / "devices" / PLACES[bus_id])
        (tmp_path / "class/infiniband" / name).symlink_to(home)
    return tmp_path


def test_nearest_first_other_socket_last_and_only_active_ports(sysfs: Path) -> None:
    found = nics_of(GPU.upper(), sysfs=sysfs)
    assert [nic.device for nic in found] == ["mlx5_1:2", "mlx5_9:1", "mlx5_2:1", "mlx5_3:1", "mlx5_0:1"]
    assert [nic.distance for nic in found[:3]] == [2, 2, 5]
    assert found[3].distance < found[4].distance, "under another root complex the socket decides"


def test_equally_near_cards_are_dealt_out(sysfs: Path) -> None:
    found = nics_of(GPU, sysfs=sysfs)
    assert [turn_of(found, gpu).name for gpu in range(4)] == ["mlx5_1", "mlx5_9", "mlx5_1", "mlx5_9"]  # type: ignore[union-attr]
    assert wanted_nics(0, sysfs=sysfs, bus_id=GPU) == ("mlx5_1:2",)
    assert wanted_nics(1, sysfs=sysfs, bus_id=GPU) == ("mlx5_9:1",)


def test_a_setting_overrides_the_topology(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_NICS", " mlx5_7:1, mlx5_8:1 ")
    assert wanted_nics(0, sysfs=sysfs, bus_id=GPU) == ("mlx5_7:1", "mlx5_8:1")
    assert wanted_nics(0, setting="mlx5_4:1", sysfs=sysfs, bus_id=GPU) == ("mlx5_4:1",)
    assert wanted_nics(0, setting="all", sysfs=sysfs, bus_id=GPU) == ()
    monkeypatch.setenv("RESHARD_NICS", "auto")
    assert wanted_nics(0, sysfs=sysfs, bus_id=GPU) == ("mlx5_1:2",)


def test_no_cards_is_no_choice_and_no_gpu_is_an_error(tmp_path: Path, sysfs: Path) -> None:
    for link in (sysfs / "class/infiniband").iterdir():
        link.unlink()
    assert wanted_nics(0, sysfs=sysfs, bus_id=GPU) == ()
    assert transport_settings("ucx", ()) == {}
    with pytest.raises(RefitError, match=r"0000:ff:00\.0"):
        nics_of("0000:ff:00.0", sysfs=sysfs)


def test_nixl_reaches_port_1_alone() -> None:
    with pytest.raises(RefitError, match=r"mlx5_1:2.*port 1"):
        transport_settings("nixl", ["mlx5_1:2"])
    assert transport_settings("memory", ["mlx5_1:2"]) == {}


def test_ucx_is_given_the_card(capfd: pytest.CaptureFixture[str]) -> None:
    """UCX says that it has no such card (and goes on with shared memory): the setting reached it under its own name."""
    if reason := registry.probe("ucx"):
        pytest.skip(reason)
    registry.open_transport("ucx", **transport_settings("ucx", ["no_such_card:1"])).close()
    ctypes.CDLL(None).fflush(None)  # C's own buffer, unless PYTHONUNBUFFERED is set
    assert "no_such_card:1" in "".join(capfd.readouterr())


def test_nixl_is_given_the_card() -> None:
    if reason := registry.probe("nixl"):
        pytest.skip(reason)
    wire = registry.open_transport("nixl", **transport_settings("nixl", ["no_such_card:1"]))
    with wire.allocate(4096) as memory:
        wire.register([memory.region])
        with pytest.raises(TransportUnavailableError):
            wire.endpoint()
    wire.close()
