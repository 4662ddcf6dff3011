"""Into which cells does a shard fall, for verification?

A *cell* is a contiguous run of a shard's row-major bytes, at most `CELL_BYTES` long, that is itself a box: whole
slices along the first dim that has slices small enough. Publisher and receiver derive the same cells from a shard's
box alone, so nothing about them travels but their digests, in table order: shard row by shard row, and within a row
by offset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from reshard.planner import ShardPart
from reshard.planner.dtypes import dtype_of_code
from reshard.refit.digests import CELL_BYTES, cell_tag
from reshard.refit.errors import RefitError

__all__ = ["MOST_CELLS", "MOST_CELLS_OF_A_BOX", "CellGrid", "CellPattern", "cell_pattern"]

Int64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


MOST_CELLS = 1 << 24
"""Of one part, whose table is a peer's word: 16 TiB in whole cells."""
MOST_CELLS_OF_A_BOX = 1 << 22


@dataclass(frozen=True, slots=True)
class CellPattern:
    """The cells of one box shape.

    Attributes
    ----------
    start : int64[n, ndim]
        First element of each cell, relative to the box.
    shape : int64[n, ndim]
        Extent of each cell.
    offset_bytes, nbytes : int64[n]
        The contiguous run of the box's bytes that the cell is.
    tags : uint64[n, 2]
        What `cell_tag` says of each cell's dtype and shape.
    """

    start: Int64
    shape: Int64
    offset_bytes: Int64
    nbytes: Int64
    tags: U64

    def __len__(self) -> int:
        return len(self.nbytes)


@lru_cache(maxsize=16_384)
def cell_pattern(extents: tuple[int, ...], dtype: str, bits: int) -> CellPattern:
    """The cells of a box with ``extents`` elements of ``bits`` bits; none if it is empty.

    Raises
    ------
    RefitError
        More than `MOST_CELLS_OF_A_BOX`.

    Examples
    --------
    >>> cell_pattern((3, 1 << 20), "uint8", 8).nbytes.tolist()
    [1048576, 1048576, 1048576]
    >>> cell_pattern((4, 2), "float32", 32).shape.tolist()
    [[4, 2]]
    """
    ndim = len(extents)
    if math.prod(extents) == 0:
        none = np.zeros((0, ndim), np.int64)
        return CellPattern(none, none, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 2), np.uint64))
    dim = 0
    while dim < ndim - 1 and math.prod(extents[dim + 1 :]) * bits // 8 > CELL_BYTES:
        dim += 1
    inner_bits = math.prod(extents[dim + 1 :]) * bits
    size = extents[dim] if ndim else 1
    chunk = max(1, CELL_BYTES * 8 // inner_bits)
    if inner_bits % 8:  # packed elements along the last dim: cut at whole bytes
        chunk = max(8 // bits, chunk - chunk % (8 // bits))
    outer = math.prod(extents[:dim])
    n = outer * -(-size // chunk)
    if n > MOST_CELLS_OF_A_BOX:
        raise RefitError(
            f"a box of {extents} elements of {dtype} has {n} cells, expected at most {MOST_CELLS_OF_A_BOX}"
        )
    firsts = np.arange(0, size, chunk, dtype=np.int64)
    lengths = np.minimum(chunk, size - firsts)
    start, shape = np.zeros((n, ndim), np.int64), np.ones((n, ndim), np.int64)
    if ndim:
        for d, column in enumerate(
            np.unravel_index(np.repeat(np.arange(outer), len(firsts)), extents[:dim] or (1,))[:dim]
        ):
            start[:, d] = column
        start[:, dim] = np.tile(firsts, outer)
        shape[:, dim] = np.tile(lengths, outer)
        shape[:, dim + 1 :] = extents[dim + 1 :]
    nbytes = np.tile(lengths * inner_bits // 8, outer)
    # Two shapes at most: that of all cells along the cut dim but the last, and the last one's.
    tags = np.empty((n, 2), np.uint64)
    tags[:] = cell_tag(dtype, tuple(shape[0].tolist()))
    tags[len(firsts) - 1 :: len(firsts)] = cell_tag(dtype, tuple(shape[-1].tolist()))
    return CellPattern(start, shape, np.cumsum(nbytes) - nbytes, nbytes, tags)


@dataclass(frozen=True, slots=True)
class CellGrid:
    """All cells of one part, in digest order.

    Attributes
    ----------
    first : int64[n_rows + 1]
        Cells ``first[r]`` to ``first[r + 1]`` belong to shard row ``r``.
    region, offset_bytes, nbytes : int64[n]
        Where each cell lies in the holder's regions.
    tags : uint64[n, 2]
    """

    first: Int64
    region: Int64
    offset_bytes: Int64
    nbytes: Int64
    tags: U64

    def __len__(self) -> int:
        return len(self.nbytes)

    @classmethod
    def of(cls, part: ShardPart) -> CellGrid:
        """The grid of a part. Loops over classes of (box, dtype), not over rows.

        Raises
        ------
        RefitError
            More than `MOST_CELLS`, or a box with more than `MOST_CELLS_OF_A_BOX`.
        """
        patterns, class_of = _row_classes(part)
        sizes = np.array([len(p) for p in patterns], np.int64)
        counts = sizes[class_of] if len(part) else np.zeros(0, np.int64)
        first = np.zeros(len(part) + 1, np.int64)
        np.cumsum(counts, out=first[1:])
        if first[-1] > MOST_CELLS:
            raise RefitError(f"a table of {len(part)} boxes has {first[-1]} cells, expected at most {MOST_CELLS}")
        if not first[-1]:
            none = np.zeros(0, np.int64)
            return cls(first, none, none, none, np.zeros((0, 2), np.uint64))
        starts = np.cumsum(sizes) - sizes
        within = np.arange(int(first[-1])) - np.repeat(first[:-1], counts)
        index = np.repeat(starts[class_of], counts) + within
        return cls(
            first,
            np.repeat(part.region, counts),
            np.repeat(part.offset_bytes, counts) + np.concatenate([p.offset_bytes for p in patterns])[index],
            np.concatenate([p.nbytes for p in patterns])[index],
            np.concatenate([p.tags for p in patterns])[index],
        )


def _row_classes(part: ShardPart) -> tuple[list[CellPattern], Int64]:
    """Distinct cell patterns of a part's rows, and which one each row has."""
    n_codes = int(part.tensors.dtype_code.max()) + 1 if len(part.tensors) else 1
    key = part.geometry_id * n_codes + (part.tensors.dtype_code[part.tensor_id] if len(part) else 0)
    _, first_rows, class_of = np.unique(key, return_index=True, return_inverse=True)
    return [row_pattern(part, int(r)) for r in first_rows], class_of.astype(np.int64)


def row_box(part: ShardPart, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and stop of one shard row, unpadded."""
    geometry = int(part.geometry_id[row])
    ndim = int(part.geometries.ndim[geometry])
    keep = len(part.geometries.start) - ndim
    start = tuple(int(c[geometry]) for c in part.geometries.start[keep:])
    stop = tuple(int(c[geometry]) for c in part.geometries.stop[keep:])
    return start, stop


def row_pattern(part: ShardPart, row: int) -> CellPattern:
    """The cells of one shard row."""
    start, stop = row_box(part, row)
    kind = dtype_of_code(int(part.tensors.dtype_code[int(part.tensor_id[row])]))
    return cell_pattern(tuple(b - a for a, b in zip(start, stop, strict=True)), kind.label, kind.bits)


def rows_root_key(part: ShardPart, rows: Sequence[int]) -> bytes:
    """Names and boxes of some rows, in the order given: what a replica root binds besides the digests."""
    text = [f"{part.tensors.name(int(part.tensor_id[r]))}\0{row_box(part, r)}" for r in rows]
    return "\n".join(text).encode()
