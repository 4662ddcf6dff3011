"""The contract: what every backend does, between real processes.

Subclass `TransportContract` in a test module, name the backend, and pytest runs it::

    class TestMine(TransportContract):
        backend = "mine"

Each test opens transports through the registry, reads from peers in processes of their own, stops and kills them, and
asserts on bytes, on the type of an error, and on when it came.  A test that asks for more than the backend's
`Capabilities` allow returns at once.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from reshard.transports.base import Allocation, Peer, Prepared, Transport, read
from reshard.transports.endpoint import Endpoint, decode_endpoint, encode_endpoint
from reshard.transports.errors import (
    EndpointError,
    PeerError,
    PoisonedMemoryError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
    TransportError,
)
from reshard.transports.peer_process import PeerProcess, pattern
from reshard.transports.regions import U64, Region, RegionTable
from reshard.transports.registry import open_transport

KIB, MIB = 1 << 10, 1 << 20
SERVED_BYTES = 8 * MIB
LARGE_BYTES = 100 * MIB
"""More than one slice, so that a deadline or a death falls in the middle of the reading."""
SLACK_S = 2.0
"""How late an error may come on a loaded machine."""


@contextlib.contextmanager
def raises(*kinds: type[BaseException], within_s: float = SLACK_S) -> Iterator[list[BaseException]]:
    """Expect one of ``kinds`` within ``within_s`` seconds; yields a list that will hold it."""
    caught: list[BaseException] = []
    start = time.monotonic()
    try:
        yield caught
    except kinds as error:
        caught.append(error)
    took = time.monotonic() - start
    names = " or ".join(kind.__name__ for kind in kinds)
    if not caught:
        raise AssertionError(f"expected {names}, nothing was raised")
    if took > within_s:
        raise AssertionError(f"{type(caught[0]).__name__} came after {took:.2f} s, expected within {within_s} s")


def rows(*columns: npt.ArrayLike) -> U64:
    """Return rows from their columns (address, nbytes, and so on), each a scalar or an array; device 0."""
    address, nbytes, *more = np.broadcast_arrays(*(np.asarray(column, np.uint64) for column in columns))
    stack = [address, nbytes, np.zeros_like(address), *more]
    return np.ascontiguousarray(np.stack([column.reshape(-1) for column in stack], axis=1))


class Reader:
    """A transport with a registered destination, connected to one peer."""

    def __init__(self, contract: TransportContract, endpoint: bytes, nbytes: int, name: str = "served") -> None:
        self.transport: Transport = contract.open()
        try:
            self.target: Allocation = self.transport.allocate(nbytes)
            self.address = self.target.region.address
            self.registration = self.transport.register([self.target.region])
            self.peer: Peer = self.transport.connect(endpoint, timeout_s=10.0, name=name)
        except BaseException:
            self.transport.close()
            raise

    def whole(self, remote: int, nbytes: int) -> Prepared:
        """Prepare one row over everything."""
        return self.transport.prepare(self.peer, rows(self.address, nbytes), rows(remote, nbytes))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()


class TransportContract:
    """See the module.

    Attributes
    ----------
    backend : str
        Name in the registry.
    settings : mapping
        Settings of every transport that is opened.
    environment : mapping of str to str
        Added to the environment of the peers.
    """

    backend: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, object]] = {}
    environment: ClassVar[Mapping[str, str]] = {}
    _shared: ClassVar[PeerProcess | None] = None
    endpoint: ClassVar[bytes] = b""
    remote: ClassVar[int] = 0
    data: ClassVar[npt.NDArray[np.uint8]] = np.zeros(0, np.uint8)

    @classmethod
    def setup_class(cls) -> None:
        """Start the peer that the tests without faults share."""
        if cls.backend:
            cls._shared = cls.start()
            cls.endpoint, cls.remote = cls._shared.serve(SERVED_BYTES, 1)
            cls.data = pattern(SERVED_BYTES, 1)

    @classmethod
    def teardown_class(cls) -> None:
        """Stop it; it must have survived every test."""
        if cls._shared is not None:
            code = cls._shared.close()
            cls._shared = None
            if code:
                raise AssertionError(f"the shared peer ended with code {code}, expected 0")

    @classmethod
    def open(cls) -> Transport:
        """Open a transport of this backend."""
        return open_transport(cls.backend, **cls.settings)

    @classmethod
    def start(cls) -> PeerProcess:
        """Start a peer process."""
        return PeerProcess(cls.backend, cls.settings, environment=cls.environment)

    def reader(self, nbytes: int = SERVED_BYTES) -> Reader:
        """Return a reader of the shared peer."""
        return Reader(self, self.endpoint, nbytes)

    # --- bytes ----------------------------------------------------------------------------------------

    def test_one_row_brings_the_bytes(self) -> None:
        with self.reader() as reader:
            prepared = reader.whole(self.remote, SERVED_BYTES)
            stats = read(reader.transport, [prepared], timeout_s=20.0)
            assert stats.bytes == SERVED_BYTES == stats.per_peer["served"].bytes
            assert stats.seconds > 0
            assert np.array_equal(reader.target.array, self.data)

    def test_scattered_rows_of_odd_sizes_and_offsets(self) -> None:
        random = np.random.default_rng(3)
        sizes = random.integers(1, 5000, 700)
        to = np.cumsum(sizes) - sizes + np.arange(700) * 3
        of = random.integers(0, SERVED_BYTES - 5000, 700)
        with self.reader() as reader:
            reader.target.array[:] = 0xA5
            expected = reader.target.array.copy()
            for size, dst, src in zip(sizes.tolist(), to.tolist(), of.tolist(), strict=True):
                expected[dst : dst + size] = self.data[src : src + size]
            prepared = reader.transport.prepare(
                reader.peer, rows(reader.address + to, sizes), rows(self.remote + of, sizes)
            )
            read(reader.transport, [prepared], timeout_s=20.0)
            assert np.array_equal(reader.target.array, expected)

    def test_strided_rows_each_side_with_its_own_stride(self) -> None:
        with self.reader() as reader:
            reader.target.array[:] = 0xA5
            expected = reader.target.array.copy()
            cases = (
                (7, 3, 100, 200, 256, 3000),
                (MIB, MIB + 5, 2, 2, 640, 1000),
                (2 * MIB, 9, 40000, 40000, 40001, 40),
            )
            local, remote = [], []
            for to, of, nbytes, to_stride, of_stride, count in cases:
                local.append(rows(reader.address + to, nbytes, to_stride, count))
                remote.append(rows(self.remote + of, nbytes, of_stride, count))
                for run in range(count):
                    source = self.data[of + run * of_stride :][:nbytes]
                    expected[to + run * to_stride :][:nbytes] = source
            prepared = reader.transport.prepare(reader.peer, np.concatenate(local), np.concatenate(remote))
            assert prepared.nbytes == sum(case[2] * case[5] for case in cases)
            read(reader.transport, [prepared], timeout_s=20.0)
            assert np.array_equal(reader.target.array, expected)

    def test_many_peers_at_once(self) -> None:
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(self.start()) for _ in range(3)]
            served = [peer.serve(MIB, seed) for seed, peer in enumerate(peers)]
            transport = self.open()
            stack.callback(transport.close)
            target = transport.allocate(3 * MIB)
            transport.register([target.region])
            lists = []
            for at, (endpoint, remote) in enumerate(served):
                peer = transport.connect(endpoint, timeout_s=10.0, name=f"peer-{at}")
                lists.append(transport.prepare(peer, rows(target.region.address + at * MIB, MIB), rows(remote, MIB)))
            stats = read(transport, lists, timeout_s=20.0)
            assert sorted(stats.per_peer) == ["peer-0", "peer-1", "peer-2"]
            for at in range(3):
                assert np.array_equal(target.array[at * MIB : (at + 1) * MIB], pattern(MIB, at))

    def test_no_rows_and_rows_of_no_bytes(self) -> None:
        with self.reader() as reader:
            nothing = reader.transport.prepare(reader.peer, rows([], []), rows([], []))
            assert read(reader.transport, [nothing], timeout_s=5.0).bytes == 0
            # Rows that carry nothing may point anywhere.
            mixed = reader.transport.prepare(
                reader.peer,
                rows([reader.address, 1, reader.address + 9], [4, 0, 5]),
                rows([self.remote, 2, self.remote], [4, 0, 5]),
            )
            assert read(reader.transport, [mixed], timeout_s=5.0).bytes == 9
            assert np.array_equal(reader.target.array[:4], self.data[:4])
            assert np.array_equal(reader.target.array[9:14], self.data[:5])
            assert read(reader.transport, [], timeout_s=5.0).bytes == 0

    def test_a_list_of_a_million(self) -> None:
        n = 1_000_000
        order = np.random.default_rng(5).permutation(n)
        with self.reader() as reader:
            prepared = reader.transport.prepare(
                reader.peer, rows(reader.address + np.arange(n) * 8, 8), rows(self.remote + order * 8, 8)
            )
            read(reader.transport, [prepared], timeout_s=50.0)
            assert np.array_equal(reader.target.array[: 8 * n].view("<u8"), self.data[: 8 * n].view("<u8")[order])

    def test_more_runs_than_the_backend_takes_are_refused(self) -> None:
        with self.reader() as reader:
            many = reader.transport.capabilities.max_runs + 1
            with raises(ValueError):
                reader.transport.prepare(reader.peer, rows(reader.address, 1, 0, many), rows(self.remote, 1, 0, many))

    def test_overlapping_destinations_do_no_harm(self) -> None:
        with self.reader() as reader:
            prepared = reader.transport.prepare(
                reader.peer,
                rows(reader.address + np.array([0, 500, 250]), 1000),
                rows(self.remote + np.array([0, 5000, 9000]), 1000),
            )
            read(reader.transport, [prepared], timeout_s=5.0)
            assert np.array_equal(reader.target.array[:250], self.data[:250])
            assert np.array_equal(reader.target.array[1250:1500], self.data[5750:6000])

    def test_posted_again_after_the_source_changed(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(MIB, 1)
            with Reader(self, endpoint, MIB) as reader:
                prepared = reader.whole(remote, MIB)
                for seed in (1, 2, 3):
                    process.ask("fill", which=0, seed=seed)
                    read(reader.transport, [prepared], timeout_s=10.0)
                    assert np.array_equal(reader.target.array, pattern(MIB, seed))

    # --- what is refused ------------------------------------------------------------------------------

    def test_bad_timeouts(self) -> None:
        with self.reader(MIB) as reader:
            prepared = reader.whole(self.remote, MIB)
            for bad in (0, -1, -0.0, float("inf"), float("nan"), True, "1"):
                for call in (
                    lambda t: reader.transport.connect(self.endpoint, timeout_s=t, name="other"),
                    lambda t: reader.transport.wait([], timeout_s=t),
                    lambda t: reader.transport.wait_quarantine(timeout_s=t),
                    lambda t: read(reader.transport, [prepared], timeout_s=t),
                ):
                    with raises(ValueError):
                        call(bad)
            read(reader.transport, [prepared], timeout_s=10.0)

    def test_rows_outside_by_one_byte(self) -> None:
        with self.reader() as reader:
            start, stop = reader.address, reader.address + SERVED_BYTES
            first, last = self.remote, self.remote + SERVED_BYTES
            good_local, good_remote = rows(start, 16), rows(first, 16)
            for bad in (rows(start - 1, 16), rows(stop - 15, 16), rows(stop, 16), rows(start ^ 2**63, 16)):
                with raises(RegistrationError):
                    reader.transport.prepare(reader.peer, bad, good_remote)
            for bad in (rows(first - 1, 16), rows(last - 15, 16), rows(last, 16), rows(2**64 - 16, 16), rows(8, 16)):
                with raises(RegistrationError) as caught:
                    reader.transport.prepare(reader.peer, good_local, bad)
                assert "served" in str(caught[0])
            # Strided rows by their last run; the last that fits is accepted.
            fits = (SERVED_BYTES - 16) // 64 + 1
            for count, stride in ((fits + 1, 64), (2, 2**63), (2**40, 2**40)):
                local = rows(start, 16, 0, count)
                with raises(RegistrationError, ValueError):
                    reader.transport.prepare(reader.peer, local, rows(first, 16, stride, count))
            prepared = reader.transport.prepare(reader.peer, rows(start, 16, 16, fits), rows(first, 16, 64, fits))
            read(reader.transport, [prepared], timeout_s=10.0)
            expected = np.lib.stride_tricks.sliding_window_view(self.data, 16)[::64]
            assert np.array_equal(reader.target.array[: 16 * fits].reshape(-1, 16), expected)

    def test_wrong_device_and_malformed_rows(self) -> None:
        with self.reader(MIB) as reader:
            good = rows(reader.address, 16), rows(self.remote, 16)
            other = good[1].copy()
            other[:, 2] = 7
            with raises(RegistrationError):
                reader.transport.prepare(reader.peer, good[0], other)
            for local, remote in (
                (good[0].reshape(-1), good[1].reshape(-1)),
                (good[0][:, :2], good[1][:, :2]),
                (good[0], rows([self.remote, self.remote], 16)),
                (good[0], rows(self.remote, 17)),
                (good[0], rows(self.remote, 16, 16, 1)),
                (rows(reader.address, 16, 16, 2), rows(self.remote, 16, 16, 3)),
            ):
                with raises(ValueError):
                    reader.transport.prepare(reader.peer, local, remote)

    def test_unregistered_memory(self) -> None:
        with self.reader(MIB) as reader:
            loose = np.zeros(64, np.uint8)
            with raises(RegistrationError):
                reader.transport.prepare(reader.peer, rows(int(loose.ctypes.data), 64), rows(self.remote, 64))

    def test_damaged_endpoint_messages(self) -> None:
        message = self.endpoint
        random = np.random.default_rng(11)
        bits = [*range(8 * 68), *random.integers(8 * 68, 8 * len(message), 200).tolist()]
        transport = self.open()
        try:
            for bit in bits:
                damaged = bytearray(message)
                damaged[bit // 8] ^= 1 << bit % 8
                with raises(EndpointError):
                    transport.connect(bytes(damaged), timeout_s=1.0)
            for size in (0, 1, 67, 68, len(message) - 1):
                with raises(EndpointError):
                    transport.connect(message[:size], timeout_s=1.0)
            with raises(EndpointError):
                transport.connect(message + b"\0", timeout_s=1.0)
            transport.connect(message, timeout_s=10.0).close()
        finally:
            transport.close()

    def test_another_backends_endpoint_and_a_payload_that_is_no_payload(self) -> None:
        true = decode_endpoint(self.endpoint)
        transport = self.open()
        try:
            table = RegionTable.build([Region(4096, 4096)])
            with raises(EndpointError):
                transport.connect(encode_endpoint(Endpoint("nobody", b"n" * 16, 0, table, b"")), timeout_s=1.0)
            for payload in (b"", b"\0" * len(true.payload), true.payload[: len(true.payload) // 2]):
                forged = encode_endpoint(Endpoint(true.backend, true.incarnation, 0, true.regions, payload))
                with raises(TransportError):
                    transport.connect(forged, timeout_s=1.0)
        finally:
            transport.close()

    def test_an_impostor_at_the_same_address(self) -> None:
        """As after a restart: another incarnation answers where the message points."""
        true = decode_endpoint(self.endpoint)
        forged = encode_endpoint(Endpoint(true.backend, b"\1" * 16, true.generation, true.regions, true.payload))
        transport = self.open()
        try:
            with raises(PeerError, EndpointError):
                transport.connect(forged, timeout_s=2.0)
            transport.connect(self.endpoint, timeout_s=10.0)
        finally:
            transport.close()

    def test_a_name_is_claimed_once(self) -> None:
        with self.reader(MIB) as reader:
            with raises(PeerError) as caught:
                reader.transport.connect(self.endpoint, timeout_s=5.0, name="served")
            assert isinstance(caught[0], PeerError)
            assert caught[0].peer == "served"
            again = reader.transport.connect(self.endpoint, timeout_s=5.0, name="another")
            again.close()
            read(reader.transport, [reader.whole(self.remote, MIB)], timeout_s=10.0)
            reader.peer.close()
            reader.peer = reader.transport.connect(self.endpoint, timeout_s=5.0, name="served")
            read(reader.transport, [reader.whole(self.remote, MIB)], timeout_s=10.0)

    # --- lifetimes ------------------------------------------------------------------------------------

    def test_registrations_are_shared_and_counted(self) -> None:
        with self.reader(3 * KIB) as reader:
            transport, base = reader.transport, reader.address
            reader.registration.close()
            t1, t2, t3 = (Region(base + at * KIB, KIB, owner=reader.target) for at in range(3))
            first, second = transport.register([t1, t2]), transport.register([t2, t3])
            first.close()
            first.close()
            prepared = transport.prepare(reader.peer, rows(t2.address, KIB), rows(self.remote, KIB))
            read(transport, [prepared], timeout_s=5.0)
            with raises(RegistrationError):
                transport.prepare(reader.peer, rows(t1.address, KIB), rows(self.remote, KIB))
            # A prepared list holds the registrations that it writes to.
            second.close()
            read(transport, [prepared], timeout_s=5.0)
            with raises(RegistrationError):
                transport.prepare(reader.peer, rows(t2.address, KIB), rows(self.remote, KIB))
            # Another size at the same address is another region.
            small, large = transport.register([Region(base, 16, owner=reader.target)]), None
            with raises(RegistrationError):
                transport.prepare(reader.peer, rows(base, 32), rows(self.remote, 32))
            large = transport.register([Region(base, 32, owner=reader.target)])
            small.close()
            read(transport, [transport.prepare(reader.peer, rows(base, 32), rows(self.remote, 32))], timeout_s=5.0)
            large.close()

    def test_rows_across_adjacent_regions_are_refused(self) -> None:
        with self.reader(KIB) as reader:
            reader.registration.close()
            halves = [Region(reader.address + at, 512, owner=reader.target) for at in (0, 512)]
            with_both = reader.transport.register(halves)
            with raises(RegistrationError):
                reader.transport.prepare(reader.peer, rows(reader.address + 500, 20), rows(self.remote, 20))
            cut = reader.transport.prepare(
                reader.peer,
                rows([reader.address + 500, reader.address + 512], [12, 8]),
                rows([self.remote, self.remote + 12], [12, 8]),
            )
            read(reader.transport, [cut], timeout_s=5.0)
            assert np.array_equal(reader.target.array[500:520], self.data[:20])
            with_both.close()

    def test_failed_registration_leaves_nothing(self) -> None:
        transport = self.open()
        try:
            before = len(decode_endpoint(transport.endpoint()).regions)
            good = transport.allocate(KIB)
            unmapped = Region(4096, 4096)
            with raises(RegistrationError):
                transport.register([good.region, unmapped])
            assert len(decode_endpoint(transport.endpoint()).regions) == before
            transport.register([good.region]).close()
        finally:
            transport.close()

    def test_withdrawn_regions_are_noticed(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(MIB, 1)
            process.serve(MIB, 2)
            with Reader(self, endpoint, MIB) as reader:
                prepared = reader.whole(remote, MIB)
                read(reader.transport, [prepared], timeout_s=10.0)  # newer regions do no harm
                process.ask("withdraw", which=0)
                with raises(PeerError):
                    read(reader.transport, [prepared], timeout_s=10.0)
                with raises(PeerError):
                    reader.transport.connect(endpoint, timeout_s=5.0, name="stale")
                newer = bytes.fromhex(str(process.ask("endpoint")["endpoint"]))
                reader.peer.close()
                reader.peer = reader.transport.connect(newer, timeout_s=5.0, name="served")
                with raises(RegistrationError):
                    reader.whole(remote, MIB)

    def test_closing_twice_and_using_what_is_closed(self) -> None:
        reader = self.reader(MIB)
        prepared = reader.whole(self.remote, MIB)
        closed_list = reader.whole(self.remote, MIB)
        closed_list.close()
        closed_list.close()
        with raises(TransferError):
            reader.transport.post(closed_list)
        reader.peer.close()
        reader.peer.close()
        with raises(PeerError):
            reader.transport.post(prepared)
        reader.transport.close()
        reader.transport.close()
        prepared.close()
        reader.registration.close()
        reader.target.close()
        for call in (
            lambda: reader.transport.post(prepared),
            lambda: reader.transport.register([]),
            lambda: reader.transport.endpoint(),
            lambda: reader.transport.connect(self.endpoint, timeout_s=1.0),
        ):
            with raises(TransportError):
                call()

    def test_posting_twice_at_once_is_refused(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(LARGE_BYTES, 1)
            with Reader(self, endpoint, LARGE_BYTES) as reader:
                prepared = reader.whole(remote, LARGE_BYTES)
                transfer = reader.transport.post(prepared)
                if transfer.state == "active":
                    with raises(TransferError):
                        reader.transport.post(prepared)
                reader.transport.wait([transfer], timeout_s=30.0)
                read(reader.transport, [prepared], timeout_s=30.0)
                assert np.array_equal(reader.target.array, pattern(LARGE_BYTES, 1))

    def test_close_in_mid_read(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(LARGE_BYTES, 1)
            for what in ("list", "peer", "transport"):
                reader = Reader(self, endpoint, LARGE_BYTES)
                prepared = reader.whole(remote, LARGE_BYTES)
                reader.transport.post(prepared)
                start = time.monotonic()
                {"list": prepared, "peer": reader.peer, "transport": reader.transport}[what].close()
                assert time.monotonic() - start < SLACK_S + 5
                reader.transport.close()
            assert process.alive
            with Reader(self, endpoint, MIB) as reader:
                read(reader.transport, [reader.whole(remote, MIB)], timeout_s=10.0)

    def test_cancelled_reads_drain(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(LARGE_BYTES, 1)
            with Reader(self, endpoint, LARGE_BYTES) as reader:
                prepared = reader.whole(remote, LARGE_BYTES)
                transfer = reader.transport.post(prepared)
                reader.transport.cancel([transfer])
                assert transfer.state in ("done", "cancelled", "abandoned")
                if transfer.state != "done":
                    with raises(TransferError):
                        reader.transport.wait([transfer], timeout_s=5.0)
                reader.transport.wait_quarantine(timeout_s=10.0)
                with Reader(self, endpoint, LARGE_BYTES) as again:
                    read(again.transport, [again.whole(remote, LARGE_BYTES)], timeout_s=30.0)
                    assert np.array_equal(again.target.array, pattern(LARGE_BYTES, 1))

    def test_two_transports_in_one_process(self) -> None:
        with self.reader(MIB) as one, self.reader(MIB) as two:
            for reader in (one, two, one):
                reader.target.array[:] = 0
                read(reader.transport, [reader.whole(self.remote, MIB)], timeout_s=10.0)
                assert np.array_equal(reader.target.array, self.data[:MIB])
            foreign = one.whole(self.remote, MIB)
            with raises(TypeError):
                two.transport.post(foreign)
            with raises(TypeError):
                two.transport.prepare(one.peer, rows(two.address, 8), rows(self.remote, 8))

    def test_a_transport_reads_from_another_in_its_process(self) -> None:
        with self.reader(MIB) as reader:
            source = self.open()
            try:
                served = source.allocate(MIB)
                served.array[:] = pattern(MIB, 9)
                source.register([served.region])
                peer = reader.transport.connect(source.endpoint(), timeout_s=10.0, name="here")
                prepared = reader.transport.prepare(peer, rows(reader.address, MIB), rows(served.region.address, MIB))
                read(reader.transport, [prepared], timeout_s=10.0)
                assert np.array_equal(reader.target.array, pattern(MIB, 9))
            finally:
                source.close()
            with raises(TransportError):
                read(reader.transport, [prepared], timeout_s=5.0)

    def test_no_growth_over_a_thousand_refits(self) -> None:
        with self.reader(MIB) as reader:
            n = 64
            at = np.arange(n) * 256
            mine, theirs = rows(reader.address + at, 128), rows(self.remote + at[::-1], 128)
            kept = reader.transport.prepare(reader.peer, mine, theirs)

            def refit(times: int) -> None:
                for _ in range(times):
                    fresh = reader.transport.prepare(reader.peer, mine, theirs)
                    read(reader.transport, [kept, fresh], timeout_s=10.0)
                    fresh.close()

            refit(200)
            before = resident_bytes()
            refit(1000)
            grown = resident_bytes() - before
            assert grown < 2 * MIB, f"{grown} bytes more after 1,000 refits"

    # --- peers that stop, die and come back ------------------------------------------------------------

    def test_peer_killed_before_the_connection(self) -> None:
        with self.start() as process:
            endpoint, _ = process.serve(MIB, 1)
            process.signal(signal.SIGKILL)
            transport = self.open()
            try:
                with raises(PeerError, TransferTimeoutError, within_s=2.0 + SLACK_S):
                    transport.connect(endpoint, timeout_s=2.0, name="dead")
                self.still_reads(transport)
            finally:
                transport.close()

    def test_peer_killed_between_reads(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(MIB, 1)
            with Reader(self, endpoint, MIB) as reader:
                prepared = reader.whole(remote, MIB)
                read(reader.transport, [prepared], timeout_s=10.0)
                process.signal(signal.SIGKILL)
                reader.target.array[:] = 0xA5
                with raises(PeerError, TransferTimeoutError, within_s=2.0 + SLACK_S) as caught:
                    read(reader.transport, [prepared], timeout_s=2.0)
                assert isinstance(caught[0], TransportError)
                assert caught[0].peer == "served"
                # A peer that failed stays failed until it is connected anew.
                with raises(PeerError):
                    reader.transport.post(prepared)
                reader.transport.wait_quarantine(timeout_s=10.0)
                self.still_reads(reader.transport)

    def test_peer_killed_during_a_read(self) -> None:
        self.interrupted(signal.SIGKILL)

    def test_peer_stopped_during_a_read(self) -> None:
        self.interrupted(signal.SIGSTOP)

    def interrupted(self, how: signal.Signals) -> None:
        """Signal the peer while it is read: either all bytes are right, or an error comes within the deadline."""
        with self.start() as process:
            endpoint, remote = process.serve(LARGE_BYTES, 1)
            with Reader(self, endpoint, LARGE_BYTES) as reader:
                prepared = reader.whole(remote, LARGE_BYTES)
                transfer = reader.transport.post(prepared)
                process.signal(how)
                start = time.monotonic()
                try:
                    reader.transport.wait([transfer], timeout_s=2.0)
                except (PeerError, TransferError):
                    assert time.monotonic() - start < 2.0 + SLACK_S
                    self.quarantine_holds(reader)
                else:
                    assert np.array_equal(reader.target.array, pattern(LARGE_BYTES, 1))
                self.still_reads(reader.transport)

    def quarantine_holds(self, reader: Reader) -> None:
        """After a failed read: what is quarantined is refused, then lifted, and nothing lands after that."""
        transport = reader.transport
        if transport.quarantined():
            other = transport.connect(self.endpoint, timeout_s=5.0, name="other")
            into = transport.prepare(other, rows(reader.address, KIB), rows(self.remote, KIB))
            with raises(PoisonedMemoryError):
                transport.post(into)
            transport.wait_quarantine(timeout_s=10.0)
            assert transport.quarantined() == ()
            read(transport, [into], timeout_s=10.0)
            assert np.array_equal(reader.target.array[:KIB], self.data[:KIB])
            other.close()
        before = reader.target.array.copy()
        time.sleep(0.2)
        assert np.array_equal(reader.target.array, before), "bytes landed after the quarantine was lifted"

    def still_reads(self, transport: Transport) -> None:
        """A healthy peer is read as if nothing had happened."""
        target = transport.allocate(MIB)
        registration = transport.register([target.region])
        peer = transport.connect(self.endpoint, timeout_s=10.0, name="healthy")
        prepared = transport.prepare(peer, rows(target.region.address, MIB), rows(self.remote, MIB))
        read(transport, [prepared], timeout_s=10.0)
        assert np.array_equal(target.array, self.data[:MIB])
        peer.close()
        registration.close()

    def test_one_dead_peer_of_three(self) -> None:
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(self.start()) for _ in range(3)]
            served = [process.serve(MIB, seed) for seed, process in enumerate(processes)]
            transport = self.open()
            stack.callback(transport.close)
            target = transport.allocate(3 * MIB)
            transport.register([target.region])
            lists = []
            for at, (endpoint, remote) in enumerate(served):
                peer = transport.connect(endpoint, timeout_s=10.0, name=f"peer-{at}")
                lists.append(transport.prepare(peer, rows(target.region.address + at * MIB, MIB), rows(remote, MIB)))
            processes[1].signal(signal.SIGKILL)
            with raises(PeerError, TransferTimeoutError, within_s=3.0 + SLACK_S) as caught:
                read(transport, lists, timeout_s=3.0, finish_others=True)
            error = caught[0]
            assert isinstance(error, TransportError)
            assert error.peer == "peer-1"
            assert error.failures["peer-0"] == error.failures["peer-2"] == "done"
            assert error.failures["peer-1"] != "done"
            for at in (0, 2):
                assert np.array_equal(target.array[at * MIB : (at + 1) * MIB], pattern(MIB, at))

    def test_peer_restarted(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(MIB, 1)
            with Reader(self, endpoint, MIB) as reader:
                old = reader.whole(remote, MIB)
                read(reader.transport, [old], timeout_s=10.0)
                process.signal(signal.SIGKILL)
                with self.start() as successor:
                    newer, remote = successor.serve(MIB, 2)
                    with raises(PeerError, TransferTimeoutError, within_s=2.0 + SLACK_S):
                        read(reader.transport, [old], timeout_s=2.0)
                    reader.transport.wait_quarantine(timeout_s=10.0)
                    reader.peer.close()
                    reader.peer = reader.transport.connect(newer, timeout_s=10.0, name="served")
                    read(reader.transport, [reader.whole(remote, MIB)], timeout_s=10.0)
                    assert np.array_equal(reader.target.array, pattern(MIB, 2))

    def test_peer_closes_its_transport(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(MIB, 1)
            with Reader(self, endpoint, MIB) as reader:
                prepared = reader.whole(remote, MIB)
                read(reader.transport, [prepared], timeout_s=10.0)
                process.ask("close")
                with raises(TransportError, within_s=2.0 + SLACK_S):
                    read(reader.transport, [prepared], timeout_s=2.0)
                reader.transport.wait_quarantine(timeout_s=10.0)
                self.still_reads(reader.transport)

    def test_a_reader_killed_in_mid_read_leaves_the_peer_whole(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(LARGE_BYTES, 1)
            with self.start() as victim:
                victim.tell("read", endpoint=endpoint.hex(), address=remote, nbytes=LARGE_BYTES, times=1000)
                victim.answer()
                time.sleep(0.1)
                victim.signal(signal.SIGKILL)
            with Reader(self, endpoint, LARGE_BYTES) as reader:
                read(reader.transport, [reader.whole(remote, LARGE_BYTES)], timeout_s=20.0)
                assert np.array_equal(reader.target.array, pattern(LARGE_BYTES, 1))
            assert process.alive


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
