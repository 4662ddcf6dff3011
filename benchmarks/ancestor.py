"""The same workloads as objects of ModelExpress 0.7.0, whose `modelexpress.refit.reshard` came before this planner.

Its work is merge + build + plan: `merge_shard_tables` over the ranks' decoded tables, `build_sources`, and
`plan_transfer` over what its capture would have recorded. Decoding and capture are not counted on either side.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.workloads import ITEM_BYTES, Reads, Sources

BASE_ADDRESS = 0x7E00_0000_0000


@dataclass(frozen=True)
class AncestorResult:
    """Seconds per stage and what the plan holds."""

    merge_s: float
    build_s: float
    plan_s: float
    n_descriptors: int
    wire_bytes: int
    useful_bytes: int
    n_sessions: int
    unbounded_sources: int

    @property
    def seconds(self) -> float:
        return self.merge_s + self.build_s + self.plan_s


def published_tables(sources: Sources) -> list[list[Any]]:
    """One `list[PublishedTensor]` a rank, as its decoder makes them."""
    from modelexpress.refit.reshard.rendezvous import PublishedShard, PublishedTensor

    tables = []
    for rank, held in enumerate(sources.holders):
        agent, address = f"mx-{held.name}-2b1f0c6e", BASE_ADDRESS
        by_tensor: dict[int, Any] = {}
        for tensor, box in zip(held.tensor.tolist(), held.box.tolist(), strict=True):
            start, stop = held.boxes[box]
            shape = tuple(b - a for a, b in zip(start, stop, strict=True))
            shard = PublishedShard(agent, rank % 8, address, start, shape)
            n_bytes = ITEM_BYTES
            for extent in shape:
                n_bytes *= extent
            address += -(-n_bytes // 512) * 512
            if tensor in by_tensor:
                by_tensor[tensor].shards.append(shard)
            else:
                spec = sources.specs[tensor]
                by_tensor[tensor] = PublishedTensor(spec.name, "torch.bfloat16", ITEM_BYTES, spec.shape, [shard])
        tables.append(list(by_tensor.values()))
    return tables


def captured(reads: Reads) -> Any:
    """What its capture records for the same copies: a chain of narrows, and the destination's view."""
    import torch
    from modelexpress.refit.reshard.types import CaptureResult, RecordedCopy

    copies = []
    for index, start, count, buffer, offset, stride in reads.rows:
        spec = reads.specs[index]
        chain = tuple(
            ("narrow", (dim, first, size), ())
            for dim, (first, size, extent) in enumerate(zip(start, count, spec.shape, strict=True))
            if size != extent
        )
        copies.append(RecordedCopy(spec.name, chain, reads.buffers[buffer][0], offset, count, stride, torch.bfloat16))
    return CaptureResult(copies=copies)


class CannedClient:
    """Answers its discovery with messages made beforehand; each answer is parsed anew, as from a wire."""

    def __init__(self, tables: list[list[Any]]) -> None:
        from modelexpress import p2p_pb2
        from modelexpress.refit.reshard.rendezvous import wrap_rendezvous_blob

        self._pb = p2p_pb2
        refs, self._metadata = [], {}
        for rank, table in enumerate(tables):
            blob = wrap_rendezvous_blob(b"m" * 1024, f"mx-{rank}", "10.0.0.1:5555", table, 1)
            worker = p2p_pb2.WorkerMetadata(worker_rank=rank, nixl_metadata=blob, status=p2p_pb2.SOURCE_STATUS_READY)
            refs.append(p2p_pb2.SourceInstanceRef(mx_source_id="source", worker_id=str(rank), worker_rank=rank))
            answer = p2p_pb2.GetMetadataResponse(found=True, worker=worker, mx_source_id="source", worker_id=str(rank))
            self._metadata[str(rank)] = answer.SerializeToString()
        self._list = p2p_pb2.ListSourcesResponse(instances=refs).SerializeToString()

    def list_sources(self, identity: Any, status_filter: Any = None) -> Any:
        return self._pb.ListSourcesResponse.FromString(self._list)

    def get_metadata(self, source_id: str, worker_id: str) -> Any:
        return self._pb.GetMetadataResponse.FromString(self._metadata[worker_id])


def discovery_s(tables: list[list[Any]], reps: int) -> list[float]:
    """Seconds of its `discover_trainers` for these tables, without its server and its network.

    It does this at every refit: a list of sources, then one answer a rank with the whole shard table, decoded.
    """
    import logging

    from modelexpress.refit.reshard.rendezvous import MxReshardRendezvous

    logging.getLogger("modelexpress").setLevel(logging.ERROR)
    theirs = MxReshardRendezvous(CannedClient(tables), "inference", 0, "bench")
    times = []
    for _ in range(reps):
        since = time.perf_counter()
        found = theirs.discover_trainers(len(tables), timeout=10.0)
        times.append(time.perf_counter() - since)
        if sum(p.entry_count() for p in found) != sum(len(t) for t in tables):
            raise RuntimeError("it discovers other tables than those that were published")
    return times


def run(tables: list[list[Any]], capture: Any, useful_bytes: int, *, gc_on: bool) -> AncestorResult:
    """Merge, build and plan once; it must move exactly the bytes that ours does."""
    from modelexpress.refit.reshard.rendezvous import build_sources, merge_shard_tables
    from modelexpress.refit.reshard.transfer_plan import plan_transfer

    was_on = gc.isenabled()
    gc.collect()
    (gc.enable if gc_on else gc.disable)()
    try:
        begin = time.perf_counter()
        merged = merge_shard_tables(tables)
        merge = time.perf_counter()
        sources, _, _ = build_sources(merged)
        build = time.perf_counter()
        plan = plan_transfer(capture, sources)
        end = time.perf_counter()
    finally:
        (gc.enable if was_on else gc.disable)()
    if plan.fallback or plan.exact_bytes != useful_bytes:
        raise RuntimeError(
            f"it plans {plan.exact_bytes} bytes and gives up on {len(plan.fallback)} tensors: not our workload"
        )
    return AncestorResult(
        merge - begin,
        build - merge,
        end - build,
        plan.descriptor_count(),
        plan.bytes_planned(),
        useful_bytes,
        len(plan.sessions()),
        len(plan.unbounded_sources),
    )
