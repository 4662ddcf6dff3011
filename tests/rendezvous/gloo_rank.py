"""One rank of a gloo group, run as a script: ``gloo_rank.py RANK WORLD STORE SCENARIO...``.

Each scenario is entered by every rank in the same order. What it returned, or how it failed, is printed as
one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from reshard.rendezvous.canonical import canonical_record
from reshard.rendezvous.consensus import (
    all_gather_records,
    assert_rank_order,
    require_consensus_digest,
    require_record_consensus,
    unanimous_vote,
)
from reshard.rendezvous.contracts import RankInventory, RunIdentity, validate_inventory_consensus
from reshard.rendezvous.frames import encode_frame

TIMEOUT_S = 120.0
DIGEST = "0123456789abcdef" * 4
OTHER = "f" * 64


def identity(world: int) -> RunIdentity:
    return RunIdentity(run_id="a" * 32, commit="b" * 40, config_digest=DIGEST, model_digest=OTHER, world_size=world)


def inventory(rank: int, world: int, **changed: object) -> RankInventory:
    fields: dict[str, object] = {
        "rank": rank,
        "local_rank": rank,
        "world_size": world,
        "host_digest": DIGEST,
        "device_digest": f"{rank:064x}",
        "software_digest": DIGEST,
        "storage_digest": DIGEST,
        "device_kind": "cpu",
        "free_memory_bytes": rank,
        "total_memory_bytes": 1 << 40,
    }
    return RankInventory(**{**fields, **changed})


class Scenarios:
    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.last = rank == world - 1
        self.pair = dist.new_group([0, 1])

    def gather_records(self):
        records = all_gather_records(inventory(self.rank, self.world), timeout_s=TIMEOUT_S)
        same = records == tuple(inventory(rank, self.world) for rank in range(self.world))
        validated = validate_inventory_consensus(identity(self.world), records) == records
        return {"same": same, "validated": validated, "kinds": sorted({type(r).__name__ for r in records})}

    def gather_a_world_that_is_not_one(self):
        inventories = all_gather_records(
            inventory(self.rank, self.world, software_digest=OTHER if self.last else DIGEST),
            timeout_s=TIMEOUT_S,
        )
        return len(validate_inventory_consensus(identity(self.world), inventories))

    def gather_plain_of_different_lengths(self):
        own = [None, "", {"rank": self.rank, "text": "é" * 200 * self.rank}, ["x"] * self.rank][self.rank % 4]
        return list(all_gather_records(own, max_bytes=1 << 16, timeout_s=TIMEOUT_S))

    def gather_at_the_bound(self):
        own = "x" * (998 if self.last else self.rank)  # 1000 bytes with its quotes
        return [len(text) for text in all_gather_records(own, max_bytes=1000, timeout_s=TIMEOUT_S)]

    def gather_with_other_bounds(self):
        return all_gather_records(1, max_bytes=100 if self.rank == 0 else 200, timeout_s=TIMEOUT_S)

    def gather_other_kinds(self):
        record = identity(self.world) if self.rank == 0 else {"world_size": self.world}
        return all_gather_records(record, timeout_s=TIMEOUT_S)

    def digests_agree(self):
        return require_consensus_digest(DIGEST, timeout_s=TIMEOUT_S)

    def digests_differ(self):
        return require_consensus_digest(OTHER if self.last else DIGEST, timeout_s=TIMEOUT_S)

    def records_agree(self):
        return require_record_consensus(identity(self.world), timeout_s=TIMEOUT_S)

    def records_differ(self):
        return require_record_consensus({"step": 7 if self.last else 6}, timeout_s=TIMEOUT_S)

    def all_accept(self):
        return unanimous_vote(0, True, timeout_s=TIMEOUT_S)

    def each_refuses_in_turn(self):
        return [unanimous_vote(turn, turn != self.rank, timeout_s=TIMEOUT_S) for turn in range(self.world)]

    def votes_of_other_sequences(self):
        return unanimous_vote(3 if self.rank == 0 else 4, True, timeout_s=TIMEOUT_S)

    def other_calls(self):
        if self.rank == 0:
            return unanimous_vote(0, True, timeout_s=TIMEOUT_S)
        return require_consensus_digest(DIGEST, timeout_s=TIMEOUT_S)

    def rank_order(self):
        assert_rank_order(timeout_s=TIMEOUT_S)
        assert_rank_order(self.rank, timeout_s=TIMEOUT_S)
        return "ordered"

    def the_pages_example(self):
        page = Path(__file__).parents[2] / "docs/consensus.md"
        (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        scope: dict[str, object] = {}
        exec(compile(code, str(page), "exec"), scope)
        return [scope["go_on"], len(scope["inventories"])]

    def rank_order_swapped(self):
        return assert_rank_order({0: 1, 1: 0}.get(self.rank, self.rank), timeout_s=TIMEOUT_S)

    def refused_arguments_do_not_touch_the_group(self):
        # Only rank 0 calls, wrongly: had anything been sent, the next scenario would fail.
        if self.rank == 0:
            for call in (
                lambda: unanimous_vote(True, True),
                lambda: require_consensus_digest("xyz"),
                lambda: all_gather_records(1.5),
                lambda: assert_rank_order(-1),
                lambda: require_record_consensus({}, max_bytes=1),
                lambda: unanimous_vote(0, True, timeout_s=0),
            ):
                try:
                    call()
                except ValueError:
                    continue
                return "not refused"
        return unanimous_vote(9, True, timeout_s=TIMEOUT_S)

    def a_subgroup(self):
        return unanimous_vote(1, True, group=self.pair, timeout_s=TIMEOUT_S)

    def forged(self, frame: torch.Tensor):
        """The last rank sends `frame` in place of its vote."""
        if not self.last:
            return unanimous_vote(0, True, timeout_s=TIMEOUT_S)
        frames = [torch.empty_like(frame) for _ in range(self.world)]
        dist.all_gather(frames, frame)
        return "forged"

    def forged_padding(self):
        frame = encode_frame(b"{}", 256)
        frame[-1] = 1
        return self.forged(frame)

    def forged_length(self):
        frame = encode_frame(b"{}", 256)
        frame[0] = 255
        return self.forged(frame)

    def forged_spelling(self):
        return self.forged(encode_frame(b'{"call": "unanimous_vote"}', 256))

    def forged_list(self):
        return self.forged(encode_frame(b"[]", 256))

    def forged_fields(self):
        return self.forged(encode_frame(canonical_record({"call": "unanimous_vote", "sequence": 0}), 256))

    def forged_vote(self):
        fields = {"call": "unanimous_vote", "sequence": 0, "accepted": 1}
        return self.forged(encode_frame(canonical_record(fields), 256))

    def forged_sequence(self):
        fields = {"call": "unanimous_vote", "sequence": False, "accepted": True}
        return self.forged(encode_frame(canonical_record(fields), 256))

    def forged_record_length(self):
        if not self.last:
            return all_gather_records(1, max_bytes=100, timeout_s=TIMEOUT_S)
        fields = {"call": "all_gather_records", "kind": "plain", "max_bytes": 100, "n_bytes": 1 << 40}
        return self.forged(encode_frame(canonical_record(fields), 256))

    # The following leave the group unusable: one of them, as the last.

    def one_comes_too_late(self):
        if self.last:
            time.sleep(6.0)  # longer than the others wait, shorter than the group's own limit
            return "late"
        return unanimous_vote(0, True, timeout_s=1.0)

    def one_dies(self):
        if self.last:
            os._exit(9)
        return unanimous_vote(0, True, timeout_s=60.0)


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[3], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    scenarios = Scenarios(rank, world)
    results: dict[str, object] = {}
    for name in sys.argv[4:]:
        began = time.monotonic()
        try:
            results[name] = {"value": getattr(scenarios, name)()}
        except Exception as error:
            results[name] = {
                "error": [kind.__name__ for kind in type(error).__mro__],
                "message": str(error),
                "field": getattr(error, "field", None),
                "failures": getattr(error, "failures", None),
            }
        results[name]["seconds"] = time.monotonic() - began
    print(json.dumps(results), flush=True)
    os._exit(0)  # a group with a dead or late member must not hold the process at exit


if __name__ == "__main__":
    main()
