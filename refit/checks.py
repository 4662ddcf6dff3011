"""Which cells does a plan read whole, and where do they land?

1. `build_checks` lays a plan's blocks over the cells of the shards they read. A cell inside one block is one check;
   a cell that several blocks cover without a gap is one check of several pieces; every other touched cell was read
   in part and cannot be verified.
2. A block that is read through staging is checked there, where its cells lie contiguous, before the local copies of
   its wave (which may cast); a block that is read straight into its buffer is checked there, through its strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.planner.dtypes import dtype_of_code
from reshard.refit.cells import CellGrid, CellPattern, row_box, row_pattern

if TYPE_CHECKING:
    from reshard.planner import Plan, ShardPart

__all__ = ["STAGING", "Check", "Checks", "Landing", "build_checks"]

Int64 = npt.NDArray[np.int64]

STAGING = -1
"""The buffer number of what lands in staging."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a piece of a cell lies after the read: ``shape`` at ``offset`` of a buffer (-1: staging), in bytes.

    ``inner`` is how many contiguous bytes an element of ``shape`` has, and ``at`` where the piece goes in the cell
    (as a slice per dim of ``shape``, with a step where other pieces lie between; empty where it is the whole cell).
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    inner: int
    at: tuple[slice, ...] = ()

    def contiguous(self) -> bool:
        """Whether its bytes lie in a row."""
        step = self.inner
        for n, s in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n > 1 and s != step:
                return False
            step *= n
        return True


@dataclass(frozen=True, slots=True)
class Check:
    """One cell to verify: which digest it must have, and where its pieces lie."""

    holder: int
    cell: int
    wave: int
    nbytes: int
    tag: tuple[int, int]
    shape: tuple[int, ...]
    pieces: tuple[Landing, ...]


@dataclass(frozen=True, slots=True)
class Checks:
    """All checks of a plan.

    Attributes
    ----------
    checks
        Grouped by wave; wave -1 holds those that are made after the last one.
    partial
        (holder, cell) read in part.
    n_cells
        Cells of each holder's table.
    """

    checks: tuple[Check, ...]
    partial: tuple[tuple[int, int], ...]
    n_cells: Mapping[str, int]
    names: tuple[str, ...]
    parts: tuple[ShardPart, ...]
    grids: tuple[CellGrid, ...]

    def describe(self, holder: int, cell: int) -> str:
        """``holder: tensor [start, stop) x ...`` of one cell."""
        part, grid = self.parts[holder], self.grids[holder]
        row = int(np.searchsorted(grid.first, cell, side="right")) - 1
        pattern = row_pattern(part, row)
        k = cell - int(grid.first[row])
        start, _ = row_box(part, row)
        box = [
            (a + int(s), a + int(s) + int(n)) for a, s, n in zip(start, pattern.start[k], pattern.shape[k], strict=True)
        ]
        spans = " x ".join(f"[{a}, {b})" for a, b in box) or "the scalar"
        return f"{self.names[holder]}: {part.tensors.name(int(part.tensor_id[row]))} {spans}"


def build_checks(plan: Plan) -> Checks:
    """Lay the plan's blocks over the cells that they touch. Loops over blocks; made once for each plan."""
    names = tuple(h.name for h in plan.holders)
    parts = tuple(plan.sources.parts[plan.sources.by_name[name]] for name in names)
    grids = tuple(CellGrid.of(part) for part in parts)
    checks: list[Check] = []
    covered: dict[tuple[int, int], list[_Part]] = {}
    staged: set[tuple[int, int, int, int]] = set()
    for block in _blocks_of(plan):
        part, grid = parts[block.holder], grids[block.holder]
        cells = _Cells.of(part, block.row)
        first = int(grid.first[block.row])
        lo = block.start[len(block.start) - cells.start.shape[1] :] - cells.origin
        n = block.count[len(block.count) - len(lo) :]
        by = block.step[len(block.step) - len(lo) :]
        strides = tuple(block.strides[len(block.strides) - len(lo) :].tolist())
        hi = lo + (n - 1) * by + 1
        dense = bool(((by == 1) | (n == 1)).all())
        ends = cells.start + cells.shape
        touched = np.all((cells.start < hi) & (ends > lo), axis=1)
        inside = touched & np.all((cells.start >= lo) & (ends <= hi), axis=1) & dense
        for k in np.flatnonzero(touched).tolist():
            if inside[k]:
                if block.staging >= 0:
                    at = block.staging + int(grid.offset_bytes[first + k]) - block.src_offset
                    landing, wave = Landing(STAGING, at, (cells.nbytes(k),), (1,), 1), block.wave
                else:
                    at = (
                        block.dst_offset + int(((cells.start[k] - lo) * strides).sum()) if strides else block.dst_offset
                    )
                    landing, wave = Landing(block.buffer, at, cells.shape_of(k), strides, cells.item), -1
                place = (block.holder, first + k, wave, at)
                if wave < 0 or place not in staged:  # one span may serve several blocks
                    checks.append(cells.check(block.holder, first, k, wave, (landing,)))
                    staged.add(place)
            share = _Part(cells, k, first, lo, by, n, block, strides, bool(inside[k]), block.staging < 0)
            if dense or share.within()[1].all():  # else it steps over the cell
                covered.setdefault((block.holder, first + k), []).append(share)
    partial: list[tuple[int, int]] = []
    for key, found in covered.items():
        if any(part.whole for part in found):
            continue
        check = _assembled(key[0], found)
        if check is None:
            partial.append(key)
        else:
            checks.append(check)
    checks.sort(key=lambda c: (c.wave, c.holder, c.cell))
    sizes = {name: len(grid) for name, grid in zip(names, grids, strict=True)}
    return Checks(tuple(checks), tuple(sorted(partial)), sizes, names, parts, grids)


@dataclass(frozen=True, slots=True)
class _Block:
    """One row of `Plan.blocks`."""

    holder: int
    row: int
    src_offset: int
    buffer: int
    dst_offset: int
    wave: int
    staging: int
    start: Int64
    step: Int64
    count: Int64
    strides: Int64


def _blocks_of(plan: Plan) -> Iterator[_Block]:
    blocks = plan.blocks
    scalars = (
        blocks.holder,
        blocks.row,
        blocks.src_offset_bytes,
        blocks.buffer,
        blocks.dst_offset_bytes,
        blocks.wave,
        blocks.staging_offset_bytes,
    )
    dims = [
        np.stack(columns, axis=1) if columns else np.zeros((len(blocks), 0), np.int64)
        for columns in (blocks.start, blocks.step, blocks.count, blocks.dst_stride_bytes)
    ]
    for i, row in enumerate(zip(*(column.tolist() for column in scalars), strict=True)):
        yield _Block(*row, *(dim[i] for dim in dims))


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of one shard row, in the units of blocks: for packed dtypes the last dim is in bytes."""

    pattern: CellPattern
    origin: Int64
    start: Int64
    shape: Int64
    item: int

    @classmethod
    def of(cls, part: ShardPart, row: int) -> _Cells:
        pattern, origin = row_pattern(part, row), np.array(row_box(part, row)[0], np.int64)
        kind = dtype_of_code(int(part.tensors.dtype_code[int(part.tensor_id[row])]))
        start, shape = pattern.start, pattern.shape
        if kind.pack > 1 and len(origin):
            start, shape, origin = start.copy(), shape.copy(), origin.copy()
            for column in (start[:, -1], shape[:, -1], origin[-1:]):
                column //= kind.pack
        return cls(pattern, origin, start, shape, kind.unit_bytes)

    def nbytes(self, k: int) -> int:
        return int(self.pattern.nbytes[k])

    def shape_of(self, k: int) -> tuple[int, ...]:
        return tuple(self.shape[k].tolist())

    def check(self, holder: int, first: int, k: int, wave: int, pieces: tuple[Landing, ...]) -> Check:
        tag = (int(self.pattern.tags[k, 0]), int(self.pattern.tags[k, 1]))
        return Check(holder, first + k, wave, self.nbytes(k), tag, self.shape_of(k), pieces)


@dataclass(frozen=True, slots=True)
class _Part:
    """A block that takes elements of a cell, all or some; ``usable`` if its bytes stay where they land.

    Along each dim it takes ``lo, lo + by, ...``, ``n`` of them, in the units of its `_Cells`.
    """

    cells: _Cells
    k: int
    first: int
    lo: Int64
    by: Int64
    n: Int64
    block: _Block
    strides: tuple[int, ...]
    whole: bool
    usable: bool

    def within(self) -> tuple[Int64, Int64]:
        """Of its elements along each dim: the first that lies in the cell, and how many do (none: 0)."""
        start, end = self.cells.start[self.k], self.cells.start[self.k] + self.cells.shape[self.k]
        skipped = np.maximum(-((self.lo - start) // self.by), 0)
        stop = np.minimum(-((self.lo - end) // self.by), self.n)
        return skipped, np.maximum(stop - skipped, 0)


def _assembled(holder: int, found: Sequence[_Part]) -> Check | None:
    """A check of several pieces if the parts cover the cell exactly once, else None."""
    one = found[0]
    cells, k = one.cells, one.k
    origin = cells.start[k]
    pieces: list[tuple[slice, ...]] = []
    landings: list[Landing] = []
    n_elems = 0
    for part in found:
        skipped, n = part.within()
        if not part.usable:
            return None
        offset = part.block.dst_offset + int((skipped * part.strides).sum())
        begin = (part.lo + skipped * part.by - origin).tolist()
        steps = np.where(n > 1, part.by, 1).tolist()
        at = tuple(slice(a, a + (m - 1) * s + 1, s) for a, m, s in zip(begin, n.tolist(), steps, strict=True))
        pieces.append(at)
        n_elems += math.prod(n.tolist())
        landings.append(Landing(part.block.buffer, offset, tuple(n.tolist()), part.strides, cells.item, at))
    if n_elems != math.prod(cells.shape_of(k)):
        return None
    if any(_may_meet(a, b) for a, b in itertools.combinations(pieces, 2)):
        return None
    return cells.check(holder, one.first, k, -1, tuple(landings))


def _may_meet(one: Sequence[slice], other: Sequence[slice]) -> bool:
    """False if two stepped boxes share no element; True if they may."""
    return all(
        a.start < b.stop and b.start < a.stop and (a.start - b.start) % math.gcd(a.step, b.step) == 0
        for a, b in zip(one, other, strict=True)
    )
