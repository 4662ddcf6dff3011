"""Reads by messages, which `ucx` makes where UCX would emulate one-sided reads: over TCP.

What it must not do is harm the owner, whatever its readers do: UCX's own emulation ended its process when a reader was
killed under a reply (5 times in 120 kills, measured by the loop below before reads went by messages).
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.transports import PeerError, TransportError, open_transport, read
from reshard.transports.lists import ConnectedPeer
from reshard.transports.peer_process import PeerProcess, kill_a_reader, pattern
from reshard.transports.testing import rows
from reshard.transports.testing.harness import resident_bytes
from reshard.transports.ucx import UcxTransport
from reshard.transports.ucx import replies as replies_module
from reshard.transports.ucx.context import MEMORY_TYPES
from reshard.transports.ucx.inbox import MAX_BYTES, Inbox
from reshard.transports.ucx.messages import (
    HELLO,
    IN_FLIGHT,
    MAX_IN_FLIGHT,
    MAX_PARCEL_BYTES,
    MAX_PARCEL_ROWS,
    READ,
    READ_HEADER,
    hello,
)
from reshard.transports.ucx.parcels import Parcels, cut_parcels
from reshard.transports.ucx.peers import GetSlice, UcxPeer

pytest.importorskip("cffi", reason="the ucx backend needs cffi")
if reason := UcxTransport.probe():
    pytest.skip(reason, allow_module_level=True)

TCP = {"tls": "tcp"}
MIB = 1 << 20
NBYTES = 16 * MIB


def opened() -> UcxTransport:
    transport = open_transport("ucx", **TCP)
    assert isinstance(transport, UcxTransport)
    return transport


@pytest.fixture
def owner() -> Iterator[UcxTransport]:
    with opened() as transport:
        yield transport


@pytest.fixture
def reader() -> Iterator[UcxTransport]:
    with opened() as transport:
        yield transport


class Served:
    """A region of a transport of this process."""

    def __init__(self, owner: UcxTransport, nbytes: int = NBYTES, seed: int = 1) -> None:
        self.allocation = owner.allocate(nbytes)
        self.allocation.array[:] = pattern(nbytes, seed)
        self.registration = owner.register([self.allocation.region])
        self.address = self.allocation.region.address


class Target:
    """A connection and a destination."""

    def __init__(self, reader: UcxTransport, endpoint: bytes, nbytes: int = NBYTES, name: str = "owner") -> None:
        self.reader = reader
        self.allocation = reader.allocate(nbytes)
        reader.register([self.allocation.region])
        self.peer = reader.connect(endpoint, timeout_s=60.0, name=name)
        assert isinstance(self.peer, ConnectedPeer)
        assert isinstance(self.peer.native, UcxPeer)
        self.native = self.peer.native

    def read(self, remote: int, nbytes: int = NBYTES) -> None:
        here = rows(self.allocation.region.address, nbytes)
        read(self.reader, [self.reader.prepare(self.peer, here, rows(remote, nbytes))], timeout_s=60.0)

    def ask(self, address: int, nbytes: int) -> None:
        """Read without any check on this side."""
        columns = [self.allocation.region.address, nbytes, address]
        local, size, remote = (np.array([value], np.uint64) for value in columns)
        piece = GetSlice(self.native.lane, Parcels(self.native.parcel_ring(), (local, size, remote), 0))
        stop = time.monotonic() + 60.0
        here = piece.post()
        while not here:
            assert time.monotonic() < stop
            here = piece.poll()

    def ask_until_refused(self, address: int) -> None:
        for _ in range(100):
            self.ask(address, NBYTES)


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    stop = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < stop, "it did not come true"
        time.sleep(0.01)


# --- parcels ---


@given(st.lists(st.integers(1, 3 * MAX_PARCEL_BYTES) | st.integers(1, 64), min_size=1, max_size=60), st.randoms())
def test_parcels_cover_a_list_once_and_in_order(sizes, randomly):
    nbytes = np.array(sizes, np.uint64)
    local, remote = (np.array([randomly.randrange(1 << 47) for _ in sizes], np.uint64) for _ in range(2))
    here, there, cuts = cut_parcels(local, nbytes, remote)
    assert cuts[0] == 0
    assert cuts[-1] == len(here) == len(there)
    assert np.array_equal(here[:, 1], there[:, 1])
    for start, stop in pairwise(cuts):
        assert 0 < int(here[start:stop, 1].sum()) <= MAX_PARCEL_BYTES
        assert 0 < stop - start <= MAX_PARCEL_ROWS
    # Put back together, the pieces are the rows.
    at = 0
    for address, size, source in zip(local.tolist(), sizes, remote.tolist(), strict=True):
        done = 0
        while done < size:
            assert here[at].tolist() == [address + done, there[at, 1]]
            assert int(there[at, 0]) == source + done
            done += int(here[at, 1])
            at += 1
        assert done == size
    assert at == len(here)


def test_many_small_rows_are_cut_by_their_number():
    n = 3 * MAX_PARCEL_ROWS + 5
    column = np.arange(n, dtype=np.uint64) * np.uint64(64)
    _, _, cuts = cut_parcels(column, np.full(n, 8, np.uint64), column)
    assert np.diff(cuts).tolist() == [MAX_PARCEL_ROWS] * 3 + [5]


@pytest.mark.parametrize("piece", [7, 4096, MIB + 3, NBYTES])
def test_bytes_of_lists_of_every_grain(owner, reader, piece):
    served, target = Served(owner), Target(reader, owner.endpoint())
    n = NBYTES // piece if piece > 7 else 20_000
    offset = np.random.default_rng(5).permutation(n).astype(np.uint64) * np.uint64(piece)
    to = np.sort(offset)
    prepared = reader.prepare(
        target.peer, rows(target.allocation.region.address + to, piece), rows(served.address + offset, piece)
    )
    for seed in (2, 3):
        served.allocation.array[:] = pattern(NBYTES, seed)
        read(reader, [prepared], timeout_s=60.0)
        source = served.allocation.array[: n * piece].reshape(n, piece)
        got = target.allocation.array[: n * piece].reshape(n, piece)
        assert np.array_equal(got, source[(offset // np.uint64(piece)).astype(np.intp)])


# --- what an owner refuses ---


def test_reads_outside_of_what_is_registered_are_refused(reader):
    with PeerProcess("ucx", TCP) as process:
        endpoint, remote = process.serve(NBYTES, 1)
        bad = [(remote - 1, 16), (remote + NBYTES - 15, 16), (remote + NBYTES, 1), (4096, 16), ((1 << 64) - 8, 16)]
        for at, (address, nbytes) in enumerate(bad):
            target = Target(reader, endpoint, name=f"try-{at}")
            target.allocation.array[:] = 0xA5
            with pytest.raises(PeerError, match=rf"try-{at}.*refuses to be read.*not inside one registered region"):
                target.ask(address, nbytes)
            with pytest.raises(PeerError, match=r"died before.*refuses"):
                target.read(remote)
            assert (target.allocation.array == 0xA5).all()
            target.peer.close()
        good = Target(reader, endpoint, name="good")
        good.read(remote)
        assert np.array_equal(good.allocation.array, pattern(NBYTES, 1))
        assert process.alive


def test_what_has_been_withdrawn_is_refused_even_if_nobody_looks_at_the_beacon(owner, reader):
    first, second = Served(owner), Served(owner, seed=2)
    target = Target(reader, owner.endpoint())
    target.ask(first.address, 64)
    first.registration.close()
    with pytest.raises(PeerError, match="refuses to be read"):
        target.ask(first.address, 64)
    target.peer.close()
    again = Target(reader, owner.endpoint())
    again.read(second.address)
    assert np.array_equal(again.allocation.array, pattern(NBYTES, 2))


def test_memory_unmapped_behind_the_owners_back_is_refused(reader):
    """UCX would have read it in the owner's process, and ended it."""
    with PeerProcess("ucx", TCP) as process:
        kept_endpoint, kept = process.serve(MIB, 1)
        endpoint, remote = process.serve(NBYTES, 2)
        process.ask("unmap", which=1)
        target = Target(reader, endpoint)
        with pytest.raises(PeerError, match=r"refuses to be read.*has been unmapped while it is registered"):
            target.read(remote)
        target.peer.close()
        again = Target(reader, kept_endpoint, MIB)
        again.read(kept, MIB)
        assert np.array_equal(again.allocation.array, pattern(MIB, 1))
        assert process.alive


@pytest.mark.parametrize(
    ("n_rows", "size", "said", "reason"),
    [
        (0, 0, 0, "expected 1 to 4096 rows"),
        (MAX_PARCEL_ROWS + 1, 1, MAX_PARCEL_ROWS + 1, "expected 1 to 4096 rows"),
        (1, 0, 0, "none empty"),
        (2, 8, 15, "got rows of 16 bytes for 15"),
        (2, MAX_PARCEL_BYTES, 2 * MAX_PARCEL_BYTES, "expected 1 to 4194304"),
        (2, 1 << 63, 0, "expected 1 to 4194304"),
    ],
)
def test_messages_that_no_reader_of_ours_sends(owner, reader, n_rows, size, said, reason):
    served, target = Served(owner), Target(reader, owner.endpoint())
    lane = target.native.lane
    asked = np.array([(served.address, size)] * n_rows, np.uint64).reshape(-1, 2)
    at = lane.library.ffi.cast("void *", asked.ctypes.data)
    lane._callbacks.send(
        lane._endpoint, READ, READ_HEADER.pack(target.native.parcel_ring().reader, 77, said), at, asked.nbytes
    )
    with pytest.raises(PeerError, match=rf"refuses to be read.*{reason}"):
        target.ask_until_refused(served.address)
    target.peer.close()
    Target(reader, owner.endpoint()).read(served.address)


def test_bytes_of_another_life_at_the_same_address_are_refused(owner, reader):
    """A list may be under way while its region is withdrawn and the next one registered where it lay."""
    served = Served(owner)
    target = Target(reader, owner.endpoint())
    target.ask(served.address, 64)
    served.registration.close()
    again = owner.register([served.allocation.region])
    with pytest.raises(PeerError, match=r"has withdrawn regions since.*generation 0, now 1.*connect again"):
        target.ask(served.address, 64)
    target.peer.close()
    Target(reader, owner.endpoint()).read(served.address)
    again.close()


@pytest.mark.parametrize("damage", ["nothing", "zeros", "ones", "random", "half", "one bit"])
def test_a_damaged_address_of_a_reader_does_not_reach_ucx(reader, damage):
    """UCX ends the process that makes an endpoint of one."""
    with PeerProcess("ucx", TCP) as process:
        endpoint, remote = process.serve(NBYTES, 1)
        target = Target(reader, endpoint)
        lane, address = target.native.lane, target.native.lane._address
        flipped = bytes([*address[:-1], address[-1] ^ 1])
        damaged = {
            "nothing": b"",
            "zeros": bytes(64),
            "ones": b"\xff" * 64,
            "random": np.random.default_rng(3).bytes(200),
            "half": address[: len(address) // 2],
            "one bit": flipped,
        }[damage]
        data = lane.library.ffi.from_buffer(damaged)
        lane._callbacks.send(lane._endpoint, HELLO, hello(bytes(16), 0, address), data, len(damaged))
        target.read(remote)
        assert np.array_equal(target.allocation.array, pattern(NBYTES, 1))
        assert process.alive


def test_what_waits_to_be_handled_is_bounded(caplog):
    inbox, data = Inbox(), bytes(1 << 16)
    for number in range(MAX_BYTES // len(data) + 10):
        inbox.put(READ, number.to_bytes(8, "little"), data)
    assert "is dropped" in caplog.text
    n_kept = 0
    while inbox:
        _, header, _ = inbox.take()
        assert int.from_bytes(header, "little") == n_kept
        n_kept += 1
    assert 0.99 * MAX_BYTES < n_kept * len(data) <= MAX_BYTES
    inbox.put(READ, b"", data)
    assert inbox


@pytest.mark.parametrize("header", [b"", b"short", bytes(READ_HEADER.size), bytes(200)])
def test_messages_of_nobody_are_passed_over(owner, reader, header):
    served, target = Served(owner), Target(reader, owner.endpoint())
    lane = target.native.lane
    lane._callbacks.send(lane._endpoint, READ, header)
    target.read(served.address)
    assert np.array_equal(target.allocation.array, served.allocation.array)


def test_a_reader_that_asks_for_too_much_at_a_time_is_refused(owner, reader, monkeypatch):
    served, target = Served(owner), Target(reader, owner.endpoint())
    replies = owner._server._replies
    pending, sent = replies._worker.pending, 1
    with monkeypatch.context() as patched:
        # As if nothing were taken; what UCX has sent by the time that it returns has no request.
        patched.setattr(replies, "running", lambda request: True)
        patched.setattr(replies._worker, "pending", lambda returned: pending(returned) or sent)
        with pytest.raises(PeerError, match=rf"refuses to be read.*more than {MAX_IN_FLIGHT} reads at a time"):
            target.ask_until_refused(served.address)
        with replies._lock:
            (busy,) = (*replies._readers.values(), *replies._ending)
            assert len(busy.sends) == MAX_IN_FLIGHT
            busy.sends = type(busy.sends)(send for send in busy.sends if send.request != sent)
    target.peer.close()


def test_each_message_says_what_memory_it_fills(owner, reader):
    """No device is needed to see what UCX would be told."""
    target = Target(reader, owner.endpoint())
    ring = target.native.parcel_ring()
    native, told = ring._ucp, []

    class Ucp:
        @staticmethod
        def ucp_tag_recv_nbx(worker: int, at: object, count: int, tag: int, mask: int, params: object) -> int:
            told.append((int(params.memory_type), int(params.op_attr_mask) >> 3 & 1, count))
            return (1 << 64) - 4

    ring._ucp = Ucp
    try:
        for memory in ("dram", "vram"):
            for n in (1, 3):
                at = np.arange(n, dtype=np.uint64) * np.uint64(100)
                Parcels(ring, (at, np.full(n, 50, np.uint64), at), MEMORY_TYPES[memory]).post_next(None)
    finally:
        ring._ucp = native
    assert told == [(0, 0, 50), (0, 1, 3), (1, 0, 50), (1, 1, 3)]


# --- readers that go, stop, or come together ---


def test_nothing_is_left_of_readers_that_have_gone(owner, reader):
    served = Served(owner)
    replies = owner._server._replies
    for _ in range(3):
        target = Target(reader, owner.endpoint())
        target.read(served.address)
        assert len(replies._readers) == 1
        target.peer.close()
        eventually(lambda: not replies._readers and not replies._ending)


def test_readers_at_once_get_each_their_own(owner):
    first, second = Served(owner), Served(owner, seed=2)
    with opened() as one, opened() as two:
        a, b = Target(one, owner.endpoint()), Target(two, owner.endpoint())
        from_a, from_b = (
            t.reader.prepare(t.peer, rows(t.allocation.region.address, NBYTES), rows(s.address, NBYTES))
            for t, s in ((a, first), (b, second))
        )
        for _ in range(5):
            posted = [(t.reader, t.reader.post(prepared)) for t, prepared in ((a, from_a), (b, from_b))]
            for transport, transfer in posted:
                transport.wait([transfer], timeout_s=60.0)
            assert np.array_equal(a.allocation.array, first.allocation.array)
            assert np.array_equal(b.allocation.array, second.allocation.array)
            a.allocation.array[:] = b.allocation.array[:] = 0


def stopped_in_mid_read(process: PeerProcess, replies: replies_module.Replies) -> replies_module._Reader:
    """Stop an owner's one reader while it owes bytes to it; returns what the owner knows of it.

    Not each moment will do: there may be none under way, or so few that the sockets' buffers take them.
    """
    give_up = time.monotonic() + 60.0
    while time.monotonic() < give_up:
        eventually(lambda: any(reader.sends for reader in list(replies._readers.values())))
        process.signal(signal.SIGSTOP)
        (reader,) = replies._readers.values()
        before, owed = -1, len(reader.sends)
        while owed != before:
            time.sleep(0.3)
            before, owed = owed, len(reader.sends)
        if owed:
            return reader
        process.signal(signal.SIGCONT)
    raise AssertionError("it was never stopped in mid read")


def test_a_reader_that_stops_keeps_neither_memory_nor_its_owner(owner):
    """What waits for it is bounded, and memory that it was to be sent can be withdrawn all the same."""
    large = 72 * MIB
    served = Served(owner, large)
    replies = owner._server._replies
    with PeerProcess("ucx", TCP) as process:
        process.tell("read", endpoint=owner.endpoint().hex(), address=served.address, nbytes=large, times=1000)
        process.answer()
        stopped = stopped_in_mid_read(process, replies)
        assert 0 < len(stopped.sends) <= IN_FLIGHT
        grown: list[int] = []
        while len(grown) < 3 and (not grown or grown[-1] >= 2 * MIB):  # what is queued without a bound goes on growing
            before = resident_bytes()
            time.sleep(0.5)
            grown.append(resident_bytes() - before)
        assert grown[-1] < 2 * MIB
        with opened() as other:
            target = Target(other, owner.endpoint(), large)
            target.read(served.address, large)
            assert np.array_equal(target.allocation.array, served.allocation.array)
        served.registration.close()
        assert not stopped.sends, "its bytes are given back to the owner only when UCX reads them no more"
        assert not replies_module._KEPT
        process.signal(signal.SIGKILL)


def test_an_owner_closes_under_a_reader_that_has_stopped():
    large = 72 * MIB
    with PeerProcess("ucx", TCP) as process:
        with opened() as owner:
            served = Served(owner, large)
            replies = owner._server._replies
            process.tell("read", endpoint=owner.endpoint().hex(), address=served.address, nbytes=large, times=1000)
            process.answer()
            stopped_in_mid_read(process, replies)
        assert not owner._serving.handle, "its worker is destroyed, not left to the end of the process"
        assert not replies._readers
        assert not replies._ending
        process.signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [72 * MIB, 64 * 1024], ids=["many-parcels", "one-parcel"])
def test_readers_killed_at_random_moments_leave_the_owner_whole(nbytes):
    randomly = random.Random(nbytes)
    with PeerProcess("ucx", TCP) as process, opened() as reader:
        endpoint, remote = process.serve(72 * MIB, 1)
        target = Target(reader, endpoint, 72 * MIB)
        for _ in range(10):
            kill_a_reader("ucx", endpoint, remote, nbytes, randomly.uniform(0.0, 0.25), settings=TCP)
            target.read(remote, 72 * MIB)
            assert np.array_equal(target.allocation.array, pattern(72 * MIB, 1))
            target.allocation.array[:] = 0
        assert process.alive
        assert process.close() == 0


def test_a_list_waits_for_no_other_list_of_its_peer_to_be_asked_after(reader):
    """As many as are in flight at a time, and more: those that nobody waits for keep no place once they have landed."""
    with PeerProcess("ucx", TCP) as process:
        endpoint, remote = process.serve(MIB, 1)
        target = Target(reader, endpoint, MIB)
        at = np.arange(3 * IN_FLIGHT) * 4096
        lists = [
            reader.prepare(target.peer, rows(target.allocation.region.address + n, 4096), rows(remote + n, 4096))
            for n in at.tolist()
        ]
        read(reader, lists, timeout_s=60.0)
        target.allocation.array[:] = 0
        process.signal(signal.SIGSTOP)  # answers come late, as over a network
        posted = [reader.post(each) for each in lists]
        process.signal(signal.SIGCONT)
        reader.wait(posted[-1:], timeout_s=60.0)
        reader.wait(posted, timeout_s=60.0)
        assert np.array_equal(target.allocation.array[: 4096 * len(lists)], pattern(MIB, 1)[: 4096 * len(lists)])


@pytest.mark.slow
def test_readers_killed_while_the_owner_is_stopped_leave_it_whole():
    """When it continues it finds their requests and a connection that is gone."""
    with PeerProcess("ucx", TCP) as process, opened() as reader:
        endpoint, remote = process.serve(72 * MIB, 1)
        target = Target(reader, endpoint)
        for _ in range(10):
            with PeerProcess("ucx", TCP) as victim:
                victim.tell("read", endpoint=endpoint.hex(), address=remote, nbytes=72 * MIB, times=1000)
                victim.answer()
                time.sleep(0.05)
                process.signal(signal.SIGSTOP)
                victim.signal(signal.SIGKILL)
            process.signal(signal.SIGCONT)
            target.read(remote)
            assert np.array_equal(target.allocation.array, pattern(NBYTES, 1))
            target.allocation.array[:] = 0
        assert process.alive


def test_a_list_ends_with_its_connection(owner, reader):
    """Receives that are posted go with their worker: nothing lands after the connection is closed."""
    served, target = Served(owner), Target(reader, owner.endpoint())
    prepared = reader.prepare(target.peer, rows(target.allocation.region.address, NBYTES), rows(served.address, NBYTES))
    for _ in range(6):
        reader.post(prepared)
        target.peer.close()
        try:
            reader.wait_quarantine(timeout_s=60.0)
        except TransportError as error:
            pytest.fail(str(error))
        before = target.allocation.array.copy()
        time.sleep(0.02)
        assert np.array_equal(target.allocation.array, before)
        target.peer = reader.connect(owner.endpoint(), timeout_s=60.0, name="owner")
        prepared = reader.prepare(
            target.peer, rows(target.allocation.region.address, NBYTES), rows(served.address, NBYTES)
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("TCP_RX_SEG_SIZE", "16k"),
        ("TCP_RX_SEG_SIZE", "65535"),
        ("TCP_TX_SEG_SIZE", "65KB"),
        ("TCP_TX_SEG_SIZE", "inf"),
        ("TCP_TX_SEG_SIZE", "0"),
    ],
)
def test_fragments_that_would_overrun_another_process_are_refused(key: str, value: str) -> None:
    with pytest.raises(TransportError, match=rf"{key}: expected at (least|most) 64k, got '{value}'"):
        open_transport("ucx", tls="tcp", config={key: value})


def read_whole(owner: UcxTransport, reader: UcxTransport) -> None:
    served, target = Served(owner), reader.allocate(NBYTES)
    reader.register([target.region])
    peer = reader.connect(owner.endpoint(), timeout_s=60.0, name="owner")
    into = rows(target.region.address, NBYTES)
    read(reader, [reader.prepare(peer, into, rows(served.address, NBYTES))], timeout_s=60.0)
    assert np.array_equal(target.array, pattern(NBYTES, 1))


def test_fragments_of_other_sizes_that_fit(owner: UcxTransport) -> None:
    config = {"TCP_TX_SEG_SIZE": "8K", "TCP_RX_SEG_SIZE": "128kb"}
    with open_transport("ucx", tls="tcp", config=config) as other:
        assert isinstance(other, UcxTransport)
        read_whole(owner, other)
        read_whole(other, owner)


def test_fragments_in_the_environment_do_not_count(monkeypatch: pytest.MonkeyPatch, owner: UcxTransport) -> None:
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", "16k")
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "16k")
    with opened() as reader:
        read_whole(owner, reader)
