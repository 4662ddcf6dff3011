"""Read tables: break one rule of a drawn, valid table at a time; each is refused by its own error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.strategies import read_table, scenarios

from reshard.planner.errors import ConflictError, DTypeError, TableError
from reshard.planner.reads import KIND_CONSTANT, Buffer, ReadRequest, ReadTable

BIG = np.iinfo(np.int64).max
NEGATIVE = st.sampled_from([-1, -(1 << 31), np.iinfo(np.int64).min])
LARGE = st.sampled_from([1 << 20, 1 << 40, 1 << 62, BIG])
Mutation = Callable[[ReadTable, st.DrawFn], ReadTable]


def _copy_row(table: ReadTable, draw: st.DrawFn) -> int:
    return draw(st.sampled_from(np.flatnonzero(table.kind != KIND_CONSTANT).tolist()))


def _changed(column: np.ndarray, row: int, value: int) -> np.ndarray:
    out = np.array(column)
    out[row] = value
    return out


def _set(name: str, values: st.SearchStrategy[int]) -> Mutation:
    def mutate(table: ReadTable, draw: st.DrawFn) -> ReadTable:
        row = _copy_row(table, draw)
        return dataclasses.replace(table, **{name: _changed(getattr(table, name), row, draw(values))})

    return mutate


def _set_dim(name: str, values: st.SearchStrategy[int]) -> Mutation:
    def mutate(table: ReadTable, draw: st.DrawFn) -> ReadTable:
        row = _copy_row(table, draw)
        rank = int(table.tensors.ndim[table.tensor_id[row]])
        assume(rank > 0)
        dims = list(getattr(table, name))
        dim = draw(st.integers(len(dims) - rank, len(dims) - 1))
        dims[dim] = _changed(dims[dim], row, draw(values))
        return dataclasses.replace(table, **{name: tuple(dims)})

    return mutate


def _one_too_many(table: ReadTable, draw: st.DrawFn) -> ReadTable:
    """The view's last coordinate moves just past the tensor's end."""
    row = _copy_row(table, draw)
    tensor = int(table.tensor_id[row])
    rank = int(table.tensors.ndim[tensor])
    assume(rank > 0)
    back = draw(st.integers(1, rank))
    size = int(table.tensors.shape[-back][tensor])
    start, step = int(table.start[-back][row]), int(table.step[-back][row])
    dims = list(table.count)
    dims[-back] = _changed(dims[-back], row, (size - 1 - start) // step + 2)
    return dataclasses.replace(table, count=tuple(dims))


def _past_the_buffer(table: ReadTable, draw: st.DrawFn) -> ReadTable:
    row = _copy_row(table, draw)
    limit = int(table.buffer_bytes[table.buffer_id[row]] * 8 // table.buffers.bits[table.buffer_id[row]])
    reach = sum(int((c[row] - 1) * s[row]) for c, s in zip(table.count, table.dst_stride, strict=True))
    return dataclasses.replace(table, dst_offset=_changed(table.dst_offset, row, limit - reach))


def _wrapping_stride(table: ReadTable, draw: st.DrawFn) -> ReadTable:
    """A stride whose product with the count comes back into range modulo 2^64."""
    row = _copy_row(table, draw)
    dims = list(table.dst_stride)
    wide = [d for d in range(len(dims)) if table.count[d][row] > 3]
    assume(wide)
    dim = draw(st.sampled_from(wide))
    dims[dim] = _changed(dims[dim], row, (1 << 64) // int(table.count[dim][row] - 1))
    return dataclasses.replace(table, dst_stride=tuple(dims))


def _backwards(table: ReadTable, draw: st.DrawFn) -> ReadTable:
    """A view that runs backwards, from one element too early."""
    row = _copy_row(table, draw)
    wide = [d for d in range(table.n_dims) if table.count[d][row] > 1]
    assume(wide)
    dim = draw(st.sampled_from(wide))
    dims = [_changed(strides, row, 0) for strides in table.dst_stride]
    dims[dim] = _changed(dims[dim], row, -1)
    offset = _changed(table.dst_offset, row, int(table.count[dim][row]) - 2)
    return dataclasses.replace(table, dst_stride=tuple(dims), dst_offset=offset)


def _far_stride(table: ReadTable, draw: st.DrawFn) -> ReadTable:
    row = _copy_row(table, draw)
    wide = [d for d in range(table.n_dims) if table.count[d][row] > 1]
    assume(wide)
    dims = list(table.dst_stride)
    dim = draw(st.sampled_from(wide))
    dims[dim] = _changed(dims[dim], row, draw(st.sampled_from([-(1 << 40), -(1 << 62), -(1 << 63), 1 << 62])))
    return dataclasses.replace(table, dst_stride=tuple(dims))


RULES: list[tuple[str, Mutation, str]] = [
    ("a tensor id is out of range", _set("tensor_id", st.one_of(NEGATIVE, LARGE)), "tensor id"),
    ("a buffer id is out of range", _set("buffer_id", st.one_of(NEGATIVE, LARGE)), "buffer id"),
    ("a kind is unknown", _set("kind", st.one_of(NEGATIVE, LARGE, st.just(3))), "kind"),
    ("a destination offset is negative", _set("dst_offset", NEGATIVE), "destination offset"),
    ("a destination offset is past the end", _set("dst_offset", LARGE), "destination"),
    ("a view ends just past its buffer", _past_the_buffer, "last destination element"),
    ("a step is under 1", _set_dim("step", st.one_of(NEGATIVE, st.just(0))), "step"),
    ("a start is negative", _set_dim("start", NEGATIVE), "start"),
    ("a start is past the end", _set_dim("start", LARGE), "elements requested"),
    ("a count is negative", _set_dim("count", NEGATIVE), "count"),
    ("a count is past the end", _set_dim("count", LARGE), "elements requested"),
    ("a view ends just past its tensor", _one_too_many, "elements requested"),
    ("a view starts before its buffer", _backwards, "first destination element"),
    ("a stride reaches far back", _far_stride, "destination"),
    ("a stride wraps around 2^64", _wrapping_stride, "destination"),
]


@pytest.mark.parametrize(("mutate", "message"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES])
@given(data=st.data())
def test_one_broken_rule_is_refused_by_its_own_error(mutate: Mutation, message: str, data: st.DataObject) -> None:
    table = read_table(data.draw(scenarios(casts=False)))
    broken = None
    with pytest.raises(TableError, match=message):
        broken = mutate(table, data.draw)
    assert broken is None


@given(scenarios())
def test_valid_tables_keep_their_digest_and_columns_are_frozen(scenario: object) -> None:
    table = read_table(scenario)
    again = dataclasses.replace(table)
    assert again.digest == table.digest
    for name in ("tensor_id", "buffer_id", "dst_offset", "order", "kind"):
        assert not getattr(table, name).flags.writeable
    rows = np.arange(len(table))
    assert table.take(rows).digest == table.digest
    assert ReadTable.concat([table]).requested_bytes == table.requested_bytes


def request(**changed: object) -> ReadRequest:
    base = ReadRequest("w", (4, 2), "bfloat16", (0, 0), (1, 1), (4, 2), 0, 0, (2, 1))
    return dataclasses.replace(base, **changed)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"start": (0,)}, TableError, "ranks"),
        ({"count": (4, 2, 1)}, TableError, "ranks"),
        ({"kind": "move"}, TableError, "kind 'move'"),
        ({"tensor_dtype": "bfloat17"}, DTypeError, "bfloat17"),
        ({"tensor": ""}, TableError, "empty"),
        ({"kind": "constant", "value": b""}, DTypeError, "constant of 0 bytes; expected 2"),
        ({"kind": "constant", "value": b"abcd"}, DTypeError, "constant of 4 bytes; expected 2"),
    ],
)
def test_requests_in_object_form_are_checked(changed: dict[str, object], error: type[Exception], message: str) -> None:
    buffers = [Buffer("p", (4, 2), "bfloat16")]
    ReadTable.build(buffers, [request()])
    with pytest.raises(error, match=message):
        ReadTable.build(buffers, [request(**changed)])


def test_requests_that_disagree_about_a_tensor_are_refused() -> None:
    buffers = [Buffer("p", (8, 2), "bfloat16")]
    with pytest.raises(ConflictError, match="'w'"):
        ReadTable.build(buffers, [request(), request(tensor_shape=(5, 2), dst_offset_elems=8)])
    with pytest.raises(ConflictError, match="'w'"):
        ReadTable.build(buffers, [request(), request(tensor_dtype="float32", dst_offset_elems=8)])


def test_two_buffers_of_one_name_are_refused() -> None:
    with pytest.raises(TableError, match="'p' appears twice"):
        ReadTable.build([Buffer("p", (4,), "uint8"), Buffer("p", (4,), "uint8")], [])


def test_only_selects_requests_by_pattern() -> None:
    table = ReadTable.build(
        [Buffer("p", (16, 2), "bfloat16"), Buffer("q", (4,), "uint8")],
        [
            request(tensor="layers.0.w"),
            request(tensor="layers.1.w", dst_offset_elems=8),
            ReadRequest("", (), "", (), (), (4,), 1, 0, (1,), kind="constant", value=b"\0"),
        ],
    )
    assert len(table.only(["layers.1.*"])) == 1
    assert len(table.only(["q"])) == 1
    assert len(table.only(["q"]).values) == 1
    assert len(table.only(["*"])) == 3
    assert len(table.only([])) == 0
