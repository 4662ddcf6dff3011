"""The beacon: 64 bytes of served memory by which a reader sees one-sidedly that its peer is still the same.

No native library notices that a peer restarted on the same address, or withdrew a region whose old address
still reads. So every transport that serves keeps a beacon in registered memory, names its place in its
endpoint message, and rewrites it *before* it withdraws memory or closes.  A reader fetches it before it
posts a list and compares it with the message that it connected by.

Layout, little-endian: magic (8), incarnation (16), generation (u64), state (u64: 1 serving, 2 closed),
padding.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from reshard.transports.endpoint import Endpoint
from reshard.transports.errors import PeerError

BEACON_BYTES = 64
_LAYOUT = struct.Struct("<8s16sQQ")
_MAGIC = b"RSHDBECN"
_GENERATION, _STATE = 3, 4  # as indices of 8-byte words
_SERVING, _CLOSED = 1, 2


class Beacon:
    """The serving side.

    Parameters
    ----------
    memory : ndarray of uint8, shape (64,)
        Registered memory, 8-byte aligned.
    incarnation : bytes
        16 bytes.
    generation : int
        Regions withdrawn so far.
    """

    __slots__ = ("_words",)

    def __init__(self, memory: npt.NDArray[np.uint8], incarnation: bytes, generation: int = 0) -> None:
        image = _LAYOUT.pack(_MAGIC, incarnation, generation, _SERVING)
        memory[: len(image)] = np.frombuffer(image, np.uint8)
        self._words = memory[:BEACON_BYTES].view("<u8")

    def withdraw(self, generation: int) -> None:
        """Announce a new generation; one aligned store, so no reader sees half of it."""
        self._words[_GENERATION] = generation

    def close(self) -> None:
        """Announce that nothing is served any more."""
        self._words[_STATE] = _CLOSED

    def release(self) -> None:
        """Refer to the memory no more; what is announced after that reaches nobody."""
        self._words = np.zeros(BEACON_BYTES // 8, "<u8")


def beacon_image(endpoint: Endpoint) -> bytes:
    """Return what a healthy peer's beacon begins with, for a comparison of bytes; `check_beacon` says what differs."""
    return _LAYOUT.pack(_MAGIC, endpoint.incarnation, endpoint.generation, _SERVING)


def check_beacon(image: npt.NDArray[np.uint8], endpoint: Endpoint, peer: str) -> None:
    """Compare what was read with the message that the peer was connected by.

    Raises
    ------
    PeerError
        If it is another process or transport, it has closed, or it has withdrawn regions since.
    """
    found = image[: _LAYOUT.size].tobytes()
    if found == beacon_image(endpoint):
        return
    magic, incarnation, generation, state = _LAYOUT.unpack(found)
    if magic != _MAGIC or incarnation != endpoint.incarnation:
        raise PeerError(
            f"peer {peer!r} is not there any more: something else lives at its address; it has restarted or exited",
            peer=peer,
        )
    if state != _SERVING:
        raise PeerError(f"peer {peer!r} has closed its transport", peer=peer)
    if generation != endpoint.generation:
        raise PeerError(
            f"peer {peer!r} has withdrawn regions since this endpoint message was made "
            f"(generation {endpoint.generation}, now {generation}); connect again with its new message",
            peer=peer,
        )
