"""The thread that progresses the worker that peers connect to, and answers their messages.

Over CMA and RDMA peers need it only to connect; where they read by messages (`messages`) it sends every byte.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

from reshard.transports.errors import OwnFaultError
from reshard.transports.regions import Region
from reshard.transports.ucx.replies import Replies
from reshard.transports.ucx.worker import Worker

_log = logging.getLogger(__name__)

_SAFETY_S = 1.0
"""Progress at least this often: keep-alives, and events that UCX failed to signal."""
_FINISH_S = 2.0
"""How long replies under way may take when serving ends."""
_QUIET_S = 0.02
_IDLE_ROUNDS = 20
_MAX_ROUNDS = 256


class ServingThread:
    """See the module.

    Parameters
    ----------
    worker : Worker
        Touched by this thread alone until `close` returns.

    Raises
    ------
    OwnFaultError
        If there is no descriptor for it, or UCX takes no messages.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stop = threading.Event()
        self._quiet = False
        try:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise OwnFaultError(f"transport 'ucx': no descriptor for the serving thread: {error}") from error
        self._thread = threading.Thread(target=self._run, name="reshard-ucx-serve", daemon=True)
        try:
            self._replies = Replies(worker, self._wake)
            self._thread.start()
        except BaseException:
            os.close(self._wake_fd)
            raise

    def serve(self, region: Region) -> None:
        """Let a region be read; see `Replies.serve`."""
        self._replies.serve(region)

    def withdraw(self, region: Region) -> None:
        """Let it be read no more, and return when it is not; see `Replies.withdraw`."""
        self._replies.withdraw(region)

    def announce(self, generation: int) -> None:
        """Refuse readers whose endpoint message is older; see `Replies.announce`."""
        self._replies.announce(generation)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Let replies under way be sent, and stop; return whether the worker may be destroyed. Never raises.

        It may not while UCX has something queued for a peer that does not take it: UCX would crash.
        """
        self._stop.set()
        self._wake()
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended and self._wake_fd >= 0:
            fd, self._wake_fd = self._wake_fd, -1
            os.close(fd)
        return ended and self._quiet

    def _wake(self) -> None:
        if self._wake_fd >= 0 and self._thread.is_alive():
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._drain()
                self._replies.tidy()
                if self._worker.arm() and self._worker.wait_event(_SAFETY_S, self._wake_fd):
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
            self._quiet = self._finish()
        except Exception:  # noqa: BLE001 - it must be told, and the process goes on without serving
            _log.exception("the UCX serving thread ended; peers that read over TCP will time out")

    def _drain(self) -> None:
        """Progress and answer until nothing has been due for a few rounds, or for many if something always is."""
        progress, inbox, idle = self._worker.progress, self._replies.inbox, 0
        for _ in range(_MAX_ROUNDS):
            idle = 0 if progress() else idle + 1
            if inbox:
                idle = 0
                self._replies.answer()
            if idle == _IDLE_ROUNDS:
                return

    def _finish(self) -> bool:
        """Let replies end, close what replies went over, and wait until nobody asks for anything."""
        if not self._replies.close(_FINISH_S):
            _log.warning("replies have not ended; their connections are left to the process's end")
            return False
        stop = time.monotonic() + _FINISH_S
        while (left := stop - time.monotonic()) > 0:
            self._worker.drain()
            if not self._worker.flush(left):
                break
            if self._worker.arm() and not self._worker.wait_event(_QUIET_S):
                return True
        _log.warning("a peer is still reading after %s s; its connection is left to the process's end", _FINISH_S)
        return False
