"""How does a call end on all trainer ranks alike? They tell each other over torch.distributed.

The engine reads all ranks, but only rank 0 talks to it: without a word from rank 0 the others would go on, and take
away what is being read, or wait for ever for a rank that has failed.
"""

from __future__ import annotations

from collections.abc import Callable

from reshard.planner.errors import require
from reshard.refit.errors import PublishError

__all__ = ["on_all_ranks"]


def on_all_ranks(rank: int, world_size: int, what: str, work: Callable[[], object]) -> None:
    """Do something on each trainer rank; return when all have done it, and raise on all if it failed on any.

    The ranks tell each other over torch.distributed's default group if its rank and size are the given ones, and wait
    for each other as long as the ``timeout`` that this group was made with. Otherwise nobody waits.

    Parameters
    ----------
    what
        Names the work in errors.

    Raises
    ------
    PublishError
        It failed on other ranks, which are named. A rank on which it failed raises its own error.
    """
    own: Exception | None = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the other ranks wait for a word
        own = error
    said = _told_by_all(rank, world_size, f"{type(own).__name__}: {own}" if own is not None else "")
    if own is not None:
        raise own
    failed = [f"rank {of}: {text}" for of, text in enumerate(said) if text]
    if failed:
        raise PublishError(f"{what} failed on {len(failed)} of {world_size} trainer ranks: {'; '.join(failed)}")


def _told_by_all(rank: int, world_size: int, text: str) -> list[str]:
    """What each rank says, in their order; nothing where they cannot tell."""
    require("torch", extra="torch")
    import torch.distributed as dist

    if world_size == 1 or not dist.is_available() or not dist.is_initialized():
        return []
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        return []
    said = [""] * world_size
    dist.all_gather_object(said, text)
    return said
