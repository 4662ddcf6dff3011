"""A small world for case tests: arrays that holders keep in pieces, and copies between NumPy views of them.

`World.copy` takes two NumPy index expressions; the same assignment on whole arrays is the right answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard.planner import (
    Buffer,
    Holder,
    Plan,
    PlanOptions,
    ReadRequest,
    ReadTable,
    Shard,
    ShardPart,
    ShardTable,
    plan,
)
from reshard.planner.affine import source_aligned
from reshard.planner.execute import execute

STORED: dict[str, str] = {
    "uint8": "u1", "int16": "i2", "int32": "i4", "int64": "i8", "float16": "f2", "float32": "f4", "float64": "f8",
    "bfloat16": "u2", "float8_e4m3fn": "u1", "float8_e8m0fnu": "u1",
}  # fmt: skip
UNTOUCHED = 0xA5

Index = object
Array = npt.NDArray[np.generic]


@dataclass
class _Held:
    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    group: int


@dataclass
class World:
    """Tensors by name, what each holder keeps, the buffers, and the copies in program order."""

    arrays: dict[str, Array] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    held: dict[str, list[_Held]] = field(default_factory=dict)
    layouts: dict[str, tuple[str, str]] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    answers: list[Array] = field(default_factory=list)
    requests: list[ReadRequest] = field(default_factory=list)
    next_order: int = 0

    def tensor(self, name: str, values: npt.ArrayLike, label: str = "bfloat16", axes: Sequence[str] = ()) -> None:
        """Declare a tensor; `values` are in storage form (bfloat16 as uint16)."""
        self.arrays[name] = np.array(values, STORED[label], order="C")
        self.labels[name] = label
        if axes:
            self.axes[name] = tuple(axes)

    def ramp(self, name: str, *shape: int, label: str = "bfloat16") -> None:
        """Declare a tensor whose elements all differ (as far as the dtype goes)."""
        self.tensor(name, np.arange(math.prod(shape)).reshape(shape) % 65_521, label)

    def hold(
        self, holder: str, tensor: str, start: Sequence[int] = (), stop: Sequence[int] | None = None, group: int = -1
    ) -> None:
        """Let a holder keep a box: rows [start, stop) if scalars of dim 0 are given, the whole tensor by default."""
        shape = self.arrays[tensor].shape
        first = (*start, *(0 for _ in shape[len(start) :]))
        last = shape if stop is None else (*stop, *shape[len(stop) :])
        self.held.setdefault(holder, []).append(_Held(tensor, first, last, group))

    def empty_holder(self, holder: str) -> None:
        self.held.setdefault(holder, [])

    def buffer(self, name: str, *shape: int, label: str = "bfloat16") -> None:
        self.buffers.append(Buffer(name, shape, label))
        blank = np.full(math.prod(shape) * np.dtype(STORED[label]).itemsize, UNTOUCHED, np.uint8)
        self.answers.append(blank.view(STORED[label]).reshape(shape))

    def copy(
        self,
        tensor: str,
        source: Index,
        buffer: int = 0,
        target: Index = ...,
        *,
        shape: Sequence[int] | None = None,
        permute: Sequence[int] | None = None,
        order: int | None = None,
        kind: str = "copy",
    ) -> None:
        """Copy ``array[source]`` (reshaped as a view to `shape`, then permuted) to ``buffer[target]``."""
        array, answer = self.arrays[tensor], self.answers[buffer]
        numbers = np.arange(array.size).reshape(array.shape)[source]
        places = np.arange(answer.size).reshape(answer.shape)[target]
        values = array[source]
        if shape is not None:
            numbers, values = numbers.reshape(shape), values.reshape(shape)
        if permute is not None:
            numbers, values = numbers.transpose(permute), values.transpose(permute)
        if values.shape != places.shape:
            raise ValueError(f"copy of {values.shape} into {places.shape}")
        order = self._order(order)
        if np.size(numbers) == 0:
            return
        sizes, steps = np.shape(numbers), _strides(numbers)
        for view in source_aligned(array.shape, _first(numbers), sizes, steps, _first(places), _strides(places)):
            self.requests.append(
                ReadRequest(
                    tensor, array.shape, self.labels[tensor], view.start, view.step, view.counts,
                    buffer, view.dst_offset, view.dst_stride, order, kind,
                )
            )  # fmt: skip
        if self.labels[tensor] == self.buffers[buffer].dtype and kind == "copy":
            answer[target] = values

    def fill(self, value: int, buffer: int = 0, target: Index = ..., order: int | None = None) -> None:
        """Fill ``buffer[target]`` with an element given in storage form."""
        answer = self.answers[buffer]
        places = np.arange(answer.size).reshape(answer.shape)[target]
        element = np.array(value, answer.dtype).tobytes()
        rank = np.ndim(places)
        self.requests.append(
            ReadRequest(
                "", (), "", (0,) * rank, (1,) * rank, np.shape(places), buffer, _first(places), _strides(places),
                self._order(order), "constant", element,
            )
        )  # fmt: skip
        answer[target] = np.frombuffer(element, answer.dtype)[0]

    def _order(self, order: int | None) -> int:
        if order is None:
            order = self.next_order
        self.next_order = order + 1
        return order

    def parts(self) -> list[ShardPart]:
        parts = []
        for name, held in self.held.items():
            shards, used = [], 0
            for row in held:
                array = self.arrays[row.tensor]
                shards.append(
                    Shard(
                        row.tensor, self.labels[row.tensor], array.shape, row.start, row.stop, 0, used, row.group,
                        self.axes.get(row.tensor),
                    )
                )  # fmt: skip
                used += math.prod(b - a for a, b in zip(row.start, row.stop, strict=True)) * array.itemsize
            holder = Holder(name, host=self.hosts.get(name, ""))
            parts.append(ShardPart.from_shards(holder, shards, [used], *self.layouts.get(name, ())))
        return parts

    def memory(self) -> dict[str, list[npt.NDArray[np.uint8]]]:
        regions = {}
        for name, held in self.held.items():
            pieces = [np.zeros(0, np.uint8)]
            for row in held:
                box = tuple(slice(a, b) for a, b in zip(row.start, row.stop, strict=True))
                pieces.append(np.ascontiguousarray(self.arrays[row.tensor][box]).reshape(-1).view(np.uint8))
            regions[name] = [np.concatenate(pieces)]
        return regions

    def sources(self) -> ShardTable:
        return ShardTable(self.parts())

    def reads(self) -> ReadTable:
        return ReadTable.build(self.buffers, self.requests)

    def plan(self, **options: object) -> Plan:
        return plan(self.sources(), self.reads(), PlanOptions(**options))

    def run(self, made: Plan | None = None) -> list[Array]:
        """Execute a plan on the holders' memory; returns the buffers' arrays."""
        raw = [np.full(answer.nbytes, UNTOUCHED, np.uint8) for answer in self.answers]
        execute(made if made is not None else self.plan(), self.memory(), raw)
        return [b.view(a.dtype).reshape(a.shape) for b, a in zip(raw, self.answers, strict=True)]

    def check(self, **options: object) -> Plan:
        """Plan, execute, and compare every buffer with NumPy's answer."""
        made = self.plan(**options)
        for got, want, buffer in zip(self.run(made), self.answers, self.buffers, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"buffer {buffer.name}")
        return made


def _first(numbers: Array) -> int:
    return int(np.asarray(numbers).flat[0])


def _strides(numbers: Array) -> tuple[int, ...]:
    array = np.asarray(numbers)
    return tuple(
        int(np.take(array, 1, axis).flat[0] - array.flat[0]) if size > 1 else 0 for axis, size in enumerate(array.shape)
    )
