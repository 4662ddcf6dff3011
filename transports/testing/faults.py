"""Peers that stop, die, restart, withdraw memory or close while they are read."""

# ruff: noqa: D102, S101 - tests: their names say what they show, and they assert

from __future__ import annotations

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from reshard.transports.base import Peer, read
from reshard.transports.errors import (
    PeerError,
    PoisonedMemoryError,
    TransferError,
    TransferTimeoutError,
    TransportError,
)
from reshard.transports.peer_process import pattern
from reshard.transports.testing.harness import (
    KIB,
    LARGE_BYTES,
    LONG_S,
    MIB,
    SLACK_S,
    ContractBase,
    Reader,
    raises,
    rows,
)


class FaultContract(ContractBase):
    """See the module."""

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
                read(reader.transport, [prepared], timeout_s=LONG_S)
                process.signal(signal.SIGKILL)
                reader.target.array[:] = 0xA5
                with raises(PeerError, TransferTimeoutError, within_s=2.0 + SLACK_S) as caught:
                    read(reader.transport, [prepared], timeout_s=2.0)
                assert isinstance(caught[0], TransportError)
                assert caught[0].peer == "served"
                # A peer that failed stays failed until it is connected anew.
                with raises(PeerError):
                    reader.transport.post(prepared)
                reader.transport.wait_quarantine(timeout_s=LONG_S)
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
            other = transport.connect(self.endpoint, timeout_s=LONG_S, name="other")
            into = transport.prepare(other, rows(reader.address, KIB), rows(self.remote, KIB))
            with raises(PoisonedMemoryError):
                transport.post(into)
            transport.wait_quarantine(timeout_s=LONG_S)
            assert transport.quarantined() == ()
            read(transport, [into], timeout_s=LONG_S)
            assert np.array_equal(reader.target.array[:KIB], self.data[:KIB])
            other.close()
        before = reader.target.array.copy()
        time.sleep(0.2)
        assert np.array_equal(reader.target.array, before), "bytes landed after the quarantine was lifted"

    def test_one_of_three_peers_is_dead_before_they_are_connected(self) -> None:
        """Case T2: two connect, the error names the third, all within one budget; and the two are read."""
        budget_s = 20.0
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(self.start()) for _ in range(3)]
            served = [process.serve(MIB, seed) for seed, process in enumerate(processes)]
            processes[1].signal(signal.SIGKILL)
            transport = self.open()
            stack.callback(transport.close)
            target = transport.allocate(3 * MIB)
            transport.register([target.region])
            start = time.monotonic()

            def dial(at: int) -> Peer | TransportError:
                left = max(budget_s - (time.monotonic() - start), 1e-3)
                try:
                    return transport.connect(served[at][0], timeout_s=left, name=f"peer-{at}")
                except TransportError as error:
                    return error

            with ThreadPoolExecutor(3) as pool:
                peers = dict(enumerate(pool.map(dial, range(3))))
            assert time.monotonic() - start < budget_s + SLACK_S
            refused = peers.pop(1)
            assert isinstance(refused, (PeerError, TransferTimeoutError)), refused
            assert refused.peer == "peer-1"
            assert "peer-1" in str(refused)
            lists = []
            for at, peer in peers.items():
                assert not isinstance(peer, TransportError), peer
                here, there = target.region.address + at * MIB, served[at][1]
                lists.append(transport.prepare(peer, rows(here, MIB), rows(there, MIB)))
            read(transport, lists, timeout_s=LONG_S)
            for at in peers:
                assert np.array_equal(target.array[at * MIB : (at + 1) * MIB], pattern(MIB, at))
            self.still_reads(transport)

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
                peer = transport.connect(endpoint, timeout_s=LONG_S, name=f"peer-{at}")
                lists.append(transport.prepare(peer, rows(target.region.address + at * MIB, MIB), rows(remote, MIB)))
            processes[1].signal(signal.SIGKILL)
            with raises(PeerError, TransferTimeoutError, within_s=20.0 + SLACK_S) as caught:
                read(transport, lists, timeout_s=20.0, finish_others=True)
            error = caught[0]
            assert isinstance(error, TransportError)
            assert error.peer == "peer-1"
            assert error.failures["peer-0"] == error.failures["peer-2"] == "done"
            assert error.failures["peer-1"] != "done"
            for at in (0, 2):
                assert np.array_equal(target.array[at * MIB : (at + 1) * MIB], pattern(MIB, at))
            transport.wait_quarantine(timeout_s=LONG_S)
            self.still_reads(transport)

    def test_peer_restarted(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(MIB, 1)
            with Reader(self, endpoint, MIB) as reader:
                old = reader.whole(remote, MIB)
                read(reader.transport, [old], timeout_s=LONG_S)
                process.signal(signal.SIGKILL)
                with self.start() as successor:
                    newer, remote = successor.serve(MIB, 2)
                    with raises(PeerError, TransferTimeoutError, within_s=2.0 + SLACK_S):
                        read(reader.transport, [old], timeout_s=2.0)
                    reader.transport.wait_quarantine(timeout_s=LONG_S)
                    reader.peer.close()
                    reader.peer = reader.transport.connect(newer, timeout_s=LONG_S, name="served")
                    read(reader.transport, [reader.whole(remote, MIB)], timeout_s=LONG_S)
                    assert np.array_equal(reader.target.array, pattern(MIB, 2))

    def test_peer_closes_its_transport(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(MIB, 1)
            with Reader(self, endpoint, MIB) as reader:
                prepared = reader.whole(remote, MIB)
                read(reader.transport, [prepared], timeout_s=LONG_S)
                process.ask("close")
                with raises(TransportError, within_s=2.0 + SLACK_S):
                    read(reader.transport, [prepared], timeout_s=2.0)
                reader.transport.wait_quarantine(timeout_s=LONG_S)
                self.still_reads(reader.transport)

    def test_owner_closes_while_it_is_read(self) -> None:
        for delay_s in (0.0, 0.004):
            with self.start() as process:
                endpoint, remote = process.serve(LARGE_BYTES, 1)
                with Reader(self, endpoint, LARGE_BYTES) as reader:
                    transfer = reader.transport.post(reader.whole(remote, LARGE_BYTES))
                    time.sleep(delay_s)
                    process.tell("close")
                    with contextlib.suppress(TransportError):
                        reader.transport.wait([transfer], timeout_s=3.0)
                        assert np.array_equal(reader.target.array, pattern(LARGE_BYTES, 1))
                    process.answer()
                    reader.transport.wait_quarantine(timeout_s=LONG_S)
                    self.still_reads(reader.transport)
                assert process.close() == 0

    def test_a_reader_killed_in_mid_read_leaves_the_peer_whole(self) -> None:
        """Case T1: the next reader succeeds."""
        with self.start() as process:
            endpoint, remote = process.serve(LARGE_BYTES, 1)
            with self.start() as victim:
                victim.tell("read", endpoint=endpoint.hex(), address=remote, nbytes=LARGE_BYTES, times=1000)
                victim.answer()
                time.sleep(0.1)
                victim.signal(signal.SIGKILL)
            with Reader(self, endpoint, LARGE_BYTES) as reader:
                read(reader.transport, [reader.whole(remote, LARGE_BYTES)], timeout_s=LONG_S)
                assert np.array_equal(reader.target.array, pattern(LARGE_BYTES, 1))
            assert process.alive
