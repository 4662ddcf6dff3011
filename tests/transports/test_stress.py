"""Many threads against one transport, with faults at random: what must hold whatever the order of events.

`ChaosTransport` is a backend whose native side is a book: which pieces are posted and may still write, which
connections and pieces are open. It fails the test at once if the common implementation uses something twice, or
after its end, or posts into memory that an older piece may still write. The second half does the same, coarser, to
the real backends.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from reshard.transports import Region, TransferError, TransferTimeoutError, TransportError, open_transport, read
from reshard.transports.backend import Capabilities, CommonTransport, ConnectedPeer, Work, allocate_host
from reshard.transports.base import Prepared
from reshard.transports.errors import PeerError
from reshard.transports.peer_process import PeerProcess, pattern
from reshard.transports.registry import probe
from reshard.transports.rows import ADDRESS, NBYTES
from reshard.transports.testing import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KIB, MIB = 1 << 10, 1 << 20
JOIN_S = 90.0


class Link:
    """A native connection."""

    def __init__(self, agent: int) -> None:
        self.agent = agent
        self.open = True


class Piece:
    """A native piece of work, also used as a gate (without a range)."""

    native_s = 0.0

    def __init__(self, transport: ChaosTransport, link: Link, start: int = 0, stop: int = 0) -> None:
        self.transport = transport
        self.link = link
        self.range = (start, stop)
        self.moved = False
        self.closed = False
        self.plan: Iterator[str] = iter(())
        transport.note(transport.open_pieces.add, self)

    def post(self) -> bool:
        book = self.transport
        book.check(not self.closed, "a closed piece was posted")
        with book.book:
            if not self.link.open or self.link.agent != book.agent:
                raise PeerError("the connection is closed")
            book.check(self not in book.live, "a piece was posted twice at once")
            start, stop = self.range
            for other in book.live:
                if start < other.range[1] and other.range[0] < stop:
                    book.check(other.link is self.link, "a piece was posted into memory that another may still write")
            book.live.add(self)
        self.plan = book.fate(gate=start == stop)
        return self.poll()

    def poll(self) -> bool:
        book = self.transport
        with book.book:
            if not self.link.open or self.link.agent != book.agent:
                book.check(self not in book.live, "a connection was closed under a piece that may still write")
                raise PeerError("the connection was closed")
        match next(self.plan, "stuck"):
            case "done":
                book.note(book.live.discard, self)
                return True
            case "error":
                if book.settles:
                    book.note(book.live.discard, self)
                raise book.random.choice((TransferError("it broke"), PeerError("it left"), ValueError("odd")))
            case "slow":
                time.sleep(0.002)
        return False

    def close(self) -> None:
        book = self.transport
        book.check(not self.closed, "a piece was closed twice")
        book.check(not book.down, "a piece was closed after the end")
        self.closed = True
        book.note(book.open_pieces.discard, self)


class ChaosTransport(CommonTransport):
    """See the module."""

    name = "chaos"
    capabilities: ClassVar[Capabilities] = Capabilities(("dram",), True, True, "peer", 1 << 20, True, True, True)
    slice_bytes: ClassVar[int] = 16 * KIB

    def __init__(self, scope: str, seed: int) -> None:
        self.book = threading.RLock()
        self.random = random.Random(seed)
        self.wrong: list[str] = []
        self.live: set[Piece] = set()
        self.open_pieces: set[Piece] = set()
        self.links: set[Link] = set()
        self.regions: list[tuple[int, int]] = []
        self.agent = 0
        self.down = False
        self.calm = False
        self.settles = scope != "agent"
        super().__init__(workers=2)
        self.capabilities = replace(type(self).capabilities, abort_scope=scope)  # type: ignore[misc, arg-type]

    def check(self, holds: bool, what: str) -> None:
        if not holds and what not in self.wrong:
            self.wrong.append(what)

    def note(self, change: Callable[[Piece], None], piece: Piece) -> None:
        with self.book:
            change(piece)

    def fate(self, gate: bool) -> Iterator[str]:
        """Return what polls will find."""
        with self.book:
            n = self.random.choice((0, 0, 1, 3, 8))
            ends = ["done"] * 30 + ["error"] * 2 + ["stuck"] * (1 if not gate else 0)
            end = "done" if self.calm else self.random.choice(ends)
        yield from ["slow"] * n
        while True:
            if end == "stuck" and (
                self.calm or (self.capabilities.abort_scope == "none" and self.random.random() < 0.01)
            ):
                end = "done"  # nothing but time helps there, so time has to
            yield end

    def allocate(self, nbytes, *, memory="dram", device=0):  # type: ignore[no-untyped-def]
        return allocate_host(nbytes)

    def _register(self, region: Region) -> object:
        self.check(not self.down, "registered after the end")
        self.regions.append((region.address, region.stop))
        return None

    def _deregister(self, region: Region, native: object) -> None:
        self.regions.remove((region.address, region.stop))
        with self.book:
            for piece in self.live:
                overlap = region.address < piece.range[1] and piece.range[0] < region.stop
                self.check(not overlap, "memory was deregistered that a piece may still write")

    def _withdrawn(self, generation: int) -> None:
        self.check(not self.down, "withdrawn after the end")

    def _payload(self) -> bytes:
        return b""

    def _dial(self, peer: ConnectedPeer, deadline: float) -> object:
        self.check(not self.down, "dialled after the end")
        agent = self.agent
        time.sleep(self.random.random() * 0.004)
        self.check(not self.down, "the end came under a dial")
        if not self.calm and self.random.random() < 0.1:
            raise PeerError("nobody there", peer=peer.name)
        link = Link(agent)
        with self.book:
            self.links.add(link)
        return link

    def _hang_up(self, native: object) -> None:
        assert isinstance(native, Link)
        with self.book:
            self.check(native.open or native.agent != self.agent, "hung up twice")
            native.open = False
            self.links.discard(native)

    def _gate(self, peer: ConnectedPeer) -> Piece:
        return Piece(self, self._link(peer))

    def _build(self, peer: ConnectedPeer, work: Work) -> list[Piece]:  # type: ignore[override]
        self.check(not self.down, "built after the end")
        time.sleep(self.random.random() * 0.002)
        self.check(not self.down, "the end came under a build")
        starts = work.local[:, ADDRESS].tolist()
        stops = (work.local[:, ADDRESS] + work.local[:, NBYTES]).tolist()
        link = self._link(peer)
        return [
            Piece(self, link, min(starts[a:b]), max(stops[a:b])) for a, b in zip(work.cuts, work.cuts[1:], strict=False)
        ]

    def _link(self, peer: ConnectedPeer) -> Link:
        if not isinstance(peer.native, Link):
            raise PeerError(f"peer {peer.name!r} is not connected", peer=peer.name)
        return peer.native

    def _settles(self, error: TransportError) -> bool:
        return self.settles

    def _abort(self, native: object) -> None:
        self._hang_up(native)
        with self.book:
            self.live -= {piece for piece in self.live if piece.link is native}

    def _rebuild(self) -> None:
        with self.book:
            held = [piece for piece in self.open_pieces if piece.link.agent == self.agent]
            if held:
                raise TransferError(f"the agent is still referred to by {len(held)} pieces")
            self.agent += 1
            self.live.clear()
            self.links.clear()

    def _shut_down(self) -> None:
        self.check(not self.down, "shut down twice")
        self.down = True


class User:
    """One thread's view: a destination and a peer of its own, and what it does at random."""

    def __init__(self, transport: ChaosTransport, source: ChaosTransport, name: str, seed: int) -> None:
        self.transport = transport
        self.random = random.Random(seed)
        self.name = name
        self.message = source.endpoint()
        self.remote = source._ledger.entries()[0].region.address
        self.target = transport.allocate(64 * KIB)
        self.registration = transport.register([self.target.region])
        self.peer: ConnectedPeer | None = None
        self.lists: list[Prepared] = []
        self.done = self.failed = 0

    def step(self) -> None:
        if self.peer is None:
            self.peer = self.transport.connect(self.message, timeout_s=1.0, name=self.name)
            self.lists = []
        at = self.target.region.address
        match self.random.choice(
            ("prepare", "read", "read", "read", "cancel", "close list", "close peer", "lift", "renew")
        ):
            case "prepare":
                if len(self.lists) < 3:
                    nbytes = self.random.choice((256, 40 * KIB))
                    self.lists.append(self.transport.prepare(self.peer, rows(at, nbytes), rows(self.remote, nbytes)))
            case "read" if self.lists:
                # Two lists into one place are the user's business, so one at a time.
                read(self.transport, [self.random.choice(self.lists)], timeout_s=self.random.choice((0.01, 0.2)))
                self.done += 1
            case "cancel" if self.lists:
                self.transport.cancel([self.transport.post(self.random.choice(self.lists))])
            case "close list" if self.lists:
                self.lists.pop(self.random.randrange(len(self.lists))).close()
            case "close peer":
                self.peer.close()
                self.peer = None
            case "lift":
                self.transport.wait_quarantine(timeout_s=0.2)
            case "renew":
                self.registration.close()
                self.registration = self.transport.register([self.target.region])

    def run(self, stop: threading.Event, unexpected: list[BaseException]) -> None:
        while not stop.is_set():
            try:
                self.step()
            except TransportError:
                self.failed += 1
                self.assert_safe()
                if self.peer is not None and (self.peer.failed or self.peer.closed):
                    self.peer.close()
                    self.peer = None
            except BaseException as error:
                unexpected.append(error)
                raise

    def assert_safe(self) -> None:
        """What is not quarantined cannot be written: only this thread reads into its destination."""
        region = self.target.region
        with self.transport._lock, self.transport.book:
            mine = [p for p in self.transport.live if region.address <= p.range[0] < region.stop]
            poisoned = any(r.address < region.stop and region.address < r.stop for r in self.transport.quarantined())
            self.transport.check(poisoned or not mine, "memory is not quarantined, and may be written")


def seen_enough(users: list[User]) -> bool:
    return sum(user.done for user in users) > 20 and sum(user.failed for user in users) > 5


@pytest.mark.parametrize("scope", ["peer", "agent", "none"])
@pytest.mark.parametrize("seed", [1, 2])
def test_chaos(scope: str, seed: int) -> None:
    source = ChaosTransport("peer", 0)
    served = source.allocate(64 * KIB)
    source.register([served.region])
    transport = ChaosTransport(scope, seed)
    users = [User(transport, source, f"user-{at}", 100 * seed + at) for at in range(5)]
    stop = threading.Event()
    unexpected: list[BaseException] = []
    threads = [threading.Thread(target=user.run, args=(stop, unexpected)) for user in users]

    def meddle() -> None:
        """Close what belongs to others."""
        chance = random.Random(seed)
        while not stop.is_set():
            user = chance.choice(users)
            with suppress(TransportError, IndexError):
                match chance.randrange(4):
                    case 0 if user.peer is not None:
                        user.peer.close()
                    case 1:
                        user.lists[chance.randrange(3)].close()
                    case 2:
                        user.registration.close()
                    case 3:
                        transport.wait_quarantine(timeout_s=0.1)
            time.sleep(0.02)

    threads.append(threading.Thread(target=meddle))
    for thread in threads:
        thread.start()
    time.sleep(3.0)
    give_up = time.monotonic() + 90.0
    while time.monotonic() < give_up and not seen_enough(users):
        time.sleep(0.1)
    transport.calm = True
    # The end comes while they are at work, and from two sides.
    closers = [threading.Thread(target=transport.close) for _ in range(2)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join(JOIN_S)
    stop.set()
    for thread in threads:
        thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in (*threads, *closers)), "a thread hangs"
    assert unexpected == []
    assert transport.wrong == []
    assert transport.down
    assert transport.open_pieces == set()
    assert transport.links == set()
    assert transport.regions == []
    assert seen_enough(users)
    source.close()


@pytest.mark.parametrize("backend", ["memory", "ucx", "nixl"])
def test_real_backends_with_peers_that_come_and_go(backend: str) -> None:
    """Bytes are right, or an error says that they are not; and in the end a healthy peer is read."""
    if reason := probe(backend):
        pytest.skip(f"{backend} does not work here: {reason}")
    nbytes, stop = 4 * MIB, threading.Event()
    transport = open_transport(backend)
    good: list[int] = []
    bad: list[BaseException] = []
    wrong: list[str] = []

    def run(at: int) -> None:
        chance = random.Random(at)
        target = transport.allocate(nbytes)
        transport.register([target.region])
        life = 0
        while not stop.is_set():
            life += 1
            try:
                with PeerProcess(backend) as process:
                    endpoint, remote = process.serve(nbytes, at)
                    peer = transport.connect(endpoint, timeout_s=5.0, name=f"peer-{at}-{life}")
                    try:
                        step = np.arange(nbytes // 4096)[::-1] * 4096
                        prepared = transport.prepare(
                            peer, rows(target.region.address + step, 4096), rows(remote + step, 4096)
                        )
                        for turn in range(8):
                            target.array[:] = 0xA5
                            if turn == 6:
                                process.signal(chance.choice((signal.SIGKILL, signal.SIGSTOP)))
                            read(transport, [prepared], timeout_s=2.0)
                            if not np.array_equal(target.array, pattern(nbytes, at)):
                                wrong.append(f"wrong bytes from peer-{at}-{life}")
                            good.append(at)
                    finally:
                        peer.close()
            except TransportError as error:
                bad.append(error)
                with suppress(TransferTimeoutError):
                    transport.wait_quarantine(timeout_s=5.0)
            except BaseException as error:
                wrong.append(repr(error))
                raise

    threads = [threading.Thread(target=run, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(8.0)
    give_up = time.monotonic() + 90.0
    while time.monotonic() < give_up and not (set(good) == {0, 1, 2} and bad) and not wrong:
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert wrong == []
    assert set(good) == {0, 1, 2}
    assert bad, "no fault was felt"
    transport.wait_quarantine(timeout_s=60.0)
    transport.close()
