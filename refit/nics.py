"""Which network cards are near a GPU? Read off sysfs: where both hang in the tree of PCI bridges.

1. A device's place is its real path under ``/sys/devices``: root complex, bridges, device
   (``pci0000:15/0000:15:01.0/0000:16:00.0/...``).
2. The distance of two devices is the number of bridges from each to where their paths meet; under different root
   complexes they meet nowhere, and only the NUMA node tells them apart.
3. A GPU takes the nearest cards with an active port; GPUs that are equally near to several share them by turns.

`transport_settings` turns the choice into settings of a transport; ``RESHARD_NICS`` (or the caller) overrides it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.refit.errors import RefitError

__all__ = ["Nic", "bus_id_of_gpu", "nics_of", "pci_distance", "transport_settings", "turn_of", "wanted_nics"]

SYSFS = Path("/sys")
_UNRELATED = 1 << 16
_OTHER_NODE = 1 << 17


@dataclass(frozen=True, slots=True)
class Nic:
    """One active port of a network card: ``mlx5_0``, port 1, and how far it is from the GPU that was asked for."""

    name: str
    port: int
    distance: int

    @property
    def device(self) -> str:
        """As UCX calls it: ``mlx5_0:1``."""
        return f"{self.name}:{self.port}"


def pci_distance(one: Sequence[str], other: Sequence[str], *, same_node: bool = True) -> int:
    """Bridges between two devices, given their places from the root complex down.

    Examples
    --------
    >>> gpu = ("pci0000:15", "0000:15:01.0", "0000:17:00.0", "0000:18:00.0")
    >>> pci_distance(gpu, ("pci0000:15", "0000:15:01.0", "0000:17:01.0", "0000:19:00.0"))
    2
    >>> pci_distance(gpu, ("pci0000:26", "0000:26:01.0", "0000:27:00.0")) > 1000
    True
    """
    shared = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        shared += 1
    if not shared:
        return _UNRELATED if same_node else _OTHER_NODE
    return max(len(one) - shared - 1, 0) + max(len(other) - shared - 1, 0)


def bus_id_of_gpu(number: int) -> str:
    """The PCI address of a CUDA device of this process, as sysfs writes it (``0000:18:00.0``).

    Raises
    ------
    MissingDependencyError
        Without torch.
    """
    from reshard.planner.errors import require

    properties = require("torch", extra="torch").cuda.get_device_properties(number)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def nics_of(bus_id: str, *, sysfs: Path = SYSFS) -> tuple[Nic, ...]:
    """The active ports of InfiniBand and RoCE cards, nearest to a PCI device first, then by name.

    Parameters
    ----------
    bus_id
        ``domain:bus:device.function``, in any case.
    sysfs
        Where sysfs is mounted.

    Raises
    ------
    RefitError
        If there is no such PCI device.
    """
    gpu = sysfs / "bus" / "pci" / "devices" / bus_id.lower()
    if not gpu.exists():
        raise RefitError(f"PCI device {bus_id!r} is not in {sysfs}/bus/pci/devices")
    place, node = _place(gpu), _numa_node(gpu)
    found: list[Nic] = []
    cards = sysfs / "class" / "infiniband"
    for card in sorted(cards.iterdir()) if cards.is_dir() else ():
        device = card / "device"
        if not device.exists():
            continue
        far = pci_distance(place, _place(device), same_node=_numa_node(device) == node)
        ports = sorted(int(p.name) for p in (card / "ports").iterdir() if p.name.isdigit())
        found += [Nic(card.name, port, far) for port in ports if _is_active(card / "ports" / str(port))]
    return tuple(sorted(found, key=lambda nic: (nic.distance, nic.name, nic.port)))


def turn_of(nics: Sequence[Nic], turn: int = 0) -> Nic | None:
    """One of the nearest, by turns; None where there is none.

    Examples
    --------
    >>> near = [Nic("mlx5_0", 1, 2), Nic("mlx5_1", 1, 2), Nic("mlx5_9", 1, 8)]
    >>> [nic.name for nic in (turn_of(near, 0), turn_of(near, 1), turn_of(near, 2)) if nic]
    ['mlx5_0', 'mlx5_1', 'mlx5_0']
    """
    nearest = [nic for nic in nics if nic.distance == nics[0].distance]
    return nearest[turn % len(nearest)] if nearest else None


def wanted_nics(gpu: int, *, setting: str | None = None, sysfs: Path = SYSFS, bus_id: str = "") -> tuple[str, ...]:
    """The cards that a GPU's transport should use, as UCX calls them; empty leaves the choice to the transport.

    Parameters
    ----------
    gpu
        The device's ordinal; cards that are equally near are dealt out by it.
    setting
        Comma-separated names; the environment's ``RESHARD_NICS`` if None. ``auto`` (the default) asks the topology,
        ``all`` chooses nothing.
    bus_id
        Of the GPU; torch is asked if it is empty.

    Raises
    ------
    RefitError
        If the GPU is not to be found.
    """
    said = (os.environ.get("RESHARD_NICS", "") if setting is None else setting).strip() or "auto"
    if said == "all":
        return ()
    if said != "auto":
        return tuple(name.strip() for name in said.split(",") if name.strip())
    chosen = turn_of(nics_of(bus_id or bus_id_of_gpu(gpu), sysfs=sysfs), gpu)
    return (chosen.device,) if chosen is not None else ()


def transport_settings(transport: str, nics: Sequence[str]) -> Mapping[str, object]:
    """What to pass to `reshard.transports.open_transport` so that it uses these cards; empty for no choice.

    Raises
    ------
    RefitError
        A port other than 1 for NIXL, whose ``device_list`` names cards and adds the port 1 itself (NIXL 1.5).

    Examples
    --------
    >>> transport_settings("ucx", ["mlx5_0:1", "mlx5_1:2"])
    {'net_devices': 'mlx5_0:1,mlx5_1:2'}
    >>> transport_settings("nixl", ["mlx5_0:1"])
    {'options': {'device_list': 'mlx5_0'}}
    """
    if not nics:
        return {}
    if transport == "ucx":
        return {"net_devices": ",".join(nics)}
    if transport != "nixl":
        return {}
    cards = []
    for nic in nics:
        name, _, port = nic.partition(":")
        if port not in ("", "1"):
            raise RefitError(f"network card {nic!r}: NIXL reaches port 1 of a card alone; use the transport 'ucx'")
        cards.append(name)
    return {"options": {"device_list": ", ".join(cards)}}


def _place(device: Path) -> tuple[str, ...]:
    """A device's path from its root complex down."""
    parts = device.resolve().parts
    roots = [i for i, part in enumerate(parts) if part.startswith("pci")]
    return parts[roots[0] :] if roots else parts[-1:]


def _numa_node(device: Path) -> str:
    node = device / "numa_node"
    return node.read_text().strip() if node.exists() else ""


def _is_active(port: Path) -> bool:
    state = port / "state"
    return state.exists() and "ACTIVE" in state.read_text()
