"""The right bytes, whatever the shape of the list."""

# ruff: noqa: D102, S101 - tests: their names say what they show, and they assert

from __future__ import annotations

import contextlib

import numpy as np

from reshard.transports.base import read
from reshard.transports.peer_process import pattern
from reshard.transports.testing.harness import (
    LONG_S,
    MIB,
    SERVED_BYTES,
    ContractBase,
    Reader,
    raises,
    rows,
)


class BytesContract(ContractBase):
    """See the module."""

    def test_one_row_brings_the_bytes(self) -> None:
        with self.reader() as reader:
            prepared = reader.whole(self.remote, SERVED_BYTES)
            stats = read(reader.transport, [prepared], timeout_s=LONG_S)
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
            read(reader.transport, [prepared], timeout_s=LONG_S)
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
            read(reader.transport, [prepared], timeout_s=LONG_S)
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
                peer = transport.connect(endpoint, timeout_s=LONG_S, name=f"peer-{at}")
                lists.append(transport.prepare(peer, rows(target.region.address + at * MIB, MIB), rows(remote, MIB)))
            stats = read(transport, lists, timeout_s=LONG_S)
            assert sorted(stats.per_peer) == ["peer-0", "peer-1", "peer-2"]
            for at in range(3):
                assert np.array_equal(target.array[at * MIB : (at + 1) * MIB], pattern(MIB, at))

    def test_no_rows_and_rows_of_no_bytes(self) -> None:
        with self.reader() as reader:
            nothing = reader.transport.prepare(reader.peer, rows([], []), rows([], []))
            assert read(reader.transport, [nothing], timeout_s=LONG_S).bytes == 0
            # Rows that carry nothing may point anywhere.
            mixed = reader.transport.prepare(
                reader.peer,
                rows([reader.address, 1, reader.address + 9], [4, 0, 5]),
                rows([self.remote, 2, self.remote], [4, 0, 5]),
            )
            assert read(reader.transport, [mixed], timeout_s=LONG_S).bytes == 9
            assert np.array_equal(reader.target.array[:4], self.data[:4])
            assert np.array_equal(reader.target.array[9:14], self.data[:5])
            assert read(reader.transport, [], timeout_s=LONG_S).bytes == 0

    def test_a_list_of_a_million(self) -> None:
        n = 1_000_000
        order = np.random.default_rng(5).permutation(n)
        with self.reader() as reader:
            prepared = reader.transport.prepare(
                reader.peer, rows(reader.address + np.arange(n) * 8, 8), rows(self.remote + order * 8, 8)
            )
            read(reader.transport, [prepared], timeout_s=LONG_S)
            assert np.array_equal(reader.target.array[: 8 * n].view("<u8"), self.data[: 8 * n].view("<u8")[order])

    def test_more_runs_than_the_backend_takes_are_refused(self) -> None:
        with self.reader() as reader:
            many = reader.transport.capabilities.max_runs + 1
            with raises(ValueError):
                reader.transport.prepare(reader.peer, rows(reader.address, 1, 0, many), rows(self.remote, 1, 0, many))
            self.still_reads(reader.transport)

    def test_overlapping_destinations_do_no_harm(self) -> None:
        with self.reader() as reader:
            prepared = reader.transport.prepare(
                reader.peer,
                rows(reader.address + np.array([0, 500, 250]), 1000),
                rows(self.remote + np.array([0, 5000, 9000]), 1000),
            )
            read(reader.transport, [prepared], timeout_s=LONG_S)
            assert np.array_equal(reader.target.array[:250], self.data[:250])
            assert np.array_equal(reader.target.array[1250:1500], self.data[5750:6000])
            # Where two rows overlap, each byte is one source's or the other's.
            for start, stop, of in ((250, 500, (250, 9000)), (500, 1000, (5000, 9250)), (1000, 1250, (5500, 9750))):
                got, at = reader.target.array[start:stop], stop - start
                assert ((got == self.data[of[0] : of[0] + at]) | (got == self.data[of[1] : of[1] + at])).all()
            self.still_reads(reader.transport)

    def test_posted_again_after_the_source_changed(self) -> None:
        with self.start() as process:
            endpoint, remote = process.serve(MIB, 1)
            with Reader(self, endpoint, MIB) as reader:
                prepared = reader.whole(remote, MIB)
                for seed in (1, 2, 3):
                    process.ask("fill", which=0, seed=seed)
                    read(reader.transport, [prepared], timeout_s=LONG_S)
                    assert np.array_equal(reader.target.array, pattern(MIB, seed))
