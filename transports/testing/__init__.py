"""The contract: what every backend does, between real processes.

Subclass `TransportContract` in a test module, name the backend, and pytest runs it::

    class TestMine(TransportContract):
        backend = "mine"

Each test opens transports through the registry, reads from peers in processes of their own, stops and kills them, and
asserts on bytes, on the type of an error, and on when it came.  A test that asks for more than the backend's
`Capabilities` allow returns at once.
"""

from __future__ import annotations

from reshard.transports.testing.faults import FaultContract
from reshard.transports.testing.harness import ContractBase, Reader, raises, rows
from reshard.transports.testing.lifetimes import LifetimeContract
from reshard.transports.testing.reads import BytesContract
from reshard.transports.testing.refusals import RefusalContract

__all__ = ["ContractBase", "Reader", "TransportContract", "raises", "rows"]


class TransportContract(BytesContract, RefusalContract, LifetimeContract, FaultContract):
    """All of it; see the module and `ContractBase` for what a subclass sets."""
