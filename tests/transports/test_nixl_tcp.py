"""NIXL where UCX has nothing but TCP: it emulates reads, a stopped peer answers nothing, and only deadlines help."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.ports import lasting_port

from reshard.transports import (
    Allocation,
    PeerError,
    PoisonedMemoryError,
    Prepared,
    TransferError,
    TransferTimeoutError,
    Transport,
    TransportError,
    open_transport,
    read,
)
from reshard.transports.peer_process import PeerProcess, kill_a_reader, pattern
from reshard.transports.registry import probe
from reshard.transports.testing import rows
from reshard.transports.testing.harness import SLACK_S

pytestmark = [
    pytest.mark.skipif(bool(probe("nixl")), reason=f"nixl does not work here: {probe('nixl')}"),
    pytest.mark.slow,
]

NBYTES = 32 << 20
CONNECT_S, READ_S = 20.0, 30.0
KNOWN_ENDS = ("stubs.c", "Endpoint timeout")
"""In what UCX says when it ends an owner over TCP: an assertion of `uct_tcp_ep_pending_purge`, a reply that fails."""


@dataclass
class Reading:
    """A transport that reads, and where it reads to."""

    transport: Transport
    target: Allocation

    def prepare(self, endpoint: bytes, remote: int, name: str, piece: int = 1 << 16) -> Prepared:
        peer = self.transport.connect(endpoint, timeout_s=CONNECT_S, name=name)
        step = np.arange(NBYTES // piece)[::-1] * piece
        return self.transport.prepare(peer, rows(self.target.region.address + step, piece), rows(remote + step, piece))

    def assert_reads(self, prepared: Prepared, seed: int) -> None:
        self.target.array[:] = 0xA5
        read(self.transport, [prepared], timeout_s=READ_S)
        assert np.array_equal(self.target.array, pattern(NBYTES, seed))


@pytest.fixture(params=["tcp", "cma"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")  # both for the agent here and, inherited, for the peers
    return str(request.param)


@pytest.fixture
def reading(path: str) -> Iterator[Reading]:
    transport = open_transport("nixl")
    try:
        target = transport.allocate(NBYTES)
        transport.register([target.region])
        yield Reading(transport, target)
    finally:
        transport.close()


@pytest.mark.parametrize("path", ["tcp"], indirect=True)
def test_stopped_peer(reading, path):
    """The whole way: deadline, poisoned range, refusal, quarantine lifted, no late byte; a healthy peer all along."""
    with PeerProcess("nixl") as healthy, PeerProcess("nixl") as victim:
        good = reading.prepare(*healthy.serve(NBYTES, 1), "healthy")
        bad = reading.prepare(*victim.serve(NBYTES, 2), "victim")
        reading.assert_reads(bad, 2)
        victim.signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(TransferTimeoutError, match="victim") as caught:
            read(reading.transport, [bad], timeout_s=1.0)
        assert time.monotonic() - start < 1.0 + SLACK_S
        assert reading.transport.quarantined(), "NIXL never ends a read from a stopped peer by itself"
        region = reading.target.region
        assert all(region.address <= a < b <= region.stop for a, b in caught.value.poisoned)
        with pytest.raises(PoisonedMemoryError):
            read(reading.transport, [good], timeout_s=5.0)
        reading.transport.wait_quarantine(timeout_s=60.0)
        assert reading.transport.quarantined() == ()
        reading.target.array[:] = 0xA5
        victim.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert (reading.target.array == 0xA5).all(), "bytes landed after the quarantine was lifted"
        reading.assert_reads(good, 1)


@pytest.mark.parametrize("path", ["tcp"], indirect=True)
@pytest.mark.parametrize("metadata", ["blob", "listener"])
def test_a_stopped_peer_is_not_connected(reading, path, metadata):
    """Whichever way its metadata come: NIXL would wait for ever."""
    settings = {"metadata": metadata, "listen_host": "127.0.0.1"}
    with PeerProcess("nixl", settings) as victim, open_transport("nixl", **settings) as transport:
        message, _ = victim.serve(NBYTES, 1)
        victim.signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises((PeerError, TransferTimeoutError)) as caught:
            transport.connect(message, timeout_s=1.0, name="victim")
        assert time.monotonic() - start < 1.0 + SLACK_S
        assert caught.value.peer == "victim"
        victim.signal(signal.SIGKILL)
    with PeerProcess("nixl") as healthy:
        reading.assert_reads(reading.prepare(*healthy.serve(NBYTES, 2), "healthy"), 2)


@pytest.mark.parametrize("path", ["tcp"], indirect=True)
def test_another_life_on_the_same_port(reading, path, monkeypatch):
    """Over TCP one read at an address of the old life would kill the new one."""
    port = lasting_port("")
    fixed = {"UCX_TCP_PORT_RANGE": f"{port}-{port + 20}"}
    with PeerProcess("nixl", environment=fixed) as first:
        message, _ = first.serve(NBYTES, 1)
    with PeerProcess("nixl", environment=fixed) as second:
        served = second.serve(NBYTES, 2)
        with pytest.raises((PeerError, TransferTimeoutError)):
            reading.transport.connect(message, timeout_s=3.0, name="first")
        reading.assert_reads(reading.prepare(*served, "second"), 2)
        assert second.alive


@pytest.mark.parametrize("path", ["tcp"], indirect=True)
@pytest.mark.parametrize("piece", [1 << 14, 1 << 20])
def test_a_reader_killed_in_mid_read(reading, path, piece, tmp_path):
    """The limit of docs/transports.md: the owner serves on, whole; or UCX has ended it, in one of its known ways.

    In both cases the next reader knows within its deadline, and other owners are read as before.
    """
    errors = tmp_path / "owner.txt"
    with errors.open("wb") as file, PeerProcess("nixl", errors=file.fileno()) as owner, PeerProcess("nixl") as other:
        message, address = owner.serve(NBYTES, 1)
        healthy = reading.prepare(*other.serve(NBYTES, 2), "other")
        for round_ in range(2):
            kill_a_reader("nixl", message, address, NBYTES, 0.1, piece=piece)
            start = time.monotonic()
            try:
                next_read = reading.prepare(message, address, f"owner-{round_}", piece)
                reading.assert_reads(next_read, 1)
                next_read.peer.close()
            except (PeerError, TransferError):
                assert time.monotonic() - start < CONNECT_S + READ_S + SLACK_S
                assert ended_by_ucx(owner, errors)
                break
        reading.transport.wait_quarantine(timeout_s=60.0)
        reading.assert_reads(healthy, 2)


def ended_by_ucx(owner: PeerProcess, errors: Path) -> bool:
    """Whether an owner died as UCX kills it: by an assertion or a fatal error of its own, or a SIGSEGV in it."""
    stop = time.monotonic() + 30.0
    while owner.alive and time.monotonic() < stop:
        time.sleep(0.05)
    code, said = owner.close(), errors.read_text(errors="replace")
    return code == -signal.SIGSEGV or (code == -signal.SIGABRT and any(words in said for words in KNOWN_ENDS))


def test_an_end_that_is_not_ucxs_is_told_apart(tmp_path):
    errors = tmp_path / "owner.txt"
    errors.write_text("")
    for signal_, expected in ((signal.SIGKILL, False), (signal.SIGABRT, False), (signal.SIGSEGV, True)):
        with PeerProcess("memory") as owner:
            owner.serve(64, 1)
            owner.signal(signal_)
            assert ended_by_ucx(owner, errors) is expected
    with PeerProcess("memory") as owner:
        owner.serve(64, 1)
        errors.write_text("[vm:1:0:2]       stubs.c:107  Assertion `0' failed\n")
        owner.signal(signal.SIGABRT)
        assert ended_by_ucx(owner, errors)


def test_owner_closes_while_it_is_read(reading, path):
    for round_ in range(3):
        with PeerProcess("nixl") as owner:
            prepared = reading.prepare(*owner.serve(NBYTES, 1), f"owner-{round_}", 1 << 14)
            ended: list[TransportError] = []

            def read_on(prepared: Prepared = prepared, ended: list[TransportError] = ended) -> None:
                try:
                    while True:
                        read(reading.transport, [prepared], timeout_s=5.0)
                except TransportError as error:
                    ended.append(error)

            thread = threading.Thread(target=read_on)
            thread.start()
            time.sleep(0.05 * (round_ + 1))
            owner.ask("close")
            thread.join(90)
            assert len(ended) == 1
            reading.transport.wait_quarantine(timeout_s=60.0)
            prepared.peer.close()
            assert owner.close() == 0
    with PeerProcess("nixl") as other:
        reading.assert_reads(reading.prepare(*other.serve(NBYTES, 3), "other"), 3)
