"""From a manifest and an engine to a plan that may be executed: capture, plan, certify, and state the coverage.

1. Merge the slots' parts into one shard table; the capture sees its tensors.
2. Plan the captured requests (or those of ``only=``).
3. Coverage in bytes of the engine, from the certificate: what is written, filled, part written and never written.
   The record is emitted before an incomplete plan is refused.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from reshard.planner import Buffer, ReadRequest, ReadTable, ShardTable, plan
from reshard.planner.dtypes import dtype as parse_dtype
from reshard.planner.errors import CoverageError
from reshard.refit import settings
from reshard.refit.engine import Captured, EngineParameter
from reshard.refit.errors import IncompleteRefit, StagingBudgetError
from reshard.refit.records import CoverageRecord, emit
from reshard.refit.tensors import SourceTensor

if TYPE_CHECKING:
    from reshard.planner import Plan, PlanOptions, ShardPart
    from reshard.rendezvous.types import Manifest

MATERIALISED = "materialised:"
"""Prefix of the names of buffers that stage a source for the loader."""

__all__ = ["MATERIALISED", "Gate", "Planned", "manifest_of", "plan_refit", "topology_digest", "with_buffers"]

_SAMPLE = 10
_SAMPLE_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class Gate:
    """The coverage gate; None reads the environment at call time."""

    required: bool | None = None
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan in force, and what it was made from.

    Attributes
    ----------
    consumed
        Published names that this member accounts for in its vote: those its requests take, and those that ``only=``
        leaves out.
    seeded
        Buffers that must first be filled with the live bytes, since the plan writes them in part.
    """

    plan: Plan
    captured: Captured
    sources: ShardTable
    coverage: CoverageRecord
    consumed: tuple[str, ...]
    seeded: tuple[str, ...]
    materialised_buffers: tuple[str, ...]
    topology: bytes

    @property
    def materialised_bytes(self) -> int:
        """Bytes of the sources staged whole for the loader."""
        sizes = dict(zip(self.plan.buffers.names_list, self.plan.buffer_bytes.tolist(), strict=True))
        return sum(sizes[n] for n in self.materialised_buffers)


def topology_digest(
    manifest: Manifest, only: Sequence[str], options: PlanOptions, without: frozenset[str] = frozenset()
) -> bytes:
    """What a plan depends on besides the engine, as 32 bytes: tables of all slots, selection, options, lost holders."""
    hasher = hashlib.sha256()
    for record in sorted(manifest.slots, key=lambda r: r.slot):
        hasher.update(repr((record.slot, record.host, record.memory, record.device, record.empty)).encode())
        hasher.update(record.table_digest)
    hasher.update(repr((sorted(only), sorted(without), options)).encode())
    return hasher.digest()


def manifest_of(sources: ShardTable, aliases: Mapping[str, str] | None = None) -> list[SourceTensor]:
    """The published tensors, as a capture sees them; an alias of one is shown too, unless it is published itself."""
    table = sources.tensors
    shown = [
        SourceTensor(name, table.dtype_label(i), table.shape_of(i), table.axes.get(i))
        for i, name in enumerate(table.names_list)
    ]
    by_name = {source.name: source for source in shown}
    for alias, name in sorted((aliases or {}).items()):
        if alias not in by_name and name in by_name:
            shown.append(replace(by_name[name], name=alias))
    return shown


def plan_refit(
    captured: Captured,
    sources: ShardTable,
    parameters: Sequence[EngineParameter],
    options: PlanOptions,
    *,
    only: Sequence[str] = (),
    gate: Gate,
    rank: int,
    topology: bytes,
) -> Planned:
    """Plan, certify and gate.

    Raises
    ------
    CoverageError, OverlapError, ConflictError, PlanError
        What the planner refuses; a record with ``fallback`` set is emitted for a coverage error.
    IncompleteRefit
        If the gate is on and the coverage is under its floor.
    """
    staged = [n for n in captured.materialised if not only or any(fnmatchcase(n, p) for p in only)]
    reads = captured.reads
    if only:
        chosen = reads.only(list(only))
        computed = np.isin(reads.buffers.names_list, captured.loader_buffers) & bool(staged)
        used = np.flatnonzero(np.isin(np.arange(len(reads.buffers)), chosen.buffer_id) | computed)
        reads = with_buffers(chosen, used.tolist())
    if staged:
        reads = ReadTable.concat([reads, _staged_reads(staged, sources, options)])
    try:
        made = plan(sources, reads, options)
    except CoverageError:
        emit(_refused_record(captured, parameters, rank), logging.WARNING)
        raise
    record, seeded = _coverage(made, captured, parameters, rank, partial=bool(only))
    complete = record.params_never_written == 0 and record.params_part_written == 0 and record.unsupported == 0
    emit(record, logging.INFO if complete else logging.WARNING)
    _check_gate(record, gate)
    names = sources.tensors.names_list
    left_out = [n for n in names if only and not any(fnmatchcase(n, p) for p in only)]
    published = set(names)
    taken = {n if n in published else options.aliases.get(n, n) for n in captured.consumed}
    consumed = tuple(sorted({*taken, *left_out}))
    return Planned(made, captured, sources, record, consumed, seeded, tuple(MATERIALISED + n for n in staged), topology)


def _staged_reads(names: Sequence[str], sources: ShardTable, options: PlanOptions) -> ReadTable:
    """Requests that stage whole sources for the loader, each in a buffer of its own.

    Raises
    ------
    StagingBudgetError
        A source that is larger than the staging budget.
    """
    buffers: list[Buffer] = []
    requests: list[ReadRequest] = []
    for name in names:
        i = sources.tensors.index(name)
        shape, label = sources.tensors.shape_of(i), sources.tensors.dtype_label(i)
        nbytes = parse_dtype(label).nbytes(math.prod(shape))
        if nbytes > options.staging_bytes:
            raise StagingBudgetError(
                f"tensor {name!r}: the loader computes with its values, so its {nbytes} bytes must be staged; the "
                "budget is "
                f"{options.staging_bytes} bytes (PlanOptions.staging_bytes)"
            )
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        zeros, ones = (0,) * len(shape), (1,) * len(shape)
        requests.append(ReadRequest(name, shape, label, zeros, ones, shape, len(buffers), 0, strides))
        buffers.append(Buffer(MATERIALISED + name, shape, label))
    return ReadTable.build(buffers, requests)


def _coverage(
    made: Plan, captured: Captured, parameters: Sequence[EngineParameter], rank: int, *, partial: bool
) -> tuple[CoverageRecord, tuple[str, ...]]:
    certificate, economics = made.certificate, made.economics
    names = made.buffers.names_list
    written: dict[str, int] = dict(zip(names, certificate.buffer_written_bytes.tolist(), strict=True))
    filled: dict[str, int] = dict(zip(names, certificate.buffer_filled_bytes.tolist(), strict=True))
    by_loader: dict[str, int] = {}
    if not partial:
        by_loader.update(zip(captured.loader_buffers, captured.loader_bytes, strict=True))
    never: list[str] = []
    part: list[str] = []
    dest_bytes = filled_bytes = 0
    for p in parameters:
        wrote: int = by_loader[p.name] if p.name in by_loader else written.get(p.name, 0)
        fill: int = filled.get(p.name, 0)
        got = wrote + fill
        dest_bytes += wrote
        filled_bytes += fill
        if got == 0 and p.nbytes:
            never.append(p.name)
        elif got < p.nbytes:
            part.append(p.name)
    engine_bytes = sum(p.nbytes for p in parameters)
    record = CoverageRecord(
        rank=rank,
        params_installed=len(parameters) - len(never),
        engine_params=len(parameters),
        dest_bytes=dest_bytes,
        filled_bytes=filled_bytes,
        engine_bytes=engine_bytes,
        coverage_pct=round(100.0 * (dest_bytes + filled_bytes) / engine_bytes, 4) if engine_bytes else 0.0,
        params_never_written=len(never),
        params_never_written_sample=tuple(sorted(never)[:_SAMPLE]),
        params_part_written=len(part),
        params_part_written_sample=tuple(sorted(part)[:_SAMPLE]),
        copies_captured=captured.n_copies,
        unsupported=len(captured.unsupported),
        unsupported_sample=_unsupported_sample(captured),
        unsupported_causes=_unsupported_causes(captured),
        planned_wire_bytes=economics.wire_bytes,
        extra_wire_bytes=economics.wire_bytes - economics.useful_bytes,
        descriptors=economics.n_descriptors,
        descriptor_savings=economics.descriptor_savings,
        full_pull_sources=economics.full_pull_sources,
        unbounded_sources=sum(name.startswith(MATERIALISED) for name in names),
        converts=economics.converts,
        fallback="",
    )
    sizes = dict(zip(names, made.buffer_bytes.tolist(), strict=True))
    loaded = set(captured.loader_buffers)
    staged = [n.startswith(MATERIALISED) for n in names]
    seeded = [
        n for n, s in zip(names, staged, strict=True) if not s and (n in loaded or written[n] + filled[n] < sizes[n])
    ]
    return record, tuple(seeded)


def _refused_record(captured: Captured, parameters: Sequence[EngineParameter], rank: int) -> CoverageRecord:
    """The record of a plan that was refused for a gap: nothing is installed."""
    names = sorted(p.name for p in parameters)
    return CoverageRecord(
        rank=rank,
        params_installed=0,
        engine_params=len(names),
        dest_bytes=0,
        filled_bytes=0,
        engine_bytes=sum(p.nbytes for p in parameters),
        coverage_pct=0.0,
        params_never_written=len(names),
        params_never_written_sample=tuple(names[:_SAMPLE]),
        params_part_written=0,
        params_part_written_sample=(),
        copies_captured=captured.n_copies,
        unsupported=len(captured.unsupported),
        unsupported_sample=_unsupported_sample(captured),
        unsupported_causes=_unsupported_causes(captured),
        planned_wire_bytes=0,
        extra_wire_bytes=0,
        descriptors=0,
        descriptor_savings=0,
        full_pull_sources=0,
        unbounded_sources=len(captured.materialised),
        converts=0,
        fallback="refused",
    )


def _unsupported_sample(captured: Captured) -> tuple[str, ...]:
    return tuple(f"{u.source}: {u.cause}"[:_SAMPLE_CHARACTERS] for u in captured.unsupported[:_SAMPLE])


def _unsupported_causes(captured: Captured) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(u.cause for u in captured.unsupported).most_common())


def _check_gate(record: CoverageRecord, gate: Gate) -> None:
    if not settings.require_full_coverage(gate.required):
        return
    floor = settings.coverage_floor(gate.floor)
    if record.coverage_pct >= floor * 100:
        return
    sample = ", ".join(record.params_never_written_sample or record.params_part_written_sample)
    raise IncompleteRefit(
        f"coverage {record.coverage_pct:.4f} % of bytes is under the floor of {floor * 100:g} %: "
        f"{record.params_never_written} of "
        f"{record.engine_params} parameters are never written and {record.params_part_written} in part "
        f"({sample}). No digest sees this: "
        "bytes that are never requested are never checked",
        coverage_pct=record.coverage_pct,
        never_written=record.params_never_written_sample,
    )


def with_holders(manifest: Manifest, parts: dict[bytes, ShardPart]) -> ShardTable:
    """The slots' parts as one table, each under its slot's name."""
    from reshard.planner import Holder

    return ShardTable(
        parts[r.table_digest].with_holder(Holder(r.slot, r.host, r.memory, r.device)) for r in manifest.slots
    )


def with_buffers(reads: ReadTable, buffers: Sequence[int]) -> ReadTable:
    """The same requests, over some of the buffers alone (all that they use must be among them)."""
    ids = np.array(buffers, np.int64)
    place = np.full(len(reads.buffers), -1, np.int64)
    place[ids] = np.arange(len(ids))
    return ReadTable(
        reads.tensors,
        reads.buffers.take(ids),
        reads.tensor_id,
        reads.start,
        reads.step,
        reads.count,
        place[reads.buffer_id],
        reads.dst_offset,
        reads.dst_stride,
        reads.order,
        reads.kind,
        reads.values,
    )
