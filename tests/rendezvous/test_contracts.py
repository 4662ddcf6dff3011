"""The consensus records: each field's bounds, from both sides, and the order in which a world is judged."""

from __future__ import annotations

import dataclasses
import enum
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.rendezvous.canonical import canonical_record, decode_record
from reshard.rendezvous.contracts import (
    LogicalPlacement,
    PlacementStyle,
    RankInventory,
    RunIdentity,
    StageMessage,
    TopologyPlan,
    Vote,
    validate_inventory_consensus,
)
from reshard.rendezvous.errors import ContractError, ContractTypeError, RendezvousError
from reshard.rendezvous.stages import Stage

HEX = "0123456789abcdef"


class Two(enum.IntEnum):
    TWO = 2


def digest(seed: int) -> str:
    return f"{seed:064x}"


VALID = {
    RunIdentity: {
        "run_id": "0f" * 16,
        "commit": "ab" * 20,
        "config_digest": digest(1),
        "model_digest": digest(2),
        "world_size": 4,
    },
    RankInventory: {
        "rank": 3,
        "local_rank": 1,
        "world_size": 4,
        "host_digest": digest(3),
        "device_digest": digest(4),
        "software_digest": digest(5),
        "storage_digest": digest(6),
        "device_kind": "cuda",
        "free_memory_bytes": 10,
        "total_memory_bytes": 20,
    },
    TopologyPlan: {
        "world_size": 4,
        "coordinator": "node-7.cluster.local:29500",
        "backend": "nccl",
        "placement_digest": digest(7),
    },
    LogicalPlacement: {
        "name": "layers.0.wq",
        "dtype": "bfloat16",
        "style": PlacementStyle.COLUMN_WISE,
        "shard_dim": 0,
        "world_size": 4,
        "global_shape": (16, 6),
        "local_shape": (4, 6),
    },
    StageMessage: {
        "sequence": 5,
        "stage": Stage.VERIFIED,
        "vote": Vote.ABORT,
        "error_code": "DIGEST_MISMATCH",
    },
}

NOT_INTS = (True, False, 2.0, "2", None, Two.TWO, b"2")
BAD_HEX = ("", "A", "0 ", "g", "٣", "0\n")


def bad_hex(digits: int) -> tuple[object, ...]:
    return (
        *(("0" * digits)[: digits - len(tail)] + tail for tail in BAD_HEX if tail),
        "0" * (digits - 1),
        "0" * (digits + 1),
        "",
        None,
        b"0" * digits,
        int("1" * digits),
    )


REFUSED = {
    RunIdentity: {
        "run_id": bad_hex(32),
        "commit": bad_hex(40),
        "config_digest": bad_hex(64),
        "model_digest": bad_hex(64),
        "world_size": (*NOT_INTS, -1, 0, 1, 4097),
    },
    RankInventory: {
        "rank": (*NOT_INTS, -1, 4),
        "local_rank": (*NOT_INTS, -1, 4),
        "world_size": (*NOT_INTS, 0, 1, 4097),
        "host_digest": bad_hex(64),
        "device_digest": bad_hex(64),
        "software_digest": bad_hex(64),
        "storage_digest": bad_hex(64),
        "device_kind": ("gpu", "CPU", "", None, 0, b"cpu"),
        "free_memory_bytes": (*NOT_INTS, -1, 21),
        "total_memory_bytes": (*NOT_INTS, 0, -1, 1 << 63),
    },
    TopologyPlan: {
        "world_size": (*NOT_INTS, 1, 4097),
        "coordinator": (
            "",
            "host",
            ":29500",
            "host:",
            "host:0",
            "host:00080",
            "host:65536",
            "host:+80",
            "host:٣",
            "ho st:80",
            "-host:80",
            "host..b:80",
            "fe80::1:80",
            "[fe80::1]80",
            "[zz]:80",
            "host:80\n",
            f"{'a' * 64}:80",
            None,
            80,
        ),
        "backend": ("mpi", "GLOO", "", None, 1),
        "placement_digest": bad_hex(64),
    },
    LogicalPlacement: {
        "name": ("", "a\x00b", "x" * 4097, "é" * 2049, "\ud800", None, 7, b"wq"),
        "dtype": ("torch.save", "bfloat17", "", "torch.bfloat16", "BFLOAT16", None, 3),
        "style": ("column-wise", None, 0, Stage.CREATED),
        "shard_dim": (None, 1, 2, -1, False, 0.0, "0"),
        "world_size": (*NOT_INTS, 1, 4097, 5, 8),
        "global_shape": (
            (16,),
            (16, 6, 1),
            [16, 6],
            (16, 0),
            (16, -6),
            (True, 6),
            (16, 6.0),
            ((1 << 40) + 1, 6),
            None,
        ),
        "local_shape": ((16, 6), (4, 7), (3, 6), [4, 6], (4,), (4, True), (4, 0), None),
    },
    StageMessage: {
        "sequence": (True, 1.0, "1", None, -1, 1 << 63),
        "stage": ("VERIFIED", None, Vote.ABORT),
        "vote": ("abort", None, True, Stage.ABORTED, Vote.COMMIT),
        "error_code": (
            None,
            "",
            "lost_peer",
            "LOST",
            "LOST_",
            "_LOST",
            "LOST__PEER",
            "LOST PEER",
            "LOST_PEER\n",
            "A_" * 40 + "B",
            7,
        ),
    },
}


def cases():
    for kind, refused in REFUSED.items():
        for field, values in refused.items():
            for value in values:
                yield pytest.param(kind, field, value, id=f"{kind.__name__}.{field}={ascii(value)[:40]}")


@pytest.mark.parametrize("kind", list(VALID), ids=lambda kind: kind.__name__)
def test_every_field_has_refused_values(kind):
    assert {field.name for field in dataclasses.fields(kind)} == set(REFUSED[kind]) == set(VALID[kind])


@pytest.mark.parametrize(("kind", "field", "value"), list(cases()))
def test_a_wrong_field_is_named(kind, field, value):
    kind(**VALID[kind])
    with pytest.raises(ContractError) as caught:
        kind(**{**VALID[kind], field: value})
    error = caught.value
    assert isinstance(error, ValueError)
    assert isinstance(error, RendezvousError)
    assert error.record == kind.__name__
    # A vote without its code, a rank beyond its world, a shape that its ranks do not divide: either end of
    # the rule may be named.
    partners = {
        (StageMessage, "vote"): {"error_code"},
        (RankInventory, "world_size"): {"rank"},
        (RankInventory, "total_memory_bytes"): {"free_memory_bytes"},
        (LogicalPlacement, "world_size"): {"global_shape", "local_shape"},
        (LogicalPlacement, "global_shape"): {"local_shape"},
    }
    assert error.field in {field, *partners.get((kind, field), ())}
    assert str(error).startswith(f"{kind.__name__}.{error.field}: got ")
    assert ", expected " in str(error)


@pytest.mark.parametrize("kind", list(VALID), ids=lambda kind: kind.__name__)
def test_booleans_are_not_integers_and_say_so(kind):
    for field, value in VALID[kind].items():
        if type(value) is int:
            with pytest.raises(ContractTypeError, match=rf"{kind.__name__}\.{field}: got bool True, expected int"):
                kind(**{**VALID[kind], field: True})


@pytest.mark.parametrize("kind", list(VALID), ids=lambda kind: kind.__name__)
def test_records_are_frozen_keyword_only_and_know_their_keywords(kind):
    record = kind(**VALID[kind])
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, next(iter(VALID[kind])), None)
    with pytest.raises(TypeError, match="colour"):
        kind(**VALID[kind], colour=1)
    with pytest.raises(TypeError):
        kind(*VALID[kind].values())
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            with pytest.raises(TypeError, match=field.name):
                kind(**{name: value for name, value in VALID[kind].items() if name != field.name})
    assert not hasattr(record, "__dict__")


@pytest.mark.parametrize("kind", list(VALID), ids=lambda kind: kind.__name__)
def test_from_plain_is_the_inverse_of_the_canonical_form(kind):
    record = kind(**VALID[kind])
    plain = decode_record(canonical_record(record))
    assert kind.from_plain(plain) == record
    with pytest.raises(ContractTypeError, match="an object"):
        kind.from_plain([plain])
    with pytest.raises(ContractError, match="unknown field"):
        kind.from_plain({**plain, "colour": 1})
    for name in plain:
        if name != "error_code":
            with pytest.raises(ContractError, match=rf"{kind.__name__}\.{name}: got nothing"):
                kind.from_plain({key: value for key, value in plain.items() if key != name})
    for name in kind.ENUMS:
        for value in ("no such", None, [], 0):
            with pytest.raises(ContractError, match=rf"{kind.__name__}\.{name}: got .*, expected one of"):
                kind.from_plain({**plain, name: value})
    for name in kind.TUPLES:  # lists came from the wire; a tuple would not have been there, nor would text
        with pytest.raises(ContractError, match=name):
            kind.from_plain({**plain, name: "16"})


@pytest.mark.parametrize(
    ("style", "dim", "local"),
    [
        (PlacementStyle.COLUMN_WISE, 0, (4, 24)),
        (PlacementStyle.ROW_WISE, 1, (16, 6)),
        (PlacementStyle.REPLICATED, None, (16, 24)),
    ],
)
def test_placements_of_each_style(style, dim, local):
    base = {**VALID[LogicalPlacement], "style": style, "global_shape": (16, 24)}
    placement = LogicalPlacement(**{**base, "shard_dim": dim, "local_shape": local})
    assert placement.local_shape == local
    for other_dim, other_local in itertools.product((0, 1, None), ((4, 24), (16, 6), (16, 24))):
        if (other_dim, other_local) != (dim, local):
            with pytest.raises(ContractError, match="shard_dim" if other_dim != dim else "local_shape"):
                LogicalPlacement(**{**base, "shard_dim": other_dim, "local_shape": other_local})


def test_bounds_are_inclusive():
    RunIdentity(**{**VALID[RunIdentity], "world_size": 2})
    RunIdentity(**{**VALID[RunIdentity], "world_size": 4096})
    RankInventory(**{**VALID[RankInventory], "free_memory_bytes": 20, "rank": 0, "local_rank": 3})
    RankInventory(**{**VALID[RankInventory], "free_memory_bytes": 0, "total_memory_bytes": 1})
    LogicalPlacement(**{**VALID[LogicalPlacement], "name": "é" * 2048})
    big = {"global_shape": (1 << 40, 6), "local_shape": (1 << 38, 6)}
    LogicalPlacement(**{**VALID[LogicalPlacement], **big})
    for coordinator in ("localhost:1", "10.0.0.1:65535", "[fe80::1]:29500", "a_b.c-d:80"):
        TopologyPlan(**{**VALID[TopologyPlan], "coordinator": coordinator})


def test_an_error_code_comes_with_an_abort_vote_and_never_without():
    fields = {"sequence": 0, "stage": Stage.CREATED}
    assert StageMessage(**fields, vote=Vote.COMMIT).error_code is None
    for code in ("LOST_PEER", "CUDA_OOM_ON_LOAD", "E_1"):
        assert StageMessage(**fields, vote=Vote.ABORT, error_code=code).error_code == code
        with pytest.raises(ContractError, match=r"error_code: got .*None with a commit"):
            StageMessage(**fields, vote=Vote.COMMIT, error_code=code)
    with pytest.raises(ContractError, match="error_code: got None"):
        StageMessage(**fields, vote=Vote.ABORT)


# --- a world of inventories ---

IDENTITY = RunIdentity(**VALID[RunIdentity])


def inventory(rank: int, **changed: object) -> RankInventory:
    """Two hosts of two ranks."""
    fields = {
        "rank": rank,
        "local_rank": rank % 2,
        "world_size": 4,
        "host_digest": digest(100 + rank // 2),
        "device_digest": digest(200 + rank % 2),
        "software_digest": digest(5),
        "storage_digest": digest(6),
        "device_kind": "cpu",
        "free_memory_bytes": 1,
        "total_memory_bytes": 1,
    }
    return RankInventory(**{**fields, **changed})


WORLD = [inventory(rank) for rank in range(4)]


@given(st.permutations(WORLD))
def test_a_consistent_world_passes_in_any_order(records):
    assert validate_inventory_consensus(IDENTITY, records) == tuple(WORLD)
    assert validate_inventory_consensus(IDENTITY, tuple(records)) == tuple(WORLD)


def with_rank(rank: int, **changed: object) -> list[RankInventory]:
    return [inventory(r, **changed) if r == rank else inventory(r) for r in range(4)]


# Each step's fault, in the order of RENDEZVOUS.md, as a change of the arguments; later steps' faults must not
# hide earlier ones.
STEPS = [
    ("identity", lambda identity, records: (dataclasses.asdict(identity), records)),
    ("records[1]", lambda identity, records: (identity, [records[0], "rank 1", *records[2:]])),
    ("records", lambda identity, records: (identity, records[:-1])),
    ("rank", lambda identity, records: (identity, [*records[:-1], records[0]])),
    ("world_size", lambda identity, records: (identity, edit(records, 3, world_size=5))),
    (
        "device_digest",
        lambda identity, records: (identity, edit(records, 1, device_digest=records[0].device_digest)),
    ),
    ("local_rank", lambda identity, records: (identity, edit(records, 1, local_rank=records[0].local_rank))),
    ("software_digest", lambda identity, records: (identity, edit(records, 2, software_digest=digest(50)))),
    ("storage_digest", lambda identity, records: (identity, edit(records, 2, storage_digest=digest(60)))),
]


def edit(records, rank, **changed):
    return [
        dataclasses.replace(record, **changed) if isinstance(record, RankInventory) and record.rank == rank else record
        for record in records
    ]


@pytest.mark.parametrize("first", range(len(STEPS)), ids=[name for name, _ in STEPS])
def test_faults_are_found_in_the_documented_order(first):
    # All faults from `first` on are there at once: the first of them is the one that is named.
    arguments = (IDENTITY, list(WORLD))
    for _, spoil in reversed(STEPS[first:]):
        arguments = spoil(*arguments)
    with pytest.raises(ContractError) as caught:
        validate_inventory_consensus(*arguments)
    assert caught.value.field == STEPS[first][0]
    with pytest.raises(ContractError) as caught:
        validate_inventory_consensus(*STEPS[first][1](IDENTITY, list(WORLD)))
    assert caught.value.field == STEPS[first][0]


def test_the_ranks_in_question_are_named():
    with pytest.raises(ContractError, match="ranks 0 and 1 with the same") as caught:
        validate_inventory_consensus(IDENTITY, with_rank(1, device_digest=digest(200)))
    assert set(caught.value.failures) == {0, 1}
    with pytest.raises(ContractError, match="from rank 2 \\(1 of 4 ranks differ\\)") as caught:
        validate_inventory_consensus(IDENTITY, with_rank(2, software_digest=digest(9)))
    assert list(caught.value.failures) == [2]
    with pytest.raises(ContractError, match=r"missing \[3\], more than once \[1\]"):
        validate_inventory_consensus(IDENTITY, [*WORLD[:3], inventory(1)])
    with pytest.raises(ContractError, match=r"missing \[3\], more than once \[\], beyond the world \[4\]"):
        validate_inventory_consensus(IDENTITY, [*WORLD[:3], inventory(4, world_size=5)])


def test_equal_devices_and_local_ranks_of_two_hosts_are_no_conflict():
    # WORLD itself: ranks 0 and 2 share device digest and local rank on different hosts.
    assert WORLD[0].device_digest == WORLD[2].device_digest
    assert WORLD[0].local_rank == WORLD[2].local_rank
    validate_inventory_consensus(IDENTITY, WORLD)


@pytest.mark.parametrize(
    "records", [None, {0: WORLD[0]}, iter(WORLD), "abcd", [None] * 4, [dataclasses.asdict(r) for r in WORLD]]
)
def test_records_of_another_type_are_refused(records):
    with pytest.raises(ContractTypeError, match=r"inventory\.records"):
        validate_inventory_consensus(IDENTITY, records)
