"""What does a receiver keep between refits? The plan in force, its reader, its checks, the streamer.

Everything here happens on one rank and asks nobody; the transaction around it is in `reshard.refit.attempt`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.planner.cuts import cuts
from reshard.refit.arena import Arena, aligned, extent_bytes, require_arenas
from reshard.refit.bench_settings import BenchSettings
from reshard.refit.checks import Checks, build_checks, warn_of_partial
from reshard.refit.clock import StageClock
from reshard.refit.deadline import Deadline
from reshard.refit.engine import Captured, Engine, StreamEngine
from reshard.refit.errors import RefitError, UnmappedMemoryError
from reshard.refit.planning import Planned, manifest_of, plan_refit, topology_digest, with_holders
from reshard.refit.reader import Reader
from reshard.refit.rechecking import TrustedDigests, keep_digests
from reshard.refit.records import DiscoveryRecord, emit
from reshard.refit.report import MemoryLedger
from reshard.refit.residency import LiveWeights
from reshard.refit.streaming import Streamer, StreamSection, arena_bytes
from reshard.refit.trust import require_trusted
from reshard.refit.verify import Mode
from reshard.rendezvous.errors import RendezvousError
from reshard.transports.errors import TransferTimeoutError

if TYPE_CHECKING:
    from reshard.planner import ShardPart
    from reshard.refit.devices import Memory
    from reshard.rendezvous import Manifest, Rendezvous
    from reshard.transports import Transport

logger = logging.getLogger(__name__)

__all__ = ["BenchSettings", "Workbench"]

_QUARANTINE_S = 10.0
_HINTS_S = 2.0
"""Cut hints are an offer; a service that does not answer must not cost the refit its time."""


class Workbench:
    """One rank's plan, memory and connections.

    Parameters
    ----------
    reader
        Owned by the bench; closed with it.
    """

    def __init__(
        self, transport: Transport, rendezvous: Rendezvous, engine: Engine, reader: Reader, settings: BenchSettings
    ) -> None:
        self.transport, self.rendezvous, self.engine, self.reader = transport, rendezvous, engine, reader
        self.settings = settings
        self.planned: Planned | None = None
        self.checks: Checks | None = None
        self.on_overwrite: Callable[[Arena, Deadline], None] | None = None
        self.trusted: TrustedDigests | None = None
        """The trainer's digests of what the engine was last installed from, where they were read."""
        self.selection: tuple[str, ...] = ()
        """Which sources the engine was last installed with (``only=``); empty for all."""
        self._planned_for: tuple[str, ...] = ()
        self._streamer: Streamer | None = None
        self._streams_with: Mode = settings.verify
        self._signature = b""
        self._whose = f"member {settings.member!r}"
        self._live = LiveWeights(engine, self._whose)

    def tables(self, manifest: Manifest, deadline: Deadline) -> dict[bytes, ShardPart]:
        """The parts of a manifest's slots."""
        wanted = list(dict.fromkeys(r.table_digest for r in manifest.slots))
        return self.rendezvous.get_tables(wanted, timeout_s=deadline.remaining("get tables"))

    def discovery(self, manifest: Manifest, planned: Planned, fresh: bool, seconds: float) -> DiscoveryRecord:
        """Emit and return the discovery record."""
        record = DiscoveryRecord(
            self.settings.rank,
            self.settings.member,
            self.settings.model,
            manifest.version.epoch,
            manifest.version.step,
            len(manifest.slots),
            sum(r.empty for r in manifest.slots),
            len(planned.sources.tensors),
            planned.sources.n_shards,
            len({r.table_digest for r in manifest.slots}) if fresh else 0,
            fresh,
            round(seconds, 6),
        )
        emit(record)
        return record

    def plan_for(
        self,
        manifest: Manifest,
        only: Sequence[str],
        clock: StageClock,
        deadline: Deadline,
        *,
        without: frozenset[str] = frozenset(),
    ) -> tuple[Planned, bool]:
        """The plan for a manifest, and whether it is a new one.

        It is new where a table, the selection, the options or the engine's memory has changed since the last plan.
        """
        signature = self.engine.signature()
        self.require_mapped(signature)
        topology = topology_digest(manifest, only, self.settings.options, without)
        self._planned_for = tuple(only)
        same = self.planned is not None and self.planned.topology == topology and signature == self._signature
        if same and self.planned is not None and (self.checks is not None or not self._wants_checks):
            return self.planned, False
        parts = self.tables(manifest, deadline)
        sources = with_holders(manifest, parts)
        whole = manifest_of(sources, self.settings.options.aliases)
        sources = sources.replace(removed=sorted(without & set(sources.by_name)))
        clock.enter("capture")
        captured = self.engine.capture(whole)
        clock.enter("plan")
        planned = plan_refit(
            captured,
            sources,
            self.engine.parameters(),
            self.settings.options,
            only=only,
            gate=self.settings.gate,
            rank=self.settings.rank,
            topology=topology,
        )
        self._signature = signature
        if self.settings.cut_hints and not only and not without:
            self._send_hints(captured, deadline)
        return planned, True

    def _send_hints(self, captured: Captured, deadline: Deadline) -> None:
        """Tell publishers where this rank cuts the sources; a service that is out of reach is told another time."""
        try:
            self.rendezvous.put_cuts(
                self.settings.model,
                cuts([[captured.reads]]),
                group=self.settings.group,
                member=self.settings.member,
                timeout_s=min(deadline.remaining("put cut hints"), _HINTS_S),
            )
        except RendezvousError as error:
            logger.info("member %s could not leave its cut hints: %s", self.settings.member, error)

    def adopt(self, planned: Planned) -> None:
        """Put a new plan in force."""
        self.planned = None
        self.drop_streamer()
        if self.settings.install_mode == "shadow":
            self.checks = build_checks(planned.plan) if self._wants_checks else None
            if self.checks is not None:
                warn_of_partial(self._whose, [(planned.plan, self.checks)])
            n_cells = self.checks.n_cells if self.checks is not None else {}
            self.reader.adopt(planned.plan, n_cells, planned.materialised_buffers)
        self.planned = planned

    def allocate(self) -> None:
        """Allocate and register what the plan in force needs and is not there yet."""
        if self.settings.install_mode == "shadow":
            self.reader.arenas.allocate()
            return
        if self._streams_with != self.settings.verify:
            self.drop_streamer()
        if self._streamer is None and self.planned is not None:
            self._streams_with = self.settings.verify
            self._streamer = Streamer(
                self.transport,
                self.reader.links,
                self.planned,
                budget_bytes=self.settings.stream_bytes,
                verify=self.settings.verify,
                reader=self.reader,
            )
            warn_of_partial(
                self._whose, [(p.plan, p.checks) for p in self._streamer.sections() if p.checks is not None]
            )

    def drop(self, names: frozenset[str], left_s: float) -> None:
        """Release failed peers; wait until no late write of theirs can land, or give up the memory it may hit.

        Parameters
        ----------
        left_s
            Seconds that the caller has left; at most half of them, and `_QUARANTINE_S`, are spent here, but one even if
            there is none: mostly the read has used the deadline up, and what is not lifted here never is.
        """
        self.reader.links.release(names)
        if self._in_doubt():
            # A transport may have to rebuild its agent for this; until then its memory is of no use to anyone.
            with contextlib.suppress(TransferTimeoutError):
                self.transport.wait_quarantine(timeout_s=min(max(left_s / 2, 1.0), _QUARANTINE_S))
        if self._in_doubt():
            self.drop_streamer()
            if hit := self.reader.arenas.poisoned():
                self.reader.give_up(hit)
                self.planned = None

    def forget_lists(self) -> None:
        """Free all prepared lists; what is in flight of them is ended, or its memory quarantined."""
        self.reader.forget_lists()
        for section in self._streamer.sections() if self._streamer is not None else ():
            section.reader.forget_lists()

    def _in_doubt(self) -> bool:
        """Whether memory that is in use here may still be written late."""
        if not self.transport.quarantined():
            return False
        return self._streamer is not None or bool(self.reader.arenas.poisoned())

    def seed(self, planned: Planned, buffers: Mapping[str, Memory], *, quarantined: bool) -> None:
        """Fill buffers that the plan writes only in part with the live bytes."""
        self.require_trusted(planned, quarantined=quarantined)
        for name in planned.seeded:
            self.engine.read_live(name, buffers[name])

    def require_trusted(self, planned: Planned, *, quarantined: bool) -> None:
        """As `reshard.refit.trust.require_trusted`, for this rank."""
        require_trusted(planned, self.engine, self.settings.member, quarantined=quarantined)

    def run_loader(self, planned: Planned, buffers: Mapping[str, Memory]) -> None:
        """Run the engine's loader on materialised sources, into shadow buffers."""
        sources = self.reader.arenas.materialised(planned.materialised_buffers)
        wanted = {n: buffers[n] for n in planned.captured.loader_buffers if n in buffers}
        self.engine.load_materialised(sources, wanted)

    def install(self, manifest: Manifest, *, again: bool) -> None:
        """Make the shadow buffers live; a destination that was reallocated or unmapped meanwhile is refused."""
        self._require_same_memory()
        self.engine.install(self.reader.arenas.shadow().buffers)
        self.reader.arenas.turn(again=again)
        self._signature = self.engine.signature()
        self.trusted, self.selection = None, self._planned_for
        if self.checks is not None and self.planned is not None:
            names = self.planned.plan.buffers.names_list
            self.trusted = keep_digests(self.checks, names, manifest, self.reader.arenas.digests)

    def stream_sections(self) -> Sequence[StreamSection]:
        """The sections to be streamed into the paused engine."""
        self._require_same_memory()
        if self._streamer is None:
            raise RefitError("nothing was allocated for streaming")
        return self._streamer.sections()

    def probe_sections(self, manifest: Manifest, deadline: Deadline, *, batched: bool, stall_s: float | None) -> None:
        """Whether each section's holder is there and holds the version, as far as that can be known before the vote.

        Raises
        ------
        TransportError, TornReadError
            As `reshard.refit.reader.Reader.probe`.
        """
        for section in self._streamer.sections() if self._streamer is not None else ():
            section.reader.probe(manifest, section.checks if batched else None, deadline, stall_s)

    def section_without(
        self, section: StreamSection, lost: frozenset[str], manifest: Manifest, deadline: Deadline
    ) -> StreamSection:
        """The section itself, or one that reads the same from other holders than ``lost`` ones, which are connected.

        Raises
        ------
        CoverageError
            What no other holder has.
        TransportError
            One that cannot be reached, or memory that is in doubt: then nothing can be read into it any more.
        """
        if self._streamer is None:
            raise TransferTimeoutError("the arena to stream through is in doubt: a late read may still write into it")
        if not lost & {h.name for h in section.plan.holders}:
            return section
        other = self._streamer.replace(section, lost)
        self.reader.links.ensure([manifest.slot(h.name) for h in other.plan.holders], deadline, exact=False)
        return other

    def stream_engine(self) -> StreamEngine:
        """The engine, as one that can be written in place."""
        if not isinstance(self.engine, StreamEngine):
            raise RefitError(f"{type(self.engine).__name__} cannot be written in place: it is no StreamEngine")
        return self.engine

    def ledger(self, planned: Planned) -> MemoryLedger:
        """What a refit by this plan takes, and would take in the other install mode."""
        sizes = dict(zip(planned.plan.buffers.names_list, planned.plan.buffer_bytes.tolist(), strict=True))
        staged = set(planned.materialised_buffers)
        streamer = self._streamer
        return MemoryLedger(
            planned.coverage.engine_bytes,
            extent_bytes(n for name, n in sizes.items() if name not in staged),
            aligned(planned.plan.staging_bytes if streamer is None else streamer.staging_bytes),
            extent_bytes(n for name, n in sizes.items() if name in staged),
            streamer.arena_bytes if streamer is not None else arena_bytes(planned, self.settings.stream_bytes),
        )

    def check_installed(self) -> None:
        """Whether the engine still has the memory that was written."""
        if self.engine.signature() != self._signature:
            raise RefitError("a parameter was reallocated while the refit was installed")

    def pause_engine(self) -> None:
        """Stop serving, for ``stream`` mode."""
        if isinstance(self.engine, StreamEngine):
            self.engine.pause()

    def resume_engine(self) -> None:
        """Serve again, after a refit in ``stream`` mode that ended well or touched nothing."""
        if self.settings.install_mode == "stream" and isinstance(self.engine, StreamEngine):
            self.engine.resume()

    def _require_same_memory(self) -> None:
        if self.engine.signature() != self._signature:
            raise RefitError("a parameter was reallocated after this refit was planned")
        self._live.require_mapped(self._signature)

    @property
    def _wants_checks(self) -> bool:
        """Whether the plan in force must have cells to verify."""
        return self.settings.install_mode == "shadow" and self.settings.verify != "off"

    def require_mapped(self, signature: bytes) -> None:
        """Raise UnmappedMemoryError for weights and buffers that are not in memory: the engine sleeps, or has slept.

        Registered buffers that lost their memory are given up, so that the next refit is cold.
        """
        self._live.require_mapped(signature)
        try:
            require_arenas(self.reader.arenas.all(), self._whose)
        except UnmappedMemoryError:
            self.forget()
            raise

    def drop_streamer(self) -> None:
        """Free what streaming took."""
        streamer, self._streamer = self._streamer, None
        if streamer is not None:
            streamer.close()

    def about_to_overwrite(self, arena: Arena, deadline: Deadline) -> None:
        """Called before an arena is read into; whoever serves it to others must have stopped when this returns."""
        if self.on_overwrite is not None:
            self.on_overwrite(arena, deadline)
        if self.reader.arenas.served is arena:
            self.reader.arenas.served = None

    def set_verify(self, mode: Mode) -> None:
        """Take another mode of verification, from the next refit on; one that is in doubt may still need the plan."""
        self.settings = replace(self.settings, verify=mode)

    def forget(self) -> None:
        """Let go of the plan, and of all that belongs to it."""
        self.planned = None
        self.drop_streamer()
        self.reader.close()
