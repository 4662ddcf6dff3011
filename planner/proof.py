"""Does the final plan read each requested byte exactly once? The proof behind the certificate.

It is made from the final pieces, fetches, serving ranges and staging units (after every split and merge, and not from
the steps that made them), in this order; the plan is refused at the first statement that does not hold.

1. The pieces of each request tile it (`join.check_coverage`; program order has made requests disjoint, `writes`).
2. Each piece's layout has, at every k, the address that request and shard give it, on both sides: equal at k = 0
   and at each unit vector, and the layout's dims are runs of the piece's dims, so equal everywhere.
3. Each staged piece lies inside its fetch; fetches of a staging group, and units of a wave, do not share staging.
4. Each exact piece, and each fetch, is one item, inside its shard (which its table has proved inside its region).
5. For each item the ranges of members that holders serve tile the class: no member twice, none left out; and
   each holder does hold the box.

Members are equal to their template in all that 1 to 4 look at (`classes` compares them exactly), so that the blocks,
which are (item, member) pairs, inherit the proof. `prove_blocks` compares them one by one instead: the price of a look
at each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from reshard.planner.classify import Bool, ragged_arange
from reshard.planner.errors import PlanError
from reshard.planner.shape import MODE_EXACT

if TYPE_CHECKING:
    from reshard.planner.assemble import Segment
    from reshard.planner.plans import Plan, Templates
    from reshard.planner.waves import Waves

__all__ = ["prove_blocks", "prove_serving", "prove_staging", "prove_templates"]


def _refuse(wrong: Bool, what: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise PlanError(f"the plan contradicts its certificate: {what} (row {row}); this is a defect of the planner")


def prove_templates(templates: Templates) -> None:
    """Prove statements 2, 4 and the first half of 3.

    Raises
    ------
    PlanError
        One does not hold.
    """
    t = templates
    for numbers, n in (
        (t.pieces.request, len(t.requests)),
        (t.pieces.box, len(t.boxes)),
        (t.fetches.box, len(t.boxes)),
        (t.items.box, len(t.boxes)),
        (t.items.piece + 1, len(t.pieces) + 1),
        (t.items.fetch + 1, len(t.fetches) + 1),
        (t.piece_fetch + 1, len(t.fetches) + 1),
    ):
        _refuse((numbers < 0) | (numbers >= n), "a number is out of bounds")
    _prove_layout(templates)
    _prove_items(templates)


def _prove_layout(t: Templates) -> None:
    pieces, layout, boxes = t.pieces, t.layout, t.boxes
    n, n_dims = len(pieces), len(pieces.lo)
    if not n:
        return
    q, box = pieces.request, pieces.box
    unit = np.ones(n, np.int64)
    # what request and shard say: address of the piece's first unit, and the step to the next along each dim
    src, dst = np.zeros(n, np.int64), np.zeros(n, np.int64)
    src_step, dst_step, below = [unit] * n_dims, [unit] * n_dims, [unit] * n_dims
    stride, volume = unit.copy(), unit.copy()
    inside = np.ones(n, np.bool_)
    reach = np.zeros(n, np.int64)
    for d in reversed(range(n_dims)):
        lo, count, step = pieces.lo[d], pieces.count[d], t.requests.step[d][q]
        first = t.requests.start[d][q] + lo * step
        last = first + (count - 1) * step
        inside &= (lo >= 0) & (count > 0) & (lo + count <= t.requests.count[d][q])
        inside &= (first >= boxes.start[d][box]) & (last < boxes.stop[d][box])
        src += (first - boxes.shard_start[d][box]) * stride
        dst += lo * t.requests.stride[d][q]
        src_step[d], dst_step[d] = step * stride * layout.src_unit, t.requests.stride[d][q] * layout.dst_unit
        reach += (count - 1) * src_step[d]
        below[d] = volume
        volume = volume * count
        stride = stride * (boxes.shard_stop[d][box] - boxes.shard_start[d][box])
    _refuse(~inside, "a piece leaves its request or its box")
    _refuse(layout.src_offset != src * layout.src_unit, "a piece starts elsewhere in its shard")
    _refuse(layout.dst_offset != dst * layout.dst_unit, "a piece starts elsewhere in its buffer")
    _refuse(layout.span < reach + layout.src_unit, "a piece's span ends before the piece")
    # what the layout says: each of its dims must begin at a dim of the piece, and all have the piece's volume
    size = layout.run.copy()
    radix = [size]
    for count in reversed(layout.count):
        size = size * count
        radix.append(size)
    _refuse((size != volume) | (layout.n_runs * layout.run != volume), "a layout has another volume than its piece")
    for r in radix[:-1]:
        known = r == volume
        for d in range(n_dims):
            known |= r == below[d]
        _refuse(~known, "a layout's dim begins inside a dim of its piece")
    for d in range(n_dims):
        real = pieces.count[d] > 1
        at = [below[d] % layout.run, *(below[d] // r % c for r, c in zip(radix, reversed(layout.count), strict=False))]
        for name, unit_bytes, strides, step in (
            ("source", layout.src_unit, layout.src_stride, src_step[d]),
            ("destination", layout.dst_unit, layout.dst_stride, dst_step[d]),
        ):
            got = at[0] * unit_bytes
            for k, s in zip(at[1:], reversed(strides), strict=True):
                got = got + k * s
            _refuse(real & (got != step), f"a layout strides through its {name} in another way than its piece")


def _prove_items(t: Templates) -> None:
    layout, fetches, items, boxes = t.layout, t.fetches, t.items, t.boxes
    shard = np.ones(len(boxes), np.int64)
    for a, b in zip(boxes.shard_start, boxes.shard_stop, strict=True):
        shard *= b - a
    room = shard[t.pieces.box] * layout.src_unit
    _refuse((layout.src_offset < 0) | (layout.src_offset + layout.span > room), "a piece leaves its shard")
    exact = t.mode == MODE_EXACT
    staged = np.flatnonzero(~exact)
    fetch = t.piece_fetch[staged]
    _refuse(exact != (t.piece_fetch == -1), "a piece is both read and staged, or neither")
    if len(staged):
        begin = layout.src_offset[staged]
        outside = (fetches.box[fetch] != t.pieces.box[staged]) | (begin < fetches.src_offset[fetch])
        outside |= begin + layout.span[staged] > fetches.src_offset[fetch] + fetches.n_bytes[fetch]
        _refuse(outside, "a staged piece is not inside its fetch")
        limit = np.zeros(len(boxes), np.int64)
        limit[t.pieces.box[staged]] = room[staged]
        end = fetches.src_offset + fetches.n_bytes
        _refuse(
            (fetches.src_offset < 0) | (fetches.n_bytes < 1) | (end > limit[fetches.box]), "a fetch leaves its shard"
        )
        order = np.lexsort([fetches.staging, fetches.group])
        group, place = fetches.group[order], fetches.staging[order]
        stop = place + fetches.n_bytes[order]
        meet = (group[1:] == group[:-1]) & (place[1:] < stop[:-1])
        _refuse((place < 0) | (stop > fetches.group_bytes[group]), "a fetch leaves its staging group")
        _refuse(meet, "two fetches share staging")
    # an item is one piece or one fetch, and each of these is one item
    read = items.fetch < 0
    _refuse(np.where(read, items.fetch, items.piece) != -1, "an item is both read and staged")
    for numbers, expected in (
        (items.piece[read], np.flatnonzero(exact)),
        (items.fetch[~read], np.arange(len(fetches))),
    ):
        same = len(numbers) == len(expected) and bool((np.sort(numbers) == expected).all())
        _refuse(np.array([not same]), "a piece or fetch is read twice or never")
    box, offset = np.empty(len(items), np.int64), np.empty(len(items), np.int64)
    box[read], offset[read] = t.pieces.box[items.piece[read]], layout.src_offset[items.piece[read]]
    box[~read], offset[~read] = fetches.box[items.fetch[~read]], fetches.src_offset[items.fetch[~read]]
    wrong = (items.box != box) | (items.src_offset != offset) | (items.cls != boxes.cls[box])
    _refuse(wrong, "an item is not what its piece says")


def prove_serving(templates: Templates, segments: Sequence[Segment]) -> None:
    """Prove statement 5, from what the segments say they serve.

    Raises
    ------
    PlanError
        It does not hold.
    """
    t = templates
    columns = np.frombuffer(b"".join([s.key for s in segments]), np.int64).reshape(-1, 4)
    item = np.concatenate([s.item for s in segments]) if segments else columns[:, 0]
    n_ranges = [len(s.key) // 32 for s in segments]
    part = np.repeat(np.array([s.part for s in segments], np.int64), n_ranges)
    _refuse(np.array([len(item) != len(columns)]), "a holder serves another number of ranges than of items")
    first, size, nth, offset = (columns[:, i] for i in range(4))
    n_items, n_members = len(t.items), len(t.classes.members) + 1
    _refuse((item < 0) | (item >= n_items) | (first < 0) | (first >= n_members), "a number is out of bounds")
    order = np.argsort(item * n_members + first, kind="stable")
    item, part, first, size, nth, offset = (c[order] for c in (item, part, first, size, nth, offset))
    new = np.ones(len(item), np.bool_)
    new[1:] = item[1:] != item[:-1]
    begin, end = t.classes.member_start[t.items.cls[item]], t.classes.member_start[t.items.cls[item] + 1]
    due = np.where(new, begin, np.append(0, (first + size)[:-1]) if len(item) else begin)
    last = np.append(new[1:], True) if len(item) else new
    _refuse((first != due) | (size < 1), "a member of a class is served twice or never")
    _refuse(last & (first + size != end), "members of a class are never served")
    missing = np.ones(len(t.items), np.bool_)
    missing[item] = False
    _refuse(missing, "an item is served by nobody")
    _refuse(offset != t.items.src_offset[item], "a holder serves another place of its shard")
    # the holder is among the candidates of the box
    boxes, box = t.boxes, t.items.box[item]
    counts = boxes.n_candidates
    of = np.repeat(np.arange(len(boxes)), counts)
    row = np.repeat(boxes.candidate_first, counts) + ragged_arange(counts)
    n_parts = int(max(boxes.candidate_part.max(initial=0), part.max(initial=0))) + 1
    n_nth = int(max(boxes.candidate_nth.max(initial=0), nth.max(initial=0))) + 1
    if len(boxes) * n_parts * n_nth >= 1 << 62:
        raise PlanError("over 2**62 (box, part, shard) triples", got=len(boxes))
    known = np.sort((of * n_parts + boxes.candidate_part[row]) * n_nth + boxes.candidate_nth[row])
    asked = (box * n_parts + part) * n_nth + nth
    at = np.minimum(np.searchsorted(known, asked), max(len(known) - 1, 0))
    _refuse(
        known[at] != asked if len(known) else np.ones(len(asked), np.bool_), "a holder serves what it does not hold"
    )


def prove_staging(templates: Templates, waves: Waves, limit_bytes: int) -> None:
    """Prove the second half of statement 3: units of one wave are disjoint, neighbouring waves use other halves.

    Raises
    ------
    PlanError
        It does not hold.
    """
    fetches = templates.fetches
    if not len(fetches):
        return
    n = np.diff(templates.classes.member_start)[fetches.group_cls]
    _refuse(waves.unit_first != np.cumsum(n) - n, "a staging unit has no place")
    _refuse(np.array([len(waves.unit_wave) != int(n.sum())]), "a staging unit has no place")
    size = np.repeat(fetches.group_bytes, n)
    order = np.lexsort([waves.unit_offset, waves.unit_wave])
    wave, begin = waves.unit_wave[order], waves.unit_offset[order]
    end = begin + size[order]
    _refuse((wave[1:] == wave[:-1]) & (begin[1:] < end[:-1]), "two units of one wave share staging")
    _refuse((wave < 0) | (wave >= waves.n_waves), "a staging unit has no wave")
    half = waves.staging_bytes // min(waves.n_waves, 2)
    low = wave % 2 * half
    _refuse((begin < low) | (end > low + half) | (half > limit_bytes), "a staging unit leaves its half of the arena")


def prove_blocks(plan: Plan) -> None:
    """Prove everything again, and compare every block with what its shard and request say, one by one.

    `plan()` proves the templates and the ranges of members that holders serve; this also looks at every block: its
    tensor is of the class, its shard is the template's box, its bytes lie inside the holder's region, and its
    destination inside its buffer.

    Raises
    ------
    ReshardError
        The plan is not what its certificate says.

    Examples
    --------
    >>> from reshard.planner import Buffer, Holder, ReadRequest, ReadTable, Shard, ShardPart, ShardTable, plan
    >>> part = ShardPart.from_shards(Holder("r0"), [Shard("w", "uint8", (6,), (0,), (6,))], [6])
    >>> read = ReadRequest("w", (6,), "uint8", (0,), (1,), (6,), 0, 0, (1,))
    >>> prove_blocks(plan(ShardTable([part]), ReadTable.build([Buffer("p", (6,), "uint8")], [read])))
    """
    from reshard.planner.certificate import item_bytes
    from reshard.planner.join import check_coverage
    from reshard.planner.planning import staging_limit

    t, requests = plan.templates, plan.requests
    of_class = plan.sources.tensors.bits[t.classes.tensor[t.classes.first]]
    pack = np.where(of_class < 8, 8 // np.minimum(of_class, 8), 1)
    prove_templates(t)
    check_coverage(plan.sources, t.classes, t.requests, t.pieces, t.boxes, pack)
    prove_serving(t, plan.segments)
    prove_staging(t, plan.waves, staging_limit(plan.options))
    n_bytes = item_bytes(t)
    span = (
        np.where(t.items.fetch < 0, t.layout.span[np.maximum(t.items.piece, 0)], n_bytes) if len(t.items) else n_bytes
    )
    bits = plan.sources.tensors.bits[t.classes.tensor]
    for segment in plan.segments:
        part, id_map = plan.sources.parts[segment.part], plan.sources.id_maps[segment.part]
        first, size, _, _ = segment.ranges.T
        item = np.repeat(segment.item, segment.n_members)
        _refuse(size != segment.n_members, "a holder serves another number of members")
        at = np.repeat(first, size) + ragged_arange(size)
        _refuse(segment.tensor != t.classes.members[at], "a block has another tensor")
        row = segment.tensor if segment.row is None else segment.row
        tensor = part.tensor_id[row] if id_map is None else id_map[part.tensor_id[row]]
        _refuse(tensor != t.classes.tensor[segment.tensor], "a block's shard is of another tensor")
        _refuse(segment.src_offset != part.offset_bytes[row] + t.items.src_offset[item], "a block starts elsewhere")
        region = np.zeros(len(row), np.int64) if segment.region is None else segment.region
        _refuse(region != part.region[row], "a block is in another region")
        outside = (segment.src_offset < 0) | (segment.src_offset + span[item] > part.region_bytes[region])
        _refuse(outside, "a block leaves its region")
        box, geometry = t.items.box[item], part.geometry_id[row]
        n_dims = len(part.geometries.start)
        packed = np.where(bits[segment.tensor] < 8, 8 // np.minimum(bits[segment.tensor], 8), 1)
        for d in range(1, n_dims + 1):
            scale = packed if d == 1 else 1
            for mine, theirs in (
                (t.boxes.shard_start, part.geometries.start),
                (t.boxes.shard_stop, part.geometries.stop),
            ):
                _refuse(mine[-d][box] * scale != theirs[-d][geometry], "a block's shard has another box")
    blocks = plan.blocks
    if not len(blocks):
        return
    # volumes of each request from its blocks, and where they land
    volume, wanted = np.ones(len(blocks), np.int64), np.ones(len(requests), np.int64)
    low, high = blocks.dst_offset_bytes.copy(), blocks.dst_offset_bytes + t.layout.dst_unit[blocks.piece]
    for count, stride in zip(blocks.count, blocks.dst_stride_bytes, strict=True):
        volume *= count
        low += np.minimum((count - 1) * stride, 0)
        high += np.maximum((count - 1) * stride, 0)
    for count in requests.count:
        wanted *= count
    _refuse((low < 0) | (high > plan.buffer_bytes[blocks.buffer]), "a block leaves its buffer")
    number = blocks.request_number
    wanted = wanted * plan.buffers.bits[requests.buffer] // 8
    got = np.zeros(len(requests), np.int64)
    np.add.at(got, number, volume * t.layout.dst_unit[blocks.piece])
    _refuse(got != wanted, "the blocks of a request do not add up to it")
