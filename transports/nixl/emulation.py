"""Who moves the bytes of a NIXL read: hardware, the reader, or the owner's own process?

Where UCX has neither RDMA nor, on one host, a way into another process's memory (CMA and its kind), it emulates a read:
it asks the owner's process to send. That is slow, and it has a fault that no layer above NIXL can mend: an owner whose
reader dies in mid read may die of it. So readers say at connecting, and ``reshard doctor`` says beforehand, where reads
are emulated.

UCX itself is not asked, since NIXL keeps its context to itself: what decides is what it may use (``UCX_TLS``,
``UCX_NET_DEVICES``, the plug-in's ``ucx_devices``) and which RDMA ports the system has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path

from reshard.transports.lists import ConnectedPeer

logger = getLogger(__name__)

INFINIBAND = Path("/sys/class/infiniband")
ONE_HOST = frozenset({"cma"})
"""UCX transports that read another process's memory on one host (xpmem and knem need kernel modules of their own)."""
NETWORK = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5", "gga_mlx5", "srd"})
"""UCX transports that read another host's memory in hardware."""
ALIASES: Mapping[str, frozenset[str]] = {
    "all": ONE_HOST | NETWORK,
    "sm": ONE_HOST,
    "shm": ONE_HOST,
    "ib": NETWORK,
    "rc": frozenset({"rc_verbs", "rc_mlx5"}),
    "rc_v": frozenset({"rc_verbs"}),
    "rc_x": frozenset({"rc_mlx5"}),
    "dc": frozenset({"dc_mlx5"}),
    "dc_x": frozenset({"dc_mlx5"}),
}
"""What names in ``UCX_TLS`` stand for, as far as it matters here."""
LIMIT = (
    "a reader that dies in mid read may end the owner's process; use backend 'ucx' where there is no RDMA "
    "(docs/transports.md, Limits)"
)


def active_ports(infiniband: Path = INFINIBAND) -> frozenset[str]:
    """Return the names of the devices that have an active RDMA port, such as ``"mlx5_0"``."""
    active = set()
    for state in infiniband.glob("*/ports/*/state"):
        try:
            if "ACTIVE" in state.read_text():
                active.add(state.parents[2].name)
        except OSError:
            continue  # taken away meanwhile
    return frozenset(active)


def emulated(
    *, visible: bool, environment: Mapping[str, str], options: Mapping[str, str], active: frozenset[str]
) -> bool:
    """Return whether UCX emulates reads from a peer in software.

    Parameters
    ----------
    visible : bool
        Whether the peer is on this host, in our pid name space.
    environment : mapping of str to str
        Where ``UCX_*`` variables are looked for.
    options : mapping of str to str
        Initialisation parameters of NIXL's plug-in.
    active : frozenset of str
        See `active_ports`.
    """
    if visible and _admits(environment.get("UCX_TLS", "all"), ONE_HOST):
        return False
    return not usable_ports(environment, options, active)


def usable_ports(environment: Mapping[str, str], options: Mapping[str, str], active: frozenset[str]) -> frozenset[str]:
    """Return those devices with an active RDMA port that UCX may read through; for the parameters see `emulated`."""
    if not _admits(environment.get("UCX_TLS", "all"), NETWORK):
        return frozenset()
    wanted = options.get("ucx_devices") or environment.get("UCX_NET_DEVICES", "all")
    devices = {device.strip().partition(":")[0] for device in wanted.removeprefix("^").split(",")}
    named = active if "all" in devices else active & devices
    return active - named if wanted.startswith("^") else named


def _admits(tls: str, wanted: frozenset[str]) -> bool:
    """Whether a value of ``UCX_TLS`` (a list of names, or ``^`` and a list of what is left out) admits one of these."""
    names = [name.strip() for name in tls.removeprefix("^").split(",")]
    spelled_out = frozenset[str]().union(*(ALIASES.get(name, {name}) for name in names))
    return bool(wanted - spelled_out) if tls.startswith("^") else bool(wanted & spelled_out)


class EmulationNotices:
    """Says of each peer whose reads are emulated that its process may not survive us: once, in the log.

    Parameters
    ----------
    options : mapping of str to str, or None
        Initialisation parameters of NIXL's UCX plug-in; None with another plug-in, of which nothing is said.
    """

    def __init__(self, options: Mapping[str, str] | None) -> None:
        self._options = options
        self._told: set[bytes] = set()

    def connected(self, peer: ConnectedPeer, *, visible: bool) -> None:
        """Take note of a connection; for ``visible`` see `emulated`."""
        incarnation = peer.endpoint.incarnation
        if self._options is None or incarnation in self._told:
            return
        if emulated(visible=visible, environment=os.environ, options=self._options, active=active_ports()):
            self._told.add(incarnation)
            logger.warning("peer %r: UCX emulates reads from it in software: %s", peer.name, LIMIT)
