"""One NIXL agent: its name, its registrations, its links to remote agents, and its certain end.

NIXL cannot time out and cannot cancel; destroying the agent is the only way to stop what it began.  So nothing but this
class holds native objects for longer than a call, and `Agent.destroy` checks that the native agent really is gone.
The reading agent runs without NIXL's progress thread (polling drives it); every native call is made under one lock.
"""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.transports.beacon import BEACON_BYTES
from reshard.transports.descriptors import require_descriptors
from reshard.transports.driver import backoff
from reshard.transports.errors import (
    PeerError,
    TransferError,
    TransferTimeoutError,
    TransportError,
    TransportUnavailableError,
)
from reshard.transports.hostmem import allocate_pages
from reshard.transports.nixl import library
from reshard.transports.nixl.library import mapped
from reshard.transports.nixl.sleeping import agent_class
from reshard.transports.regions import Region
from reshard.transports.signals import signal_handlers_kept

if TYPE_CHECKING:
    from nixl_cu12 import nixl_agent

logger = getLogger(__name__)

AGENT_DESCRIPTORS = 48
"""A new agent took 13 to 20 (NIXL 1.5.1, on one host, over shared memory and TCP); each network device takes some."""
LINK_DESCRIPTORS = 16
"""A new link took up to 8, our two for its watch among them."""
_LANDING_BYTES = 64 << 10
_PORT_TRIES = 4


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How to make an agent.

    Attributes
    ----------
    backend : str
        NIXL plug-in.
    options : mapping of str to str
        Its initialisation parameters.
    progress_thread : bool
        Needed on the serving side, where nobody polls.
    sleep_us : int
        How long that thread may sleep where no event comes; 0 lets it spin.
    listen_port : int
        Port of the metadata listener; 0 for none.
    telemetry : bool
        Whether NIXL measures each transfer.
    """

    backend: str = "UCX"
    options: Mapping[str, str] = field(default_factory=dict)
    progress_thread: bool = True
    sleep_us: int = 0
    listen_port: int = 0
    telemetry: bool = False


class Agent:
    """See the module.

    Parameters
    ----------
    name : str
        Unique over all processes.
    settings : AgentSettings

    Raises
    ------
    TransportUnavailableError
        If NIXL or the plug-in does not start.
    TransportError
        If there are too few file descriptors left for it.
    """

    def __init__(self, name: str, settings: AgentSettings) -> None:
        require_descriptors(AGENT_DESCRIPTORS, f"NIXL agent {name}")
        nixl = library.load()
        self.name = name
        self.backend = settings.backend
        self.telemetry = settings.telemetry
        self.lock = threading.RLock()
        self._registered: dict[tuple[int, int, str, int], object] = {}
        self._links: dict[str, int] = {}
        self._landing: list[npt.NDArray[np.uint8]] = []
        self._free_slots: list[int] = []
        try:
            config = nixl.nixl_agent_config(
                enable_prog_thread=settings.progress_thread,
                enable_listen_thread=settings.listen_port > 0,
                listen_port=settings.listen_port,
                capture_telemetry=settings.telemetry,
                backends=[],
            )
            sleeps = settings.progress_thread and settings.sleep_us
            kind = agent_class(nixl, settings.sleep_us) if sleeps else nixl.nixl_agent
            with signal_handlers_kept():
                agent: nixl_agent = kind(name, config)
            if settings.backend not in agent.get_plugin_list():
                raise TransportUnavailableError(
                    f"NIXL has no plug-in {settings.backend!r}, expected one of {', '.join(agent.get_plugin_list())}",
                    package=nixl.__name__,
                    extra="nixl",
                )
            with signal_handlers_kept():  # this loads UCX
                agent.create_backend(settings.backend, dict(settings.options))
        except TransportError:
            raise
        except Exception as error:
            raise TransportUnavailableError(
                f"NIXL's agent with plug-in {settings.backend!r} does not start: {type(error).__name__}: {error}",
                package=nixl.__name__,
                extra="nixl",
            ) from error
        self._agent: nixl_agent | None = agent
        self._gone: Callable[[], object] = weakref.ref(agent.agent)

    @property
    def native(self) -> nixl_agent:
        """The native agent; use it under `lock`, and keep no reference."""
        agent = self._agent
        if agent is None:
            raise TransferError(f"NIXL agent {self.name} has been destroyed")
        return agent

    # --- memory ---------------------------------------------------------------------------------------

    def register(self, region: Region) -> None:
        """Register a region."""
        key = (region.address, region.nbytes, region.memory, region.device)
        with self.lock, mapped(f"registering {region.nbytes} bytes at {region.address:#x}"):
            self._registered[key] = self.native.register_memory(
                [(region.address, region.nbytes, region.device, "")], region.memory.upper(), [self.backend]
            )

    def deregister(self, region: Region) -> None:
        """Undo that, if it was done; never raises."""
        with self.lock:
            descriptors = self._registered.pop((region.address, region.nbytes, region.memory, region.device), None)
            if descriptors is None or self._agent is None:
                return
            try:
                with mapped(f"deregistering {region.nbytes} bytes at {region.address:#x}"):
                    self._agent.deregister_memory(descriptors, [self.backend])
            except TransportError as error:
                logger.warning("%s", error)

    def metadata(self) -> bytes:
        """Return the blob that a remote agent needs."""
        with self.lock, mapped("reading the agent's metadata"):
            return bytes(self.native.get_agent_metadata())

    # --- links ----------------------------------------------------------------------------------------

    def link(self, remote: str, blob: bytes, peer: str) -> None:
        """Load a remote agent's metadata and begin to connect; links to one agent are counted."""
        with self.lock, mapped(f"connecting to peer {peer!r}", peer, dialling=True):
            found = str(self.native.add_remote_agent(blob), "utf-8", "replace")  # type: ignore[call-overload]
            if found != remote:
                self.native.remove_remote_agent(found)
                raise PeerError(f"peer {peer!r}: metadata of agent {found!r}, expected {remote!r}", peer=peer)
            self.hold_link(remote)
            try:
                self.native.make_connection(remote, [self.backend])
            except BaseException:
                self.unlink(remote)
                raise

    def fetch(self, remote: str, host: bytes, port: int, peer: str, deadline: float) -> None:
        """Do as `link` does, with metadata from the peer's listener.

        A dead listener never makes NIXL raise: the deadline is all there is.
        """
        address = _resolve(host, peer, deadline)
        with self.lock, mapped(f"asking {address}:{port} for metadata of peer {peer!r}", peer, dialling=True):
            self.native.fetch_remote_metadata(remote, address, port)
        for pause in backoff():
            with self.lock, mapped(f"connecting to peer {peer!r}", peer, dialling=True):
                if self.native.check_remote_metadata(remote):
                    self.hold_link(remote)
                    try:
                        self.native.make_connection(remote, [self.backend])
                    except BaseException:
                        self.unlink(remote)
                        raise
                    return
            if time.monotonic() + pause >= deadline:
                raise TransferTimeoutError(
                    f"peer {peer!r}: no metadata from its listener at {address}:{port} within the deadline", peer=peer
                )
            time.sleep(pause)

    def hold_link(self, remote: str) -> None:
        """Count a link to a remote agent whose metadata is loaded."""
        with self.lock:
            self._links[remote] = self._links.get(remote, 0) + 1

    def unlink(self, remote: str) -> None:
        """End a link; with the last one the agents disconnect.  Never raises."""
        with self.lock:
            left = self._links.get(remote, 0) - 1
            if left > 0:
                self._links[remote] = left
                return
            if self._links.pop(remote, None) is None or self._agent is None:
                return
            try:
                with mapped(f"disconnecting from agent {remote}", remote):
                    self._agent.remove_remote_agent(remote)
            except TransportError as error:
                logger.info("%s", error)

    # --- landing slots for beacons --------------------------------------------------------------------

    def take_slot(self) -> tuple[int, npt.NDArray[np.uint8]]:
        """Return a registered slot of 64 bytes: its number and its memory."""
        with self.lock:
            if not self._free_slots:
                page = allocate_pages(_LANDING_BYTES)
                self.register(Region.of(page))
                n_slots = _LANDING_BYTES // BEACON_BYTES
                self._free_slots.extend(range(len(self._landing) * n_slots, (len(self._landing) + 1) * n_slots))
                self._landing.append(page)
            slot = self._free_slots.pop()
            page_at, at = divmod(slot * BEACON_BYTES, _LANDING_BYTES)
            return slot, self._landing[page_at][at : at + BEACON_BYTES]

    def return_slot(self, slot: int) -> None:
        """Give a slot back; one that may still be written is never given back."""
        with self.lock:
            self._free_slots.append(slot)

    # --- the end --------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy the native agent.

        Raises
        ------
        TransferError
            If something still refers to it, so that it cannot be said that it writes no more.
        """
        with self.lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                self._gone = weakref.ref(agent.agent)
                self._registered.clear()
                self._links.clear()
                del agent
            if self._gone() is not None:
                gc.collect()
            if self._gone() is not None:
                raise TransferError(f"NIXL agent {self.name} is still referred to and cannot be destroyed")
            self._landing.clear()
            self._free_slots.clear()


def start_listening_agent(name: str, settings: AgentSettings) -> tuple[Agent, int]:
    """Return an agent with a metadata listener, and the listener's port: a free one, unless the settings name one."""
    for left in reversed(range(_PORT_TRIES if not settings.listen_port else 1)):
        port = settings.listen_port or _free_port()
        try:
            return Agent(name, replace(settings, listen_port=port)), port
        except TransportUnavailableError:
            if not left:  # else another process may have taken the port meanwhile
                raise
    raise AssertionError("unreachable")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _resolve(host: bytes, peer: str, deadline: float) -> str:
    """Return a host's address; `socket.gethostbyname` knows no deadline, and a name server may be silent for long."""
    found: list[str] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            found.append(socket.gethostbyname(host.decode("utf-8", "strict")))
        except (OSError, UnicodeError) as error:
            failed.append(error)

    asking = threading.Thread(target=ask, name="reshard-resolve", daemon=True)
    asking.start()
    asking.join(max(deadline - time.monotonic(), 0.0))
    if found:
        return found[0]
    where = f"peer {peer!r}: no address for its listener {host!r}"
    if failed:
        raise PeerError(f"{where}: {failed[0]}", peer=peer) from failed[0]
    raise TransferTimeoutError(f"{where} within the deadline", peer=peer)
