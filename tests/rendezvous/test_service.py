"""The service around the calls: health, reflection, metrics, logs, shutdown, and clients that come and go."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from tests.rendezvous.support import MODEL, make_part, make_record, receiver, wait

from reshard.planner.errors import MissingDependencyError
from reshard.rendezvous.aio import AsyncRendezvous
from reshard.rendezvous.client import Rendezvous
from reshard.rendezvous.errors import (
    InvalidRequestError,
    RendezvousError,
    RendezvousUnavailableError,
)
from reshard.rendezvous.service import serve
from reshard.rendezvous.types import Decision, VersionKey, WorkerInfo

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_health_and_reflection() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    server = serve()
    try:
        with grpc.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "reshard.proto.v1.RendezvousService"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=60)
            listed = {service.name for service in answer.list_services_response.service}
            assert "reshard.proto.v1.RendezvousService" in listed
            symbol = "reshard.proto.v1.RendezvousService"
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
            (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=60)
            assert answer.file_descriptor_response.file_descriptor_proto
    finally:
        server.close(1.0)


def test_metrics_and_access_log(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    caplog.set_level(logging.INFO, "reshard.rendezvous.access")
    with serve(metrics_listen="127.0.0.1:0") as server, Rendezvous.connect(server.address) as client:
        client.open_epoch(MODEL, "run")
        with pytest.raises(InvalidRequestError):
            client._thread.call(client._client.backend.open_epoch("", "run", 5.0))
        # a call is counted right after its answer was sent
        calls = 'reshard_rendezvous_calls_total{code="%s",method="OpenEpoch"} 1.0'
        text, deadline = "", time.monotonic() + 60.0
        while calls % "INVALID_ARGUMENT" not in text and time.monotonic() < deadline:
            with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=60) as response:
                text = response.read().decode()
    assert calls % "OK" in text
    assert calls % "INVALID_ARGUMENT" in text
    assert 'reshard_rendezvous_call_seconds_count{method="OpenEpoch"} 2.0' in text
    lines = [json.loads(record.message) for record in caplog.records if record.name == "reshard.rendezvous.access"]
    lines = [line for line in lines if line["method"] == "OpenEpoch"]
    assert [line["code"] for line in lines] == ["OK", "INVALID_ARGUMENT"]
    assert lines[1]["error"] == "model: empty name"
    assert all(line["in"] > 0 and line["ms"] >= 0 and line["peer"] for line in lines)


def test_a_closing_server_ends_waits_at_once() -> None:
    server = serve()
    client = Rendezvous.connect(server.address)
    try:
        reader = receiver(client, "r0")
        failures: list[BaseException] = []

        def await_it() -> None:
            try:
                wait(client, "r0", reader, timeout_s=6.0)
            except RendezvousError as error:
                failures.append(error)

        thread = threading.Thread(target=await_it)
        thread.start()
        time.sleep(0.5)
        started = time.monotonic()
        server.close(grace_s=60.0)
        assert time.monotonic() - started < 30.0, "the wait had a grace of 60 s, and is ended at once"
        assert server.wait(0.1)
        server.close()
        thread.join(60.0)
        assert [type(failure) for failure in failures] == [RendezvousUnavailableError]
    finally:
        client.close()
        server.close()


async def refit_async(client: AsyncRendezvous) -> Decision:
    async with client:
        worker = await client.register(WorkerInfo("trainer", MODEL, "h", "t0", {"memory": b"x"}))
        reader = await client.register(WorkerInfo("receiver", MODEL, "h", "r0"))
        waiting = asyncio.create_task(
            client.await_version(MODEL, group="g", members=["r0"], member="r0", worker=reader, timeout_s=30.0)
        )
        await asyncio.sleep(0.05)
        digest = await client.put_table(make_part("t0"))
        epoch = await client.open_epoch(MODEL, "run")
        uid = await client.open_version(VersionKey(MODEL, epoch, 0), ["t0"])
        await client.publish_slot(uid, make_record("t0", worker.id, digest), worker)
        manifest = await waiting
        tables = await client.get_tables([digest])
        assert tables[digest].digest == digest
        lease = await client.renew_lease(manifest.lease)
        await client.release_lease(lease)
        txn = manifest.transaction
        await client.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
        facts = await client.installed(txn, "r0", True, timeout_s=30.0)
        assert (await client.ask_decision(txn)).outcome is facts.outcome
        await client.close_admission(uid)
        await client.wait_leases(uid, timeout_s=30.0)
        assert await client.retire(uid)
        assert len((await client.describe()).workers) == 2
        return facts.outcome


def test_asyncio_has_the_same_calls() -> None:
    assert asyncio.run(refit_async(AsyncRendezvous.in_process())) is Decision.SERVE

    async def remote(address: str) -> Decision:
        return await refit_async(AsyncRendezvous.connect(address))

    with serve() as server:
        assert asyncio.run(remote(server.address)) is Decision.SERVE
    public = {name for name in dir(Rendezvous) if not name.startswith("_")}
    assert public == {name for name in dir(AsyncRendezvous) if not name.startswith("_")} - {"forget"}


def test_a_process_may_end_without_closing_anything() -> None:
    code = (
        "import sys\n"
        "from reshard.rendezvous import Rendezvous, WorkerInfo\n"
        "client = Rendezvous.connect(sys.argv[1])\n"
        "worker = client.register(WorkerInfo('trainer', 'm', 'h', 't'))\n"
        "local = Rendezvous.in_process()\n"
        "other = local.register(WorkerInfo('trainer', 'm', 'h', 't'))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with serve() as server:
        command = [sys.executable, "-c", code, server.address]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_client_does_not_cross_a_fork() -> None:
    client = Rendezvous.in_process()
    client._thread.pid -= 1  # as the child of a fork would see it
    try:
        with pytest.raises(RendezvousError, match="made before a fork"):
            client.describe()
    finally:
        client._thread.pid += 1
        client.close()


def test_without_grpc_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "from reshard.rendezvous import Rendezvous\n"
        "Rendezvous.in_process().close()\n"
        "Rendezvous.connect('127.0.0.1:1')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 1
    assert "pip install 'reshard[rendezvous]'" in ran.stderr
    assert MissingDependencyError.__name__ in ran.stderr


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("sys.modules['grpc_health'] = None", "'grpc_health' is needed here and not installed"),
        ("sys.modules['grpc_reflection'] = None", "'grpc_reflection' is needed here and not installed"),
        (
            "import google.protobuf.runtime_version as r; r.MAJOR -= 1",
            "'protobuf' is needed here and too old: Detected incompatible Protobuf Gencode/Runtime versions",
        ),
    ],
)
def test_a_part_of_the_extra_that_is_absent_or_too_old_is_named(spoil: str, words: str) -> None:
    """As in an environment that another package pins, or that was filled with ``--no-deps``."""
    code = f"""
import sys
{spoil}
from reshard.planner.errors import MissingDependencyError
from reshard.rendezvous.service import serve
try:
    serve("127.0.0.1:0")
except MissingDependencyError as error:
    print(error)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert words in ran.stdout, ran.stderr
    assert "pip install 'reshard[rendezvous]'" in ran.stdout
