"""ModelExpress's blobs: against its own functions where it is installed, and against its bytes written down here."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard.planner import Holder, Shard, ShardPart
from reshard.planner.dictionaries import TensorDict
from reshard.planner.errors import ConflictError, DTypeError, TableError
from reshard.planner.geometries import GeometryDict
from reshard.rendezvous import modelexpress_blob
from reshard.rendezvous.errors import InvalidRequestError
from reshard.rendezvous.modelexpress import (
    SCHEMA,
    Publication,
    PublishedTable,
    read_publication,
    read_stamp,
    write_publication,
)

try:
    from modelexpress.refit.reshard import rendezvous as ancestor
except ImportError:  # not a dependency: `pip install --no-deps modelexpress==0.7.0`
    ancestor = None

needs_ancestor = pytest.mark.skipif(
    ancestor is None, reason="modelexpress is not installed: pip install --no-deps modelexpress==0.7.0"
)

# As ModelExpress 0.7.0 writes it, taken down once.
GOLDEN = (
    b'{"schema": "mx.reshard.shard_table.v1", "agent_name": "trainer-0", '
    b'"metadata_endpoint": "10.0.0.7:5555", "agent_meta_b64": "bWV0YQD/", '
    b'"tensors": [{"name": "layers.0.w\\u00e9", "dtype": "torch.bfloat16", "elsize": 2, "full_shape": [8, 4], '
    b'"shards": [{"agent_name": "trainer-0", "device_id": 3, "addr": 4096, "shard_offset": [0, 0], '
    b'"shape": [4, 4]}, {"agent_name": "trainer-0", "device_id": 3, "addr": 18446744073709551552, '
    b'"shard_offset": [4, 0], "shape": [4, 4], "digest": "0f0f"}]}, {"name": "scale", '
    b'"dtype": "torch.float32", "elsize": 4, "full_shape": [], "shards": [{"agent_name": "trainer-0", '
    b'"device_id": 3, "addr": 4100, "shard_offset": [], "shape": []}]}], "publisher_step": 0}'
)


def test_the_golden_blob():
    publication = read_publication(GOLDEN, host="node-1")
    assert publication.agent_name == "trainer-0"
    assert publication.metadata_endpoint == "10.0.0.7:5555"
    assert publication.agent_metadata == b"meta\x00\xff"
    assert publication.publisher_step == 0
    (table,) = publication.tables
    assert table.part.holder == Holder("trainer-0", "node-1", "vram", 3)
    assert table.part.tensors.names_list == ["layers.0.wé", "scale"]
    assert table.part.tensors.shape_of(0) == (8, 4)
    assert table.part.tensors.dtype_label(0) == "bfloat16"
    # The scalar lies within the first shard's bytes: two regions, not three.
    assert table.region_bases.tolist() == [4096, 18446744073709551552]
    assert table.part.region_bytes.tolist() == [32, 32]
    assert table.part.region.tolist() == [0, 1, 0]
    assert table.part.offset_bytes.tolist() == [0, 0, 4]
    assert table.part.replica_group.tolist() == [-1, -1, -1]
    assert table.digests == (None, "0f0f", None)
    assert write_publication(publication) == GOLDEN
    stamp = read_stamp(GOLDEN)
    assert dataclasses.asdict(stamp) == {
        "agent_name": "trainer-0",
        "metadata_endpoint": "10.0.0.7:5555",
        "publisher_step": 0,
        "n_tensors": 2,
    }
    assert read_publication(GOLDEN, replica_group=5).tables[0].part.replica_group.tolist() == [5, 5, 5]
    assert read_publication(GOLDEN, memory="dram").tables[0].part.holder.memory == "dram"


@needs_ancestor
def test_the_golden_blob_is_the_ancestors():
    tensors = ancestor.unwrap_rendezvous_blob(GOLDEN).tensors
    assert ancestor.wrap_rendezvous_blob(b"meta\x00\xff", "trainer-0", "10.0.0.7:5555", tensors, 0) == GOLDEN


# --- against the ancestor's own functions ---

NASTY = [
    '{"name": ',
    '"full_shape": ',
    '"tensors": ',
    '"publisher_step": 7}',
    "\\",
    '"',
    "\\u0000",
    "é",
    "\U0001f600",
    "]",
    "}",
]
NAMES = st.lists(
    st.sampled_from(NASTY)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
).map("".join)
ELEMENT_BYTES = {"uint8": 1, "bool": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}


@st.composite
def shard_dicts(draw, agents: list[tuple[str, int]], shape: list[int]) -> dict:
    offset, size = [], []
    for extent in shape:
        start = draw(st.integers(0, extent))
        offset.append(start)
        size.append(draw(st.integers(0, extent - start)))
    agent, device = draw(st.sampled_from(agents))
    shard = {"agent_name": agent, "device_id": device, "addr": draw(st.integers(0, 1 << 60) | st.integers(0, 64))}
    shard |= {"shard_offset": offset, "shape": size}
    if draw(st.booleans()):
        shard["digest"] = draw(st.text("0123456789abcdef", min_size=1, max_size=4))
    return shard


@st.composite
def payloads(draw, *, n_agents: int = 1) -> dict:
    """What a trainer of ModelExpress may publish, as the JSON object it is."""
    agents = [(f"agent {i}", draw(st.integers(0, 7))) for i in range(n_agents)]
    tensors = []
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        label = draw(st.sampled_from(sorted(ELEMENT_BYTES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        shards = draw(st.lists(shard_dicts(agents, shape), max_size=3))
        tensors.append(
            {
                "name": name,
                "dtype": f"torch.{label}",
                "elsize": ELEMENT_BYTES[label],
                "full_shape": shape,
                "shards": shards,
            }
        )
    payload = {
        "schema": SCHEMA,
        "agent_name": draw(NAMES),
        "metadata_endpoint": draw(st.just("") | NAMES),
        "agent_meta_b64": draw(st.sampled_from(["", "AA==", "bWV0YQD/"])),
        "tensors": tensors,
    }
    step = draw(st.none() | st.integers(0, (1 << 63) - 1))
    return payload if step is None else payload | {"publisher_step": step}


def their_blob(payload: dict) -> bytes:
    """`payload` as ModelExpress's client writes it, of its own objects."""
    tensors = [
        ancestor.PublishedTensor(
            t["name"],
            t["dtype"],
            t["elsize"],
            tuple(t["full_shape"]),
            [
                ancestor.PublishedShard(
                    s["agent_name"],
                    s["device_id"],
                    s["addr"],
                    tuple(s["shard_offset"]),
                    tuple(s["shape"]),
                    s.get("digest"),
                )
                for s in t["shards"]
            ],
        )
        for t in payload["tensors"]
    ]
    metadata = base64.b64decode(payload["agent_meta_b64"])
    return ancestor.wrap_rendezvous_blob(
        metadata, payload["agent_name"], payload["metadata_endpoint"], tensors, payload.get("publisher_step")
    )


@needs_ancestor
@given(payloads())
def test_what_they_write_we_read_and_write_again_byte_for_byte(payload):
    blob = their_blob(payload)
    assert blob == json.dumps(payload).encode()
    publication = read_publication(blob)
    assert write_publication(publication, empty_entries=True) == blob
    stamp = read_stamp(blob)
    theirs = ancestor.unwrap_rendezvous_blob(blob, with_tensors=False)
    assert (stamp.agent_name, stamp.metadata_endpoint) == (theirs.agent_name, theirs.metadata_endpoint)
    assert (stamp.publisher_step, stamp.n_tensors) == (theirs.publisher_step, theirs.entry_count())
    assert publication.agent_metadata == theirs.agent_metadata


@needs_ancestor
@given(payloads(n_agents=2))
def test_what_we_write_they_read(payload):
    blob = write_publication(read_publication(json.dumps(payload).encode()))
    theirs = ancestor.unwrap_rendezvous_blob(blob)
    expected = [tensor for tensor in payload["tensors"] if tensor["shards"]]
    assert [t.name for t in theirs.tensors] == [t["name"] for t in expected]
    for tensor, original in zip(theirs.tensors, expected, strict=True):
        assert (tensor.dtype, tensor.elsize, list(tensor.full_shape)) == (
            original["dtype"], original["elsize"], original["full_shape"],
        )  # fmt: skip
        ours = [
            {**dataclasses.asdict(s), "shard_offset": list(s.shard_offset), "shape": list(s.shape)}
            for s in tensor.shards
        ]
        key = str
        assert sorted(ours, key=key) == sorted(({**s, "digest": s.get("digest")} for s in original["shards"]), key=key)
    assert theirs.publisher_step == payload.get("publisher_step")


@needs_ancestor
def test_a_table_of_ours_gives_their_planner_its_sources():
    shards = [
        Shard("wq", "bfloat16", (8, 6), (0, 0), (4, 6), 0, 64),
        Shard("wq", "bfloat16", (8, 6), (4, 0), (8, 6), 1, 0),
        Shard("bias", "float32", (6,), (0,), (6,), 0, 0),
    ]
    part = ShardPart.from_shards(Holder("trainer-5", "node-2", "vram", 1), shards, [256, 256])
    bases = np.array([0x7F0000000000, 0x7F0000100000], np.uint64)
    publication = Publication("trainer-5", "node-2:7000", b"agent", (PublishedTable(part, bases),), 12)
    payload = ancestor.unwrap_rendezvous_blob(write_publication(publication))
    sources, session_to_agent, session_to_device = ancestor.build_sources(payload.tensors)
    assert session_to_agent == {"trainer-5": "trainer-5"}
    assert session_to_device == {"trainer-5": 1}
    assert str(sources["wq"].dtype) == "torch.bfloat16"
    assert [(s.addr, tuple(s.shard_offset), tuple(s.shape)) for s in sources["wq"].shards] == [
        (0x7F0000000000 + 64, (0, 0), (4, 6)),
        (0x7F0000100000, (4, 0), (4, 6)),
    ]
    assert sources["bias"].shards[0].addr == 0x7F0000000000
    assert payload.publisher_step == 12


# --- addresses and regions ---


def blob_of(*rows: tuple[int, list[int], list[int]], shape: list[int] | None = None, **changed: object) -> bytes:
    """One uint8 tensor with shards (address, offset, size)."""
    shards = [
        {"agent_name": "a", "device_id": 0, "addr": addr, "shard_offset": offset, "shape": size}
        for addr, offset, size in rows
    ]
    entry = {"name": "w", "dtype": "torch.uint8", "elsize": 1, "full_shape": shape or [100], "shards": shards}
    payload = {"schema": SCHEMA, "agent_name": "a", "metadata_endpoint": "", "agent_meta_b64": "", "tensors": [entry]}
    return json.dumps(payload | changed).encode()


def test_registrations_that_merely_touch_stay_apart():
    table = read_publication(blob_of((0, [0], [10]), (10, [10], [10]), (35, [20], [10]), (40, [25], [10]))).tables[0]
    assert table.region_bases.tolist() == [0, 10, 35]
    assert table.part.region_bytes.tolist() == [10, 10, 15]
    assert table.part.region.tolist() == [0, 1, 2, 2]
    assert table.part.offset_bytes.tolist() == [0, 0, 0, 5]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=10),
    st.sampled_from([0, (1 << 64) - 200]),
)
@example([(5, 0), (5, 3), (8, 0), (8, 2), (0, 5)], 0)
def test_regions_are_the_unions_of_overlapping_extents(extents, base):
    table = read_publication(blob_of(*((base + addr, [0], [size]) for addr, size in extents))).tables[0]
    bases = [int(b) for b in table.region_bases]
    lengths = table.part.region_bytes.tolist()
    for row, (addr, size) in enumerate(extents):
        region, offset = int(table.part.region[row]), int(table.part.offset_bytes[row])
        assert bases[region] + offset == base + addr
        assert offset + size <= lengths[region]
    # Regions do not overlap, and each byte of one is some shard's.
    for (low, n), next_low in zip(zip(bases, lengths, strict=True), [*bases[1:], 1 << 64], strict=True):
        assert low + n <= next_low
    held = {byte for addr, size in extents for byte in range(base + addr, base + addr + size)}
    assert held == {byte for low, n in zip(bases, lengths, strict=True) for byte in range(low, low + n)}
    # Two shards share a region exactly if a chain of overlaps joins them: no region may be cut where no extent crosses.
    for low, n in zip(bases, lengths, strict=True):
        for cut in range(low + 1, low + n):
            assert any(base + addr < cut < base + addr + size for addr, size in extents)


def test_a_shard_without_bytes_keeps_its_address():
    blob = blob_of((7, [0], [10]), (0, [10], [0]), (12, [0], [0]), (1 << 63, [5], [0]))
    publication = read_publication(blob)
    assert write_publication(publication) == blob


def test_a_publication_without_shards_keeps_its_tensors():
    payload = json.loads(blob_of())
    publication = read_publication(json.dumps(payload).encode())
    (table,) = publication.tables
    assert len(table.part) == 0
    assert table.part.holder.name == "a"
    assert table.part.tensors.names_list == ["w"]
    assert json.loads(write_publication(publication))["tensors"] == []
    assert json.loads(write_publication(publication, empty_entries=True)) == payload
    assert read_stamp(json.dumps(payload).encode()).n_tensors == 1


def test_entries_of_one_tensor_are_joined_where_they_agree():
    payload = json.loads(blob_of((0, [0], [50])))
    second = copy.deepcopy(payload["tensors"][0])
    second["shards"][0] |= {"addr": 1000, "shard_offset": [50]}
    payload["tensors"].append(second)
    part = read_publication(json.dumps(payload).encode()).tables[0].part
    assert len(part) == 2
    assert part.tensors.names_list == ["w"]
    for change in ({"full_shape": [101]}, {"dtype": "torch.int8"}):
        payload["tensors"][1] = second | change
        with pytest.raises(ConflictError, match=r"tensors\[1\]: tensor 'w'"):
            read_publication(json.dumps(payload).encode())


# --- what is refused ---

VALID = json.loads(GOLDEN)


def changed(path: list[str | int], value: object) -> bytes:
    payload = copy.deepcopy(VALID)
    *parents, last = path
    at = payload
    for key in parents:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(payload).encode()


SHARD = ["tensors", 0, "shards", 1]
REFUSED = [
    (["schema"], (..., None, "mx.reshard.shard_table.v2", 1, [SCHEMA]), "schema"),
    (["agent_name"], (..., None, "", 3, "a\x00", "x" * 4097, "\ud800"), "agent_name"),
    (["metadata_endpoint"], (None, 3, "a\x00"), "metadata_endpoint"),
    (["agent_meta_b64"], (..., None, 1, "A", "!!!!", "AA==\n", "é"), "agent_meta_b64"),
    (["publisher_step"], (None, True, -1, 1.0, "1", 1 << 63, []), "publisher_step"),
    (["tensors"], (..., None, {}, "w", 1), "tensors"),
    (["tensors", 1], (None, [], "w"), "tensors[1]"),
    (["tensors", 0, "name"], (..., None, "", 1, "a\x00", "\udfff"), "tensors[0].name"),
    (["tensors", 0, "dtype"], (..., None, 1, ["torch.bfloat16"]), "tensors[0].dtype"),
    (["tensors", 0, "elsize"], (..., None, True, 2.0, "2", -2, 1 << 11), "tensors[0].elsize"),
    (["tensors", 0, "full_shape"], (..., None, 8, "84", {"0": 8}, [8] * 9), "tensors[0].full_shape"),
    (["tensors", 0, "full_shape", 1], (None, True, 4.0, "4", -1, (1 << 40) + 1), "tensors[0].full_shape[1]"),
    (["tensors", 0, "shards"], (..., None, {}, 1), "tensors[0].shards"),
    (SHARD, (None, [], 1), "tensors[0].shards[1]"),
    ([*SHARD, "agent_name"], (..., None, "", 1), "tensors[0].shards[1].agent_name"),
    ([*SHARD, "device_id"], (..., None, True, -1, "3", 3.0, 1 << 31), "tensors[0].shards[1].device_id"),
    ([*SHARD, "addr"], (..., None, True, -1, "0", 1.0, 1 << 64, (1 << 64) - 31), "tensors[0].shards[1].addr"),
    ([*SHARD, "shard_offset"], (..., None, 4, [0] * 9), "tensors[0].shards[1].shard_offset"),
    ([*SHARD, "shard_offset", 0], (None, True, -1, 1.5), "tensors[0].shards[1].shard_offset[0]"),
    ([*SHARD, "shape"], (..., None, 4, [4], [4, 4, 1], []), "tensors[0].shards[1].shape"),
    ([*SHARD, "shape", 1], (None, False, -4), "tensors[0].shards[1].shape[1]"),
    ([*SHARD, "digest"], (None, "", 7, ["0f"]), "tensors[0].shards[1].digest"),
]


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        pytest.param(path, value, field, id=f"{field}={'absent' if value is ... else ascii(value)[:30]}")
        for path, values, field in REFUSED
        for value in values
    ],
)
def test_a_wrong_value_is_named_by_its_place(path, value, field):
    blob = changed(path, value)
    with pytest.raises(InvalidRequestError) as caught:
        read_publication(blob)
    assert caught.value.field == field
    if len(path) == 1 and path[0] not in ("agent_meta_b64",):
        with pytest.raises(InvalidRequestError) as caught:
            read_stamp(blob)
        assert caught.value.field == field


@pytest.mark.parametrize(
    "label", ["torch.save", "bfloat17", "torch.bfloat17", "", "torch.", "torch.torch.bfloat16", "x.bfloat16"]
)
def test_dtypes_come_from_the_allow_list(label):
    with pytest.raises(DTypeError, match="unknown dtype label"):
        read_publication(changed(["tensors", 0, "dtype"], label))


def test_labels_without_torch_are_read_as_the_ancestor_reads_them():
    assert (
        read_publication(changed(["tensors", 0, "dtype"], "bfloat16")).tables[0].part.tensors.dtype_label(0)
        == "bfloat16"
    )


def test_an_element_size_must_be_its_dtypes():
    with pytest.raises(DTypeError, match=r"tensors\[0\]: tensor .* has an elsize of 4; expected 2"):
        read_publication(changed(["tensors", 0, "elsize"], 4))


def test_geometry_is_the_planners_to_refuse():
    with pytest.raises(TableError, match="outside the global size 8"):
        read_publication(changed([*SHARD, "shard_offset", 0], 5))
    with pytest.raises(TableError, match="rank"):
        read_publication(changed(["tensors", 0, "full_shape"], [8, 4, 1]))


def test_an_agent_has_one_device():
    with pytest.raises(TableError, match=r"agent 'trainer-0' owns shards on devices \[3, 4\]"):
        read_publication(changed([*SHARD, "device_id"], 4))


def test_unknown_keys_are_for_later_versions():
    payload = json.loads(GOLDEN)
    payload["later"] = {"name": [1.5, None]}
    payload["tensors"][0]["later"] = 1
    payload["tensors"][0]["shards"][0]["later"] = "x"
    blob = json.dumps(payload).encode()
    assert write_publication(read_publication(blob)) == GOLDEN
    assert read_stamp(blob) == read_stamp(GOLDEN)


@pytest.mark.parametrize(
    ("find", "put"),
    [
        (b'"agent_name": "trainer-0", "metadata', b'"agent_name": "evil", "agent_name": "trainer-0", "metadata'),
        (b'"publisher_step": 0', b'"publisher_step": 9, "publisher_step": 0'),
        (b'"tensors": [', b'"tensors": [], "tensors": ['),
        (b'"schema": ', b'"schema": "x", "schema": '),
        (b'"publisher_step": 0}', b'"publisher_step": 0, "agent_name": "evil"}'),
        (b'"publisher_step": 0}', b'"publisher_step": 0, "tensors": []}'),
    ],
)
def test_duplicate_keys_are_refused_by_both_readers(find, put):
    assert find in GOLDEN
    blob = GOLDEN.replace(find, put, 1)
    for read in (read_publication, read_stamp):
        with pytest.raises(InvalidRequestError, match="duplicate key"):
            read(blob)


@pytest.mark.parametrize("find", [b'"elsize": 2', b'"addr": 4096', b'"full_shape": [8, 4]', b'"digest": "0f0f"'])
def test_duplicate_keys_within_the_table_are_refused(find):
    with pytest.raises(InvalidRequestError, match="duplicate key"):
        read_publication(GOLDEN.replace(find, find + b", " + find, 1))


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"schema": ' * 20_000,
        GOLDEN[:-1],
        GOLDEN + b" x",
        GOLDEN[1:],
    ],
    ids=lambda blob: ascii(blob)[:20],
)
def test_what_is_no_such_object_is_refused(blob):
    for read in (read_publication, read_stamp):
        with pytest.raises(InvalidRequestError):
            read(blob)


def test_pickles_and_other_types_are_refused():
    for blob in (pickle.dumps({"schema": SCHEMA}), GOLDEN.decode(), bytearray(GOLDEN), None):
        for read in (read_publication, read_stamp):
            with pytest.raises(InvalidRequestError):
                read(blob)


@given(st.binary(max_size=80), st.integers(0, len(GOLDEN)), st.integers(0, 40))
def test_damaged_blobs_are_valid_or_refused_with_a_typed_error(junk, at, cut):
    blob = GOLDEN[:at] + junk + GOLDEN[at + cut :]
    for read in (read_publication, read_stamp):
        try:
            read(blob)
        except (InvalidRequestError, TableError, DTypeError):
            continue


# --- the fast path ---


@given(payloads())
def test_the_fast_path_sees_what_the_whole_blob_says(payload):
    blob = json.dumps(payload).encode()
    assert read_stamp(blob) == modelexpress_blob.stamp_of(modelexpress_blob.parse_blob(blob))
    assert read_stamp(json.dumps(payload, indent=1).encode()) == read_stamp(blob)
    assert read_stamp(json.dumps(payload, sort_keys=True).encode()) == read_stamp(blob)
    reordered = payload | {"tensors": [dict(reversed(t.items())) for t in payload["tensors"]]}
    assert read_stamp(json.dumps(reordered).encode()) == read_stamp(blob)


def test_the_fast_path_parses_nothing(monkeypatch):
    def forbidden(blob: bytes) -> dict[str, object]:
        raise AssertionError("parsed")

    monkeypatch.setattr(modelexpress_blob, "parse_blob", forbidden)
    assert read_stamp(GOLDEN).n_tensors == 2
    assert read_stamp(GOLDEN.replace(b', "publisher_step": 0', b"")).publisher_step is None
    with pytest.raises(AssertionError, match="parsed"):
        read_stamp(json.dumps(VALID, indent=1).encode())


# --- what cannot be written ---


def table_of(part: ShardPart, **more: object) -> PublishedTable:
    return PublishedTable(part, np.zeros(len(part.region_bytes), np.uint64), **more)


def part_of(*shards: Shard, name: str = "a", n_bytes: int = 64) -> ShardPart:
    return ShardPart.from_shards(Holder(name, memory="vram"), shards, [n_bytes])


W = Shard("w", "uint8", (8,), (0,), (8,))


def test_what_the_format_cannot_say_is_not_written():
    axes = dataclasses.replace(W, shape=(4, 2), start=(0, 0), stop=(4, 2), axes=("in", "out"))
    with pytest.raises(TableError, match=r"stored axes \('in', 'out'\)"):
        write_publication(Publication("a", "", b"", (table_of(part_of(axes)),)))
    with pytest.raises(DTypeError, match="int4 has no whole bytes"):
        write_publication(Publication("a", "", b"", (table_of(part_of(dataclasses.replace(W, dtype="int4"))),)))


def test_tables_that_disagree_are_not_written():
    other = part_of(dataclasses.replace(W, shape=(9,)), name="b")
    with pytest.raises(ConflictError, match="'w'"):
        write_publication(Publication("a", "", b"", (table_of(part_of(W)), table_of(other))))
    with pytest.raises(TableError, match="two parts"):
        write_publication(Publication("a", "", b"", (table_of(part_of(W)), table_of(part_of(W)))))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"publisher_step": -1}, "publisher_step"),
        ({"publisher_step": True}, "publisher_step"),
        ({"agent_name": ""}, "agent_name"),
        ({"metadata_endpoint": None}, "metadata_endpoint"),
        ({"agent_metadata": "text"}, "agent_metadata"),
    ],
)
def test_wrong_fields_are_not_written(changed, field):
    publication = dataclasses.replace(Publication("a", "", b"", (table_of(part_of(W)),)), **changed)
    with pytest.raises(InvalidRequestError) as caught:
        write_publication(publication)
    assert caught.value.field == field


def test_a_published_table_fits_its_part():
    part = part_of(W)
    for bases in (np.zeros(2, np.uint64), np.zeros(1, np.int64), np.zeros((1, 1), np.uint64)):
        with pytest.raises(TableError, match="region_bases"):
            PublishedTable(part, bases)
    with pytest.raises(TableError, match="region 0 wraps"):
        PublishedTable(part, np.array([(1 << 64) - 64], np.uint64))
    PublishedTable(part, np.array([(1 << 64) - 65], np.uint64))
    with pytest.raises(TableError, match="2 digests; expected none or 1"):
        table_of(part, digests=("a", "b"))


def test_a_shared_dictionary_does_not_publish_what_others_hold():
    tensors = TensorDict.build(["mine", "theirs"], ["uint8", "uint8"], [(4,), (4,)])
    zeros = np.zeros(1, np.int64)
    part = ShardPart(
        Holder("a"), tensors, GeometryDict.build([((0,), (4,))]), zeros, zeros, zeros, zeros, zeros - 1, zeros + 4
    )
    publication = Publication("a", "", b"", (table_of(part),))
    assert [t["name"] for t in json.loads(write_publication(publication))["tensors"]] == ["mine"]
    everything = json.loads(write_publication(publication, empty_entries=True))["tensors"]
    assert [(t["name"], len(t["shards"])) for t in everything] == [("mine", 1), ("theirs", 0)]


def test_a_shard_without_bytes_in_no_region_is_written():
    empty = dataclasses.replace(W, start=(8,), stop=(8,), region=7)
    blob = write_publication(Publication("a", "", b"", (table_of(part_of(W, empty)),)))
    assert [s["addr"] for s in json.loads(blob)["tensors"][0]["shards"]] == [0, 0]
