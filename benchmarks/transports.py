"""What our protocol costs over the native libraries, and how near all of them come to a plain copy.

    make bench-transports     or     python -m benchmarks.transports [--mib 1024] [--rounds 7] [--json F] [--no-results]

How it is compared:

- *Pages*: what is set side by side reads the same physical pages of one owner process and writes the same pages of this
  one. The owner serves its memory through `nixl` and through `ucx` at once; bare NIXL reads from the agent that `nixl`
  reads from; `numpy.copyto` copies from this process's mapping of the pages that `memory` copies from. All pages are
  warm.
- *Order*: both sides are timed within each round, as ours, theirs, theirs, ours, after one run of each that does not
  count. A ratio is the median of the rounds' own ratios, so that a machine that slows down slows both; the rates are
  medians.
- *Pieces* are read in a random order of the source, so that no side can merge them.
- *16 peers* are 16 processes, each of which serves through both.
- *Over TCP* (a section of its own) `ucx` reads by messages; `nixl` reads by UCX's emulation of one-sided reads.

Limits printed beside: one thread of ``numpy.copyto``, and ``process_vm_readv`` with the same pieces in the same order.
Targets (issue 4) are judged by wall time; `cpu` compares the processor time of both (theirs over ours: 1 is no
overhead). The exit code is 0, targets met or not.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar
from unittest import mock

import numpy as np
from benchmarks.bare import BareNixl, BareUcx, vm_read
from benchmarks.owner import Owner
from benchmarks.report import Section, write_section

from reshard.transports import Transport, open_transport, read
from reshard.transports.base import Allocation, Peer, Prepared
from reshard.transports.lists import ConnectedPeer
from reshard.transports.regions import U64
from reshard.transports.registry import probe
from reshard.transports.testing import rows

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 7
N_PEERS = 16
READ_S = 120.0
TCP_BYTES = 64 * MIB
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 << 20
"""The most that glibc takes for the second."""
T = TypeVar("T")
U = TypeVar("U")
Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass
class Line:
    """One comparison: what was measured on both sides and whether the target is met."""

    what: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    target: str
    met: bool | None
    cpu: float = 0.0

    def cells(self) -> list[str]:
        mark = {True: "met", False: "missed", None: ""}[self.met]
        numbers = [f"{value:.3f}" if value else "" for value in (self.theirs, self.ratio, self.cpu)]
        return [self.what, f"{self.ours:.3f}", numbers[0], self.unit, numbers[1], self.target, mark, numbers[2]]

    def show(self) -> str:
        return FORMAT.format(*self.cells())


HEADER = ["what", "ours", "theirs", "unit", "ratio", "target", "", "cpu"]
FORMAT = "{:56} {:>9} {:>9} {:7} {:>7} {:18} {:7} {:>6}"


@dataclass
class Compared:
    """Median seconds of a call of each; medians of ratios (theirs over ours) and differences (ours less theirs)."""

    ours: float
    theirs: float
    ratio: float
    more: float
    cpu: tuple[float, float]
    cpu_ratio: float
    cpu_more: float


def timed(call: Callable[[], T], undo: Callable[[T], object] | None = None) -> Seconds:
    """Return the wall and processor seconds of one call, without those of undoing it."""
    start, used = time.perf_counter(), time.process_time()
    made = call()
    seconds = np.array([time.perf_counter() - start, time.process_time() - used])
    if undo is not None:
        undo(made)
    return seconds


def compare(
    ours: Callable[[], T],
    theirs: Callable[[], U],
    rounds: int,
    undo: Callable[[T], object] | None = None,
    undo_theirs: Callable[[U], object] | None = None,
) -> Compared:
    """Time both; see the module."""
    timed(ours, undo), timed(theirs, undo_theirs)
    found = []
    for _ in range(rounds):
        first, second = timed(ours, undo), timed(theirs, undo_theirs)
        third, fourth = timed(theirs, undo_theirs), timed(ours, undo)
        found.append(((first + fourth) / 2, (second + third) / 2))
    mine, other = (np.array(side) for side in zip(*found, strict=True))
    wall, cpu = np.median(other / mine, axis=0)
    return Compared(
        float(np.median(mine[:, 0])),
        float(np.median(other[:, 0])),
        float(wall),
        float(np.median(mine[:, 0] - other[:, 0])),
        (float(np.median(mine[:, 1])), float(np.median(other[:, 1]))),
        float(cpu),
        float(np.median(mine[:, 1] - other[:, 1])),
    )


class Reader:
    """A transport of this process that reads from an owner into ``target``, or into memory of its own."""

    def __init__(self, backend: str, owner: Owner, nbytes: int, target: Allocation | None = None) -> None:
        self.nbytes = nbytes
        self.transport: Transport = open_transport(backend)
        self.target = target or self.transport.allocate(nbytes)
        self.transport.register([self.target.region])
        self.remote = owner.address
        self.peer: Peer = self.transport.connect(owner.endpoints[backend], timeout_s=20.0, name="owner")

    def rows(self, piece: int, n: int | None = None, gap: int = 0) -> tuple[U64, U64]:
        n = n or self.nbytes // (piece + gap)
        order = np.random.default_rng(0).permutation(n)
        step = np.arange(n) * (piece + gap)
        return rows(self.target.region.address + step, piece), rows(self.remote + order * (piece + gap), piece)

    def prepare(self, local: U64, remote: U64) -> Prepared:
        return self.transport.prepare(self.peer, local, remote)

    def read(self, *lists: Prepared) -> Callable[[], object]:
        return lambda: read(self.transport, lists, timeout_s=READ_S)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()


def rate(what: str, times: Compared, nbytes: int, floor: float, whom: str) -> Line:
    """Compare two rates."""
    ours, theirs = nbytes / 1e9 / times.ours, nbytes / 1e9 / times.theirs
    return Line(what, ours, theirs, "GB/s", times.ratio, f">= {floor} of {whom}", times.ratio >= floor, times.cpu_ratio)


def limit(what: str, call: Callable[[], object], nbytes: int) -> Line:
    """Measure what cannot be beaten by one thread."""
    call()
    seconds = statistics.median(timed(call)[0] for _ in range(3))
    return Line(f"limit: {what}, one thread", nbytes / 1e9 / seconds, 0.0, "GB/s", 0.0, "", None)


def native(nbytes: int, rounds: int) -> Iterator[Line]:
    """`nixl` beside bare NIXL, `ucx` beside `nixl`, the system call beside both."""
    with Owner("nixl", "ucx", nbytes=nbytes) as owner, Reader("nixl", owner, nbytes) as nixl:
        bare = BareNixl(nixl.target.region)
        remote_agent = bare.connect(owner.endpoints["nixl"])
        with Reader("ucx", owner, nbytes, nixl.target) as ucx:
            for piece, nixl_floor, ucx_floor in ((MIB, 0.97, 0.95), (64 * KIB, 0.97, 0.95), (4 * KIB, 0.0, 0.6)):
                local, remote = nixl.rows(piece, min(nbytes // piece, 100_000))
                size, of = len(local) * piece, f"{piece // KIB} KiB pieces"
                ours = nixl.prepare(local, remote)
                if nixl_floor:
                    theirs = bare.read([bare.prepare(remote_agent, local, remote)])
                    times = compare(nixl.read(ours), theirs, rounds)
                    yield rate(f"nixl: {of}, against bare NIXL", times, size, nixl_floor, "bare")
                times = compare(ucx.read(ucx.prepare(local, remote)), nixl.read(ours), rounds)
                yield rate(f"ucx: {of}, against nixl", times, size, ucx_floor, "nixl")
                yield limit(f"process_vm_readv, {of}", vm_read(owner.pid, local, remote), size)
        local, remote = nixl.rows(1024, min(100_000, nbytes // 2048), gap=1024)
        theirs = bare.read([bare.prepare(remote_agent, local, remote)])
        times = compare(nixl.read(nixl.prepare(local, remote)), theirs, rounds)
        yield Line(
            f"nixl: repost {len(local):,} descriptors of 1 KiB",
            times.ours * 1e3,
            times.theirs * 1e3,
            "ms",
            times.ratio,
            "<= 1.05 of bare",
            1 / times.ratio <= 1.05,
            times.cpu_ratio,
        )
        yield from preparing(nixl, bare, remote_agent, rounds)


def keep_freed_pages() -> None:
    """Let glibc keep what is freed: to fault the same pages in anew costs both sides more than what is compared."""
    libc = ctypes.CDLL(None)
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        if not libc.mallopt(option, _KEPT_BYTES):
            raise OSError(f"mallopt({option}, {_KEPT_BYTES}) failed")


def preparing(reader: Reader, bare: BareNixl, remote_agent: str, rounds: int) -> Iterator[Line]:
    """What `prepare` costs beyond the native calls, on warm pages, by processor time."""
    n = min(200_000, reader.nbytes // 2048)
    n_strided = min(2000, reader.nbytes // 500_000)
    far = np.arange(n_strided) * 500_000
    strided = rows(reader.target.region.address + far, 256, 300, 1000), rows(reader.remote + far, 256, 400, 1000)
    keep_freed_pages()
    for what, runs, (local, remote), most in (
        ("strided rows of 1,000", n_strided * 1000, strided, 1.0),
        ("rows", n, reader.rows(1024, n, gap=1024), 10.0),
    ):

        def ours(local: U64 = local, remote: U64 = remote) -> Prepared:
            return reader.prepare(local, remote)

        def theirs(local: U64 = local, remote: U64 = remote) -> tuple[object, ...]:
            return bare.prepare(remote_agent, local, remote)

        # Both release the request, then the local list, then the remote one: glibc's next allocations depend on it.
        times = compare(ours, theirs, rounds, lambda made: made.close(), bare.release)
        ns = [seconds / runs * 1e9 for seconds in (*times.cpu, times.cpu_more)]
        name = f"{reader.transport.name}: prepare {runs:,} runs as {what}"
        yield Line(name, ns[0], ns[1], "ns/run", times.cpu_ratio, f"< native + {most:g} ns", ns[2] < most)


def sixteen_peers(rounds: int) -> Iterator[Line]:
    """One small row from each of 16 processes: nothing but the cost of posting and waiting."""
    with contextlib.ExitStack() as undo:
        transports = {name: open_transport(name) for name in ("nixl", "ucx")}
        target = transports["ucx"].allocate(N_PEERS * 4096)
        for transport in transports.values():
            undo.callback(transport.close)
            transport.register([target.region])
        nixl, ucx = BareNixl(target.region), BareUcx()
        ours: dict[str, list[Prepared]] = {name: [] for name in transports}
        bare: dict[str, list[tuple[object, ...]]] = {name: [] for name in transports}
        for at in range(N_PEERS):
            owner = Owner("nixl", "ucx", nbytes=4096)
            undo.callback(owner.close)
            owner.wait()
            local, remote = rows(target.region.address + at * 4096, 256), rows(owner.address, 256)
            for name, transport in transports.items():
                peer = transport.connect(owner.endpoints[name], timeout_s=20.0, name=f"peer-{at}")
                ours[name].append(transport.prepare(peer, local, remote))
                if name == "ucx":
                    bare[name].append(ucx.prepare(peer, local, remote))
                else:
                    bare[name].append(nixl.prepare(nixl.connect(owner.endpoints[name]), local, remote))
        for name, transport in transports.items():

            def once(transport: Transport = transport, lists: Sequence[Prepared] = ours[name]) -> None:
                read(transport, lists, timeout_s=READ_S)

            theirs = (nixl if name == "nixl" else ucx).read(bare[name])
            times = compare(repeated(once, 100), repeated(theirs, 100), rounds)
            us = [seconds / 100 * 1e6 for seconds in (times.ours, times.theirs, times.more)]
            what = f"{name}: re-post and wait, 16 peers, one small row each"
            yield Line(what, us[0], us[1], "us", times.ratio, "< bare + 100 us", us[2] < 100, times.cpu_ratio)


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def memory(nbytes: int, rounds: int) -> Iterator[Line]:
    """`memory` beside one copy of the whole by NumPy, from the same mapping to the same array."""
    with Owner("memory", nbytes=nbytes) as owner, Reader("memory", owner, nbytes) as reader:
        address = reader.target.region.address
        whole = reader.prepare(rows(address, nbytes), rows(reader.remote, nbytes))
        assert isinstance(reader.peer, ConnectedPeer)
        (source,) = reader.peer.native.mapped.values()  # type: ignore[attr-defined]
        times = compare(reader.read(whole), lambda: np.copyto(reader.target.array, source), rounds)
        yield rate("memory: the whole, against numpy.copyto", times, nbytes, 0.9, "copyto")
        yield limit("numpy.copyto, the same pages", lambda: np.copyto(reader.target.array, source), nbytes)
        for piece in (64 * KIB, 4 * KIB, 256):
            pair = reader.rows(piece, min(nbytes // piece, 200_000))
            line = limit("", reader.read(reader.prepare(*pair)), len(pair[0]) * piece)
            line.what = f"memory: pieces of {piece} bytes"
            yield line
    apart = np.zeros(nbytes // 2, np.uint8), np.ones(nbytes // 2, np.uint8)
    yield limit("numpy.copyto, private memory in huge pages", lambda: np.copyto(*apart), nbytes // 2)


def tcp(rounds: int) -> Iterator[Line]:
    """`ucx`, which reads by messages there, beside `nixl`, whose reads UCX emulates; one host, 64 MiB at most."""
    with (
        mock.patch.dict(os.environ, UCX_TLS="tcp"),
        Owner("nixl", "ucx", nbytes=TCP_BYTES) as owner,
        Reader("nixl", owner, TCP_BYTES) as nixl,
        Reader("ucx", owner, TCP_BYTES, nixl.target) as ucx,
    ):
        for what, piece, n in (
            ("1024 KiB pieces", MIB, 64),
            ("64 KiB pieces", 64 * KIB, 1024),
            ("4 KiB pieces", 4 * KIB, 16384),
            ("64 B pieces", 64, 32768),
            ("one read of 64 B", 64, 1),
        ):
            pair = nixl.rows(piece, n, gap=piece if piece * n < TCP_BYTES // 2 else 0)
            times = compare(ucx.read(ucx.prepare(*pair)), nixl.read(nixl.prepare(*pair)), rounds)
            unit, both = "us", (times.ours * 1e6, times.theirs * 1e6)
            if n > 1:
                unit, both = "GB/s", (n * piece / 1e9 / times.ours, n * piece / 1e9 / times.theirs)
            yield Line(f"ucx over TCP: {what}, against nixl", *both, unit, times.ratio, "", None, times.cpu_ratio)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the whole (default 1024)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each comparison (default 7)")
    every = "native,peers,memory,tcp"
    parser.add_argument("--only", default=every, help=f"parts to measure (default: {every})")
    parser.add_argument("--json", default="", help="write the lines here, too")
    parser.add_argument("--no-results", action="store_true", help="leave benchmarks/RESULTS.md as it is")
    arguments = parser.parse_args()
    nbytes, rounds = arguments.mib * MIB, arguments.rounds
    lines: dict[str, list[Line]] = {}
    print(FORMAT.format(*HEADER))
    parts: dict[str, tuple[tuple[str, ...], Callable[[], Iterator[Line]]]] = {
        "native": (("nixl", "ucx"), lambda: native(nbytes, rounds)),
        "peers": (("nixl", "ucx"), lambda: sixteen_peers(rounds)),
        "memory": (("memory",), lambda: memory(nbytes, rounds)),
        "tcp": (("nixl", "ucx"), lambda: tcp(rounds)),
    }
    for part in arguments.only.split(","):
        needed, measured = parts[part]
        if reason := next(filter(None, map(probe, needed)), ""):
            print(f"{part}: not measured: {reason}")
            continue
        for line in measured():
            lines.setdefault("Transports over TCP" if part == "tcp" else "Transports", []).append(line)
            print(line.show(), flush=True)
    load = os.getloadavg()[0]
    machine = (
        f"{os.cpu_count()} processors, load {load:.1f}, {arguments.mib} MiB (over TCP {TCP_BYTES // MIB}), warm pages, "
        f"{rounds} rounds of ours, theirs, theirs, ours."
    )
    print(machine)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps([asdict(line) for some in lines.values() for line in some], indent=1)
        )
    for title, measured_lines in lines.items() if not arguments.no_results else ():
        section = Section(title)
        section.table(HEADER, [line.cells() for line in measured_lines])
        section.text(
            "Both sides read the same pages of one owner into the same pages. `ratio`: median over the rounds of their "
            "time over ours; `cpu`: the same of processor time. 1 is no overhead. `limit`: what one thread reaches "
            "on those pages. How it is compared: `benchmarks/transports.py`."
        )
        key = title.lower().replace(" ", "-")
        write_section(Path(__file__).with_name("RESULTS.md"), key, title, machine, [section])
    return 0


if __name__ == "__main__":
    sys.exit(main())
