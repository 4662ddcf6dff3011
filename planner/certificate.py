"""What does a plan prove, and what does it cost? Certificate, economics and assumptions.

The certificate rests on what `plan` has proved by the time it is built: destination views are injective and, after
program order, pairwise disjoint (`writes`); the final pieces of every request tile it, and their layouts, fetches,
staging and serving ranges are what the pieces say (`proof`); every class member equals its template (`classes`).
Together they say that each requested byte is written exactly once. `proof.prove_blocks` looks at every block instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from reshard.planner.classify import Int64
from reshard.planner.shape import MODE_EXACT

if TYPE_CHECKING:
    from reshard.planner.assemble import Segment
    from reshard.planner.plans import Demand, Templates
    from reshard.planner.reads import ReadTable
    from reshard.planner.tables import ShardTable

_SAMPLE = 32


@dataclass(frozen=True, slots=True)
class Assumption:
    """Shards that the plan takes for equal on somebody's word.

    Attributes
    ----------
    kind : {"replica", "claim", "trusted", "alias"}
    key : str
        Replica group number, claim, or "requested name=published name".
    holders : tuple of str
        Who must agree.
    """

    kind: str
    key: str
    holders: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Certificate:
    """Bytes on the destination side, each written exactly once.

    Attributes
    ----------
    requested_bytes : int
        Of all requests as the loader made them, overlaps counted twice.
    written_bytes, filled_bytes : int
        Written from sources, and filled with constants, after program order.
    unwritten_bytes : int
        Of the read table's buffers, in no request.
    buffer_written_bytes, buffer_filled_bytes : int64[B]
        By buffer of `Plan.buffers`.
    """

    requested_bytes: int
    written_bytes: int
    filled_bytes: int
    unwritten_bytes: int
    buffer_written_bytes: Int64
    buffer_filled_bytes: Int64
    _reads: ReadTable = field(repr=False)
    _sources: ShardTable = field(repr=False)
    _used_tensors: Int64 = field(repr=False)

    @cached_property
    def unconsumed(self) -> tuple[str, ...]:
        """Published tensors that no request reads."""
        used = np.zeros(len(self._sources.tensors), np.bool_)
        used[self._used_tensors] = True
        names = self._sources.tensors.names_list
        return tuple(names[i] for i in np.flatnonzero(~used).tolist())

    @cached_property
    def never_written(self) -> tuple[str, ...]:
        """Buffers of which no byte is written or filled."""
        n = len(self._reads.buffers)
        touched = self.buffer_written_bytes[:n] + self.buffer_filled_bytes[:n]
        touched[self._reads.buffer_id[self._reads.kind == 2]] += 1
        names = self._reads.buffers.names_list
        return tuple(names[i] for i in np.flatnonzero(touched == 0).tolist())

    @cached_property
    def unwritten_sample(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Up to 32 (buffer, half-open element range) that the covering ranges of requests leave out."""
        reads = self._reads
        first, last = reads.dst_reach
        alive = np.flatnonzero(reads.volume > 0)
        order = alive[np.lexsort([first[alive], reads.buffer_id[alive]])]
        n_elems = self._reads.buffer_bytes * 8 // np.maximum(reads.buffers.bits, 1)
        cuts = np.searchsorted(reads.buffer_id[order], np.arange(len(n_elems) + 1))
        out: list[tuple[str, tuple[int, int]]] = []
        complete = self.buffer_written_bytes[: len(n_elems)] + self.buffer_filled_bytes[: len(n_elems)]
        for b in np.flatnonzero(complete < reads.buffer_bytes).tolist():
            reach = 0
            for row in order[cuts[b] : cuts[b + 1]].tolist():
                if int(first[row]) > reach:
                    out.append((reads.buffers.name(b), (reach, int(first[row]))))
                reach = max(reach, int(last[row]) + 1)
            if reach < int(n_elems[b]):
                out.append((reads.buffers.name(b), (reach, int(n_elems[b]))))
            if len(out) >= _SAMPLE:
                break
        return tuple(out[:_SAMPLE])


@dataclass(frozen=True, eq=False)
class Economics:
    """What a plan costs.

    Attributes
    ----------
    useful_bytes : int
        Source bytes that requests use.
    wire_bytes : int
        Bytes read, covering spans included.
    n_blocks : int
        (request, shard) blocks.
    n_runs : int
        Contiguous runs of all blocks, as products; never enumerated.
    n_descriptors : int
        Those of exact blocks (runs, or series of runs with `strided_rows`), and one a span.
    descriptor_savings : int
        Runs that spans save.
    full_pull_sources : int
        Spans that are a whole shard although less is needed of it.
    converts : int
        Blocks that are cast on the way.
    holder_bytes : int64[H]
        Wire bytes from each of `Plan.holders`.
    """

    useful_bytes: int
    wire_bytes: int
    n_blocks: int
    n_runs: int
    n_descriptors: int
    descriptor_savings: int
    full_pull_sources: int
    converts: int
    holder_bytes: Int64

    @property
    def amplification(self) -> float:
        """Wire bytes over useful bytes (1.0 where nothing is read)."""
        return self.wire_bytes / self.useful_bytes if self.useful_bytes else 1.0


def _dot(a: Int64, b: Int64) -> int:
    """Sum of products as a Python integer, exact past 2**63."""
    if float(a.max(initial=0)) * float(b.max(initial=0)) * len(a) < 2.0**62:
        return int((a * b).sum())
    return sum(map(mul, a.tolist(), b.tolist()))  # templates, not blocks


def loader_bytes(demand: Demand) -> Int64:
    """int64[B]: bytes of each of the read table's buffers that are left to the engine's own loader."""
    out = np.zeros(len(demand.reads.buffers), np.int64)
    for row in demand.materialised:
        out[row.destination] += row.own_elems * int(demand.reads.buffers.bits[row.destination]) // 8
    return out


def write_certificate(sources: ShardTable, demand: Demand, used_tensors: Int64) -> Certificate:
    """Sum up what is written, by buffer."""
    reads, requests, buffers, fills = demand.reads, demand.requests, demand.buffers, demand.fills
    volume = np.ones(len(requests), np.int64)
    for count in requests.count:
        volume *= count
    n = len(buffers)
    written = np.zeros(n, np.int64)
    np.add.at(written, requests.buffer, volume * buffers.bits[requests.buffer] // 8)
    filled = np.zeros(n, np.int64)
    fill_volume = fills.unit.copy()
    for count in fills.count:
        fill_volume *= count
    np.add.at(filled, fills.buffer, fill_volume)
    own = len(reads.buffers)
    total = int(reads.buffer_bytes.sum())
    # what a loader of its own writes is neither unwritten nor ours
    by_loader = int(loader_bytes(demand).sum())
    written_bytes, filled_bytes = int(written[:own].sum()), int(filled.sum())
    return Certificate(
        reads.requested_bytes,
        int(written.sum()),
        filled_bytes,
        max(0, total - written_bytes - filled_bytes - by_loader),
        written,
        filled,
        reads,
        sources,
        used_tensors,
    )


def item_bytes(templates: Templates) -> Int64:
    """int64[I]: wire bytes of each template item, for one member."""
    t = templates
    exact = t.items.fetch < 0
    useful = t.layout.run * t.layout.n_runs * t.layout.src_unit
    out = np.zeros(len(t.items), np.int64)
    out[exact] = useful[t.items.piece[exact]]
    out[~exact] = t.fetches.n_bytes[t.items.fetch[~exact]]
    return out


def price(templates: Templates, segments: tuple[Segment, ...], strided: bool) -> Economics:
    """Economics as products of templates and member counts; `strided` backends move a series of runs at once."""
    t = templates
    members = np.diff(t.classes.member_start)
    piece_members = members[t.boxes.cls[t.pieces.box]]
    useful = t.layout.run * t.layout.n_runs * t.layout.src_unit
    exact = t.mode == MODE_EXACT
    wire_item = item_bytes(t)
    item_members = members[t.items.cls]
    fetch_members = members[t.boxes.cls[t.fetches.box]]
    n_runs = _dot(t.layout.n_runs, piece_members)
    n_exact = _dot(t.layout.n_descriptors(strided)[exact], piece_members[exact])
    n_fetches = int(fetch_members.sum())
    shard_bytes = np.ones(len(t.fetches), np.int64)
    for a, b in zip(t.boxes.shard_start, t.boxes.shard_stop, strict=True):
        shard_bytes *= b[t.fetches.box] - a[t.fetches.box]
    used = np.zeros(len(t.fetches), np.int64)
    unit = np.zeros(len(t.fetches), np.int64)
    staged = np.flatnonzero(~exact)
    np.add.at(used, t.piece_fetch[staged], useful[staged])
    unit[t.piece_fetch[staged]] = t.layout.src_unit[staged]
    full = (shard_bytes * unit == t.fetches.n_bytes) & (used < t.fetches.n_bytes)
    cast = (t.src_code != t.dst_code)[t.pieces.request]
    sizes = np.array([len(s.item) for s in segments], np.int64)
    per_holder = np.zeros(len(segments), np.int64)
    if len(segments):
        products = np.concatenate([wire_item[s.item] for s in segments]) * np.concatenate(
            [s.n_members for s in segments]
        )
        per_holder = np.add.reduceat(products, np.cumsum(sizes) - sizes)
    return Economics(
        _dot(useful, piece_members),
        _dot(wire_item, item_members),
        int(piece_members.sum()),
        n_runs,
        n_exact + n_fetches,
        n_runs - n_exact - n_fetches,
        int(fetch_members[full].sum()),
        int(piece_members[cast].sum()),
        per_holder,
    )


def list_assumptions(sources: ShardTable, templates: Templates, aliases: dict[str, str]) -> tuple[Assumption, ...]:
    """The equalities used, one for each (kind, key, set of holders)."""
    boxes = templates.boxes
    read = np.zeros(len(boxes), np.bool_)
    read[templates.pieces.box] = True
    found: set[tuple[str, str, tuple[int, ...]]] = set()
    for box in np.flatnonzero(read & (boxes.n_candidates > 1)).tolist():
        first, n = int(boxes.candidate_first[box]), int(boxes.n_candidates[box])
        parts = boxes.candidate_part[first : first + n]
        group = int(boxes.candidate_group[first])
        layouts = {sources.parts[p].layout for p in parts.tolist()}
        claim = sources.parts[int(parts[0])].claim
        if len(layouts) > 1 and claim:
            kind, key = "claim", claim
        elif group >= 0:
            kind, key = "replica", str(group)
        else:
            kind, key = "trusted", ""
        found.add((kind, key, tuple(np.unique(parts).tolist())))
    for pair in boxes.claimed:
        found.add(("claim", sources.parts[pair[0]].claim, tuple(sorted(pair))))
    out = [
        Assumption(kind, key, tuple(sources.parts[p].holder.name for p in parts)) for kind, key, parts in sorted(found)
    ]
    out += [Assumption("alias", f"{a}={b}", ()) for a, b in sorted(aliases.items())]
    return tuple(out)
