"""What our protocol costs over the native libraries, and how near all of them come to a plain copy.

One reader process (this one) and peers in processes of their own, all on one host; warm pages; medians of five,
measured in turn (ours, theirs, theirs, ours, ...) so that a busy machine slows both.  Pieces are read in a random order
of the source, so that neither side can merge them.

    make bench-transports     or     python -m benchmarks.transports [--mib 1024] [--json FILE] [--no-results]

Targets (issue 4) are printed beside what was measured, and judged by wall time; the last column compares the processor
time of both, which says more on a machine that is busy with other things.  The exit code is 0, targets met or not.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.report import Section, write_section

from reshard.transports import Transport, decode_endpoint, open_transport, read
from reshard.transports.base import Peer, Prepared
from reshard.transports.identity import ProcessIdentity
from reshard.transports.lists import ConnectedPeer
from reshard.transports.peer_process import PeerProcess
from reshard.transports.regions import U64
from reshard.transports.registry import probe
from reshard.transports.testing import rows
from reshard.transports.ucx.library import load_library
from reshard.transports.ucx.transport import UcxPeer

KIB, MIB = 1 << 10, 1 << 20
REPEATS = 5


@dataclass
class Line:
    """One comparison: what was measured on both sides and whether the target is met."""

    what: str
    ours: float
    theirs: float
    unit: str
    target: str
    met: bool | None
    cpu: float = 0.0

    def cells(self) -> list[str]:
        mark = {True: "met", False: "missed", None: ""}[self.met]
        theirs = f"{self.theirs:.3f}" if self.theirs else ""
        cpu = f"{self.cpu:.3f}" if self.cpu else ""
        return [self.what, f"{self.ours:.3f}", theirs, self.unit, self.target, mark, cpu]

    def show(self) -> str:
        return "{:56} {:>10} {:>10} {:7} {:18} {:7} {:>6}".format(*self.cells())


HEADER = ["what", "ours", "theirs", "unit", "target", "", "cpu"]


@dataclass
class Times:
    """Median wall and processor seconds of one call."""

    wall: float
    cpu: float


def medians(*calls: Callable[[], object]) -> list[Times]:
    """Return the medians of each call, run in turn, after one warm-up each."""
    for call in calls:
        call()
    walls: list[list[float]] = [[] for _ in calls]
    cpus: list[list[float]] = [[] for _ in calls]
    for repeat in range(REPEATS):
        for at, call in list(enumerate(calls))[:: -1 if repeat % 2 else 1]:
            start, used = time.perf_counter(), time.process_time()
            call()
            cpus[at].append(time.process_time() - used)
            walls[at].append(time.perf_counter() - start)
    return [Times(statistics.median(w), statistics.median(c)) for w, c in zip(walls, cpus, strict=True)]


class Bench:
    """A reader of one backend with a destination and one peer."""

    def __init__(self, backend: str, nbytes: int, **settings: object) -> None:
        self.nbytes = nbytes
        self.process = PeerProcess(backend, settings)
        self.endpoint, self.remote = self.process.serve(nbytes, 1)
        self.transport: Transport = open_transport(backend, **settings)
        self.target = self.transport.allocate(nbytes)
        self.transport.register([self.target.region])
        self.peer: Peer = self.transport.connect(self.endpoint, timeout_s=20.0, name="served")

    def rows(self, piece: int, n: int | None = None, gap: int = 0) -> tuple[U64, U64]:
        n = n or self.nbytes // (piece + gap)
        order = np.random.default_rng(0).permutation(n)
        step = np.arange(n) * (piece + gap)
        return rows(self.target.region.address + step, piece), rows(self.remote + order * (piece + gap), piece)

    def prepare(self, local: U64, remote: U64) -> Prepared:
        return self.transport.prepare(self.peer, local, remote)

    def read(self, lists: Sequence[Prepared]) -> Callable[[], object]:
        return lambda: read(self.transport, lists, timeout_s=120.0)

    def close(self) -> None:
        self.transport.close()
        self.process.close()


class BareNixl:
    """The same reads by NIXL's own calls, as a careful user would write them: no checks, no deadline."""

    def __init__(self, bench: Bench) -> None:
        import nixl_cu12 as nixl

        self.agent = nixl.nixl_agent("bare", nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        region = bench.target.region
        self.agent.register_memory([(region.address, region.nbytes, 0, "")], "DRAM")
        blob = decode_endpoint(bench.endpoint).payload[ProcessIdentity.NBYTES + 14 :]
        self.remote = bytes(self.agent.add_remote_agent(blob)).decode()
        self.agent.make_connection(self.remote)

    def prepare(self, local: U64, remote: U64) -> object:
        n = int(local[:, 4].sum()) if local.shape[1] == 5 else len(local)
        mine = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
        theirs = self.agent.prep_xfer_dlist(self.remote, remote, "DRAM")
        index = np.arange(n, dtype=np.int32)
        return self.agent.make_prepped_xfer("READ", mine, index, theirs, index), mine, theirs

    def read(self, prepared: Sequence[object]) -> Callable[[], None]:
        handles = [item[0] for item in prepared]  # type: ignore[index]

        def run() -> None:
            active = [handle for handle in handles if self.agent.transfer(handle) != "DONE"]
            while active:
                active = [handle for handle in active if self.agent.check_xfer_state(handle) == "PROC"]

        return run


class BareUcx:
    """Single reads by UCX's own calls on connections of ours: post all, progress each until it has ended."""

    def __init__(self) -> None:
        self.ucp: Any = load_library().ucp
        self.ffi = load_library().ffi

    def connect(self, peer: Peer, local: U64, remote: U64) -> tuple[object, ...]:
        assert isinstance(peer, ConnectedPeer)
        native = peer.native
        assert isinstance(native, UcxPeer)
        params = self.ffi.new("ucp_request_param_t *")
        pointers = [self.ffi.cast("void *", int(row[0, 0])) for row in (local, remote)]
        key = self.ffi.cast("void *", int(native.keys(np.zeros(1, np.intp))[0]))
        return native.lane._worker.handle, native.lane._endpoint_at, *pointers, int(local[0, 1]), key, params

    def read(self, prepared: Sequence[tuple[object, ...]]) -> Callable[[], None]:
        get, progress, check = self.ucp.ucp_get_nbx, self.ucp.ucp_worker_progress, self.ucp.ucp_request_check_status

        def run() -> None:
            active = []
            for worker, endpoint, local, remote, nbytes, key, params in prepared:
                if request := get(endpoint, local, nbytes, remote, key, params):
                    active.append((worker, request))
            for worker, request in active:
                while check(request) == 1:
                    progress(worker)
                self.ucp.ucp_request_free(request)

        return run


def rate(what: str, ours: Times, theirs: Times, size: float, floor: float, whom: str) -> Line:
    """Compare two rates; ``size`` in 10**9 bytes."""
    return Line(
        what,
        size / ours.wall,
        size / theirs.wall,
        "GB/s",
        f">= {floor} of {whom}",
        theirs.wall / ours.wall >= floor,
        theirs.cpu / ours.cpu,
    )


def against_nixl(bench: Bench, lines: list[Line]) -> None:
    bare = BareNixl(bench)
    for piece in (MIB, 64 * KIB):
        local, remote = bench.rows(piece)
        ours, theirs = medians(bench.read([bench.prepare(local, remote)]), bare.read([bare.prepare(local, remote)]))
        size = len(local) * piece / 1e9
        lines.append(rate(f"nixl: {piece // KIB} KiB pieces, against bare NIXL", ours, theirs, size, 0.97, "bare"))
    local, remote = bench.rows(1024, 100_000, gap=1024)
    ours, theirs = medians(bench.read([bench.prepare(local, remote)]), bare.read([bare.prepare(local, remote)]))
    what, ratio = "nixl: repost 100,000 descriptors of 1 KiB", ours.wall / theirs.wall
    lines.append(
        Line(what, ours.wall * 1e3, theirs.wall * 1e3, "ms", "<= 1.05 of bare", ratio <= 1.05, theirs.cpu / ours.cpu)
    )
    sixteen_peers(bench, bare, lines)
    preparing(bench, bare.prepare, lines)


def sixteen_peers(bench: Bench, bare: BareNixl | BareUcx, lines: list[Line]) -> None:
    """One small row from each of 16 connections: nothing but the cost of posting and waiting."""
    lists, bares = [], []
    peers = [bench.transport.connect(bench.endpoint, timeout_s=20.0, name=f"peer-{at}") for at in range(16)]
    for at, peer in enumerate(peers):
        local, remote = rows(bench.target.region.address + at * 4096, 256), rows(bench.remote + at * 4096, 256)
        lists.append(bench.transport.prepare(peer, local, remote))
        bares.append(bare.prepare(local, remote) if isinstance(bare, BareNixl) else bare.connect(peer, local, remote))
    ours, theirs = medians(*(repeated(call, 50) for call in (bench.read(lists), bare.read(bares))))
    us = [times.wall / 50 * 1e6 for times in (ours, theirs)]
    what = f"{bench.transport.name}: re-post and wait, 16 peers, one small row each"
    lines.append(Line(what, us[0], us[1], "us", "< bare + 100 us", us[0] - us[1] < 100, theirs.cpu / ours.cpu))


def preparing(bench: Bench, native: Callable[[U64, U64], object], lines: list[Line]) -> None:
    """What `prepare` costs beyond the native calls, by processor time: it neither waits nor uses another thread."""
    n = 200_000
    n_strided = min(2000, bench.nbytes // 500_000)
    far = np.arange(n_strided) * 500_000
    strided = rows(bench.target.region.address + far, 256, 300, 1000), rows(bench.remote + far, 256, 400, 1000)
    for what, runs, (local, remote), target in (
        ("rows", n, bench.rows(1024, n, gap=1024), 10.0),
        ("strided rows of 1,000", n_strided * 1000, strided, 1.0),
    ):

        def ours_once(local: U64 = local, remote: U64 = remote) -> None:
            bench.prepare(local, remote).close()

        def theirs_once(local: U64 = local, remote: U64 = remote) -> None:
            native(local, remote)

        ours, theirs = medians(ours_once, theirs_once)
        ns = [times.cpu / runs * 1e9 for times in (ours, theirs)]
        name = f"{bench.transport.name}: prepare {runs:,} runs as {what}"
        lines.append(Line(name, ns[0], ns[1], "ns/run", f"< native + {target:g} ns", ns[0] - ns[1] < target))


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def memory(bench: Bench, lines: list[Line]) -> None:
    source = np.ones(bench.nbytes, np.uint8)
    whole = bench.prepare(rows(bench.target.region.address, bench.nbytes), rows(bench.remote, bench.nbytes))
    ours, theirs, limit = medians(
        bench.read([whole]), lambda: np.copyto(bench.target.array, source), lambda: vm_read(bench)
    )
    size = bench.nbytes / 1e9
    lines.append(rate("memory: the whole, against numpy.copyto", ours, theirs, size, 0.9, "copyto"))
    lines.append(Line("limit: numpy.copyto, one thread", size / theirs.wall, 0.0, "GB/s", "", None))
    lines.append(Line("limit: process_vm_readv, one thread", size / limit.wall, 0.0, "GB/s", "", None))
    for piece in (64 * KIB, 4 * KIB, 256):
        local, remote = bench.rows(piece, min(bench.nbytes // piece, 200_000))
        (ours,) = medians(bench.read([bench.prepare(local, remote)]))
        size = len(local) * piece / 1e9
        lines.append(Line(f"memory: pieces of {piece} bytes", size / ours.wall, 0.0, "GB/s", "", None))


def vm_read(bench: Bench) -> None:
    """Read everything by the system call that UCX's CMA transport uses, in pieces of 1 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    at = np.arange(0, bench.nbytes, MIB)
    local, remote = ((base + at).astype(np.uint64) for base in (bench.target.region.address, bench.remote))
    size = np.full(len(at), MIB, np.uint64)
    vectors = [np.ascontiguousarray(np.stack([column, size], axis=1)) for column in (local, remote)]
    for start in range(0, len(at), 512):
        n = min(512, len(at) - start)
        done = libc.process_vm_readv(
            bench.process.pid,
            ctypes.c_void_p(vectors[0][start:].ctypes.data),
            ctypes.c_ulong(n),
            ctypes.c_void_p(vectors[1][start:].ctypes.data),
            ctypes.c_ulong(n),
            ctypes.c_ulong(0),
        )
        if done < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "process_vm_readv")


def ucx(nbytes: int, lines: list[Line]) -> None:
    """Compare `ucx` with `nixl`, each through the protocol."""
    one, other = Bench("ucx", nbytes), Bench("nixl", nbytes)
    try:
        for piece, target in ((MIB, 0.95), (64 * KIB, 0.95), (4 * KIB, 0.6)):
            n = min(nbytes // piece, 100_000)
            calls = [bench.read([bench.prepare(*bench.rows(piece, n))]) for bench in (one, other)]
            ours, theirs = medians(*calls)
            size = n * piece / 1e9
            lines.append(rate(f"ucx: {piece // KIB} KiB pieces, against nixl", ours, theirs, size, target, "nixl"))
        sixteen_peers(one, BareUcx(), lines)
    finally:
        one.close()
        other.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the whole (default 1024)")
    parser.add_argument("--json", default="", help="write the lines here, too")
    parser.add_argument("--no-results", action="store_true", help="leave benchmarks/RESULTS.md as it is")
    arguments = parser.parse_args()
    nbytes = arguments.mib * MIB
    lines: list[Line] = []
    print("{:56} {:>10} {:>10} {:7} {:18} {:7} {:>6}".format(*HEADER))

    def measure(run: Callable[[list[Line]], None]) -> None:
        shown = len(lines)
        run(lines)
        for line in lines[shown:]:
            print(line.show(), flush=True)

    for backend, run in (("nixl", against_nixl), ("memory", memory)):
        if reason := probe(backend):
            print(f"{backend}: not measured: {reason}")
            continue
        bench = Bench(backend, nbytes)
        try:
            measure(partial(run, bench))
        finally:
            bench.close()
    if reason := probe("ucx") or probe("nixl"):
        print(f"ucx: not measured: {reason}")
    else:
        measure(partial(ucx, nbytes))
    load = os.getloadavg()[0]
    machine = f"{os.cpu_count()} processors, load {load:.1f}, {arguments.mib} MiB, warm pages, medians of {REPEATS}."
    print(machine)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(line) for line in lines], file, indent=1)
    if not arguments.no_results:
        section = Section("Transports")
        section.table(HEADER, [line.cells() for line in lines])
        section.text("`cpu`: processor time of theirs over ours; 1.000 is no overhead.")
        write_section(Path(__file__).with_name("RESULTS.md"), "transports", "Transports", machine, [section])
    return 0


if __name__ == "__main__":
    sys.exit(main())
