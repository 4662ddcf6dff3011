"""A peer in a process of its own, for tests: it serves memory and does as it is told, and it can be stopped or killed.

`PeerProcess` starts ``python -m reshard.transports.peer_process`` and talks to it in lines of JSON over its standard
streams.  Its memory holds a pattern that the test computes too: byte *i* of the fill with seed *s* is
``pattern(n, s)[i]``.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

import numpy as np
import numpy.typing as npt

from reshard.transports.base import Allocation, Registration, Transport
from reshard.transports.errors import TransportError
from reshard.transports.regions import Region
from reshard.transports.registry import open_transport

ANSWER_S = 60.0
"""How long a peer may take to answer."""


def pattern(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return a reproducible fill in which no two nearby runs of bytes are equal."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15) % 2**64)
    words ^= words >> np.uint64(31)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[:nbytes]


class PeerProcess:
    """The controlling side; a context manager that leaves no process behind.

    Parameters
    ----------
    backend : str
        Name of the transport.
    settings : mapping
        Its settings, as JSON can carry them.
    environment : mapping of str to str
        Added to the process's environment.
    errors : file descriptor or None
        Where its standard error goes, and whatever native libraries print; None for this process's own.

    Attributes
    ----------
    pid : int
    killed : bool
        Whether it was sent SIGKILL by `signal`.
    """

    def __init__(
        self,
        backend: str,
        settings: Mapping[str, object] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        errors: int | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, backend, json.dumps(dict(settings or {}))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid
        self.killed = False
        self._unread = b""

    def serve(self, nbytes: int, seed: int = 0) -> tuple[bytes, int]:
        """Allocate, fill and register memory; return the endpoint message and its address."""
        answer = self.ask("serve", nbytes=nbytes, seed=seed)
        return bytes.fromhex(str(answer["endpoint"])), int(str(answer["address"]))

    def ask(self, command: str, **arguments: object) -> dict[str, object]:
        """Send a command and return the answer.

        Raises
        ------
        TransportError
            If the peer reports an error, exits, or does not answer in time.
        """
        self.tell(command, **arguments)
        return self.answer()

    def tell(self, command: str, **arguments: object) -> None:
        """Send a command and do not wait."""
        if self._process.stdin is None:
            raise TransportError("peer process: no standard input")
        self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, object]:
        """Return the next answer; see `ask`."""
        if self._process.stdout is None:
            raise TransportError("peer process: no standard output")
        stream = self._process.stdout.fileno()
        deadline = time.monotonic() + ANSWER_S
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise TransportError(f"peer process {self.pid} did not answer within {ANSWER_S} s")
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                raise TransportError(f"peer process {self.pid} ended with code {self._process.wait(ANSWER_S)}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, object] = json.loads(line)
        if "error" in answer:
            raise TransportError(f"peer process {self.pid}: {answer['error']}")
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after SIGKILL the process is reaped."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self.killed = True
            self._process.wait(ANSWER_S)

    @property
    def alive(self) -> bool:
        """Whether it has not exited."""
        return self._process.poll() is None

    def close(self) -> int:
        """Ask it to close its transport and exit; return its exit code.  Kills it if it does not."""
        if self.alive:
            try:
                os.kill(self.pid, signal.SIGCONT)
                self.tell("exit")
                self._process.wait(ANSWER_S)
            except (OSError, TransportError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait(ANSWER_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue  # it died with our last command unread
        return int(self._process.returncode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def kill_a_reader(
    backend: str,
    endpoint: bytes,
    address: int,
    nbytes: int,
    after_s: float,
    *,
    piece: int = 0,
    settings: Mapping[str, object] | None = None,
) -> None:
    """Have a process read memory of a peer over and over, and kill it in the middle.

    Parameters
    ----------
    backend, settings
        As of `PeerProcess`.
    endpoint : bytes
        The peer's message.
    address, nbytes : int
        What to read.
    after_s : float
        Seconds from its first post to SIGKILL.
    piece : int
        Bytes of each run, which do not merge; 0 for one run.

    Raises
    ------
    TransportError
        If the process does not come to read.
    """
    with PeerProcess(backend, settings) as reader:
        arguments = {"endpoint": endpoint.hex(), "address": address, "nbytes": nbytes, "piece": piece or nbytes}
        reader.ask("read", times=1 << 30, **arguments)
        time.sleep(after_s)
        reader.signal(signal.SIGKILL)


class _Server:
    """The other side: keeps what it serves by the order of ``serve`` commands."""

    def __init__(self, transport: Transport, answers: TextIO) -> None:
        self._transport = transport
        self._answers = answers
        self._served: list[tuple[Allocation, Registration]] = []

    def handle(self, command: str, arguments: dict[str, object]) -> dict[str, object]:
        match command:
            case "serve":
                nbytes, seed = int(str(arguments["nbytes"])), int(str(arguments["seed"]))
                allocation = self._transport.allocate(nbytes)
                allocation.array[:] = pattern(nbytes, seed)
                self._served.append((allocation, self._transport.register([allocation.region])))
                return {"endpoint": self._transport.endpoint().hex(), "address": allocation.region.address}
            case "endpoint":
                return {"endpoint": self._transport.endpoint().hex()}
            case "fill":
                allocation = self._served[int(str(arguments["which"]))][0]
                allocation.array[:] = pattern(allocation.array.nbytes, int(str(arguments["seed"])))
                return {}
            case "withdraw":
                self._served[int(str(arguments["which"]))][1].close()
                return {}
            case "unmap":
                _unmap_behind_our_back(self._served[int(str(arguments["which"]))][0].region)
                return {}
            case "close":
                self._transport.close()
                return {}
            case "read":
                return self._read(arguments)
            case _:
                raise TransportError(f"unknown command {command!r}")

    def _read(self, arguments: dict[str, object]) -> dict[str, object]:
        """Read a peer's first bytes, over and over, as a reader that can be killed; answers once it has begun."""
        nbytes = int(str(arguments["nbytes"]))
        target = self._transport.allocate(nbytes)
        self._transport.register([target.region])
        peer = self._transport.connect(bytes.fromhex(str(arguments["endpoint"])), timeout_s=ANSWER_S)
        piece = int(str(arguments.get("piece", nbytes)))
        step = np.arange(0, nbytes, piece, dtype=np.uint64)[::-1]  # so that nothing is merged again
        local, remote = np.zeros((2, len(step), 3), np.uint64)
        local[:, 0], remote[:, 0] = step + np.uint64(target.region.address), step + np.uint64(str(arguments["address"]))
        local[:, 1] = remote[:, 1] = np.minimum(np.uint64(piece), np.uint64(nbytes) - step)
        prepared = self._transport.prepare(peer, local, remote)
        print(json.dumps({"reading": True}), file=self._answers, flush=True)
        for _ in range(int(str(arguments["times"]))):
            self._transport.wait([self._transport.post(prepared)], timeout_s=ANSWER_S)
        return {"done": True}


def _unmap_behind_our_back(region: Region) -> None:
    """Take pages away that are registered, which our own interfaces never do."""
    size = -(-region.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if ctypes.CDLL(None).munmap(ctypes.c_void_p(region.address), ctypes.c_size_t(size)):
        raise OSError("munmap")


def main() -> None:
    """Serve until told to exit or the controlling process goes away."""
    # Native libraries print to standard output: answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    transport = open_transport(sys.argv[1], **json.loads(sys.argv[2]))
    server = _Server(transport, answers)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            command = request.pop("command")
            if command == "exit":
                break
            try:
                answer = server.handle(command, request)
            except (TransportError, OSError, ValueError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        transport.close()


if __name__ == "__main__":
    main()
