"""Destination views whose steps have a huge common multiple are refused by name, never compared wrongly."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.planner import (
    Buffer,
    GeometryDict,
    Holder,
    PlanError,
    ReadRequest,
    ReadTable,
    Shard,
    ShardPart,
    ShardTable,
    plan,
)


def table(n: int) -> ShardTable:
    shards = [Shard("a", "uint8", (n,), (0,), (n,), 0, 0), Shard("b", "uint8", (n,), (0,), (n,), 0, n)]
    return ShardTable([ShardPart.from_shards(Holder("h"), shards, [2 * n])])


def stepped(n: int, steps: tuple[int, int], order: tuple[int, int], size: int) -> ReadTable:
    requests = [
        ReadRequest(name, (n,), "uint8", (0,), (1,), (n,), 0, i, (step,), turn)
        for i, (name, step, turn) in enumerate(zip("ab", steps, order, strict=True))
    ]
    return ReadTable.build([Buffer("p", (size,), "uint8")], requests)


def test_coprime_steps_are_compared_exactly() -> None:
    # 0 + 6 i and 1 + 4 j never meet (one is even, the other odd); 0 + 6 i and 1 + 5 j do
    assert plan(table(20), stepped(20, (6, 4), (0, 0), 200)).certificate.written_bytes == 40
    made = plan(table(20), stepped(20, (6, 5), (0, 1), 200))
    met = {6 * i for i in range(20)} & {1 + 5 * j for j in range(20)}
    assert met
    assert made.certificate.written_bytes == 40 - len(met)


def test_steps_of_a_huge_common_multiple_are_refused() -> None:
    n, steps = 3, (2**21 - 1, 2**21 - 3)
    with pytest.raises(PlanError, match="boxes"):
        plan(table(n), stepped(n, steps, (0, 1), 1 << 24))


def test_a_wrapping_box_that_nobody_uses_does_not_hide_empty_shards() -> None:
    # three boxes: a real one, an empty one, and one whose volume wraps around 2**63; the last is in the dictionary only
    big = 1 << 32
    boxes = GeometryDict.build([((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0, 0), (big, 1 << 31))])
    assert int(boxes.volume.min()) < 0
    part = ShardPart.from_shards(Holder("h"), [Shard("w", "uint8", (2, 2), (0, 0), (2, 2))], [4])
    column = np.array([0, 0])
    none = np.zeros(2, np.int64)
    odd = ShardPart(Holder("h"), part.tensors, boxes, column, np.array([0, 1]), none, none, none - 1, np.array([4]))
    view = ReadRequest("w", (2, 2), "uint8", (0, 0), (1, 1), (2, 2), 0, 0, (2, 1))
    reads = ReadTable.build([Buffer("p", (2, 2), "uint8")], [view])
    assert plan(ShardTable([odd]), reads).economics.n_blocks == 1
