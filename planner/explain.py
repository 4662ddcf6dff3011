"""Where a destination byte comes from, and where a source element or a holder's byte goes.

Every answer is computed from the plan's blocks, so that it explains what will be read and not what was meant.

1. A block covers the destination bytes ``dst_offset + sum(k_d * dst_stride_d)`` of its box; solving for k is peeling
   the strides from the greatest down.
2. From k follow the source element, and from the shard's own box the byte of the region.
3. What no block covers is a fill, the engine loader's own, or written by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reshard.planner.blocks import Blocks
from reshard.planner.classify import Bool, Int64
from reshard.planner.dictionaries import TensorDict
from reshard.planner.dtypes import dtype
from reshard.planner.errors import PlanError
from reshard.planner.plans import Plan
from reshard.planner.reads import KIND_MATERIALISED

__all__ = ["Destination", "Origin", "explain_byte", "find_element", "find_region_byte"]

Kind = Literal["copy", "fill", "loader", "unwritten"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one destination byte comes from.

    Attributes
    ----------
    buffer : str
    byte : int
        The destination byte.
    kind : {"copy", "fill", "loader", "unwritten"}
        Copied from a shard, filled with a constant, left to the engine's own loader, or in no request.
    request : int
        Row of the read table, -1 for unwritten bytes.
    tensor, element
        Source tensor and the global element (the first one of a packed byte); "" and () unless copied.
    holder : str
    region, region_offset_bytes : int
        Where the element begins, -1 unless copied.
    element_bytes : int
        Bytes of the element in the region; a destination byte of a cast depends on all of them.
    wave, staging_offset_bytes : int
        The wave that reads it, and where it is staged (-1: read straight into the buffer).
    value : bytes
        The constant of a fill.
    """

    buffer: str
    byte: int
    kind: Kind
    request: int = -1
    tensor: str = ""
    element: tuple[int, ...] = ()
    holder: str = ""
    region: int = -1
    region_offset_bytes: int = -1
    element_bytes: int = 0
    wave: int = -1
    staging_offset_bytes: int = -1
    value: bytes = b""

    def __str__(self) -> str:
        where = f"byte {self.byte} of {self.buffer!r}"
        if self.kind == "copy":
            staged = "" if self.staging_offset_bytes < 0 else f", staged at {self.staging_offset_bytes}"
            return (
                f"{where} <- element {self.element} of {self.tensor!r}: holder {self.holder!r}, region {self.region}, "
                f"bytes [{self.region_offset_bytes}, {self.region_offset_bytes + self.element_bytes}), "
                f"wave {self.wave}{staged}"
            )
        if self.kind == "fill":
            return f"{where} <- constant {self.value.hex()} (request {self.request})"
        if self.kind == "loader":
            return f"{where} is written by the engine's own loader (request {self.request})"
        return f"{where} is written by nobody"


@dataclass(frozen=True, slots=True)
class Destination:
    """One place where a source element lands: bytes [first_byte, first_byte + n_bytes) of a buffer."""

    buffer: str
    first_byte: int
    n_bytes: int
    request: int
    holder: str


def explain_byte(plan: Plan, buffer: str, byte: int) -> Origin:
    """Say where a destination byte comes from.

    Parameters
    ----------
    plan : Plan
    buffer : str
        Name of one of ``plan.buffers``.
    byte : int

    Returns
    -------
    Origin

    Raises
    ------
    PlanError
        No such buffer or byte.

    Examples
    --------
    >>> from reshard.planner import Buffer, Holder, ReadRequest, ReadTable, Shard, ShardPart, ShardTable, plan
    >>> part = ShardPart.from_shards(Holder("r0"), [Shard("w", "int16", (4, 2), (0, 0), (4, 2))], [16])
    >>> read = ReadRequest("w", (4, 2), "int16", (0, 1), (1, 1), (4, 1), 0, 0, (1, 0))
    >>> made = plan(ShardTable([part]), ReadTable.build([Buffer("p", (5,), "int16")], [read]))
    >>> origin = explain_byte(made, "p", 4)
    >>> origin.holder, origin.region_offset_bytes, origin.tensor, origin.element
    ('r0', 10, 'w', (2, 1))
    >>> print(explain_byte(made, "p", 9))
    byte 9 of 'p' is written by nobody
    """
    number = _buffer_number(plan, buffer, byte)
    blocks = plan.blocks
    rows = np.flatnonzero(blocks.buffer == number)
    unit = _dst_unit(plan, blocks, rows)
    found, steps = _solve(
        byte - blocks.dst_offset_bytes[rows],
        [c[rows] for c in blocks.count],
        [s[rows] for s in blocks.dst_stride_bytes],
        unit,
    )
    for position in np.flatnonzero(found).tolist():
        return _origin(plan, blocks, int(rows[position]), [int(k[position]) for k in steps], buffer, byte)
    return _other_origin(plan, number, buffer, byte)


def find_element(plan: Plan, tensor: str, element: Sequence[int]) -> list[Destination]:
    """Say where a source element lands: every place, in order of buffer and byte.

    Parameters
    ----------
    plan : Plan
    tensor : str
        A published tensor.
    element : sequence of int
        Global coordinates.

    Raises
    ------
    PlanError
        No such tensor, or an element outside it.
    """
    tensors = plan.sources.tensors
    number = tensors.index_of.get(tensor)
    if number is None:
        raise PlanError(f"tensor {tensor!r} is published by nobody", tensor=tensor)
    shape = tensors.shape_of(number)
    if len(element) != len(shape) or not all(0 <= x < n for x, n in zip(element, shape, strict=True)):
        raise PlanError(
            f"tensor {tensor!r}: element {tuple(element)}; expected one inside {shape}",
            tensor=tensor,
            got=tuple(element),
            expected=shape,
        )
    blocks = plan.blocks
    rows = np.flatnonzero(_block_tensors(plan, blocks) == number)
    point = list(element)
    if point:
        point[-1] //= dtype(tensors.dtype_label(number)).pack
    return _destinations(plan, blocks, rows, [np.full(len(rows), x, np.int64) for x in point])


def find_region_byte(plan: Plan, holder: str, region: int, offset_bytes: int) -> list[Destination]:
    """Say where a byte of a holder's region lands: every place that this plan brings it to.

    Parameters
    ----------
    plan : Plan
    holder : str
    region, offset_bytes : int

    Returns
    -------
    list of Destination
        Whole elements, in order of buffer and byte; empty if the plan does not use the byte.
    """
    names = [known.name for known in plan.holders]
    if holder not in names:
        return []
    blocks = plan.blocks
    rows = np.flatnonzero((blocks.holder == names.index(holder)) & (blocks.region == region))
    starts, stops, first, unit = _shard_boxes(plan, blocks, rows)
    at = offset_bytes - first
    flat = at // unit
    volume = np.ones(len(rows), np.int64)
    for a, b in zip(starts, stops, strict=True):
        volume = volume * (b - a)
    inside = (at >= 0) & (flat < volume)
    points: list[Int64] = []
    rest = np.where(inside, flat, 0)
    for a, b in zip(reversed(starts), reversed(stops), strict=True):
        points.insert(0, a + rest % (b - a))
        rest = rest // (b - a)
    return _destinations(plan, blocks, rows[inside], [p[inside] for p in points])


def _buffer_number(plan: Plan, buffer: str, byte: int) -> int:
    number = plan.buffers.index_of.get(buffer)
    if number is None:
        raise PlanError(f"buffer {buffer!r} is not in the plan", got=buffer)
    size = int(plan.buffer_bytes[number])
    if not 0 <= byte < size:
        raise PlanError(f"buffer {buffer!r}: byte {byte}; expected 0 to {size - 1}", got=byte, expected=size - 1)
    return number


def _dst_unit(plan: Plan, blocks: Blocks, rows: Int64) -> Int64:
    """Bytes of a destination unit: an element, or a byte of packed ones."""
    return np.maximum(plan.buffers.bits[blocks.buffer[rows]] // 8, 1)


def _solve(offset: Int64, count: Sequence[Int64], stride: Sequence[Int64], unit: Int64) -> tuple[Bool, list[Int64]]:
    """Find k with ``offset - sum(k * stride)`` in [0, unit), row by row; also whether there is one.

    Negative strides are walked from their far end. Strides of one row nest (a certified view is injective) unless they
    interleave; then every k of the smaller dims is tried.
    """
    n_rows, n_dims = len(offset), len(count)
    rest, size = offset.copy(), [np.abs(s) for s in stride]
    for c, s in zip(count, stride, strict=True):
        rest -= np.where(s < 0, (c - 1) * s, 0)
    table = np.stack(size) if n_dims else np.zeros((0, n_rows), np.int64)
    counts = np.stack(count) if n_dims else table
    table = np.where(counts > 1, table, 0)
    order = np.argsort(-table, axis=0, kind="stable")
    steps = np.zeros_like(table)
    columns = np.arange(n_rows)
    done = np.zeros(n_rows, np.bool_)
    for position in range(n_rows):
        picked: list[int] = []
        done[position] = _peel(
            int(rest[position]),
            [int(table[d, position]) for d in order[:, position]],
            [int(counts[d, position]) for d in order[:, position]],
            int(unit[position]),
            picked,
        )
        if done[position]:
            steps[order[:, position], position] = picked
    out = []
    for d in range(n_dims):
        k = steps[d, columns]
        out.append(np.where(stride[d] < 0, count[d] - 1 - k, k))
    return done, out


def _peel(rest: int, strides: list[int], counts: list[int], unit: int, picked: list[int]) -> bool:
    """Depth first over dims of falling stride; bounds on what smaller dims can reach prune all but a path."""
    if rest < 0:
        return False
    if not strides:
        return rest < unit
    stride, count = strides[0], counts[0]
    if stride == 0:
        picked.append(0)
        if _peel(rest, strides[1:], counts[1:], unit, picked):
            return True
        picked.pop()
        return False
    reach = sum(s * (c - 1) for s, c in zip(strides[1:], counts[1:], strict=True)) + unit - 1
    highest = min(count - 1, rest // stride)
    lowest = max(0, -(-(rest - reach) // stride))
    for k in range(highest, lowest - 1, -1):
        picked.append(k)
        if _peel(rest - k * stride, strides[1:], counts[1:], unit, picked):
            return True
        picked.pop()
    return False


def _shard_boxes(plan: Plan, blocks: Blocks, rows: Int64) -> tuple[list[Int64], list[Int64], Int64, Int64]:
    """Boxes of the shards that blocks read, in units; each shard's first byte, and the bytes of a unit."""
    n_dims = len(blocks.count)
    start = [np.zeros(len(rows), np.int64) for _ in range(n_dims)]
    stop = [np.ones(len(rows), np.int64) for _ in range(n_dims)]
    first, unit = np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64)
    tensor = _block_tensors(plan, blocks)[rows]
    bits = plan.sources.tensors.bits[tensor]
    pack = np.where(bits < 8, 8 // np.minimum(bits, 8), 1)
    for number in np.unique(blocks.part[rows]).tolist():
        mine = np.flatnonzero(blocks.part[rows] == number)
        part = plan.sources.parts[number]
        shard = blocks.row[rows[mine]]
        box = part.geometry_id[shard]
        first[mine] = part.offset_bytes[shard]
        for back in range(1, part.geometries.n_dims + 1):
            start[-back][mine] = part.geometries.start[-back][box]
            stop[-back][mine] = part.geometries.stop[-back][box]
    if n_dims:
        start[-1], stop[-1] = start[-1] // pack, stop[-1] // pack
    unit = np.maximum(bits // 8, 1)
    return start, stop, first, unit


def _block_tensors(plan: Plan, blocks: Blocks) -> Int64:
    """Union tensor id of each block."""
    out = np.zeros(len(blocks), np.int64)
    for number in np.unique(blocks.part).tolist():
        mine = np.flatnonzero(blocks.part == number)
        ids = plan.sources.parts[number].tensor_id[blocks.row[mine]]
        id_map = plan.sources.id_maps[number]
        out[mine] = ids if id_map is None else id_map[ids]
    return out


def _origin(plan: Plan, blocks: Blocks, row: int, k: list[int], buffer: str, byte: int) -> Origin:
    one = np.array([row])
    starts, stops, first, unit = _shard_boxes(plan, blocks, one)
    point = [int(a[row]) + int(s[row]) * i for a, s, i in zip(blocks.start, blocks.step, k, strict=True)]
    flat = begin = 0
    for x, y, a, b in zip(point, (int(c[row]) for c in blocks.start), starts, stops, strict=True):
        flat = flat * int(b[0] - a[0]) + x - int(a[0])
        begin = begin * int(b[0] - a[0]) + y - int(a[0])
    tensors = plan.sources.tensors
    tensor = int(_block_tensors(plan, blocks)[row])
    size = int(unit[0])
    staging = int(blocks.staging_offset_bytes[row])
    return Origin(
        buffer,
        byte,
        "copy",
        int(blocks.request[row]),
        tensors.name(tensor),
        _element(tensors, tensor, point),
        plan.holders[int(blocks.holder[row])].name,
        int(blocks.region[row]),
        int(first[0]) + flat * size,
        size,
        int(blocks.wave[row]),
        staging if staging < 0 else staging + (flat - begin) * size,
    )


def _element(tensors: TensorDict, tensor: int, point: Sequence[int]) -> tuple[int, ...]:
    """Coordinates as published: unpadded, the last one in elements where the plan counts bytes of packed ones."""
    rank = int(tensors.ndim[tensor])
    out = list(point[len(point) - rank :])
    if out:
        out[-1] *= dtype(tensors.dtype_label(tensor)).pack
    return tuple(out)


def _other_origin(plan: Plan, number: int, buffer: str, byte: int) -> Origin:
    fills = plan.fills
    rows = np.flatnonzero(fills.buffer == number)
    found, _ = _solve(
        byte - fills.dst_offset_bytes[rows],
        [c[rows] for c in fills.count],
        [s[rows] for s in fills.dst_stride_bytes],
        fills.unit[rows],
    )
    for position in np.flatnonzero(found).tolist():
        row = int(rows[position])
        return Origin(buffer, byte, "fill", int(fills.request[row]), value=fills.values[row])
    reads = plan.reads
    if number < len(reads.buffers):
        own = np.flatnonzero((reads.kind == KIND_MATERIALISED) & (reads.buffer_id == number))
        bits = int(reads.buffers.bits[number])
        found, _ = _solve(
            byte - reads.dst_offset[own] * bits // 8,
            [c[own] for c in reads.count],
            [s[own] * bits // 8 for s in reads.dst_stride],
            np.full(len(own), max(1, bits // 8)),
        )
        for position in np.flatnonzero(found).tolist():
            return Origin(buffer, byte, "loader", int(own[position]))
    return Origin(buffer, byte, "unwritten")


def _destinations(plan: Plan, blocks: Blocks, rows: Int64, point: Sequence[Int64]) -> list[Destination]:
    """Blocks among `rows` whose box holds the point, and where they bring it."""
    inside = np.ones(len(rows), np.bool_)
    offset = blocks.dst_offset_bytes[rows].copy()
    for back in range(1, len(blocks.count) + 1):
        x = point[-back] if back <= len(point) else np.zeros(len(rows), np.int64)
        away = x - blocks.start[-back][rows]
        k = away // blocks.step[-back][rows]
        inside &= (away % blocks.step[-back][rows] == 0) & (k >= 0) & (k < blocks.count[-back][rows])
        offset += k * blocks.dst_stride_bytes[-back][rows]
    unit = _dst_unit(plan, blocks, rows)
    found = [
        Destination(
            plan.buffers.name(int(blocks.buffer[rows[i]])),
            int(offset[i]),
            int(unit[i]),
            int(blocks.request[rows[i]]),
            plan.holders[int(blocks.holder[rows[i]])].name,
        )
        for i in np.flatnonzero(inside).tolist()
    ]
    order = {name: number for number, name in enumerate(plan.buffers.names_list)}
    return sorted(found, key=lambda place: (order[place.buffer], place.first_byte))
