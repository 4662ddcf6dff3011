"""Tearing down a connection whose reads do not end: bounded, repeated, and no one else's business."""

from __future__ import annotations

import time

import numpy as np
import pytest

from reshard.transports import PeerError, TransferTimeoutError, open_transport, read
from reshard.transports.lists import ConnectedPeer
from reshard.transports.testing import rows
from reshard.transports.testing.harness import SLACK_S
from reshard.transports.ucx import UcxTransport
from reshard.transports.ucx.lane import all_settled
from reshard.transports.ucx.peers import UcxPeer

pytestmark = pytest.mark.skipif(bool(UcxTransport.probe()), reason=f"ucx does not work here: {UcxTransport.probe()}")

NBYTES = 1 << 16


def test_reads_that_do_not_end_keep_nobody(monkeypatch):
    with open_transport("ucx") as owner, open_transport("ucx") as reader:
        assert isinstance(reader, UcxTransport)
        served, target = owner.allocate(NBYTES), reader.allocate(NBYTES)
        served.array[:] = 7
        owner.register([served.region])
        reader.register([target.region])
        sick, well = (reader.connect(owner.endpoint(), timeout_s=60.0, name=name) for name in ("sick", "well"))
        here, there = rows(target.region.address, NBYTES), rows(served.region.address, NBYTES)
        from_sick, from_well = (reader.prepare(peer, here, there) for peer in (sick, well))
        assert isinstance(sick, ConnectedPeer)
        assert isinstance(sick.native, UcxPeer)
        lane = sick.native.lane
        with monkeypatch.context() as patched:
            patched.setattr(lane.ring, "n_busy", lambda: 3)
            start = time.monotonic()
            with pytest.raises(TransferTimeoutError, match="have not ended"):
                reader._abort(sick.native)
            assert time.monotonic() - start < SLACK_S
            assert not lane.settled
            assert not all_settled(reader._context)
            with pytest.raises(PeerError, match="sick"):
                read(reader, [from_sick], timeout_s=60.0)
            elsewhere = reader.allocate(NBYTES)
            reader.register([elsewhere.region])
            read(reader, [reader.prepare(well, rows(elsewhere.region.address, NBYTES), there)], timeout_s=60.0)
            assert (elsewhere.array == 7).all()
            assert not reader._settles(TransferTimeoutError("late")), "what fails now is quarantined"
        reader._abort(sick.native)
        assert lane.settled
        assert all_settled(reader._context)
        read(reader, [from_well], timeout_s=60.0)
        assert np.array_equal(target.array, served.array)
