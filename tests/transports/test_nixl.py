"""The `nixl` transport against the contract, and what NIXL itself would get wrong."""

from __future__ import annotations

import importlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from reshard.transports import (
    Endpoint,
    PeerError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
    TransportUnavailableError,
    decode_endpoint,
    encode_endpoint,
    open_transport,
    read,
)
from reshard.transports.identity import ProcessIdentity
from reshard.transports.nixl import library
from reshard.transports.peer_process import PeerProcess, pattern
from reshard.transports.registry import probe
from reshard.transports.testing import Reader, TransportContract, raises, rows
from reshard.transports.testing.harness import SLACK_S

pytestmark = pytest.mark.skipif(bool(probe("nixl")), reason=f"nixl does not work here: {probe('nixl')}")

MIB = 1 << 20


class TestNixl(TransportContract):
    backend = "nixl"

    # Marking the inherited functions themselves would mark them for every other backend, too.
    @pytest.mark.slow
    def test_a_list_of_a_million(self) -> None:
        super().test_a_list_of_a_million()

    @pytest.mark.slow
    def test_owner_closes_while_it_is_read(self) -> None:
        super().test_owner_closes_while_it_is_read()

    def test_the_serving_agent_outlives_the_reading_one(self) -> None:
        """A process that reads and serves rebuilds its reading agent; those that read from it do not notice."""
        with self.start() as process, self.reader(MIB) as ours:
            endpoint, remote = process.serve(64 * MIB, 1)
            served = ours.transport.allocate(MIB)
            served.array[:] = pattern(MIB, 8)
            ours.transport.register([served.region])
            with Reader(self, ours.transport.endpoint(), MIB) as customer:
                standing = customer.whole(served.region.address, MIB)
                read(customer.transport, [standing], timeout_s=60.0)
                peer = ours.transport.connect(endpoint, timeout_s=60.0, name="dying")
                target = ours.transport.allocate(64 * MIB)
                ours.transport.register([target.region])
                dying = ours.transport.prepare(peer, rows(target.region.address, 64 * MIB), rows(remote, 64 * MIB))
                transfer = ours.transport.post(dying)
                process.signal(signal.SIGKILL)
                try:
                    ours.transport.wait([transfer], timeout_s=2.0)
                except (PeerError, TransferError):
                    ours.transport.wait_quarantine(timeout_s=60.0)
                read(customer.transport, [standing], timeout_s=60.0)
                assert np.array_equal(customer.target.array, pattern(MIB, 8))
                read(ours.transport, [ours.whole(self.remote, MIB)], timeout_s=60.0)

    def test_memory_unmapped_behind_our_back_is_an_error(self) -> None:
        """Over CMA; over TCP, UCX's emulation kills the owner (docs/transports.md, limits)."""
        with self.start() as process:
            endpoint, remote = process.serve(4 * MIB, 1)
            with Reader(self, endpoint, 4 * MIB) as reader:
                prepared = reader.whole(remote, 4 * MIB)
                read(reader.transport, [prepared], timeout_s=60.0)
                process.ask("unmap", which=0)
                with raises(PeerError, TransferError):
                    read(reader.transport, [prepared], timeout_s=3.0)
                assert process.ask("endpoint"), "the owner has survived"
                reader.transport.wait_quarantine(timeout_s=60.0)
                self.still_reads(reader.transport)

    def test_a_quarantine_is_lifted_only_when_the_agent_is_gone(self) -> None:
        from reshard.transports.nixl import NixlTransport

        transport = open_transport("nixl")
        assert isinstance(transport, NixlTransport)
        try:
            agent = transport._read()
            borrowed = agent.native
            with pytest.raises(TransferError, match="still referred to"):
                transport._rebuild()
            with pytest.raises(TransferError, match="still referred to"):
                transport._rebuild()
            with pytest.raises(TransferError, match="has been destroyed"):
                _ = agent.native
            del borrowed
            transport._rebuild()
            assert transport._read() is not agent
        finally:
            transport.close()

    def test_lists_are_prepared_once_and_strided_rows_stay_strided(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """NIXL takes (N, 5) rows at a thousandth of the cost of their runs, and a prepared request again and again."""
        from nixl_cu12 import nixl_agent

        shapes: list[tuple[int, ...]] = []
        requests: list[int] = []
        prep, make = nixl_agent.prep_xfer_dlist, nixl_agent.make_prepped_xfer

        def preparing(agent, name, descriptors, *more):  # type: ignore[no-untyped-def]
            shapes.append(descriptors.shape)
            return prep(agent, name, descriptors, *more)

        def making(agent, *arguments):  # type: ignore[no-untyped-def]
            requests.append(len(arguments[2]))
            return make(agent, *arguments)

        with self.reader() as reader:
            monkeypatch.setattr(nixl_agent, "prep_xfer_dlist", preparing)
            monkeypatch.setattr(nixl_agent, "make_prepped_xfer", making)
            local, remote = rows(reader.address, 64, 64, 1000), rows(self.remote, 64, 128, 1000)
            prepared = reader.transport.prepare(reader.peer, local, remote)
            assert shapes == [(1, 5), (1, 5)]
            assert requests == [1000]
            for _ in range(3):
                reader.target.array[:] = 0
                read(reader.transport, [prepared], timeout_s=60.0)
                expected = self.data[: 128 * 1000].reshape(1000, 128)[:, :64]
                assert np.array_equal(reader.target.array[: 64 * 1000].reshape(1000, 64), expected)
            assert len(shapes) == 2
            assert len(requests) == 1

    def test_a_forged_blob_of_another_agent_is_refused(self) -> None:
        """A valid blob of one agent under the incarnation of another."""
        true = decode_endpoint(self.endpoint)
        with self.start() as process:
            other = decode_endpoint(process.serve(4096)[0])
            forged = encode_endpoint(Endpoint("nixl", other.incarnation, 0, true.regions, true.payload))
            transport = open_transport("nixl", map_beacon=False)
            try:
                with raises(PeerError) as caught:
                    transport.connect(forged, timeout_s=60.0)
                assert other.incarnation.hex() in str(caught[0])
                transport.connect(self.endpoint, timeout_s=60.0)
            finally:
                transport.close()


@pytest.mark.slow
class TestNixlByListener(TransportContract):
    """Metadata from the listener thread, not a blob; beacons by native reads, as from another host.

    What has nothing to do with either runs in `TestNixl` only.
    """

    backend = "nixl"
    settings: ClassVar[Mapping[str, object]] = {
        "metadata": "listener",
        "listen_host": "127.0.0.1",
        "telemetry": True,
        "map_beacon": False,
    }

    def test_telemetry(self) -> None:
        with self.reader() as reader:
            stats = read(reader.transport, [reader.whole(self.remote, len(self.data))], timeout_s=60.0)
            assert 0 < stats.per_peer["served"].native_seconds < stats.seconds + 1e-3

    def test_a_listener_that_never_answers(self) -> None:
        with self.start() as process:
            endpoint, _ = process.serve(4096)
            process.signal(signal.SIGSTOP)
            transport = self.open()
            try:
                start = time.monotonic()
                with raises(TransferTimeoutError, PeerError):
                    transport.connect(endpoint, timeout_s=0.5, name="mute")
                assert time.monotonic() - start >= 0.4
                transport.connect(self.endpoint, timeout_s=60.0)
            finally:
                transport.close()

    def test_a_dead_listener(self) -> None:
        """NIXL never says that a fetch has failed: from another host, where no process is seen, the deadline does."""
        with self.start() as process:
            message, _ = process.serve(4096)
            process.signal(signal.SIGKILL)
        transport = self.open()
        try:
            with raises(TransferTimeoutError, within_s=1.0 + SLACK_S) as caught:
                transport.connect(elsewhere(message), timeout_s=1.0, name="dead")
            assert isinstance(caught[0], TransferTimeoutError)
            assert caught[0].peer == "dead"
            assert "no metadata from its listener" in str(caught[0])
            # On this host the process table knows better.
            with raises(PeerError) as caught:
                transport.connect(message, timeout_s=60.0, name="dead")
            assert "restarted or exited" in str(caught[0])
            self.still_reads(transport)
        finally:
            transport.close()

    def test_a_living_listener_of_another_host(self) -> None:
        """The forgery of the test above changes nothing else."""
        with self.start() as process:
            message, remote = process.serve(4096, 3)
            with Reader(self, elsewhere(message), 4096) as reader:
                read(reader.transport, [reader.whole(remote, 4096)], timeout_s=60.0)
                assert np.array_equal(reader.target.array, pattern(4096, 3))

    def test_an_unknown_host(self) -> None:
        true = decode_endpoint(self.endpoint)
        payload = true.payload[: ProcessIdentity.NBYTES + 14] + b"no-such-host.invalid"
        forged = encode_endpoint(Endpoint("nixl", true.incarnation, 0, true.regions, payload))
        transport = self.open()
        try:
            with raises(PeerError, TransferTimeoutError) as caught:  # a name server may be silent
                transport.connect(forged, timeout_s=1.0)
            assert "no-such-host" in str(caught[0])
        finally:
            transport.close()


def elsewhere(message: bytes) -> bytes:
    """Return the message as if it came from a host whose processes cannot be seen."""
    endpoint = decode_endpoint(message)
    identity = replace(ProcessIdentity.unpack(endpoint.payload), boot=bytes(16))
    payload = identity.pack() + endpoint.payload[ProcessIdentity.NBYTES :]
    return encode_endpoint(replace(endpoint, payload=payload))


def _only(kept: type, names: tuple[str, ...]) -> None:
    """Leave out of a class those inherited tests that another class runs already."""
    for name in dir(kept):
        if name.startswith("test_") and name not in names and name not in vars(kept):
            setattr(kept, name, None)


_only(
    TestNixlByListener,
    (
        "test_one_row_brings_the_bytes",
        "test_many_peers_at_once",
        "test_two_transports_in_one_process",
        "test_peer_killed_before_the_connection",
        "test_one_of_three_peers_is_dead_before_they_are_connected",
        "test_peer_killed_between_reads",
        "test_a_name_is_claimed_once",
        "test_withdrawn_regions_are_noticed",
        "test_peer_restarted",
        "test_peer_closes_its_transport",
        "test_an_impostor_at_the_same_address",
        "test_no_growth_over_a_thousand_refits",
    ),
)


def test_every_native_exception_is_mapped() -> None:
    bindings = importlib.import_module(f"{library.load().__name__}._bindings")
    native = {value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert len(native) >= 12
    table = library.native_errors()
    assert native == set(table)
    for kind, ours in table.items():
        with (
            pytest.raises(ours, match=rf"reading: NIXL says {kind.__name__}") as caught,
            library.mapped("reading", "p"),
        ):
            raise kind("native words")
        assert caught.value.peer == "p"
        assert isinstance(caught.value.__cause__, kind)
        assert "native words" in str(caught.value)
    with pytest.raises(PeerError), library.mapped("connecting", "p", dialling=True):
        raise bindings.nixlBackendError("refused")
    with pytest.raises(AttributeError), library.mapped("reading", "p"):
        raise AttributeError("a mistake of ours is not dressed up")


def test_an_unknown_plug_in_and_bad_settings() -> None:
    with (
        open_transport("nixl", backend="PIGEON") as transport,
        pytest.raises(TransportUnavailableError, match=r"no plug-in 'PIGEON', expected one of .*UCX"),
    ):
        transport.endpoint()
    with pytest.raises(ValueError, match="'carrier'"):
        open_transport("nixl", metadata="carrier")
    with pytest.raises(TypeError, match="wings"):
        open_transport("nixl", wings=2)
    with open_transport("nixl") as transport, pytest.raises(RegistrationError):
        transport.allocate(1 << 60)


def test_the_library_leaves_the_process_as_it_was() -> None:
    """NIXL turns `logging.raiseExceptions` off and logs at INFO; UCX takes SIGHUP."""
    code = """
import logging, os, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it, as nohup does
before = logging.raiseExceptions, dict(os.environ)
from reshard.transports import open_transport
transport = open_transport('nixl')
transport.endpoint()
assert (logging.raiseExceptions, dict(os.environ)) == before
assert not logging.getLogger('nixl').isEnabledFor(logging.INFO)
assert not logging.getLogger().handlers
transport.close()
os.kill(os.getpid(), signal.SIGHUP)
raise SystemExit('survived SIGHUP')
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == -signal.SIGHUP, done.stderr


def test_importing_nixl_first_does_not_matter() -> None:
    assert logging.raiseExceptions
    with PeerProcess("nixl") as process:
        endpoint, remote = process.serve(4096, 2)
        with open_transport("nixl") as transport:
            target = transport.allocate(4096)
            transport.register([target.region])
            peer = transport.connect(endpoint, timeout_s=60.0)
            prepared = transport.prepare(peer, rows(target.region.address, 4096), rows(remote, 4096))
            read(transport, [prepared], timeout_s=60.0)
            assert np.array_equal(target.array, pattern(4096, 2))
