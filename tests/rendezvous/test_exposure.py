"""Who may bind, and who may call: loopback, TLS, client certificates, tokens."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from reshard.rendezvous import exposure, service
from reshard.rendezvous.client import Rendezvous
from reshard.rendezvous.errors import (
    AuthenticationError,
    InvalidRequestError,
    RendezvousError,
    RendezvousUnavailableError,
)
from reshard.rendezvous.exposure import TokenFile, is_loopback
from reshard.rendezvous.service import serve
from reshard.rendezvous.store import MemoryStore, Store
from reshard.rendezvous.types import TLSFiles

pytest.importorskip("grpc", reason="grpcio is not installed")


@pytest.mark.parametrize(
    ("listen", "extra", "lacks"),
    [
        ("0.0.0.0:0", {}, "lacks TLS .* and a client CA or a token"),
        ("[::]:0", {}, "lacks TLS"),
        ("node-3:0", {}, "lacks TLS"),
        ("0.0.0.0:0", {"token_file": "t"}, "lacks TLS"),
        ("0.0.0.0:0", {"tls_cert": "c", "tls_key": "k"}, "lacks a client CA or a token"),
        ("127.0.0.1:0", {"tls_cert": "c"}, "tls_key: .*go together"),
        ("127.0.0.1:0", {"client_ca": "c"}, "client_ca: .*needs"),
        ("127.0.0.1", {}, "no host:port"),
        ("127.0.0.1:70000", {}, "no host:port"),
        ("::1:0", {}, "in brackets"),
    ],
)
def test_binds_that_are_refused(listen: str, extra: dict[str, str], lacks: str) -> None:
    with pytest.raises(InvalidRequestError, match=lacks):
        serve(listen=listen, **extra)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("[::]", False), ("10.0.0.1", False), ("localhost.evil.example", False), ("", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_told_to_be_insecure_it_binds() -> None:
    with serve(listen="0.0.0.0:0", insecure=True) as server:
        port = server.address.rpartition(":")[2]
        with Rendezvous.connect(f"127.0.0.1:{port}") as client:
            assert client.describe().store == "memory"


def test_a_taken_port_and_unknown_stores_are_named() -> None:
    with serve() as server, pytest.raises(RendezvousUnavailableError, match="cannot bind"):
        serve(listen=server.address)
    with pytest.raises(RendezvousError, match="unknown store 'etcd'"):
        serve(store="etcd")
    with pytest.raises(RendezvousUnavailableError, match="the store is not reached"):
        serve(store="redis://127.0.0.1:1/0")


@pytest.mark.parametrize("store", ["valkey://bob:hunter2@db", "redis+tls://:hunter2@db/0?x=1", "x?password=hunter2"])
def test_a_store_is_named_without_its_password(store: str) -> None:
    with pytest.raises(RendezvousError, match="unknown store") as refused:
        serve(store=store)
    assert "hunter2" not in str(refused.value)


@pytest.mark.redis
def test_the_log_names_the_store_without_its_password(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    import redis

    with redis.Redis.from_url(redis_url) as client:
        everything = {"keys": ["*"], "channels": ["*"], "categories": ["+@all"]}
        client.acl_setuser("bob", enabled=True, passwords=["+hunter2"], **everything)
        store = redis_url.replace("//", "//bob:hunter2@")
        try:
            with caplog.at_level(logging.DEBUG), serve(store=store) as server, Rendezvous.connect(server.address) as c:
                assert c.describe().store == "redis"
            assert "on store redis://...@127.0.0.1" in caplog.text
            assert "hunter2" not in caplog.text
        finally:
            client.acl_deluser("bob")


def test_what_refuses_to_start_has_opened_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    async def open_store(url: str) -> Store:
        opened.append(url)
        return MemoryStore()

    monkeypatch.setattr(service, "open_store", open_store)
    with pytest.raises(RendezvousError, match="token file"):
        serve(token_file=str(tmp_path / "none"))
    assert not opened, "nobody would close it"


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("first\nsecond\n")
    with serve(token_file=str(file)) as server:
        for token in ("first", "second"):
            with Rendezvous.connect(server.address, token=token) as client:
                client.describe()
        for token, fault in ((None, "no bearer token"), ("third", "not one that this service knows"), ("", "no")):
            with (
                Rendezvous.connect(server.address, token=token) as client,
                pytest.raises(AuthenticationError, match=fault),
            ):
                client.describe()
        file.write_text("third\n")
        time.sleep(1.2)
        with Rendezvous.connect(server.address, token="third") as client:
            client.describe()
        with Rendezvous.connect(server.address, token="first") as client, pytest.raises(AuthenticationError):
            client.describe()
    file.write_text("\n")
    with pytest.raises(RendezvousError, match="holds no token"):
        serve(token_file=str(file))


def test_tokens_outlive_their_file_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposure, "_LOOK_EVERY_S", 0.0)
    file = tmp_path / "tokens"
    file.write_text("first\n")
    tokens = TokenFile(str(file))
    file.write_text("\n")
    for _ in range(2):
        tokens.check((("authorization", "Bearer first"),))
    assert caplog.text.count("holds no token any more") == 1
    file.write_text("nobody's\n")
    with pytest.raises(AuthenticationError):
        tokens.check((("authorization", "Bearer first"),))


def test_tls_and_mutual_tls(certificates: Path) -> None:
    def path(name: str) -> str:
        return str(certificates / name)

    with serve(tls_cert=path("server.pem"), tls_key=path("server.key")) as server:
        with Rendezvous.connect(server.address, tls=TLSFiles(ca=path("ca.pem"))) as client:
            client.describe()
        with (
            Rendezvous.connect(server.address, tls=TLSFiles(ca=path("stranger.pem"))) as client,
            pytest.raises(RendezvousUnavailableError),
        ):
            client.describe(timeout_s=2.0)
        with Rendezvous.connect(server.address) as client, pytest.raises(RendezvousUnavailableError):
            client.describe(timeout_s=2.0)
    settings = {"tls_cert": path("server.pem"), "tls_key": path("server.key"), "client_ca": path("ca.pem")}
    with serve(listen="0.0.0.0:0", **settings) as server:  # type: ignore[arg-type]
        address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
        pair = TLSFiles(path("ca.pem"), path("client.pem"), path("client.key"))
        with Rendezvous.connect(address, tls=pair) as client:
            client.describe()
        with (
            Rendezvous.connect(address, tls=TLSFiles(ca=path("ca.pem"))) as client,
            pytest.raises(RendezvousUnavailableError),
        ):
            client.describe(timeout_s=2.0)
    with pytest.raises(RendezvousError, match="cannot read"):
        serve(tls_cert=path("none.pem"), tls_key=path("server.key"))
    with pytest.raises(RendezvousError, match="holds no PEM"):
        serve(tls_cert=path("ext"), tls_key=path("server.key"))
    with pytest.raises(InvalidRequestError, match="cert and key go together"):
        Rendezvous.connect("127.0.0.1:1", tls=TLSFiles(cert=path("client.pem")))


def test_a_key_of_another_certificate_and_roots_that_are_none_are_named_at_once(certificates: Path) -> None:
    """gRPC takes them, and says of each later call that the service cannot be reached."""

    def path(name: str) -> str:
        return str(certificates / name)

    server = {"tls_cert": path("server.pem"), "tls_key": path("server.key")}
    with pytest.raises(RendezvousError, match=r"server\.pem and .*client\.key are not a certificate and its key"):
        serve(**server | {"tls_key": path("client.key")})
    with pytest.raises(RendezvousError, match=r"client\.key and .*client\.key are not a certificate and its key"):
        serve(tls_cert=path("client.key"), tls_key=path("client.key"))
    with pytest.raises(RendezvousError, match=r"client\.key holds no certificate of an authority"):
        serve(**server, client_ca=path("client.key"))
    with pytest.raises(RendezvousError, match=r"client\.pem and .*server\.key are not a certificate and its key"):
        Rendezvous.connect("127.0.0.1:1", tls=TLSFiles(path("ca.pem"), path("client.pem"), path("server.key")))
    with pytest.raises(RendezvousError, match=r"client\.key holds no certificate of an authority"):
        Rendezvous.connect("127.0.0.1:1", tls=TLSFiles(ca=path("client.key")))


def test_a_token_in_plain_text_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for address, warned in (("127.0.0.1:1", 0), ("node-3.example:1", 1)):
        caplog.clear()
        Rendezvous.connect(address, token="secret").close()
        said = [record.getMessage() for record in caplog.records if "plain text" in record.getMessage()]
        assert len(said) == warned
        assert not any("secret" in text for text in said)
