"""What each gloo rank of `test_vllm_parts.py` runs: calls that must end alike on all ranks."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from reshard.refit.demo.channel import Channel
from reshard.refit.engines.vllm_ranks import on_all_ranks


def run_rank(channel: Channel, *, rank: int, world: int, store: str, done: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    taken = Path(done)

    def update() -> None:
        if rank == 0:
            time.sleep(0.5)
            taken.touch()

    def fail() -> None:
        if rank == 1:
            raise ValueError("no room")

    on_all_ranks(rank, world, "the update", update)
    waited = taken.exists()
    # In a trainer of one rank more, of which torch.distributed does not know, nobody waits for a word.
    answer = {"waited": waited, "told": outcome(rank, world, fail), "alone": outcome(rank, world + 1, fail)}
    channel.send({"answer": answer})
    dist.destroy_process_group()


def outcome(rank: int, world: int, work: object) -> str:
    try:
        on_all_ranks(rank, world, "publishing step 3", work)  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
