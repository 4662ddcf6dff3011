"""Ports for servers that end and come back: nobody may take such a port while its server is dead."""

from __future__ import annotations

import itertools
import random
import socket
from pathlib import Path

LOWEST, HIGHEST = 10_000, 65_000


def lasting_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens to, that no connection will be given, and that was not returned before.

    Connections get theirs from ``ip_local_port_range``: one that tries to reach a dead server could get that server's
    port for its own end, and the server could not bind it again. Where that range leaves no port over, any will do.
    """
    for port in itertools.islice(_ports, HIGHEST - LOWEST):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {LOWEST} to {HIGHEST} is free")


def _candidates() -> list[int]:
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999
    return [port for port in range(LOWEST, HIGHEST) if not first <= port <= last] or list(range(LOWEST, HIGHEST))


def _from_a_random_one() -> itertools.cycle[int]:
    candidates = _candidates()
    at = random.SystemRandom().randrange(len(candidates))  # processes that run at once begin elsewhere
    return itertools.cycle(candidates[at:] + candidates[:at])


_ports = _from_a_random_one()
