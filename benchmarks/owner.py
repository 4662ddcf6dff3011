"""A process that serves one piece of memory through several transports at once, so that all read the same pages.

`Owner` starts it and is told its endpoint messages.  Filled once, piece by piece, and never written again.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from types import TracebackType
from typing import Self

import numpy as np

from reshard.transports import open_transport

PIECE_BYTES = 16 << 20
START_S = 60.0


class Owner:
    """The controlling side; a context manager.

    Parameters
    ----------
    backends : sequence of str
        The first of them allocates; all register what it has allocated.
    nbytes : int

    Attributes
    ----------
    address, pid : int
        Of the memory, in the owner's address space; of the owner.
    endpoints : dict of str to bytes
        By backend.
    """

    def __init__(self, *backends: str, nbytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, ",".join(backends), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.address = 0
        self.endpoints: dict[str, bytes] = {}

    def wait(self) -> None:
        """Wait until it serves, for `START_S` at most; several can be started before."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_S)[0]:
            raise TimeoutError(f"the owner process did not serve within {START_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the owner process ended with code {self._process.wait(30)}")
        told = json.loads(line)
        self.address = told["address"]
        self.endpoints = {name: bytes.fromhex(text) for name, text in told["endpoints"].items()}

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def main() -> None:
    """Serve until standard input ends."""
    # Native libraries print to standard output: answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    transports = {name: open_transport(name) for name in sys.argv[1].split(",")}
    served = next(iter(transports.values())).allocate(int(sys.argv[2]))
    fill = np.random.default_rng(0).integers(0, 256, PIECE_BYTES, np.uint8)
    for at in range(0, served.array.nbytes, PIECE_BYTES):
        part = served.array[at : at + PIECE_BYTES]
        part[:] = fill[: len(part)]
        part[:8] = np.frombuffer(at.to_bytes(8, "little"), np.uint8)[: len(part)]
    for transport in transports.values():
        transport.register([served.region])
    endpoints = {name: transport.endpoint().hex() for name, transport in transports.items()}
    print(json.dumps({"address": served.region.address, "endpoints": endpoints}), file=answers, flush=True)
    sys.stdin.read()
    for transport in transports.values():
        transport.close()


if __name__ == "__main__":
    main()
