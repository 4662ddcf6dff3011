"""How is a plan read, again and again? Prepared lists, headers, waves, digests.

1. `Reader.adopt` takes a plan; its memory is that of `reshard.refit.arenas`.
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

from reshard.refit.arenas import Arenas
from reshard.refit.batches import BATCH_BYTES
from reshard.refit.binding import Bound, bind_version
from reshard.refit.deadline import Deadline
from reshard.refit.devices import HOST, Device, address_of
from reshard.refit.errors import TornReadError, VerificationError
from reshard.refit.header import Header
from reshard.refit.links import Links
from reshard.refit.retry import RetryPolicy
from reshard.refit.verify import Verifier
from reshard.refit.waves import WireTotals, read_waves
from reshard.transports.errors import TransportError

if TYPE_CHECKING:
    from reshard.planner import Plan
    from reshard.refit.arena import Arena
    from reshard.refit.checks import Checks
    from reshard.refit.devices import Memory
    from reshard.rendezvous.types import Manifest, SlotRecord
    from reshard.transports.base import Prepared, Transport

__all__ = ["Reader"]

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

    Attributes
    ----------
    links : Links
        The connected holders.
    arenas : Arenas
        The memory that is read into.
    batch_bytes : int
        Least bytes that are read before others are verified.
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
        self.on_allocate = on_allocate
        self.links = links if links is not None else Links(transport, retry)
        self.links.subscribe(self.forget_lists)
        self.arenas = Arenas(transport, device, swaps=swaps, on_allocate=on_allocate)
        self._holders: tuple[str, ...] = ()
        self._bindings: OrderedDict[tuple[int, bool, bytes], Bound] = OrderedDict()
        self.batch_bytes = BATCH_BYTES

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
        """Take a new plan and let go of everything that belongs to the old one.

        Parameters
        ----------
        n_cells
            By holder the number of its digests; 0 where digests are not wanted.
        materialised
            Buffers that stage sources for the loader; they are no part of the shadow arenas.
        borrowed
            Registered buffers of another reader to read into; none are allocated.
        staging
            Staging of another reader, used where it is large enough.
        """
        self.forget_lists()
        self.arenas.adopt(plan, n_cells, materialised, borrowed=borrowed, staging=staging)
        self._holders = tuple(h.name for h in plan.holders)

    def bound(self) -> tuple[Bound, ...]:
        """The sets of prepared lists, the one used last at the end."""
        return tuple(self._bindings.values())

    def bind(self, manifest: Manifest, checks: Checks | None = None) -> Bound:
        """Prepared lists for this version; made once for each (arena, places of the holders' regions).

        With the plan's ``checks`` they are read in batches, so that one is verified while the next one is read.
        """
        arenas = self.arenas
        if self.device.in_bulk:
            checks = None
        by_slot = {record.slot: record for record in manifest.slots}
        records = [by_slot[name] for name in self._holders]
        key = (
            arenas.current,
            checks is not None,
            hashlib.sha256(repr([_places(r) for r in records]).encode()).digest(),
        )
        bound = self._bindings.get(key)
        if bound is not None:
            self._bindings.move_to_end(key)
            return bound
        made = bind_version(
            self._transport,
            self.links,
            arenas.plan,
            records,
            np.array([address_of(b) for b in arenas.buffers()], np.uint64),
            arenas.staging_base,
            arenas.meta(),
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
        totals: WireTotals,
        *,
        verifier: Verifier | None = None,
        may_lose: bool = False,
        stall_s: float | None = None,
    ) -> None:
        """Read a version into the current shadow arena; what goes through staging is verified on the way.

        Other cells are verified on the way, too, if the lists were bound with the plan's checks; what is left of them
        when this returns is for `Verifier.finish`.

        Parameters
        ----------
        totals
            Adds to these what moves, digests and headers apart, also where it fails. With ``may_lose``, holders that
            fail are in its ``lost``, and what they owed is missing.

        Raises
        ------
        TornReadError
            If a holder's header is not of this version, before or after.
        VerificationError
            If digests do not have their root, or cells not their digest.
        TransportError
            The first failure of a peer, with every peer's state.
        """
        plan, staging, buffers = self.arenas.plan, self.arenas.staging, self.arenas.buffers()
        self.device.quiesce()  # nothing that was launched before uses what peers are about to write
        lost = totals.lost
        totals.beside |= {id(prepared) for prepared in bound.beside}

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
        if verifier is not None:
            verifier.begin(staging, buffers, bound.complete_with)

        def use(k: int) -> None:
            batch = bound.batches[k]
            if verifier is not None and k == 0:
                roots = {r.slot: r.digest_root for r in manifest.slots}
                verifier.trust({name: self.arenas.digests(name) for name in self._holders if name not in lost}, roots)
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
            read_waves(self._transport, lists, use, deadline, totals=totals, may_lose=may_lose, stall_s=stall_s)
        except VerificationError:
            # Cells that differ because they were written meanwhile: say so, if the headers do.
            with contextlib.suppress(TransportError):
                require_unchanged()
            raise
        require_unchanged()

    def give_up(self, arenas: Sequence[Arena]) -> None:
        """Let go of memory that must not be used again, and of the lists that name it."""
        self.forget_lists()
        self.arenas.give_up(arenas)

    def release(self) -> None:
        """Free lists and memory; peers stay (they belong to the reader that this one shares them with)."""
        self.forget_lists()
        self.arenas.close()
        self.links.unsubscribe(self.forget_lists)

    def close(self) -> None:
        """Free lists, peers, registrations and memory, in this order. The engine keeps what it serves from."""
        self.forget_lists()
        self.links.close()
        self.arenas.close()

    # -- helpers

    def forget_lists(self) -> None:
        """Free all prepared lists; they are made again when they are needed."""
        while self._bindings:
            self._bindings.popitem()[1].close()

    def _headers(self, when: str, manifest: Manifest, lost: Mapping[str, object]) -> dict[str, Header]:
        out: dict[str, Header] = {}
        meta = self.arenas.meta()
        by_slot = {record.slot: record for record in manifest.slots}
        for name in self._holders:
            if name in lost or by_slot[name].header_region < 0:
                continue
            header = Header.parse(meta[f"{when}\0{name}"].tobytes(), holder=name)
            header.require(holder=name, epoch=manifest.version.epoch, step=manifest.version.step)
            out[name] = header
        return out


def _places(record: SlotRecord) -> tuple[bytes, int, int]:
    """What decides where a holder's data, header and digests are read from."""
    return record.region_bases.tobytes(), record.header_region, record.digest_region
