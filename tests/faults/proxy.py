"""A network that can be stalled: a TCP proxy that, for a while, keeps every connection open and moves nothing."""

from __future__ import annotations

import contextlib
import socket
import threading

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards connections to a port of this machine.

    Parameters
    ----------
    target_port
        Where to; it may be listened to later, by one process after another.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._moving = threading.Event()
        self._moving.set()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy-accept", daemon=True).start()

    def stall(self) -> None:
        """Move nothing from now on, in either direction; connections are accepted and stay open."""
        self._moving.clear()

    def resume(self) -> None:
        """Move what was held back, and what comes."""
        self._moving.set()

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        self._moving.set()
        with self._lock:
            every = [self._listener, *self._sockets]
        for one in every:
            _end(one)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), name="proxy", daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self._moving.wait()
        try:
            far = socket.create_connection(("127.0.0.1", self._target_port), timeout=5.0)
        except OSError:
            _end(near)
            return
        far.settimeout(None)
        with self._lock:
            self._sockets |= {near, far}
        back = threading.Thread(target=self._pump, args=(far, near), name="proxy", daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        with self._lock:
            self._sockets -= {near, far}

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                self._moving.wait()
                sink.sendall(chunk)
        _end(source)
        _end(sink)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
