"""Which boxes of a global tensor does one rank of a device mesh hold? Pure arithmetic, without torch.

A tensor dim is split by some mesh dims, in mesh order, each by torch's chunk rule: pieces of ceil(n / k), the last
ones shorter or empty. A *strided* split with factor f first cuts the dim into f pieces and takes this rank's chunk of
each: that is how DTensor writes down that a mesh dim further right splits first (FSDP over tensor parallelism).

1. `Split` is one such split: k ranks, this rank's index, the factor.
2. `held_runs` applies splits to one dim: what remains are runs of global indices, in local order.
3. `held_boxes` takes the product over the dims: boxes, each with its place in the local tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reshard.planner.errors import TableError

__all__ = ["HeldBox", "Split", "held_boxes", "held_runs"]

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh dim's split of a tensor dim.

    Parameters
    ----------
    ranks
        Size of the mesh dim, at least 1.
    rank
        This rank's coordinate on it, in [0, ranks).
    factor
        1 for a plain split; otherwise the number of pieces that are cut first (`_StridedShard.split_factor`).
    """

    ranks: int
    rank: int
    factor: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 0 <= self.rank < self.ranks or self.factor < 1:
            raise TableError(f"split: got rank {self.rank} of {self.ranks}, factor {self.factor}")


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of the global tensor and where it lies in the local one.

    Parameters
    ----------
    start, stop
        Global box, half-open, elements.
    local_start
        Where the box starts in the local tensor, elements.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    local_start: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the box's extent, one entry a dim."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


def held_runs(size: int, splits: Iterable[Split]) -> list[Run]:
    """Return the runs of [0, size) that a rank holds after some splits, in local order.

    Parameters
    ----------
    size
        Global extent of the dim.
    splits
        The splits, in mesh order.

    Returns
    -------
    list of (start, stop)
        Half-open, none empty, neighbours merged. An empty list: the rank holds nothing.

    Examples
    --------
    Six rows over four ranks: the last rank holds none.

    >>> [held_runs(6, [Split(4, rank)]) for rank in range(4)]
    [[(0, 2)], [(2, 4)], [(4, 6)], []]

    FSDP over tensor parallelism, 2 x 2, where tensor parallelism splits first:

    >>> [held_runs(6, [Split(2, dp, factor=2), Split(2, tp)]) for dp in range(2) for tp in range(2)]
    [[(0, 2)], [(3, 5)], [(2, 3)], [(5, 6)]]
    """
    runs: list[Run] = [(0, size)] if size else []
    for split in splits:
        total = sum(stop - start for start, stop in runs)
        kept: list[Run] = []
        for first, last in _chunks(0, total, split.factor):
            own = _chunks(first, last, split.ranks)[split.rank]
            kept += _cut(runs, *own)
        runs = _merge(kept)
    return runs


def held_boxes(shape: Sequence[int], splits: Sequence[Sequence[Split]]) -> list[HeldBox]:
    """Return the boxes that a rank holds.

    Parameters
    ----------
    shape
        Global shape.
    splits
        For each dim of the tensor, its splits in mesh order.

    Returns
    -------
    list of HeldBox
        Disjoint and none empty; more than one only where a strided split leaves several runs.
    """
    if len(shape) != len(splits):
        raise TableError(f"splits: got {len(splits)} dims, expected {len(shape)}")
    per_dim: list[list[tuple[int, int, int]]] = []
    for size, of_dim in zip(shape, splits, strict=True):
        local = 0
        placed: list[tuple[int, int, int]] = []
        for start, stop in held_runs(size, of_dim):
            placed.append((start, stop, local))
            local += stop - start
        per_dim.append(placed)
    return [
        HeldBox(tuple(r[0] for r in runs), tuple(r[1] for r in runs), tuple(r[2] for r in runs))
        for runs in itertools.product(*per_dim)
    ]


def _chunks(start: int, stop: int, n: int) -> list[Run]:
    """Cut [start, stop) into n pieces of ceil(size / n), the last ones shorter or empty."""
    step = -(-(stop - start) // n)
    return [(min(start + i * step, stop), min(start + (i + 1) * step, stop)) for i in range(n)]


def _cut(runs: list[Run], first: int, last: int) -> list[Run]:
    """Return the local positions [first, last) of some runs."""
    kept: list[Run] = []
    position = 0
    for start, stop in runs:
        low, high = max(first, position), min(last, position + stop - start)
        if low < high:
            kept.append((start + low - position, start + high - position))
        position += stop - start
    return kept


def _merge(runs: list[Run]) -> list[Run]:
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
