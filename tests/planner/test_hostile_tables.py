"""Tables from the wire are hostile: break one rule of a drawn, valid table at a time; each has an error of its own.

Every mutation takes the columns of a valid dictionary or part and a position, and returns the columns with one rule
broken there. The untouched columns must build, so that a refusal can only come from the rule that was broken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.planner.dictionaries import TensorDict
from reshard.planner.dtypes import dtype
from reshard.planner.errors import ConflictError, DTypeError, TableError
from reshard.planner.geometries import GeometryDict
from reshard.planner.packed_names import PackedNames
from reshard.planner.shards import Holder, Shard, ShardPart
from reshard.planner.tables import ShardTable

Ints = npt.NDArray[np.int64]
BIG = np.iinfo(np.int64).max


@dataclass
class Columns:
    """The columns of one part and of its two dictionaries, writable."""

    names: bytes
    dtype_code: Ints
    tensor_ndim: Ints
    shape: list[Ints]
    box_ndim: Ints
    start: list[Ints]
    stop: list[Ints]
    tensor_id: Ints
    geometry_id: Ints
    region: Ints
    offset_bytes: Ints
    replica_group: Ints
    region_bytes: Ints

    def tensors(self) -> TensorDict:
        return TensorDict(PackedNames(self.names), self.dtype_code, self.tensor_ndim, tuple(self.shape))

    def geometries(self) -> GeometryDict:
        return GeometryDict(self.box_ndim, tuple(self.start), tuple(self.stop))

    def part(self, holder: str = "trainer-0") -> ShardPart:
        return ShardPart(
            Holder(holder),
            self.tensors(),
            self.geometries(),
            self.tensor_id,
            self.geometry_id,
            self.region,
            self.offset_bytes,
            self.replica_group,
            self.region_bytes,
        )


def columns_of(part: ShardPart) -> Columns:
    def own(values: npt.NDArray[np.int64]) -> Ints:
        return np.array(values, np.int64)

    return Columns(
        part.tensors.names.blob,
        own(part.tensors.dtype_code),
        own(part.tensors.ndim),
        [own(dim) for dim in part.tensors.shape],
        own(part.geometries.ndim),
        [own(dim) for dim in part.geometries.start],
        [own(dim) for dim in part.geometries.stop],
        own(part.tensor_id),
        own(part.geometry_id),
        own(part.region),
        own(part.offset_bytes),
        own(part.replica_group),
        own(part.region_bytes),
    )


@st.composite
def parts(draw: st.DrawFn, dtypes: tuple[str, ...] = ("bfloat16", "float32", "uint8")) -> Columns:
    """A valid part: tensors of mixed rank cut in two on their first dim, in two regions."""
    shards = []
    used = [0, 0]
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        label = draw(st.sampled_from(dtypes))
        middle = draw(st.integers(0, shape[0])) if shape else 0
        boxes = [((), ())]
        if shape:
            zeros = (0,) * (len(shape) - 1)
            boxes = [((0, *zeros), (middle, *shape[1:])), ((middle, *zeros), shape)]
        for start, stop in boxes:
            region = draw(st.integers(0, 1))
            shards.append(Shard(f"w.{index}", label, shape, start, stop, region, used[region]))
            size = dtype(label).bits // 8
            for a, b in zip(start, stop, strict=True):
                size *= b - a
            used[region] += size
    return columns_of(ShardPart.from_shards(Holder("trainer-0"), shards, used))


Mutation = Callable[[Columns, st.DrawFn], None]


def _at(draw: st.DrawFn, array: npt.NDArray[np.int64]) -> int:
    assume(len(array) > 0)
    return draw(st.integers(0, len(array) - 1))


def _set(name: str, values: st.SearchStrategy[int]) -> Mutation:
    def mutate(columns: Columns, draw: st.DrawFn) -> None:
        array = getattr(columns, name)
        array[_at(draw, array)] = draw(values)

    return mutate


def _set_dim(name: str, values: st.SearchStrategy[int]) -> Mutation:
    """Change one cell of one *real* (unpadded) dim."""

    def mutate(columns: Columns, draw: st.DrawFn) -> None:
        dims = getattr(columns, name)
        ndim = columns.tensor_ndim if name == "shape" else columns.box_ndim
        cells = [(d, i) for d in range(len(dims)) for i in range(len(ndim)) if d >= len(dims) - ndim[i]]
        assume(cells)
        d, i = draw(st.sampled_from(cells))
        dims[d][i] = draw(values)

    return mutate


def _set_padding(name: str, values: st.SearchStrategy[int]) -> Mutation:
    def mutate(columns: Columns, draw: st.DrawFn) -> None:
        dims = getattr(columns, name)
        ndim = columns.tensor_ndim if name == "shape" else columns.box_ndim
        cells = [(d, i) for d in range(len(dims)) for i in range(len(ndim)) if d < len(dims) - ndim[i]]
        assume(cells)
        d, i = draw(st.sampled_from(cells))
        dims[d][i] = draw(values)

    return mutate


def _box_outside(columns: Columns, draw: st.DrawFn) -> None:
    """A box that some shard uses grows over its tensor's end, on any real dim."""
    row = _at(draw, columns.tensor_id)
    box, tensor = columns.geometry_id[row], columns.tensor_id[row]
    rank = columns.box_ndim[box]
    assume(rank > 0)
    dim = draw(st.integers(1, int(rank)))
    columns.stop[-dim][box] = columns.shape[-dim][tensor] + draw(st.sampled_from([1, 2, 1 << 31, 1 << 62]))


def _beyond_region(columns: Columns, draw: st.DrawFn) -> None:
    row = _at(draw, columns.tensor_id)
    box = columns.geometry_id[row]
    assume(all(columns.stop[d][box] > columns.start[d][box] for d in range(len(columns.start))))
    columns.offset_bytes[row] = draw(
        st.sampled_from([columns.region_bytes[columns.region[row]], BIG - 1, BIG, BIG - 8])
    )


def _words(names: bytes) -> list[bytes]:
    """The names as they are packed, each with its padding."""
    return re.findall(rb"[^\0]+\0{1,8}", names)


def _duplicate_name(columns: Columns, draw: st.DrawFn) -> None:
    names = _words(columns.names)
    assume(len(names) > 1)
    one, other = draw(st.permutations(range(len(names))))[:2]
    names[one] = names[other]
    columns.names = b"".join(names)


def _insert_name(name: bytes) -> Mutation:
    def mutate(columns: Columns, draw: st.DrawFn) -> None:
        names = _words(columns.names)
        names.insert(draw(st.integers(0, len(names))), name + b"\0" * (8 - len(name) % 8))
        columns.names = b"".join(names)

    return mutate


def _byte_in_name(byte: int) -> Mutation:
    """Change a byte of a name, not the last one of it or of a word: that would be a shorter name, or two."""

    def mutate(columns: Columns, draw: st.DrawFn) -> None:
        names = columns.names
        inner = [i for i in range(len(names) - 1) if names[i] and names[i + 1] and i % 8 != 7]
        at = draw(st.sampled_from(inner))
        columns.names = names[:at] + bytes([byte]) + names[at + 1 :]

    return mutate


def _cut_names(columns: Columns, draw: st.DrawFn) -> None:
    columns.names = columns.names[: -draw(st.integers(1, 7))]


def _no_end(columns: Columns, draw: st.DrawFn) -> None:
    columns.names += b"unending"


def _shorten(name: str) -> Mutation:
    def mutate(columns: Columns, draw: st.DrawFn) -> None:
        array = getattr(columns, name)
        assume(len(array) > 0)
        setattr(columns, name, array[:-1] if draw(st.booleans()) else np.append(array, array[-1]))

    return mutate


def _shorten_dim(name: str) -> Mutation:
    def mutate(columns: Columns, draw: st.DrawFn) -> None:
        dims = getattr(columns, name)
        assume(dims)
        dims[draw(st.integers(0, len(dims) - 1))] = np.ones(len(dims[0]) + 1, np.int64)

    return mutate


def _huge_tensor(columns: Columns, draw: st.DrawFn) -> None:
    """Every extent is a legal int64, their product is not."""
    candidates = [i for i in range(len(columns.tensor_ndim)) if columns.tensor_ndim[i] > 1]
    assume(candidates)
    tensor = draw(st.sampled_from(candidates))
    for dim in range(1, int(columns.tensor_ndim[tensor]) + 1):
        columns.shape[-dim][tensor] = draw(st.sampled_from([1 << 32, 1 << 40, (1 << 62) - 1]))


NEGATIVE = st.sampled_from([-1, -2, -(1 << 31), np.iinfo(np.int64).min])
LARGE = st.sampled_from([1 << 20, 1 << 31, 1 << 62, BIG])
OUTSIDE = st.one_of(NEGATIVE, LARGE)

RULES: list[tuple[str, Mutation, type[Exception], str]] = [
    ("names are no whole words", _cut_names, TableError, "whole words"),
    ("the last name has no end", _no_end, TableError, "does not end"),
    ("there is a name too many", _insert_name(b"another"), TableError, "names has"),
    ("a name is empty", _insert_name(b""), TableError, "name of 0 bytes"),
    ("a name is too long", _insert_name(b"n" * 4097), TableError, "name of 4097 bytes"),
    ("a name holds NUL", _byte_in_name(0), TableError, "NUL"),
    ("a name is not UTF-8", _byte_in_name(0xFF), TableError, "UTF-8"),
    ("two tensors have one name", _duplicate_name, TableError, "twice"),
    ("a dtype code is unknown", _set("dtype_code", st.one_of(OUTSIDE, st.just(0))), DTypeError, "dtype code"),
    ("a rank is out of range", _set("tensor_ndim", OUTSIDE), TableError, "rank"),
    ("an extent is negative", _set_dim("shape", NEGATIVE), TableError, r"dim \d+: size"),
    ("padding of a shape is not 1", _set_padding("shape", st.sampled_from([0, 2, -1, BIG])), TableError, "padding"),
    ("a tensor is larger than 2^62 bytes", _huge_tensor, TableError, r"2\*\*"),
    ("shape columns differ in length", _shorten_dim("shape"), TableError, r"shape\[\d\] has"),
    ("dtype column has another length", _shorten("dtype_code"), TableError, "dtype_code has"),
    ("a box starts before 0", _set_dim("start", NEGATIVE), TableError, "start"),
    ("a box stops before it starts", _set_dim("stop", NEGATIVE), TableError, "start <= stop"),
    ("padding of a box is not [0, 1)", _set_padding("stop", st.sampled_from([0, 2, BIG])), TableError, "geometry"),
    ("box columns differ in length", _shorten_dim("start"), TableError, "column has"),
    ("a box has a rank out of range", _set("box_ndim", OUTSIDE), TableError, "rank"),
    ("a box leaves its tensor", _box_outside, TableError, "outside the global size"),
    ("a tensor id is out of range", _set("tensor_id", OUTSIDE), TableError, "tensor_id"),
    ("a geometry id is out of range", _set("geometry_id", OUTSIDE), TableError, "geometry_id"),
    ("an offset is negative", _set("offset_bytes", NEGATIVE), TableError, "offset"),
    ("a shard leaves its region", _beyond_region, TableError, "outside region"),
    ("a region has a negative size", _set("region_bytes", NEGATIVE), TableError, "region 0 has|region 1 has"),
    ("a replica group is under -1", _set("replica_group", st.sampled_from([-2, -(1 << 62)])), TableError, "group"),
    *(
        (f"column {name} has another length", _shorten(name), TableError, name)
        for name in ("geometry_id", "region", "offset_bytes", "replica_group")
    ),
]


@pytest.mark.parametrize(("mutate", "error", "message"), [rule[1:] for rule in RULES], ids=[r[0] for r in RULES])
@given(data=st.data())
def test_one_broken_rule_is_refused_by_its_own_error(
    mutate: Mutation, error: type[Exception], message: str, data: st.DataObject
) -> None:
    columns = data.draw(parts())
    columns.part()
    mutate(columns, data.draw)
    with pytest.raises(error, match=message):
        columns.part()


@given(data=st.data())
def test_a_region_id_out_of_range_is_refused_unless_the_shard_is_empty(data: st.DataObject) -> None:
    columns = data.draw(parts())
    row = _at(data.draw, columns.region)
    columns.region[row] = data.draw(OUTSIDE)
    box = columns.geometry_id[row]
    if all(columns.stop[d][box] > columns.start[d][box] for d in range(len(columns.start))):
        with pytest.raises(TableError, match="region"):
            columns.part()
    else:
        columns.part()


@pytest.mark.parametrize(
    "column",
    [
        np.array([0.0]),
        np.array([[0]]),
        np.array([1 << 63], np.uint64),
        np.array(["0"]),
        np.array([True]),
        np.array([None]),
    ],
    ids=["float", "2-D", "uint64 over int64", "text", "bool", "object"],
)
@pytest.mark.parametrize("name", ["tensor_id", "geometry_id", "region", "offset_bytes", "replica_group"])
def test_columns_of_other_types_are_refused(name: str, column: npt.NDArray[np.generic]) -> None:
    part = ShardPart.from_shards(Holder("a"), [Shard("w", "uint8", (4,), (0,), (4,))], [4])
    with pytest.raises((TypeError, ValueError), match=name):
        replace(part, **{name: column})


@given(parts())
def test_columns_are_frozen_and_later_writes_to_the_callers_arrays_are_not_seen_by_checks(columns: Columns) -> None:
    part = columns.part()
    for name in ("tensor_id", "geometry_id", "region", "offset_bytes", "replica_group", "region_bytes"):
        array = getattr(part, name)
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert not array.flags.writeable


SUB_BYTE = ("int4", "uint4", "float4_e2m1fn")


@pytest.mark.parametrize("label", SUB_BYTE)
@given(data=st.data())
def test_sub_byte_cuts_fall_between_bytes(label: str, data: st.DataObject) -> None:
    columns = 2 * data.draw(st.integers(1, 6))
    start, stop = sorted((data.draw(st.integers(0, columns)), data.draw(st.integers(0, columns))))
    shard = Shard("w", label, (3, columns), (0, start), (3, stop))
    inside_a_byte = start != stop and (start % 2 or stop % 2)
    if inside_a_byte:
        with pytest.raises(DTypeError, match="inside a byte"):
            ShardPart.from_shards(Holder("a"), [shard], [3 * columns])
    else:
        part = ShardPart.from_shards(Holder("a"), [shard], [3 * (stop - start) // 2])
        assert len(part) == 1


@pytest.mark.parametrize("label", SUB_BYTE)
@pytest.mark.parametrize("shape", [(), (3,), (4, 5)])
def test_sub_byte_rows_fill_whole_bytes(label: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(DTypeError, match="whole bytes"):
        TensorDict.build(["w"], [label], [shape])


# Names and labels: cases N12, D9


@pytest.mark.parametrize("name", ["", "a\0b", "\0", "n" * 4097, "é" * 2049, "\ud800"])
def test_names_that_cannot_travel_are_refused(name: str) -> None:
    with pytest.raises(TableError):
        TensorDict.build([name], ["uint8"], [(1,)])
    with pytest.raises(TableError):
        Holder(name)


@pytest.mark.parametrize("name", ["n" * 4096, "é" * 2048, "a b", "layers.0/weight", "日本"])
def test_names_round_trip(name: str) -> None:
    tensors = TensorDict.build([name, "other"], ["uint8", "uint8"], [(1,), (2,)])
    assert tensors.names_list == [name, "other"]
    assert tensors.index(name) == 0
    assert tensors.shape_of(tensors.index("other")) == (2,)


def test_composed_and_decomposed_accents_are_two_names() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    tensors = TensorDict.build([composed, decomposed], ["uint8", "uint8"], [(1,), (2,)])
    assert tensors.index(composed) != tensors.index(decomposed)


@pytest.mark.parametrize("label", ["torch.save", "bfloat17", "", "torch.bfloat16", "BFLOAT16", "float32\0"])
def test_dtype_labels_come_from_the_allow_list(label: str) -> None:
    with pytest.raises(DTypeError, match="expected one of"):
        dtype(label)
    with pytest.raises(DTypeError, match="expected one of"):
        ShardPart.from_shards(Holder("a"), [Shard("w", label, (4,), (0,), (4,))], [16])


# Agreement between holders: case G7


def one(holder: str, label: str, shape: tuple[int, ...], axes: tuple[str, ...] | None = None) -> ShardPart:
    zeros = (0,) * len(shape)
    shard = Shard("w", label, shape, zeros, zeros, axes=axes)
    return ShardPart.from_shards(Holder(holder), [shard], [0])


def differing() -> Iterator[tuple[ShardPart, ShardPart, str]]:
    yield one("a", "uint8", (6,)), one("b", "uint8", (4,)), "shape"
    yield one("a", "uint8", (6,)), one("b", "uint8", (6, 1)), "rank"
    yield one("a", "uint8", (6,)), one("b", "int8", (6,)), "dtype"
    yield one("a", "float32", (6,)), one("b", "bfloat16", (6,)), "element size"
    yield one("a", "uint8", (2, 2), ("in", "out")), one("b", "uint8", (2, 2), ("out", "in")), "axes"
    yield one("a", "uint8", (2, 2), ("in", "out")), one("b", "uint8", (2, 2)), "axes declared by one"


@pytest.mark.parametrize(("first", "second", "what"), list(differing()), ids=[case[2] for case in differing()])
def test_holders_that_disagree_are_both_named(first: ShardPart, second: ShardPart, what: str) -> None:
    for pair in ((first, second), (second, first)):
        with pytest.raises(ConflictError) as caught:
            ShardTable(pair)
        assert set(caught.value.holders) == {"a", "b"}
        for name in ("'a'", "'b'", "'w'"):
            assert name in str(caught.value)


def test_declared_size_larger_than_what_two_ranks_hold_is_accepted() -> None:
    parts_of_five = [
        ShardPart.from_shards(Holder("a"), [Shard("w", "uint8", (5,), (0,), (3,))], [3]),
        ShardPart.from_shards(Holder("b"), [Shard("w", "uint8", (5,), (3,), (5,))], [2]),
    ]
    assert ShardTable(parts_of_five).n_shards == 2


def test_two_parts_of_one_holder_are_refused() -> None:
    with pytest.raises(TableError, match="'a' has two parts"):
        ShardTable([one("a", "uint8", (6,)), one("a", "uint8", (6,))])


# Declared bytes and regions: cases D3, T8


@given(st.integers(0, 200), st.integers(0, 40))
def test_a_shard_lies_inside_one_region(offset: int, region_bytes: int) -> None:
    """Shard [90, 110) over allocations [0, 100) and [100, 200) is this with offset 90 and 100 bytes."""
    shard = Shard("w", "bfloat16", (2, 5), (0, 0), (2, 5), offset_bytes=offset)
    if offset + 20 <= region_bytes:
        ShardPart.from_shards(Holder("a"), [shard], [region_bytes])
    else:
        with pytest.raises(TableError, match="outside region 0") as caught:
            ShardPart.from_shards(Holder("a"), [shard], [region_bytes])
        assert (caught.value.got, caught.value.expected) == (offset + 20, region_bytes)


def test_ten_million_shards_are_checked_without_a_loop() -> None:
    """One part of 10^6 rows is checked; ten of them are 10^7 (the time is in benchmarks/)."""
    n = 1_000_000
    tensors = TensorDict.build([f"w.{i}" for i in range(1000)], ["bfloat16"] * 1000, [(1000, 8)] * 1000)
    geometries = GeometryDict.build([((row, 0), (row + 1, 8)) for row in range(1000)])
    tensor_id, geometry_id = np.divmod(np.arange(n), 1000)
    zeros = np.zeros(n, np.int64)
    part = ShardPart(
        Holder("a"), tensors, geometries, tensor_id, geometry_id, zeros, np.arange(n) * 16, zeros - 1, [16 * n]
    )
    assert len(part) == n
    offsets = np.arange(n) * 16
    offsets[777_777] += 16 * n
    with pytest.raises(TableError, match="shard row 777777"):
        replace(part, offset_bytes=offsets)
