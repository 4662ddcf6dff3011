"""`plan(sources, reads, options)`: shard tables and a read table in, certified plan out.

1. Resolve names; settle program order and prove that destinations are written once (`requests`, `writes`).
2. Group tensors into classes; keep only requested shards (`classes`).
3. On templates: deduplicate and cut source boxes, join, prove coverage, shape the wire (`sources`, `join`,
   `shape`).
4. Choose replicas, broadcast to members, place staging in waves (`replicas`, `assemble`, `waves`).
5. Certificate and economics (`certificate`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reshard.planner.assemble import Segment, assemble, list_items
from reshard.planner.certificate import Certificate, price, write_certificate
from reshard.planner.classes import Classes, build_classes
from reshard.planner.classify import Int64, classify
from reshard.planner.convert import can_cast
from reshard.planner.dictionaries import TensorDict
from reshard.planner.dtypes import BY_CODE, MAX_CODE, dtype_of_code
from reshard.planner.errors import DTypeError
from reshard.planner.join import check_coverage, join, template_requests
from reshard.planner.options import PlanOptions
from reshard.planner.plans import Demand, Plan, Templates
from reshard.planner.proof import prove_serving, prove_staging, prove_templates
from reshard.planner.reads import KIND_CONSTANT, ReadTable
from reshard.planner.replicas import choose_replicas
from reshard.planner.requests import Materialised, Requests, order_requests, resolve_tensors, stage_materialised
from reshard.planner.rows import Fills
from reshard.planner.scales import check_block_scales
from reshard.planner.shape import (
    ALIGN,
    MODE_EXACT,
    choose_modes,
    lay_out,
    plan_fetches,
    split_to_limit,
    split_to_runs,
)
from reshard.planner.shards import ShardPart
from reshard.planner.sources import SourceBoxes, source_boxes
from reshard.planner.tables import ShardTable
from reshard.planner.waves import plan_waves
from reshard.planner.writes import Writes, settle_writes

_UNIT = np.zeros(MAX_CODE + 1, np.int64)
_PACK = np.ones(MAX_CODE + 1, np.int64)
for _code, _dtype in BY_CODE.items():
    _UNIT[_code], _PACK[_code] = _dtype.unit_bytes, _dtype.pack


def plan(sources: ShardTable, reads: ReadTable, options: PlanOptions | None = None) -> Plan:
    """Plan the reads of one receiver.

    Pure and deterministic: the same tables give the same plan, whatever the order of the parts.

    Parameters
    ----------
    sources : ShardTable
    reads : ReadTable
    options : PlanOptions, optional

    Returns
    -------
    Plan
        With its certificate.

    Raises
    ------
    PlanError
        A requested tensor that nobody publishes; writes that program order cannot settle; a materialised box
        over the budget.
    TableError, ConflictError
        Shapes that disagree; equal boxes without a claim.
    CoverageError
        Part of a request has no source.
    OverlapError
        Shards, or unordered writes, that overlap.
    DTypeError
        A refused cast, a cut inside a byte, or a cut off a grid of block scales.

    Examples
    --------
    >>> from reshard.planner import Buffer, Holder, ReadRequest, ReadTable, Shard, ShardPart, ShardTable, plan
    >>> halves = [
    ...     ShardPart.from_shards(Holder(f"rank{i}"), [Shard("w", "float32", (4, 2), (2 * i, 0), (2 * i + 2, 2))], [16])
    ...     for i in range(2)
    ... ]
    >>> view = ReadRequest("w", (4, 2), "float32", (0, 1), (1, 1), (4, 1), 0, 0, (1, 0))
    >>> made = plan(ShardTable(halves), ReadTable.build([Buffer("column", (4,), "float32")], [view]))
    >>> made.certificate.written_bytes, made.economics.n_blocks, [h.name for h in made.holders]
    (16, 2, ['rank0', 'rank1'])
    """
    options = PlanOptions() if options is None else options
    if options.block_scales:
        check_block_scales(sources, reads, options.block_scales)
    union_id, aliases = resolve_tensors(sources, reads, options.aliases)
    writes = settle_writes(reads)
    buffers, materialised = stage_materialised(sources, reads, union_id, options.staging_bytes, writes.outlived)
    n_dims = template_dims(sources, reads)
    requests = _copies(sources, reads, writes, union_id, buffers, materialised, n_dims)
    fills = _fills(reads, writes, n_dims)
    classes = build_classes(sources, requests, n_dims)
    demand = Demand(reads, options, buffers, requests, fills, tuple(materialised), aliases)
    return assemble_plan(sources, demand, classes)


def assemble_plan(
    sources: ShardTable,
    demand: Demand,
    classes: Classes,
    known: Mapping[int, tuple[ShardPart, Segment]] | None = None,
    certificate: Certificate | None = None,
) -> Plan:
    """Steps 3 to 5, from classes on; `replan` enters here with the segments, and the totals, that it knows."""
    options, buffers, requests = demand.options, demand.buffers, demand.requests
    templates = solve_templates(sources, requests, buffers, classes, options)
    box_bytes = np.zeros(len(templates.boxes), np.int64)
    useful = templates.layout.run * templates.layout.n_runs * templates.layout.src_unit
    exact = templates.mode == MODE_EXACT
    np.add.at(box_bytes, templates.pieces.box[exact], useful[exact])
    np.add.at(box_bytes, templates.fetches.box, templates.fetches.n_bytes)
    serves = choose_replicas(sources, requests, classes, templates.boxes, box_bytes, options)
    segments = tuple(assemble(classes, templates.boxes, templates.items, serves, known))
    waves = plan_waves(classes, requests, templates.fetches, staging_limit(options))
    prove_templates(templates)
    prove_serving(templates, segments)
    prove_staging(templates, waves, staging_limit(options))
    if certificate is None:
        certificate = write_certificate(sources, demand, classes.tensor)
    return Plan(
        sources,
        demand,
        templates,
        serves,
        segments,
        waves,
        certificate,
        price(templates, segments, options.strided_rows),
    )


def staging_limit(options: PlanOptions) -> int:
    """Bytes that one wave may stage: half the budget, aligned."""
    return options.staging_bytes // 2 // ALIGN * ALIGN


def template_dims(sources: ShardTable, reads: ReadTable) -> int:
    """Dim columns that templates need, at least 1."""
    dims = [reads.n_dims, sources.tensors.n_dims, 1]
    dims += [part.geometries.n_dims for part in sources.parts]
    return max(dims)


def _copies(
    sources: ShardTable,
    reads: ReadTable,
    writes: Writes,
    union_id: Int64,
    buffers: TensorDict,
    materialised: list[Materialised],
    n_dims: int,
) -> Requests:
    keep = np.arange(len(writes.origin))
    if bool((reads.kind == KIND_CONSTANT).any()):
        keep = np.flatnonzero(reads.kind[writes.origin] != KIND_CONSTANT)
    origin, offset, target = writes.origin[keep], writes.dst_offset[keep], reads.buffer_id[writes.origin[keep]]
    start, step, count, stride = (
        [c[keep] for c in dims] for dims in (writes.start, writes.step, writes.count, writes.dst_stride)
    )
    for box in materialised:
        here = np.flatnonzero(origin == box.request)
        target[here], offset[here] = box.buffer, 0
        running = 1
        for d in reversed(range(reads.n_dims)):
            stride[d][here] = running
            running *= int(reads.count[d][box.request])
    tensor = union_id[reads.tensor_id[origin]] if len(union_id) else origin
    requests = order_requests(buffers, tensor, start, step, count, stride, target, offset, origin, n_dims)
    _check_packed_offsets(sources, requests, buffers)
    return requests


def _check_packed_offsets(sources: ShardTable, requests: Requests, buffers: TensorDict) -> None:
    if not len(requests) or not bool((buffers.bits < 8).any()):
        return
    bits = requests.dst_offset * buffers.bits[requests.buffer]
    wrong = bits % 8 != 0
    if wrong.any():
        bad = int(np.argmax(wrong))
        name = sources.tensors.name(int(requests.tensor[bad]))
        buffer = int(requests.buffer[bad])
        raise DTypeError(
            f"tensor {name!r}: destination element {int(requests.dst_offset[bad])} of buffer {buffers.name(buffer)!r} "
            f"({buffers.dtype_label(buffer)}) is inside a byte",
            tensor=name,
            got=int(requests.dst_offset[bad]),
            expected=8 // int(buffers.bits[buffer]),
        )


def _fills(reads: ReadTable, writes: Writes, n_dims: int) -> Fills:
    constant = reads.kind == KIND_CONSTANT
    rows = np.flatnonzero(constant[writes.origin]) if constant.any() else np.zeros(0, np.int64)
    alive = np.ones(len(rows), np.bool_)
    for c in writes.count:
        alive &= c[rows] > 0
    rows = rows[alive]
    origin = writes.origin[rows]
    buffer = reads.buffer_id[origin]
    code = reads.buffers.dtype_code[buffer] if len(reads.buffers) else buffer
    unit, pack = _UNIT[code], _PACK[code]
    offset = writes.dst_offset[rows]
    count = [c[rows] for c in writes.count]
    stride = [c[rows] for c in writes.dst_stride]
    if bool((pack > 1).any()):
        _check_packed_fills(reads, origin, pack, offset, count, stride)
        offset = offset // pack
        count = [*count[:-1], count[-1] // pack]
        stride = [*(c // pack for c in stride[:-1]), np.where(pack > 1, 1, stride[-1])]
    lead = n_dims - reads.n_dims
    ones, zeros = np.ones(len(rows), np.int64), np.zeros(len(rows), np.int64)
    return Fills(
        origin,
        buffer,
        offset * unit,
        unit,
        (ones,) * lead + tuple(count),
        (zeros,) * lead + tuple(c * unit for c in stride),
        tuple(reads.values[row] for row in origin.tolist()),
    )


def _check_packed_fills(
    reads: ReadTable, origin: Int64, pack: Int64, offset: Int64, count: list[Int64], stride: list[Int64]
) -> None:
    """Constants into packed buffers fill whole bytes."""
    wrong = offset % pack != 0
    if count:
        wrong |= (pack > 1) & ((count[-1] % pack != 0) | ((stride[-1] != 1) & (count[-1] > 1)))
        for c in stride[:-1]:
            wrong |= c % pack != 0
    else:
        wrong |= pack > 1
    if wrong.any():
        bad = int(np.argmax(wrong))
        raise DTypeError(
            f"{reads.where(int(origin[bad]))}: a constant cuts a byte of {int(pack[bad])} packed elements",
            got=int(offset[bad]),
            expected=int(pack[bad]),
        )


def solve_templates(
    sources: ShardTable, requests: Requests, buffers: TensorDict, classes: Classes, options: PlanOptions
) -> Templates:
    """Solve one member of each class; nothing here depends on how many members there are."""
    wanted, pack = template_requests(sources, classes, requests)
    src_code = sources.tensors.dtype_code[classes.tensor[classes.first]][wanted.cls]
    dst_code = buffers.dtype_code[requests.buffer[wanted.row]] if len(wanted) else src_code
    _check_casts(sources, buffers, requests, wanted.row, src_code, dst_code, options)
    boxes = _in_units(source_boxes(sources, classes, options), pack)
    pieces = join(wanted, boxes, len(classes))
    src_unit, dst_unit = _UNIT[src_code], _UNIT[dst_code]
    limit = staging_limit(options)
    layout = lay_out(pieces, wanted, boxes, src_unit, dst_unit)
    cast = src_code != dst_code
    mode = choose_modes(layout, cast[pieces.request], options)
    while True:
        split = split_to_runs(pieces, layout, mode) or split_to_limit(pieces, layout, mode != MODE_EXACT, limit)
        if split is None:
            break
        pieces, origin = split
        layout = lay_out(pieces, wanted, boxes, src_unit, dst_unit)
        # a part of one run needs no staging: it is one descriptor either way
        direct = (layout.n_runs == 1) & ~cast[pieces.request]
        mode = np.where(direct, MODE_EXACT, mode[origin])
    # of the final pieces, whatever became of them
    check_coverage(sources, classes, wanted, pieces, boxes, pack)
    fetches, piece_fetch = plan_fetches(pieces, layout, mode, boxes, limit, round_spans=options.round_spans)
    items = list_items(pieces, layout, mode, fetches, boxes)
    return Templates(classes, wanted, boxes, pieces, layout, mode, fetches, piece_fetch, items, src_code, dst_code)


def _in_units(boxes: SourceBoxes, pack: Int64) -> SourceBoxes:
    """Last dim in bytes where elements are packed."""
    if bool((pack == 1).all()):
        return boxes
    unit = pack[boxes.cls]
    scaled = [
        [*columns[:-1], columns[-1] // unit]
        for columns in (boxes.start, boxes.stop, boxes.shard_start, boxes.shard_stop)
    ]
    return SourceBoxes(
        boxes.cls,
        scaled[0],
        scaled[1],
        scaled[2],
        scaled[3],
        boxes.candidate_first,
        boxes.n_candidates,
        boxes.candidate_part,
        boxes.candidate_nth,
        boxes.candidate_group,
        boxes.claimed,
    )


def _check_casts(
    sources: ShardTable,
    buffers: TensorDict,
    requests: Requests,
    rows: Int64,
    src_code: Int64,
    dst_code: Int64,
    options: PlanOptions,
) -> None:
    """Floats may be cast to floats; everything else must be allowed by name, and be a cast that exists."""
    _, first = classify([src_code, dst_code])
    for i in first[src_code[first] != dst_code[first]].tolist():
        src, dst = dtype_of_code(int(src_code[i])), dtype_of_code(int(dst_code[i]))
        named = (src.label, dst.label) in options.allow_casts
        if (named or src.kind == dst.kind == "float") and can_cast(src.label, dst.label):
            continue
        row = int(rows[i])
        name = sources.tensors.name(int(requests.tensor[row]))
        raise DTypeError(
            f"tensor {name!r}: published as {src.label}, buffer {buffers.name(int(requests.buffer[row]))!r} is "
            f"{dst.label}; floats are cast to floats, anything else only if allow_casts names it (packed dtypes and "
            "block scales never)",
            tensor=name,
            got=src.label,
            expected=dst.label,
        )
