"""Refit in place, section by section, for ranks without room for a second copy of their weights.

1. The plan's destination buffers are packed, in order, into sections of at most the budget; parameters that the loader
   computes, with the sources it needs, are one section at the end.
2. Each section is a plan of its own over the same sources, read into one small arena, verified there, and only then
   written into the live weights.
3. All sections share one arena and one staging, allocated once: what streaming takes beyond the engine is these two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from reshard.planner import plan
from reshard.refit.arena import Arena, aligned, extent_bytes
from reshard.refit.checks import Checks, build_checks
from reshard.refit.errors import StagingBudgetError
from reshard.refit.planning import MATERIALISED, Planned, with_buffers
from reshard.refit.reader import Reader
from reshard.refit.verify import Mode

if TYPE_CHECKING:
    from reshard.planner import Plan
    from reshard.refit.devices import Memory
    from reshard.refit.engine import StreamEngine
    from reshard.refit.links import Links
    from reshard.transports import Transport

__all__ = ["StreamSection", "Streamer", "arena_bytes", "pack_sections"]


def pack_sections(planned: Planned, budget_bytes: int) -> list[list[str]]:
    """Buffers of each section, in order.

    Raises
    ------
    StagingBudgetError
        A parameter, or the group that the loader computes, that is larger than the budget.
    """
    sizes = dict(zip(planned.plan.buffers.names_list, planned.plan.buffer_bytes.tolist(), strict=True))
    computed = {*planned.captured.loader_buffers, *planned.materialised_buffers}
    sections: list[list[str]] = []
    used = budget_bytes + 1
    for name, size in sizes.items():
        if name in computed:
            continue
        room = aligned(size)
        if room > budget_bytes:
            raise StagingBudgetError(
                f"parameter {name!r} takes {size} bytes, the stream budget is {budget_bytes} bytes (stream_bytes)"
            )
        if used + room > budget_bytes:
            sections.append([])
            used = 0
        sections[-1].append(name)
        used += room
    last = [name for name in sizes if name in computed]
    if last:
        room = extent_bytes(sizes[name] for name in last)
        if room > budget_bytes:
            raise StagingBudgetError(
                f"the loader computes {planned.captured.loader_buffers[0]!r} and others from {room} bytes at once, the "
                f"stream budget is {budget_bytes} bytes (stream_bytes)"
            )
        sections.append(last)
    return sections


def arena_bytes(planned: Planned, budget_bytes: int) -> int:
    """Bytes of the arena that streaming would take; over the budget where one parameter is."""
    sizes = dict(zip(planned.plan.buffers.names_list, planned.plan.buffer_bytes.tolist(), strict=True))
    computed = {*planned.captured.loader_buffers, *planned.materialised_buffers}
    least = max((aligned(n) for name, n in sizes.items() if name not in computed), default=0)
    least = max(least, extent_bytes(n for name, n in sizes.items() if name in computed))
    sections = pack_sections(planned, max(budget_bytes, least))
    return max((extent_bytes(sizes[n] for n in section) for section in sections), default=0)


@dataclass(slots=True, eq=False)
class StreamSection:
    """One section: its plan, its reader, and what it writes."""

    plan: Plan
    checks: Checks | None
    reader: Reader
    buffers: Mapping[str, Memory]
    planned: Planned

    def seed(self, engine: StreamEngine) -> None:
        """Fill what the plan writes only in part with the live bytes."""
        for name in self.planned.seeded:
            if name in self.buffers:
                engine.read_live(name, self.buffers[name])

    def write(self, engine: StreamEngine) -> None:
        """Write the section into the engine's live weights, running the loader first where it computes them."""
        loaded = [n for n in self.planned.captured.loader_buffers if n in self.buffers]
        if loaded:
            sources = {n.removeprefix(MATERIALISED): b for n, b in self.buffers.items() if n.startswith(MATERIALISED)}
            engine.load_materialised(sources, {n: self.buffers[n] for n in loaded})
        engine.write_live({n: b for n, b in self.buffers.items() if not n.startswith(MATERIALISED)})


class Streamer:
    """The sections of one plan, with one arena for all of them.

    Parameters
    ----------
    budget_bytes
        Most bytes of the arena.

    Attributes
    ----------
    arena_bytes, staging_bytes
        What is allocated for all sections together, holders' headers and digests apart.
    """

    def __init__(
        self, transport: Transport, links: Links, planned: Planned, *, budget_bytes: int, verify: Mode, reader: Reader
    ) -> None:
        self._planned, self._transport, self._links, self._verify, self._reader = (
            planned,
            transport,
            links,
            verify,
            reader,
        )
        made = planned.plan
        sizes = dict(zip(made.buffers.names_list, made.buffer_bytes.tolist(), strict=True))
        names = pack_sections(planned, budget_bytes)
        self.arena_bytes = max((extent_bytes(sizes[n] for n in section) for section in names), default=0)
        self._sections: list[StreamSection] = []
        index = {name: i for i, name in enumerate(made.buffers.names_list)}
        plans: list[Plan] = []
        for section in names:
            wanted = np.isin(made.reads.buffer_id, [index[n] for n in section])
            reads = with_buffers(made.reads.take(np.flatnonzero(wanted)), [index[n] for n in section])
            plans.append(plan(made.sources, reads, made.options))
        self.staging_bytes = max((p.staging_bytes for p in plans), default=0)
        self._staging: Arena | None = None
        self._arena = self._make("stream", self.arena_bytes)
        try:
            if self.staging_bytes:
                self._staging = self._make("staging", self.staging_bytes)
            for section, one in zip(names, plans, strict=True):
                at = 0
                views: dict[str, Memory] = {}
                for name in section:
                    views[name] = self._arena.memory[at : at + sizes[name]]
                    at += aligned(sizes[name])
                self._sections.append(self._section(one, views))
        except BaseException:
            self.close()
            raise

    def _make(self, what: str, nbytes: int) -> Arena:
        hook = self._reader.on_allocate
        made = Arena(
            self._transport,
            {what: nbytes},
            device=self._reader.device,
            on_allocate=(lambda n: hook(what, n)) if hook is not None else None,
        )
        self._reader.arenas.new_registrations += 1
        return made

    def _section(self, made: Plan, views: Mapping[str, Memory]) -> StreamSection:
        """A section that reads ``made`` into its share of the arena."""
        checks = build_checks(made) if self._verify != "off" else None
        own = Reader(
            self._transport,
            swaps=False,
            on_allocate=self._reader.on_allocate,
            links=self._links,
            device=self._reader.device,
        )
        own.batch_bytes = self._reader.batch_bytes
        own.adopt(made, checks.n_cells if checks is not None else {}, borrowed=views, staging=self._staging)
        try:
            own.arenas.allocate()
        except BaseException:
            own.release()
            raise
        self._reader.arenas.new_registrations += own.arenas.new_registrations
        return StreamSection(made, checks, own, views, self._planned)

    def replace(self, section: StreamSection, lost: frozenset[str]) -> StreamSection:
        """Plan a section anew without ``lost`` holders; it takes the other one's place, and its memory.

        Raises
        ------
        CoverageError
            What no other holder has; the section stays as it was.
        """
        sources = section.plan.sources
        left = sources.replace(removed=[name for name in sorted(lost) if name in sources.by_name])
        made = self._section(plan(left, section.plan.reads, section.plan.options), section.buffers)
        section.reader.release()
        self._sections[self._sections.index(section)] = made
        return made

    def sections(self) -> Sequence[StreamSection]:
        """All sections, in order."""
        return tuple(self._sections)

    def close(self) -> None:
        """Free lists and memory."""
        for section in self._sections:
            section.reader.release()
        self._sections = []
        for arena in (self._arena, self._staging):
            if arena is not None:
                arena.close()
