"""Which scales belong to which elements? Tensors quantised by blocks, each block with a scale in another tensor.

A tensor of shape (n, k) with blocks (b, c) has scales of shape (ceil(n / b), ceil(k / c)); blocks at the far edges
may be partial. An element must never be read with a neighbour's scale, so every cut of such a tensor, by a shard or
by a request, lies on the block grid or at the tensor's end. What does not is refused here; a publisher may quantise
again instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.planner.classify import Int64, classify, ragged_arange
from reshard.planner.errors import DTypeError, TableError
from reshard.planner.reads import KIND_CONSTANT, ReadTable
from reshard.planner.requests import pad
from reshard.planner.shards import ShardPart
from reshard.planner.tables import ShardTable


@dataclass(frozen=True, slots=True)
class BlockScale:
    """Where a tensor's block scales are.

    Attributes
    ----------
    scale : str
        Name of the tensor of scales.
    block : tuple of int
        Elements of a block by dim, as published.

    Examples
    --------
    >>> BlockScale("w_scale", (128, 128)).scale_shape((300, 256))
    (3, 2)
    >>> BlockScale("w_scale", (128, 128)).scale_box(((128, 384), (0, 256)), (512, 256))
    ((1, 3), (0, 2))
    """

    scale: str
    block: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.block or min(self.block) < 1:
            raise TableError(
                f"block {self.block} of scales {self.scale!r}; expected sizes of 1 or more", got=self.block
            )

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor of scales.

        Raises
        ------
        TableError
            Another rank than the block's.
        """
        if len(shape) != len(self.block):
            raise TableError(
                f"blocks {self.block} of a tensor of shape {tuple(shape)}: ranks {len(self.block)} and {len(shape)}",
                got=len(self.block),
                expected=len(shape),
            )
        return tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True))

    def scale_box(
        self, box: Sequence[tuple[int, int]], shape: Sequence[int], tensor: str = ""
    ) -> tuple[tuple[int, int], ...]:
        """The scales that belong to a box of the tensor.

        Raises
        ------
        DTypeError
            The box is cut off the block grid.
        """
        self.scale_shape(shape)
        out = []
        for d, ((start, stop), n, b) in enumerate(zip(box, shape, self.block, strict=True)):
            if start % b or (stop % b and stop != n):
                raise _off_grid(tensor, d, start, stop, b, n, "the box")
            out.append((start // b, -(-stop // b)))
        return tuple(out)


def _off_grid(tensor: str, dim: int, start: int, stop: int, block: int, size: int, who: str) -> DTypeError:
    return DTypeError(
        f"tensor {tensor!r} dim {dim}: {who} cuts [{start}, {stop}) off the grid of {block}-element blocks (size "
        f"{size}); an element would be read with a neighbour's scale. Cut at multiples of the block, or quantise again",
        tensor=tensor,
        got=(start, stop),
        expected=block,
    )


def check_block_scales(sources: ShardTable, reads: ReadTable, scales: Mapping[str, BlockScale]) -> None:
    """Check every cut of block-scaled tensors, and that requests come with the scales of their blocks.

    Parameters
    ----------
    sources : ShardTable
    reads : ReadTable
    scales : mapping of tensor name to BlockScale

    Raises
    ------
    TableError
        The scales' shape is not the tensor's number of blocks.
    DTypeError
        A shard or request is cut off the grid or stepped, or scales of requested blocks are not requested.
    """
    grid = _Grid.of(sources, scales)
    if not len(grid.tensor):
        return
    for part, id_map in zip(sources.parts, sources.id_maps, strict=True):
        _check_part(sources, grid, part, id_map)
    _check_requests(sources, reads, grid)


@dataclass(frozen=True, eq=False)
class _Grid:
    """Block-scaled tensors that are published, as columns.

    `tensor` and `scale` are union ids, `block` and `size` have D columns (left-padded with 1), `row_of` maps union ids
    to rows here (-1: no blocks).
    """

    tensor: Int64
    scale: Int64
    block: list[Int64]
    size: list[Int64]
    row_of: Int64

    @classmethod
    def of(cls, sources: ShardTable, scales: Mapping[str, BlockScale]) -> _Grid:
        tensors = sources.tensors
        get = tensors.index_of.get
        known = [(get(name, -1), get(s.scale, -1), s) for name, s in scales.items() if get(name, -1) >= 0]
        tensor = np.array([t for t, _, _ in known], np.int64)
        scale = np.array([s for _, s, _ in known], np.int64)
        n_dims = tensors.n_dims
        block = [np.ones(len(known), np.int64) for _ in range(n_dims)]
        for i, (t, _, s) in enumerate(known):
            if len(s.block) != int(tensors.ndim[t]):
                s.scale_shape(tensors.shape_of(t))
            for d, b in enumerate(s.block):
                block[n_dims - len(s.block) + d][i] = b
        size = [c[tensor] for c in tensors.shape]
        wrong = scale < 0
        for blocks, sizes, counts in zip(block, size, tensors.shape, strict=True):
            wrong |= counts[scale] != -(-sizes // blocks)
        wrong |= tensors.ndim[scale] != tensors.ndim[tensor]
        if wrong.any():
            t, s_id, found = known[int(np.argmax(wrong))]
            got = None if s_id < 0 else tensors.shape_of(s_id)
            expected = found.scale_shape(tensors.shape_of(t))
            raise TableError(
                f"tensor {tensors.name(t)!r}: scales {found.scale!r} have shape {got}; expected {expected}, one for "
                f"each block of {found.block}",
                tensor=tensors.name(t),
                got=got,
                expected=expected,
            )
        row_of = np.full(len(tensors), -1, np.int64)
        row_of[tensor] = np.arange(len(tensor))
        return cls(tensor, scale, block, size, row_of)

    def check(
        self, sources: ShardTable, row: Int64, start: Sequence[Int64], stop: Sequence[Int64], who: Callable[[int], str]
    ) -> None:
        """Refuse boxes of the tensors `row` that are cut off the grid."""
        for d, (a, b) in enumerate(zip(start, stop, strict=True)):
            block, size = self.block[d][row], self.size[d][row]
            wrong = (a % block != 0) | ((b % block != 0) & (b != size))
            if wrong.any():
                i = int(np.argmax(wrong))
                t = int(self.tensor[row[i]])
                dim = d - (len(start) - int(sources.tensors.ndim[t]))
                name = sources.tensors.name(t)
                raise _off_grid(name, dim, int(a[i]), int(b[i]), int(block[i]), int(size[i]), who(i))


def _check_part(sources: ShardTable, grid: _Grid, part: ShardPart, id_map: Int64 | None) -> None:
    """Check each (block shape, tensor shape, geometry) that occurs in one part once."""
    row = grid.row_of[part.tensor_id if id_map is None else id_map[part.tensor_id]]
    scaled = np.flatnonzero(row >= 0)
    alike, first = classify([*grid.block, *grid.size])
    n = len(part.geometries)
    pairs = np.unique(alike[row[scaled]] * n + part.geometry_id[scaled]) if len(scaled) else scaled
    box = pairs % n if len(pairs) else pairs
    keep = part.geometries.volume[box] > 0
    of, box = first[pairs[keep] // n] if len(pairs) else pairs, box[keep]
    n_dims = len(grid.block)
    start = pad([c[box] for c in part.geometries.start[-n_dims:]], n_dims, 0, len(box))
    stop = pad([c[box] for c in part.geometries.stop[-n_dims:]], n_dims, 1, len(box))
    grid.check(sources, of, start, stop, lambda _: f"holder {part.holder.name!r}")


def _check_requests(sources: ShardTable, reads: ReadTable, grid: _Grid) -> None:
    get = sources.tensors.index_of.get
    union = np.array([get(name, -1) for name in reads.tensors.names_list], np.int64).reshape(-1)
    asked = np.flatnonzero((reads.tensor_id >= 0) & (reads.kind != KIND_CONSTANT) & (reads.volume > 0))
    tensor = union[reads.tensor_id[asked]] if len(asked) else asked
    row = np.where(tensor >= 0, grid.row_of[tensor], -1) if len(asked) else asked
    rows, row = asked[row >= 0], row[row >= 0]
    n_dims = len(grid.block)
    start = pad([c[rows] for c in reads.start[-n_dims:]], n_dims, 0, len(rows))
    count = pad([c[rows] for c in reads.count[-n_dims:]], n_dims, 1, len(rows))
    step = pad([c[rows] for c in reads.step[-n_dims:]], n_dims, 1, len(rows))
    stop = [a + (c - 1) * s + 1 for a, c, s in zip(start, count, step, strict=True)]
    stepped = np.zeros(len(rows), np.bool_)
    for s, c in zip(step, count, strict=True):
        stepped |= (s != 1) & (c > 1)
    if stepped.any():
        i = int(np.argmax(stepped))
        name = sources.tensors.name(int(grid.tensor[row[i]]))
        raise DTypeError(f"{reads.where(int(rows[i]))}: a stepped view would need its neighbour's scale", tensor=name)
    grid.check(sources, row, start, stop, lambda i: reads.where(int(rows[i])))
    # every request with every request of its scales: one of them must hold the scales of its blocks
    by_scale = np.argsort(tensor, kind="stable")
    low = np.searchsorted(tensor[by_scale], grid.scale[row], side="left")
    counts = np.searchsorted(tensor[by_scale], grid.scale[row], side="right") - low
    left = np.repeat(np.arange(len(rows)), counts)
    right = asked[by_scale[np.repeat(low, counts) + ragged_arange(counts)]]
    holds = np.ones(len(left), np.bool_)
    for d in range(max(-n_dims, -reads.n_dims), 0):
        block = grid.block[d][row][left]
        first, last = reads.start[d][right], reads.start[d][right] + reads.count[d][right]
        holds &= (first <= start[d][left] // block) & (-(-stop[d][left] // block) <= last)
        holds &= (reads.step[d][right] == 1) | (reads.count[d][right] == 1)
    fine = np.zeros(len(rows), np.bool_)
    fine[left[holds]] = True
    if not fine.all():
        i = int(np.argmin(fine))
        n = int(sources.tensors.ndim[grid.tensor[row[i]]])
        dims = range(n_dims - n, n_dims)
        box = tuple(
            (int(start[d][i] // grid.block[d][row[i]]), int(-(-stop[d][i] // grid.block[d][row[i]]))) for d in dims
        )
        raise DTypeError(
            f"{reads.where(int(rows[i]))}: no request reads its scales, "
            f"{sources.tensors.name(int(grid.scale[row[i]]))!r} {box}",
            tensor=sources.tensors.name(int(grid.tensor[row[i]])),
            got=None,
            expected=box,
        )
