"""Readers are killed in mid read: how many of them take their owner along?

    python -m benchmarks.kills --transport ucx --tcp --kills 60

For each size of piece an owner serves 32 MiB, processes that read it over and over are killed at random moments
(SIGKILL, up to a quarter of a second after their first post), and after each of them a reader that lives reads all of
it and compares every byte. An owner that has died, or serves no more, is counted and replaced. Reads are by CMA, or
with `--tcp` over TCP.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard.transports import TransportError, open_transport, read
from reshard.transports.base import Transport
from reshard.transports.peer_process import PeerProcess, kill_a_reader, pattern

NBYTES = 32 << 20
MOMENT_S = 0.25
"""Readers are killed at most so long after their first post."""
DEADLINE_S = 30.0
SETTLE_S = 0.2
"""After a kill the owner is given so long to come across what is left of the connection."""


@dataclass
class Outcome:
    """Of one size of piece: readers killed, and how each owner that was lost ended."""

    piece: int
    kills: int = 0
    lost: list[str] = field(default_factory=list)


class Owner:
    """A process that serves, and what it and its native libraries print."""

    def __init__(self, backend: str, transport: Transport) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._transport = transport
        self._n_looks = 0
        try:
            self.process = PeerProcess(backend, errors=self._errors.fileno())
        except BaseException:
            self._errors.close()
            raise
        try:
            self.endpoint, self.address = self.process.serve(NBYTES, 1)
        except BaseException:
            self.end()
            raise

    def serves(self, target: npt.NDArray[np.uint8], piece: int) -> bool:
        """Read all of it in pieces that do not merge, by a connection of its own; whether every byte is right."""
        self._n_looks += 1
        target[:] = 0
        step = np.arange(0, NBYTES, piece, dtype=np.uint64)[::-1]
        local, remote = np.zeros((2, len(step), 3), np.uint64)
        local[:, 0], remote[:, 0] = step + np.uint64(target.ctypes.data), step + np.uint64(self.address)
        local[:, 1] = remote[:, 1] = piece
        peer = None
        try:
            name = f"owner-{self.process.pid}-{self._n_looks}"
            peer = self._transport.connect(self.endpoint, timeout_s=DEADLINE_S, name=name)
            read(self._transport, [self._transport.prepare(peer, local, remote)], timeout_s=DEADLINE_S)
        except TransportError:
            self._transport.wait_quarantine(timeout_s=DEADLINE_S)
            return False
        finally:
            if peer is not None:
                peer.close()
        return bool(np.array_equal(target, pattern(NBYTES, 1)))

    def end(self) -> str:
        """End it, and say how it ended: its exit code and the last line that it printed; nothing a second time."""
        if self._errors.closed:
            return ""
        code = self.process.close()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self._errors.close()
        said = next((line for line in lines if "Assertion" in line or "Fatal" in line), lines[-1] if lines else "")
        return f"exit code {code}{f': {said}' if said else ''}"


def measure(backend: str, piece: int, kills: int, randomly: random.Random) -> Outcome:
    """Kill as many readers of one size of piece (bytes, a divisor of 32 MiB)."""
    outcome = Outcome(piece)
    with contextlib.closing(open_transport(backend)) as transport, transport.allocate(NBYTES) as mine:
        transport.register([mine.region])
        owner = Owner(backend, transport)
        try:
            while outcome.kills < kills:
                moment = randomly.uniform(0.0, MOMENT_S)
                kill_a_reader(backend, owner.endpoint, owner.address, NBYTES, moment, piece=piece)
                outcome.kills += 1
                time.sleep(SETTLE_S)
                if not owner.process.alive or not owner.serves(mine.array, piece):
                    outcome.lost.append(owner.end())
                    owner = Owner(backend, transport)
        finally:
            owner.end()
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what `measure` finds; the exit status is 1 if an owner was lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", choices=("memory", "nixl", "ucx"), required=True)
    parser.add_argument("--kills", type=int, default=60, help="readers killed in all, dealt out to the sizes of pieces")
    parser.add_argument("--pieces", type=int, nargs="+", default=[16 << 10, 256 << 10, 1 << 20, 32 << 20], help="bytes")
    parser.add_argument("--tcp", action="store_true", help="leave UCX nothing but TCP")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    for piece in chosen.pieces:
        if piece < 1 or NBYTES % piece:
            parser.error(f"--pieces: got {piece}, expected divisors of {NBYTES}")
    if chosen.tcp:
        os.environ["UCX_TLS"] = "tcp"  # of this process, and of those that it starts
    randomly = random.Random(chosen.seed)
    path = "TCP" if chosen.tcp else "one host"
    lost = done = 0
    for at, piece in enumerate(chosen.pieces):
        share = chosen.kills // len(chosen.pieces) + (at < chosen.kills % len(chosen.pieces))
        outcome = measure(chosen.transport, piece, share, randomly)
        done, lost = done + outcome.kills, lost + len(outcome.lost)
        print(
            f"{chosen.transport} over {path}, pieces of {piece} bytes: {outcome.kills} readers killed, "
            f"{len(outcome.lost)} owners lost",
            flush=True,
        )
        for end in outcome.lost:
            print(f"    {end}", flush=True)
    print(f"{chosen.transport} over {path}: {done} readers killed, {lost} owners lost")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
