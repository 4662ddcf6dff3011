"""The command line: `version`, `doctor`, `serve` and `ps`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs typer")

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from reshard.refit.cli import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def reshard(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=False
    )


def test_version_and_help() -> None:
    import reshard as package

    assert reshard("version").stdout.strip() == package.__version__
    help_text = reshard("--help").stdout
    assert all(command in help_text for command in ("demo", "serve", "ps", "doctor", "version"))


def test_doctor_names_every_transport() -> None:
    done = reshard("doctor")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("memory", "nixl", "ucx"))


@pytest.fixture
def service() -> Iterator[tuple[subprocess.Popen[str], str]]:
    pytest.importorskip("grpc", reason="the rendezvous service needs grpcio")
    process = subprocess.Popen(
        [*COMMAND, "serve", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving the rendezvous on 127.0.0.1:")
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


def test_serve_and_ps(service: tuple[subprocess.Popen[str], str]) -> None:
    from reshard.rendezvous import Rendezvous
    from reshard.rendezvous.types import WorkerInfo

    process, address = service
    client = Rendezvous.connect(address)
    worker = client.register(WorkerInfo("trainer", "m", "host", "trainer-3"))
    try:
        text = reshard("ps", address)
        assert text.returncode == 0, text.stderr
        assert "workers: 1" in text.stdout
        assert "name=trainer-3" in text.stdout
        described = json.loads(reshard("ps", address, "--json").stdout)
        assert [worker["name"] for worker in described["workers"]] == ["trainer-3"]
    finally:
        worker.close()
        client.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_ps_escapes_what_would_end_a_line_or_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("grpc", reason="the rendezvous service needs grpcio")
    from reshard.refit.ps import show
    from reshard.rendezvous import Rendezvous
    from reshard.rendezvous.service import serve
    from reshard.rendezvous.types import WorkerInfo

    with serve("127.0.0.1:0") as server, Rendezvous.connect(server.address) as client:
        client.register(WorkerInfo("trainer", "möd", "host", "t\x1b[2J\ngroups: 9"))
        show(server.address, None, None, as_json=False, timeout_s=30.0)
    rows = capsys.readouterr().out.splitlines()
    (worker,) = [row for row in rows if "role=trainer" in row]
    assert "model=möd host=host name=t\\x1b[2J\\ngroups: 9 ttl_s" in worker
    assert "groups: 0" in rows


def test_ps_of_nobody_fails_without_a_trace() -> None:
    pytest.importorskip("grpc", reason="the rendezvous client needs grpcio")
    done = reshard("ps", "127.0.0.1:9", "--timeout", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("reshard: Rendezvous")
    assert "Traceback" not in done.stderr


def test_an_open_bind_is_refused() -> None:
    pytest.importorskip("grpc", reason="the rendezvous service needs grpcio")
    done = reshard("serve", "--listen", "0.0.0.0:0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
