"""Which transport fits this machine? What ``open_transport("auto")`` takes, and why.

1. `look` asks the system what is there: RDMA ports that UCX may use, CUDA devices. No native library is loaded for it.
2. `order` makes of these facts the order in which transports are tried: `nixl` first where there is RDMA or a GPU, else
   `ucx`: between hosts there is only TCP then, over which a reader that dies may end an owner that serves with NIXL.
3. `choose` takes the first that works.

Hosts that differ in these facts may choose differently, and then cannot read each other: connecting says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_INFINIBAND = Path("/sys/class/infiniband")
_DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Machine:
    """What is there.

    Attributes
    ----------
    rdma : tuple of str
        Devices with an active RDMA port that UCX may use, such as ``"mlx5_0"``.
    gpus : tuple of str
        CUDA devices that this process can see, such as ``"nvidia0"``.
    """

    rdma: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport's name, empty if none works, and why it is this one."""

    name: str
    reason: str


def look(infiniband: Path = _INFINIBAND, devices: Path = _DEVICES) -> Machine:
    """Return what this machine has; ``UCX_TLS`` and ``UCX_NET_DEVICES`` may forbid UCX what is there.

    Parameters
    ----------
    infiniband, devices : Path
        Where the system lists RDMA devices and device files.
    """
    from reshard.transports.nixl.emulation import active_ports, usable_ports  # a backend is imported when it is used

    rdma = usable_ports(os.environ, {}, active_ports(infiniband))
    gpus = (path.name for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    return Machine(tuple(sorted(rdma)), tuple(sorted(gpus)))


def order(machine: Machine) -> tuple[tuple[str, ...], str]:
    """Return the names of transports in the order in which to try them, and why.

    Examples
    --------
    >>> order(Machine(rdma=("mlx5_0",)))
    (('nixl', 'ucx', 'memory'), 'RDMA over mlx5_0')
    >>> order(Machine())[0]
    ('ucx', 'nixl', 'memory')
    """
    if machine.rdma:
        return ("nixl", "ucx", "memory"), f"RDMA over {', '.join(machine.rdma)}"
    if machine.gpus:
        return ("nixl", "ucx", "memory"), f"no RDMA, and device memory ({', '.join(machine.gpus)})"
    return ("ucx", "nixl", "memory"), "no RDMA and no GPU, so between hosts there is TCP at most"


def choose(machine: Machine, probe: Callable[[str], str]) -> Choice:
    """Return the first transport of `order` that works.

    Parameters
    ----------
    machine : Machine
    probe : callable
        Says of a name why that transport cannot work here, empty if it can.
    """
    names, because = order(machine)
    said = [because]
    for name in names:
        reason = probe(name)
        if not reason:
            return Choice(name, "; ".join(said))
        said.append(f"{name} does not work here: {reason}")
    return Choice("", "; ".join(said[1:]))
