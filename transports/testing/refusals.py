"""What is refused, before anything is read."""

# ruff: noqa: D102, S101 - tests: their names say what they show, and they assert

from __future__ import annotations

import numpy as np

from reshard.transports.base import read
from reshard.transports.endpoint import Endpoint, decode_endpoint, encode_endpoint
from reshard.transports.errors import (
    EndpointError,
    PeerError,
    RegistrationError,
    TransferTimeoutError,
    TransportError,
)
from reshard.transports.regions import Region, RegionTable
from reshard.transports.testing.harness import (
    LONG_S,
    MIB,
    SERVED_BYTES,
    SLACK_S,
    ContractBase,
    raises,
    rows,
)


class RefusalContract(ContractBase):
    """See the module."""

    def test_bad_timeouts(self) -> None:
        """Case T3."""
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
            read(reader.transport, [prepared], timeout_s=LONG_S)

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
            read(reader.transport, [prepared], timeout_s=LONG_S)
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
            self.still_reads(reader.transport)

    def test_unregistered_memory(self) -> None:
        with self.reader(MIB) as reader:
            loose = np.zeros(64, np.uint8)
            with raises(RegistrationError):
                reader.transport.prepare(reader.peer, rows(int(loose.ctypes.data), 64), rows(self.remote, 64))
            self.still_reads(reader.transport)

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
            self.still_reads(transport)
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
            self.still_reads(transport)
        finally:
            transport.close()

    def test_an_impostor_at_the_same_address(self) -> None:
        """As after a restart: another incarnation answers where the message points."""
        true = decode_endpoint(self.endpoint)
        forged = encode_endpoint(Endpoint(true.backend, b"\1" * 16, true.generation, true.regions, true.payload))
        transport = self.open()
        try:
            with raises(PeerError, EndpointError, TransferTimeoutError, within_s=2.0 + SLACK_S):
                transport.connect(forged, timeout_s=2.0)
            self.still_reads(transport)
        finally:
            transport.close()

    def test_a_name_is_claimed_once(self) -> None:
        with self.reader(MIB) as reader:
            with raises(PeerError) as caught:
                reader.transport.connect(self.endpoint, timeout_s=LONG_S, name="served")
            assert isinstance(caught[0], PeerError)
            assert caught[0].peer == "served"
            again = reader.transport.connect(self.endpoint, timeout_s=LONG_S, name="another")
            again.close()
            read(reader.transport, [reader.whole(self.remote, MIB)], timeout_s=LONG_S)
            reader.peer.close()
            reader.peer = reader.transport.connect(self.endpoint, timeout_s=LONG_S, name="served")
            read(reader.transport, [reader.whole(self.remote, MIB)], timeout_s=LONG_S)
