"""The ring of requests and the payload of the endpoint message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.transports import EndpointError
from reshard.transports.identity import ProcessIdentity
from reshard.transports.ucx import UcxTransport
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.gets import Gets
from reshard.transports.ucx.payload import UcxAddress, decode_address, encode_address
from reshard.transports.ucx.requests import CHUNK, N_CHUNKS

keys = st.binary(min_size=1, max_size=40)
processes = st.builds(
    ProcessIdentity, st.binary(min_size=16, max_size=16), *(st.integers(0, 2**bits - 1) for bits in (64, 32, 64))
)
addresses = st.builds(
    UcxAddress,
    processes,
    st.binary(min_size=1, max_size=200),
    st.integers(1, 2**64 - 1),
    st.integers(-(2**31), 2**31 - 1),
    keys,
    st.lists(keys, max_size=5).map(tuple),
)


@given(addresses)
def test_payload_round_trip(address):
    assert decode_address(encode_address(address), len(address.keys)) == address


@given(addresses, st.data())
def test_a_damaged_payload_is_refused_or_decodes_to_something_bounded(address, data):
    """The endpoint's checksum finds damage; behind it only sizes have to be right."""
    payload = bytearray(encode_address(address))
    at = data.draw(st.integers(0, len(payload) * 8 - 1))
    payload[at // 8] ^= 1 << at % 8
    cut = data.draw(st.integers(0, len(payload)))
    try:
        decoded = decode_address(bytes(payload[:cut]), len(address.keys))
    except EndpointError:
        return
    assert len(decoded.keys) == len(address.keys)
    assert all((decoded.worker, decoded.beacon_key, *decoded.keys))


def test_keys_must_match_the_region_table():
    payload = encode_address(UcxAddress(ProcessIdentity.own(), b"w", 1, 3, b"k", (b"a", b"b")))
    with pytest.raises(EndpointError, match="2 keys, expected 3"):
        decode_address(payload, 3)


@pytest.mark.skipif(bool(UcxTransport.probe()), reason=f"ucx does not work here: {UcxTransport.probe()}")
class TestRing:
    """Against a stand-in for ``ucp_get_nbx`` that ends requests at once, later, or with an error."""

    @pytest.fixture
    def ring(self, monkeypatch):
        from reshard.transports.ucx.library import load_library
        from reshard.transports.ucx.requests import RequestRing

        library = load_library()
        ring = RequestRing(library, 280)
        self.pending: list[tuple[int, int, int]] = []
        self.end_at_once: list[int] = []
        self.rows: list[tuple[int, ...]] = []
        self.pointer = lambda number: library.ffi.cast("void *", number)
        params_type = "ucp_request_param_t *"

        def get(endpoint: object, buffer: object, count: int, remote: object, rkey: object, params: object) -> int:
            row = tuple(int(library.ffi.cast("uintptr_t", at)) for at in (endpoint, buffer, remote, rkey))
            self.rows.append((row[0], row[1], count, *row[2:]))
            if self.end_at_once:
                return self.end_at_once.pop(0) % 2**64
            fields = library.ffi.cast(params_type, params)
            request, callback = (int(library.ffi.cast("uintptr_t", f)) for f in (fields.request, fields.cb))
            assert request % 64 == 0
            self.pending.append((request, callback, int(library.ffi.cast("uintptr_t", fields.user_data))))
            return request

        def finish(which: int, status: int) -> None:
            """Call the callback as UCX does, with a status of one signed byte."""
            request, callback, user_data = self.pending[which]
            call = library.ffi.cast("void (*)(uintptr_t, ucs_status_t, uintptr_t)", callback)
            call(request, status, user_data)

        self.finish = finish
        monkeypatch.setattr(ring, "_get", get)
        return ring

    def post(self, ring, n: int) -> int:
        one = np.ones(1, np.uint64)
        column = np.arange(1, n + 1, dtype=np.uint64)
        return ring.post(self.pointer(5), (column, column + 1, column + 2), one, self.pointer(9), 0)

    def test_what_is_posted(self, ring):
        high = np.array([2**63 + 8, 2**64 - 16], np.uint64)
        keys = np.array([2**47, 3], np.uint64)
        ring.post(self.pointer(5), (high, np.array([1, 2**40], np.uint64), high[::-1].copy()), keys, keys, 0)
        ring.post_one(self.pointer(6), self.pointer(7), 8, self.pointer(2**64 - 1), 1, self.pointer(9), 0)
        assert self.rows == [
            (5, 2**63 + 8, 1, 2**64 - 16, 2**47),
            (5, 2**64 - 16, 2**40, 2**63 + 8, 3),
            (6, 7, 8, 2**64 - 1, 9),
        ]

    def test_a_chunk_is_in_flight_until_its_last_request_ends(self, ring):
        chunk = self.post(ring, 3)
        assert ring.in_flight(chunk)
        assert ring.n_busy()
        self.finish(2, d.OK)
        self.finish(0, d.OK)
        assert ring.in_flight(chunk)
        self.finish(1, d.OK)
        assert not ring.in_flight(chunk)
        assert ring.release(chunk) == d.OK
        assert not ring.n_busy()

    @pytest.mark.parametrize("status", [-1, d.ERR_IO_ERROR, -25, -80, d.ERR_LAST + 1])
    def test_one_error_among_many_is_found(self, ring, status):
        chunk = self.post(ring, 256)
        for which in range(256):
            self.finish(which, status if which == 200 else d.OK)
        assert not ring.in_flight(chunk)
        assert ring.release(chunk) == status

    def test_requests_that_end_at_once(self, ring):
        self.end_at_once = [0, 0]
        chunk = self.post(ring, 2)
        assert not ring.in_flight(chunk)
        assert ring.release(chunk) == d.OK
        self.end_at_once = [0, -3]
        chunk = self.post(ring, 3)
        assert ring.in_flight(chunk)
        self.finish(0, d.OK)
        assert ring.release(chunk) == -3

    def test_chunks_do_not_share_statuses(self, ring):
        first, second = self.post(ring, 256), self.post(ring, 256)
        for which in range(256):
            self.finish(which, d.OK)
        assert not ring.in_flight(first)
        assert ring.in_flight(second)
        for which in range(256, 512):
            self.finish(which, d.OK)
        assert ring.release(first) == ring.release(second) == d.OK

    def test_a_short_chunk_after_a_failed_long_one(self, ring):
        chunk = self.post(ring, 256)
        for which in range(256):
            self.finish(which, -3)
        assert ring.release(chunk) == -3
        again = self.post(ring, 1)
        assert again != chunk
        assert again % N_CHUNKS == chunk % N_CHUNKS
        self.finish(256, d.OK)
        assert ring.release(again) == d.OK

    def test_what_has_ended_takes_no_place_even_if_its_list_never_asks(self, ring):
        """A list that is waited for alone must not wait for others of its connection that nobody drives."""
        tickets = [self.post(ring, 2) for _ in range(N_CHUNKS)]
        assert ring.n_free == 0
        for which, status in ((0, d.OK), (1, -3), (4, d.OK), (5, d.OK)):
            self.finish(which, status)
        assert ring.n_free == 2
        later = [self.post(ring, 2), self.post(ring, 2)]
        assert len({*tickets, *later}) == N_CHUNKS + 2
        assert [ring.in_flight(ticket) for ticket in (*tickets, *later)] == [False, True, False, True, True, True]
        for which in range(8, 12):
            self.finish(which, d.OK)
        assert [ring.release(ticket) for ticket in (*later, tickets[2], tickets[0])] == [d.OK, d.OK, d.OK, -3]
        assert ring.n_free == 2


@pytest.mark.parametrize(("nbytes", "kept"), [(16 << 10, 3), ((16 << 10) - 1, 0)])
def test_what_is_posted_of_large_gets_is_kept_for_the_next_time(nbytes: int, kept: int) -> None:
    """And is what would have been made anew."""
    posted: list[tuple[list[int], list[int], list[int]]] = []

    class Ring:
        n_free = 4

        def cast(self, _: str, number: int) -> int:
            return number

        def listed(self, columns: tuple[np.ndarray, ...]) -> tuple[list[int], ...]:
            return tuple(column.tolist() for column in columns)

        def post(self, endpoint: object, columns: tuple[list[int], list[int], list[int]], *rest: object) -> int:
            posted.append(columns)
            return 0

    n = 2 * CHUNK + 5
    columns = np.arange(n, dtype=np.uint64), np.full(n, nbytes, np.uint64), np.arange(n, dtype=np.uint64) + np.uint64(7)
    one = np.ones(1, np.uint64)
    gets = Gets(Ring(), columns, one, one, 0)  # type: ignore[arg-type]
    for _ in range(2):
        while gets.next < gets.size:
            gets.post_next(object())
        gets.chunks.clear()
        gets.rewind()
    assert len(gets._listed) == kept
    for times in (posted[:3], posted[3:]):
        for column, listed in zip(columns, zip(*times, strict=True), strict=True):
            assert [value for chunk in listed for value in chunk] == column.tolist()
