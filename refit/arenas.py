"""The memory that a receiver reads into: which arenas does a plan need, which one is read into next, which is in doubt?

    shadow   every destination buffer; two where the engine goes on serving from the one it was given
    staging  spans on their way to their places
    loader   sources that the loader computes with
    meta     the holders' headers and digests, always on the host

Each is kept until another plan comes; the shadow arenas even then, if sizes stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.arena import Arena
from reshard.refit.devices import HOST, Device, host_bytes
from reshard.refit.digests import DIGEST_BYTES
from reshard.refit.errors import RefitError
from reshard.refit.header import HEADER_BYTES
from reshard.refit.planning import MATERIALISED
from reshard.transports.errors import TransportError

if TYPE_CHECKING:
    from reshard.planner import Plan
    from reshard.refit.devices import Memory
    from reshard.transports import Transport

__all__ = ["Arenas"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


class Arenas:
    """The arenas of one plan at a time.

    Parameters
    ----------
    transport
        Stays the caller's.
    device
        Where destinations and staging lie.
    swaps
        Whether the engine keeps the buffers it installs, so that two shadow arenas alternate.
    on_allocate
        Told the name (``shadow``, ``staging``, ``meta``, ``loader``) and bytes of each allocation.

    Attributes
    ----------
    served : Arena or None
        The shadow arena that the engine was last installed from, while it holds those bytes.
    new_registrations : int
        Registrations made since this object was.
    on_drop : callable or None
        Told each shadow arena that is about to be closed; who serves it to others must stop.
    """

    def __init__(
        self, transport: Transport, device: Device, *, swaps: bool, on_allocate: Callable[[str, int], None] | None
    ) -> None:
        self._transport, self._device, self._swaps, self._on_allocate = transport, device, swaps, on_allocate
        self._plan: Plan | None = None
        self._borrowed: Mapping[str, Memory] | None = None
        self._n_cells: dict[str, int] = {}
        self._staged_names: frozenset[str] = frozenset()
        self._shadows: list[Arena] = []
        self._current = 0
        self._staging: Arena | None = None
        self._lent: Arena | None = None
        self._meta: Arena | None = None
        self._loader: Arena | None = None
        self.new_registrations = 0
        self.served: Arena | None = None
        self.on_drop: Callable[[Arena], None] | None = None

    # -- for one plan

    def adopt(
        self,
        plan: Plan,
        n_cells: Mapping[str, int],
        materialised: Sequence[str] = (),
        *,
        borrowed: Mapping[str, Memory] | None = None,
        staging: Arena | None = None,
    ) -> None:
        """Take a new plan, and let go of what the old one needed; see `reshard.refit.reader.Reader.adopt`."""
        before = self._sizes(shadow=True) if self._plan is not None else None
        self._drop("staging", "meta", "loader")
        self._plan, self._borrowed = plan, borrowed
        self._lent = staging if staging is not None and staging.nbytes >= plan.staging_bytes else None
        self._n_cells = {holder.name: n_cells.get(holder.name, 0) for holder in plan.holders}
        self._staged_names = frozenset(materialised)
        if self._sizes(shadow=True) != before:
            self._drop("shadow")

    def allocate(self) -> None:
        """Allocate and register what is not there yet."""
        staging_bytes = self.plan.staging_bytes
        if self._borrowed is None and ((self._swaps and self._current >= len(self._shadows)) or not self._shadows):
            self._shadows.append(self._make("shadow", self._sizes(shadow=True)))
        if self._staging is None and self._lent is None and staging_bytes:
            self._staging = self._make("staging", {"staging": staging_bytes})
        if self._loader is None and self._staged_names:
            self._loader = self._make("loader", self._sizes(shadow=False))
        if self._meta is None and self._n_cells:
            sizes: dict[str, int] = {}
            for name, n in self._n_cells.items():
                sizes[f"before\0{name}"] = HEADER_BYTES
                sizes[f"after\0{name}"] = HEADER_BYTES
                sizes[f"digests\0{name}"] = n * DIGEST_BYTES
            self._meta = self._make("meta", sizes, HOST)

    @property
    def plan(self) -> Plan:
        """The plan whose memory this is.

        Raises
        ------
        RefitError
            If there is none.
        """
        if self._plan is None:
            raise RefitError("nothing was planned: there is no memory to read into")
        return self._plan

    # -- what lies where

    @property
    def current(self) -> int:
        """Which shadow arena the next read fills, 0 or 1."""
        return self._current

    def shadows(self) -> tuple[Arena, ...]:
        """The shadow arenas, one or two."""
        return tuple(self._shadows)

    def shadow(self) -> Arena:
        """The arena that the next read fills.

        Raises
        ------
        RefitError
            If it was not allocated, or was given up since.
        """
        if self._current >= len(self._shadows):
            raise RefitError("the shadow buffers are not there: they were released, or never allocated")
        return self._shadows[self._current]

    def buffers(self) -> list[Memory]:
        """All destination buffers in the plan's order."""
        names = self.plan.buffers.names_list
        if self._borrowed is not None:
            return [self._borrowed[name] for name in names]
        found = {**self.shadow().buffers, **(self._loader.buffers if self._loader is not None else {})}
        return [found[name] for name in names]

    def materialised(self, names: Sequence[str]) -> dict[str, Memory]:
        """The staged sources, by published name."""
        if self._loader is None:
            return {}
        return {n.removeprefix(MATERIALISED): self._loader.buffers[n] for n in names}

    @property
    def staging(self) -> Memory:
        """The staging arena's bytes (empty where the plan stages nothing)."""
        arena = self._lent if self._lent is not None else self._staging
        return arena.memory if arena is not None else np.zeros(0, np.uint8)

    @property
    def staging_base(self) -> int:
        """Address of the staging arena; 0 where there is none."""
        arena = self._lent if self._lent is not None else self._staging
        return arena.base if arena is not None else 0

    def meta(self) -> dict[str, U8]:
        """Headers and digests: ``before``, ``after`` or ``digests``, a NUL and the holder's name, to their memory."""
        return {name: host_bytes(m) for name, m in self._meta.buffers.items()} if self._meta is not None else {}

    def digests(self, holder: str) -> U64:
        """The digests read of one holder: uint64[n_cells, 2]."""
        if self._meta is None:
            return np.zeros((0, 2), np.uint64)
        return host_bytes(self._meta.buffers[f"digests\0{holder}"]).view("<u8").reshape(-1, 2)

    # -- over time

    def turn(self, *, again: bool = True) -> None:
        """The engine now serves from the current arena: fill the other one next (if there is to be a next refit)."""
        self.served = self.shadow()
        if self._swaps and again:
            self._current = 1 - self._current
            if self._current >= len(self._shadows):
                # Made now so that the next refit is warm; where there is no room for it now, the next one fails
                # cleanly.
                with contextlib.suppress(MemoryError, TransportError):
                    self._shadows.append(self._make("shadow", self._sizes(shadow=True)))

    def all(self) -> tuple[Arena, ...]:
        """Every arena that there is."""
        found = (*self._shadows, self._staging, self._meta, self._loader)
        return tuple(arena for arena in found if arena is not None)

    def poisoned(self) -> tuple[Arena, ...]:
        """Arenas that a late write may still change, after an abandoned read."""
        regions = self._transport.quarantined()
        return tuple(
            arena
            for arena in self.all()
            if any(r.address < arena.base + arena.nbytes and arena.base < r.stop for r in regions)
        )

    def give_up(self, arenas: Sequence[Arena]) -> None:
        """Let go of memory that must not be used again, and allocate other memory next time."""
        hit = [a for a in self._shadows if a in arenas]
        if hit:
            # What the engine serves from was not read into, and others may be reading it.
            self._shadows = [a for a in self._shadows if a not in hit]
            self._current = len(self._shadows) if self._swaps else 0
            self.served = self.served if self.served in self._shadows else None
            self._close(hit)
        for what, arena in (("staging", self._staging), ("meta", self._meta), ("loader", self._loader)):
            if arena in arenas:
                self._drop(what)

    def close(self) -> None:
        """Give all memory back; the engine keeps what it serves from. Idempotent."""
        self._drop("staging", "meta", "loader", "shadow")
        self._borrowed = self._lent = None
        self._plan = None

    # -- helpers

    def _sizes(self, *, shadow: bool) -> dict[str, int]:
        """Bytes of the shadow buffers, or of the loader's sources."""
        sizes = zip(self.plan.buffers.names_list, self.plan.buffer_bytes.tolist(), strict=True)
        return {name: size for name, size in sizes if (name in self._staged_names) != shadow}

    def _make(self, what: str, sizes: Mapping[str, int], device: Device | None = None) -> Arena:
        hook = self._on_allocate
        made = Arena(
            self._transport,
            sizes,
            device=device if device is not None else self._device,
            on_allocate=(lambda n: hook(what, n)) if hook is not None else None,
        )
        self.new_registrations += 1
        return made

    def _close(self, shadows: Sequence[Arena]) -> None:
        for arena in shadows:
            if self.on_drop is not None:
                self.on_drop(arena)
            arena.close()

    def _drop(self, *what: str) -> None:
        if "shadow" in what:
            shadows, self._shadows, self._current = self._shadows, [], 0
            self.served = None
            self._close(shadows)
        if "staging" in what and self._staging is not None:
            self._staging.close()
            self._staging = None
        if "loader" in what and self._loader is not None:
            self._loader.close()
            self._loader = None
        if "meta" in what and self._meta is not None:
            self._meta.close()
            self._meta = None
