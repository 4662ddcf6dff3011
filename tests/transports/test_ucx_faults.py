"""What must not hurt: peers that die, stop, close, restart or take their memory away, over CMA and over TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.ports import lasting_port
from tests.transports.ucx_peer import PeerProcess, rows

from reshard.transports import (
    Allocation,
    PeerError,
    Prepared,
    TransferTimeoutError,
    TransportError,
    decode_endpoint,
    encode_endpoint,
    open_transport,
    read,
)
from reshard.transports.ucx import UcxTransport
from reshard.transports.ucx.messages import IN_FLIGHT
from reshard.transports.ucx.payload import decode_address, encode_address
from reshard.transports.ucx.requests import N_CHUNKS

pytest.importorskip("cffi", reason="the ucx backend needs cffi")
if reason := UcxTransport.probe():
    pytest.skip(reason, allow_module_level=True)

NBYTES = 1 << 24
SETTINGS = {"cma": {}, "tcp": {"tls": "tcp"}}


FAST_OVER_TCP = pytest.mark.parametrize("path", [pytest.param("cma", marks=pytest.mark.slow), "tcp"], indirect=True)
"""For faults that the contract has over CMA already (`test_ucx.py`)."""


@pytest.fixture(params=list(SETTINGS))
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reader(path: str) -> Iterator[UcxTransport]:
    with open_transport("ucx", **SETTINGS[path]) as transport:
        assert isinstance(transport, UcxTransport)
        yield transport


@pytest.fixture
def target(reader: UcxTransport) -> Allocation:
    allocation = reader.allocate(NBYTES)
    reader.register([allocation.region])
    return allocation


@pytest.fixture
def start(path: str) -> Iterator[Callable[..., PeerProcess]]:
    running: list[PeerProcess] = []

    def run(**settings: object) -> PeerProcess:
        running.append(PeerProcess(NBYTES, seed=len(running), **{**SETTINGS[path], **settings}))
        return running[-1]

    yield run
    for peer in running:
        peer.__exit__(None, None, None)


def prepare(reader: UcxTransport, peer: PeerProcess, target: Allocation, name: str, piece: int = 1 << 14) -> Prepared:
    connected = reader.connect(peer.endpoint, timeout_s=60.0, name=name)
    return reader.prepare(connected, rows(target.region.address, NBYTES, piece), rows(peer.address, NBYTES, piece))


def assert_healthy(reader: UcxTransport, prepared: Prepared, peer: PeerProcess, target: Allocation) -> None:
    """A read from another peer succeeds, and neither process is the worse for wear."""
    target.array[:] = 0xA5
    read(reader, [prepared], timeout_s=60.0)
    assert np.array_equal(target.array, peer.content())
    assert peer.alive


@FAST_OVER_TCP
def test_killed_before_a_read(reader, target, start, path):
    with start() as healthy, start() as victim:
        good, bad = (prepare(reader, p, target, n) for p, n in ((healthy, "healthy"), (victim, "victim")))
        read(reader, [bad], timeout_s=60.0)
        assert np.array_equal(target.array, victim.content())
        victim.kill()
        with pytest.raises(PeerError, match="victim") as caught:
            read(reader, [bad], timeout_s=60.0)
        assert caught.value.peer == "victim"
        # A connection is dead after any error, and says why.
        with pytest.raises(PeerError, match="victim"):
            read(reader, [bad], timeout_s=60.0)
        assert_healthy(reader, good, healthy, target)


@FAST_OVER_TCP
def test_killed_during_a_read(reader, target, start, path):
    with start() as healthy, start() as victim:
        good, bad = (prepare(reader, p, target, n, 4096) for p, n in ((healthy, "healthy"), (victim, "victim")))
        outcome: list[str] = []

        def read_on() -> None:
            try:
                while True:
                    read(reader, [bad], timeout_s=60.0)
            except PeerError as error:
                outcome.append(error.peer)

        thread = threading.Thread(target=read_on)
        thread.start()
        time.sleep(0.1)
        victim.kill()
        thread.join(90)
        assert outcome == ["victim"]
        assert_healthy(reader, good, healthy, target)


def test_stopped_peer_times_out_over_tcp_and_writes_no_more(reader, target, start, path):
    with start() as healthy, start() as victim:
        good, bad = (prepare(reader, p, target, n, 4096) for p, n in ((healthy, "healthy"), (victim, "victim")))
        victim.stop()
        if path == "cma":
            # Copying a stopped process's memory needs nothing of it.
            read(reader, [bad], timeout_s=60.0)
            assert np.array_equal(target.array, victim.content())
            victim.resume()
            return
        with pytest.raises(TransferTimeoutError, match="victim"):
            read(reader, [bad], timeout_s=0.5)
        reader.wait_quarantine(timeout_s=60.0)
        assert reader.quarantined() == ()
        target.array[:] = 0xA5
        victim.resume()
        time.sleep(0.3)
        assert (target.array == 0xA5).all(), "an abandoned read wrote after the quarantine was lifted"
        assert_healthy(reader, good, healthy, target)


def test_stopped_in_the_middle_over_tcp(target, reader, start, path):
    if path == "cma":
        pytest.skip("a stopped process can be read over CMA")
    with start() as victim:
        bad = prepare(reader, victim, target, "victim", 4096)
        transfer = reader.post(bad)
        victim.stop()
        try:
            reader.wait([transfer], timeout_s=0.5)
        except TransferTimeoutError:
            reader.wait_quarantine(timeout_s=60.0)
            target.array[:] = 0xA5
            victim.resume()
            time.sleep(0.3)
            assert (target.array == 0xA5).all()


def test_unmapped_behind_our_back(reader, target, start, path):
    with start() as healthy, start() as victim:
        good, bad = (prepare(reader, p, target, n) for p, n in ((healthy, "healthy"), (victim, "victim")))
        victim.ask("unmap")
        with pytest.raises(PeerError, match="unmapped"):
            read(reader, [bad], timeout_s=60.0)
        assert victim.ask("cpu"), "the owner has survived"
        assert_healthy(reader, good, healthy, target)


@FAST_OVER_TCP
@pytest.mark.parametrize("piece", [4096, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_owner_closes_while_it_is_read(reader, target, start, path, piece):
    """UCX crashes if a worker with replies, or with copies, under way is destroyed."""
    for round_ in range(3):
        with start() as victim:
            bad = prepare(reader, victim, target, f"victim-{round_}", piece)
            ended: list[str] = []

            def read_on(bad: Prepared = bad, ended: list[str] = ended) -> None:
                try:
                    while True:
                        read(reader, [bad], timeout_s=60.0)
                except TransportError as error:
                    ended.append(str(error))

            thread = threading.Thread(target=read_on)
            thread.start()
            time.sleep(0.05 * (round_ + 1))
            assert victim.ask("close")
            assert victim.leave() == 0
            thread.join(90)
            assert len(ended) == 1
            bad.peer.close()


def test_reader_closes_while_it_reads(target, reader, start, path):
    with start() as victim, open_transport("ucx", **SETTINGS[path]) as second:
        allocation = second.allocate(NBYTES)
        second.register([allocation.region])
        peer = second.connect(victim.endpoint, timeout_s=60.0)
        piece = 4096
        prepared = second.prepare(
            peer, rows(allocation.region.address, NBYTES, piece), rows(victim.address, NBYTES, piece)
        )
        ended: list[str] = []

        def read_on() -> None:
            try:
                while True:
                    read(second, [prepared], timeout_s=60.0)
            except TransportError as error:
                ended.append(str(error))

        thread = threading.Thread(target=read_on)
        thread.start()
        time.sleep(0.1)
        second.close()
        thread.join(90)
        assert len(ended) == 1
        assert_healthy(reader, prepare(reader, victim, target, "other"), victim, target)


@pytest.mark.parametrize("where", ["this host", "another host"])
def test_another_life_on_the_same_port(reader, target, start, path, where):
    """A message of a life that is over finds another one at its address: it reads nothing, and harms nobody.

    UCX connects all the same, and over TCP one read at an address of the old life would kill the new one. On this host
    the process table tells; from another host only asking does.
    """
    port = lasting_port("")
    fixed = {"config": {"TCP_PORT_RANGE": f"{port}-{port}"}}
    with start(**fixed) as first:
        message = first.endpoint if where == "this host" else elsewhere(first.endpoint)
        assert first.leave() == 0
    with start(**fixed) as second:
        target.array[:] = 0xA5
        expected = "restarted or exited" if where == "this host" else "another process has taken its address"
        if path == "cma" and where == "another host":
            expected += "|cannot be reached"  # UCX may find out that shared memory of that process is gone
        with pytest.raises(PeerError, match=expected):
            reader.connect(message, timeout_s=60.0, name="second")
        assert (target.array == 0xA5).all()
        assert_healthy(reader, prepare(reader, second, target, "anew"), second, target)


def elsewhere(message: bytes) -> bytes:
    """Return the message as if it came from a host whose processes cannot be seen."""
    endpoint = decode_endpoint(message)
    address = decode_address(endpoint.payload, len(endpoint.regions))
    address = replace(address, process=replace(address.process, boot=bytes(16)))
    return encode_endpoint(replace(endpoint, payload=encode_address(address)))


def test_lists_of_one_peer_in_flight_together(reader, target, start, path):
    """Each has its own gate: one that is asked twice at once would lose its requests, and the lane stall for ever."""
    with start() as peer:
        connected = reader.connect(peer.endpoint, timeout_s=60.0, name="peer")
        here, there = rows(target.region.address, NBYTES, 1 << 18), rows(peer.address, NBYTES, 1 << 18)
        lists = [reader.prepare(connected, here[at::4], there[at::4]) for at in range(4)]
        for _ in range(20):
            read(reader, lists, timeout_s=60.0)
        assert np.array_equal(target.array, peer.content())
        native = connected.native
        assert (native.lane.ring.n_free, native.parcel_ring().n_free) == (N_CHUNKS, IN_FLIGHT)


def test_an_idle_server_sleeps(reader, target, start, path):
    with start() as peer:
        read(reader, [prepare(reader, peer, target, "peer")], timeout_s=60.0)
        before = peer.ask("cpu")
        time.sleep(1.0)
        after = peer.ask("cpu")
        assert isinstance(before, float)
        assert isinstance(after, float)
        assert after - before < 0.2, "processor seconds in one idle second"


def test_peers_come_and_go_without_leaks(reader, target, start, path):
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with start() as peer:
        for index in range(3):
            prepare(reader, peer, target, f"peer-{index}").peer.close()
        before = descriptors()
        for index in range(12):
            prepare(reader, peer, target, f"peer-{index}").peer.close()
        deadline = time.monotonic() + 60.0
        while descriptors() > before + 2 and time.monotonic() < deadline:
            time.sleep(0.05)  # connections end in their own time
        assert descriptors() <= before + 2
