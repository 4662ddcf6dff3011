"""What the rendezvous' tests share: small tables, workers and records."""

from __future__ import annotations

import numpy as np

from reshard.planner.shards import Holder, Shard, ShardPart
from reshard.rendezvous.client import Rendezvous, Worker
from reshard.rendezvous.types import Manifest, SlotRecord, VersionKey, WorkerInfo

MODEL = "qwen"


def make_part(slot: str, rows: tuple[int, int] = (0, 4), names: tuple[str, ...] = ("w",)) -> ShardPart:
    shards = [Shard(name, "bfloat16", (64, 2), (rows[0], 0), (rows[1], 2), 0, 64 * i) for i, name in enumerate(names)]
    return ShardPart.from_shards(Holder(slot), shards, [4096])


def empty_part(slot: str) -> ShardPart:
    return ShardPart.from_shards(Holder(slot), [], [4096])


def trainer(rdv: Rendezvous, slot: str, ttl_s: float = 30.0, model: str = MODEL) -> Worker:
    endpoints = {"memory": b"endpoint of " + slot.encode()}
    return rdv.register(WorkerInfo("trainer", model, ("host-" + slot)[:64], slot, endpoints), ttl_s=ttl_s)


def receiver(rdv: Rendezvous, name: str, ttl_s: float = 30.0) -> Worker:
    return rdv.register(WorkerInfo("receiver", MODEL, "host-" + name, name), ttl_s=ttl_s)


def make_record(slot: str, worker_id: str, digest: bytes, base: int = 4096, **extra: object) -> SlotRecord:
    extra.setdefault("digest_root", bytes([len(slot) % 256]) * 32)
    return SlotRecord(
        slot,
        worker_id,
        ("host-" + slot)[:64],
        {"memory": b"endpoint of " + slot.encode()},
        digest,
        np.array([base], np.uint64),
        np.array([4096], np.int64),
        **extra,  # type: ignore[arg-type]
    )


def publish(rdv: Rendezvous, step: int, workers: dict[str, Worker], epoch: int = 0, **extra: object) -> str:
    """Publish a whole version, all slots in order; returns its uid."""
    uid = rdv.open_version(VersionKey(MODEL, epoch, step), list(workers))
    for i, (slot, worker) in enumerate(workers.items()):
        digest = rdv.put_table(make_part(slot, (4 * i, 4 * i + 4)))
        record = make_record(slot, worker.id, digest, base=4096 * (step + 1), **extra)
        rdv.publish_slot(uid, record, worker)
    return uid


def wait(
    rdv: Rendezvous, member: str, worker: Worker, members: tuple[str, ...] = ("r0", "r1"), **extra: object
) -> Manifest:
    extra = {"timeout_s": 30.0, "group": "g", **extra}
    return rdv.await_version(
        MODEL,
        members=members,
        member=member,
        worker=worker,
        **extra,  # type: ignore[arg-type]
    )
