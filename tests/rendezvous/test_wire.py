"""The wire form of tables: it comes back as it was, it is small, and what is no table is refused, naming the field."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

pytest.importorskip("google.protobuf", reason="protobuf is not installed")
pytest.importorskip("zstandard", reason="zstandard is not installed")

from tests.strategies import scenarios, shard_parts

from reshard.planner.dictionaries import TensorDict
from reshard.planner.geometries import GeometryDict
from reshard.planner.shards import Holder, Shard, ShardPart
from reshard.proto.v1 import rendezvous_pb2 as pb
from reshard.proto.v1 import tables_pb2
from reshard.rendezvous import converts, limits
from reshard.rendezvous.catalog import BlobCatalog
from reshard.rendezvous.columns import compress, pack_columns, unpack_columns
from reshard.rendezvous.errors import (
    InvalidRequestError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
)
from reshard.rendezvous.lru import Lru
from reshard.rendezvous.store import MemoryStore
from reshard.rendezvous.tablecache import Content, TableCache
from reshard.rendezvous.uploads import Pieces, Uploads

ROOT = Path(__file__).resolve().parents[2]
run = asyncio.run
INT64 = st.integers(-(2**63), 2**63 - 1)


def encode(part: ShardPart) -> tuple[bytes, bytes, bytes]:
    messages = (
        converts.tensors_to_message(part.tensors),
        converts.geometries_to_message(part.geometries),
        converts.part_to_message(part),
    )
    tensors, geometries, rows = (m.SerializeToString(deterministic=True) for m in messages)
    return tensors, geometries, rows


def decode(part: ShardPart, blobs: tuple[bytes, bytes, bytes]) -> ShardPart:
    tensors = converts.tensors_from_message(tables_pb2.TensorDict.FromString(blobs[0]), part.tensors.digest)
    geometries = converts.geometries_from_message(tables_pb2.GeometryDict.FromString(blobs[1]), part.geometries.digest)
    return converts.part_from_message(tables_pb2.ShardPart.FromString(blobs[2]), tensors, geometries, part.digest)


def assert_same(got: ShardPart, expected: ShardPart) -> None:
    assert got.digest == expected.digest
    assert got.tensors.names_list == expected.tensors.names_list
    assert [got.tensors.shape_of(i) for i in range(len(got.tensors))] == [
        expected.tensors.shape_of(i) for i in range(len(expected.tensors))
    ]
    assert got.tensors.axes == expected.tensors.axes
    for name in ("tensor_id", "geometry_id", "region", "offset_bytes", "replica_group", "region_bytes"):
        column = getattr(got, name)
        np.testing.assert_array_equal(column, getattr(expected, name))
        assert column.dtype == np.int64
        assert not column.flags.writeable
    assert (got.layout, got.claim) == (expected.layout, expected.claim)


@given(scenarios())
def test_any_table_comes_back(scenario: object) -> None:
    for part in shard_parts(scenario):  # type: ignore[arg-type]
        assert_same(decode(part, encode(part)), part)


@given(st.lists(st.lists(INT64, max_size=40), max_size=4))
@example([[2**63 - 1, -(2**63)], [-(2**63)], [], [0, 2**63 - 1, 0]])
@example([[255, 0], [256, 0], [65535, 0], [65536, 0], [2**32, 0], [-1, -1, -1]])
def test_any_columns_come_back(columns: list[list[int]]) -> None:
    arrays = [np.array(column, np.int64) for column in columns]
    metas, frame = pack_columns(arrays)
    back = unpack_columns("x", metas, [len(a) for a in arrays], frame)
    for got, expected in zip(back, arrays, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_scalars_named_axes_and_odd_names_come_back() -> None:
    shards = [
        Shard("\u00e9", "float32", (), (), (), 0, 0),
        Shard("e\u0301", "int8", (3, 4, 5), (0, 1, 2), (3, 4, 5), 1, 60, 7, ("layer", "in", "out")),
        Shard("x" * 4096, "bfloat16", (0, 4), (0, 0), (0, 4), 1, 0),
    ]
    part = ShardPart.from_shards(Holder("a"), shards, [4, 1000], layout="tp", claim="same")
    assert_same(decode(part, encode(part)), part)
    nothing = ShardPart.from_shards(Holder("a"), [], [])
    assert_same(decode(nothing, encode(nothing)), nothing)


def repeated_part(n: int, order: np.ndarray | None = None) -> ShardPart:
    """Many equal layers in memory filled front to back, or in another order."""
    tensors = TensorDict.build([f"model.layers.{i}.weight" for i in range(n)], ["bfloat16"] * n, [(64, 96)] * n)
    geometries = GeometryDict.build([((0, 0), (32, 96))])
    ids, zeros = np.arange(n), np.zeros(n, np.int64)
    size = 32 * 96 * 2
    offsets = (ids if order is None else order) * size
    return ShardPart(Holder("a"), tensors, geometries, ids, zeros, zeros, offsets, zeros - 1, np.array([n * size]))


def test_regular_tables_are_a_few_bytes() -> None:
    assert len(encode(repeated_part(10_000))[2]) < 250
    shuffled = repeated_part(10_000, np.random.default_rng(0).permutation(10_000))
    assert len(encode(shuffled)[2]) < 2.2 * 10_000
    assert_same(decode(shuffled, encode(shuffled)), shuffled)


def set_fields(**fields: object) -> Callable[[tables_pb2.ShardPart], None]:
    def change(message: tables_pb2.ShardPart) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


def first_column(**fields: int) -> Callable[[tables_pb2.ShardPart], None]:
    def change(message: tables_pb2.ShardPart) -> None:
        for name, value in fields.items():
            setattr(message.columns[4], name, value)

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (set_fields(n_rows=limits.MAX_ROWS + 1), "part.n_rows"),
        (set_fields(n_rows=2**63), "part.n_rows"),
        (set_fields(n_regions=limits.MAX_REGIONS + 1), "part.n_regions"),
        (set_fields(n_rows=7), "part.frame"),
        (set_fields(offset_unit=0), "part.offset_unit"),
        (set_fields(offset_coding=0), "part.offset_coding"),
        (set_fields(offset_coding=77), "part.offset_coding"),
        (set_fields(layout="a\0b"), "part.layout"),
        (set_fields(claim="x" * 5000), "part.claim"),
        (set_fields(frame=b""), "part.frame"),
        (set_fields(frame=b"\x28\xb5\x2f\xfd"), "part.frame"),
        (set_fields(frame=compress(bytes(1 << 20))), "part.frame"),
        (set_fields(frame=pickle.dumps({"a": 1})), "part.frame"),
        (first_column(width=3), "part.columns[4].width"),
        (first_column(width=8), "part.frame"),
        (first_column(transform=0), "part.columns[4].transform"),
        (first_column(transform=9), "part.columns[4].transform"),
        (first_column(base=-(2**63)), "part"),
        (lambda message: message.columns.pop(), "part.columns"),
        (lambda message: message.columns.add(), "part.columns"),
    ],
)
def test_a_bad_part_names_the_field(change: Callable[[tables_pb2.ShardPart], None], field: str) -> None:
    part = repeated_part(100, np.random.default_rng(0).permutation(100))
    message = converts.part_to_message(part)
    change(message)
    with pytest.raises(InvalidRequestError) as caught:
        converts.part_from_message(message, part.tensors, part.geometries, part.digest)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n_tensors": limits.MAX_DICT_ROWS + 1}, "tensors.n_tensors"),
        ({"n_tensors": 99}, "tensors.dim_rows[0]"),
        ({"names_bytes": 2**40}, "tensors.names_bytes"),
        ({"names_bytes": 1}, "tensors.names_frame"),
        ({"frame": b"not zstd"}, "tensors.frame"),
        ({"names_frame": compress(b"\xff" + repeated_part(100).tensors.names.blob[1:])}, "tensors"),
        ({"names_frame": compress(b"\0" * len(repeated_part(100).tensors.names.blob))}, "tensors.names_frame"),
    ],
)
def test_a_bad_tensor_dictionary_names_the_field(fields: dict[str, object], field: str) -> None:
    part = repeated_part(100)
    message = converts.tensors_to_message(part.tensors)
    for name, value in fields.items():
        setattr(message, name, value)
    with pytest.raises(InvalidRequestError) as caught:
        converts.tensors_from_message(message, part.tensors.digest)
    assert caught.value.field == field


@pytest.mark.parametrize("rows", [[100, 99], [100, 100, 1], [100], [0, 100], [2**40, 100], [100] * 9])
def test_dim_rows_must_agree_with_the_ranks(rows: list[int]) -> None:
    message = converts.tensors_to_message(repeated_part(100).tensors)
    del message.dim_rows[:]
    message.dim_rows.extend(rows)
    with pytest.raises(InvalidRequestError) as caught:
        converts.tensors_from_message(message, repeated_part(100).tensors.digest)
    assert caught.value.field.startswith(("tensors.dim_rows", "tensors.columns"))


def test_content_under_a_wrong_digest_is_refused() -> None:
    part, other = repeated_part(10), repeated_part(11)
    with pytest.raises(InvalidRequestError, match="content has digest"):
        converts.part_from_message(converts.part_to_message(part), part.tensors, part.geometries, other.digest)
    with pytest.raises(InvalidRequestError, match="content has digest"):
        converts.geometries_from_message(converts.geometries_to_message(part.geometries), other.digest)
    names = converts.names_to_message(["a", "b"])
    assert converts.names_from_message(names, converts.names_digest(["b", "a", "b"])) == {"a", "b"}
    with pytest.raises(InvalidRequestError, match="content has digest"):
        converts.names_from_message(names, converts.names_digest(["a"]))


def test_what_breaks_a_rule_of_the_planner_is_refused() -> None:
    """A table whose digest is right may still be wrong: here a shard that runs past its region."""
    part = repeated_part(10)
    twin = object.__new__(ShardPart)
    for name, value in part.__dict__.items():
        object.__setattr__(twin, name, value)
    twin.__dict__.pop("digest", None)
    object.__setattr__(twin, "region_bytes", np.array([100]))
    with pytest.raises(InvalidRequestError, match="outside region 0 of 100 bytes"):
        converts.part_from_message(converts.part_to_message(twin), part.tensors, part.geometries, twin.digest)


@pytest.mark.parametrize("code", [0, 99, -1, 2**40])
def test_d9_unknown_dtypes_are_refused(code: int) -> None:
    message = converts.tensors_to_message(repeated_part(4).tensors)
    message.columns[0].base = code
    with pytest.raises(InvalidRequestError, match="dtype"):
        converts.tensors_from_message(message, repeated_part(4).tensors.digest)


def test_r7_pickle_bytes_are_no_table() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return sys.exit, ("unpickled",)

    store = MemoryStore()
    catalog = BlobCatalog(store)
    part = repeated_part(4)
    digests = (part.digest, part.tensors.digest, part.geometries.digest)
    for blob in (pickle.dumps(Bomb()), pickle.dumps({"w": [1, 2, 3]})):
        with pytest.raises(InvalidRequestError):
            run(catalog.put_table(*digests, dict.fromkeys(digests, blob)))
        assert run(catalog.missing(digests)) == list(digests)


def test_a_table_is_seen_whole_or_not_at_all() -> None:
    catalog = BlobCatalog(MemoryStore())
    part = repeated_part(4)
    tensors, geometries, rows = encode(part)
    digests = (part.digest, part.tensors.digest, part.geometries.digest)
    missing = run(catalog.put_table(*digests, {part.digest: rows, part.tensors.digest: tensors}))
    assert missing == [part.geometries.digest]
    assert run(catalog.n_rows(part.digest)) is None
    assert run(catalog.put_table(*digests, {part.digest: rows, part.geometries.digest: geometries})) == []
    assert run(catalog.n_rows(part.digest)) == 4


def test_a_known_dictionary_is_checked_all_the_same() -> None:
    """The store has lost it, the service still has it decoded: what is sent under its digest is not taken on trust."""
    store = MemoryStore()
    catalog = BlobCatalog(store)
    part, other = repeated_part(4), repeated_part(5)
    digests = (part.digest, part.tensors.digest, part.geometries.digest)
    right = dict(zip((part.tensors.digest, part.geometries.digest, part.digest), encode(part), strict=True))
    wrong = encode(other)
    assert run(catalog.put_table(*digests, right)) == []
    assert run(catalog.put_table(*digests, right)) == []
    for digest, blob in ((part.tensors.digest, wrong[0]), (part.geometries.digest, wrong[1])):
        forged = {**right, digest: blob}
        if blob == right[digest]:
            continue
        with pytest.raises(InvalidRequestError, match="content has digest"):
            run(catalog.put_table(*digests, forged))
        run(store.close())
        with pytest.raises(InvalidRequestError, match="content has digest"):
            run(catalog.put_table(*digests, forged))
        assert run(catalog.missing([digest])) == [digest]
        assert run(catalog.put_table(*digests, right)) == []


def test_many_tables_at_once_need_no_room_in_the_cache() -> None:
    cache = TableCache()
    parts = [repeated_part(n) for n in range(1, 40)]
    cache._parts, cache._tensors, cache._geometries = Lru(4), Lru(2), Lru(2)
    kinds = (pb.CONTENT_KIND_TENSORS, pb.CONTENT_KIND_GEOMETRIES, pb.CONTENT_KIND_PART)

    async def fetch(missing: Sequence[bytes], have: Sequence[bytes]) -> list[Content]:
        sent, contents = set(have), []
        for part in parts:
            for kind, digest, blob in zip(
                kinds, (part.tensors.digest, part.geometries.digest, part.digest), encode(part), strict=True
            ):
                if (part.digest in missing) and digest not in sent:
                    sent.add(digest)
                    contents.append((kind, digest, blob))
        return contents

    wanted = [part.digest for part in parts]
    for _ in range(2):
        assert list(run(cache.get(wanted, fetch, 30.0))) == wanted
    with pytest.raises(RendezvousError, match="did not send 1 of 1"):
        run(cache.get([bytes(32)], fetch, 30.0))

    async def hang(missing: Sequence[bytes], have: Sequence[bytes]) -> list[Content]:
        await asyncio.sleep(60.0)
        return []

    with pytest.raises(RendezvousTimeoutError, match=r"within 0\.05 s"):
        run(cache.get([bytes(32)], hang, 0.05))


def test_unfinished_uploads_share_one_budget() -> None:
    uploads = Uploads(at_most_bytes=100)
    with uploads.begin() as one:
        pieces = Pieces("chunk", 90, one)
        pieces.add(90, bytes(60))
        with uploads.begin() as other:
            more = Pieces("chunk", 50, other)
            with pytest.raises(RendezvousUnavailableError, match="hold 60 bytes of 100"):
                more.add(50, bytes(50))
        pieces.add(90, bytes(30))
        assert pieces.whole() == bytes(90)
        assert uploads.held_bytes == 90
    assert uploads.held_bytes == 0


def test_generated_modules_are_current(tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed (pip install 'reshard[dev]')")
    protos = sorted(f"reshard/proto/v1/{path.name}" for path in (ROOT / "proto/v1").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ireshard/proto=proto"]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", *protos]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    made = {path.name: path.read_text() for path in (tmp_path / "reshard/proto/v1").iterdir()}
    assert len(made) == 2 * len(protos)
    stale = [name for name, text in made.items() if (ROOT / "proto/v1" / name).read_text() != text]
    assert stale == [], "run `make proto`"
