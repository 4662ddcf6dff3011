"""Registrations, lists, peers and transports: shared, closed in any order, in mid read, twice."""

# ruff: noqa: D102, S101 - tests: their names say what they show, and they assert

from __future__ import annotations

import gc
import time
import weakref

import numpy as np

from reshard.transports.base import read
from reshard.transports.endpoint import decode_endpoint
from reshard.transports.errors import (
    PeerError,
    RegistrationError,
    TransferError,
    TransportError,
)
from reshard.transports.peer_process import pattern
from reshard.transports.regions import Region
from reshard.transports.testing.harness import (
    KIB,
    LARGE_BYTES,
    LONG_S,
    MIB,
    SLACK_S,
    ContractBase,
    Reader,
    raises,
    resident_bytes,
    rows,
)


class LifetimeContract(ContractBase):
    """See the module."""

    def test_registrations_are_shared_and_counted(self) -> None:
        """Cases T6 and T7: a region is its address and its size, and lives as long as one list that has it."""
        with self.reader(3 * KIB) as reader:
            transport, base = reader.transport, reader.address
            reader.registration.close()
            t1, t2, t3 = (Region(base + at * KIB, KIB, owner=reader.target) for at in range(3))
            first, second = transport.register([t1, t2]), transport.register([t2, t3])
            first.close()
            first.close()
            prepared = transport.prepare(reader.peer, rows(t2.address, KIB), rows(self.remote, KIB))
            read(transport, [prepared], timeout_s=LONG_S)
            with raises(RegistrationError):
                transport.prepare(reader.peer, rows(t1.address, KIB), rows(self.remote, KIB))
            # A prepared list holds the registrations that it writes to.
            second.close()
            read(transport, [prepared], timeout_s=LONG_S)
            with raises(RegistrationError):
                transport.prepare(reader.peer, rows(t2.address, KIB), rows(self.remote, KIB))
            # Another size at the same address is another region.
            small, large = transport.register([Region(base, 16, owner=reader.target)]), None
            with raises(RegistrationError):
                transport.prepare(reader.peer, rows(base, 32), rows(self.remote, 32))
            large = transport.register([Region(base, 32, owner=reader.target)])
            small.close()
            read(transport, [transport.prepare(reader.peer, rows(base, 32), rows(self.remote, 32))], timeout_s=LONG_S)
            large.close()

    def test_a_registration_keeps_its_memory(self) -> None:
        """What a peer may read is not unmapped because its owner forgot it: that would end this process over TCP."""
        transport = self.open()
        try:
            allocation = transport.allocate(KIB)
            kept = weakref.ref(allocation.region.owner)
            registration = transport.register([allocation.region])
            allocation.close()
            del allocation
            gc.collect()
            assert kept() is not None
            registration.close()
            del registration
            gc.collect()
            assert kept() is None
        finally:
            transport.close()

    def test_rows_across_adjacent_regions_are_refused(self) -> None:
        """Case T8, of rows: cut where one allocation ends they are read, uncut they are refused."""
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
            read(reader.transport, [cut], timeout_s=LONG_S)
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
            self.still_reads(transport)
        finally:
            transport.close()

    def test_withdrawn_regions_are_noticed(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(MIB, 1)
            process.serve(MIB, 2)
            with Reader(self, endpoint, MIB) as reader:
                prepared = reader.whole(remote, MIB)
                read(reader.transport, [prepared], timeout_s=LONG_S)  # newer regions do no harm
                process.ask("withdraw", which=0)
                with raises(PeerError):
                    read(reader.transport, [prepared], timeout_s=LONG_S)
                with raises(PeerError):
                    reader.transport.connect(endpoint, timeout_s=LONG_S, name="stale")
                newer = bytes.fromhex(str(process.ask("endpoint")["endpoint"]))
                reader.peer.close()
                reader.peer = reader.transport.connect(newer, timeout_s=LONG_S, name="served")
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
                try:
                    second = reader.transport.post(prepared)
                except TransferError:
                    assert transfer.state in ("active", "done")
                else:
                    assert transfer.state == "done", "posted again while it was in flight"
                    reader.transport.wait([second], timeout_s=LONG_S)
                reader.transport.wait([transfer], timeout_s=LONG_S)
                read(reader.transport, [prepared], timeout_s=LONG_S)
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
                read(reader.transport, [reader.whole(remote, MIB)], timeout_s=LONG_S)

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
                reader.transport.wait_quarantine(timeout_s=LONG_S)
                with Reader(self, endpoint, LARGE_BYTES) as again:
                    read(again.transport, [again.whole(remote, LARGE_BYTES)], timeout_s=LONG_S)
                    assert np.array_equal(again.target.array, pattern(LARGE_BYTES, 1))

    def test_two_transports_in_one_process(self) -> None:
        with self.reader(MIB) as one, self.reader(MIB) as two:
            for reader in (one, two, one):
                reader.target.array[:] = 0
                read(reader.transport, [reader.whole(self.remote, MIB)], timeout_s=LONG_S)
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
                peer = reader.transport.connect(source.endpoint(), timeout_s=LONG_S, name="here")
                prepared = reader.transport.prepare(peer, rows(reader.address, MIB), rows(served.region.address, MIB))
                read(reader.transport, [prepared], timeout_s=LONG_S)
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
                    read(reader.transport, [kept, fresh], timeout_s=LONG_S)
                    fresh.close()

            refit(200)
            grown: list[int] = []
            while len(grown) < 3 and (not grown or grown[-1] >= 2 * MIB):  # what leaks does so each time
                before = resident_bytes()
                refit(1000)
                grown.append(resident_bytes() - before)
            assert grown[-1] < 2 * MIB, f"{grown} bytes more after 1,000 refits each"
