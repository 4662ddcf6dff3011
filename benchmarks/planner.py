"""Measure the planner, and ModelExpress 0.7.0 beside it; writes the planner's section of benchmarks/RESULTS.md.

Run by ``make bench-planner``; see benchmarks/README.md for what each table means. Everything is measured in one
process, interleaved, with the garbage collector on and off; only peak memory is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from benchmarks import ancestor as ancestor_module
from benchmarks.planner_sections import balance_section, cuts_section, replan_section, validation_section
from benchmarks.report import Section, fmt, write_section
from benchmarks.workloads import Reads, Sources, Spec, engine_rank, fsdp, megatron, read_table, shard_table, specs

from reshard.planner import (
    BoundPlan,
    CostModel,
    GeometryDict,
    Plan,
    PlanOptions,
    ReadTable,
    ShardPart,
    ShardTable,
    TensorDict,
    plan,
)
from reshard.planner.packed_names import PackedNames

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Workload:
    """One planning problem: who publishes, and what one receiving rank reads."""

    name: str
    model: str
    sources: Callable[[Sequence[Spec]], Sources]
    tp: int
    ep: int = 1
    rank: int = 3
    with_ancestor: bool = False

    def make(self) -> tuple[Sources, Reads]:
        tensors = specs(self.model)
        return self.sources(tensors), engine_rank(self.model, tensors, tp=self.tp, rank=self.rank, ep=self.ep)


def _megatron(model: str, tp: int, pp: int, ep: int) -> Callable[[Sequence[Spec]], Sources]:
    return lambda tensors: megatron(model, tensors, tp=tp, pp=pp, ep=ep)


QWEN, LLAMA, DEEPSEEK, KIMI = "qwen3-30b-a3b", "llama-3.1-70b", "deepseek-v3", "kimi-k2"

WORKLOADS = [
    Workload("Qwen3-30B-A3B FSDP16 into TP8", QWEN, lambda t: fsdp(t, 16), 8, with_ancestor=True),
    Workload("Qwen3-30B-A3B FSDP64 into EP8", QWEN, lambda t: fsdp(t, 64), 8, ep=8, with_ancestor=True),
    Workload("Qwen3-30B-A3B FSDP256 into TP8", QWEN, lambda t: fsdp(t, 256), 8),
    Workload("Llama-3.1-70B FSDP16 into TP8", LLAMA, lambda t: fsdp(t, 16), 8, with_ancestor=True),
    Workload("Llama-3.1-70B Megatron TP4 PP4 into TP8", LLAMA, _megatron(LLAMA, 4, 4, 1), 8, with_ancestor=True),
    Workload("DeepSeek-V3 FSDP256 into EP8", DEEPSEEK, lambda t: fsdp(t, 256), 8, ep=8),
    Workload("DeepSeek-V3 Megatron TP8 PP4 EP8 into TP8", DEEPSEEK, _megatron(DEEPSEEK, 8, 4, 8), 8),
    Workload("1T, 384 experts (Kimi-K2) FSDP256 into EP32", KIMI, lambda t: fsdp(t, 256), 8, ep=32),
]


@dataclass(frozen=True)
class Decoded:
    """Tables as they come off the wire: columns, none of them checked."""

    parts: list[ShardPart]
    reads: ReadTable

    def tables(self) -> tuple[list[ShardPart], ReadTable]:
        """Build every object anew from its columns, as decoding does: all checks run, no cache is warm."""
        tensors: dict[int, TensorDict] = {}
        parts = []
        for part in self.parts:
            shared = tensors.get(id(part.tensors))
            if shared is None:
                shared = tensors[id(part.tensors)] = _again(part.tensors)
            boxes = part.geometries
            geometries = GeometryDict(boxes.ndim, boxes.start, boxes.stop)
            parts.append(replace(part, tensors=shared, geometries=geometries))
        reads = replace(self.reads, tensors=_again(self.reads.tensors), buffers=_again(self.reads.buffers))
        return parts, reads


def _again(d: TensorDict) -> TensorDict:
    return TensorDict(PackedNames(d.names.blob), d.dtype_code, d.ndim, d.shape, d.axes)


def decoded(workload: Workload) -> tuple[Decoded, Sources, Reads]:
    sources, reads = workload.make()
    return Decoded(list(shard_table(sources).parts), read_table(reads)), sources, reads


@dataclass
class Timing:
    """Seconds of one run."""

    check_s: float
    merge_s: float
    plan_s: float

    @property
    def total_s(self) -> float:
        return self.merge_s + self.plan_s


def run_ours(data: Decoded, *, gc_on: bool) -> tuple[Timing, Plan]:
    """Check, merge and plan once, from decoded columns."""
    gc.collect()
    (gc.enable if gc_on else gc.disable)()
    try:
        begin = time.perf_counter()
        parts, reads = data.tables()
        checked = time.perf_counter()
        sources = ShardTable(parts)
        merged = time.perf_counter()
        made = plan(sources, reads)
        end = time.perf_counter()
    finally:
        gc.enable()
    return Timing(checked - begin, merged - checked, end - merged), made


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def medians(timings: Sequence[Timing]) -> Timing:
    return Timing(
        median([t.check_s for t in timings]), median([t.merge_s for t in timings]), median([t.plan_s for t in timings])
    )


def timed(work: Callable[[], object], reps: int) -> float:
    """Median seconds of a call."""
    values = []
    for _ in range(reps):
        begin = time.perf_counter()
        work()
        values.append(time.perf_counter() - begin)
    return median(values)


def memcpy_s(n_bytes: int, reps: int) -> float:
    """Median seconds of copying so many bytes between two arrays whose pages are there already."""
    source = np.ones(max(1, n_bytes), np.uint8)
    target = np.ones_like(source)
    return timed(lambda: np.copyto(target, source), reps)


def fresh_copy_s(n_bytes: int, reps: int) -> float:
    """Median seconds of copying so many bytes into a newly allocated array."""
    source = np.ones(max(1, n_bytes), np.uint8)
    return timed(source.copy, reps)


def arrays_of(thing: object, seen: set[int]) -> Iterator[np.ndarray]:
    """Every distinct array that an object holds, through dataclasses, tuples, lists and dicts."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        yield thing
    elif isinstance(thing, tuple | list):
        for item in thing:
            yield from arrays_of(item, seen)
    elif hasattr(thing, "__dataclass_fields__"):
        for name in thing.__dataclass_fields__:
            yield from arrays_of(getattr(thing, name), seen)


def output_bytes(made: Plan) -> int:
    """Bytes of the plan's own arrays: those that its tables do not hold already."""
    seen: set[int] = set()
    for part in made.sources.parts:
        for _ in arrays_of(part, seen):
            pass
    for _ in arrays_of(made.reads, seen):
        pass
    seen.add(id(made.sources))
    return sum(array.nbytes for array in arrays_of(made, seen))


@dataclass
class Row:
    """Everything measured for one workload."""

    name: str
    n_shards: int
    n_blocks: int
    n_runs: int
    gc_on: Timing
    gc_off: Timing
    memcpy_s: float
    output_mb: float
    peak_mb: float
    plan_mb: float
    amplification: float
    n_descriptors: int
    n_holders: int
    blocks_s: float
    ancestor: dict[str, ancestor_module.AncestorResult]
    ancestor_peak_mb: float | None


def measure(workload: Workload, reps: int, ancestor_reps: int, log: Callable[[str], None]) -> Row:
    """Run one workload, ours and the ancestor's in turn."""
    log(f"{workload.name}: making tables")
    data, sources, reads = decoded(workload)
    ours: dict[bool, list[Timing]] = {True: [], False: []}
    theirs: dict[str, list[ancestor_module.AncestorResult]] = {"on": [], "off": []}
    tables = capture = None
    if workload.with_ancestor and ancestor_reps:
        tables, capture = ancestor_module.published_tables(sources), ancestor_module.captured(reads)
    run_ours(data, gc_on=True)
    made = None
    for rep in range(reps):
        for gc_on in (True, False):
            made = None
            timing, made = run_ours(data, gc_on=gc_on)
            ours[gc_on].append(timing)
            if tables is not None and rep < ancestor_reps:
                log(f"{workload.name}: ancestor, GC {'on' if gc_on else 'off'} ({rep + 1} of {ancestor_reps})")
                result = ancestor_module.run(tables, capture, reads.useful_bytes, gc_on=gc_on)
                theirs["on" if gc_on else "off"].append(result)
    del tables, capture
    gc.collect()
    n_output = output_bytes(made)
    begin = time.perf_counter()
    blocks = made.blocks
    blocks_s = time.perf_counter() - begin
    economics = made.economics
    log(f"{workload.name}: peak memory")
    memory = child(["--child", "memory", "--only", workload.name])
    ancestor_peak = None
    if theirs["on"]:
        ancestor_peak = child(["--child", "ancestor-memory", "--only", workload.name])["peak_mb"]
    return Row(
        workload.name,
        sources.n_shards,
        len(blocks),
        economics.n_runs,
        medians(ours[True]),
        medians(ours[False]),
        memcpy_s(n_output, 5),
        n_output / 1e6,
        memory["peak_mb"],
        memory["plan_mb"],
        economics.amplification,
        economics.n_descriptors,
        len(made.holders),
        blocks_s,
        {state: sorted(r, key=lambda x: x.seconds)[len(r) // 2] for state, r in theirs.items() if r},
        ancestor_peak,
    )


def child(arguments: list[str]) -> dict[str, float]:
    """Run this script in a process of its own and return what it prints."""
    command = [sys.executable, "-m", "benchmarks.planner", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def resident(field: str) -> float:
    """A field of /proc/self/status in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1e3
    raise RuntimeError(f"/proc/self/status has no {field}")


def child_memory(workload: Workload, theirs: bool) -> dict[str, float]:
    """Peak resident memory while planning once, the tables included; and how much of it planning added."""
    data, sources, reads = decoded(workload)
    work: Callable[[], object]
    if theirs:
        tables, capture = ancestor_module.published_tables(sources), ancestor_module.captured(reads)
        useful_bytes = reads.useful_bytes
        del data, sources, reads
        work = lambda: ancestor_module.run(tables, capture, useful_bytes, gc_on=True)  # noqa: E731
    else:
        parts, read = data.tables()
        del data, sources, reads
        work = lambda: plan(ShardTable(parts), read)  # noqa: E731
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    kept = work()
    peak = resident("VmHWM")
    del kept
    return {"peak_mb": peak, "plan_mb": peak - before}


def speed_section(rows: Sequence[Row], reps: int, ancestor_reps: int) -> Section:
    """The headline tables."""
    section = Section("Planning, from decoded columns to the certified plan")
    section.text(
        f"Seconds are medians of {reps}: merge (`ShardTable`) + `plan()`, every object built anew each time; `check` "
        "is what building and validating the tables from raw columns takes before that, and the ancestor's decoding "
        "is not counted either. ns are of merge + plan with GC on."
    )
    section.table(
        [
            "workload", "shards", "blocks", "runs", "check s", "merge s", "plan s", "GC off s", "ns/shard", "ns/block",
            "peak MB", "of it planning", "x memcpy of output",
        ],
        [
            [
                row.name, f"{row.n_shards:,}", f"{row.n_blocks:,}", f"{row.n_runs:,}", fmt(row.gc_on.check_s),
                fmt(row.gc_on.merge_s), fmt(row.gc_on.plan_s), fmt(row.gc_off.total_s),
                fmt(row.gc_on.total_s / row.n_shards * 1e9), fmt(row.gc_on.total_s / row.n_blocks * 1e9),
                fmt(row.peak_mb), fmt(row.plan_mb), fmt(row.gc_on.total_s / row.memcpy_s),
            ]
            for row in rows
        ],
    )  # fmt: skip
    compared = [row for row in rows if row.ancestor]
    if compared:
        section.text(
            f"ModelExpress 0.7.0 in the same process, interleaved, whole workloads, {ancestor_reps} run(s) a setting: "
            "merge + build + plan. `faster` divides its seconds by ours (merge + plan)."
        )
        section.table(
            [
                "workload", "GC", "its merge s", "build s", "plan s", "total s", "ours s", "faster", "with check",
                "its peak MB",
            ],
            [
                [
                    row.name, state, fmt(theirs.merge_s), fmt(theirs.build_s), fmt(theirs.plan_s), fmt(theirs.seconds),
                    fmt(mine.total_s), f"{theirs.seconds / mine.total_s:,.0f}x",
                    f"{theirs.seconds / (mine.total_s + mine.check_s):,.0f}x",
                    fmt(row.ancestor_peak_mb) if row.ancestor_peak_mb else "",
                ]
                for row in compared
                for state, mine in (("on", row.gc_on), ("off", row.gc_off))
                if (theirs := row.ancestor.get(state)) is not None
            ],
        )  # fmt: skip
        section.text("What both plans cost on the wire (no cut hints), with the same budget of 64 runs:")
        section.table(
            [
                "workload", "useful GB", "its wire/useful", "ours", "its descriptors", "ours", "its unbounded tensors",
                "its sessions", "ours",
            ],
            [
                [
                    row.name, fmt(theirs.useful_bytes / 1e9), fmt(theirs.wire_bytes / theirs.useful_bytes),
                    fmt(row.amplification), f"{theirs.n_descriptors:,}", f"{row.n_descriptors:,}",
                    f"{theirs.unbounded_sources:,}", str(theirs.n_sessions), str(row.n_holders),
                ]
                for row in compared
                for theirs in [next(iter(row.ancestor.values()))]
            ],
        )  # fmt: skip
    section.text("All block columns (`plan.blocks`: holder, source, destination, box) made from the templates:")
    section.table(
        ["workload", "blocks", "s", "ns/block"],
        [[row.name, f"{row.n_blocks:,}", fmt(row.blocks_s), fmt(row.blocks_s / row.n_blocks * 1e9)] for row in rows],
    )
    return section


def expansion_section(reps: int, log: Callable[[str], None]) -> Section:
    """Rows for a backend, against a memcpy of the same bytes."""
    section = Section("Expansion to absolute rows")
    section.text(
        "Absolute rows from a plan whose reads are all exact: `bind()` makes relative rows first (`rows()`, shown "
        "apart), then three columns for every run, or five for every series. The memcpy is of as many bytes as `bind` "
        "returns, in the same run: into pages that are there, and into newly allocated ones, which `bind`'s results "
        "are too."
    )
    table = []
    for name, sources, reads, options in expansion_cases():
        log(f"expansion: {name}")
        made = plan(sources, reads, options)
        bases = {h.name: np.zeros(len(r), np.uint64) for h, r in zip(made.holders, made.region_bytes, strict=True)}
        rows_s = timed(lambda made=made: [made.rows(w) for w in range(made.n_waves)], reps)
        for strided in (False, True):

            def bind(made: Plan = made, bases: dict[str, np.ndarray] = bases, strided: bool = strided) -> BoundPlan:
                return made.bind(bases, np.zeros(len(made.buffers), np.uint64), strided=strided)

            bound = bind()
            n_rows = sum(len(p.local) for wave in bound.waves for p in wave)
            n_bytes = sum(p.local.nbytes + p.remote.nbytes for wave in bound.waves for p in wave)
            del bound
            bind_s = timed(bind, reps)
            touched, fresh = memcpy_s(n_bytes, reps), fresh_copy_s(n_bytes, reps)
            table.append(
                [
                    name, "5" if strided else "3", f"{n_rows:,}", fmt(rows_s), fmt(bind_s), fmt(bind_s / n_rows * 1e9),
                    fmt(touched), fmt(bind_s / touched), fmt(fresh), fmt(bind_s / fresh),
                ]
            )  # fmt: skip
    section.table(
        [
            "workload", "columns", "rows", "rows() s", "bind() s", "ns/row", "memcpy s", "x memcpy", "new pages s",
            "x new pages",
        ],
        table,
    )  # fmt: skip
    return section


def expansion_cases() -> Iterator[tuple[str, ShardTable, ReadTable, PlanOptions]]:
    exact = PlanOptions(max_runs_per_block=1 << 40, cost=CostModel(descriptor_s=0.0))
    for workload in WORKLOADS:
        if workload.name in (
            "Qwen3-30B-A3B FSDP16 into TP8",
            "Llama-3.1-70B Megatron TP4 PP4 into TP8",
            "Qwen3-30B-A3B FSDP256 into TP8",
        ):
            sources, reads = workload.make()
            yield workload.name, shard_table(sources), read_table(reads), exact


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}, NumPy {np.__version__}; "
        f"load average {load} when it ended."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=5, help="repetitions of ours (medians)")
    parser.add_argument(
        "--ancestor-reps", type=int, default=1, help="runs of the ancestor for each GC setting; 0: none"
    )
    parser.add_argument("--only", action="append", default=[], help="names of workloads")
    parser.add_argument("--sections", default="speed,expansion,cuts,balance,replan,validation")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "RESULTS.md")
    parser.add_argument("--child", choices=["memory", "ancestor-memory"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    chosen = [w for w in WORKLOADS if not options.only or w.name in options.only]
    if options.child:
        print(json.dumps(child_memory(chosen[0], options.child == "ancestor-memory")))
        return 0

    def log(line: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)

    wanted = options.sections.split(",")
    made: list[Section] = []
    if "speed" in wanted:
        rows: list[Row] = []
        so_far: list[Section] = []
        for workload in chosen:
            rows.append(measure(workload, options.reps, options.ancestor_reps, log))
            # an hour's run that is cut short keeps what it has measured
            so_far = [speed_section(rows, options.reps, options.ancestor_reps)]
            write_section(options.out, "planner", "Planner", machine(), so_far)
        made += so_far
    if "expansion" in wanted:
        made.append(expansion_section(options.reps, log))
    for name, section in (
        ("cuts", cuts_section),
        ("balance", balance_section),
        ("replan", replan_section),
        ("validation", validation_section),
    ):
        if name in wanted:
            made.append(section(options.reps, log))
    write_section(options.out, "planner", "Planner", machine(), made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
