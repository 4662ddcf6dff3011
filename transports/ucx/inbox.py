"""Messages that have come and wait to be handled."""

from __future__ import annotations

import logging
from collections import deque

_log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""What may wait; more is dropped, and whoever sent it times out."""
_OVERHEAD_BYTES = 64


class Inbox:
    """A queue that is bounded in bytes; one thread puts, one takes."""

    __slots__ = ("_nbytes", "_queue")

    def __init__(self) -> None:
        self._queue: deque[tuple[int, bytes, bytes]] = deque()
        self._nbytes = 0

    def put(self, message: int, header: bytes, data: bytes) -> None:
        """Add a message, unless too much waits already."""
        nbytes = len(header) + len(data) + _OVERHEAD_BYTES
        if self._nbytes + nbytes > MAX_BYTES:
            _log.warning("message %#x of %s bytes is dropped: %s bytes wait", message, nbytes, self._nbytes)
            return
        self._nbytes += nbytes
        self._queue.append((message, header, data))

    def take(self) -> tuple[int, bytes, bytes]:
        """Return the oldest message: number, header, data; there must be one."""
        message, header, data = self._queue.popleft()
        self._nbytes -= len(header) + len(data) + _OVERHEAD_BYTES
        return message, header, data

    def __bool__(self) -> bool:
        return bool(self._queue)
