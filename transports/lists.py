"""What a transport hands out: registrations, peers and prepared lists.

All three only carry state; their transport does the work, under its lock.  ``close`` is idempotent and never
raises.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.transports.endpoint import Endpoint
from reshard.transports.ledger import Entry
from reshard.transports.regions import U64, MemoryKind, Region, RegionTable
from reshard.transports.rows import RUN_COST_BYTES
from reshard.transports.transfer import ListTransfer, Slice

if TYPE_CHECKING:
    from reshard.transports.holding import Holding


SMALL_BYTES = 8 << 20
"""Lists up to this weight (see `rows.cut_runs`; about a millisecond) are posted by the calling thread."""


@dataclass(frozen=True, slots=True)
class Work:
    """A checked list, ready to become native slices.

    Attributes
    ----------
    local, remote : ndarray of uint64, shape (N, 3) or (N, 5)
        No row is empty; each lies inside one region.
    local_region, remote_region : ndarray of intp, shape (N,) or (1,)
        Index into ``local_entries`` and ``remote_table``; length 1 where all rows share one.
    local_entries : list of Entry
        The local registrations.
    remote_table : RegionTable
        What the peer serves.
    cuts : list of int
        Run indices ``[0, ..., n_runs]`` between which slices lie.
    local_memory, remote_memory : "dram" or "vram"
        One kind on each side.
    """

    local: U64
    remote: U64
    local_region: npt.NDArray[np.intp]
    remote_region: npt.NDArray[np.intp]
    local_entries: list[Entry]
    remote_table: RegionTable
    cuts: list[int]
    local_memory: MemoryKind
    remote_memory: MemoryKind


class ListRegistration:
    """Regions registered by one call."""

    __slots__ = ("_entries", "_owner", "regions")

    def __init__(self, owner: Holding, regions: tuple[Region, ...], entries: list[Entry]) -> None:
        self._owner = owner
        self._entries = entries
        self.regions = regions

    def close(self) -> None:
        """Withdraw what no other registration shares."""
        self._owner.withdraw(self)

    def take(self) -> list[Entry]:
        """Return what it still holds, and forget it; called under the owner's lock."""
        entries, self._entries = self._entries, []
        self.regions = ()
        return entries


class ConnectedPeer:
    """A connection to one peer.

    Attributes
    ----------
    name : str
    endpoint : Endpoint
    failed : str
        Why it is of no use any more, empty while it is.
    """

    __slots__ = ("_owner", "closed", "dialling", "endpoint", "epoch", "failed", "lists", "name", "native")

    def __init__(self, owner: Holding, name: str, endpoint: Endpoint) -> None:
        self._owner = owner
        self.name = name
        self.endpoint = endpoint
        self.native: object = None
        self.epoch = -1
        self.failed = ""
        self.closed = False
        self.dialling = threading.Lock()
        self.lists: set[PreparedList] = set()

    def close(self) -> None:
        """Close its lists, disconnect, and free the name."""
        self._owner.close_peer(self)

    def belongs_to(self, transport: Holding) -> bool:
        """Whether ``transport`` connected it."""
        return self._owner is transport


class PreparedList:
    """A list of rows for one peer.

    Attributes
    ----------
    peer : ConnectedPeer
    nbytes, n_descriptors : int
    destinations : list of Region
        The least range of each local region that contains everything it writes.
    """

    __slots__ = (
        "_owner",
        "building",
        "busy",
        "closed",
        "destinations",
        "epoch",
        "gate",
        "held",
        "n_descriptors",
        "nbytes",
        "peer",
        "slices",
        "small",
        "work",
    )

    def __init__(
        self,
        owner: Holding,
        peer: ConnectedPeer,
        work: Work,
        held: list[Entry],
        destinations: list[Region],
        nbytes: int,
    ) -> None:
        self._owner = owner
        self.peer = peer
        self.work = work
        self.held = held
        self.destinations = destinations
        self.nbytes = nbytes
        self.n_descriptors = work.cuts[-1]
        self.small = nbytes + self.n_descriptors * RUN_COST_BYTES <= SMALL_BYTES
        self.busy: ListTransfer | None = None
        self.building = False
        self.closed = False
        self.epoch = -1
        self.gate: Slice | None = None
        self.slices: list[Slice] = []

    def close(self) -> None:
        """Free the native list; one that is in flight is cancelled first."""
        self._owner.close_list(self)

    def belongs_to(self, transport: Holding) -> bool:
        """Whether ``transport`` made it."""
        return self._owner is transport

    def free_native(self) -> None:
        """Close what the native library holds."""
        slices, self.slices = self.slices, []
        gate, self.gate = self.gate, None
        for piece in slices:
            piece.close()
        if gate is not None:
            gate.close()
