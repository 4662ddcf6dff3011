"""The UCX part of an endpoint message: where the beacon lies, the worker's address, and one key for each region.

Layout, little-endian: the process (`ProcessIdentity`), beacon address (u64), its file descriptor (i32), bytes of its
key (u16), bytes of the worker address (u16), number of regions (u32), bytes of each region's key (u16 each), then the
beacon's key, the worker address and the regions' keys. The message around it is checked for damage; here only a hostile
or faulty writer remains, so every size is checked again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from reshard.transports.errors import EndpointError
from reshard.transports.identity import ProcessIdentity

_HEADER = struct.Struct("<QiHHI")


@dataclass(frozen=True, slots=True)
class UcxAddress:
    """What a peer needs to read from us.

    Attributes
    ----------
    process : ProcessIdentity
        Whose memory it is.
    worker : bytes
        UCX worker address.
    beacon_address : int
        Where the beacon lies in the owner's memory.
    beacon_fd : int
        The owner's descriptor of the page that begins with it, for those on its host.
    beacon_key : bytes
        Its packed key.
    keys : tuple of bytes
        Packed key of each region, in the order of the endpoint's region table.
    """

    process: ProcessIdentity
    worker: bytes
    beacon_address: int
    beacon_fd: int
    beacon_key: bytes
    keys: tuple[bytes, ...]


def encode_address(address: UcxAddress) -> bytes:
    """Encode for `Endpoint.payload`.

    Raises
    ------
    EndpointError
        If a part does not fit.
    """
    parts = (address.beacon_key, address.worker, *address.keys)
    longest = max(map(len, parts))
    if longest > 0xFFFF:
        raise EndpointError(f"ucx payload: a part of {longest} bytes, expected at most {0xFFFF}")
    header = _HEADER.pack(
        address.beacon_address, address.beacon_fd, len(address.beacon_key), len(address.worker), len(address.keys)
    )
    sizes = np.array([len(key) for key in address.keys], "<u2").tobytes()
    return b"".join((address.process.pack(), header, sizes, *parts))


def decode_address(payload: bytes, n_regions: int) -> UcxAddress:
    """Decode `Endpoint.payload` of a message that lists ``n_regions`` regions.

    Raises
    ------
    EndpointError
        Saying which part does not fit.
    """
    process, payload = ProcessIdentity.unpack(payload), payload[ProcessIdentity.NBYTES :]
    if len(payload) < _HEADER.size:
        raise EndpointError(f"ucx payload: got {len(payload)} bytes, expected at least {_HEADER.size}")
    beacon_address, beacon_fd, beacon_bytes, worker_bytes, n_keys = _HEADER.unpack_from(payload)
    if n_keys != n_regions:
        raise EndpointError(f"ucx payload: got {n_keys} keys, expected {n_regions}, one for each region")
    body = _HEADER.size + 2 * n_keys
    if len(payload) < body:
        raise EndpointError(f"ucx payload: got {len(payload)} bytes, expected at least {body}")
    sizes = [beacon_bytes, worker_bytes, *_key_sizes(payload, n_keys)]
    if not beacon_address or not all(sizes):
        raise EndpointError("ucx payload: a key, the worker address or the beacon is missing")
    stops = list(accumulate(sizes, initial=body))
    if stops[-1] != len(payload):
        raise EndpointError(f"ucx payload: got {len(payload)} bytes, expected {stops[-1]}")
    parts = [payload[start:stop] for start, stop in pairwise(stops)]
    return UcxAddress(process, parts[1], beacon_address, beacon_fd, parts[0], tuple(parts[2:]))


def _key_sizes(payload: bytes, n_keys: int) -> Sequence[int]:
    sizes: list[int] = np.frombuffer(payload, "<u2", n_keys, _HEADER.size).tolist()
    return sizes
