"""What a status of UCX says about a peer: every failed read becomes an error of ours here."""

from __future__ import annotations

from reshard.transports.errors import PeerError, TransferError, TransportError
from reshard.transports.identity import ProcessIdentity
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.library import Library

PEER_GONE = frozenset({-6, -16, -20, -23, -24, -25, *range(-59, -39), *range(-89, -59)})
"""UNREACHABLE, CANCELED, TIMED_OUT, REJECTED, NOT_CONNECTED, CONNECTION_RESET, link and endpoint failures."""


def why_it_failed(library: Library, peer: str, process: ProcessIdentity, status: int, what: str) -> TransportError:
    """Return the error for a status.

    Parameters
    ----------
    library : Library
    peer : str
        Its name.
    process : ProcessIdentity
        The peer's process, to tell why a read failed.
    status : int
        UCX's.
    what : str
        What failed.
    """
    text = library.status_text(status)
    if status == d.ERR_IO_ERROR:
        # What CMA says when the process has exited and when it has unmapped memory that it registered.
        try:
            process.check(peer)
        except PeerError as error:
            return error
        why = "has unmapped memory that it registered" if process.visible else "has exited or unmapped memory"
        return PeerError(f"peer {peer!r} {why}: {what}: {text}", peer=peer)
    if status in PEER_GONE:
        return PeerError(f"peer {peer!r} is gone: {what}: {text}", peer=peer)
    return TransferError(f"reading from peer {peer!r} failed: {what}: {text}", peer=peer)
