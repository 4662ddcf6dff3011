"""The ``nixl`` transport: NIXL agents, UCX by default.

1. Two agents, each made when first needed: one serves (with NIXL's progress thread, which a served peer cannot do
   without), one reads.  Destroying the reading agent, the only way to stop its writes, never disturbs our readers.
2. The payload of an endpoint message is the place of the beacon and either the serving agent's metadata blob or the
   address of its metadata listener.
3. A list is prepared once (`prep_xfer_dlist`, one request a slice) and posted again at each refit.
4. Before each list the peer's beacon is looked at (mapped on one host, read natively from another): NIXL itself notices
   neither a restart nor a withdrawn region.
5. Deadlines are ours.  After a time-out, or an error in flight, `wait_quarantine` destroys the reading agent once the
   healthy peers have drained; lists and connections come back by themselves when they are next posted.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Mapping
from logging import getLogger
from typing import ClassVar, Literal

from reshard.transports.base import Allocation, Capabilities
from reshard.transports.beacon import BEACON_BYTES, Beacon
from reshard.transports.common import CommonTransport
from reshard.transports.descriptors import require_descriptors
from reshard.transports.devicemem import allocate_device
from reshard.transports.driver import backoff
from reshard.transports.errors import (
    PeerError,
    TransferError,
    TransferTimeoutError,
    TransportError,
)
from reshard.transports.hostmem import allocate_host
from reshard.transports.identity import ProcessIdentity
from reshard.transports.lists import ConnectedPeer, Work
from reshard.transports.nixl import library
from reshard.transports.nixl.agent import LINK_DESCRIPTORS, Agent, AgentSettings, start_listening_agent
from reshard.transports.nixl.emulation import EmulationNotices
from reshard.transports.nixl.requests import BeaconGate, Link, NativeList, NixlSlice
from reshard.transports.regions import MemoryKind, Region
from reshard.transports.shared import SharedPages
from reshard.transports.transfer import Call, Slice
from reshard.transports.watch import PeerWatch

logger = getLogger(__name__)

# after the process: beacon address and descriptor, listener port (0: a blob follows; else the listener's host does)
_PAYLOAD = struct.Struct("<QiH")
_ERROR_HANDLING = "ucx_error_handling_mode"
MAX_SLEEP_S = 1.0
"""Longest sleep of a progress thread: what nobody signals (a peer's death over shared memory) waits for its end."""


class NixlTransport(CommonTransport):
    """See the module.

    Parameters
    ----------
    backend : str
        NIXL plug-in.
    options : mapping of str to str
        Initialisation parameters of the plug-in, such as ``{"ucx_devices": "mlx5_0"}``.
    metadata : "blob" or "listener"
        How peers get the serving agent's metadata: inside the endpoint message, or from a listener thread.
    listen_host : str
        Address at which peers reach the listener; by default this host's name.
    listen_port : int
        Its port; 0 picks a free one.
    telemetry : bool
        Whether NIXL measures its transfers (`PeerStats.native_seconds`).
    progress_sleep_s : float
        How long the serving agent's progress thread may sleep where no event comes, in seconds, at most 1; 0 lets it
        spin, which costs a processor and answers small reads over TCP sooner.
    map_beacon : bool
        Whether to watch peers of this host by a mapped page instead of by native reads of their beacons.
    workers : int
        Threads that post large lists.

    Raises
    ------
    TransportUnavailableError
        If NIXL is not installed or does not load.
    ValueError
        If a setting is not what it should be.
    """

    name: ClassVar[str] = "nixl"
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=("dram", "vram"),
        one_sided=True,
        strided_rows=True,
        abort_scope="agent",
        max_runs=1 << 24,
        needs_registration=True,
        cross_process=True,
        cross_host=True,
    )

    # Each request has a fixed cost of about 0.1 ms, whatever it carries.
    slice_bytes: ClassVar[int] = 128 << 20

    def __init__(
        self,
        *,
        backend: str = "UCX",
        options: Mapping[str, str] | None = None,
        metadata: Literal["blob", "listener"] = "blob",
        listen_host: str = "",
        listen_port: int = 0,
        telemetry: bool = False,
        progress_sleep_s: float = 0.01,
        map_beacon: bool = True,
        workers: int = 1,
    ) -> None:
        if metadata not in ("blob", "listener"):
            raise ValueError(f"metadata: got {metadata!r}, expected 'blob' or 'listener'")
        if isinstance(progress_sleep_s, bool) or not 0 <= progress_sleep_s <= MAX_SLEEP_S:
            raise ValueError(f"progress_sleep_s: got {progress_sleep_s!r}, expected seconds from 0 to {MAX_SLEEP_S}")
        options = dict(options or {})
        if backend == "UCX" and options.setdefault(_ERROR_HANDLING, "peer") != "peer":
            raise ValueError(
                f"options: got {_ERROR_HANDLING}={options[_ERROR_HANDLING]!r}, expected 'peer': "
                "without it a peer that dies is waited for for ever"
            )
        library.load()
        super().__init__(workers=workers)
        self._backend = backend
        self._options = options
        self._telemetry = telemetry
        self._sleep_us = math.ceil(progress_sleep_s * 1e6)
        self._map_beacon = map_beacon
        self._notices = EmulationNotices(self._options if backend == "UCX" else None)
        self._listener = (listen_host or socket.gethostname(), listen_port) if metadata == "listener" else None
        self._serving: Agent | None = None
        self._reading: Agent | None = None
        self._beacon: Beacon | None = None
        self._beacon_page: SharedPages | None = None

    @staticmethod
    def probe() -> str:
        """Return why it cannot work here, or an empty string."""
        try:
            library.load()
        except TransportError as error:
            return str(error)
        return ""

    # --- memory ---------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, memory: MemoryKind = "dram", device: int = 0) -> Allocation:
        """Return host pages, or device memory from torch; see `Transport.allocate`."""
        self._check_open()
        if memory == "dram":
            return allocate_host(nbytes)
        return allocate_device(nbytes, device)

    def _register(self, region: Region) -> object:
        done: list[Agent] = []
        try:
            for agent in (self._serving, self._reading):
                if agent is not None:
                    agent.register(region)
                    done.append(agent)
        except BaseException:
            for agent in done:
                agent.deregister(region)
            raise
        return None

    def _deregister(self, region: Region, native: object) -> None:
        for agent in (self._serving, self._reading):
            if agent is not None:
                agent.deregister(region)

    def _withdrawn(self, generation: int) -> None:
        if self._beacon is not None:
            self._beacon.withdraw(generation)

    # --- agents ---------------------------------------------------------------------------------------

    def _agent_name(self, incarnation: bytes) -> str:
        return f"reshard-{incarnation.hex()}"

    def _serve(self) -> Agent:
        if self._serving is None:
            page = SharedPages(BEACON_BYTES)
            name = self._agent_name(self.incarnation)
            agent, port = self._start_agent(name, self._listener[1] if self._listener else 0, progress_thread=True)
            if self._listener is not None:
                self._listener = (self._listener[0], port)
            region = Region.of(page.array)
            agent.register(region)
            for entry in self._ledger.all_entries():
                agent.register(entry.region)
            self._beacon = Beacon(page.array, self.incarnation, self._ledger.generation)
            self._beacon_page = page
            self._serving = agent
        return self._serving

    def _start_agent(self, name: str, port: int, *, progress_thread: bool) -> tuple[Agent, int]:
        settings = AgentSettings(self._backend, self._options, progress_thread, self._sleep_us, port, self._telemetry)
        if self._listener is None:
            return Agent(name, settings), 0
        return start_listening_agent(name, settings)

    def _read(self) -> Agent:
        with self._lock:
            if self._reading is None:
                # Only an agent that listens itself has the thread that fetches metadata.
                name = f"{self._agent_name(self.incarnation)}-r{self._epoch}"
                agent, _ = self._start_agent(name, 0, progress_thread=False)
                for entry in self._ledger.all_entries():
                    agent.register(entry.region)
                self._reading = agent
            return self._reading

    def _payload(self) -> bytes:
        agent = self._serve()
        page = self._beacon_page
        if page is None:
            raise TransportError("nixl: the beacon is not there")
        port, rest = (self._listener[1], self._listener[0].encode()) if self._listener else (0, agent.metadata())
        return ProcessIdentity.own().pack() + _PAYLOAD.pack(page.address, page.fd, port) + rest

    # --- peers ----------------------------------------------------------------------------------------

    def _dial(self, peer: ConnectedPeer, deadline: float) -> object:
        require_descriptors(LINK_DESCRIPTORS, f"connecting to peer {peer.name!r}")
        identity = ProcessIdentity.unpack(peer.endpoint.payload)
        payload = peer.endpoint.payload[ProcessIdentity.NBYTES :]
        beacon, control, port = _PAYLOAD.unpack_from(payload)
        # Before any native call: a restarted process can have the old one's port, and over TCP a read at an address
        # that it lacks kills it.
        identity.check(peer.name)
        seen = self._map_beacon and identity.visible
        watch = PeerWatch(peer.name, peer.endpoint, identity, control) if seen else None
        try:
            link = self._connect(peer, payload, (beacon, port), watch, deadline)
            self._notices.connected(peer, visible=identity.visible)
            return link
        except BaseException:
            if watch is not None:
                watch.close()
            raise

    def _connect(
        self,
        peer: ConnectedPeer,
        payload: bytes,
        place: tuple[int, int],
        watch: PeerWatch | None,
        deadline: float,
    ) -> Link:
        beacon, port = place
        agent = self._read()
        link = Link(agent, self._agent_name(peer.endpoint.incarnation), beacon, watch)
        if port:
            agent.fetch(link.remote, payload[_PAYLOAD.size :], port, peer.name, deadline)
        else:
            agent.link(link.remote, payload[_PAYLOAD.size :], peer.name)
        gate: BeaconGate | None = None
        try:
            gate = BeaconGate(link, peer)
            done = gate.post()
            for pause in backoff():
                if done or gate.poll():
                    break
                if time.monotonic() + pause >= deadline:
                    raise TransferTimeoutError(
                        f"connecting to peer {peer.name!r}: it did not answer within its deadline", peer=peer.name
                    )
                time.sleep(pause)
        except TransferTimeoutError:
            agent.unlink(link.remote)
            raise
        except TransferError as error:
            agent.unlink(link.remote)
            raise PeerError(f"connecting to peer {peer.name!r}: {error}", peer=peer.name) from error
        except BaseException:
            agent.unlink(link.remote)
            raise
        finally:
            if gate is not None:
                gate.close()
        return link

    def _hang_up(self, native: object) -> None:
        if isinstance(native, Link):
            native.agent.unlink(native.remote)
            if native.watch is not None:
                native.watch.close()

    # --- lists ----------------------------------------------------------------------------------------

    def _gate(self, peer: ConnectedPeer) -> Slice:
        link = _link(peer)
        return Call(link.watch.check) if link.watch is not None else BeaconGate(link, peer)

    def _build(self, peer: ConnectedPeer, work: Work) -> list[Slice]:
        link = _link(peer)
        lists = NativeList(
            link.agent,
            link.remote,
            (work.local, work.remote),
            (work.local_memory, work.remote_memory),
            len(work.cuts) - 1,
            peer.name,
        )
        slices: list[Slice] = []
        try:
            for start, stop in zip(work.cuts[:-1], work.cuts[1:], strict=True):
                slices.append(NixlSlice(link.agent, lists, start, stop, peer.name))
        except BaseException:
            for piece in slices:
                piece.close()
            for _ in range(len(work.cuts) - 1 - len(slices)):
                lists.slice_closed()
            raise
        return slices

    def _settles(self, error: TransportError) -> bool:
        """Tell nothing from an error: other descriptors of the same request may still be under way."""
        return False

    def _rebuild(self) -> None:
        if self._reading is not None:
            self._reading.destroy()
        self._reading = None

    def _stop_serving(self) -> None:
        if self._beacon is not None:
            self._beacon.close()

    def _shut_down(self) -> None:
        for agent in (self._reading, self._serving):
            if agent is not None:
                try:
                    agent.destroy()
                except TransferError as error:
                    logger.warning("%s", error)
                    continue
                if agent is self._serving and self._beacon is not None and self._beacon_page is not None:
                    self._beacon.release()
                    self._beacon_page.close()  # not when the transport is collected: a cycle keeps it until then
        self._reading = self._serving = None


def _link(peer: ConnectedPeer) -> Link:
    if not isinstance(peer.native, Link):
        raise PeerError(f"peer {peer.name!r} is not connected", peer=peer.name)
    return peer.native
