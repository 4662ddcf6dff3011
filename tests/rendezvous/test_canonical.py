"""Canonical records: one spelling per value, bounded work, and nothing else decodes."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import hashlib
import json
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.rendezvous.canonical import (
    MAX_ITEMS,
    MAX_NESTING,
    MAX_RECORD_BYTES,
    canonical_record,
    contract_digest,
    decode_record,
)
from reshard.rendezvous.errors import ContractError, ContractTypeError

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | INT64 | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
# Anything that json can spell, canonical or not: what a peer may send.
LOOSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = 7
    PAIR = (1, 2)
    FLOAT = 1.5


class Word(enum.StrEnum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Point:
    y: object
    x: object = None


# --- one spelling ---


@given(PLAIN)
def test_plain_values_round_trip(value):
    data = canonical_record(value)
    assert decode_record(data) == value
    assert canonical_record(decode_record(data)) == data
    # The standard library agrees on what it means and on how long it is.
    assert json.loads(data) == value
    assert data == json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
    assert contract_digest(value) == hashlib.sha256(data).hexdigest()


@given(PLAIN, PLAIN)
def test_equal_bytes_exactly_when_equal_values(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # tells True from 1
    assert (canonical_record(one) == canonical_record(other)) is same


@given(st.dictionaries(TEXT, INT64, max_size=8), st.randoms())
def test_the_order_of_keys_does_not_matter(value, random):
    items = list(value.items())
    random.shuffle(items)
    assert canonical_record(dict(items)) == canonical_record(value)


def test_dataclasses_enums_and_tuples():
    assert canonical_record(Point(y=(1, "é"), x=Colour.RED)) == b'{"x":"red","y":[1,"\\u00e9"]}'
    assert canonical_record([Colour.BLUE, Colour.PAIR, Word.A, Number.ONE]) == b'[7,[1,2],"a",1]'
    assert canonical_record({"b": [True, None], "a": ""}) == b'{"a":"","b":[true,null]}'
    assert canonical_record(Point(Point(1))) == b'{"x":null,"y":{"x":null,"y":1}}'


# --- what is refused when writing ---


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        math.nan,
        math.inf,
        b"x",
        bytearray(b"x"),
        {1},
        frozenset(),
        1j,
        decimal.Decimal(1),
        object(),
        np.int64(1),
        np.zeros(1),
        Point,
        Colour,
        range(3),
        iter([1]),
        collections.OrderedDict(a=1),
        collections.namedtuple("N", "a")(1),
        Colour.FLOAT,
        type("Int", (int,), {})(1),
        type("Str", (str,), {})("a"),
        type("List", (list,), {})(),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_other_types_are_unsupported(value):
    for record, path in (
        (value, r"\$"),
        ([1, value], r"\$\[1\]"),
        ({"k": {"l": value}}, r"\$\.k\.l"),
        (Point(value), r"\$\.y"),
    ):
        with pytest.raises(ContractTypeError, match=rf"canonical record\.{path}: got unsupported type \S+, expected"):
            canonical_record(record)


@pytest.mark.parametrize("key", [1, None, True, 1.5, b"a", (), Word.A], ids=repr)
def test_keys_must_be_text(key):
    with pytest.raises(ContractTypeError, match=r"\$\.in: got a key of type \w+, expected text keys"):
        canonical_record({"in": {"z": 1, key: 2}})


def test_reference_cycles():
    loop: list[object] = []
    loop.append(loop)
    mapping: dict[str, object] = {}
    mapping["a"] = [mapping]
    point = Point(None)
    point.y = {"p": point}
    for value in (loop, mapping, point, {"deep": [[[loop]]]}):
        with pytest.raises(ContractError, match="reference cycle"):
            canonical_record(value)


def test_a_shared_value_is_no_cycle():
    shared = [1]
    assert canonical_record([shared, shared, {"a": shared}]) == b'[[1],[1],{"a":[1]}]'
    assert canonical_record([(), (), Point(())]) == b'[[],[],{"x":null,"y":[]}]'


def nested(depth: int, wrap) -> object:
    value: object = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, Point],
    ids=["list", "tuple", "dict", "dataclass"],
)
def test_nesting(wrap):
    data = canonical_record(nested(MAX_NESTING, wrap))
    assert canonical_record(decode_record(data)) == data
    with pytest.raises(ContractError, match="nesting over 16"):
        canonical_record(nested(MAX_NESTING + 1, wrap))


def test_items_of_one_container():
    assert len(decode_record(canonical_record([0] * MAX_ITEMS))) == MAX_ITEMS == 4096
    canonical_record({str(i): i for i in range(MAX_ITEMS)})
    for value in ([0] * (MAX_ITEMS + 1), (0,) * (MAX_ITEMS + 1), {str(i): i for i in range(MAX_ITEMS + 1)}):
        with pytest.raises(ContractError, match="4097 items"):
            canonical_record(value)
    with pytest.raises(ContractError, match="4097 items"):
        decode_record(b"[" + b",".join([b"0"] * (MAX_ITEMS + 1)) + b"]")


@pytest.mark.parametrize("value", [(1 << 63) - 1, -(1 << 63)])
def test_integers_have_64_bits(value):
    assert decode_record(canonical_record(value)) == value
    outside = value + (1 if value > 0 else -1)
    with pytest.raises(ContractError, match="signed 64 bits"):
        canonical_record([outside])
    with pytest.raises(ContractError, match="signed 64 bits"):
        decode_record(str(outside).encode())


def test_lone_surrogates_would_give_one_text_two_spellings():
    for text in ("\ud800", "a\udfff", "\ud83d\ude00"):
        for value in (text, {text: 1}):
            with pytest.raises(ContractError, match="surrogates"):
                canonical_record(value)
    assert decode_record(canonical_record("\U0001f600")) == "\U0001f600"
    with pytest.raises(ContractError, match="surrogates"):
        decode_record(b'"\\ud800"')


@given(PLAIN, st.integers(1, 300))
def test_max_bytes_is_exact(value, bound):
    n_bytes = len(canonical_record(value))
    if n_bytes <= bound:
        assert len(canonical_record(value, bound)) == n_bytes
        assert decode_record(canonical_record(value), bound) == value
        return
    with pytest.raises(ContractError, match=f"more than {bound} bytes"):
        canonical_record(value, bound)
    with pytest.raises(ContractError, match=f"at most {bound}"):
        decode_record(canonical_record(value), bound)


@pytest.mark.parametrize("bound", [0, -1, MAX_RECORD_BYTES + 1, True, 1.0, "9", None], ids=repr)
def test_max_bytes_itself_is_bounded(bound):
    for call in (
        lambda: canonical_record(1, bound),
        lambda: decode_record(b"1", bound),
        lambda: contract_digest(1, bound),
    ):
        with pytest.raises(ContractError, match=r"canonical record\.max_bytes"):
            call()
    assert canonical_record(1, MAX_RECORD_BYTES) == b"1"


def test_work_is_bounded_by_max_bytes_and_not_by_the_value():
    # 4096 ** 15 references to one list: the writer must stop at the bound.
    value: object = [1]
    for _ in range(MAX_NESTING - 1):
        value = [value] * MAX_ITEMS
    with pytest.raises(ContractError, match="more than 1000 bytes"):
        canonical_record(value, 1000)
    with pytest.raises(ContractError, match="more than 10 bytes"):
        canonical_record("x" * (1 << 24), 10)


# --- what is refused when reading ---


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":1}',
        b'[{"b":{"a":1,"a":2}}]',
        b'{"a":1.5,"b":0,"a":1e5}',
        b'{ "a" : NaN , "a" : 99999999999999999999999999 }',
        b'{"\\u0061":1,"a":1}',
        b'{"z":1,"a":1,"z":2}',
    ],
)
def test_duplicate_keys_are_refused_first(data):
    with pytest.raises(ContractError, match="duplicate key"):
        decode_record(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" 1",
        b"1 ",
        b"1\n",
        b'{"b":1,"a":1}',
        b'{"a": 1}',
        b"[1, 2]",
        b"01",
        b"-0",
        b"1.0",
        b"1e2",
        b"NaN",
        b"-Infinity",
        b"+1",
        b'"\\u0061"',
        b'"\\/"',
        b'"\\u00E9"',
        b'"\\u00e9',
        "é".encode(),
        '"é"'.encode(),
        b'"\x7f"'[:-1],
        b"nul",
        b"[1,]",
        b"{}{}",
        b"\xff",
        b"\xef\xbb\xbf1",
        b"1" * 25,
        b"9" * 5000,
        b"[" * 100000,
        b'{"a":' * 50000,
        b"[" * 17 + b"]" * 17,
        b"'a'",
        b"\x80\x04N.",
    ],
    ids=lambda data: ascii(data)[:30],
)
def test_what_is_not_canonical_is_refused(data):
    with pytest.raises(ContractError):
        decode_record(data)


@pytest.mark.parametrize("data", ["1", bytearray(b"1"), memoryview(b"1"), None, 1], ids=repr)
def test_only_bytes_are_decoded(data):
    with pytest.raises(ContractTypeError, match="expected bytes"):
        decode_record(data)


@given(LOOSE, st.booleans(), st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_any_json_decodes_exactly_if_it_is_canonical(value, ascii_only, sort_keys, separators):
    text = json.dumps(value, ensure_ascii=ascii_only, sort_keys=sort_keys, separators=separators)
    data = text.encode("utf-8", "surrogatepass")
    try:
        canonical = canonical_record(value)
    except ContractError:
        canonical = None
    if data == canonical:
        assert decode_record(data) == value
        return
    with pytest.raises(ContractError):
        decode_record(data)


@given(PLAIN, st.data())
def test_a_changed_byte_never_decodes_to_the_same_value(value, data):
    record = bytearray(canonical_record(value))
    index = data.draw(st.integers(0, len(record) - 1))
    byte = data.draw(st.integers(0, 255))
    assume(record[index] != byte)
    record[index] = byte
    try:
        decoded = decode_record(bytes(record))
    except ContractError:
        return
    assert canonical_record(decoded) == bytes(record)
    assert canonical_record(value) != bytes(record)


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_refused(data):
    try:
        value = decode_record(data)
    except ContractError:
        return
    assert canonical_record(value) == data
