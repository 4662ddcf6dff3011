"""One UCX worker: progress, sleep until there is something to do, and an address.

A worker does all its work inside calls of ours: copies over CMA, replies over TCP, keep-alives. It is in serialised
thread mode, so its owner must see to it that one thread calls it at a time. To wait without spinning, `arm` it and
`wait_event`.
"""

from __future__ import annotations

import select
import time

from reshard.transports.descriptors import require_descriptors
from reshard.transports.errors import TransportError
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.context import Context
from reshard.transports.ucx.library import ERROR_FLOOR

WORKER_DESCRIPTORS = 32
"""A new worker took up to 14, and its connection more; each network device takes some."""
_IDLE_ROUNDS = 20
_MAX_ROUNDS = 5000


class Worker:
    """A UCX worker.

    Raises
    ------
    TransportError
        If UCX cannot open one, or there are too few file descriptors left for it.
    """

    def __init__(self, context: Context) -> None:
        require_descriptors(WORKER_DESCRIPTORS, "UCX worker")
        self.context = context
        self.library = context.library
        ffi, ucp = self.library.ffi, self.library.ucp
        params = ffi.new("ucp_worker_params_t *")
        params.field_mask = d.WORKER_FIELD_THREAD_MODE | d.WORKER_FIELD_FLAGS
        params.thread_mode = d.THREAD_MODE_SERIALIZED
        params.flags = d.WORKER_FLAG_IGNORE_REQUEST_LEAK
        handle = ffi.new("uintptr_t *")
        self._check(ucp.ucp_worker_create(context.handle, params, handle), "ucp_worker_create")
        self.handle = int(handle[0])
        try:
            event_fd = ffi.new("int *")
            self._check(ucp.ucp_worker_get_efd(self.handle, event_fd), "ucp_worker_get_efd")
        except TransportError:
            self.close()
            raise
        self.event_fd = int(event_fd[0])
        self._progress = ucp.ucp_worker_progress

    def address(self) -> bytes:
        """Return the address that a peer's endpoint is created with."""
        ffi, ucp = self.library.ffi, self.library.ucp
        address, size = ffi.new("void **"), ffi.new("size_t *")
        self._check(ucp.ucp_worker_get_address(self.handle, address, size), "ucp_worker_get_address")
        packed = bytes(ffi.buffer(address[0], size[0]))
        ucp.ucp_worker_release_address(self.handle, address[0])
        return packed

    def progress(self) -> bool:
        """Do what is due, without the GIL; return whether anything was."""
        return bool(self._progress(self.handle))

    def drain(self) -> None:
        """Progress until nothing has been due for a few rounds, or for many if something always is."""
        idle = 0
        for _ in range(_MAX_ROUNDS):
            idle = 0 if self._progress(self.handle) else idle + 1
            if idle == _IDLE_ROUNDS:
                return

    @staticmethod
    def pending(returned: int) -> int:
        """Return what a native call returned if it is a request, and 0 if the call has ended, well or not."""
        return returned if 0 < returned < ERROR_FLOOR else 0

    def finish(self, returned: int, timeout_s: float) -> bool:
        """Progress until what a native call returned has ended, and free it; return whether it has."""
        if not (request := self.pending(returned)):
            return True
        check, stop = self.library.ucp.ucp_request_check_status, time.monotonic() + timeout_s
        while (running := check(request) == d.INPROGRESS) and time.monotonic() < stop:
            self._progress(self.handle)
        self.library.ucp.ucp_request_free(request)
        return not running

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that the worker has to send is out, or was given up; return whether it is."""
        params = self.library.ffi.new("ucp_request_param_t *")
        return self.finish(int(self.library.ucp.ucp_worker_flush_nbx(self.handle, params)), timeout_s)

    def arm(self) -> bool:
        """Ask for the next event to be signalled; return False if one is pending, so that progress is due."""
        status = self.library.ucp.ucp_worker_arm(self.handle)
        if status == d.ERR_BUSY:
            return False
        self._check(status, "ucp_worker_arm")
        return True

    def wait_event(self, timeout_s: float, *wake_fds: int) -> bool:
        """Sleep until the armed worker, or one of ``wake_fds``, has an event; return whether one has."""
        poller = select.poll()
        for fd in (self.event_fd, *wake_fds):
            poller.register(fd, select.POLLIN)
        return bool(poller.poll(max(timeout_s, 0.0) * 1e3))

    def close(self) -> None:
        """Destroy the worker and every endpoint on it: on return it writes to no memory.  Idempotent."""
        if self.handle:
            handle, self.handle = self.handle, 0
            self.library.ucp.ucp_worker_destroy(handle)

    def _check(self, status: int, what: str) -> None:
        if status != d.OK:
            raise TransportError(f"transport 'ucx': {what}: {self.library.status_text(status)}")
