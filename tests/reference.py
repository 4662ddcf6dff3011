"""The planner, written the slow and obvious way: element by element, in plain Python.

It answers, for a small scenario, what every destination byte must hold and why, or which kind of error the
tables deserve. It shares no code, no types and no arithmetic with ``planner/``: coordinates are walked with
``itertools.product``, bytes are moved one element at a time, dtypes are cast with ``struct``.

The scenario is also what the strategies draw and what the tests turn into the planner's own tables.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ITEM_BITS = {
    "bool": 8,
    "uint8": 8,
    "int8": 8,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "bfloat16": 16,
    "float16": 16,
    "int16": 16,
    "float32": 32,
    "int32": 32,
    "float64": 64,
    "int64": 64,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
}

UNTOUCHED = 0xA5
"""What destination buffers hold before anything is written."""


@dataclass(frozen=True)
class RefTensor:
    """A source tensor: `shape` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RefShard:
    """A box that `holder` keeps, packed row-major at byte `offset` of its region `region`."""

    holder: str
    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    region: int
    offset: int
    group: int = -1
    layout: str = "default"
    claim: str = ""


@dataclass(frozen=True)
class RefBuffer:
    """A destination buffer, packed row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RefRequest:
    """A copy (or, with `value`, a fill) in source-aligned form; destination numbers in elements."""

    tensor: str
    start: tuple[int, ...]
    step: tuple[int, ...]
    count: tuple[int, ...]
    buffer: int
    dst_offset: int
    dst_stride: tuple[int, ...]
    order: int = 0
    value: bytes | None = None


@dataclass
class Scenario:
    """Everything that a plan is made from, and the true content of each tensor."""

    tensors: dict[str, RefTensor] = field(default_factory=dict)
    region_bytes: dict[str, list[int]] = field(default_factory=dict)
    shards: list[RefShard] = field(default_factory=list)
    buffers: list[RefBuffer] = field(default_factory=list)
    requests: list[RefRequest] = field(default_factory=list)
    content: dict[str, bytes] = field(default_factory=dict)

    def holders(self) -> list[str]:
        return list(self.region_bytes)


def n_elems(shape: Sequence[int]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def n_bytes(dtype: str, shape: Sequence[int]) -> int:
    return (n_elems(shape) * ITEM_BITS[dtype] + 7) // 8


def points(start: Sequence[int], stop: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every coordinate of a box, in row-major order."""
    return itertools.product(*(range(a, b) for a, b in zip(start, stop, strict=True)))


def flat(shape: Sequence[int], point: Sequence[int]) -> int:
    """The row-major index of a coordinate."""
    index = 0
    for extent, coord in zip(shape, point, strict=True):
        index = index * extent + coord
    return index


class Bits:
    """Memory addressed by element; elements of 4 bits lie low nibble first."""

    def __init__(self, data: bytearray, bits: int) -> None:
        self.data, self.bits = data, bits

    def get(self, byte_offset: int, index: int) -> bytes:
        if self.bits < 8:
            position = byte_offset * 8 + index * self.bits
            return bytes([(self.data[position // 8] >> (position % 8)) & ((1 << self.bits) - 1)])
        size = self.bits // 8
        first = byte_offset + index * size
        if first + size > len(self.data):
            raise IndexError(f"element {index} at byte {first} is outside {len(self.data)} bytes")
        return bytes(self.data[first : first + size])

    def put(self, byte_offset: int, index: int, value: bytes) -> None:
        if self.bits < 8:
            position = byte_offset * 8 + index * self.bits
            mask = ((1 << self.bits) - 1) << (position % 8)
            self.data[position // 8] = (self.data[position // 8] & ~mask) | (value[0] << (position % 8))
            return
        size = self.bits // 8
        first = byte_offset + index * size
        if first + size > len(self.data):
            raise IndexError(f"element {index} at byte {first} is outside {len(self.data)} bytes")
        self.data[first : first + size] = value


def memory_of(scenario: Scenario) -> dict[str, list[bytearray]]:
    """What the holders' regions contain: each shard's elements, and 0xEE in between."""
    memory = {holder: [bytearray([0xEE]) * size for size in sizes] for holder, sizes in scenario.region_bytes.items()}
    for shard in scenario.shards:
        tensor = scenario.tensors[shard.tensor]
        bits = ITEM_BITS[tensor.dtype]
        whole = Bits(bytearray(scenario.content[shard.tensor]), bits)
        local = Bits(memory[shard.holder][shard.region], bits)
        for index, point in enumerate(points(shard.start, shard.stop)):
            local.put(shard.offset, index, whole.get(0, flat(tensor.shape, point)))
    return memory


@dataclass(frozen=True)
class Location:
    """One place where a source element can be read."""

    holder: str
    region: int
    byte_offset: int
    element: tuple[int, ...]


def locations(scenario: Scenario, tensor: str) -> dict[tuple[int, ...], list[Location]]:
    """For each element of a tensor that anyone holds: every place that holds it."""
    bits = ITEM_BITS[scenario.tensors[tensor].dtype]
    found: dict[tuple[int, ...], list[Location]] = {}
    for shard in scenario.shards:
        if shard.tensor != tensor:
            continue
        for index, point in enumerate(points(shard.start, shard.stop)):
            place = Location(shard.holder, shard.region, shard.offset + index * bits // 8, point)
            found.setdefault(point, []).append(place)
    return found


@dataclass(frozen=True)
class Write:
    """Who writes one destination element, last in program order."""

    request: int
    element: tuple[int, ...] | None


def steps_of(request: RefRequest) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every (source coordinate, destination element) of a request."""
    for k in itertools.product(*(range(count) for count in request.count)):
        source = tuple(a + s * i for a, s, i in zip(request.start, request.step, k, strict=True))
        yield source, request.dst_offset + sum(d * i for d, i in zip(request.dst_stride, k, strict=True))


def writers(scenario: Scenario) -> tuple[list[dict[int, Write]], bool]:
    """Per buffer: destination element -> last writer; and whether two writers of one have no order."""
    result: list[dict[int, Write]] = [{} for _ in scenario.buffers]
    clash = False
    order_at: list[dict[int, set[int]]] = [{} for _ in scenario.buffers]
    for index in sorted(range(len(scenario.requests)), key=lambda i: scenario.requests[i].order):
        request = scenario.requests[index]
        for source, element in steps_of(request):
            seen = order_at[request.buffer].setdefault(element, set())
            clash = clash or request.order in seen
            seen.add(request.order)
            result[request.buffer][element] = Write(index, None if request.value is not None else source)
    return result, clash


def missing(scenario: Scenario) -> dict[str, set[tuple[int, ...]]]:
    """Source elements that end up in a buffer and that nobody holds, by tensor."""
    gaps: dict[str, set[tuple[int, ...]]] = {}
    held = {name: locations(scenario, name) for name in scenario.tensors}
    owners, _ = writers(scenario)
    for owner in owners:
        for write in owner.values():
            name = scenario.requests[write.request].tensor
            if write.element is not None and write.element not in held[name]:
                gaps.setdefault(name, set()).add(write.element)
    return gaps


def expected_buffers(scenario: Scenario) -> list[bytes]:
    """What each destination buffer holds after the plan ran."""
    result = []
    owners, _ = writers(scenario)
    for buffer, owner in zip(scenario.buffers, owners, strict=True):
        bits = ITEM_BITS[buffer.dtype]
        data = Bits(bytearray([UNTOUCHED]) * n_bytes(buffer.dtype, buffer.shape), bits)
        for element, write in owner.items():
            request = scenario.requests[write.request]
            if write.element is None:
                if request.value is None:
                    raise ValueError("a fill has a value")
                data.put(0, element, request.value)
                continue
            tensor = scenario.tensors[request.tensor]
            whole = Bits(bytearray(scenario.content[tensor.name]), ITEM_BITS[tensor.dtype])
            value = whole.get(0, flat(tensor.shape, write.element))
            data.put(0, element, cast_one(tensor.dtype, buffer.dtype, value))
        result.append(bytes(data.data))
    return result


@dataclass(frozen=True)
class Totals:
    """Bytes of the certificate."""

    written: int
    filled: int
    unwritten: int


def totals(scenario: Scenario) -> Totals:
    """How many destination bytes are copied, filled, and never written."""
    written_bits = filled_bits = unwritten_bits = 0
    owners, _ = writers(scenario)
    for buffer, owner in zip(scenario.buffers, owners, strict=True):
        bits = ITEM_BITS[buffer.dtype]
        filled = sum(1 for write in owner.values() if write.element is None)
        written_bits += (len(owner) - filled) * bits
        filled_bits += filled * bits
        unwritten_bits += (n_elems(buffer.shape) - len(owner)) * bits
    return Totals(written_bits // 8, filled_bits // 8, unwritten_bits // 8)


def cast_one(src: str, dst: str, value: bytes) -> bytes:
    """Cast one element, little-endian, to nearest even."""
    if src == dst:
        return value
    pair = (src, dst)
    if pair == ("bfloat16", "float32"):
        return b"\x00\x00" + value
    if pair == ("float32", "bfloat16"):
        return _round_to_bfloat16(value)
    if pair == ("float16", "float32"):
        return struct.pack("<f", struct.unpack("<e", value)[0])
    if pair == ("float32", "float64"):
        return struct.pack("<d", struct.unpack("<f", value)[0])
    if pair == ("bfloat16", "float64"):
        return struct.pack("<d", struct.unpack("<f", b"\x00\x00" + value)[0])
    raise NotImplementedError(f"the reference does not cast {src} to {dst}")


CASTS = [
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("float16", "float32"),
    ("float32", "float64"),
    ("bfloat16", "float64"),
]


def _round_to_bfloat16(value: bytes) -> bytes:
    (bits,) = struct.unpack("<I", value)
    keep, rest = bits >> 16, bits & 0xFFFF
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        return struct.pack("<H", keep | 0x40)
    if rest > 0x8000 or (rest == 0x8000 and keep & 1):
        keep += 1
    return struct.pack("<H", keep)
