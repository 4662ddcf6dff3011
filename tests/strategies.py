"""Hypothesis strategies that draw whole scenarios: sharded tensors, buffers, and the copies between.

Everything is drawn as the plain records of ``tests/reference.py``; :func:`shard_table` and :func:`read_table`
turn a scenario into the planner's tables.

1. Tensors of rank 0 to 4, cut on any dims into even, uneven and empty boxes, kept by one to three holders.
2. Each holder's shards at odd offsets of one or two regions, in shuffled order.
3. Buffers made of slots stacked on any axis; each slot takes a narrowed, stepped, selected, permuted view, now and
   then backwards.
4. Fills under copies, and later copies over earlier ones, with program order saying who wins.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

from hypothesis import strategies as st
from tests.reference import (
    CASTS,
    ITEM_BITS,
    RefBuffer,
    RefRequest,
    RefShard,
    RefTensor,
    Scenario,
    n_bytes,
    n_elems,
)

from reshard.planner import Buffer, Holder, ReadRequest, ReadTable, Shard, ShardPart, ShardTable

WHOLE_BYTE_DTYPES = ["uint8", "int16", "bfloat16", "float16", "float32", "float64", "int64", "float8_e4m3fn"]


@st.composite
def shapes(draw: st.DrawFn, *, min_rank: int = 0, max_rank: int = 4, max_elems: int = 160) -> tuple[int, ...]:
    """A tensor shape of bounded size; extents of 1 are common, as they are where planners go wrong."""
    rank = draw(st.integers(min_rank, max_rank))
    shape: list[int] = []
    for _ in range(rank):
        room = max(1, max_elems // n_elems(shape))
        shape.append(draw(st.integers(1, min(room, 9))))
    return tuple(shape)


@st.composite
def cuts(draw: st.DrawFn, extent: int, max_parts: int = 4) -> list[int]:
    """Boundaries that cut [0, extent): sorted, with repeats, which are empty shards."""
    inner = draw(st.lists(st.integers(0, extent), max_size=max_parts - 1))
    return [0, *sorted(inner), extent]


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (start, stop) that cover a shape exactly once, empty ones included."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    budget = 2
    for extent in shape:
        bounds = [0, extent]
        if budget and draw(st.booleans()):
            bounds = draw(cuts(extent))
            budget -= 1
        boxes = [((*start, a), (*stop, b)) for start, stop in boxes for a, b in itertools.pairwise(bounds)]
    return boxes


@dataclasses.dataclass(frozen=True)
class View:
    """A source view of a request: per source dim start, step, count."""

    tensor: RefTensor
    start: tuple[int, ...]
    step: tuple[int, ...]
    count: tuple[int, ...]


@st.composite
def views(draw: st.DrawFn, tensor: RefTensor, *, stepped: bool = True) -> View:
    """A narrow, select or stepped slice of every dim; the whole tensor often."""
    start, step, count = [], [], []
    for extent in tensor.shape:
        kind = draw(st.sampled_from(["all", "all", "narrow", "select", "step"]))
        if kind == "all":
            a, s, c = 0, 1, extent
        elif kind == "select":
            a, s, c = draw(st.integers(0, extent - 1)), 1, 1
        else:
            a = draw(st.integers(0, extent - 1))
            s = draw(st.integers(1, 3)) if kind == "step" and stepped else 1
            c = draw(st.integers(1, 1 + (extent - 1 - a) // s))
        start.append(a)
        step.append(s)
        count.append(c)
    return View(tensor, tuple(start), tuple(step), tuple(count))


@st.composite
def scenarios(
    draw: st.DrawFn,
    *,
    replicas: bool = True,
    fills: bool = True,
    overwrites: bool = True,
    casts: bool = True,
    stepped: bool = True,
    interleaved: bool = True,
    dtypes: Sequence[str] = tuple(WHOLE_BYTE_DTYPES),
    max_rank: int = 4,
) -> Scenario:
    """A scenario that has one right answer: complete shards, claimed replicas, ordered overlaps."""
    scenario = Scenario()
    for index in range(draw(st.integers(1, 3))):
        shape = draw(shapes(max_rank=max_rank))
        tensor = RefTensor(f"layers.{index}.weight", draw(st.sampled_from(list(dtypes))), shape)
        scenario.tensors[tensor.name] = tensor
    seed = draw(st.integers(0, 2**32 - 1))
    fill_content(scenario, seed)
    draw(_holdings(scenario, replicas))
    for _ in range(draw(st.integers(1, 2))):
        draw(_buffer(scenario, fills, overwrites, casts, stepped, interleaved))
    return scenario


def fill_content(scenario: Scenario, seed: int) -> None:
    """Give every tensor pseudo-random bytes, floats finite so that casts have one answer."""
    source = random.Random(seed)
    for tensor in scenario.tensors.values():
        data = bytearray(source.randbytes(n_bytes(tensor.dtype, tensor.shape)))
        if tensor.dtype in ("bfloat16", "float16", "float32", "float64"):
            size = ITEM_BITS[tensor.dtype] // 8
            for last in range(size - 1, len(data), size):
                data[last] &= 0xBF
        scenario.content[tensor.name] = bytes(data)


@st.composite
def _holdings(draw: st.DrawFn, scenario: Scenario, replicas: bool) -> None:
    """Cut every tensor into shards and lay them out in the holders' regions."""
    names = [f"trainer-{index}" for index in range(draw(st.integers(1, 4)))]
    region_bytes = {name: [draw(st.integers(0, 5)) for _ in range(draw(st.integers(1, 2)))] for name in names}
    rows: list[RefShard] = []
    for group, tensor in enumerate(scenario.tensors.values()):
        claimed = replicas and draw(st.booleans())
        for start, stop in draw(shardings(tensor.shape)):
            n_holders = draw(st.integers(1, min(3, len(names)))) if claimed else 1
            for holder in draw(st.permutations(names))[:n_holders]:
                rows.append(RefShard(holder, tensor.name, start, stop, 0, 0, group if claimed else -1))
    for row in draw(st.permutations(rows)):
        sizes = region_bytes[row.holder]
        region = draw(st.integers(0, len(sizes) - 1))
        extents = [b - a for a, b in zip(row.start, row.stop, strict=True)]
        scenario.shards.append(dataclasses.replace(row, region=region, offset=sizes[region]))
        gap = draw(st.sampled_from([0, 0, 1, 8]))
        sizes[region] += n_bytes(scenario.tensors[row.tensor].dtype, extents) + gap
    scenario.region_bytes = region_bytes


@st.composite
def _buffer(
    draw: st.DrawFn,
    scenario: Scenario,
    fills: bool,
    overwrites: bool,
    casts: bool,
    stepped: bool,
    interleaved: bool,
) -> None:
    """Add a buffer of stacked slots, one copy into each, and perhaps fills under and copies over them."""
    tensors = list(scenario.tensors.values())
    dtype = draw(st.sampled_from(tensors)).dtype
    if casts:
        targets = [dst for src, dst in CASTS if any(tensor.dtype == src for tensor in tensors)]
        dtype = draw(st.sampled_from([dtype, dtype, *targets]))
    usable = [tensor for tensor in tensors if tensor.dtype == dtype or (casts and (tensor.dtype, dtype) in CASTS)]
    picked = [draw(views(draw(st.sampled_from(usable)), stepped=stepped)) for _ in range(draw(st.integers(1, 3)))]
    kept = [draw(st.permutations([dim for dim, count in enumerate(view.count) if count > 1])) for view in picked]
    rank = max(len(dims) for dims in kept)
    gaps = [[draw(_gap(interleaved)) for _ in range(rank)] for _ in picked]
    box = [1] * rank
    for view, dims, gap in zip(picked, kept, gaps, strict=True):
        for axis in range(rank):
            count = view.count[dims[axis]] if axis < len(dims) else 1
            first, step, tail = gap[axis]
            box[axis] = max(box[axis], first + step * (count - 1) + 1 + tail)
    stack_axis = draw(st.integers(0, rank))
    shape = (*box[:stack_axis], len(picked), *box[stack_axis:])
    strides = [n_elems(shape[axis + 1 :]) for axis in range(len(shape))]
    slot_stride = strides.pop(stack_axis)
    number = len(scenario.buffers)
    scenario.buffers.append(RefBuffer(f"param.{number}", dtype, shape))
    requests = []
    for slot, (view, dims, gap) in enumerate(zip(picked, kept, gaps, strict=True)):
        offset, dst_stride = slot * slot_stride, [0] * len(view.count)
        for axis in range(rank):
            offset += gap[axis][0] * strides[axis]
            if axis < len(dims):
                stride = gap[axis][1] * strides[axis]
                if draw(st.integers(0, 9)) == 0:
                    offset += (view.count[dims[axis]] - 1) * stride
                    stride = -stride
                dst_stride[dims[axis]] = stride
        requests.append(
            RefRequest(view.tensor.name, view.start, view.step, view.count, number, offset, tuple(dst_stride))
        )
    layers = [requests]
    if fills and draw(st.booleans()):
        layers.insert(0, [_fill_of(draw, number, dtype, shape)])
    if overwrites and draw(st.booleans()):
        hidden = draw(st.sampled_from(requests))
        layers.append([_moved(draw, hidden, scenario.tensors[hidden.tensor])])
    if fills and draw(st.integers(0, 5)) == 0:
        layers.append([_fill_of(draw, number, dtype, shape)])
    for order, layer in enumerate(layers):
        scenario.requests.extend(dataclasses.replace(request, order=order) for request in layer)
    if draw(st.booleans()):
        scenario.requests[:] = draw(st.permutations(scenario.requests))


@st.composite
def _gap(draw: st.DrawFn, interleaved: bool) -> tuple[int, int, int]:
    """Where a view lies along one destination axis: first element, step, and elements left behind it."""
    if draw(st.booleans()):
        return 0, 1, 0
    return draw(st.integers(0, 2)), draw(st.integers(1, 2 if interleaved else 1)), draw(st.integers(0, 2))


def _fill_of(draw: st.DrawFn, buffer: int, dtype: str, shape: tuple[int, ...]) -> RefRequest:
    """A fill of a box of the buffer, the whole of it often."""
    view = draw(views(RefTensor("", dtype, shape), stepped=False))
    strides = [n_elems(shape[axis + 1 :]) for axis in range(len(shape))]
    offset = sum(a * s for a, s in zip(view.start, strides, strict=True))
    value = bytes([draw(st.integers(0, 255)) & (0x0F if ITEM_BITS[dtype] == 4 else 0xBF)])
    value *= max(1, ITEM_BITS[dtype] // 8)
    zeros, ones = (0,) * len(shape), (1,) * len(shape)
    dst_stride = tuple(s if c > 1 else 0 for s, c in zip(strides, view.count, strict=True))
    return RefRequest("", zeros, ones, view.count, buffer, offset, dst_stride, value=value)


def _moved(draw: st.DrawFn, request: RefRequest, tensor: RefTensor) -> RefRequest:
    """Another piece of the same tensor into a part of the same destination view."""
    start, count, offset = [], [], request.dst_offset
    dims = zip(tensor.shape, request.step, request.count, request.dst_stride, strict=True)
    for extent, step, whole, stride in dims:
        first = draw(st.integers(0, whole - 1))
        kept = draw(st.integers(1, whole - first))
        offset += first * stride
        count.append(kept)
        start.append(draw(st.integers(0, extent - 1 - step * (kept - 1))))
    dst_stride = tuple(s if c > 1 else 0 for s, c in zip(request.dst_stride, count, strict=True))
    return dataclasses.replace(
        request, start=tuple(start), count=tuple(count), dst_offset=offset, dst_stride=dst_stride
    )


def shard_parts(scenario: Scenario) -> list[ShardPart]:
    """The planner's part of every holder, those that hold nothing included."""
    rows: dict[str, list[Shard]] = {holder: [] for holder in scenario.region_bytes}
    layouts: dict[str, tuple[str, str]] = {}
    for shard in scenario.shards:
        tensor = scenario.tensors[shard.tensor]
        layouts[shard.holder] = (shard.layout, shard.claim)
        rows[shard.holder].append(
            Shard(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                shard.start,
                shard.stop,
                shard.region,
                shard.offset,
                shard.group,
            )
        )
    return [
        ShardPart.from_shards(Holder(holder), held, scenario.region_bytes[holder], *layouts.get(holder, ()))
        for holder, held in rows.items()
    ]


def shard_table(scenario: Scenario) -> ShardTable:
    """The planner's shard table of a scenario."""
    return ShardTable(shard_parts(scenario))


def read_table(scenario: Scenario) -> ReadTable:
    """The planner's read table of a scenario."""
    requests = []
    for request in scenario.requests:
        tensor = scenario.tensors.get(request.tensor, RefTensor("", "uint8", ()))
        requests.append(
            ReadRequest(
                tensor.name,
                tensor.shape,
                tensor.dtype,
                request.start,
                request.step,
                request.count,
                request.buffer,
                request.dst_offset,
                request.dst_stride,
                request.order,
                "copy" if request.value is None else "constant",
                request.value or b"",
            )
        )
    return ReadTable.build([Buffer(b.name, b.shape, b.dtype) for b in scenario.buffers], requests)


@st.composite
def layered_scenarios(draw: st.DrawFn) -> Scenario:
    """Many tensors of few shapes, sharded alike but for some: what planning by class is for, and where it may err.

    Layers share shape, dtype, sharding and requests; then single layers are re-cut, move to other holders, lose or
    gain a replica, are read by another view, or lie in another order in memory.
    """
    scenario = Scenario()
    kinds = [
        (draw(st.sampled_from(["bfloat16", "float32", "uint8"])), draw(shapes(min_rank=1, max_rank=3, max_elems=24)))
        for _ in range(draw(st.integers(1, 2)))
    ]
    n_layers = draw(st.integers(2, 7))
    names = [f"trainer-{index}" for index in range(draw(st.integers(1, 5)))]
    region_bytes = {name: [0, 0] for name in names}
    rows: list[RefShard] = []
    for kind, (dtype, shape) in enumerate(kinds):
        usual_cut = draw(shardings(shape))
        usual_owner = [draw(st.permutations(names))[: draw(st.integers(1, 2))] for _ in usual_cut]
        usual_view = draw(views(RefTensor("", dtype, shape)))
        for layer in range(n_layers):
            tensor = RefTensor(f"layers.{layer}.w{kind}", dtype, shape)
            scenario.tensors[tensor.name] = tensor
            odd = draw(st.sampled_from(["", "", "", "cut", "owner", "view", "skip", "group"]))
            cut = draw(shardings(shape)) if odd == "cut" else usual_cut
            owner = usual_owner
            if odd in ("cut", "owner"):
                owner = [draw(st.permutations(names))[: draw(st.integers(1, 3))] for _ in cut]
            group = 9 if odd == "group" else kind
            for (start, stop), holders in zip(cut, owner, strict=True):
                for holder in holders:
                    rows.append(RefShard(holder, tensor.name, start, stop, draw(st.integers(0, 1)), 0, group))
            if odd == "skip":
                continue
            view = draw(views(tensor)) if odd == "view" else usual_view
            shape_of_view = tuple(view.count)
            strides = tuple(n_elems(shape_of_view[axis + 1 :]) for axis in range(len(shape_of_view)))
            strides = tuple(s if c > 1 else 0 for s, c in zip(strides, view.count, strict=True))
            number = len(scenario.buffers)
            scenario.buffers.append(RefBuffer(tensor.name, dtype, shape_of_view))
            scenario.requests.append(RefRequest(tensor.name, view.start, view.step, view.count, number, 0, strides))
    fill_content(scenario, draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        rows = draw(st.permutations(rows))
    for row in rows:
        sizes = region_bytes[row.holder]
        extents = [b - a for a, b in zip(row.start, row.stop, strict=True)]
        scenario.shards.append(dataclasses.replace(row, offset=sizes[row.region]))
        sizes[row.region] += n_bytes(scenario.tensors[row.tensor].dtype, extents)
    scenario.region_bytes = region_bytes
    return scenario


@st.composite
def two_layout_scenarios(draw: st.DrawFn, *, replicas: bool = True) -> Scenario:
    """Tensors published in two layouts that claim equal content, each perhaps with gaps that the other fills."""
    scenario = Scenario()
    names = {"old": ["old-0", "old-1"], "new": ["new-0", "new-1", "new-2"]}
    region_bytes = {name: [0] for holders in names.values() for name in holders}
    rows: list[RefShard] = []
    for index in range(draw(st.integers(1, 3))):
        shape = draw(shapes(min_rank=1, max_rank=3, max_elems=60))
        tensor = RefTensor(f"w.{index}", draw(st.sampled_from(["bfloat16", "uint8"])), shape)
        scenario.tensors[tensor.name] = tensor
        for layout, holders in names.items():
            boxes = draw(shardings(shape))
            if draw(st.booleans()):
                boxes = draw(st.lists(st.sampled_from(boxes), unique=True, max_size=len(boxes)))
            replicated = replicas and draw(st.booleans())
            for start, stop in boxes:
                n_holders = draw(st.integers(1, 2)) if replicated else 1
                for holder in draw(st.permutations(holders))[:n_holders]:
                    group = 4 if replicated else -1
                    rows.append(RefShard(holder, tensor.name, start, stop, 0, 0, group, layout, "step-7"))
    for row in rows:
        sizes = region_bytes[row.holder]
        extents = [b - a for a, b in zip(row.start, row.stop, strict=True)]
        scenario.shards.append(dataclasses.replace(row, offset=sizes[0]))
        sizes[0] += n_bytes(scenario.tensors[row.tensor].dtype, extents)
    scenario.region_bytes = region_bytes
    fill_content(scenario, draw(st.integers(0, 2**32 - 1)))
    for _ in range(draw(st.integers(1, 2))):
        draw(_buffer(scenario, fills=False, overwrites=True, casts=False, stepped=True, interleaved=False))
    return scenario
