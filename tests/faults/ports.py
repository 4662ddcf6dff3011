"""Ports that stay free until they are listened to, also for the second time."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket

_PORTS = range(15_000, 32_000)
"""Below the ports that the kernel gives to connections, which could take that of a service between its two lives."""

_given = itertools.count(random.randrange(len(_PORTS)))


def free_port() -> int:
    """A port of this machine that nothing listens to, and that no connection will be given."""
    for number in itertools.islice(_given, len(_PORTS)):
        port = _PORTS[number % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port in {_PORTS}")
