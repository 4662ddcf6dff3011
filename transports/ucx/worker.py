"""One UCX worker: progress, sleep until there is something to do, and an address.

A worker does all its work inside calls of ours: copies over CMA, replies over TCP, keep-alives. It is in serialised
thread mode, so its owner must see to it that one thread calls it at a time. To wait without spinning, `arm` it and
`wait_event`.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time

from reshard.transports.errors import TransportError
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.context import Context

_log = logging.getLogger(__name__)

_IDLE_ROUNDS = 20
_MAX_ROUNDS = 5000


class Worker:
    """A UCX worker.

    Raises
    ------
    TransportError
        If UCX cannot open one, such as for want of file descriptors.
    """

    def __init__(self, context: Context) -> None:
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
        return returned if 0 < returned < (1 << 64) + d.ERR_LAST else 0

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


class ServingThread:
    """Progresses the worker that peers connect to.

    Over CMA and RDMA peers need it only to connect; where UCX emulates reads (TCP) it sends every byte.

    Parameters
    ----------
    worker : Worker
        Touched by this thread alone until `close` returns.
    """

    _SAFETY_S = 1.0  # progress at least this often: keep-alives, and events that UCX failed to signal
    _FINISH_S = 2.0
    _QUIET_S = 0.02

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stop = threading.Event()
        self._quiet = False
        try:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise TransportError(f"transport 'ucx': no descriptor for the serving thread: {error}") from error
        self._thread = threading.Thread(target=self._run, name="reshard-ucx-serve", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let replies under way be sent, and stop; return whether the worker may be destroyed. Never raises.

        It may not while replies are queued for a peer that does not take them, or keeps asking: UCX would crash.
        """
        self._stop.set()
        if self._thread.is_alive():
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended and self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1
        return ended and self._quiet

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._worker.drain()
                if self._worker.arm():
                    self._worker.wait_event(self._SAFETY_S, self._wake_fd)
            self._quiet = self._finish()
        except TransportError:
            _log.exception("the UCX serving thread ended; peers that read over TCP will time out")

    def _finish(self) -> bool:
        stop = time.monotonic() + self._FINISH_S
        while (left := stop - time.monotonic()) > 0:
            self._worker.drain()
            if not self._worker.flush(left):
                break
            if self._worker.arm() and not self._worker.wait_event(self._QUIET_S):
                return True
        _log.warning("a peer is still reading after %s s; its connection is left to the process's end", self._FINISH_S)
        return False
