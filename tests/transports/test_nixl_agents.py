"""What agents are made of, and what reaches NIXL: packages, threads, error handling, descriptors, states."""

from __future__ import annotations

import importlib.util
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reshard.transports import TransferError, TransportUnavailableError, open_transport, read
from reshard.transports.nixl import NixlTransport, library
from reshard.transports.nixl.requests import NixlSlice
from reshard.transports.peer_process import PeerProcess, pattern
from reshard.transports.registry import probe
from reshard.transports.testing import rows

pytestmark = pytest.mark.skipif(bool(probe("nixl")), reason=f"nixl does not work here: {probe('nixl')}")


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({"nixl", "nixl_cu12", "nixl_cu13"}, "nixl_cu13"),
        ({"nixl", "nixl_cu12"}, "nixl_cu12"),
        ({"nixl"}, ""),
        (set(), ""),
    ],
)
def test_the_meta_package_is_never_used(there, expected, monkeypatch):
    """It pins both CUDA variants, in versions that may not exist."""
    asked: list[str] = []

    def find(name: str) -> object:
        asked.append(name)
        return object() if name in there else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert library.installed() == expected
    assert "nixl" not in asked
    if not expected:
        with pytest.raises(TransportUnavailableError, match=r"nixl_cu12.*reshard\[nixl\]"):
            library.load.__wrapped__()


def test_one_agent_serves_with_a_thread_and_one_reads_without(monkeypatch):
    """Without NIXL's progress thread a served peer never answers; in a reader it only costs."""
    made: list[dict[str, Any]] = []
    nixl = library.load()
    config = nixl.nixl_agent_config

    def noted(**arguments: Any) -> object:
        made.append(arguments)
        return config(**arguments)

    monkeypatch.setattr(nixl, "nixl_agent_config", noted)
    with open_transport("nixl") as transport:
        assert isinstance(transport, NixlTransport)
        serving, reading = transport._serve(), transport._read()
        assert [(one["enable_prog_thread"], one["enable_listen_thread"], one["backends"]) for one in made] == [
            (True, False, []),
            (False, False, []),
        ]
        for agent in (serving, reading):
            assert agent.native.get_backend_params("UCX")["ucx_error_handling_mode"] == "peer"


def test_error_handling_is_not_to_be_turned_off():
    with pytest.raises(ValueError, match="ucx_error_handling_mode='none', expected 'peer'"):
        open_transport("nixl", options={"ucx_error_handling_mode": "none"})


def test_rows_that_touch_on_both_sides_are_one_descriptor(monkeypatch):
    from nixl_cu12 import nixl_agent

    nbytes, piece = 1 << 16, 1 << 12
    shapes: list[tuple[int, ...]] = []
    prep = nixl_agent.prep_xfer_dlist

    def preparing(agent: object, name: str, descriptors: np.ndarray, *more: object) -> object:
        shapes.append(descriptors.shape)
        return prep(agent, name, descriptors, *more)

    with PeerProcess("nixl") as process, open_transport("nixl") as transport:
        message, remote = process.serve(nbytes, 1)
        target = transport.allocate(nbytes)
        transport.register([target.region])
        peer = transport.connect(message, timeout_s=60.0)
        monkeypatch.setattr(nixl_agent, "prep_xfer_dlist", preparing)
        at = np.arange(nbytes // piece) * piece
        prepared = transport.prepare(peer, rows(target.region.address + at, piece), rows(remote + at, piece))
        assert shapes == [(1, 3), (1, 3)]
        read(transport, [prepared], timeout_s=60.0)
        assert np.array_equal(target.array, pattern(nbytes, 1))


@pytest.mark.parametrize("when", ["post", "poll"])
@pytest.mark.parametrize("state", ["ERR", "", "SOMETHING NEW"])
def test_a_state_that_is_no_state_is_an_error(when, state):
    """NIXL mostly raises; where it answers with a string that is neither DONE nor PROC, nobody waits for more."""
    native = SimpleNamespace(transfer=lambda _: state if when == "post" else "PROC", check_xfer_state=lambda _: state)
    agent = SimpleNamespace(lock=threading.RLock(), native=native, telemetry=False)
    handle = SimpleNamespace(release=lambda: None)
    lists = SimpleNamespace(request=lambda *_: handle, slice_closed=lambda: None)
    piece = NixlSlice(agent, lists, 0, 1, "p")  # type: ignore[arg-type]
    if when == "poll":
        assert not piece.post()
    with pytest.raises(TransferError, match=f"'p': NIXL says {state!r}") as caught:
        piece.post() if when == "post" else piece.poll()
    assert caught.value.peer == "p"
    assert piece.flying, "nothing says that it writes no more"
    piece.close()
