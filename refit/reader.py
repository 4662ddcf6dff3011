"""Everything that a receiver keeps between refits to read a plan: arenas, peers, prepared lists.

1. `Reader.adopt` takes a plan: arenas for its shadow buffers, its staging, and the holders' headers and digests.
2. `Reader.bind` turns plan, region bases of a version and the current shadow arena into prepared lists, kept by
   (arena, bases), so that a publisher with two buffers and a receiver with two arenas end up with four sets and no
   more work.
3. `Reader.read` reads headers, all waves with their local copies and the digests, and headers again. What has landed
   is verified while more is read.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.arena import Arena
from reshard.refit.batches import BATCH_BYTES
from reshard.refit.binding import Bound, bind_version
from reshard.refit.deadline import Deadline
from reshard.refit.devices import HOST, Device, address_of, host_bytes
from reshard.refit.digests import DIGEST_BYTES
from reshard.refit.errors import RefitError, TornReadError, VerificationError
from reshard.refit.header import HEADER_BYTES, Header
from reshard.refit.links import Links
from reshard.refit.planning import MATERIALISED
from reshard.refit.retry import RetryPolicy
from reshard.refit.verify import Verifier
from reshard.refit.waves import WireTotals, read_waves
from reshard.transports.errors import TransportError

if TYPE_CHECKING:
    from reshard.planner import Plan
    from reshard.refit.checks import Checks
    from reshard.refit.devices import Memory
    from reshard.rendezvous.types import Manifest
    from reshard.transports.base import Prepared, Transport

__all__ = ["Reader"]

U64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

_KEPT_BINDINGS = 8


class Reader:
    """Reads one plan, again and again.

    Parameters
    ----------
    transport
        Stays the caller's.
    swaps
        Whether the engine keeps the buffers it installs, so that two shadow arenas alternate.
    on_allocate
        Told the name (``shadow``, ``staging``, ``meta``, ``loader``) and bytes of each allocation.
    links
        Another reader's connections, to be shared with it.
    retry
        How often a dial is tried.
    device
        Where destinations and staging lie; headers and digests always lie on the host.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        swaps: bool,
        on_allocate: Callable[[str, int], None] | None = None,
        links: Links | None = None,
        retry: RetryPolicy | None = None,
        device: Device = HOST,
    ) -> None:
        self._transport = transport
        self.device = device
        self._swaps = swaps
        self.on_allocate = on_allocate
        self.links = links if links is not None else Links(transport, retry)
        self.links.subscribe(self.forget_lists)
        self._borrowed: Mapping[str, Memory] | None = None
        self._plan: Plan | None = None
        self._holders: tuple[str, ...] = ()
        self._n_cells: dict[str, int] = {}
        self._shadows: list[Arena] = []
        self._current = 0
        self._staging: Arena | None = None
        self._meta: Arena | None = None
        self._loader: Arena | None = None
        self._staged_names: frozenset[str] = frozenset()
        self._bindings: OrderedDict[tuple[int, bool, bytes], Bound] = OrderedDict()
        self.batch_bytes = BATCH_BYTES
        """Least bytes that are read before others are verified."""
        self.new_registrations = 0
        self.served: Arena | None = None
        """The shadow arena that the engine was last installed from, while it holds those bytes."""

    # -- memory

    def adopt(
        self,
        plan: Plan,
        n_cells: Mapping[str, int],
        materialised: Sequence[str] = (),
        *,
        borrowed: Mapping[str, Memory] | None = None,
    ) -> None:
        """Take a new plan and let go of everything that belongs to the old one.

        Parameters
        ----------
        n_cells
            By holder the number of its digests; 0 where digests are not wanted.
        materialised
            Buffers that stage sources for the loader; they are no part of the shadow arenas.
        borrowed
            Registered buffers of another reader to read into; none are allocated.
        """
        before = self._sizes(shadow=True) if self._plan is not None else None
        self.forget_lists()
        self._drop("staging", "meta", "loader")
        self._plan = plan
        self._borrowed = borrowed
        self._staged_names = frozenset(materialised)
        if self._sizes(shadow=True) != before:
            self._drop("shadow")
        self._holders = tuple(h.name for h in plan.holders)
        self._n_cells = dict(n_cells)

    def allocate(self) -> None:
        """Allocate and register what is not there yet."""
        if self._borrowed is None and ((self._swaps and self._current >= len(self._shadows)) or not self._shadows):
            self._shadows.append(self._arena("shadow", self._sizes(shadow=True)))
        staging_bytes = self._required_plan().staging_bytes
        if self._staging is None and staging_bytes:
            self._staging = self._arena("staging", {"staging": staging_bytes})
        if self._loader is None and self._staged_names:
            self._loader = self._arena("loader", self._sizes(shadow=False))
        if self._meta is None and self._holders:
            sizes: dict[str, int] = {}
            for name in self._holders:
                sizes[f"before\0{name}"] = HEADER_BYTES
                sizes[f"after\0{name}"] = HEADER_BYTES
                sizes[f"digests\0{name}"] = self._n_cells.get(name, 0) * DIGEST_BYTES
            self._meta = self._arena("meta", sizes, HOST)

    def shadow(self) -> Arena:
        """The arena that the next read fills."""
        return self._shadows[self._current]

    def turn(self, *, again: bool = True) -> None:
        """The engine now serves from the current arena: fill the other one next (if there is to be a next refit)."""
        self.served = self.shadow()
        if self._swaps and again:
            self._current = 1 - self._current
            if self._current >= len(self._shadows):
                # Made now so that the next refit is warm; where there is no room for it now, the next one fails
                # cleanly.
                with contextlib.suppress(MemoryError, TransportError):
                    self._shadows.append(self._arena("shadow", self._sizes(shadow=True)))

    def materialised(self, names: Sequence[str]) -> dict[str, Memory]:
        """The staged sources, by published name."""
        return (
            {n.removeprefix(MATERIALISED): self._loader.buffers[n] for n in names} if self._loader is not None else {}
        )

    def meta_bytes(self, lost: Mapping[str, object] | None = None) -> int:
        """Bytes of digests that a read brings along with the data, ``lost`` holders apart."""
        gone = lost if lost is not None else {}
        return sum(self._n_cells.get(name, 0) for name in self._holders if name not in gone) * DIGEST_BYTES

    @property
    def staging(self) -> Memory:
        """The staging arena's bytes (empty where the plan stages nothing)."""
        return self._staging.memory if self._staging is not None else np.zeros(0, np.uint8)

    def digests(self, holder: str) -> U64:
        """The digests read of one holder: uint64[n_cells, 2]."""
        if self._meta is None:
            return np.zeros((0, 2), np.uint64)
        return host_bytes(self._meta.buffers[f"digests\0{holder}"]).view("<u8").reshape(-1, 2)

    # -- reading

    def bind(self, manifest: Manifest, checks: Checks | None = None) -> Bound:
        """Prepared lists for this version; made once for each (arena, region bases).

        With the plan's ``checks`` they are read in batches, so that one is verified while the next one is read.
        """
        plan = self._required_plan()
        if self.device.in_bulk:
            checks = None
        by_slot = {record.slot: record for record in manifest.slots}
        records = [by_slot[name] for name in self._holders]
        key = (
            self._current,
            checks is not None,
            hashlib.sha256(b"".join(r.region_bases.tobytes() for r in records)).digest(),
        )
        bound = self._bindings.get(key)
        if bound is not None:
            self._bindings.move_to_end(key)
            return bound
        made = bind_version(
            self._transport,
            self.links,
            plan,
            records,
            np.array([address_of(b) for b in self.buffers()], np.uint64),
            self._staging.base if self._staging is not None else 0,
            {name: host_bytes(m) for name, m in self._meta.buffers.items()} if self._meta is not None else {},
            local_memory=self.device.memory,
            local_device=self.device.number,
            checks=checks,
            batch_bytes=self.batch_bytes,
        )
        self._bindings[key] = made
        while len(self._bindings) > _KEPT_BINDINGS:
            self._bindings.popitem(last=False)[1].close()
        return made

    def probe(self, manifest: Manifest, checks: Checks | None, deadline: Deadline, stall_s: float | None) -> None:
        """Read the holders' headers alone: whether each of them is there and holds the version.

        Raises
        ------
        TransportError
            A holder that is not.
        TornReadError
            One that holds another version.
        """
        bound = self.bind(manifest, checks)
        read_waves(self._transport, [bound.before], lambda k: None, deadline, stall_s=stall_s)
        self._headers("before", manifest, {})

    def read(
        self,
        bound: Bound,
        manifest: Manifest,
        deadline: Deadline,
        *,
        verifier: Verifier | None = None,
        may_lose: bool = False,
        stall_s: float | None = None,
    ) -> WireTotals:
        """Read a version into the current shadow arena; what goes through staging is verified on the way.

        Other cells are verified on the way, too, if the lists were bound with the plan's checks; what is left of them
        when this returns is for `Verifier.finish`. With ``may_lose``, holders that fail are in the ``lost`` of what is
        returned, and what they owed is missing.

        Raises
        ------
        TornReadError
            If a holder's header is not of this version, before or after.
        VerificationError
            If digests do not have their root, or cells not their digest.
        TransportError
            The first failure of a peer, with every peer's state.
        """
        plan = self._required_plan()
        buffers = self.buffers()
        self.device.quiesce()  # nothing that was launched before uses what peers are about to write
        lost: dict[str, TransportError] = {}

        def heads(lists: Sequence[Prepared]) -> None:
            sums = WireTotals(lost=lost)
            read_waves(
                self._transport, [lists], lambda k: None, deadline, totals=sums, may_lose=may_lose, stall_s=stall_s
            )

        heads(bound.before)
        first = self._headers("before", manifest, lost)
        if len(plan.fills):
            self.device.run_fills(plan, buffers)
            self.device.synchronize()
        staging = self.staging
        if verifier is not None:
            verifier.begin(staging, buffers, bound.complete_with)

        def use(k: int) -> None:
            batch = bound.batches[k]
            if verifier is not None and k == 0:
                roots = {r.slot: r.digest_root for r in manifest.slots}
                verifier.trust({name: self.digests(name) for name in self._holders if name not in lost}, roots)
            if batch.ends_wave:
                self.device.flush()
                if verifier is not None:
                    verifier.check_staged(batch.wave, lost)
                self.device.run_copies(plan, batch.wave, staging, buffers)
                self.device.synchronize()
                if verifier is not None:
                    verifier.settle()
            if verifier is not None:
                verifier.feed(k, lost)

        def require_unchanged() -> None:
            heads(bound.after)
            last = self._headers("after", manifest, lost)
            for name, header in first.items():
                if name not in lost and last[name] != header:
                    raise TornReadError(
                        f"holder {name!r}: its buffer was written during the read "
                        f"(sequence {header.sequence} -> {last[name].sequence})"
                    )

        lists = [batch.lists for batch in bound.batches]
        lists[0] = [*lists[0], *bound.beside]
        try:
            totals = read_waves(
                self._transport,
                lists,
                use,
                deadline,
                totals=WireTotals(lost=lost),
                may_lose=may_lose,
                stall_s=stall_s,
            )
        except VerificationError:
            # Cells that differ because they were written meanwhile: say so, if the headers do.
            with contextlib.suppress(TransportError):
                require_unchanged()
            raise
        require_unchanged()
        return totals

    def poisoned(self) -> tuple[Arena, ...]:
        """Arenas that a late write may still change, after an abandoned read."""
        regions = self._transport.quarantined()
        arenas = (*self._shadows, self._staging, self._meta, self._loader)
        return tuple(
            arena
            for arena in arenas
            if arena is not None and any(r.address < arena.base + arena.nbytes and arena.base < r.stop for r in regions)
        )

    def give_up(self, arenas: Sequence[Arena]) -> None:
        """Let go of memory that must not be used again, and allocate other memory next time."""
        self.forget_lists()
        hit = [a for a in self._shadows if a in arenas]
        if hit:
            # What the engine serves from was not read into, and others may be reading it.
            self._shadows = [a for a in self._shadows if a not in hit]
            self._current = len(self._shadows) if self._swaps else 0
            self.served = self.served if self.served in self._shadows else None
            for given_up in hit:
                given_up.close()
        for what, arena in (("staging", self._staging), ("meta", self._meta), ("loader", self._loader)):
            if arena in arenas:
                self._drop(what)

    def release(self) -> None:
        """Free lists and memory; peers stay (they belong to the reader that this one shares them with)."""
        self.forget_lists()
        self._drop("staging", "meta", "loader", "shadow")
        self._borrowed = None
        self._plan = None
        self.links.unsubscribe(self.forget_lists)

    def close(self) -> None:
        """Free lists, peers, registrations and memory, in this order. The engine keeps what it serves from."""
        self.forget_lists()
        self.links.close()
        self._drop("staging", "meta", "loader", "shadow")
        self._plan = None

    # -- helpers

    def _required_plan(self) -> Plan:
        if self._plan is None:
            raise RefitError("the reader has no plan")
        return self._plan

    def _sizes(self, *, shadow: bool) -> dict[str, int]:
        """Bytes of the shadow buffers, or of the loader's sources."""
        plan = self._required_plan()
        sizes = zip(plan.buffers.names_list, plan.buffer_bytes.tolist(), strict=True)
        return {name: size for name, size in sizes if (name in self._staged_names) != shadow}

    def buffers(self) -> list[Memory]:
        """All destination buffers in the plan's order."""
        if self._borrowed is not None:
            return [self._borrowed[name] for name in self._required_plan().buffers.names_list]
        found = {**self.shadow().buffers, **(self._loader.buffers if self._loader is not None else {})}
        return [found[name] for name in self._required_plan().buffers.names_list]

    def _arena(self, what: str, sizes: Mapping[str, int], device: Device | None = None) -> Arena:
        hook = self.on_allocate
        made = Arena(
            self._transport,
            sizes,
            device=device if device is not None else self.device,
            on_allocate=(lambda n: hook(what, n)) if hook is not None else None,
        )
        self.new_registrations += 1
        return made

    def _drop(self, *what: str) -> None:
        if "shadow" in what:
            shadows, self._shadows, self._current = self._shadows, [], 0
            self.served = None
            for arena in shadows:
                arena.close()
        if "staging" in what and self._staging is not None:
            self._staging.close()
            self._staging = None
        if "loader" in what and self._loader is not None:
            self._loader.close()
            self._loader = None
        if "meta" in what and self._meta is not None:
            self._meta.close()
            self._meta = None

    def forget_lists(self) -> None:
        """Free all prepared lists; they are made again when they are needed."""
        while self._bindings:
            self._bindings.popitem()[1].close()

    def _headers(self, when: str, manifest: Manifest, lost: Mapping[str, object]) -> dict[str, Header]:
        out: dict[str, Header] = {}
        if self._meta is None:
            return out
        by_slot = {record.slot: record for record in manifest.slots}
        for name in self._holders:
            if name in lost or by_slot[name].header_region < 0:
                continue
            header = Header.parse(host_bytes(self._meta.buffers[f"{when}\0{name}"]).tobytes(), holder=name)
            header.require(holder=name, epoch=manifest.version.epoch, step=manifest.version.step)
            out[name] = header
        return out
