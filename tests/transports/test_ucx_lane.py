"""What a list becomes for UCX, and that a connection that failed once is never used again."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from reshard.transports import PeerError, Region, RegionTable, TransferError, open_transport, read
from reshard.transports.ledger import Entry
from reshard.transports.lists import ConnectedPeer, Work
from reshard.transports.testing import rows
from reshard.transports.ucx import UcxTransport
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.context import MappedMemory
from reshard.transports.ucx.peers import UcxPeer

pytestmark = pytest.mark.skipif(bool(UcxTransport.probe()), reason=f"ucx does not work here: {UcxTransport.probe()}")

NBYTES = 1 << 16


@pytest.fixture
def connected():
    with open_transport("ucx") as owner, open_transport("ucx") as reader:
        served, target = owner.allocate(NBYTES), reader.allocate(NBYTES)
        served.array[:] = 7
        owner.register([served.region])
        reader.register([target.region])
        peer = reader.connect(owner.endpoint(), timeout_s=60.0, name="owner")
        half = NBYTES // 2
        local = rows(target.region.address + np.array([half, 0]), half)
        remote = rows(served.region.address + np.array([half, 0]), half)
        yield reader, peer, reader.prepare(peer, local, remote)


@pytest.mark.parametrize(("memory", "number"), [("dram", d.MEMORY_TYPE_HOST), ("vram", d.MEMORY_TYPE_CUDA)])
@pytest.mark.parametrize("n", [1, 3])
def test_each_get_says_what_memory_it_fills(connected, memory, number, n):
    """No device is needed to see what UCX would be told."""
    reader, peer, _ = connected
    if memory == "vram":
        peer.native.routes = (("cuda_ipc", "cuda"),)
    region = Region(1 << 20, NBYTES, memory, 3)
    at = np.arange(n)[::-1] * 100
    work = Work(
        local=rows((1 << 20) + at, 10),
        remote=rows(peer.endpoint.regions.address[0] + at.astype(np.uint64), 10),
        local_region=np.zeros(1, np.intp),
        remote_region=np.zeros(1, np.intp),
        local_entries=[Entry(region, MappedMemory(0x77, b"", number))],
        remote_table=RegionTable.build([]),
        cuts=[0, n],
        local_memory=memory,
        remote_memory=memory,
    )
    (piece,) = reader._build(peer, work)
    ring = peer.native.lane.ring
    posted: list[tuple[int, int]] = []
    cast = reader._context.library.ffi.cast

    def get(endpoint: object, local: object, nbytes: int, remote: object, rkey: object, params: object) -> int:
        fields = cast("ucp_request_param_t *", params)
        assert fields.op_attr_mask & d.OP_FIELD_MEMORY_TYPE
        assert fields.op_attr_mask & d.OP_FIELD_MEMH
        posted.append((int(fields.memory_type), int(fields.memh)))
        return 0

    native, ring._get = ring._get, get
    try:
        assert piece.post()
    finally:
        ring._get = native
    assert posted == [(number, 0x77)] * n


@pytest.mark.parametrize("n", [1, 2])
def test_a_connection_is_dead_after_any_error(connected, n):
    reader, peer, prepared = connected
    if n == 1:
        to, of = prepared.destinations[0].address, int(peer.endpoint.regions.address[0])
        prepared = reader.prepare(peer, rows(to, 10), rows(of, 10))
    assert isinstance(peer, ConnectedPeer)
    assert isinstance(peer.native, UcxPeer)
    lane = peer.native.lane
    calls: list[int] = []

    def failing(*arguments: object) -> int:
        calls.append(len(arguments))
        return (1 << 64) - 4  # UCS_ERR_NO_MEMORY, at once

    lane.ring._get = failing
    with pytest.raises(TransferError, match=r"ucp_get_nbx.*status -4"):
        read(reader, [prepared], timeout_s=60.0)
    n_calls = len(calls)
    assert n_calls
    assert not lane.alive
    assert lane.settled

    def drive(size: int) -> bool:
        return lane.drive(SimpleNamespace(moved=False, size=size, next=0), 0.01, 0.0)

    for use in (lambda: drive(1), lambda: drive(2), lane.transports, lambda: lane.unpack(b"")):
        with pytest.raises(PeerError, match=r"died before.*status -4"):
            use()
    assert len(calls) == n_calls
    assert reader.quarantined() == ()


@pytest.mark.parametrize("late", [0, 3, 4, 100])
def test_a_single_get_that_does_not_land_at_once_is_driven_to_its_end(connected, late):
    """Its short path gives up after a few calls of the progress function; nothing is lost or posted twice by that."""
    reader, peer, _ = connected
    target = reader.allocate(100)
    reader.register([target.region])
    served = int(peer.endpoint.regions.address[0])
    prepared = reader.prepare(peer, rows(target.region.address, 100), rows(served + 50, 100))
    lane = peer.native.lane
    progress, get = lane._progress, lane.ring._get
    idle, calls = iter(range(late)), []
    lane._progress = lambda worker: 0 if next(idle, None) is not None else progress(worker)
    lane.ring._get = lambda *arguments: calls.append(arguments) or get(*arguments)
    assert read(reader, [prepared], timeout_s=60.0).bytes == 100
    assert (target.array[:100] == 7).all()
    assert len(calls) == 1
    assert lane.ring.n_busy() == 0
    assert lane.ring.n_free == 4


def test_one_library_chosen_in_two_ways_serves_two_transports():
    """Types belong to a binding, so that there must be one binding for each library."""
    with open_transport("ucx") as one:
        path = one._context.library.path
        with open_transport("ucx", library=path) as two:
            a, b = one.allocate(64), two.allocate(64)
            b.array[:] = 5
            one.register([a.region])
            two.register([b.region])
            peer = one.connect(two.endpoint(), timeout_s=60.0)
            read(one, [one.prepare(peer, rows(a.region.address, 64), rows(b.region.address, 64))], timeout_s=60.0)
            assert (a.array == 5).all()


def test_a_batch_is_posted_without_the_gil():
    """No thread is made to give the GIL up here, so another can run only while a native call of ours is without it."""
    n, piece = 2048, 4096
    with open_transport("ucx") as owner, open_transport("ucx") as reader:
        served, target = owner.allocate(n * piece), reader.allocate(n * piece)
        owner.register([served.region])
        reader.register([target.region])
        peer = reader.connect(owner.endpoint(), timeout_s=60.0, name="owner")
        at = np.arange(n)
        local = rows(target.region.address + at * piece, piece)
        prepared = reader.prepare(peer, local, rows(served.region.address + at[::-1] * piece, piece))
        part = prepared.slices[0]
        lane, gets = part._lane, part._gets
        ran, ended = 0, False

        def count() -> None:
            nonlocal ran
            while not ended:
                ran += 1
                time.sleep(0)

        other = threading.Thread(target=count)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000.0)
        try:
            other.start()
            ran_meanwhile, stop = 0, time.monotonic() + 60
            while not ran_meanwhile and time.monotonic() < stop:
                gets.rewind()
                before = ran
                with lane._lock:
                    gets.post_next(lane._endpoint_at)
                    ran_meanwhile = ran - before
                while not lane.drive(gets, 0.01, 0.0):
                    pass
        finally:
            sys.setswitchinterval(interval)
            ended = True
            other.join()
        assert ran_meanwhile > 0
