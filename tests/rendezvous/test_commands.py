"""`reshard serve` and `reshard ps` as processes: TLS and tokens, the access log, live views, and faults in words."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs typer")
pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'reshard[rendezvous]'")
from tests.ports import lasting_port
from tests.rendezvous.support import receiver, trainer, wait

from reshard.refit.ps import read_token, tls_files
from reshard.rendezvous.client import Rendezvous
from reshard.rendezvous.errors import InvalidRequestError, RendezvousError, RendezvousUnavailableError
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.service import serve
from reshard.rendezvous.types import TLSFiles

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
COMMAND = [sys.executable, "-m", "reshard"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=100, env=ENVIRONMENT, check=False
    )


@pytest.fixture
def watched() -> Iterator[tuple[str, Rendezvous, list[subprocess.Popen[str]]]]:
    """A service, a client of it, and a list of processes that are ended with it."""
    started: list[subprocess.Popen[str]] = []
    server = serve()
    try:
        with Rendezvous.connect(server.address) as client:
            trainer(client, "t0", ttl_s=300.0)
            yield server.address, client, started
            for process in started:
                server.close(0.0)
                process.kill()
                process.wait(60)
                if process.stdout is not None:
                    process.stdout.close()
    finally:
        server.close(0.0)


def test_ps_watches_in_json_lines(
    watched: tuple[str, Rendezvous, list[subprocess.Popen[str]]],
) -> None:
    address, client, started = watched
    process = subprocess.Popen(
        [*COMMAND, "ps", address, "--json", "--watch", "0.1", "--timeout", "30"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    started.append(process)
    assert process.stdout is not None
    lines = iter(process.stdout)
    assert [worker["name"] for worker in json.loads(next(lines))["workers"]] == ["t0"]
    trainer(client, "t1", ttl_s=300.0)
    names = next(n for line in lines if len(n := {w["name"] for w in json.loads(line)["workers"]}) > 1)
    assert names == {"t0", "t1"}
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def test_ps_says_when_what_it_watches_is_gone() -> None:
    server = serve(f"127.0.0.1:{lasting_port()}")
    process = subprocess.Popen(
        [*COMMAND, "ps", server.address, "--watch", "0.1", "--timeout", "4", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["workers"] == []
        server.close(0.0)
        failed = next(said for line in process.stdout if "error" in (said := json.loads(line)))
        assert failed["error"].startswith("RendezvousUnavailableError: ")
        with serve(server.address):
            back = next(said for line in process.stdout if "error" not in (said := json.loads(line)))
            assert back["workers"] == []
    finally:
        process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()
        server.close(0.0)


def test_ps_watches_in_plain_text_when_piped(watched: tuple[str, Rendezvous, list[subprocess.Popen[str]]]) -> None:
    address, _, started = watched
    process = subprocess.Popen(
        [*COMMAND, "ps", address, "--watch", "0.1"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    started.append(process)
    assert process.stdout is not None
    heads = [line for line, _ in zip((t for t in process.stdout if "rendezvous " in t), range(3), strict=False)]
    assert len(heads) == 3
    assert all(address in head and "\x1b" not in head for head in heads)


def test_ps_draws_on_a_terminal(watched: tuple[str, Rendezvous, list[subprocess.Popen[str]]]) -> None:
    address, client, started = watched
    pytest.importorskip("rich", reason="the live view needs rich")
    ours, theirs = pty.openpty()
    try:
        environment = {**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"}
        process = subprocess.Popen(
            [*COMMAND, "ps", address, "--watch", "0.1"], stdout=theirs, stdin=theirs, text=True, env=environment
        )
        started.append(process)
        os.close(theirs)
        said, joined, deadline = "", False, time.monotonic() + 90.0
        while "name=t1" not in said and time.monotonic() < deadline:
            if select.select([ours], [], [], 1.0)[0]:
                said += os.read(ours, 65536).decode(errors="replace")
            if "name=t0" in said and not joined:
                joined = True
                trainer(client, "t1", ttl_s=300.0)
        assert "\x1b[?1049h" in said, "the alternate screen"
        assert "name=t1" in said
        process.send_signal(signal.SIGINT)
        while select.select([ours], [], [], 5.0)[0]:
            try:
                if not os.read(ours, 65536):
                    break
            except OSError:
                break
        assert process.wait(60) == 0
    finally:
        os.close(ours)


def test_serve_and_ps_with_certificates_and_a_token(certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-7\n")
    pem = {
        name: str(certificates / name) for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
    }
    token = ("--token-file", str(tmp_path / "token"))
    process = subprocess.Popen(
        [
            *COMMAND, "serve", "--listen", "127.0.0.1:0", "--tls-cert", pem["server.pem"], "--tls-key",
            pem["server.key"], "--client-ca", pem["ca.pem"], *token, "--retry", "attempts=5,deadline_s=9",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        files = ("--tls-ca", pem["ca.pem"], "--tls-cert", pem["client.pem"], "--tls-key", pem["client.key"])
        shown = run("ps", address, *files, *token, "--timeout", "60")
        assert shown.returncode == 0, shown.stderr
        assert "workers: 0" in shown.stdout
        assert run("ps", address, *files, "--timeout", "60").returncode == 1, "no token"
        assert run("ps", address, *token, "--timeout", "2").returncode == 1, "no TLS"

        tls = TLSFiles(pem["ca.pem"], pem["client.pem"], pem["client.key"])
        with Rendezvous.connect(address, token="secret-7", tls=tls) as client:
            reader = receiver(client, "r0", ttl_s=300.0)
            assert reader.retry_hint == RetryHint(5, deadline_s=9.0)
            failures: list[BaseException] = []

            def await_it() -> None:
                try:
                    wait(client, "r0", reader, timeout_s=8.0)
                except RendezvousUnavailableError as error:
                    failures.append(error)

            waiter = threading.Thread(target=await_it)
            waiter.start()
            time.sleep(1.0)
            client.describe()  # on the same connection, after the wait
            process.send_signal(signal.SIGTERM)
            _, logged = process.communicate(timeout=60)
            assert process.returncode == 0, "a graceful end, although a call waited"
            waiter.join(60.0)
            assert len(failures) == 1
        calls = [json.loads(line) for line in logged.splitlines() if line.startswith("{")]
        assert {"Describe", "Register", "AwaitVersion"} <= {call["method"] for call in calls}
        assert {call["code"] for call in calls if call["method"] == "Describe"} == {"OK", "UNAUTHENTICATED"}
        assert "secret-7" not in logged
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"", "empty"), (b" \n", "empty"), (b"\xff\xfe", "printable"), (b"a\x01b", "printable")],
)
def test_token_files_that_hold_no_token(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RendezvousError, match=says) as caught:
        read_token(str(path))
    assert str(path) in str(caught.value)


def test_faults_of_the_command_line_are_told_in_a_line(tmp_path: Path) -> None:
    done = run("ps", "127.0.0.1:9", "--token-file", str(tmp_path / "none"), "--timeout", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("reshard: RendezvousError: token file")
    assert "Traceback" not in done.stderr
    done = run("serve", "--listen", "127.0.0.1:0", "--retry", "attempts=0")
    assert done.returncode == 1
    assert "retry.attempts" in done.stderr
    assert "Traceback" not in done.stderr


def test_any_tls_file_means_tls_and_a_certificate_needs_its_key() -> None:
    for cert, key in (("client.pem", ""), ("", "client.key")):
        with pytest.raises(InvalidRequestError, match="go together"):
            tls_files("", cert, key, tls=False)
    assert tls_files("", "", "", tls=False) is None
    assert tls_files("", "", "", tls=True) == TLSFiles()
    assert tls_files("ca.pem", "", "", tls=False) == TLSFiles("ca.pem")
    assert tls_files("", "client.pem", "client.key", tls=False) == TLSFiles(None, "client.pem", "client.key")
