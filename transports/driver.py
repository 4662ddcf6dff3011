"""Worker threads that drive transfers: a native post that blocks blocks nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain, repeat
from logging import getLogger

from reshard.transports.transfer import ListTransfer

logger = getLogger(__name__)

_SPINS = 64


def backoff() -> Iterator[float]:
    """Yield pauses, in seconds: none at first, then growing from 20 us to 1 ms."""
    return chain(repeat(0.0, _SPINS), (20e-6 * 2**i for i in range(6)), repeat(1e-3))


class Driver:
    """A few daemon threads, started when they are first needed.

    Parameters
    ----------
    name : str
        Prefix of the threads' names.
    n_workers : int
        Most threads.
    """

    def __init__(self, name: str, n_workers: int) -> None:
        self._name = name
        self._wake = threading.Condition()
        self._closing = False
        self._queues: list[list[ListTransfer]] = [[] for _ in range(n_workers)]
        self._threads: list[threading.Thread | None] = [None] * n_workers

    def submit(self, transfer: ListTransfer) -> None:
        """Hand a transfer to the least busy worker."""
        with self._wake:
            at = min(range(len(self._queues)), key=lambda i: len(self._queues[i]))
            self._queues[at].append(transfer)
            if self._threads[at] is None:
                thread = threading.Thread(target=self._run, args=(at,), name=f"{self._name}-{at}", daemon=True)
                self._threads[at] = thread
                thread.start()
            self._wake.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Stop the workers; return False if one is still inside a native call after ``timeout_s``."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        threads = [thread for thread in self._threads if thread is not None]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)

    def _run(self, at: int) -> None:
        queue = self._queues[at]
        pauses = backoff()
        while True:
            with self._wake:
                while not queue and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                active = list(queue)
            moved = False
            for transfer in active:
                try:
                    moved |= transfer.step()
                except Exception:  # the others of this thread must go on
                    logger.exception("driving a read from peer %r", transfer.prepared.peer.name)
            if any(transfer.state != "active" for transfer in active):
                with self._wake:
                    queue[:] = [transfer for transfer in queue if transfer.state == "active"]
            if moved:
                pauses = backoff()
            elif pause := next(pauses):
                with self._wake:
                    self._wake.wait(pause)
