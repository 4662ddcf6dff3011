"""The life of a version through the client, whatever is behind it: in process, or a service over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from reshard.planner.shards import Holder, Shard, ShardPart
from reshard.rendezvous.client import Rendezvous, Worker
from reshard.rendezvous.errors import (
    LeaseError,
    RendezvousTimeoutError,
    TransactionError,
)
from reshard.rendezvous.types import Decision, Manifest, SlotRecord, VersionKey, WorkerInfo

MODEL = "qwen"


@pytest.fixture(params=["in_process", "grpc", pytest.param("redis", marks=pytest.mark.redis)])
def rdv(request: pytest.FixtureRequest) -> Iterator[Rendezvous]:
    if request.param == "in_process":
        with Rendezvous.in_process() as client:
            yield client
        return
    pytest.importorskip("grpc", reason="grpcio is not installed")
    from reshard.rendezvous.service import serve

    store = request.getfixturevalue("redis_url") if request.param == "redis" else "memory"
    with serve(listen="127.0.0.1:0", store=store) as server, Rendezvous.connect(server.address) as client:
        yield client


def make_part(slot: str, rows: tuple[int, int] = (0, 4), names: tuple[str, ...] = ("w",)) -> ShardPart:
    shards = [Shard(name, "bfloat16", (8, 2), (rows[0], 0), (rows[1], 2), 0, 64 * i) for i, name in enumerate(names)]
    return ShardPart.from_shards(Holder(slot), shards, [4096])


def trainer(rdv: Rendezvous, slot: str, ttl_s: float = 10.0) -> Worker:
    return rdv.register(
        WorkerInfo("trainer", MODEL, "host-" + slot, slot, {"memory": b"ep-" + slot.encode()}), ttl_s=ttl_s
    )


def receiver(rdv: Rendezvous, name: str, ttl_s: float = 10.0) -> Worker:
    return rdv.register(WorkerInfo("receiver", MODEL, "host-" + name, name), ttl_s=ttl_s)


def record(slot: str, worker: Worker, digest: bytes, base: int = 4096, **extra: object) -> SlotRecord:
    return SlotRecord(
        slot,
        worker.id,
        "host-" + slot,
        {"memory": b"ep-" + slot.encode()},
        digest,
        np.array([base], np.uint64),
        np.array([4096], np.int64),
        digest_root=bytes([len(slot)]) * 32,
        **extra,  # type: ignore[arg-type]
    )


def publish(rdv: Rendezvous, step: int, workers: dict[str, Worker], epoch: int = 0, **extra: object) -> str:
    uid = ""
    for i, (slot, worker) in enumerate(workers.items()):
        digest = rdv.put_table(make_part(slot, (4 * i, 4 * i + 4)))
        uid = rdv.open_version(VersionKey(MODEL, epoch, step), list(workers))
        rdv.publish_slot(uid, record(slot, worker, digest, base=4096 * (step + 1), **extra), worker)
    return uid


def wait(
    rdv: Rendezvous, member: str, worker: Worker, members: tuple[str, ...] = ("r0", "r1"), **extra: object
) -> Manifest:
    extra.setdefault("timeout_s", 5.0)
    return rdv.await_version(MODEL, group="g", members=members, member=member, worker=worker, **extra)  # type: ignore[arg-type]


def test_refit_of_a_group(rdv: Rendezvous) -> None:
    workers = {slot: trainer(rdv, slot) for slot in ("t0", "t1")}
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    for step in range(3):
        with ThreadPoolExecutor(2) as pool:
            waiting = [
                pool.submit(wait, rdv, name, worker, after=VersionKey(MODEL, 0, step - 1) if step else None)
                for name, worker in receivers.items()
            ]
            uid = publish(rdv, step, workers)
            manifests = [future.result(timeout=10) for future in waiting]
        assert {m.uid for m in manifests} == {uid}
        assert len({m.transaction for m in manifests}) == 1
        manifest = manifests[0]
        assert manifest.version == VersionKey(MODEL, 0, step)
        assert [s.slot for s in manifest.slots] == ["t0", "t1"]
        assert [int(s.region_bases[0]) for s in manifest.slots] == [4096 * (step + 1)] * 2
        assert manifest.slot("t1").endpoints == {"memory": b"ep-t1"}
        assert manifest.slot("t1").digest_root == b"\2" * 32
        tables = rdv.get_tables([s.table_digest for s in manifest.slots])
        assert {part.tensors.names_list[0] for part in tables.values()} == {"w"}
        for m in manifests:
            lease = rdv.renew_lease(m.lease)
            rdv.release_lease(lease)
            rdv.release_lease(lease)
            with pytest.raises(LeaseError):
                rdv.renew_lease(lease)
        with ThreadPoolExecutor(2) as pool:
            votes = [
                pool.submit(
                    rdv.vote,
                    m.transaction,
                    name,
                    True,
                    names_consumed=["w"] if name == "r0" else [],
                    wire_bytes=8,
                    timeout_s=5.0,
                )
                for name, m in zip(receivers, manifests, strict=True)
            ]
            assert [v.result(timeout=10).decision for v in votes] == [Decision.COMMIT] * 2
            done = [pool.submit(rdv.installed, manifest.transaction, name, True, timeout_s=5.0) for name in receivers]
            assert [d.result(timeout=10).outcome for d in done] == [Decision.SERVE] * 2
        assert rdv.ask_decision(manifest.transaction).outcome is Decision.SERVE
        assert rdv.retire(uid)


def test_timeout_names_what_is_missing(rdv: Rendezvous) -> None:
    worker = trainer(rdv, "t0")
    digest = rdv.put_table(make_part("t0"))
    uid = rdv.open_version(VersionKey(MODEL, 0, 7), ["t0", "t1"])
    rdv.publish_slot(uid, record("t0", worker, digest), worker)
    with pytest.raises(RendezvousTimeoutError, match=r"1 of 2 slots filled; missing 't1'") as caught:
        wait(rdv, "r0", receiver(rdv, "r0"), timeout_s=0.3)
    assert caught.value.missing_slots == ("t1",)
    assert caught.value.waited_s > 0.2


def test_no_vote_aborts_all(rdv: Rendezvous) -> None:
    """R3: one receiver fails before install, so neither installs."""
    publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    manifests = {name: wait(rdv, name, worker) for name, worker in receivers.items()}
    txn = manifests["r0"].transaction
    with ThreadPoolExecutor(1) as pool:
        yes = pool.submit(rdv.vote, txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=5.0)
        no = rdv.vote(txn, "r1", False, reason="read of 't0' failed", timeout_s=5.0)
        assert no.decision is Decision.ABORT
        facts = yes.result(timeout=10)
    assert facts.decision is Decision.ABORT
    assert facts.reason == "'r1' voted no: read of 't0' failed"
    with pytest.raises(TransactionError):
        rdv.installed(txn, "r0", True, timeout_s=1.0)
