"""What is a plan? Templates, segments and waves, and the columns that follow from them when somebody asks.

A plan is relative to regions: `bind` makes it absolute for one set of base addresses. Nothing is expanded
that was not asked for: `rows(wave)`, `copies(wave)` and `blocks` are made from templates when they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from reshard.planner.assemble import Items, Segment, assemble
from reshard.planner.blocks import Blocks
from reshard.planner.certificate import Assumption, Certificate, Economics, list_assumptions
from reshard.planner.classes import Classes
from reshard.planner.classify import Int64, UInt64, ragged_arange
from reshard.planner.dictionaries import TensorDict
from reshard.planner.join import Pieces, TemplateRequests
from reshard.planner.options import PlanOptions
from reshard.planner.reads import ReadTable
from reshard.planner.replicas import Serves
from reshard.planner.requests import Materialised, Requests
from reshard.planner.rows import (
    Fills,
    HolderRows,
    LocalCopies,
    RowMaker,
    StagedCopies,
    WireRows,
    copy_columns,
    join_rows,
)
from reshard.planner.shape import Fetches, Layout
from reshard.planner.shards import Holder
from reshard.planner.sources import SourceBoxes
from reshard.planner.tables import ShardTable
from reshard.planner.waves import Waves

if TYPE_CHECKING:
    from reshard.planner.bind import BoundPlan


@dataclass(frozen=True, eq=False)
class Templates:
    """The problem solved once for each class: see the modules that make them.

    Attributes
    ----------
    classes, requests, boxes, pieces, layout, mode, fetches, piece_fetch, items
        Made by `classes`, `join`, `sources`, `join`, `shape` (four) and `assemble`.
    src_code, dst_code : int64[Q]
        Dtype codes of each template request on each side.
    """

    classes: Classes
    requests: TemplateRequests
    boxes: SourceBoxes
    pieces: Pieces
    layout: Layout
    mode: Int64
    fetches: Fetches
    piece_fetch: Int64
    items: Items
    src_code: Int64
    dst_code: Int64


@dataclass(frozen=True, eq=False)
class Demand:
    """What is asked, independent of who holds it: everything of a plan that no change of holders touches.

    Attributes
    ----------
    reads : ReadTable
    options : PlanOptions
    buffers : TensorDict
        The read table's buffers, then the planner's own for materialised requests.
    requests : Requests
        After program order, by tensor.
    fills : Fills
        Constants to write.
    materialised : tuple of Materialised
        Boxes for the engine's own loader.
    aliases : dict of str to str
        Aliases that were used.
    """

    reads: ReadTable
    options: PlanOptions
    buffers: TensorDict
    requests: Requests
    fills: Fills
    materialised: tuple[Materialised, ...]
    aliases: dict[str, str]


@dataclass(frozen=True, eq=False)
class Plan:
    """What one receiver reads, from where to where, with the proof that it is all that was asked for.

    Attributes
    ----------
    sources : ShardTable
    demand : Demand
        Requests, options, buffers, fills.
    templates : Templates
    serves : Serves
        Replica choices.
    segments : tuple of Segment
        What is read, one a holder.
    waves : Waves
    certificate : Certificate
    economics : Economics
    """

    sources: ShardTable
    demand: Demand
    templates: Templates
    serves: Serves
    segments: tuple[Segment, ...]
    waves: Waves
    certificate: Certificate
    economics: Economics

    @property
    def reads(self) -> ReadTable:
        """The read table."""
        return self.demand.reads

    @property
    def options(self) -> PlanOptions:
        """The options."""
        return self.demand.options

    @property
    def buffers(self) -> TensorDict:
        """The read table's buffers, then the planner's own for materialised requests."""
        return self.demand.buffers

    @property
    def requests(self) -> Requests:
        """Requests after program order, by tensor."""
        return self.demand.requests

    @property
    def fills(self) -> Fills:
        """Constants to write."""
        return self.demand.fills

    @property
    def materialised(self) -> tuple[Materialised, ...]:
        """Boxes for the engine's own loader."""
        return self.demand.materialised

    @cached_property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Equalities that the plan rests on, to be checked for each version."""
        return list_assumptions(self.sources, self.templates, self.demand.aliases)

    @cached_property
    def holders(self) -> tuple[Holder, ...]:
        """Only those that are read from, in order of name."""
        return tuple(self.sources.parts[s.part].holder for s in self.segments)

    @cached_property
    def region_bytes(self) -> tuple[Int64, ...]:
        """Region sizes of each of `holders`."""
        return tuple(self.sources.parts[s.part].region_bytes for s in self.segments)

    @cached_property
    def buffer_bytes(self) -> Int64:
        """int64[B]: bytes of each of `buffers`."""
        out = np.ones(len(self.buffers), np.int64)
        for dim in self.buffers.shape:
            out *= dim
        return out * self.buffers.bits // 8

    @property
    def n_waves(self) -> int:
        """Reads happen in this many waves, 1 or more."""
        return self.waves.n_waves

    @property
    def staging_bytes(self) -> int:
        """Size of the one staging arena that the receiver must allocate (0: none)."""
        return self.waves.staging_bytes

    def rows(self, wave: int) -> WireRows:
        """Relative wire rows of one wave, grouped by holder, runs that continue each other merged."""
        wave = self._wave(wave)
        made = [rows for rows in self.wire() if rows.wave_start[wave] < rows.wave_start[wave + 1]]
        return join_rows([rows.wave(wave) for rows in made])

    def copies(self, wave: int) -> LocalCopies:
        """Local copies out of staging that follow the reads of one wave."""
        wave = self._wave(wave)
        start = self._staged.wave_start
        return self._staged.copies.take(slice(int(start[wave]), int(start[wave + 1])))

    @cached_property
    def _staged(self) -> StagedCopies:
        return copy_columns(self)

    def wire(self) -> Iterable[HolderRows]:
        """Relative wire rows of all waves, holder by holder in order of `holders`.

        They are kept where there are several waves (each is asked for on its own), and made anew otherwise.
        """
        if self.n_waves > 1:
            return self._wire
        maker = RowMaker(self)
        return (maker.holder_rows(i) for i in range(len(self.segments)))

    @cached_property
    def _wire(self) -> list[HolderRows]:
        maker = RowMaker(self)
        return [maker.holder_rows(i) for i in range(len(self.segments))]

    @cached_property
    def blocks(self) -> Blocks:
        """Every (request, shard) block."""
        t = self.templates
        if not len(t.fetches):
            return Blocks(self, self.segments, t.items.piece)
        order = np.argsort(t.pieces.box, kind="stable")
        box = t.pieces.box[order]
        none = np.full(len(order), -1, np.int64)
        items = Items(t.boxes.cls[box], box, t.layout.src_offset[order], order, none)
        return Blocks(self, assemble(t.classes, t.boxes, items, self.serves), order)

    def _wave(self, wave: int) -> int:
        if not 0 <= wave < self.n_waves:
            raise IndexError(f"wave {wave}; expected 0 to {self.n_waves - 1}")
        return wave

    @cached_property
    def digest(self) -> bytes:
        """32 bytes over all that determines the plan: tables, requests and options.

        Planning is a pure function of them. Region bases, versions and contents are not part of it.
        """
        hasher = hashlib.sha256(b"reshard.Plan.1\0")
        for part in self.sources.parts:
            h = part.holder
            hasher.update(repr((h.name, h.host, h.memory, h.device)).encode())
            hasher.update(part.digest)
        hasher.update(self.reads.digest)
        o = self.options
        settings = (
            o.instance,
            o.instances,
            o.member,
            o.members,
            o.policy,
            o.receiver_host,
            o.max_runs_per_block,
            o.staging_bytes,
            o.cost,
            o.strided_rows,
            o.trust_equal_boxes,
            sorted(o.allow_casts),
            sorted(o.aliases.items()),
            sorted((name, scale.scale, scale.block) for name, scale in o.block_scales.items()),
            *(["round spans"] if o.round_spans else []),
        )
        hasher.update(repr(settings).encode())
        return hasher.digest()

    def bind(
        self,
        source_bases: Mapping[str, UInt64],
        destination_bases: UInt64,
        staging_base: int = 0,
        *,
        strided: bool = False,
        local_device: int = 0,
        local_memory: str = "dram",
        into: BoundPlan | None = None,
    ) -> BoundPlan:
        """Absolute descriptor rows for one set of base addresses.

        Parameters
        ----------
        source_bases : mapping of holder name to uint64[R]
            Address of each region of each of `holders`.
        destination_bases : uint64[B]
            Address of each of `buffers`.
        staging_base : int
            Address of the staging arena.
        strided : bool
            Rows of five columns (address, bytes, device, stride, count) instead of three (address, bytes,
            device).
        local_device, local_memory
            Where buffers and staging are.
        into : BoundPlan, optional
            An earlier binding that nobody uses any more: its tables of three columns are written over, which spares
            the pages of new ones.

        Raises
        ------
        PlanError
            Bases missing, or a range that passes 2**64.
        """
        from reshard.planner.bind import bind_plan

        return bind_plan(
            self,
            source_bases,
            destination_bases,
            staging_base,
            strided=strided,
            local_device=local_device,
            local_memory=local_memory,
            into=into,
        )


def member_ranges(classes: Classes, cls: Int64) -> tuple[Int64, Int64]:
    """Instances of template rows with these classes: the row of each, and its needed-tensor number."""
    size = np.diff(classes.member_start)[cls]
    row = np.repeat(np.arange(len(cls)), size)
    return row, classes.members[np.repeat(classes.member_start[cls], size) + ragged_arange(size)]
