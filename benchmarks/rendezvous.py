"""The rendezvous' wire form and calls, side by side with ModelExpress 0.7.0 and with bare gRPC.

    python -m benchmarks.rendezvous [wire] [warm] [cold] [--json FILE] [--results FILE]

1. `wire`: one source of 4,922 entries (Qwen3-30B-A3B on 16 Megatron ranks, a router bias per layer), with addresses
filled front
   to back and at random; and 16 FSDP ranks of 18,867 entries: bytes, decode, merge. The ancestor's own
   `wrap_rendezvous_blob`, `unwrap_rendezvous_blob` and `merge_shard_tables` run in the same process, interleaved, on
   the same tables.
2. `warm`: 16 trainers and 16 receivers in one client process against one server process while 256 workers heartbeat:
time from
   sending the last publish to the last receiver told, message bytes of a receiver's four calls (from the server's own
   counters), and bare grpc.aio round trips of the same server.
3. `cold`: 256 x 256, Megatron tables, one client process with a shared digest cache: seconds until every receiver has
version and
   tables, server memory, largest message.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from benchmarks.report import Section, fmt, write_section
from benchmarks.workloads import ALIGN_BYTES, Sources, Spec, fsdp, megatron, shard_table, specs

from reshard.planner.shards import ShardPart
from reshard.planner.tables import ShardTable
from reshard.proto.v1 import tables_pb2
from reshard.rendezvous import converts
from reshard.rendezvous.aio import AsyncRendezvous, AsyncWorker
from reshard.rendezvous.types import Decision, SlotRecord, VersionKey, WorkerInfo

ROOT = Path(__file__).resolve().parents[1]
MODEL = "qwen3-30b-a3b"
Report = dict[str, object]


def spread_ms(run: Callable[[], object], rounds: int, *, sweep: bool = False) -> dict[str, float]:
    """Median and best milliseconds of calls one after another, the collector off, as timeit does.

    With `sweep`, each call comes after a full collection, which walks every object of the process: caches are cold.
    """
    taken = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            if sweep:
                gc.collect()
            started = time.perf_counter()
            run()
            taken.append((time.perf_counter() - started) * 1e3)
    finally:
        gc.enable()
    return {"median": statistics.median(taken), "best": min(taken)}


def median_ms(run: Callable[[], object], rounds: int) -> float:
    """Median milliseconds."""
    return spread_ms(run, rounds)["median"]


def megatron_sources() -> Sources:
    """16 ranks TP2 x PP2 x EP2 x DP4; the last stage holds 4,922 entries a rank."""
    biased = specs(MODEL)
    for layer in range(48):
        biased.append(Spec(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (128,), "whole", layer))
    return megatron(MODEL, biased, tp=2, pp=2, ep=2, dp=4)


Blobs = tuple[bytes, bytes, bytes]


def encode(part: ShardPart) -> Blobs:
    messages = (
        converts.tensors_to_message(part.tensors),
        converts.geometries_to_message(part.geometries),
        converts.part_to_message(part),
    )
    tensors, geometries, rows = (message.SerializeToString(deterministic=True) for message in messages)
    return tensors, geometries, rows


def decode_dicts(part: ShardPart, blobs: Blobs) -> tuple:
    tensors = converts.tensors_from_message(tables_pb2.TensorDict.FromString(blobs[0]), part.tensors.digest)
    boxes = converts.geometries_from_message(tables_pb2.GeometryDict.FromString(blobs[1]), part.geometries.digest)
    return tensors, boxes


def decode_rows(part: ShardPart, blobs: Blobs, dicts: tuple) -> ShardPart:
    message = tables_pb2.ShardPart.FromString(blobs[2])
    return converts.part_from_message(message, *dicts, part.digest).with_holder(part.holder)


def shuffled(part: ShardPart) -> ShardPart:
    """The same shards in memory at random, one after another in another order."""
    order = np.random.default_rng(0).permutation(len(part))
    ends = np.append(part.offset_bytes[1:], part.region_bytes[0])
    sizes = -(-(ends - part.offset_bytes) // ALIGN_BYTES) * ALIGN_BYTES
    offsets = np.zeros(len(part), np.int64)
    offsets[order] = np.cumsum(sizes[order]) - sizes[order]
    columns = (part.tensor_id, part.geometry_id, part.region, offsets, part.replica_group)
    return ShardPart(part.holder, part.tensors, part.geometries, *columns, np.array([int(sizes.sum())]))


def ancestor_blob(sources: Sources, rank: int) -> tuple[bytes, list]:
    """A rank's table as the ancestor encodes it."""
    from benchmarks.ancestor import published_tables
    from modelexpress.refit.reshard.rendezvous import wrap_rendezvous_blob

    (table,) = published_tables(Sources(sources.specs, [sources.holders[rank]]))
    return wrap_rendezvous_blob(b"m" * 1024, f"mx-{rank}", "10.0.0.1:5555", table, 1), table


def bench_wire(rounds: int) -> Report:
    sources = megatron_sources()
    rank = max(range(len(sources.holders)), key=lambda r: len(sources.holders[r].tensor))
    part = shard_table(sources).parts[rank]
    report: Report = {"entries": len(part)}
    for label, table in (("bump", part), ("random", shuffled(part))):
        blobs = encode(table)
        report[f"{label}_bytes"] = {"names": len(blobs[0]), "geometry": len(blobs[1]), "rows": len(blobs[2]),
                                    "all": sum(map(len, blobs))}  # fmt: skip
        dicts = decode_dicts(table, blobs)
        report[f"{label}_decode_rows_ms"] = spread_ms(lambda b=blobs, t=table, d=dicts: decode_rows(t, b, d), rounds)
        report[f"{label}_decode_all_ms"] = spread_ms(
            lambda b=blobs, t=table: decode_rows(t, b, decode_dicts(t, b)), rounds
        )
        report[f"{label}_decode_swept_ms"] = spread_ms(
            lambda b=blobs, t=table: decode_rows(t, b, decode_dicts(t, b)), rounds, sweep=True
        )
        report[f"{label}_encode_ms"] = spread_ms(lambda t=table: encode(t), 5)
    parts = shard_table(fsdp(specs(MODEL), 16)).parts
    encoded = [encode(p) for p in parts]

    def ours() -> ShardTable:
        dicts: dict[bytes, object] = {}
        decoded = []
        for p, blobs in zip(parts, encoded, strict=True):
            key = p.tensors.digest
            if key not in dicts:
                message = tables_pb2.TensorDict.FromString(blobs[0])
                dicts[key] = converts.tensors_from_message(message, key)
            message = tables_pb2.GeometryDict.FromString(blobs[1])
            boxes = converts.geometries_from_message(message, p.geometries.digest)
            decoded.append(decode_rows(p, blobs, (dicts[key], boxes)))
        return ShardTable(decoded)

    distinct = {p.tensors.digest: len(b[0]) for p, b in zip(parts, encoded, strict=True)}
    rows_bytes = sum(len(b[1]) + len(b[2]) for b in encoded)
    report["fsdp16"] = {
        "entries": sum(len(p) for p in parts),
        "bytes_all": sum(distinct.values()) + rows_bytes,
        "bytes_but_names": rows_bytes,
        "decode_merge_ms": spread_ms(ours, rounds),
    }
    try:
        import modelexpress.refit.reshard.rendezvous as theirs
    except ImportError as error:
        report["ancestor"] = f"modelexpress 0.7.0 is not installed ({error})"
        return report
    blob, table = ancestor_blob(sources, rank)
    fsdp_sources = fsdp(specs(MODEL), 16)
    fsdp_blobs = [ancestor_blob(fsdp_sources, r)[0] for r in range(16)]

    def their_fsdp() -> object:
        return theirs.merge_shard_tables([theirs.unwrap_rendezvous_blob(b).tensors for b in fsdp_blobs])

    encode_args = (b"m" * 1024, "mx-0", "10.0.0.1:5555", table, 1)
    report["ancestor"] = {
        "bytes": len(blob),
        "decode_ms": median_ms(lambda: theirs.unwrap_rendezvous_blob(blob), max(rounds // 3, 3)),
        "encode_ms": median_ms(lambda: theirs.wrap_rendezvous_blob(*encode_args), 3),
        "fsdp16_bytes": sum(map(len, fsdp_blobs)),
        "fsdp16_decode_merge_ms": median_ms(their_fsdp, 3),
    }
    return report


@contextmanager
def server_process(threads: str = "1"):
    """A server in a process of its own; yields (address, metrics address, process)."""
    code = (
        "import sys, threading\n"
        "from reshard.rendezvous.service import serve\n"
        "server = serve(metrics_listen='127.0.0.1:0')\n"
        "print(server.address, server.metrics_address, flush=True)\n"
        "sys.stdin.read()\n"
        "server.close(1.0)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    try:
        assert process.stdout is not None
        address, metrics = process.stdout.readline().decode().split()
        yield address, metrics, process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def message_bytes(metrics: str) -> dict[str, tuple[float, float]]:
    """Per method the bytes received and sent so far, as the server counts them."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: dict[str, list[float]] = {}
    for which, direction in ((0, "received"), (1, "sent")):
        pattern = rf'^reshard_rendezvous_{direction}_bytes_total{{method="(\w+)"}} (\S+)$'
        for method, value in re.findall(pattern, text, re.MULTILINE):
            found.setdefault(method, [0.0, 0.0])[which] = float(value)
    return {method: (pair[0], pair[1]) for method, pair in found.items()}


class Fleet:
    """Trainers and receivers as tasks of one client."""

    def __init__(self, client: AsyncRendezvous, parts: list[ShardPart], n_receivers: int) -> None:
        self.client = client
        self.parts = parts
        self.slots = [part.holder.name for part in parts]
        self.members = [f"engine-{i:03d}" for i in range(n_receivers)]
        self.trainers: list[AsyncWorker] = []
        self.receivers: list[AsyncWorker] = []
        self.digests: list[bytes] = []
        self.names = sorted({name for part in parts for name in part.tensors.names_list})

    async def enrol(self) -> None:
        """Register everybody and put the tables."""
        endpoint = {"nixl": os.urandom(1500)}
        for slot in self.slots:
            self.trainers.append(await self.client.register(WorkerInfo("trainer", MODEL, "node", slot, endpoint)))
        for member in self.members:
            self.receivers.append(await self.client.register(WorkerInfo("receiver", MODEL, "node", member)))
        for part in self.parts:
            self.digests.append(await self.client.put_table(part))

    def record(self, i: int, step: int) -> SlotRecord:
        part = self.parts[i]
        bases = np.array([0x7F00_0000_0000 + (step % 2) * (1 << 40)], np.uint64)
        return SlotRecord(
            self.slots[i], self.trainers[i].id, "node", {"nixl": b"e" * 1500}, self.digests[i], bases,
            part.region_bytes, digest_root=os.urandom(32),
        )  # fmt: skip

    async def publish(self, step: int, hold_last: bool) -> tuple[str, int]:
        """Publish all slots, the last one only if told; returns the uid and the last slot's number."""
        uid = await self.client.open_version(VersionKey(MODEL, 0, step), self.slots)
        last = len(self.slots) - 1
        for i in range(last + (not hold_last)):
            await self.client.publish_slot(uid, self.record(i, step), self.trainers[i])
        return uid, last

    async def step(self, i: int, after: VersionKey | None) -> float:
        """One receiver's warm step; returns when it was told of the version."""
        member = self.members[i]
        manifest = await self.client.await_version(
            MODEL, group="group", members=self.members, member=member, worker=self.receivers[i], after=after,
            timeout_s=120.0,
        )  # fmt: skip
        told = time.perf_counter()
        await self.client.release_lease(manifest.lease)
        facts = await self.client.vote(
            manifest.transaction, member, True, names_consumed=self.names, wire_bytes=1, plan_digest=b"p" * 32,
            timeout_s=60.0,
        )  # fmt: skip
        if facts.decision is not Decision.COMMIT:
            raise RuntimeError(facts.reason)
        facts = await self.client.installed(manifest.transaction, member, True, timeout_s=60.0)
        if facts.outcome is not Decision.SERVE:
            raise RuntimeError(facts.reason)
        return told


async def warm(address: str, metrics: str, n_steps: int, n_workers: int) -> Report:
    parts = list(shard_table(megatron_sources()).parts)
    async with AsyncRendezvous.connect(address) as client, AsyncRendezvous.connect(address) as crowd:
        for i in range(n_workers - 32):
            await crowd.register(WorkerInfo("trainer", "other", "node", f"bystander-{i}"))
        fleet = Fleet(client, parts, 16)
        await fleet.enrol()
        told_ms: list[float] = []
        done_ms: list[float] = []
        before: dict[str, tuple[float, float]] = {}
        previous = None
        for step in range(n_steps):
            if step == 3:
                before = message_bytes(metrics)  # from here on everything is warm
            waiting = [asyncio.create_task(fleet.step(i, previous)) for i in range(16)]
            uid, last = await fleet.publish(step, hold_last=True)
            await asyncio.sleep(0.05)
            started = time.perf_counter()
            await client.publish_slot(uid, fleet.record(last, step), fleet.trainers[last])
            told = await asyncio.gather(*waiting)
            if step >= 3:
                told_ms.append((max(told) - started) * 1e3)
                done_ms.append((time.perf_counter() - started) * 1e3)
            previous = VersionKey(MODEL, 0, step)
            await client.retire(uid)
        spent = message_bytes(metrics)
        calls = {}
        for method in ("AwaitVersion", "ReleaseLease", "Vote", "Installed"):
            old = before.get(method, (0.0, 0.0))
            calls[method] = (sum(spent[method]) - sum(old)) / (n_steps - 3) / 16
        round_trips = []
        for _ in range(200):
            started = time.perf_counter()
            await client.ask_decision("0" * 32)
            round_trips.append((time.perf_counter() - started) * 1e3)
        return {
            "receiver_bytes": {**calls, "all": sum(calls.values()), "allowed": 1024 + 128 * 16},
            "last_publish_to_last_told_ms": {
                "median": statistics.median(told_ms), "max": max(told_ms), "steps": len(told_ms),
            },
            "last_publish_to_all_serving_ms": statistics.median(done_ms),
            "bare_round_trip_ms": await bare_round_trips(),
            "one_call_round_trip_ms": statistics.median(round_trips),
        }  # fmt: skip


async def bare_round_trips() -> Report:
    """grpc.aio alone, in this process: one call, and 16 streams that one event answers."""
    import grpc

    event = asyncio.Event()

    async def echo(request: bytes, context: object) -> bytes:
        return request

    async def wait(request: bytes, context: grpc.aio.ServicerContext) -> None:
        await event.wait()
        await context.write(request)

    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Wait": grpc.unary_stream_rpc_method_handler(wait),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("b", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ones, fans = [], []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        one, fan = channel.unary_unary("/b/Echo"), channel.unary_stream("/b/Wait")
        for _ in range(200):
            started = time.perf_counter()
            await one(b"x" * 64)
            ones.append((time.perf_counter() - started) * 1e3)
        for _ in range(30):
            event.clear()
            streams = [fan(b"x" * 700) for _ in range(16)]
            reads = [asyncio.create_task(stream.read()) for stream in streams]
            await asyncio.sleep(0.02)
            started = time.perf_counter()
            event.set()
            await asyncio.gather(*reads)
            fans.append((time.perf_counter() - started) * 1e3)
    await server.stop(0)
    return {"unary": statistics.median(ones), "16_streams": statistics.median(fans)}


async def cold(address: str, pid: int, n: int) -> Report:
    biased = megatron_sources().specs
    sources = megatron(MODEL, biased, tp=2, pp=2, ep=2, dp=n // 4)
    # every rank its own addresses, so that no two tables are equal
    parts = [
        ShardPart(
            p.holder, p.tensors, p.geometries, p.tensor_id, p.geometry_id, p.region,
            p.offset_bytes + i * ALIGN_BYTES, p.replica_group, p.region_bytes + n * ALIGN_BYTES,
        )
        for i, p in enumerate(shard_table(sources).parts)
    ]  # fmt: skip
    largest = 0
    async with AsyncRendezvous.connect(address) as client:
        fleet = Fleet(client, parts, n)
        started = time.perf_counter()
        await fleet.enrol()
        enrolled = time.perf_counter()

        async def discover(i: int) -> int:
            manifest = await client.await_version(
                MODEL, group="group", members=fleet.members, member=fleet.members[i], worker=fleet.receivers[i],
                timeout_s=300.0,
            )  # fmt: skip
            tables = await client.get_tables([slot.table_digest for slot in manifest.slots], timeout_s=300.0)
            await client.release_lease(manifest.lease)
            return len(tables)

        waiting = [asyncio.create_task(discover(i)) for i in range(n)]
        await fleet.publish(0, hold_last=False)
        published = time.perf_counter()
        found = await asyncio.gather(*waiting)
        finished = time.perf_counter()
    with open(f"/proc/{pid}/status") as status:
        peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    encoded = [len(converts.part_to_message(p).SerializeToString()) for p in parts[:4]]
    largest = max(*encoded, *(len(converts.tensors_to_message(p.tensors).SerializeToString()) for p in parts[:4]))
    return {
        "tables_each": min(found),
        "entries": sum(len(p) for p in parts),
        "enrol_and_put_s": enrolled - started,
        "publish_s": published - enrolled,
        "cold_discovery_s": finished - enrolled,
        "server_peak_mb": peak_kb / 1024,
        "largest_content_bytes": largest,
        "message_limit_bytes": 4 << 20,
    }


def sections(report: Report) -> list[Section]:
    """The report as tables: what was measured, what the issue asks for, what the ancestor does."""
    made = []
    wire, warm_run, cold_run = (report.get(name) for name in ("wire", "warm", "cold"))
    if isinstance(wire, dict):
        theirs = wire["ancestor"] if isinstance(wire["ancestor"], dict) else {}
        section = Section("Wire form")
        fsdp16 = wire["fsdp16"]

        def row(what: str, ours: float, target: str, other: str) -> list[str]:
            value = theirs.get(other) if other else None
            return [what, fmt(ours), target, fmt(value) if value is not None else "-"]

        section.table(
            ["one source of 4,922 entries, and FSDP over 16 ranks", "here", "at most", "ModelExpress 0.7.0"],
            [
                row("bytes, addresses front to back", wire["bump_bytes"]["all"], "16,384", "bytes"),
                row("bytes, addresses at random", wire["random_bytes"]["all"], "30,720", "bytes"),
                row("of these bytes, names and geometry (sent once)",
                    wire["bump_bytes"]["names"] + wire["bump_bytes"]["geometry"], "-", ""),
                row("decode to checked columns, ms", wire["bump_decode_all_ms"]["median"], "1", "decode_ms"),
                row("the same, addresses at random, ms", wire["random_decode_all_ms"]["median"], "1", ""),
                row("the same, each after a full garbage collection (cold caches), ms",
                    wire["bump_decode_swept_ms"]["median"], "-", ""),
                row("the same, dictionaries known, ms", wire["bump_decode_rows_ms"]["median"], "1", "decode_ms"),
                row("encode (once, by its publisher), ms", wire["bump_encode_ms"]["median"], "-", "encode_ms"),
                row("FSDP16, 301,872 entries: bytes", fsdp16["bytes_all"], "-", "fsdp16_bytes"),
                row("FSDP16: decode and merge, ms",
                    fsdp16["decode_merge_ms"]["median"], "60", "fsdp16_decode_merge_ms"),
            ],
        )  # fmt: skip
        if not theirs:
            section.text(str(wire["ancestor"]))
        made.append(section)
    if isinstance(warm_run, dict):
        section = Section("Warm step, 16 trainers and 16 receivers, while 256 workers heartbeat")
        told, sizes, bare = (
            warm_run[k] for k in ("last_publish_to_last_told_ms", "receiver_bytes", "bare_round_trip_ms")
        )
        section.table(
            ["", "here", "at most"],
            [
                ["last publish to last receiver told, median ms", fmt(told["median"]), "10"],
                ["the same, slowest of all steps, ms", fmt(told["max"]), "-"],
                ["last publish to all serving, median ms", fmt(warm_run["last_publish_to_all_serving_ms"]), "-"],
                ["message bytes of a receiver's four calls", fmt(sizes["all"]), fmt(sizes["allowed"])],
                ["one call of the service, ms", fmt(warm_run["one_call_round_trip_ms"]), "-"],
                ["bare grpc.aio: one call, ms", fmt(bare["unary"]), "-"],
                ["bare grpc.aio: 16 streams answered by one event, ms", fmt(bare["16_streams"]), "-"],
            ],
        )
        made.append(section)
    if isinstance(cold_run, dict):
        section = Section(f"Cold discovery, {cold_run['tables_each']} trainers and as many receivers in one process")
        section.table(
            ["", "here", "at most"],
            [
                ["register all and put all tables, s", fmt(cold_run["enrol_and_put_s"]), "-"],
                ["publish until every receiver has version and tables, s", fmt(cold_run["cold_discovery_s"]), "30"],
                ["peak memory of the server, MB", fmt(cold_run["server_peak_mb"]), "1,000"],
                ["largest content, bytes (a message holds 1 MiB of it at most)",
                 fmt(cold_run["largest_content_bytes"]), "4,194,304"],
            ],
        )  # fmt: skip
        made.append(section)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="wire, warm, cold; all if none is named")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=33)
    parser.add_argument("--size", type=int, default=256, help="trainers and receivers of the cold run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--results", type=Path, help="markdown file whose section is replaced")
    args = parser.parse_args()
    which = args.which or ["wire", "warm", "cold"]
    report: Report = {}
    if "wire" in which:
        report["wire"] = bench_wire(args.rounds)
    if "warm" in which:
        with server_process() as (address, metrics, _):
            report["warm"] = asyncio.run(warm(address, metrics, args.steps, 256))
    if "cold" in which:
        with server_process() as (address, _, process):
            report["cold"] = asyncio.run(cold(address, process.pid, args.size))
    text = json.dumps(report, indent=2, default=str)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    if args.results:
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        machine += f"NumPy {np.__version__}; load average {os.getloadavg()[0]:.1f} at the end."
        write_section(args.results, "rendezvous", "Rendezvous", machine, sections(report))


if __name__ == "__main__":
    main()
