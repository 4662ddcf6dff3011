"""Where receivers cut the source tensors, so that a publisher can lay out what they read contiguously.

A column slice of a row-major shard is either many short runs or a span several times as long. A publisher that
copies into a buffer of its own can store every box of the receivers' grid contiguously and publish each as a shard:
then wire bytes equal useful bytes, with about one descriptor for each pair of shard and request.

1. Every request cuts each dim of its tensor at its first and behind its last coordinate.
2. The first group's cuts are always taken: a grid of coordinates for each dim of each tensor.
3. A further group's cuts of a tensor join the grid where the smallest box stays at or over the limit; receivers of
   a group that was left out read spans of the boxes that are there.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.planner.classify import Int64, column
from reshard.planner.dictionaries import TensorDict
from reshard.planner.errors import ConflictError, TableError
from reshard.planner.reads import KIND_CONSTANT, ReadTable

Box = tuple[tuple[int, ...], tuple[int, ...]]

MIN_BOX_BYTES = 64 << 10
"""Boxes under this many bytes cost more in descriptors than they save on the wire."""

_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Cuts:
    """A grid for each tensor.

    Parameters
    ----------
    tensors : TensorDict
        The tensors that receivers read.
    offsets : int64[T * D + 1]
        Where the coordinates of (tensor, padded dim) begin in `coordinates`; D is ``tensors.n_dims``.
    coordinates : int64[K]
        For each (tensor, dim) ascending coordinates, 0 and the extent included.

    Raises
    ------
    TableError
        The columns are no grid: wrong lengths, or coordinates that do not ascend from 0 to the extent.
    """

    tensors: TensorDict
    offsets: Int64
    coordinates: Int64

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", column(self.offsets, "offsets"))
        object.__setattr__(self, "coordinates", column(self.coordinates, "coordinates"))
        self._check()

    def _check(self) -> None:
        n_axes = len(self.tensors) * self.tensors.n_dims
        offsets, coordinates = self.offsets, self.coordinates
        if len(offsets) != n_axes + 1 or offsets[0] != 0 or offsets[-1] != len(coordinates):
            raise TableError(
                f"cuts: offsets must be {n_axes + 1} positions from 0 to {len(coordinates)}",
                got=len(offsets),
                expected=n_axes + 1,
            )
        if n_axes == 0:
            return
        counts = np.diff(offsets)
        if int(counts.min()) < 1:
            raise TableError("cuts: an axis has no coordinates; expected 0 and the extent", got=int(counts.min()))
        extent = np.stack(self.tensors.shape, axis=1).reshape(-1)
        first, last = coordinates[offsets[:-1]], coordinates[offsets[1:] - 1]
        rising = np.diff(coordinates) > 0
        rising[offsets[1:-1] - 1] = True
        wrong = (first != 0) | (last != extent)
        if not rising.all():
            wrong[np.searchsorted(offsets, np.argmin(rising), side="right") - 1] = True
        if wrong.any():
            axis = int(np.argmax(wrong))
            tensor, dim = divmod(axis, self.tensors.n_dims)
            real = dim - (self.tensors.n_dims - int(self.tensors.ndim[tensor]))
            got = coordinates[offsets[axis] : offsets[axis + 1]][:8].tolist()
            raise TableError(
                f"cuts of tensor {self.tensors.name(tensor)!r} dim {real}: got {got}; expected coordinates "
                f"rising from 0 to {int(extent[axis])}",
                tensor=self.tensors.name(tensor),
                dim=real,
                got=tuple(got),
                expected=(0, int(extent[axis])),
            )

    def __contains__(self, name: str) -> bool:
        return name in self.tensors.index_of

    def of(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the coordinates of each dim of a tensor, 0 and the extent included.

        Raises
        ------
        KeyError
            No receiver reads the tensor.
        """
        tensor = self.tensors.index(name)
        n_dims = self.tensors.n_dims
        axes = range(tensor * n_dims + n_dims - int(self.tensors.ndim[tensor]), (tensor + 1) * n_dims)
        return tuple(tuple(self.coordinates[self.offsets[a] : self.offsets[a + 1]].tolist()) for a in axes)

    def boxes(self, name: str, start: Sequence[int], stop: Sequence[int]) -> list[Box]:
        """Cut a publisher's box of a tensor by the grid, in row-major order of the pieces.

        Parameters
        ----------
        name : str
            A tensor that no receiver reads is not cut.
        start, stop : sequence of int
            Half-open box in global elements.

        Returns
        -------
        list of (start, stop)
            Disjoint, and together the box; the box itself if it is empty.
        """
        box = (tuple(start), tuple(stop))
        if name not in self or any(a >= b for a, b in zip(*box, strict=True)):
            return [box]
        bounds = []
        for coordinates, first, last in zip(self.of(name), start, stop, strict=True):
            bounds.append([first, *(c for c in coordinates if first < c < last), last])
        return [
            (tuple(a for a, _ in piece), tuple(b for _, b in piece))
            for piece in itertools.product(*(itertools.pairwise(axis) for axis in bounds))
        ]

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that address the content."""
        hasher = hashlib.sha256(b"reshard.Cuts.1\0")
        hasher.update(self.tensors.digest)
        hasher.update(self.offsets.data)
        hasher.update(self.coordinates.data)
        return hasher.digest()


def cuts(groups: Iterable[Iterable[ReadTable]], *, min_box_bytes: int = MIN_BOX_BYTES) -> Cuts:
    """Return the grid at which groups of receivers cut the source tensors.

    Parameters
    ----------
    groups : iterable of iterable of ReadTable
        For each group the read tables of its ranks. The first group's cuts are always taken.
    min_box_bytes : int
        A further group's cuts of a tensor are taken only if no box of its grid falls under this size.

    Raises
    ------
    ConflictError
        Two read tables disagree about a tensor's shape or dtype.

    Examples
    --------
    >>> from reshard.planner import Buffer, ReadRequest
    >>> def rank(first):
    ...     request = ReadRequest("down", (4, 6), "bfloat16", (0, first), (1, 1), (4, 3), 0, 0, (3, 1))
    ...     return ReadTable.build([Buffer("p", (4, 3), "bfloat16")], [request])
    >>> grid = cuts([[rank(0), rank(3)]])
    >>> grid.of("down")
    ((0, 4), (0, 3, 6))
    >>> grid.boxes("down", (2, 0), (4, 6))
    [((2, 0), (4, 3)), ((2, 3), (4, 6))]
    """
    tables = [list(group) for group in groups]
    tensors, maps = _union([table for group in tables for table in group])
    edges = _edges_of_whole(tensors)
    position = 0
    for number, group in enumerate(tables):
        added = [_edges(tensors, t, ids) for t, ids in zip(group, maps[position : position + len(group)], strict=True)]
        position += len(group)
        merged = _unique(*(np.concatenate(columns) for columns in zip(edges, *added, strict=True)))
        if number:
            merged = _bounded(tensors, edges, merged, min_box_bytes)
        edges = merged
    axis, coordinates = edges
    offsets = np.searchsorted(axis, np.arange(len(tensors) * tensors.n_dims + 1))
    return Cuts(tensors, column(offsets, "offsets"), coordinates)


Edges = tuple[Int64, Int64]
"""Axes (tensor * D + dim) and coordinates, sorted by both, without repeats."""


def _union(tables: Sequence[ReadTable]) -> tuple[TensorDict, list[Int64]]:
    """Return one dictionary of all tensors that are read, and the id map of each table."""
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    number: dict[str, int] = {}
    by_digest: dict[bytes, Int64] = {}
    maps = []
    for table in tables:
        ids = by_digest.get(table.tensors.digest)
        if ids is None:
            shown = table.tensors
            for index, name in enumerate(shown.names_list):
                seen = (shown.dtype_label(index), shown.shape_of(index))
                before = known.setdefault(name, seen)
                if before != seen:
                    raise ConflictError(
                        f"tensor {name!r} is {seen[0]} {seen[1]} in one read table and {before[0]} {before[1]} "
                        "in another",
                        holders=(),
                        tensor=name,
                        got=seen,
                        expected=before,
                    )
                number.setdefault(name, len(number))
            ids = column([number[name] for name in shown.names_list], "id map")
            by_digest[shown.digest] = ids
        maps.append(ids)
    names = list(known)
    union = TensorDict.build(names, [known[name][0] for name in names], [known[name][1] for name in names])
    return union, maps


def _edges_of_whole(tensors: TensorDict) -> Edges:
    """Return the edges 0 and extent of every axis."""
    n_axes = len(tensors) * tensors.n_dims
    if n_axes == 0:
        return _EMPTY, _EMPTY
    extent = np.stack(tensors.shape, axis=1).reshape(-1)
    axes = np.arange(n_axes)
    return _unique(np.concatenate([axes, axes]), np.concatenate([np.zeros(n_axes, np.int64), extent]))


def _edges(tensors: TensorDict, table: ReadTable, ids: Int64) -> Edges:
    """Return the first and the last coordinates of every request of a table that reads something."""
    rows = (table.kind != KIND_CONSTANT) & (table.volume > 0)
    tensor = ids[table.tensor_id[rows]] if rows.any() else _EMPTY
    axes, coordinates = [_EMPTY], [_EMPTY]
    for back in range(1, min(table.n_dims, tensors.n_dims) + 1):
        start, step, count = (columns[-back][rows] for columns in (table.start, table.step, table.count))
        axis = tensor * tensors.n_dims + (tensors.n_dims - back)
        axes += [axis, axis]
        coordinates += [start, start + step * (count - 1) + 1]
    return np.concatenate(axes), np.concatenate(coordinates)


def _unique(axis: Int64, coordinate: Int64) -> Edges:
    order = np.lexsort((coordinate, axis))
    axis, coordinate = axis[order], coordinate[order]
    new = np.ones(len(axis), np.bool_)
    new[1:] = (axis[1:] != axis[:-1]) | (coordinate[1:] != coordinate[:-1])
    return axis[new], coordinate[new]


def _bounded(tensors: TensorDict, before: Edges, after: Edges, min_box_bytes: int) -> Edges:
    """Return the edges `after` for the tensors whose smallest box is large enough, else those `before`."""
    n_dims = tensors.n_dims
    if n_dims == 0:
        return after
    smallest = _narrowest(after, len(tensors) * n_dims).reshape(-1, n_dims).astype(np.float64).prod(axis=1)
    n_before = np.bincount(before[0] // n_dims, minlength=len(tensors))
    n_after = np.bincount(after[0] // n_dims, minlength=len(tensors))
    taken = (smallest * tensors.bits / 8 >= min_box_bytes) | (n_before == n_after)
    old, new = ~taken[before[0] // n_dims], taken[after[0] // n_dims]
    return _unique(np.concatenate([before[0][old], after[0][new]]), np.concatenate([before[1][old], after[1][new]]))


def _narrowest(edges: Edges, n_axes: int) -> Int64:
    """Return the smallest interval of each axis (the whole of it where it has extent 0)."""
    axis, coordinate = edges
    width = np.full(n_axes, np.iinfo(np.int64).max)
    same = axis[1:] == axis[:-1]
    np.minimum.at(width, axis[1:][same], np.diff(coordinate)[same])
    width[width == np.iinfo(np.int64).max] = 0
    return width
