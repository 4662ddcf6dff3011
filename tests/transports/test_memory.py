"""The `memory` transport against the contract, and what only it promises."""

from __future__ import annotations

from reshard.transports.testing import TransportContract


class TestMemory(TransportContract):
    backend = "memory"
