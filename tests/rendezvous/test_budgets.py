"""What may the wire cost? Bytes of a table, bytes of a warm step, and what is never sent twice: counts, no timings."""

from __future__ import annotations

import json
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'reshard[rendezvous]'")
from benchmarks.rendezvous import encode, megatron_sources, shuffled
from benchmarks.workloads import shard_table
from tests.rendezvous.support import MODEL, make_part, make_record, receiver, trainer, wait

from reshard.proto.v1 import rendezvous_pb2 as pb
from reshard.rendezvous.client import Rendezvous, Worker
from reshard.rendezvous.remote import RemoteBackend
from reshard.rendezvous.service import serve
from reshard.rendezvous.types import Decision, VersionKey

N_SLOTS = 16
MEMBERS = ("r0", "r1")
RECEIVER_CALLS = ("AwaitVersion", "ReleaseLease", "Vote", "Installed")


def test_a_source_of_4922_entries_is_small() -> None:
    sources = megatron_sources()
    part = max(shard_table(sources).parts, key=len)
    assert len(part) == 4922
    assert sum(map(len, encode(part))) <= 16 << 10, "addresses front to back"
    assert sum(map(len, encode(shuffled(part)))) <= 30 << 10, "addresses at random"


def publish_in_place(rdv: Rendezvous, step: int, workers: dict[str, Worker]) -> str:
    """Publish a version out of memory that is filled anew each time: the bases stay, the digest roots change."""
    uid = rdv.open_version(VersionKey(MODEL, 0, step), list(workers))
    for i, (slot, worker) in enumerate(workers.items()):
        digest = rdv.put_table(make_part(slot, (4 * i, 4 * i + 4)))
        rdv.publish_slot(uid, make_record(slot, worker.id, digest, digest_root=bytes([step + 1]) * 32), worker)
    return uid


def refit(rdv: Rendezvous, readers: dict[str, Worker], want: int) -> None:
    """All members await, read the tables, release, vote and install."""

    def one(member: str) -> Decision:
        found = wait(rdv, member, readers[member], MEMBERS, want=want)
        rdv.get_tables([slot.table_digest for slot in found.slots])
        rdv.release_lease(found.lease)
        rdv.vote(found.transaction, member, True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
        return rdv.installed(found.transaction, member, True, timeout_s=30.0).outcome

    with ThreadPoolExecutor(len(readers)) as pool:
        assert set(pool.map(one, readers)) == {Decision.SERVE}


def test_a_warm_step_is_four_small_calls(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under 1 KB plus 128 bytes a slot; tables, topologies, names and known bases are not sent again."""
    grants: list[Any] = []
    answer = RemoteBackend._answer

    async def noting(backend: RemoteBackend, wish: Any, grant: Any, *rest: Any) -> Any:
        grants.append(grant)
        return await answer(backend, wish, grant, *rest)

    monkeypatch.setattr(RemoteBackend, "_answer", noting)
    caplog.set_level(logging.INFO, "reshard.rendezvous.access")
    with serve() as server, Rendezvous.connect(server.address) as trainers, Rendezvous.connect(server.address) as rdv:
        workers = {f"trainer-{i:02d}": trainer(trainers, f"trainer-{i:02d}") for i in range(N_SLOTS)}
        readers = {member: receiver(rdv, member) for member in MEMBERS}
        for step in range(3):
            if step == 2:
                caplog.clear()
                grants.clear()
            uid = publish_in_place(trainers, step, workers)
            refit(rdv, readers, step)
            trainers.retire(uid)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "reshard.rendezvous.access"]
    calls = Counter(line["method"] for line in lines)
    for method in RECEIVER_CALLS:
        assert calls[method] == len(MEMBERS), method
    assert not {"GetTables", "GetTopology", "PutNames"} & set(calls)
    spent = sum(line["in"] + line["out"] for line in lines if line["method"] in RECEIVER_CALLS)
    assert spent / len(MEMBERS) <= 1024 + 128 * N_SLOTS
    assert len(grants) == len(MEMBERS)
    assert not any(grant.HasField("bases") for grant in grants), "known bases are not sent again"


def test_names_and_geometry_that_are_known_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[list[int]] = []
    fetch = RemoteBackend._fetch

    async def noting(backend: RemoteBackend, *rest: Any) -> Any:
        contents = await fetch(backend, *rest)
        came.append([kind for kind, _, _ in contents])
        return contents

    monkeypatch.setattr(RemoteBackend, "_fetch", noting)
    one = make_part("t0", names=("w", "v"))
    other = replace(one, offset_bytes=one.offset_bytes[::-1].copy())
    assert one.tensors.digest == other.tensors.digest
    assert one.digest != other.digest
    with serve() as server, Rendezvous.connect(server.address) as trainers, Rendezvous.connect(server.address) as rdv:
        for part in (one, other, one):
            digest = trainers.put_table(part)
            assert rdv.get_tables([digest])[digest].digest == part.digest
    tensors, geometries, rows = pb.CONTENT_KIND_TENSORS, pb.CONTENT_KIND_GEOMETRIES, pb.CONTENT_KIND_PART
    assert came == [[tensors, geometries, rows], [rows]], "and the third time nothing is asked for"
