"""Moving bytes: one protocol, its registry, and the backends ``memory``, ``nixl`` and ``ucx``.

A transport knows no version and no tensor: it registers memory, connects to peers, and reads rows.
Importing this package imports numpy at most; a backend is imported when it is opened.
"""

from __future__ import annotations

from reshard.transports.base import (
    Allocation,
    Capabilities,
    Peer,
    PeerStats,
    Prepared,
    Region,
    Registration,
    Transfer,
    TransferStats,
    Transport,
    check_timeout,
    read,
)
from reshard.transports.endpoint import Endpoint, decode_endpoint, encode_endpoint
from reshard.transports.errors import (
    EndpointError,
    OwnFaultError,
    PeerError,
    PoisonedMemoryError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
    TransportError,
    TransportUnavailableError,
)
from reshard.transports.regions import RegionTable
from reshard.transports.registry import Availability, available, names, open_transport

__all__ = [
    "Allocation",
    "Availability",
    "Capabilities",
    "Endpoint",
    "EndpointError",
    "OwnFaultError",
    "Peer",
    "PeerError",
    "PeerStats",
    "PoisonedMemoryError",
    "Prepared",
    "Region",
    "RegionTable",
    "Registration",
    "RegistrationError",
    "Transfer",
    "TransferError",
    "TransferStats",
    "TransferTimeoutError",
    "Transport",
    "TransportError",
    "TransportUnavailableError",
    "available",
    "check_timeout",
    "decode_endpoint",
    "encode_endpoint",
    "names",
    "open_transport",
    "read",
]
