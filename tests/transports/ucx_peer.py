"""A process that serves one region and obeys, and the handle that tests hold it by.

Run as a script it takes one JSON argument, prints one JSON line (endpoint as hex, address of the region), and then
one for each command on its standard input. UCX writes its own warnings to the same standard output; they are passed
over.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from reshard.transports import open_transport

DEADLINE_S = 60.0
_MARK = "reshard-peer:"


class PeerProcess:
    """A serving process; a context manager that leaves nothing behind."""

    def __init__(
        self, nbytes: int, *, seed: int = 0, environ: dict[str, str] | None = None, **settings: object
    ) -> None:
        request = json.dumps({"nbytes": nbytes, "seed": seed, "settings": settings})
        self.nbytes = nbytes
        self.seed = seed
        self.noise: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), request],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **(environ or {})},
        )
        self._buffer = ""
        try:
            hello = self._answer()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        assert isinstance(hello, dict)
        self.endpoint = bytes.fromhex(hello["endpoint"])
        self.address = int(hello["address"])

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, command: str) -> object:
        self.tell(command)
        return self._answer()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def leave(self) -> int:
        """Let it close its transport and exit; return its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(DEADLINE_S)

    def content(self) -> npt.NDArray[np.uint8]:
        return pattern(self.nbytes, self.seed)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.alive:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _answer(self) -> object:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        stop = time.monotonic() + DEADLINE_S
        while True:
            line, newline, rest = self._buffer.partition("\n")
            if newline:
                self._buffer = rest
                if line.startswith(_MARK):
                    return json.loads(line.removeprefix(_MARK))
                self.noise.append(line)
                continue
            if not select.select([fd], [], [], max(stop - time.monotonic(), 0.0))[0]:
                raise TimeoutError(f"peer process {self.pid} did not answer")
            data = os.read(fd, 1 << 16)
            if not data:
                raise EOFError(f"peer process ended with {self.process.wait(DEADLINE_S)}: {self.noise}")
            self._buffer += data.decode()


def pattern(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Every 4-byte word differs from its neighbours, and from the same word under another seed."""
    return (np.arange(nbytes // 4, dtype=np.uint32) ^ np.uint32(seed << 24)).view(np.uint8)


def rows(address: int, nbytes: int, piece: int) -> npt.NDArray[np.uint64]:
    """Rows that cover a range back to front, so that no two of them merge."""
    offset = np.arange(0, nbytes, piece, dtype=np.uint64)[::-1]
    return np.stack([offset + np.uint64(address), np.full_like(offset, piece), np.zeros_like(offset)], axis=1)


def main() -> None:
    request = json.loads(sys.argv[1])
    transport = open_transport("ucx", **request["settings"])
    nbytes = request["nbytes"]
    allocation = transport.allocate(nbytes)
    allocation.array[:] = pattern(nbytes, request["seed"])
    transport.register([allocation.region])
    address = allocation.region.address
    answer({"endpoint": transport.endpoint().hex(), "address": address})
    for line in sys.stdin:
        command = line.strip()
        if command == "cpu":
            answer(time.process_time())
        elif command == "unmap":
            ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
            answer(True)
        elif command == "close":
            transport.close()
            answer(True)
        else:
            raise SystemExit(f"unknown command {command!r}")
    transport.close()


def answer(value: object) -> None:
    print(_MARK + json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
