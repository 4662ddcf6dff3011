"""Everything that a backend is written with; `docs/transports.md` walks through one of forty lines.

A backend subclasses `CommonTransport`, fills in the hooks, and is found through the registry's table or the entry point
group ``reshard.transports``.  `reshard.transports.testing.TransportContract` says whether it keeps the contract.
"""

from __future__ import annotations

from reshard.transports.base import Allocation, Capabilities
from reshard.transports.beacon import BEACON_BYTES, Beacon, check_beacon
from reshard.transports.common import CommonTransport
from reshard.transports.descriptors import require_descriptors
from reshard.transports.errors import (
    EndpointError,
    PeerError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
    TransportError,
    TransportUnavailableError,
)
from reshard.transports.hostmem import allocate_host, allocate_pages
from reshard.transports.identity import ProcessIdentity
from reshard.transports.lists import ConnectedPeer, Work
from reshard.transports.regions import MemoryKind, Region, RegionTable
from reshard.transports.rows import between
from reshard.transports.transfer import Call, Slice

__all__ = [
    "BEACON_BYTES",
    "Allocation",
    "Beacon",
    "Call",
    "Capabilities",
    "CommonTransport",
    "ConnectedPeer",
    "EndpointError",
    "MemoryKind",
    "PeerError",
    "ProcessIdentity",
    "Region",
    "RegionTable",
    "RegistrationError",
    "Slice",
    "TransferError",
    "TransferTimeoutError",
    "TransportError",
    "TransportUnavailableError",
    "Work",
    "allocate_host",
    "allocate_pages",
    "between",
    "check_beacon",
    "require_descriptors",
]
