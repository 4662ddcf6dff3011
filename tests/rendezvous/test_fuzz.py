"""What does the service make of what no client of ours would send? It says what is wrong, and goes on.

A server in a process of its own gets inputs for each of its calls. Each must be answered OK, or INVALID_ARGUMENT naming
the field or the message that the bytes are not, or, where every field is in its bounds, with another typed error.
Nothing may be logged as a failure of the service, and its memory is bounded.
"""

# ruff: noqa: E402  (what may be absent is asked for first)
from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'reshard[rendezvous]'")
zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'reshard[rendezvous]'")

import grpc
from tests.rendezvous.conftest import mortal
from tests.rendezvous.fuzzing import Fuzzer, Known
from tests.rendezvous.support import make_part, publish, receiver, trainer, wait

from reshard.planner.cuts import cuts
from reshard.planner.reads import Buffer, ReadRequest, ReadTable
from reshard.planner.shards import ShardPart
from reshard.proto.v1 import rendezvous_pb2 as pb
from reshard.proto.v1 import tables_pb2 as tables
from reshard.rendezvous import converts, limits
from reshard.rendezvous.client import Rendezvous, Worker
from reshard.rendezvous.faults import DETAIL_KEY
from reshard.rendezvous.types import Manifest, VersionKey

SERVICE = pb.DESCRIPTOR.services_by_name["RendezvousService"]
METHODS = {method.name: method for method in SERVICE.methods}
WAITING = {"AwaitVersion", "WaitLeases", "WatchVersions", "Vote", "Installed", "AskDecision"}
ROOT = Path(__file__).parents[2]
AT_ONCE = 24
CALL_S = 60.0
GROWTH_BYTES = 600 << 20
PART_GROWTH_BYTES = 1500 << 20  # a part may have 10**7 rows of six columns, and one is decoded at a time

# Which status each kind of error travels with; all but the first need a request whose fields are in their bounds.
STATUS = {
    pb.ERROR_KIND_INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_KIND_WORKER_LOST: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_KIND_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_KIND_EQUALITY: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_KIND_TRANSACTION: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_KIND_STALE: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_KIND_LEASE: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_KIND_ABORTED: grpc.StatusCode.ABORTED,
    pb.ERROR_KIND_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class ServerProcess:
    """``serve`` in a child, with its log in a file."""

    def __init__(self, log: Path) -> None:
        script = (
            "import logging, sys\n"
            "from reshard.rendezvous.service import serve\n"
            "logging.basicConfig(level=logging.WARNING)\n"
            "server = serve(listen='127.0.0.1:0')\n"
            "print(server.address, flush=True)\n"
            "server.wait()\n"
        )
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*mortal(), sys.executable, "-c", script],
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, log.read_text()
        self.start_bytes = self.peak_bytes()

    def peak_bytes(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM")

    def check(self) -> None:
        """It lives, answers, logged no failure of its own, and did not grow without bounds."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        with Rendezvous.connect(self.address) as client:
            client.describe(timeout_s=60.0)
        assert "Traceback" not in self.log.read_text(), self.log.read_text()[-4000:]
        assert self.peak_bytes() - self.start_bytes < PART_GROWTH_BYTES

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("fuzz") / "server.log")
    try:
        yield process
    finally:
        process.close()


@contextmanager
def prepared(address: str, serial: int) -> Iterator[Known]:
    """A version under way with live workers, and a right request of each type about it."""
    with Rendezvous.connect(address) as client:
        workers = {f"slot-{i}": trainer(client, f"slot-{i}", ttl_s=600.0) for i in range(2)}
        epoch = client.open_epoch("qwen", f"run {serial}")
        uid = bytes.fromhex(publish(client, 1, workers, epoch=epoch))
        open_uid = bytes.fromhex(client.open_version(VersionKey("qwen", epoch, 2), list(workers)))
        readers = {name: receiver(client, name, ttl_s=600.0) for name in ("r0", "r1")}
        manifest = wait(client, "r0", readers["r0"], group=group_of(serial))
        everybody = [*workers.values(), *readers.values()]
        yield _known(make_part("slot-0", (0, 4)), uid, open_uid, epoch, serial, manifest, everybody)


def group_of(serial: int) -> str:
    # No two differ in few bits, or damage to one batch's requests would join another's group.
    return hashlib.sha256(str(serial).encode()).hexdigest()


def _known(
    part: ShardPart, uid: bytes, open_uid: bytes, epoch: int, serial: int, manifest: Manifest, workers: list[Worker]
) -> Known:
    known = Known()
    worker_ids = [bytes.fromhex(worker.id) for worker in workers]
    transaction, lease = bytes.fromhex(manifest.transaction), bytes.fromhex(manifest.lease.id)
    known.ids = [*worker_ids, uid, open_uid, transaction, lease]
    names = sorted(part.tensors.names_list)
    names_digest = converts.names_digest(names)
    names_blob = converts.names_to_message(names).SerializeToString()
    contents = {
        part.tensors.digest: (pb.CONTENT_KIND_TENSORS, converts.tensors_to_message(part.tensors).SerializeToString()),
        part.geometries.digest: (
            pb.CONTENT_KIND_GEOMETRIES,
            converts.geometries_to_message(part.geometries).SerializeToString(),
        ),
        part.digest: (pb.CONTENT_KIND_PART, converts.part_to_message(part).SerializeToString()),
    }
    read = ReadRequest("w", (64, 2), "bfloat16", (0, 1), (1, 1), (64, 1), 0, 0, (1, 1))
    cut = cuts([[ReadTable.build([Buffer("p", (64, 1), "bfloat16")], [read])]])
    cut_blob = converts.cuts_to_message(cut).SerializeToString()
    known.digests = [*contents, names_digest, cut.digest]
    known.blobs = [*(blob for _, blob in contents.values()), names_blob, cut_blob]
    header = pb.TableHeader(
        part_digest=part.digest, tensors_digest=part.tensors.digest, geometries_digest=part.geometries.digest
    )
    chunks = [
        pb.PutTableRequest(chunk=pb.Chunk(kind=kind, digest=digest, total_bytes=len(blob), data=blob))
        for digest, (kind, blob) in contents.items()
    ]
    halves = [
        pb.PutNamesRequest(digest=names_digest, total_bytes=len(names_blob), data=piece)
        for piece in (names_blob[:5], names_blob[5:])
    ]
    slot = pb.SlotStatic(
        slot="slot-0",
        worker_id=worker_ids[0],
        host="host",
        endpoints={"memory": b"x"},
        table_digest=part.digest,
        memory=pb.MEMORY_DRAM,
        region_bytes=np.array([4096], "<i8").tobytes(),
    )
    group, member, reader = group_of(serial), "r0", worker_ids[2]
    info = {"role": pb.ROLE_TRAINER, "model": "qwen", "host": "h", "name": "n", "endpoints": {"memory": b"x"}}
    vote = {"transaction": transaction, "member": member, "worker_id": reader}
    requests = {
        "Register": [pb.RegisterRequest(worker_id=os.urandom(16), ttl_ms=5000, **info)],
        "Heartbeat": [pb.HeartbeatRequest(worker_id=worker_ids[0])] * 3,
        "Unregister": [pb.UnregisterRequest(worker_id=worker_ids[1])],
        "PutTable": [pb.PutTableRequest(header=header), *chunks],
        "GetTables": [pb.GetTablesRequest(parts=[part.digest], have=[part.tensors.digest])],
        "PutNames": halves,
        "OpenEpoch": [pb.OpenEpochRequest(model="qwen", run_id=f"right {serial}")],
        "OpenVersion": [pb.OpenVersionRequest(model="qwen", epoch=epoch, step=2, slots=["slot-0", "slot-1"])],
        "PublishSlot": [pb.PublishSlotRequest(uid=open_uid, slot=slot, region_bases=np.array([64], "<u8").tobytes())],
        "CloseAdmission": [pb.CloseAdmissionRequest(uid=uid)],
        "WaitLeases": [pb.WaitLeasesRequest(uid=uid, timeout_ms=2)],
        "Retire": [pb.RetireRequest(uid=uid)],
        "AwaitVersion": [
            pb.AwaitVersionRequest(
                model="qwen",
                group=group,
                members=["r0", "r1"],
                member="r1",
                worker_id=worker_ids[3],
                lease_ttl_ms=1000,
                transaction_timeout_ms=1000,
                timeout_ms=5,
            )
        ],
        "GetTopology": [pb.GetTopologyRequest(uid=uid)],
        "WatchVersions": [pb.WatchVersionsRequest(model="qwen", timeout_ms=2)],
        "RenewLease": [pb.RenewLeaseRequest(uid=uid, lease=lease, ttl_ms=1000)],
        "ReleaseLease": [pb.ReleaseLeaseRequest(uid=uid, lease=lease)],
        "Vote": [pb.VoteRequest(**vote, yes=True, identity=bytes(32), names_digest=names_digest, timeout_ms=2)],
        "Installed": [pb.InstalledRequest(**vote, ok=True, timeout_ms=2)],
        "AskDecision": [pb.AskDecisionRequest(transaction=transaction, timeout_ms=2)],
        "PutCuts": [pb.PutCutsRequest(model="qwen", group=group, member=member, digest=cut.digest, cuts=cut_blob)],
        "GetCuts": [pb.GetCutsRequest(model="qwen", have=[cut.digest])],
        "Describe": [pb.DescribeRequest()],
    }
    assert set(requests) == set(METHODS), "each method of the service has a right request here"
    known.requests = {method: [messages] for method, messages in requests.items()}
    return known


async def call(
    channel: grpc.aio.Channel, name: str, messages: list[bytes], wait_s: float = CALL_S
) -> grpc.aio.AioRpcError | None:
    """Send raw messages, to a call that waits for others for `wait_s`; returns the error, None if it was OK."""
    for pause_s in (0.0, 0.01, 0.1, 0.5, 2.0):
        error = await call_once(channel, name, messages, pause_s, wait_s)
        # A write of grpcio's own client that crosses the server's refusal hides what the server said: ask again,
        # slowly.
        if error is None or error.details() != "Internal error from Core":
            return error
    return error


async def call_once(
    channel: grpc.aio.Channel, name: str, messages: list[bytes], pause_s: float, wait_s: float
) -> grpc.aio.AioRpcError | None:
    method = METHODS[name]
    path = f"/{SERVICE.full_name}/{name}"
    timeout_s = wait_s if name in WAITING else CALL_S

    async def sending() -> AsyncIterator[bytes]:
        for message in messages:
            yield message
            await asyncio.sleep(pause_s)

    request = sending() if method.client_streaming else messages[0]
    kinds = ("unary" if not method.client_streaming else "stream", "unary" if not method.server_streaming else "stream")
    running = getattr(channel, "_".join(kinds))(path)(request, timeout=timeout_s)
    try:
        if method.server_streaming:
            async for _ in running:
                pass
        else:
            await running
    except grpc.aio.AioRpcError as error:
        return error
    return None


def flaw(name: str, messages: list[bytes], error: grpc.aio.AioRpcError | None) -> str:
    """Say what is wrong with an answer; empty if nothing is."""
    unreadable = bool(messages) and not _parses(name, messages[0])
    if error is None:
        return f"bytes that are no {name}Request were accepted" if unreadable else ""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and name in WAITING:
        return ""  # this client's own deadline, whatever the service was about to say
    details = [value for key, value in error.trailing_metadata() or () if key == DETAIL_KEY]
    if not details:
        return f"{error.code()} without a typed detail: {error.details()!r:.300}"
    detail = pb.Error.FromString(details[0])
    if STATUS.get(detail.kind) is not error.code():
        return f"{error.code()} with {pb.ErrorKind.Name(detail.kind)}: {detail.message:.300}"
    if unreadable and (error.code() is not grpc.StatusCode.INVALID_ARGUMENT or detail.field != f"{name}Request"):
        return f"bytes that are no {name}Request: {error.code()} naming {detail.field!r}"
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT and not detail.field:
        return f"INVALID_ARGUMENT without a field: {detail.message:.300}"
    return "" if detail.message else f"{error.code()} without a message"


def _parses(name: str, raw: bytes) -> bool:
    from google.protobuf.message import DecodeError

    try:
        getattr(pb, f"{name}Request").FromString(raw)
    except DecodeError:
        return False
    return True


def fuzz(address: str, name: str, n: int, seed: int) -> dict[str, int]:
    """Send `n` inputs to a call, many at once; returns how often it answered what."""
    counts: dict[str, int] = {}
    for batch in range(0, n, 1000):
        with prepared(address, seed * 1_000_000 + batch) as known:
            inputs = Fuzzer(seed + batch, known).inputs(name, min(1000, n - batch), METHODS[name].client_streaming)
            asyncio.run(send_all(address, name, inputs, counts))
    return counts


async def send_all(address: str, name: str, inputs: Iterator[list[bytes]], counts: dict[str, int]) -> None:
    async def work() -> None:
        for messages in inputs:  # one iterator for all: the loop has one thread
            error = await call(channel, name, messages, wait_s=0.5)
            wrong = flaw(name, messages, error)
            assert not wrong, f"{name}: {wrong}\n{[message[:400] for message in messages]}"
            code = "OK" if error is None else error.code().name
            counts[code] = counts.get(code, 0) + 1

    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(600.0), asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_each_call_survives_what_it_is_sent(server, name):
    counts = fuzz(server.address, name, 150, seed=hash_of(name))
    assert sum(counts.values()) == 150
    assert counts.get("INVALID_ARGUMENT", 0) > 0 or name == "Describe", counts
    server.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(METHODS))
def test_each_call_survives_ten_thousand_inputs(server, name):
    counts = fuzz(server.address, name, 10_000, seed=1 + hash_of(name))
    assert sum(counts.values()) == 10_000
    server.check()


def hash_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "big")


def test_right_requests_are_accepted(server):
    # Otherwise damage to them would only ever meet the first check.
    async def run(known: Known) -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            for name in sorted(set(METHODS) - {"Vote", "Installed", "WaitLeases", *LAST}) + LAST:
                assert await call(channel, name, raw(known, name)) is None, name
            for name in ("Vote", "WaitLeases"):
                error = await call(channel, name, raw(known, name))
                assert error is None or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, name

    with prepared(server.address, 7) as known:
        asyncio.run(run(known))


LAST = ["OpenEpoch", "ReleaseLease", "CloseAdmission", "Retire", "Unregister"]


def raw(known: Known, name: str) -> list[bytes]:
    return [message.SerializeToString() for message in known.requests[name][0]]


# --- frames that claim to be, or become, much larger than they are ---

GIB = 1 << 30


def zeros(n_bytes: int) -> bytes:
    """A zstd frame of that many zeros."""
    compressor = zstandard.ZstdCompressor(level=1)
    stream = compressor.compressobj()
    block = bytes(1 << 20)
    parts = [stream.compress(block) for _ in range(n_bytes // len(block))]
    return b"".join((*parts, stream.flush()))


def column(width: int, base: int = 0, transform: int = tables.TRANSFORM_RAW) -> tables.Column:
    return tables.Column(transform=transform, width=width, base=base)


def bombs() -> dict[str, tables.TensorDict | tables.GeometryDict | tables.ShardPart]:
    frame = zeros(2 * GIB)
    constant = column(0, 1, tables.TRANSFORM_CONSTANT)
    small = zstandard.ZstdCompressor().compress(b"")
    many = 1 << 40
    same, same_million = (zstandard.ZstdCompressor().compress(b"same\0\0\0\0" * n) for n in (8 << 20, 1 << 20))
    return {
        "names of 2 GiB": tables.TensorDict(
            n_tensors=1, names_bytes=2 * GIB, columns=[constant] * 2, dim_rows=[], frame=small, names_frame=frame
        ),
        "names that say little": tables.TensorDict(
            n_tensors=1, names_bytes=4, columns=[constant] * 2, dim_rows=[], frame=small, names_frame=frame
        ),
        "columns that say little": tables.TensorDict(
            n_tensors=1, names_bytes=1, columns=[column(8)] * 2, frame=frame, names_frame=small
        ),
        "constant columns of 2**40 tensors": tables.TensorDict(
            n_tensors=many, names_bytes=many, columns=[constant] * 2, frame=small, names_frame=small
        ),
        "one name 8 million times": tables.TensorDict(
            n_tensors=1, names_bytes=64 << 20, columns=[constant] * 2, frame=small, names_frame=same
        ),
        "one name a million times": tables.TensorDict(
            n_tensors=1 << 20, names_bytes=8 << 20, columns=[constant] * 2, frame=small, names_frame=same_million
        ),
        "2**40 boxes": tables.GeometryDict(n_geometries=many, columns=[constant], frame=small),
        "10**7 constant boxes": tables.GeometryDict(
            n_geometries=10**7,
            columns=[column(0, 16, tables.TRANSFORM_CONSTANT)] * 33,
            dim_rows=[10**7] * 16,
            frame=small,
        ),
        "boxes of 2 GiB": tables.GeometryDict(n_geometries=2 * GIB // 8, columns=[column(8)], frame=frame),
        "10**7 constant rows": tables.ShardPart(
            n_rows=10**7,
            n_regions=1,
            columns=[constant] * 6,
            offset_coding=tables.OFFSET_CODING_BUMP,
            offset_unit=1,
            frame=small,
        ),
        "2**40 rows": tables.ShardPart(
            n_rows=many, n_regions=1, columns=[constant] * 6, offset_coding=tables.OFFSET_CODING_PLAIN, frame=small
        ),
        "2**40 regions": tables.ShardPart(
            n_rows=1, n_regions=many, columns=[constant] * 6, offset_coding=tables.OFFSET_CODING_PLAIN, frame=small
        ),
    }


@pytest.mark.timeout(300)
def test_bombs_do_not_go_off(server):
    asyncio.run(throw_bombs(server))
    server.check()


async def throw_bombs(server: ServerProcess) -> None:
    kinds = {
        tables.TensorDict: (pb.CONTENT_KIND_TENSORS, "tensors_digest"),
        tables.GeometryDict: (pb.CONTENT_KIND_GEOMETRIES, "geometries_digest"),
        tables.ShardPart: (pb.CONTENT_KIND_PART, "part_digest"),
    }
    part = make_part("slot-0")
    with Rendezvous.connect(server.address) as client:
        await asyncio.to_thread(client.put_table, part)
    right = {
        "part_digest": part.digest,
        "tensors_digest": part.tensors.digest,
        "geometries_digest": part.geometries.digest,
    }
    async with grpc.aio.insecure_channel(server.address) as channel:
        for what, bomb in bombs().items():
            kind, slot = kinds[type(bomb)]
            if isinstance(bomb, tables.ShardPart):
                bomb.tensors_digest, bomb.geometries_digest = part.tensors.digest, part.geometries.digest
            digest, blob = hashlib.sha256(what.encode()).digest(), bomb.SerializeToString()
            header = pb.PutTableRequest(header=pb.TableHeader(**{**right, slot: digest}))
            pieces = [blob[at : at + limits.CHUNK_BYTES] for at in range(0, len(blob), limits.CHUNK_BYTES)]
            chunks = [
                pb.PutTableRequest(chunk=pb.Chunk(kind=kind, digest=digest, total_bytes=len(blob), data=piece))
                for piece in pieces
            ]
            error = await call(channel, "PutTable", [m.SerializeToString() for m in (header, *chunks)])
            assert error is not None, what
            assert not flaw("PutTable", [header.SerializeToString()], error), what
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, what
            bound = PART_GROWTH_BYTES if isinstance(bomb, tables.ShardPart) else GROWTH_BYTES
            assert server.peak_bytes() - server.start_bytes < bound, what


def bombs_elsewhere() -> dict[str, tuple[str, tables.NameSet | tables.CutTable]]:
    """What they are, the call that they go to, and the content."""
    frame, small = zeros(2 * GIB), zstandard.ZstdCompressor().compress(b"")
    constant, many = column(0, 1, tables.TRANSFORM_CONSTANT), 1 << 40
    dictionary = tables.TensorDict(
        n_tensors=10**6, names_bytes=10**6, columns=[constant] * 2, frame=small, names_frame=small
    )
    return {
        "names that say little": ("PutNames", tables.NameSet(n_names=1, names_bytes=2, frame=frame)),
        "names of 2 GiB": ("PutNames", tables.NameSet(n_names=many, names_bytes=2 * GIB, frame=frame)),
        "10**7 names": ("PutNames", tables.NameSet(n_names=10**7, names_bytes=10**7, frame=zeros(16 << 20))),
        "2**40 axes": (
            "PutCuts",
            tables.CutTable(n_axes=many, n_coordinates=many, columns=[constant] * 2, frame=small),
        ),
        "2**30 coordinates": (
            "PutCuts",
            tables.CutTable(
                tensors=dictionary, n_axes=8 * 10**6, n_coordinates=GIB, columns=[constant] * 2, frame=small
            ),
        ),
        "coordinates that say little": (
            "PutCuts",
            tables.CutTable(tensors=dictionary, n_axes=1, n_coordinates=1, columns=[column(8)] * 2, frame=frame),
        ),
    }


@pytest.mark.timeout(300)
def test_other_bombs_do_not_go_off(server):
    async def run() -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            for what, (name, bomb) in bombs_elsewhere().items():
                blob, digest = bomb.SerializeToString(), hashlib.sha256(what.encode()).digest()
                if name == "PutNames":
                    request = pb.PutNamesRequest(digest=digest, total_bytes=len(blob), data=blob)
                else:
                    request = pb.PutCutsRequest(model="qwen", group="g", member="r0", digest=digest, cuts=blob)
                error = await call(channel, name, [request.SerializeToString()])
                assert error is not None, what
                assert not flaw(name, [request.SerializeToString()], error), what
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, what
                assert server.peak_bytes() - server.start_bytes < PART_GROWTH_BYTES, what

    asyncio.run(run())
    server.check()


def test_a_message_over_the_limit_is_refused_by_its_size(server):
    async def run() -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            error = await call(channel, "OpenEpoch", [bytes(limits.MAX_MESSAGE_BYTES + 1)])
            assert error is not None
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(run())
    server.check()


def test_a_table_larger_than_allowed_is_refused_by_what_it_says(server):
    digest = bytes(32)
    header = pb.TableHeader(part_digest=digest, tensors_digest=digest, geometries_digest=digest)
    for total_bytes, n_bytes, field in (
        (limits.MAX_TABLE_BYTES + 1, 10, "chunk.total_bytes"),
        (10, 11, "chunk.data"),
        (11, 10, "chunk.data"),
    ):
        chunk = pb.Chunk(kind=pb.CONTENT_KIND_PART, digest=digest, total_bytes=total_bytes, data=bytes(n_bytes))
        messages = [pb.PutTableRequest(header=header), pb.PutTableRequest(chunk=chunk)]

        async def run(messages: list[pb.PutTableRequest] = messages) -> grpc.aio.AioRpcError | None:
            async with grpc.aio.insecure_channel(server.address) as channel:
                return await call(channel, "PutTable", [m.SerializeToString() for m in messages])

        error = asyncio.run(run())
        assert error is not None
        details = [value for key, value in error.trailing_metadata() or () if key == DETAIL_KEY]
        assert pb.Error.FromString(details[0]).field == field
