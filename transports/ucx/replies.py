"""The owner's side of reads by messages: who may ask, what may be read, and replies under way.

Everything here happens on the serving thread, but for `Replies.serve` and `Replies.withdraw`.

1. Messages wait in an inbox until the serving thread `answer`s them.
2. A reader's `HELLO` makes an endpoint of ours to it. Where that fails, or is to be closed, it is closed by force:
   UCX then ends all sends on it.
3. A `READ` is checked against what is registered *now*, and that its pages are there; then one send takes the bytes
   from where they lie. What it reads is not given back while it runs: `withdraw` waits for it, and in the end closes
   the endpoint of a reader that does not take its bytes.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from reshard.transports.errors import RegistrationError, TransportError
from reshard.transports.regions import U64, MemoryKind, Region, RegionTable
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.callbacks import callbacks_of
from reshard.transports.ucx.context import MEMORY_TYPES
from reshard.transports.ucx.endpoints import close_endpoint, create_endpoint
from reshard.transports.ucx.messages import (
    HELLO,
    HELLO_HEADER,
    MAX_IN_FLIGHT,
    MAX_PARCEL_BYTES,
    MAX_PARCEL_ROWS,
    READ,
    READ_HEADER,
    REFUSE,
    ROW_BYTES,
    address_digest,
    describe,
    refusal,
)

if TYPE_CHECKING:
    from reshard.transports.ucx.worker import Worker

_log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""How long memory that is withdrawn waits for a reply before the reader's connection is closed."""
_CLOSE_S = 5.0
_NAP_S = 0.05
_MS_ASYNC = 1

_KEPT: list[Region] = []
"""Withdrawn memory that UCX may still read, to the end of the process."""


@dataclass(slots=True)
class _Send:
    request: int
    rows: U64
    regions: list[Region]


@dataclass(slots=True, eq=False)
class _Reader:
    endpoint: int
    token: int
    generation: int
    sends: deque[_Send] = field(default_factory=deque)
    closing: int = 0

    def reads(self, region: Region) -> bool:
        """Whether a reply to it reads a region."""
        return any(region in send.regions for send in self.sends)

    def reap(self, replies: Replies) -> None:
        """Free the sends that have ended; they end in order, or all at once when the endpoint fails."""
        while self.sends and not replies.running(self.sends[0].request):
            replies.free(self.sends.popleft().request)


class Replies:
    """Answers reads by messages.

    Parameters
    ----------
    worker : Worker
        The serving worker.
    wake : callable
        Makes the serving thread call `tidy`.

    Raises
    ------
    TransportError
        If UCX refuses to take messages.
    """

    def __init__(self, worker: Worker, wake: Callable[[], None]) -> None:
        self._worker = worker
        self._wake = wake
        self._open = True
        self._generation = 0
        self._library = worker.library
        self._callbacks = callbacks_of(worker.library)
        self._token = self._callbacks.new_token()
        self._readers: dict[bytes, _Reader] = {}
        self._ending: list[_Reader] = []
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._served: list[Region] = []
        self._table: RegionTable | None = None
        self._listed: list[Region] = []
        self._unwanted: list[Region] = []
        self._cast = worker.library.ffi.cast
        self._libc = worker.library.ffi.dlopen(None)
        self._params = worker.library.ffi.new("ucp_request_param_t *")
        self.inbox = self._callbacks.receive(worker.handle, self._token, (HELLO, READ))

    def serve(self, region: Region) -> None:
        """Let a region be read."""
        with self._lock:
            self._served.append(region)
            self._table = None

    def withdraw(self, region: Region) -> None:
        """Let a region be read no more, and return when nobody does; never raises.

        Where a reader does not take what is on its way to it, its connection is closed after a moment. Memory that is
        read even then stays referenced for as long as the process lives.
        """
        with self._moved:
            if region in self._served:
                self._served.remove(region)
            self._table = None
            if self._wait_unread(region, _PATIENCE_S):
                return
            self._unwanted.append(region)
            unread = self._wait_unread(region, _CLOSE_S)
            self._unwanted.remove(region)
            if not unread:
                _KEPT.append(region)
        if not unread:
            _log.warning("region [%#x, %#x) is still read and stays referenced", region.address, region.stop)

    def announce(self, generation: int) -> None:
        """Refuse readers whose endpoint message is older, since other bytes may lie where it says that theirs do."""
        with self._lock:
            self._generation = generation

    def answer(self) -> None:
        """Handle the messages that have come."""
        while self.inbox:
            message, header, data = self.inbox.take()
            if message == HELLO and len(header) == HELLO_HEADER.size:
                reader, generation, digest = HELLO_HEADER.unpack(header)
                if address_digest(data) == digest:
                    self._greet(reader, generation, data)
                else:
                    _log.warning("a reader's address of %s bytes is damaged; it is not answered", len(data))
            elif message == READ and len(header) == READ_HEADER.size:
                reader, tag, nbytes = READ_HEADER.unpack(header)
                self._reply(reader, tag, nbytes, data)
            else:
                _log.warning("message %#x with a header of %s bytes is none of ours", message, len(header))

    def tidy(self) -> None:
        """Free what has ended, and close endpoints that have failed or that keep memory that is withdrawn."""
        with self._moved:
            for number, reader in list(self._readers.items()):
                reader.reap(self)
                if self._callbacks.failure(reader.token) or any(map(reader.reads, self._unwanted)):
                    del self._readers[number]
                    self._begin_to_end(reader)
            self._ending = [reader for reader in self._ending if not self._has_ended(reader)]
            self._moved.notify_all()

    def close(self, patience_s: float) -> bool:
        """Refuse all, wait a while for replies under way, close all endpoints; return whether that is done."""
        stop = time.monotonic() + patience_s
        self._open = False
        while any(reader.sends for reader in self._readers.values()) and time.monotonic() < stop:
            self._turn(stop)
        with self._moved:
            while self._readers:
                self._begin_to_end(self._readers.popitem()[1])
        stop = time.monotonic() + _CLOSE_S
        while self._ending and time.monotonic() < stop:
            self._turn(stop)
        if not self._ending:
            self._callbacks.forget(self._token)
            with self._lock:
                self._served.clear()
                self._table = None
        return not self._ending

    def running(self, request: int) -> bool:
        """Return whether UCX has not ended a request."""
        return bool(self._library.ucp.ucp_request_check_status(request) == d.INPROGRESS)

    def free(self, request: int) -> None:
        """Give a request back."""
        self._library.ucp.ucp_request_free(request)

    def _turn(self, stop: float) -> None:
        self._worker.drain()
        self.answer()
        self.tidy()
        if self._worker.arm():
            self._worker.wait_event(min(_NAP_S, max(stop - time.monotonic(), 0.0)))

    def _wait_unread(self, region: Region, timeout_s: float) -> bool:
        """Wait, under the lock, until no reply reads a region."""
        stop = time.monotonic() + timeout_s
        while any(reader.reads(region) for reader in (*self._readers.values(), *self._ending)):
            if (left := stop - time.monotonic()) <= 0:
                return False
            self._wake()
            self._moved.wait(min(left, _NAP_S))
        return True

    def _greet(self, number: bytes, generation: int, address: bytes) -> None:
        """Make an endpoint to a reader."""
        if number in self._readers or not self._open:
            return
        token = self._callbacks.new_token()
        try:
            endpoint = create_endpoint(self._library, self._worker.handle, address, self._callbacks.on_failure, token)
        except TransportError as error:
            _log.warning("a reader cannot be answered: %s", error)
            return
        with self._lock:
            self._readers[number] = _Reader(endpoint, token, generation)

    def _reply(self, number: bytes, tag: int, nbytes: int, data: bytes) -> None:
        """Send what was asked for, or why not."""
        with self._lock:
            reader = self._readers.get(number)
            if reader is None or self._callbacks.failure(reader.token):
                return
            reader.reap(self)
            try:
                if not self._open:
                    raise RegistrationError("it has closed its transport")
                if reader.generation != self._generation:
                    raise RegistrationError(
                        f"it has withdrawn regions since this endpoint message was made (generation "
                        f"{reader.generation}, now {self._generation}); connect again with its new message"
                    )
                if len(reader.sends) >= MAX_IN_FLIGHT:
                    raise RegistrationError(f"more than {MAX_IN_FLIGHT} reads at a time")
                rows, regions, kind = self._checked(data, nbytes)
            except RegistrationError as error:
                self._callbacks.send(reader.endpoint, REFUSE, refusal(tag, str(error)))
                return
            scattered = len(rows) > 1
            describe(self._params, scattered, MEMORY_TYPES[kind])
            # Copied into the socket's buffers: zero-copy sends of fragments cost more over TCP.
            self._params.op_attr_mask |= d.OP_FLAG_FAST_CMPL
            buffer = self._cast("void *", int(rows.ctypes.data) if scattered else int(rows[0, 0]))
            count = len(rows) if scattered else nbytes
            ucp = self._library.ucp
            returned = int(ucp.ucp_tag_send_nbx(reader.endpoint, buffer, count, tag, self._params))
            if request := self._worker.pending(returned):
                reader.sends.append(_Send(request, rows, regions))
            elif returned:
                text = self._library.status_text(returned - (1 << 64))
                self._callbacks.send(reader.endpoint, REFUSE, refusal(tag, f"ucp_tag_send_nbx: {text}"))

    def _checked(self, data: bytes, nbytes: int) -> tuple[U64, list[Region], MemoryKind]:
        """Return the rows of a `READ`, the regions that they lie in, and the kind of memory.

        Raises
        ------
        RegistrationError
            Saying what of it cannot be read.
        """
        n_rows, rest = divmod(len(data), ROW_BYTES)
        if rest or not 0 < n_rows <= MAX_PARCEL_ROWS:
            raise RegistrationError(f"got {len(data)} bytes of rows, expected 1 to {MAX_PARCEL_ROWS} rows")
        rows = np.frombuffer(data, "<u8").reshape(n_rows, 2)
        if self._table is None:
            self._listed = sorted(self._served, key=lambda region: (region.address, region.nbytes))
            # Rows name no device: addresses of all devices are different.
            self._table = RegionTable.build(Region(r.address, r.nbytes, r.memory) for r in self._listed)
        sizes = rows[:, 1]
        total = int(sizes.sum()) if int(sizes.max()) <= MAX_PARCEL_BYTES and int(sizes.min()) else 0
        if not total or total != nbytes or total > MAX_PARCEL_BYTES:
            raise RegistrationError(
                f"got rows of {total} bytes for {nbytes}, expected 1 to {MAX_PARCEL_BYTES} and none empty"
            )
        at = self._table.locate(rows[:, 0], sizes, np.zeros(n_rows, np.uint64), whose="what is asked for")
        indices = np.unique(at).tolist()
        regions = [self._listed[index] for index in indices]
        kinds = {region.memory for region in regions}
        if len(kinds) > 1:
            raise RegistrationError(f"rows in {' and '.join(sorted(kinds))} memory, expected one kind")
        for index, region in zip(indices, regions, strict=True):
            inside = rows if len(indices) == 1 else rows[at == index]
            if region.memory == "dram":
                self._require_mapped(int(inside[:, 0].min()), int(inside.sum(axis=1).max()), region)
        return rows, regions, regions[0].memory

    def _require_mapped(self, start: int, stop: int, region: Region) -> None:
        """Ask the kernel, since to read memory that is gone would end the process."""
        start -= start % mmap.PAGESIZE
        if self._libc.msync(self._cast("void *", start), stop - start, _MS_ASYNC):
            raise RegistrationError(
                f"memory of region [{region.address:#x}, {region.stop:#x}) has been unmapped while it is registered"
            )

    def _begin_to_end(self, reader: _Reader) -> None:
        reader.closing = close_endpoint(self._library, reader.endpoint)
        self._ending.append(reader)

    def _has_ended(self, reader: _Reader) -> bool:
        reader.reap(self)
        if reader.closing and not self.running(reader.closing):
            self.free(reader.closing)
            reader.closing = 0
        if reader.closing or reader.sends:
            return False
        self._callbacks.forget(reader.token)
        return True
