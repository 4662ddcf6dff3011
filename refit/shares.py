"""What does one block take of one cell, and where does it lie?

1. `Cells.cut` finds the cells that a block touches, once for each geometry; what it takes of one is a `Share`.
2. `reshard.refit.assembling` makes checks of them: a `Check` says of one cell where its pieces land and which digest
   they must have together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.planner.dtypes import dtype_of_code
from reshard.refit.cells import CellPattern, row_box, row_pattern

if TYPE_CHECKING:
    from reshard.planner import ShardPart

__all__ = ["STAGING", "Block", "Box", "Cells", "Check", "Cut", "Image", "Landing", "Share"]

Int64 = npt.NDArray[np.int64]
Box = tuple[slice, ...]
"""Elements of a cell: a slice for each dim, with steps."""

STAGING = -1
"""The buffer number of what lands in staging."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a piece of a cell lies after the read: ``shape`` at ``offset`` of a buffer (-1: staging), in bytes.

    ``inner`` is how many contiguous bytes an element of ``shape`` has, and ``at`` where the piece goes in the cell
    (as a slice per dim of ``shape``, with a step where other pieces lie between; empty where it is the whole cell).
    Of pieces that overlap in the cell the last one counts.
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
    """One cell to verify: which digest it must have, and where its pieces lie.

    Attributes
    ----------
    wave
        Checked in staging, before the copies of this wave; -1: in the buffers.
    shape
        Extents of the cell, in elements of its pieces' ``inner`` bytes.
    proves_bytes
        Bytes that were received and that no other check proves: all of the cell, unless a part of it is here only for
        the rest to be verified.
    after_wave
        Its pieces are there once the copies of this wave are done; -1 where none of them is copied.
    """

    holder: int
    cell: int
    wave: int
    nbytes: int
    tag: tuple[int, int]
    shape: tuple[int, ...]
    pieces: tuple[Landing, ...]
    proves_bytes: int
    after_wave: int = -1


class Block(NamedTuple):
    """One row of `Plan.blocks`; ``geometry`` is int64[4, ndim]: start, step, count and destination strides by dim."""

    holder: int
    row: int
    src_offset: int
    buffer: int
    dst_offset: int
    wave: int
    staging: int
    span_offset: int
    span_bytes: int
    converts: bool
    geometry: bytes


class Cut(NamedTuple):
    """What blocks of one geometry take of cell ``k``: the elements in ``box``.

    They end up ``offset`` bytes from the block's first destination byte, ``shape`` of them, ``strides`` bytes apart.
    """

    k: int
    whole: bool
    box: Box
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of shards of one shape and place, in the units of blocks: for packed dtypes the last dim is in bytes.

    Attributes
    ----------
    pattern
        The cells.
    origin, start, shape, item
        First element of the shard; first element of each cell, from there, and its extents; bytes of an element.
    cuts
        By geometry what blocks take of them, as far as it was asked for.
    """

    pattern: CellPattern
    origin: Int64
    start: Int64
    shape: Int64
    item: int
    cuts: dict[bytes, list[Cut]] = field(default_factory=dict)

    @classmethod
    def of(cls, part: ShardPart, row: int) -> Cells:
        """The cells of a part's row."""
        pattern, origin = row_pattern(part, row), np.array(row_box(part, row)[0], np.int64)
        kind = dtype_of_code(int(part.tensors.dtype_code[int(part.tensor_id[row])]))
        start, shape = pattern.start, pattern.shape
        if kind.pack > 1 and len(origin):
            start, shape, origin = start.copy(), shape.copy(), origin.copy()
            for column in (start[:, -1], shape[:, -1], origin[-1:]):
                column //= kind.pack
        return cls(pattern, origin, start, shape, kind.unit_bytes)

    def cut(self, geometry: bytes) -> list[Cut]:
        """What a block of this geometry takes of each cell that it takes anything of."""
        known = self.cuts.get(geometry)
        if known is None:
            known = self.cuts[geometry] = list(self._cut(geometry))
        return known

    def _cut(self, geometry: bytes) -> Iterator[Cut]:
        dims = np.frombuffer(geometry, np.int64).reshape(4, -1)
        start, by, n, dst = dims[:, dims.shape[1] - self.start.shape[1] :]
        lo, strides = start - self.origin, tuple(dst.tolist())
        skipped = np.maximum(-((lo - self.start) // by), 0)
        inside = np.maximum(np.minimum(-((lo - self.start - self.shape) // by), n) - skipped, 0)
        whole = (inside == self.shape).all(axis=1)
        for k in np.flatnonzero((inside > 0).all(axis=1)).tolist():
            begin = (lo + skipped[k] * by - self.start[k]).tolist()
            count = tuple(inside[k].tolist())
            steps = [step if m > 1 else 1 for step, m in zip(by.tolist(), count, strict=True)]
            box = tuple(slice(a, a + (m - 1) * s + 1, s) for a, m, s in zip(begin, count, steps, strict=True))
            at = sum(a * s for a, s in zip(skipped[k].tolist(), strides, strict=True))
            yield Cut(k, bool(whole[k]), box, at, count, strides)


class Image(NamedTuple):
    """Bytes ``[start, stop)`` of a cell, in a row in staging at ``offset``."""

    start: int
    stop: int
    offset: int

    def box(self) -> Box:
        """Which bytes of the cell it is."""
        return (slice(self.start, self.stop, 1),)

    def landing(self, cell_bytes: int) -> Landing:
        """The same as a piece of a cell of so many bytes."""
        n = self.stop - self.start
        return Landing(STAGING, self.offset, (n,), (1,), 1, () if n == cell_bytes else self.box())


class Share(NamedTuple):
    """What one block takes of one cell: ``cut`` of the ``cells`` of its shard, the first of them cell ``first``.

    ``offset_bytes`` is where the cell begins in the holder's region.
    """

    cells: Cells
    first: int
    offset_bytes: int
    block: Block
    cut: Cut

    @property
    def whole(self) -> bool:
        """Whether it is all of the cell."""
        return self.cut.whole

    @property
    def box(self) -> Box:
        """Its elements of the cell."""
        return self.cut.box

    @property
    def direct(self) -> bool:
        """Whether it is read straight into its buffer."""
        return self.block.staging < 0

    @property
    def n_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.cut.shape) * self.cells.item

    @property
    def cell_bytes(self) -> int:
        """Bytes of the cell."""
        return int(self.cells.pattern.nbytes[self.cut.k])

    def landing(self, at: Box = ()) -> Landing:
        """Where it ends up, as a piece of its cell; without ``at`` all of it."""
        offset = self.block.dst_offset + self.cut.offset
        return Landing(self.block.buffer, offset, self.cut.shape, self.cut.strides, self.cells.item, at)

    def image(self) -> Image:
        """What its span brings of the cell into staging, wanted or not."""
        block, cell = self.block, self.offset_bytes
        start = max(block.span_offset, cell)
        stop = min(block.span_offset + block.span_bytes, cell + self.cell_bytes)
        return Image(start - cell, stop - cell, block.staging + start - block.src_offset)

    def check(
        self,
        pieces: Sequence[Landing] = (),
        proves_bytes: int | None = None,
        *,
        wave: int = -1,
        after_wave: int = -1,
    ) -> Check:
        """A check of its cell; of itself alone, where it is the whole cell, without pieces."""
        k, nbytes, cells = self.cut.k, self.cell_bytes, self.cells
        shape = (nbytes,) if wave >= 0 else tuple(cells.shape[k].tolist())
        tag = (int(cells.pattern.tags[k, 0]), int(cells.pattern.tags[k, 1]))
        proves = nbytes if proves_bytes is None else proves_bytes
        made = tuple(pieces) if pieces else (self.landing(),)
        return Check(self.block.holder, self.first + k, wave, nbytes, tag, shape, made, proves, after_wave)
