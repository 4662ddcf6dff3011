"""A refit end to end beside the bare transport, the ancestor's planning and broadcast + slice (``make bench-refit``).

One receiver, two trainer processes that hold half of the rows each, the service in a process of its own, everything
on this machine.

1. The transport alone: the refit's own prepared lists, posted and waited for, nothing else.
2. Warm refits with verification off, sampled and full; install apart.
3. The cold refit by stage; discover + vote on their own.
4. Beside them, in the same run: what ModelExpress 0.7.0 spends on discovering, merging and planning the same tables
   (if it is installed), and torch.distributed broadcast (gloo) of the same bytes followed by slicing (if torch is
   installed).

    python -m benchmarks.refit [--mib 1024] [--transport memory] [--reps 5] [--json FILE] [--results FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from benchmarks.report import Section, fmt, write_section

TIMEOUT_S = 120.0
N_TENSORS = 64
N_TRAINERS = 2
COLUMNS = 4096


def shapes(mib: int) -> dict[str, tuple[int, int]]:
    """64 equal float32 matrices, ``mib`` MiB in all."""
    rows = max(N_TRAINERS, mib * (1 << 20) // (N_TENSORS * COLUMNS * 4))
    return {f"layers.{i:02}.weight": (rows, COLUMNS) for i in range(N_TENSORS)}


def server(pipe: Connection) -> None:
    """The rendezvous service."""
    from reshard.rendezvous.service import serve

    with serve(listen="127.0.0.1:0") as running:
        pipe.send(running.address)
        pipe.recv()


def trainer(pipe: Connection, index: int, address: str, transport: str, mib: int) -> None:
    """Publishes its half when it is told to, and says how long each stage took."""
    from reshard.refit import LocalTensor, Publisher
    from reshard.rendezvous import Rendezvous
    from reshard.transports import open_transport

    slots = [f"trainer-{i}" for i in range(N_TRAINERS)]
    rng = np.random.default_rng(index)
    tensors = []
    for name, (rows, columns) in shapes(mib).items():
        first, last = rows * index // N_TRAINERS, rows * (index + 1) // N_TRAINERS
        data = rng.standard_normal((last - first, columns), np.float32)
        tensors.append(LocalTensor(name, "float32", (rows, columns), (first, 0), data))
    with Rendezvous.connect(address) as service:
        wire = open_transport(transport)
        publisher = Publisher(wire, service, model="bench", slot=slots[index], slots=slots)
        pipe.send("ready")
        while (step := pipe.recv()) is not None:
            done = publisher.publish(epoch=0, step=step, tensors=tensors, timeout_s=TIMEOUT_S)
            pipe.send(done.stages)
        publisher.close()
        wire.close()


def broadcaster(pipe: Connection, rank: int, port: int, mib: int, reps: int) -> None:
    """Broadcast every full tensor from rank 0 and keep half of its rows."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    wanted = shapes(mib)
    full = torch.zeros(next(iter(wanted.values())))
    kept = {name: torch.zeros(rows // 2, columns) for name, (rows, columns) in wanted.items()}
    times = []
    for _ in range(reps + 1):
        dist.barrier()
        since = time.perf_counter()
        for out in kept.values():
            dist.broadcast(full, 0)
            out.copy_(full[: out.shape[0]])
        times.append(time.perf_counter() - since)
    pipe.send(times[1:])
    dist.destroy_process_group()


class Bench:
    """Processes and the receiver."""

    def __init__(self, mib: int, transport: str, reps: int) -> None:
        from reshard.rendezvous import Rendezvous
        from reshard.transports import open_transport

        self.mib, self.reps = mib, reps
        self.context = mp.get_context("spawn")
        self.processes: list[mp.process.BaseProcess] = []
        self.pipes: list[Connection] = []
        self.service_pipe = self._start(server)
        self.address = str(_hear(self.service_pipe))
        self.trainers = [self._start(trainer, i, self.address, transport, mib) for i in range(N_TRAINERS)]
        for pipe in self.trainers:
            _hear(pipe)
        self.rendezvous = Rendezvous.connect(self.address)
        self.transport = open_transport(transport)
        self.step = -1

    def _start(self, target: Callable[..., None], *arguments: object) -> Connection:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)
        return ours

    def publish(self) -> dict[str, float]:
        """The next version; the slower trainer's seconds by stage."""
        self.step += 1
        for pipe in self.trainers:
            pipe.send(self.step)
        stages = [_hear(pipe) for pipe in self.trainers]
        return {k: max(s[k] for s in stages) for k in stages[0]}

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        self.rendezvous.close()
        self.transport.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(5)


def _hear(pipe: Connection) -> object:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("a benchmark process did not answer")
    return pipe.recv()


def memcpy_s(nbytes: int, reps: int) -> float:
    """One pass of numpy.copyto between touched arrays."""
    a, b = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return _median(lambda: np.copyto(b, a), reps)


def _median(call: Callable[[], object], reps: int) -> float:
    times = []
    for _ in range(reps):
        since = time.perf_counter()
        call()
        times.append(time.perf_counter() - since)
    return statistics.median(times)


@dataclass(slots=True)
class Measured:
    """Everything, as numbers: seconds by stage, medians over ``reps`` where there are several."""

    mib: int
    transport: str
    reps: int
    wire_bytes: int = 0
    descriptors: int = 0
    memcpy_s: float = 0.0
    bare_transport_s: float = 0.0
    publish_cold_s: dict[str, float] = field(default_factory=dict)
    publish_warm_s: dict[str, float] = field(default_factory=dict)
    cold_s: dict[str, float] = field(default_factory=dict)
    warm_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """By verification mode, then stage."""
    read_verify_vote_s: dict[str, float] = field(default_factory=dict)
    warm_was_cold: bool = False
    ancestor: dict[str, float] | str = ""
    broadcast_s: float | str = ""


def measure(mib: int, transport: str, reps: int, log: Callable[[str], None]) -> Measured:
    """Run everything once, warm refits and the bare transport ``reps`` times."""
    from reshard.refit import ArrayEngine, Receiver
    from reshard.transports import read

    bench = Bench(mib, transport, reps)
    out = Measured(mib, transport, reps)
    try:
        engine = ArrayEngine({name: np.zeros(shape, np.float32) for name, shape in shapes(mib).items()})
        out.publish_cold_s = bench.publish()
        receiver = Receiver(
            bench.transport, bench.rendezvous, engine, model="bench", group="g", members=["r"], member="r"
        )
        cold = receiver.refit(bench.step, timeout_s=TIMEOUT_S)
        out.wire_bytes = cold.wire_bytes
        out.cold_s = dict(cold.stages)
        out.descriptors = cold.n_descriptors
        log(f"cold: {cold}")
        nbytes = cold.wire_bytes
        out.memcpy_s = memcpy_s(nbytes, reps)
        modes: dict[str, dict[str, list[float]]] = {}
        # Modes alternate, each after a publish, so that drift of the machine and what a publish leaves in caches meet
        # all of them alike. The bare transport reads what the refit with digests off has just read, with its lists (one
        # for each trainer), so that both touch the same pages; what is served meanwhile is written as it is.
        bare: list[float] = []
        for rep in range(reps + 1):
            for mode in ("off", "sample", "full"):
                out.publish_warm_s = bench.publish()
                receiver.verify = mode
                report = receiver.refit(bench.step, timeout_s=TIMEOUT_S)
                if mode == "off":
                    lists = [p for batch in receiver.reader.bound()[-1].batches for p in batch.lists]
                    since = time.perf_counter()
                    read(bench.transport, lists, timeout_s=TIMEOUT_S)
                    if rep:
                        bare.append(time.perf_counter() - since)
                if rep:
                    kept = modes.setdefault(mode, {})
                    for stage, seconds in report.stages.items():
                        kept.setdefault(stage, []).append(seconds)
                    if report.cold or report.new_registrations:
                        out.warm_was_cold = True
        out.bare_transport_s = statistics.median(bare)
        for mode, stages in modes.items():
            out.warm_s[mode] = {stage: statistics.median(times) for stage, times in stages.items()}
            spent = [
                sum(stages[s][i] for s in ("read", "verify", "release", "vote") if s in stages) for i in range(reps)
            ]
            out.read_verify_vote_s[mode] = statistics.median(spent)
        log(f"warm, read + verify + vote, s: {out.read_verify_vote_s}")
        receiver.close()
    finally:
        bench.close()
    out.ancestor = ancestor(mib, reps)
    out.broadcast_s = broadcast(mib, reps)
    return out


def ancestor(mib: int, reps: int) -> dict[str, float] | str:
    """Discovery, merge, build and plan of ModelExpress for the same tables: what it spends at each refit."""
    try:
        from benchmarks import ancestor as theirs
        from benchmarks.workloads import Reads, Spec, fsdp

        specs = [Spec(name, shape, "whole", i) for i, (name, shape) in enumerate(shapes(mib).items())]
        tables = theirs.published_tables(fsdp(specs, N_TRAINERS))
        reads = Reads(specs)
        for i, spec in enumerate(specs):
            reads.add(i, (0, 0), spec.shape, reads.buffer(spec.name, spec.shape), 0, spec.shape[-1])
        discovery = theirs.discovery_s(tables, reps)
        runs = [theirs.run(tables, theirs.captured(reads), reads.useful_bytes, gc_on=True) for _ in range(reps)]
    except ImportError as error:
        return f"not measured: {error}"
    return {
        "discovery_s": statistics.median(discovery),
        "merge_s": statistics.median(r.merge_s for r in runs),
        "build_s": statistics.median(r.build_s for r in runs),
        "plan_s": statistics.median(r.plan_s for r in runs),
    }


def broadcast(mib: int, reps: int) -> float | str:
    """Median seconds of broadcasting everything to one receiver that keeps half of the rows."""
    try:
        import torch.distributed  # noqa: F401
    except ImportError as error:
        return f"not measured: {error}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    pairs = [context.Pipe() for _ in range(2)]
    workers = [
        context.Process(target=broadcaster, args=(theirs, rank, port, mib, reps), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for w in workers:
        w.start()
    try:
        times = _hear(pairs[1][0])
        if not isinstance(times, list):
            raise TypeError(f"the broadcast's receiver said {times!r}, expected its times")
        return statistics.median(times)
    finally:
        for w in workers:
            w.join(10)
            if w.is_alive():
                w.kill()


def sections(out: Measured) -> list[Section]:
    """The results as text."""
    nbytes, bare, memcpy = out.wire_bytes, out.bare_transport_s, out.memcpy_s
    speed = Section(f"Warm refit of {nbytes / 1e9:.2f} GB over `{out.transport}`, one receiver, two trainers")
    speed.text(
        f"Bare transport (the refit's own lists, read alone): {fmt(bare * 1e3)} ms, {fmt(nbytes / bare / 1e9)} GB/s. "
        f"One memcpy pass over the bytes: {fmt(memcpy * 1e3)} ms. Medians of {out.reps}."
    )
    rows = []
    for mode in ("off", "sample", "full"):
        stages, total = out.warm_s[mode], out.read_verify_vote_s[mode]
        rows.append(
            [
                mode,
                fmt(total * 1e3),
                f"{total / bare:.3f}",
                f"{(total - bare) / memcpy:.2f}",
                *(fmt(stages.get(s, 0.0) * 1e3) for s in ("discover", "read", "verify", "vote", "install", "serve")),
            ]
        )
    speed.table(
        [
            "digests",
            "read+verify+vote ms",
            "x bare",
            "extra memcpy passes",
            "discover",
            "read",
            "verify",
            "vote",
            "install",
            "serve",
        ],
        rows,
    )
    off = out.warm_s["off"]
    speed.text(
        f"Discover + vote: {fmt((off.get('discover', 0) + off.get('vote', 0)) * 1e3)} ms. Warm refits that "
        "planned or registered "
        f"anything: {'some' if out.warm_was_cold else 'none'}."
    )
    cold = Section("Cold refit by stage, and publishing")
    cold.table(["stage", "ms"], [[s, fmt(v * 1e3)] for s, v in out.cold_s.items()])
    cold.table(["publish, warm", "ms"], [[s, fmt(v * 1e3)] for s, v in out.publish_warm_s.items()])
    beside = Section("Beside it, in the same run")
    theirs = out.ancestor
    if isinstance(theirs, dict):
        ours = sum(out.cold_s.get(s, 0.0) for s in ("capture", "plan", "certify"))
        beside.text(
            "ModelExpress 0.7.0 on the same tables, at each refit: "
            + ", ".join(f"{k.removesuffix('_s')} {fmt(v * 1e3)} ms" for k, v in theirs.items())
            + "; discovery is its own function without its server and network, planning without its capture. "
            f"Ours: capture, plan and checks {fmt(ours * 1e3)} ms once, nothing on a warm refit; discovery, with the "
            f"service in a process of its own, {fmt(off.get('discover', 0.0) * 1e3)} ms warm (version, lease and "
            f"region bases in one call), {fmt(out.cold_s.get('discover', 0.0) * 1e3)} ms cold (tables too)."
        )
    else:
        beside.text(f"ModelExpress: {theirs}.")
    sliced = out.broadcast_s
    beside.text(
        f"torch.distributed broadcast (gloo) of all {nbytes / 1e9:.2f} GB to one receiver that keeps half the rows: "
        + (f"{fmt(sliced * 1e3)} ms." if isinstance(sliced, float) else f"{sliced}.")
    )
    return [speed, cold, beside]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--transport", default="memory")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=None, help="markdown file whose section is replaced")
    options = parser.parse_args(arguments)
    out = measure(options.mib, options.transport, options.reps, lambda text: print(text, file=sys.stderr))
    for section in sections(out):
        print(section.markdown(), end="\n\n")
    machine = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, NumPy {np.__version__}."
    )
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(out), indent=1))
    if options.results is not None:
        write_section(
            options.results, f"refit-{options.transport}", f"Refit over {options.transport}", machine, sections(out)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
