"""What a quick pass saw, as columns: which view of which source went into which view of which destination.

Views of one geometry (the shape of the source, both views but for where the destination's begins) are resolved once,
however many copies have it: all experts of a model have three.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.planner import Buffer, ReadTable
from reshard.planner.dictionaries import TensorDict
from reshard.planner.read_checks import KIND_CONSTANT, KIND_COPY
from reshard.refit.recording import Destination
from reshard.refit.tensors import SourceTensor
from reshard.refit.trace import Storage, Strided, resolve

__all__ = ["FILL", "Geometry", "Seen"]

I64 = npt.NDArray[np.int64]

FILL = -1
"""The source of a fill."""

Ints = tuple[int, ...]


class Geometry(NamedTuple):
    """A source's shape and view (offset, sizes, strides), and the destination view's sizes and strides; elements.

    A fill has no source: its first four fields are empty.
    """

    shape: Ints
    offset: int
    sizes: Ints
    strides: Ints
    into_sizes: Ints
    into_strides: Ints


@dataclass(slots=True)
class Seen:
    """Writes in program order.

    Attributes
    ----------
    destinations
        What may be written.
    rows
        Four numbers a write: destination, its first element, source (or `FILL`), geometry.
    geometries
        Each with its number.
    values
        For a fill, the number of the write to one element's bytes.
    """

    destinations: Sequence[Destination]
    rows: array[int] = field(default_factory=lambda: array("q"))
    geometries: dict[Geometry, int] = field(default_factory=dict)
    values: dict[int, bytes] = field(default_factory=dict)

    def write(self, destination: int, into: Strided, source: int, geometry: Geometry) -> None:
        """Note one write."""
        number = self.geometries.setdefault(geometry, len(self.geometries))
        self.rows.extend((destination, into.offset, source, number))

    def fill(self, destination: int, into: Strided, element: bytes) -> None:
        """Note a fill with one element's bytes."""
        self.values[len(self.rows) // 4] = element
        self.write(destination, into, FILL, Geometry((), -1, (), (), into.sizes, into.strides))

    @property
    def columns(self) -> I64:
        """int64[4, N]."""
        return np.array(self.rows, np.int64).reshape(-1, 4).T

    @property
    def n_copies(self) -> int:
        """How many of the writes are copies."""
        return int((self.columns[2] != FILL).sum())

    def read_table(self, sources: Sequence[SourceTensor], buffer_of: Callable[[str], Buffer]) -> ReadTable:
        """The requests that do what was seen.

        Parameters
        ----------
        sources
            As the loader was shown them.
        buffer_of
            Gives the buffer of a destination, by name.

        Raises
        ------
        PlanError, UnsupportedLoaderError
            A view leaves its source, or a copy falls into too many boxes.
        """
        into, first, source, geometry = self.columns
        buffers: dict[str, int] = {}
        number = np.array(
            [buffers.setdefault(self.destinations[d].name, len(buffers)) for d in into.tolist()], np.int64
        )
        boxes = _Boxes.of(list(self.geometries))
        n_boxes = boxes.n[geometry]
        row = np.repeat(np.arange(len(into)), n_boxes)
        ends = np.cumsum(n_boxes)
        box = boxes.first[geometry][row] + np.arange(len(row)) - np.repeat(ends - n_boxes, n_boxes)
        used, tensor = _by_first_use(source[row])
        shown = [sources[i] for i in used.tolist()]
        targets = [buffer_of(name) for name in buffers]
        return ReadTable(
            TensorDict.build([s.name for s in shown], [s.dtype for s in shown], [s.shape for s in shown]),
            TensorDict.build([b.name for b in targets], [b.dtype for b in targets], [b.shape for b in targets]),
            tensor,
            tuple(c[box] for c in boxes.start),
            tuple(c[box] for c in boxes.step),
            tuple(c[box] for c in boxes.count),
            number[row],
            first[row] + boxes.offset[box],
            tuple(c[box] for c in boxes.stride),
            row,
            np.where(tensor < 0, KIND_CONSTANT, KIND_COPY),
            {int(at): self.values[int(row[at])] for at in np.flatnonzero(tensor < 0)},
        )


def _by_first_use(source: I64) -> tuple[I64, I64]:
    """The sources in order of their first row, and each row's number among them (-1 for a fill)."""
    found, first, back = np.unique(source, return_index=True, return_inverse=True)
    copies = found != FILL
    order = np.argsort(np.where(copies, first, np.iinfo(np.int64).max), kind="stable")[: int(copies.sum())]
    number = np.full(len(found), -1, np.int64)
    number[order] = np.arange(len(order))
    return found[order], number[back]


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Source-aligned boxes of each geometry, dims left-padded; ``n`` of them from ``first``."""

    n: I64
    first: I64
    start: list[I64]
    step: list[I64]
    count: list[I64]
    stride: list[I64]
    offset: I64

    @classmethod
    def of(cls, geometries: Sequence[Geometry]) -> _Boxes:
        n: list[int] = []
        rows: list[tuple[Ints, Ints, Ints, Ints, int]] = []
        for g in geometries:
            into = Strided(0, g.into_sizes, g.into_strides)
            before = len(rows)
            if g.offset < 0:
                rank = len(into.sizes)
                rows.append(((0,) * rank, (1,) * rank, into.sizes, into.strides, 0))
            else:
                view = Strided(g.offset, g.sizes, g.strides).expand(into.sizes)
                rows += [
                    (r.start, r.step, r.count, r.dst_strides, r.dst_offset)
                    for r in resolve(Storage(g.shape), view, into)
                ]
            n.append(len(rows) - before)
        n_dims = max((len(r[0]) for r in rows), default=0)

        def padded(column: int, fill: int) -> list[I64]:
            values = [(fill,) * (n_dims - len(r[column])) + r[column] for r in rows]  # type: ignore[arg-type]
            return list(np.array(values, np.int64).reshape(len(rows), n_dims).T)

        each = np.array(n, np.int64)
        return cls(
            each,
            np.cumsum(each) - each,
            padded(0, 0),
            padded(1, 1),
            padded(2, 1),
            padded(3, 0),
            np.array([r[4] for r in rows], np.int64),
        )
