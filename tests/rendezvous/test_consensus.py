"""Frames, and the collectives really run over gloo with 2 and with 4 processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.rendezvous import consensus
from reshard.rendezvous.canonical import MAX_RECORD_BYTES, contract_digest
from reshard.rendezvous.errors import ContractError, ContractTypeError
from reshard.rendezvous.frames import FRAME_HEADER_BYTES, decode_frame, encode_frame

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'reshard[torch]'")

RANK = Path(__file__).with_name("gloo_rank.py")
ROOT = Path(__file__).parents[2]
DIGEST = "0123456789abcdef" * 4
OTHER = "f" * 64
GROUP_DEADLINE_S = 270.0

pytestmark = pytest.mark.timeout(300)  # four processes that import torch

COMMON = [
    "gather_records",
    "gather_a_world_that_is_not_one",
    "gather_plain_of_different_lengths",
    "gather_at_the_bound",
    "gather_with_other_bounds",
    "gather_other_kinds",
    "digests_agree",
    "digests_differ",
    "records_agree",
    "records_differ",
    "all_accept",
    "each_refuses_in_turn",
    "votes_of_other_sequences",
    "other_calls",
    "the_pages_example",
    "rank_order",
    "rank_order_swapped",
    "refused_arguments_do_not_touch_the_group",
    "a_subgroup",
    "forged_padding",
    "forged_length",
    "forged_spelling",
    "forged_list",
    "forged_fields",
    "forged_vote",
    "forged_sequence",
    "forged_record_length",
    "one_comes_too_late",  # the last: it leaves the group unusable
]


def run_group(world: int, scenarios: list[str], tmp_path: Path) -> list[dict | None]:
    """Run the scenarios on `world` processes; per rank what it printed, None where it died."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    store = tmp_path / "store"
    ranks = []
    deadline = time.monotonic() + GROUP_DEADLINE_S
    try:
        for rank in range(world):
            command = [sys.executable, str(RANK), str(rank), str(world), str(store), *scenarios]
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        results = []
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            assert process.returncode in (0, 9), f"rank {rank} ended with {process.returncode}:\n{err}"
            results.append(json.loads(out) if process.returncode == 0 else None)
        return results
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()


class Group:
    def __init__(self, world: int, results: list[dict]) -> None:
        self.world = world
        self.results = results

    def values(self, scenario: str) -> list[object]:
        for rank, result in enumerate(self.results):
            assert "value" in result[scenario], f"rank {rank}: {result[scenario].get('message')}"
        return [result[scenario]["value"] for result in self.results]

    def errors(self, scenario: str, *, but_last: bool = False) -> list[dict]:
        chosen = self.results[:-1] if but_last else self.results
        for rank, result in enumerate(chosen):
            assert "error" in result[scenario], f"rank {rank} got {result[scenario].get('value')!r}"
            assert "ContractError" in result[scenario]["error"], result[scenario]["message"]
        return [result[scenario] for result in chosen]


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def group(request, tmp_path_factory) -> Group:
    # One start of the processes for all scenarios: importing torch costs more than they do together. So that
    # each also shows that the ones before it, refusals included, left the group in step.
    return Group(request.param, run_group(request.param, COMMON, tmp_path_factory.mktemp("gloo")))


def test_records_come_back_as_records_in_rank_order(group):
    assert (
        group.values("gather_records") == [{"same": True, "validated": True, "kinds": ["RankInventory"]}] * group.world
    )


def test_gathered_inventories_that_differ_are_refused_by_all(group):
    for error in group.errors("gather_a_world_that_is_not_one"):
        assert error["field"] == "software_digest"
        assert error["failures"] == {str(group.world - 1): repr(OTHER)}


def test_plain_records_of_any_length(group):
    expected = [None, "", {"rank": 2, "text": "é" * 400}, ["x"] * 3][: group.world]
    assert group.values("gather_plain_of_different_lengths") == [expected] * group.world
    lengths = [*range(group.world - 1), 998]
    assert group.values("gather_at_the_bound") == [lengths] * group.world


def test_gathers_with_other_bounds_or_kinds_are_refused_by_all(group):
    for rank, error in enumerate(group.errors("gather_with_other_bounds")):
        assert error["field"] == "max_bytes"
        assert set(error["failures"].values()) == ({"200"} if rank == 0 else {"100"})
    for rank, error in enumerate(group.errors("gather_other_kinds")):
        assert error["field"] == "kind"
        assert set(error["failures"].values()) == ({"plain"} if rank == 0 else {"RunIdentity"})


def test_the_example_of_the_page_runs(group):
    assert group.values("the_pages_example") == [[True, group.world]] * group.world


def test_digest_consensus(group):
    assert group.values("digests_agree") == [DIGEST] * group.world
    last = group.world - 1
    for rank, error in enumerate(group.errors("digests_differ")):
        assert error["field"] == "digest"
        others = {str(last): OTHER} if rank != last else {str(other): DIGEST for other in range(last)}
        assert error["failures"] == others


def test_record_consensus(group):
    digests = group.values("records_agree")
    assert len(set(digests)) == 1
    assert len(digests[0]) == 64
    last = group.world - 1
    for rank, error in enumerate(group.errors("records_differ")):
        assert error["field"] == "record"
        if rank != last:
            assert error["failures"] == {str(last): contract_digest({"step": 7})}


def test_votes_are_unanimous_or_no(group):
    assert group.values("all_accept") == [True] * group.world
    assert group.values("each_refuses_in_turn") == [[False] * group.world] * group.world


def test_votes_of_other_sequences_are_no_decision(group):
    assert {error["field"] for error in group.errors("votes_of_other_sequences")} == {"sequence"}


def test_ranks_that_came_to_other_calls_are_told(group):
    for rank, error in enumerate(group.errors("other_calls")):
        assert error["field"] == "call"
        assert ("require_consensus_digest" if rank == 0 else "unanimous_vote") in error["failures"].values()


def test_rank_order(group):
    assert group.values("rank_order") == ["ordered"] * group.world
    for error in group.errors("rank_order_swapped"):
        assert error["failures"] == {"0": "1", "1": "0"}
        assert "rank 1 in place 0" in error["message"]


def test_refused_arguments_leave_the_group_in_step(group):
    assert group.values("refused_arguments_do_not_touch_the_group") == [True] * group.world


def test_a_subgroup_is_asked_alone(group):
    for rank, result in enumerate(group.results):
        if rank < 2:
            assert result["a_subgroup"]["value"] is True
        else:
            assert result["a_subgroup"]["field"] == "group"


@pytest.mark.parametrize(
    ("scenario", "field"),
    [
        ("forged_padding", "padding"),
        ("forged_length", "length"),
        ("forged_spelling", "$"),
        ("forged_list", "$"),
        ("forged_fields", "$"),
        ("forged_vote", "accepted"),
        ("forged_sequence", "sequence"),
        ("forged_record_length", "n_bytes"),
    ],
)
def test_what_another_rank_sends_is_not_trusted(group, scenario, field):
    for error in group.errors(scenario, but_last=True):
        assert error["field"] == field
        assert f"from rank {group.world - 1}" in error["message"]


def test_a_rank_that_comes_too_late(group):
    for result in group.results[:-1]:
        outcome = result["one_comes_too_late"]
        assert {"RendezvousTimeoutError", "TimeoutError"} <= set(outcome["error"]), outcome["message"]
        assert "1.0 s" in outcome["message"]


def test_a_rank_that_dies(tmp_path):
    *alive, dead = run_group(2, ["one_dies"], tmp_path)
    assert dead is None
    for result in alive:
        assert "RendezvousError" in result["one_dies"]["error"], result["one_dies"]["message"]
        assert {"ConnectionError", "TimeoutError"} & set(result["one_dies"]["error"])


# --- without processes ---

VALID_CALLS = {
    "all_gather_records": lambda **more: consensus.all_gather_records({"a": 1}, **more),
    "require_consensus_digest": lambda **more: consensus.require_consensus_digest(DIGEST, **more),
    "require_record_consensus": lambda **more: consensus.require_record_consensus({"a": 1}, **more),
    "unanimous_vote": lambda **more: consensus.unanimous_vote(0, True, **more),
    "assert_rank_order": lambda **more: consensus.assert_rank_order(0, **more),
}

BAD_DIGESTS = ("", "A" * 64, "a" * 63, "a" * 65, None, b"a" * 64)
BAD_SEQUENCES = (-1, True, 1.0, "0", None, 1 << 63)
REFUSED_CALLS = [
    ("$", lambda: consensus.all_gather_records(1.5)),
    ("$.a", lambda: consensus.all_gather_records({"a": object()})),
    ("$", lambda: consensus.all_gather_records("x" * 100, max_bytes=50)),
    ("max_bytes", lambda: consensus.all_gather_records(1, max_bytes=0)),
    ("max_bytes", lambda: consensus.all_gather_records(1, max_bytes=True)),
    ("max_bytes", lambda: consensus.require_record_consensus(1, max_bytes=MAX_RECORD_BYTES + 1)),
    ("$", lambda: consensus.require_record_consensus(b"x")),
    *(("digest", lambda d=d: consensus.require_consensus_digest(d)) for d in BAD_DIGESTS),
    *(("sequence", lambda s=s: consensus.unanimous_vote(s, True)) for s in BAD_SEQUENCES),
    *(("accepted", lambda a=a: consensus.unanimous_vote(0, a)) for a in (1, 0, None, "yes", 1.0)),
    *(("rank", lambda r=r: consensus.assert_rank_order(r)) for r in (-1, 4096, True, 0.0, "0")),
]  # fmt: skip


def test_an_initialised_group_is_needed():
    for name, call in VALID_CALLS.items():
        with pytest.raises(ContractError, match=rf"{name}\.group: got no initialised process group"):
            call()


@pytest.mark.parametrize(("field", "call"), REFUSED_CALLS)
def test_arguments_are_validated_before_the_group_is_looked_for(field, call):
    with pytest.raises(ContractError) as caught:
        call()
    assert caught.value.field == field


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), True, None, "1"], ids=repr)
@pytest.mark.parametrize("name", list(VALID_CALLS))
def test_every_wait_has_a_deadline(name, timeout_s):
    with pytest.raises(ContractError, match=rf"{name}\.timeout_s"):
        VALID_CALLS[name](timeout_s=timeout_s)


def test_another_backend_is_refused():
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for name, call in VALID_CALLS.items():
            with pytest.raises(ContractError, match=rf"{name}\.group: got .*fake.*, expected a group with gloo"):
                call()
    finally:
        dist.destroy_process_group()


def test_importing_and_validating_need_no_torch():
    script = (
        "import sys\n"
        "from reshard.rendezvous import consensus, frames\n"
        "from reshard.rendezvous.errors import ContractError\n"
        "try:\n    consensus.unanimous_vote(-1, True)\n"
        "except ContractError:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None\n"
        "try:\n    consensus.unanimous_vote(0, True)\n"
        "except ImportError as error:\n    print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'reshard[torch]'" in done.stdout


# --- frames ---


@given(st.binary(max_size=200), st.integers(0, 40))
def test_frames_round_trip(payload, room):
    capacity = max(1, len(payload) + room)
    frame = encode_frame(payload, capacity)
    assert frame.dtype == torch.uint8
    assert tuple(frame.shape) == (FRAME_HEADER_BYTES + capacity,)
    raw = frame.numpy().tobytes()
    assert raw == len(payload).to_bytes(4, "big") + payload + bytes(capacity - len(payload))
    assert decode_frame(frame) == payload


@given(st.binary(max_size=40), st.integers(0, 40), st.data())
def test_a_changed_byte_is_refused_or_in_the_payload(payload, room, data):
    capacity = max(1, len(payload) + room)
    frame = encode_frame(payload, capacity)
    index = data.draw(st.integers(0, frame.numel() - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != int(frame[index])))
    frame[index] = byte
    try:
        decoded = decode_frame(frame)
    except ContractError:
        assert not FRAME_HEADER_BYTES <= index < FRAME_HEADER_BYTES + len(payload)
        return
    assert decoded != payload
    assert torch.equal(encode_frame(decoded, capacity), frame)


@given(st.binary(max_size=64))
def test_any_frame_decodes_to_what_encodes_to_it_or_is_refused(raw):
    frame = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    try:
        payload = decode_frame(frame)
    except ContractError:
        return
    assert torch.equal(encode_frame(payload, len(raw) - FRAME_HEADER_BYTES), frame)


def test_frames_of_another_type_or_shape():
    good = encode_frame(b"ab", 4)
    for frame in (good.numpy(), bytes(8), [0] * 8, None):
        with pytest.raises(ContractTypeError, match=r"frame\.frame: got \w+, expected a torch\.Tensor"):
            decode_frame(frame)
    for frame in (good.to(torch.int8), good.to(torch.int64), good.bool(), good.to("meta")):
        with pytest.raises(ContractTypeError, match=r"expected torch\.uint8 on the CPU"):
            decode_frame(frame)
    for frame in (good.reshape(1, -1), good.reshape(-1, 2), good[0]):
        with pytest.raises(ContractError, match="one dimension"):
            decode_frame(frame)
    for n_bytes in range(5):
        with pytest.raises(ContractError, match="some capacity"):
            decode_frame(torch.zeros(n_bytes, dtype=torch.uint8))
    assert decode_frame(torch.zeros(5, dtype=torch.uint8)) == b""
    assert decode_frame(torch.stack([good, good], dim=1)[:, 0]) == b"ab"  # strided is fine


def test_frames_name_what_is_wrong():
    frame = encode_frame(b"ab", 4)
    frame[3] = 5
    with pytest.raises(ContractError, match=r"frame\.length: got 5, expected at most the capacity of 4"):
        decode_frame(frame)
    frame = encode_frame(b"ab", 4)
    frame[7] = 1
    with pytest.raises(ContractError, match=r"frame\.padding: got bytes other than zero"):
        decode_frame(frame)


@pytest.mark.parametrize("capacity", [0, -1, True, 1.0, None, MAX_RECORD_BYTES + 1], ids=repr)
def test_capacity_is_bounded(capacity):
    with pytest.raises(ContractError, match=r"frame\.capacity"):
        encode_frame(b"", capacity)


def test_payloads_are_bytes_that_fit():
    with pytest.raises(ContractError, match="got 3 bytes, expected at most the capacity of 2"):
        encode_frame(b"abc", 2)
    for payload in ("ab", bytearray(b"ab"), None):
        with pytest.raises(ContractTypeError, match=r"frame\.payload"):
            encode_frame(payload, 4)
