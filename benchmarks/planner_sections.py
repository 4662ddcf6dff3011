"""The planner's other figures: wire bytes with cut hints, replica balance, replanning, validation."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from benchmarks.report import Section, fmt
from benchmarks.workloads import (
    ALIGN_BYTES,
    DTYPE,
    ITEM_BYTES,
    Holdings,
    Sources,
    engine_rank,
    fsdp,
    hsdp,
    megatron,
    read_table,
    shard_table,
    specs,
)

from reshard.planner import (
    GeometryDict,
    Holder,
    PlanOptions,
    ReadTable,
    ShardPart,
    ShardTable,
    TensorDict,
    plan,
)
from reshard.planner.cuts import Cuts, cuts
from reshard.planner.diff import diff_plans, replan

Log = Callable[[str], None]


def seconds(work: Callable[[], object], reps: int) -> float:
    """Median seconds of a call."""
    values = []
    for _ in range(reps):
        begin = time.perf_counter()
        work()
        values.append(time.perf_counter() - begin)
    return statistics.median(values)


# Wire bytes with cut hints


def recut(sources: Sources, grid: Cuts) -> Sources:
    """The same holdings, every box cut by the receivers' grid and stored piece by piece."""
    out = Sources(sources.specs)
    for held in sources.holders:
        boxes: dict[object, int] = {}
        pieces: dict[tuple[int, str], list[int]] = {}
        tensor, box, group = [], [], []
        for t, b, g in zip(held.tensor.tolist(), held.box.tolist(), held.group.tolist(), strict=True):
            name = sources.specs[t].name
            key = (b, str(grid.of(name))) if name in grid else (b, "")
            numbers = pieces.get(key)
            if numbers is None:
                cut = grid.boxes(name, *held.boxes[b])
                numbers = pieces[key] = [boxes.setdefault(piece, len(boxes)) for piece in cut]
            tensor += [t] * len(numbers)
            box += numbers
            group += [g] * len(numbers)
        columns = (np.array(c, np.int64) for c in (tensor, box, group))
        out.holders.append(Holdings(held.name, held.host, *columns, list(boxes)))
    return out


def cuts_section(reps: int, log: Log) -> Section:
    """Wire over useful bytes without and with the hints of one group."""
    section = Section("Wire bytes over useful bytes, without and with cut hints")
    section.text(
        "One group's hints, from the read tables of all its ranks; publishers store each box of the grid contiguously. "
        "Rank 3's plan. `cuts s` is making the grid for the whole group."
    )
    rows = []
    for name, model, make, tp, ep in (
        ("Qwen3-30B-A3B FSDP16 into TP8", "qwen3-30b-a3b", lambda t: fsdp(t, 16), 8, 1),
        ("Qwen3-30B-A3B FSDP64 into EP8", "qwen3-30b-a3b", lambda t: fsdp(t, 64), 8, 8),
        ("Llama-3.1-70B FSDP16 into TP8", "llama-3.1-70b", lambda t: fsdp(t, 16), 8, 1),
        (
            "Llama-3.1-70B Megatron TP4 PP4 into TP8", "llama-3.1-70b",
            lambda t: megatron("llama-3.1-70b", t, tp=4, pp=4, ep=1), 8, 1,
        ),
        (
            "DeepSeek-V3 Megatron TP8 PP4 EP8 into TP8", "deepseek-v3",
            lambda t: megatron("deepseek-v3", t, tp=8, pp=4, ep=8), 8, 1,
        ),
    ):  # fmt: skip
        log(f"cuts: {name}")
        tensors = specs(model)
        sources = make(tensors)
        group = [read_table(engine_rank(model, tensors, tp=tp, rank=rank, ep=ep)) for rank in range(max(tp, ep))]
        cuts_s = seconds(lambda group=group: cuts([group]), min(reps, 3))
        hinted = shard_table(recut(sources, cuts([group])))
        before, after = plan(shard_table(sources), group[3]), plan(hinted, group[3])
        pairs = len(after.blocks)
        rows.append(
            [
                name, fmt(before.economics.amplification), f"{before.economics.n_descriptors:,}",
                f"{after.economics.amplification:.4f}", f"{after.economics.n_descriptors:,}", f"{pairs:,}",
                fmt(after.economics.n_descriptors / pairs), f"{hinted.n_shards:,}", fmt(cuts_s),
            ]
        )  # fmt: skip
    section.table(
        [
            "workload", "without", "descriptors", "with hints", "descriptors", "(shard, request) pairs",
            "descriptors/pair", "shards", "cuts s",
        ],
        rows,
    )  # fmt: skip
    return section


# Replica balance


def load(sources: ShardTable, tables: Sequence[ReadTable], instances: int, policy: str) -> tuple[float, float, int]:
    """Greatest source load over the mean, mean and greatest number of sessions of a receiver."""
    loads: dict[str, int] = defaultdict(int)
    sessions = []
    for instance in range(instances):
        options = PlanOptions(policy=policy, instance=instance, instances=instances)
        for reads in tables:
            made = plan(sources, reads, options)
            sessions.append(len(made.holders))
            for holder, n_bytes in zip(made.holders, made.economics.holder_bytes.tolist(), strict=True):
                loads[holder.name] += n_bytes
    mean = sum(loads.values()) / len(sources.holders)
    return max(loads.values()) / mean, statistics.mean(sessions), max(sessions)


def balance_section(_reps: int, log: Log) -> Section:
    """Source load with replicas, for receivers that plan without talking to each other."""
    section = Section("Replica balance")
    section.text(
        "Greatest bytes read from one source over the mean of all sources, when every rank of every instance plans for "
        "itself; sessions are the holders that one receiver reads from."
    )
    rows = []
    qwen, deepseek = "qwen3-30b-a3b", "deepseek-v3"

    def add(name: str, model: str, sources: Sources, tp: int, ep: int, counts: Sequence[int]) -> None:
        table = shard_table(sources)
        n_ranks = max(tp, ep)
        tables = [read_table(engine_rank(model, sources.specs, tp=tp, rank=rank, ep=ep)) for rank in range(n_ranks)]
        for instances in counts:
            log(f"balance: {name}, {instances} instance(s)")
            for policy in ("spread", "first"):
                worst, mean_sessions, max_sessions = load(table, tables, instances, policy)
                rows.append(
                    [
                        name, str(instances), policy, f"{worst:.3f}", str(len(sources.holders)),
                        fmt(mean_sessions), str(max_sessions),
                    ]
                )  # fmt: skip

    tensors = specs(qwen)
    add("Qwen3 Megatron TP8 EP8 DP8 into TP8", qwen, megatron(qwen, tensors, tp=8, pp=1, ep=8, dp=8), 8, 1, (1, 8, 12))
    add("Qwen3 HSDP 8x8 into TP8", qwen, hsdp(tensors, 8, 8), 8, 1, (1, 8, 12))
    tensors = specs(deepseek)
    sources = megatron(deepseek, tensors, tp=8, pp=8, ep=64, dp=8)
    add(f"DeepSeek-V3 Megatron {len(sources.holders)} sources into EP32", deepseek, sources, 8, 32, (2,))
    section.table(
        ["sources and engine", "instances", "policy", "max/mean", "sources", "sessions, mean", "sessions, most"], rows
    )
    return section


# Replanning


def replan_section(reps: int, log: Log) -> Section:
    """One of 256 holders restarts in another layout, or vanishes."""
    section = Section("Replanning")
    section.text(
        "Qwen3-30B-A3B FSDP256 into TP8. `replan` proves the unchanged parts by identity or digest; `afresh` is merge "
        "+ plan of the new table from the same parts. Results are compared row by row."
    )
    model = "qwen3-30b-a3b"
    tensors = specs(model)
    reads = read_table(engine_rank(model, tensors, tp=8, rank=3))
    rows = []
    plain, doubled = shard_table(fsdp(tensors, 256)), shard_table(hsdp(tensors, 2, 128))
    for what, table, changed, removed in (
        ("one holder stores its boxes in another order", plain, [shuffled(plain.parts[100])], []),
        ("one holder cuts every box in two", plain, [halved(plain.parts[100])], []),
        ("one holder of two replicas vanishes", doubled, [], [doubled.parts[100].holder.name]),
        ("nothing changed, tables decoded anew", plain, [dataclasses.replace(p) for p in plain.parts], []),
    ):
        log(f"replan: {what}")
        made = plan(table, reads)
        after = table.replace(changed, removed)
        again, afresh = replan(made, changed, removed), plan(after, reads)
        equal = diff_plans(again, afresh).empty and again.digest == afresh.digest
        ours, theirs = [], []
        for _ in range(reps):
            for part in changed:
                part.__dict__.pop("digest", None)
            begin = time.perf_counter()
            replan(made, changed, removed)
            ours.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            plan(ShardTable(after.parts), reads)
            theirs.append(time.perf_counter() - begin)
        a, b = statistics.median(ours), statistics.median(theirs)
        rows.append([what, fmt(a), fmt(b), f"{b / a:.1f}x", "yes" if equal else "NO"])
    section.table(["what happened", "replan s", "afresh s", "faster", "identical"], rows)
    section.text("A holder that only moved its regions needs no replan: `plan.bind` takes the new base addresses.")
    return section


def shuffled(part: ShardPart) -> ShardPart:
    """The same boxes, laid out in reverse order."""
    return dataclasses.replace(part, offset_bytes=part.offset_bytes[::-1].copy(), region_bytes=part.region_bytes * 4)


def halved(part: ShardPart) -> ShardPart:
    """Every box of more than one row in two shards."""
    boxes, halves = part.geometries, []
    for number in range(len(boxes)):
        rank = int(boxes.ndim[number])
        start = [int(c[number]) for c in boxes.start[len(boxes.start) - rank :]]
        stop = [int(c[number]) for c in boxes.stop[len(boxes.stop) - rank :]]
        middle = (start[0] + stop[0] + 1) // 2
        pieces = [(start, [middle, *stop[1:]]), ([middle, *start[1:]], stop)]
        halves.append([(tuple(a), tuple(b)) for a, b in pieces if a[0] < b[0]])
    numbers: dict[object, int] = {}
    rows = [
        (t, numbers.setdefault(piece, len(numbers)))
        for t, g in zip(part.tensor_id.tolist(), part.geometry_id.tolist(), strict=True)
        for piece in halves[g]
    ]
    geometries = GeometryDict.build(numbers)
    tensor_id, geometry_id = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    n_bytes = -(-geometries.volume[geometry_id] * ITEM_BYTES // ALIGN_BYTES) * ALIGN_BYTES
    offset = np.cumsum(n_bytes) - n_bytes
    zeros = np.zeros(len(rows), np.int64)
    return ShardPart(
        part.holder, part.tensors, geometries, tensor_id, geometry_id, zeros, offset, zeros - 1,
        np.array([int(n_bytes.sum())]),
    )  # fmt: skip


# Validation


def validation_section(reps: int, log: Log) -> Section:
    """Checking 10^7 shards at construction."""
    section = Section("Validation")
    log("validation of 10^7 shards")
    n_parts, n_rows = 100, 100_000
    names = [f"w.{i}" for i in range(1000)]
    tensors = TensorDict.build(names, [DTYPE] * 1000, [(n_parts * 100, 64)] * 1000)
    tensor_id = np.repeat(np.arange(1000), 100)
    zeros = np.zeros(n_rows, np.int64)
    n_bytes = 64 * ITEM_BYTES
    offset = np.arange(n_rows) * n_bytes
    boxes = [
        GeometryDict.build([((rank * 100 + row, 0), (rank * 100 + row + 1, 64)) for row in range(100)])
        for rank in range(n_parts)
    ]
    geometry_id = np.tile(np.arange(100), 1000)

    def check() -> list[ShardPart]:
        return [
            ShardPart(
                Holder(f"r{rank:03d}"), tensors, boxes[rank], tensor_id, geometry_id, zeros, offset, zeros - 1,
                np.array([n_rows * n_bytes]),
            )
            for rank in range(n_parts)
        ]  # fmt: skip

    checked = seconds(check, reps)
    parts = check()
    merged = seconds(lambda: ShardTable(parts), reps)
    section.table(
        ["shards", "parts", "check s", "ns/shard", "merge s"],
        [[f"{n_parts * n_rows:,}", str(n_parts), fmt(checked), fmt(checked / n_parts / n_rows * 1e9), fmt(merged)]],
    )
    return section
