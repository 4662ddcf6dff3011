"""How is content put together that comes in pieces, from peers that may say anything about its size?

1. Its first piece states the size of the whole, which is bounded; more bytes, or another size, are refused when they
   come.
2. All unfinished uploads of a service share one budget. What exceeds it is refused as an outage, so that clients come
   back later: many peers at once must not take the service's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from reshard.rendezvous import limits
from reshard.rendezvous.errors import InvalidRequestError, RendezvousUnavailableError

__all__ = ["Pieces", "Upload", "Uploads"]


class Uploads:
    """The unfinished uploads of a service.

    Parameters
    ----------
    at_most_bytes
        What they may hold together.
    """

    def __init__(self, at_most_bytes: int = limits.MAX_UPLOADS_BYTES) -> None:
        self._at_most_bytes = at_most_bytes
        self.held_bytes = 0

    @contextmanager
    def begin(self) -> Iterator[Upload]:
        """Begin an upload; what it holds is given back at the end of the block."""
        upload = Upload(self)
        try:
            yield upload
        finally:
            self.held_bytes -= upload.n_bytes

    def take(self, n_bytes: int) -> None:
        """Take from the budget, or raise RendezvousUnavailableError."""
        if self.held_bytes + n_bytes > self._at_most_bytes:
            raise RendezvousUnavailableError(
                f"unfinished uploads hold {self.held_bytes} bytes of {self._at_most_bytes}; try again later"
            )
        self.held_bytes += n_bytes


class Upload:
    """One call's contents."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self.n_bytes = 0

    def take(self, n_bytes: int) -> None:
        """Count bytes that this upload is about to hold."""
        self._uploads.take(n_bytes)
        self.n_bytes += n_bytes


class Pieces:
    """A content that comes in pieces, bounded by the size that its first piece states."""

    def __init__(self, field: str, total_bytes: int, upload: Upload) -> None:
        self._field = field
        self._total = limits.check_int(f"{field}.total_bytes", total_bytes, at_least=0, at_most=limits.MAX_TABLE_BYTES)
        self._upload = upload
        self._pieces: list[bytes] = []
        self.n_bytes = 0

    def add(self, total_bytes: int, data: bytes) -> None:
        """Append a piece."""
        if total_bytes != self._total:
            raise InvalidRequestError(f"{self._field}.total_bytes", f"{total_bytes}, stated {self._total} before")
        if self.n_bytes + len(data) > self._total:
            raise InvalidRequestError(f"{self._field}.data", f"{self.n_bytes + len(data)} bytes, stated {self._total}")
        if data:
            self._upload.take(len(data))
            self.n_bytes += len(data)
            self._pieces.append(data)

    def whole(self) -> bytes:
        """Return the content, if all of it has come."""
        if self.n_bytes != self._total:
            raise InvalidRequestError(f"{self._field}.data", f"{self.n_bytes} bytes came, stated {self._total}")
        return b"".join(self._pieces)
