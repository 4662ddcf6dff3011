"""The common implementation under a scripted backend: deadlines, quarantine and abort scopes, one step at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from reshard.transports import (
    PeerError,
    PoisonedMemoryError,
    Region,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
    read,
)
from reshard.transports.backend import Call, Capabilities, CommonTransport, ConnectedPeer, Work, allocate_host
from reshard.transports.base import Prepared
from reshard.transports.testing import raises, rows
from reshard.transports.testing.harness import SLACK_S

MIB = 1 << 20


class Scripted:
    """A slice that completes when it is told to."""

    moved = False
    native_s = 0.0

    def __init__(self, transport: ScriptedTransport, peer: str) -> None:
        self.transport = transport
        self.peer = peer
        self.closed = False

    def post(self) -> bool:
        self.transport.posts.append(self.peer)
        if self.peer in self.transport.blocking:
            self.transport.blocking[self.peer].wait(20)
        return self.poll() if self.peer in self.transport.instant else False

    def poll(self) -> bool:
        outcome = self.transport.outcome.get(self.peer, False)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.transport.closed_slices += 1


class ScriptedTransport(CommonTransport):
    name = "scripted"
    slice_bytes = 8 * MIB
    capabilities: ClassVar[Capabilities] = Capabilities(("dram",), True, True, "agent", 1 << 20, True, True, True)

    def __init__(self, scope: str = "agent", settles: bool = False) -> None:
        super().__init__()
        self.capabilities = replace(type(self).capabilities, abort_scope=scope)  # type: ignore[misc, arg-type]
        self.settles = settles
        self.outcome: dict[str, bool | Exception] = {}
        self.instant: set[str] = set()
        self.blocking: dict[str, threading.Event] = {}
        self.refusing: dict[str, Exception] = {}
        self.posts: list[str] = []
        self.built = self.closed_slices = 0
        self.torn: list[str] = []
        self.registered: list[int] = []
        self.hung_up: list[str] = []
        self.dialled: list[str] = []
        self.dial_s: list[float] = []

    def allocate(self, nbytes, *, memory="dram", device=0):  # type: ignore[no-untyped-def]
        return allocate_host(nbytes)

    def _register(self, region: Region) -> object:
        if region.nbytes == 13:
            raise RegistrationError("thirteen is not registered here")
        self.registered.append(region.address)
        return region.address

    def _deregister(self, region: Region, native: object) -> None:
        assert native == region.address
        self.registered.remove(region.address)

    def _withdrawn(self, generation: int) -> None:
        self.generation = generation

    def _payload(self) -> bytes:
        return b""

    def _dial(self, peer: ConnectedPeer, deadline: float) -> object:
        if peer.name in self.refusing:
            raise self.refusing[peer.name]
        self.dialled.append(peer.name)
        self.dial_s.append(deadline - time.monotonic())
        return peer.name

    def _hang_up(self, native: object) -> None:
        self.hung_up.append(str(native))

    def _gate(self, peer: ConnectedPeer) -> Call:
        def check() -> None:
            if f"gate {peer.name}" in self.outcome:
                raise PeerError("the gate is shut", peer=peer.name)

        return Call(check)

    def _build(self, peer: ConnectedPeer, work: Work) -> list[Scripted]:  # type: ignore[override]
        self.built += len(work.cuts) - 1
        return [Scripted(self, peer.name) for _ in work.cuts[:-1]]

    def _settles(self, error: Exception) -> bool:
        return self.settles

    def _abort(self, native: object) -> None:
        self.torn.append(str(native))

    def _rebuild(self) -> None:
        self.torn.append("agent")

    def _shut_down(self) -> None:
        self.torn.append("all")


class Setting:
    """Two peers, ``sick`` and ``well``, each with a list into its own destination."""

    def __init__(self, transport: ScriptedTransport, nbytes: int = MIB) -> None:
        self.transport = transport
        self.source = ScriptedTransport()
        self.served = self.source.allocate(nbytes)
        self.source.register([self.served.region])
        self.target = transport.allocate(2 * nbytes)
        self.registration = transport.register([self.target.region])
        self.nbytes = nbytes
        message = self.source.endpoint()
        self.sick = transport.connect(message, timeout_s=60.0, name="sick")
        self.well = transport.connect(message, timeout_s=60.0, name="well")
        self.to_sick = self.list(self.sick, 0)
        self.to_well = self.list(self.well, nbytes)
        transport.outcome["well"] = True

    def list(self, peer: ConnectedPeer, at: int) -> Prepared:
        return self.transport.prepare(
            peer, rows(self.target.region.address + at, self.nbytes), rows(self.served.region.address, self.nbytes)
        )


@pytest.fixture(params=["agent", "peer", "none"])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    transport = ScriptedTransport(request.param)
    made = Setting(transport)
    yield made
    transport.outcome["sick"] = True
    transport.close()
    made.source.close()
    assert transport.registered == []
    assert transport.closed_slices == transport.built
    assert transport.torn[-1] == "all"


def test_a_stuck_peer_times_out_alone_and_poisons_its_destination(setting: Setting) -> None:
    transport, region = setting.transport, setting.target.region
    with raises(TransferTimeoutError, within_s=1.0 + SLACK_S) as caught:
        read(transport, [setting.to_sick, setting.to_well], timeout_s=1.0)
    error = caught[0]
    assert isinstance(error, TransferTimeoutError)
    assert error.failures == {"sick": "abandoned", "well": "done"}
    assert error.poisoned == ((region.address, region.address + MIB),)
    assert error.peer == "sick"
    assert [(r.address, r.nbytes) for r in transport.quarantined()] == [(region.address, MIB)]
    with raises(PeerError):
        transport.post(setting.to_sick)
    # The healthy peer may write anywhere but there.
    into_poison = setting.list(setting.well, MIB // 2)
    with raises(PoisonedMemoryError):
        transport.post(into_poison)
    read(transport, [setting.to_well], timeout_s=60.0)
    # Its registration and its owner outlive their closing.
    setting.registration.close()
    assert region.address in transport.registered
    if transport.capabilities.abort_scope == "none":
        with raises(TransferTimeoutError, within_s=0.2 + SLACK_S):
            transport.wait_quarantine(timeout_s=0.2)
        assert transport.quarantined()
        transport.outcome["sick"] = True
    transport.wait_quarantine(timeout_s=60.0)
    assert transport.quarantined() == ()
    assert transport.torn == {"agent": ["agent"], "peer": ["sick"], "none": []}[transport.capabilities.abort_scope]
    read(transport, [into_poison], timeout_s=60.0)


def test_lists_and_links_come_back_by_themselves_after_the_agent_was_rebuilt() -> None:
    transport = ScriptedTransport("agent")
    setting = Setting(transport)
    with raises(TransferTimeoutError):
        read(transport, [setting.to_sick], timeout_s=0.05)
    transport.wait_quarantine(timeout_s=60.0)
    assert transport.dialled == ["sick", "well"]
    built = transport.built
    read(transport, [setting.to_well], timeout_s=60.0)
    assert transport.dialled == ["sick", "well", "well"]
    assert transport.built == built + 1
    read(transport, [setting.to_well], timeout_s=60.0)
    assert transport.built == built + 1
    # The failed peer needs a new connection.
    setting.sick.close()
    transport.outcome["sick"] = True
    setting.sick = transport.connect(setting.source.endpoint(), timeout_s=60.0, name="sick")
    read(transport, [setting.list(setting.sick, 0)], timeout_s=60.0)
    transport.close()


def test_connecting_again_has_the_deadline_of_the_read() -> None:
    transport = ScriptedTransport("agent")
    setting = Setting(transport)
    with raises(TransferTimeoutError):
        read(transport, [setting.to_sick], timeout_s=0.05)
    transport.wait_quarantine(timeout_s=60.0)
    read(transport, [setting.to_well], timeout_s=60.0)
    assert transport.dialled == ["sick", "well", "well"]
    assert 0 < transport.dial_s[-1] <= 60.0
    transport.close()


def test_connecting_while_a_quarantine_is_lifted_keeps_its_deadline() -> None:
    transport = ScriptedTransport("agent")
    setting = Setting(transport)
    transport._n_rebuilding += 1
    with raises(TransferTimeoutError, within_s=0.2 + SLACK_S):
        transport.connect(setting.source.endpoint(), timeout_s=0.2, name="third")
    transport._n_rebuilding -= 1
    transport.connect(setting.source.endpoint(), timeout_s=60.0, name="third")
    transport.close()


def test_an_abort_that_is_not_done_yet_is_asked_again_and_holds_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = ScriptedTransport("peer")
    setting = Setting(transport)
    with raises(TransferTimeoutError):
        read(transport, [setting.to_sick], timeout_s=0.05)
    meanwhile: list[int] = []

    def abort(native: object) -> None:
        reading = threading.Thread(
            target=lambda: meanwhile.append(read(transport, [setting.to_well], timeout_s=60.0).bytes)
        )
        reading.start()
        reading.join(20.0)
        if len(meanwhile) < 3:
            raise TransferTimeoutError("not yet", peer="sick")
        transport.torn.append(str(native))

    monkeypatch.setattr(transport, "_abort", abort)
    transport.wait_quarantine(timeout_s=60.0)
    assert meanwhile == [MIB] * 3
    assert transport.torn == ["sick"]
    assert transport.quarantined() == ()
    transport.close()


def test_a_peer_that_fails_while_its_list_is_built_leaves_no_native_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native list that nobody frees keeps its agent, and with it every later quarantine."""
    transport = ScriptedTransport("agent")
    setting = Setting(transport)
    build = transport._build

    def failing(peer: ConnectedPeer, work: Work) -> list[Scripted]:
        built = build(peer, work)
        peer.failed = "meanwhile"
        return built

    monkeypatch.setattr(transport, "_build", failing)
    with raises(PeerError):
        setting.list(setting.sick, 0)
    transport.close()
    assert transport.closed_slices == transport.built
    assert transport.registered == []


def test_healthy_peers_drain_before_the_agent_is_destroyed() -> None:
    transport = ScriptedTransport("agent")
    setting = Setting(transport)
    transport.outcome["well"] = False
    slow = transport.post(setting.to_well)
    with raises(TransferTimeoutError):
        read(transport, [setting.to_sick], timeout_s=0.05)
    with raises(TransferTimeoutError, within_s=0.2 + SLACK_S) as caught:
        transport.wait_quarantine(timeout_s=0.2)
    assert "well" in str(caught[0])
    assert transport.torn == []
    assert slow.state == "active"
    timer = threading.Timer(0.1, transport.outcome.__setitem__, ("well", True))
    timer.start()
    transport.wait_quarantine(timeout_s=60.0)
    timer.join()
    assert transport.torn == ["agent"]
    assert slow.state == "done"
    transport.close()


def test_an_error_in_flight_poisons_unless_the_backend_settles() -> None:
    for settles in (False, True):
        transport = ScriptedTransport("agent", settles)
        setting = Setting(transport)
        transport.outcome["sick"] = TransferError("it broke", peer="sick")
        with raises(TransferError) as caught:
            read(transport, [setting.to_sick, setting.to_well], timeout_s=10.0)
        assert caught[0].peer == "sick"  # type: ignore[attr-defined]
        assert bool(transport.quarantined()) is not settles
        transport.wait_quarantine(timeout_s=60.0)
        assert transport.torn == ([] if settles else ["agent"])
        transport.close()


def test_a_post_that_is_interrupted_leaves_nothing_in_flight_that_nobody_knows(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes as the native library has begun: what it writes late must not land in memory that is used again."""
    transport, region = setting.transport, setting.target.region

    def interrupted(self: Scripted) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Scripted, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            transport.post(setting.to_sick)
    assert [(r.address, r.nbytes) for r in transport.quarantined()] == [(region.address, MIB)]
    with raises(PeerError):
        transport.post(setting.to_sick)
    read(transport, [setting.to_well], timeout_s=60.0)
    transport.outcome["sick"] = True
    transport.wait_quarantine(timeout_s=60.0)
    assert transport.quarantined() == ()


def test_a_shut_gate_posts_nothing_and_poisons_nothing() -> None:
    transport = ScriptedTransport()
    setting = Setting(transport)
    transport.outcome["gate sick"] = True
    with raises(PeerError):
        read(transport, [setting.to_sick], timeout_s=10.0)
    assert transport.posts == []
    assert transport.quarantined() == ()
    transport.close()


def test_a_failure_cancels_the_others_unless_they_are_to_finish() -> None:
    big = 3 * ScriptedTransport.slice_bytes
    for finish in (False, True):
        transport = ScriptedTransport("peer", settles=True)
        setting = Setting(transport, big)
        transport.outcome["sick"] = TransferError("it broke", peer="sick")
        transport.outcome["well"] = False
        timer = threading.Timer(0.2, transport.outcome.__setitem__, ("well", True))
        timer.start()
        with raises(TransferError) as caught:
            read(transport, [setting.to_sick, setting.to_well], timeout_s=20.0, finish_others=finish)
        timer.join()
        states = caught[0].failures  # type: ignore[attr-defined]
        assert states["sick"].startswith("failed")
        # Cancelled or not, what was posted has ended when the error arrives.
        assert states["well"] == "done" or not finish
        assert transport.quarantined() == ()
        transport.close()


def test_a_native_post_that_blocks_keeps_nobody_past_the_deadline() -> None:
    transport = ScriptedTransport("none")
    setting = Setting(transport, 2 * ScriptedTransport.slice_bytes)
    release = transport.blocking["sick"] = threading.Event()
    transport.outcome["sick"] = True
    start = time.monotonic()
    with raises(TransferTimeoutError, within_s=0.2 + SLACK_S):
        read(transport, [setting.to_sick], timeout_s=0.2)
    assert time.monotonic() - start >= 0.2
    assert transport.quarantined()
    with raises(TransferTimeoutError, within_s=0.2 + SLACK_S):
        transport.wait_quarantine(timeout_s=0.2)
    release.set()
    transport.wait_quarantine(timeout_s=60.0)
    assert transport.quarantined() == ()
    transport.close()


def test_the_name_of_a_failed_dial_is_free_again() -> None:
    transport = ScriptedTransport()
    setting = Setting(transport)
    transport.refusing["third"] = PeerError("no", peer="third")
    for _ in range(2):
        with raises(PeerError):
            transport.connect(setting.source.endpoint(), timeout_s=60.0, name="third")
    del transport.refusing["third"]
    transport.connect(setting.source.endpoint(), timeout_s=60.0, name="third")
    transport.close()
    assert sorted(transport.hung_up) == ["sick", "third", "well"]


def test_a_registration_that_fails_half_way_leaves_nothing() -> None:
    transport = ScriptedTransport()
    good, bad = np.zeros(64, np.uint8), np.zeros(13, np.uint8)
    with raises(RegistrationError):
        transport.register([Region.of(good), Region.of(bad)])
    assert transport.registered == []
    transport.close()


def test_waiting_from_two_threads_for_the_same_transfer() -> None:
    transport = ScriptedTransport()
    setting = Setting(transport)
    transport.outcome["well"] = False
    transfer = transport.post(setting.to_well)
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(transport.wait([transfer], timeout_s=60.0).bytes))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    transport.outcome["well"] = True
    for thread in threads:
        thread.join(20.0)
    assert results == [MIB] * 3
    transport.close()


def test_close_lifts_what_it_can_and_is_bounded() -> None:
    transport = ScriptedTransport("agent")
    setting = Setting(transport)
    with raises(TransferTimeoutError):
        read(transport, [setting.to_sick], timeout_s=0.05)
    start = time.monotonic()
    transport.close()
    assert time.monotonic() - start < SLACK_S
    assert transport.torn == ["agent", "all"]
    assert transport.registered == []
