"""The endpoint message: what one process hands to another so that it can read its memory.

Native metadata blobs are not checked by the libraries that made them (one flipped byte can be accepted, and
a blob keeps naming regions that were deregistered long ago), so each travels inside a message of ours:

1. a fixed header: magic, version, backend name, incarnation, generation, number of regions, payload length,
   checksum;
2. the region table, in columns: addresses, sizes, memory kinds, devices, sorted by address;
3. the backend's own payload.

*incarnation* is 16 random bytes drawn when a transport opens: a process that restarts on the same address
has another. *generation* counts how often the transport has *withdrawn* a region: a message of an older
generation may name memory that is no longer served; one that only lacks newer regions stays good.

The checksum (BLAKE2b-128, over all bytes but itself) detects damage, not malice: whoever can write this
message can also write a valid one.  `decode_endpoint` bounds and checks everything before it allocates.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from reshard.transports.errors import EndpointError
from reshard.transports.regions import KIND_NAMES, RegionTable

MAGIC = b"RSHD"
VERSION = 1
MAX_ENDPOINT_BYTES = 4 << 20
"""Upper bound of an encoded endpoint message."""

# magic, version, backend, incarnation, generation, n_regions, payload_bytes; the 16-byte checksum follows.
_HEADER = struct.Struct("<4sH14s16sQII")
_CHECKSUM_BYTES = 16
_ROW_BYTES = 8 + 8 + 1 + 4
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES
"""Bytes before the region table."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A decoded endpoint message.

    Attributes
    ----------
    backend : str
        Name of the transport, at most 14 ASCII characters.
    incarnation : bytes
        16 bytes, one value for each life of a transport.
    generation : int
        How many times a region has been withdrawn.
    regions : RegionTable
        What the peer serves.
    payload : bytes
        What the backend needs to connect.
    """

    backend: str
    incarnation: bytes
    generation: int
    regions: RegionTable
    payload: bytes


def encode_endpoint(endpoint: Endpoint) -> bytes:
    """Encode a message.

    Raises
    ------
    EndpointError
        If a field does not fit, or the message would exceed `MAX_ENDPOINT_BYTES`.
    """
    name = endpoint.backend.encode("ascii", "strict") if endpoint.backend.isascii() else b""
    if not 0 < len(name) <= 14 or b"\0" in name:
        raise EndpointError(f"endpoint backend: got {endpoint.backend!r}, expected 1 to 14 ASCII characters")
    if len(endpoint.incarnation) != 16:
        raise EndpointError(f"endpoint incarnation: got {len(endpoint.incarnation)} bytes, expected 16")
    table = endpoint.regions
    size = HEADER_BYTES + len(table) * _ROW_BYTES + len(endpoint.payload)
    if size > MAX_ENDPOINT_BYTES:
        raise EndpointError(
            f"endpoint message: {size} bytes for {len(table)} regions and "
            f"{len(endpoint.payload)} payload bytes, "
            f"expected at most {MAX_ENDPOINT_BYTES}; register fewer, larger allocations"
        )
    header = _HEADER.pack(
        MAGIC, VERSION, name, endpoint.incarnation, endpoint.generation, len(table), len(endpoint.payload)
    )
    columns = (
        table.address.astype("<u8", copy=False).tobytes(),
        table.nbytes.astype("<u8", copy=False).tobytes(),
        table.kind.tobytes(),
        table.device.astype("<u4", copy=False).tobytes(),
    )
    body = b"".join((*columns, endpoint.payload))
    return header + _checksum(header, body) + body


def decode_endpoint(message: bytes, *, backend: str = "") -> Endpoint:
    """Decode and check a message.

    Parameters
    ----------
    message : bytes
        As made by `encode_endpoint`.
    backend : str
        If given, the backend that the message must be of.

    Raises
    ------
    EndpointError
        Saying which field is wrong, what it holds and what was expected.
    """
    size = len(message)
    if not HEADER_BYTES <= size <= MAX_ENDPOINT_BYTES:
        raise EndpointError(f"endpoint message: got {size} bytes, expected {HEADER_BYTES} to {MAX_ENDPOINT_BYTES}")
    header = bytes(message[: _HEADER.size])
    magic, version, name, incarnation, generation, n_regions, payload_bytes = _HEADER.unpack(header)
    if magic != MAGIC:
        raise EndpointError(f"endpoint magic: got {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise EndpointError(f"endpoint version: got {version}, expected {VERSION}")
    expected = HEADER_BYTES + n_regions * _ROW_BYTES + payload_bytes
    if size != expected:
        raise EndpointError(
            f"endpoint message: got {size} bytes, expected {expected} for {n_regions} regions "
            f"and {payload_bytes} payload bytes"
        )
    body = bytes(message[HEADER_BYTES:])
    if bytes(message[_HEADER.size : HEADER_BYTES]) != _checksum(header, body):
        raise EndpointError(f"endpoint message of {size} bytes: checksum differs; it was damaged on its way")
    # Past the checksum only a faulty or hostile writer remains.
    label, _, rest = name.partition(b"\0")
    if not label or not label.isascii() or rest.strip(b"\0"):
        raise EndpointError(f"endpoint backend: got {name!r}, expected 1 to 14 ASCII characters, padded with NUL")
    found = label.decode("ascii")
    if backend and found != backend:
        raise EndpointError(
            f"endpoint backend: got {found!r}, expected {backend!r}: the owner serves with the first, this "
            "reader reads with the second; open both by one name instead of 'auto'"
        )
    return Endpoint(found, incarnation, generation, _decode_table(body, n_regions), body[n_regions * _ROW_BYTES :])


def _decode_table(body: bytes, n_regions: int) -> RegionTable:
    at, columns = 0, []
    for dtype in ("<u8", "<u8", "u1", "<u4"):
        column = np.frombuffer(body, dtype, n_regions, at)
        at += column.nbytes
        columns.append(column)
    address, nbytes, kind, device = columns
    if n_regions:
        if not nbytes.all() or not address.all():
            raise EndpointError(
                f"endpoint regions: region {int(((address == 0) | (nbytes == 0)).argmax())} is empty or at 0"
            )
        wraps = nbytes > ~address
        if wraps.any():
            row = int(wraps.argmax())
            raise EndpointError(f"endpoint regions: region {row} at {int(address[row]):#x} wraps around")
        if int(kind.max()) >= len(KIND_NAMES):
            raise EndpointError(f"endpoint regions: memory kind {int(kind.max())}, expected < {len(KIND_NAMES)}")
        if (address[1:] < address[:-1]).any():
            raise EndpointError("endpoint regions: addresses are not ascending")
    return RegionTable(
        address.astype(np.uint64), nbytes.astype(np.uint64), kind.astype(np.uint8), device.astype(np.uint32)
    )


def _checksum(header: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(header, digest_size=_CHECKSUM_BYTES, person=b"reshard.endpoint")
    digest.update(body)
    return digest.digest()
