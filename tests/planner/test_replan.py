"""Planning again after holders came, went and changed, against planning afresh: a stateful test and named cases."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.reference import RefTensor
from tests.strategies import shapes, shardings, views

from reshard.planner import (
    Buffer,
    CostModel,
    Holder,
    Plan,
    PlanError,
    PlanOptions,
    ReadRequest,
    ReadTable,
    ReshardError,
    Shard,
    ShardPart,
    ShardTable,
    plan,
)
from reshard.planner.diff import diff_plans, diff_tables, replan
from reshard.planner.execute import execute

NAMES = [f"trainer-{index}" for index in range(6)]


def columns(thing: object) -> list[object]:
    """Every array of a record of columns, as lists, for comparison."""
    out: list[object] = []
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        values = value if isinstance(value, tuple) else (value,)
        out += [v.tolist() if isinstance(v, np.ndarray) else v for v in values]
    return out


def facts(made: Plan) -> dict[str, object]:
    """All that a receiver can see of a plan."""
    certificate, economics = made.certificate, made.economics
    return {
        "digest": made.digest,
        "holders": made.holders,
        "n_waves": made.n_waves,
        "staging_bytes": made.staging_bytes,
        "rows": [columns(made.rows(wave)) for wave in range(made.n_waves)],
        "copies": [sorted(zip(*columns_of_copies(made, wave), strict=True)) for wave in range(made.n_waves)],
        "fills": columns(made.fills),
        "written": (certificate.written_bytes, certificate.filled_bytes, certificate.unwritten_bytes),
        "unconsumed": certificate.unconsumed,
        "economics": columns(economics),
        "assumptions": made.assumptions,
    }


def columns_of_copies(made: Plan, wave: int) -> list[list[int]]:
    """Local copies but for the numbers of their templates, which are the planner's own business."""
    copies = made.copies(wave)
    out: list[list[int]] = []
    for field in dataclasses.fields(copies):
        if field.name == "shape_class":
            continue
        value = getattr(copies, field.name)
        for column in value if isinstance(value, tuple) else (value,):
            out.append(column.tolist())
    return out


class Replanning(RuleBasedStateMachine):
    """A model of few tensors; holders publish any boxes of them, in a layout of their own or as replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, ShardPart] = {}
        self.changed: dict[str, ShardPart] = {}
        self.removed: set[str] = set()
        self.made: Plan | None = None

    @initialize(data=st.data())
    def model(self, data: st.DataObject) -> None:
        shape = data.draw(shapes(min_rank=1, max_rank=2, max_elems=30))
        n_layers = data.draw(st.integers(1, 4))
        self.tensors = {f"layers.{layer}.w": ("bfloat16", shape) for layer in range(n_layers)}
        if data.draw(st.booleans()):
            self.tensors["head"] = ("float32", data.draw(shapes(max_rank=2, max_elems=30)))
        self.usual = data.draw(shardings(shape))
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        self.content = {
            name: rng.integers(0, 256, (*s, 2 if label == "bfloat16" else 4), dtype=np.uint8)
            for name, (label, s) in self.tensors.items()
        }
        buffers, requests = [], []
        for name, (label, s) in self.tensors.items():
            view = data.draw(views(RefTensor(name, label, s)))
            strides, running = [], 1
            for count in reversed(view.count):
                strides.insert(0, running)
                running *= count
            requests.append(
                ReadRequest(name, s, label, view.start, view.step, view.count, len(buffers), 0, tuple(strides))
            )
            buffers.append(Buffer(name, view.count, label))
        self.reads = ReadTable.build(buffers, requests)
        self.options = data.draw(
            st.builds(
                PlanOptions,
                policy=st.sampled_from(["spread", "first"]),
                max_runs_per_block=st.sampled_from([1, 64]),
                staging_bytes=st.sampled_from([4096, 1 << 20]),
            )
        )
        if data.draw(st.integers(0, 2)):
            self.cut_over_the_holders(data)
            self.parts, self.changed = self.changed, {}
        else:
            self.parts = {"trainer-0": self.part("trainer-0", list(self.tensors), [None], data)}
        self.made = plan(ShardTable(self.parts.values()), self.reads, self.options)

    def part(self, holder: str, names: list[str], boxes: list[object], data: st.DataObject) -> ShardPart:
        shards, used = [], 0
        for name in names:
            label, shape = self.tensors[name]
            for box in boxes:
                start, stop = box if box is not None else ((0,) * len(shape), shape)
                shards.append(Shard(name, label, shape, start, stop, 0, used, 3))
                used += int(np.prod([b - a for a, b in zip(start, stop, strict=True)])) * (
                    2 if label == "bfloat16" else 4
                )
        layout = "whole" if boxes == [None] else "cut"
        spare = data.draw(st.integers(0, 3))
        return ShardPart.from_shards(Holder(holder), shards, [used + spare], layout, "one content")

    @rule(holder=st.sampled_from(NAMES[1:]), data=st.data())
    def publish_everything(self, holder: str, data: st.DataObject) -> None:
        """A replica of the whole model, or of some tensors."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.tensors)), unique=True))
        self.change(self.part(holder, names, [None], data))

    @rule(data=st.data())
    def cut_over_the_holders(self, data: st.DataObject) -> None:
        """The usual sharding over the holders in turn; the first one keeps what is not a layer."""
        layers = [name for name in self.tensors if name != "head"]
        for number, name in enumerate(NAMES[1:]):
            self.change(self.part(name, layers, self.usual[number :: len(NAMES) - 1], data))
        self.change(self.part("trainer-0", [name for name in self.tensors if name == "head"], [None], data))

    @rule(holder=st.sampled_from(NAMES))
    def vanish(self, holder: str) -> None:
        if holder in self.parts or holder in self.changed:
            self.changed.pop(holder, None)
            if holder in self.parts:
                self.removed.add(holder)

    @rule(holder=st.sampled_from(NAMES), data=st.data())
    def move_in_memory(self, holder: str, data: st.DataObject) -> None:
        """The same boxes at other offsets."""
        part = self.changed.get(holder, self.parts.get(holder))
        if part is None or holder in self.removed or not len(part):
            return
        shift = data.draw(st.integers(0, 64))
        self.change(
            dataclasses.replace(part, offset_bytes=part.offset_bytes + shift, region_bytes=part.region_bytes + shift)
        )

    def change(self, part: ShardPart) -> None:
        self.removed.discard(part.holder.name)
        self.changed[part.holder.name] = part

    @precondition(lambda self: self.made is not None and (self.changed or self.removed))
    @rule()
    def plan_again(self) -> None:
        parts = {**self.parts, **self.changed}
        for name in self.removed:
            parts.pop(name, None)
        sources = ShardTable(parts.values())
        afresh: Plan | None = None
        error: ReshardError | None = None
        try:
            afresh = plan(sources, self.reads, self.options)
        except ReshardError as caught:
            error = caught
        if error is not None:
            with pytest.raises(type(error)) as again:
                replan(self.made, list(self.changed.values()), sorted(self.removed))
            assert str(again.value) == str(error)
            self.changed.clear()
            self.removed.clear()
            return
        assert afresh is not None
        replanned = replan(self.made, list(self.changed.values()), sorted(self.removed))
        assert facts(replanned) == facts(afresh)
        assert diff_plans(replanned, afresh).empty
        diff = diff_tables(self.made.sources, sources)
        assert set(diff.removed) == self.removed
        assert set(diff.unchanged) | set(diff.changed) | set(diff.added) == set(parts)
        self.check_bytes(replanned, parts)
        self.parts, self.made = parts, replanned
        self.changed, self.removed = {}, set()

    def check_bytes(self, made: Plan, parts: dict[str, ShardPart]) -> None:
        memory = {}
        for name, part in parts.items():
            region = np.zeros(int(part.region_bytes[0]), np.uint8)
            for row in range(len(part)):
                tensor = part.tensors.name(int(part.tensor_id[row]))
                box = int(part.geometry_id[row])
                rank = int(part.geometries.ndim[box])
                cut = tuple(
                    slice(int(part.geometries.start[-rank + d][box]), int(part.geometries.stop[-rank + d][box]))
                    for d in range(rank)
                )
                raw = np.ascontiguousarray(self.content[tensor][cut]).reshape(-1)
                at = int(part.offset_bytes[row])
                region[at : at + len(raw)] = raw
            memory[name] = [region]
        buffers = [np.zeros(n, np.uint8) for n in made.buffer_bytes.tolist()]
        execute(made, memory, buffers)
        for row in range(len(self.reads)):
            name = self.reads.tensors.name(int(self.reads.tensor_id[row]))
            rank = len(self.tensors[name][1])
            index = []
            for d in range(-rank, 0):
                a, s, c = (int(col[d][row]) for col in (self.reads.start, self.reads.step, self.reads.count))
                index.append(slice(a, a + s * (c - 1) + 1, s))
            want = np.ascontiguousarray(self.content[name][tuple(index)])
            assert buffers[int(self.reads.buffer_id[row])].tobytes() == want.tobytes()

    @invariant()
    def the_plan_is_of_the_current_table(self) -> None:
        if self.made is not None:
            assert {holder.name for holder in self.made.holders} <= set(self.parts)


Replanning.TestCase.settings = settings(
    max_examples=max(10, settings.default.max_examples // 2), stateful_step_count=20, deadline=None
)
TestReplanning = Replanning.TestCase


def fsdp_parts(n_holders: int, n_layers: int, group: int = -1) -> list[ShardPart]:
    rows = 8 * n_holders
    parts = []
    for rank in range(n_holders):
        shards = [
            Shard(f"layers.{layer}.w", "bfloat16", (rows, 4), (8 * rank, 0), (8 * rank + 8, 4), 0, layer * 64, group)
            for layer in range(n_layers)
        ]
        parts.append(ShardPart.from_shards(Holder(f"r{rank:02d}"), shards, [n_layers * 64]))
    return parts


def fsdp_reads(n_holders: int, n_layers: int) -> ReadTable:
    rows = 8 * n_holders
    return ReadTable.build(
        [Buffer(f"p{layer}", (rows, 2), "bfloat16") for layer in range(n_layers)],
        [
            ReadRequest(f"layers.{layer}.w", (rows, 4), "bfloat16", (0, 1), (1, 1), (rows, 2), layer, 0, (2, 1))
            for layer in range(n_layers)
        ],
    )


def test_parts_that_did_not_change_are_proved_by_digest_not_by_object() -> None:
    """A receiver that decodes every table anew still replans only what changed."""
    parts = fsdp_parts(4, 3)
    made = plan(ShardTable(parts), fsdp_reads(4, 3))
    again = replan(made, fsdp_parts(4, 3))
    assert facts(again) == facts(made)
    assert diff_tables(made.sources, again.sources).unchanged == ("r00", "r01", "r02", "r03")


def test_one_holder_in_another_layout() -> None:
    """r01 restarts with its rows in two shards each, in the other order."""
    parts = fsdp_parts(4, 3)
    made = plan(ShardTable(parts), fsdp_reads(4, 3), PlanOptions(cost=CostModel(descriptor_s=0.0)))
    shards = []
    for layer in reversed(range(3)):
        for start, stop in ((12, 16), (8, 12)):
            shards.append(Shard(f"layers.{layer}.w", "bfloat16", (32, 4), (start, 0), (stop, 4), 0, len(shards) * 32))
    changed = ShardPart.from_shards(Holder("r01"), shards, [192])
    again = replan(made, [changed])
    afresh = plan(made.sources.replace([changed]), made.reads, made.options)
    assert facts(again) == facts(afresh)
    assert diff_plans(made, again).changed == ("r01",)
    assert diff_plans(made, again).unchanged == ("r00", "r02", "r03")


def test_a_holder_that_vanishes_without_replica_is_missed_and_with_one_replaced() -> None:
    parts = fsdp_parts(2, 2)
    made = plan(ShardTable(parts), fsdp_reads(2, 2))
    with pytest.raises(ReshardError, match=r"\[8, 16\)"):
        replan(made, [], ["r01"])
    twins = [dataclasses.replace(part, holder=Holder(part.holder.name + "b")) for part in fsdp_parts(2, 2, group=1)]
    doubled = plan(ShardTable([*fsdp_parts(2, 2, group=1), *twins]), fsdp_reads(2, 2))
    survivors = replan(doubled, [], ["r01"])
    assert "r01" not in [holder.name for holder in survivors.holders]
    assert survivors.certificate.written_bytes == doubled.certificate.written_bytes


def test_contradictory_changes_are_refused() -> None:
    parts = fsdp_parts(2, 1)
    made = plan(ShardTable(parts), fsdp_reads(2, 1))
    with pytest.raises(PlanError, match="both changed and removed"):
        replan(made, [parts[0]], ["r00"])
    with pytest.raises(ReshardError, match="'ghost'"):
        replan(made, [], ["ghost"])
