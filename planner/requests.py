"""Which source box, into which bytes, must each request move? Read tables made ready for the join.

1. Names are looked up in the sources' union dictionary, aliases included; shapes must agree.
2. Constants are set apart as fills; a materialised request is pointed at a buffer of its own, in source dtype
   and row-major.
3. Requests for nothing (a count of 0) are dropped.
4. Requests are put in order of tensor and numbered by geometry class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np

from reshard.planner.classify import Int64, classify, hash_rows, mix64
from reshard.planner.dictionaries import TensorDict
from reshard.planner.errors import PlanError, TableError
from reshard.planner.reads import KIND_CONSTANT, KIND_MATERIALISED, ReadTable
from reshard.planner.tables import ShardTable


def pad(columns: Sequence[Int64], n_dims: int, fill: int, n: int) -> list[Int64]:
    """Dim columns left-padded to `n_dims`."""
    missing = n_dims - len(columns)
    return [np.full(n, fill, np.int64)] * missing + list(columns)


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests for copies, ordered by tensor.

    Attributes
    ----------
    tensor : int64[N]
        Union tensor ids, ascending.
    start, step, count, stride : D int64[N]
        Source view and destination strides in elements.
    buffer, dst_offset : int64[N]
        Destination buffer and first element.
    origin : int64[N]
        Row in the read table.
    geometry, geometry_first : int64[N], int64[G]
        Class of (start, step, count, stride, buffer dtype); first row of each class.
    """

    tensor: Int64
    start: list[Int64]
    step: list[Int64]
    count: list[Int64]
    stride: list[Int64]
    buffer: Int64
    dst_offset: Int64
    origin: Int64
    geometry: Int64
    geometry_first: Int64

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def fingerprint(self) -> int:
        """64 bits over what is read; no proof rests on them."""
        columns = [self.tensor]
        # from the last dim, and zero for padding: the number of padded dims must not matter
        for start, count in zip(reversed(self.start), reversed(self.count), strict=True):
            columns += [start, count - 1]
        words = mix64(hash_rows(columns))
        return int(mix64(np.array([words.sum(dtype=np.uint64)], np.uint64))[0])


def resolve_tensors(sources: ShardTable, reads: ReadTable, aliases: Mapping[str, str]) -> tuple[Int64, dict[str, str]]:
    """Union tensor id of each tensor of a read table, and the aliases that were needed.

    Raises
    ------
    PlanError
        A requested tensor that nobody publishes.
    TableError
        A shape that differs from the published one.
    """
    mine, theirs = reads.tensors, sources.tensors
    used: dict[str, str] = {}
    if not aliases and (mine is theirs or (len(mine) == len(theirs) and mine.digest == theirs.digest)):
        return np.arange(len(mine)), used
    get = theirs.index_of.get
    ids = np.fromiter(map(get, mine.names_list, repeat(-1)), np.int64, len(mine))
    needed = np.zeros(len(mine), np.bool_)
    needed[reads.tensor_id[reads.tensor_id >= 0]] = True
    for name, target in aliases.items():
        # both published: the alias says that they are equal, and that is checked for each version
        at = mine.index_of.get(name)
        if at is not None and needed[at] and ids[at] >= 0 and target in theirs.index_of:
            used[name] = target
    unknown = np.flatnonzero(needed & (ids < 0))
    lost = []
    for i in unknown.tolist():
        name = mine.name(i)
        published = aliases.get(name, "")
        ids[i] = get(published, -1)
        if ids[i] < 0:
            lost.append(name)
        else:
            used[name] = published
    if lost:
        sample = ", ".join(repr(name) for name in lost[:10])
        raise PlanError(
            f"{len(lost)} requested tensors are published by nobody: {sample}{' ...' if len(lost) > 10 else ''}",
            tensor=lost[0],
            got=len(lost),
            expected=0,
        )
    rows = np.flatnonzero(needed)
    to = ids[rows]
    wrong = mine.ndim[rows] != theirs.ndim[to]
    for back in range(1, max(mine.n_dims, theirs.n_dims) + 1):
        a = mine.shape[-back][rows] if back <= mine.n_dims else np.ones(len(rows), np.int64)
        b = theirs.shape[-back][to] if back <= theirs.n_dims else np.ones(len(rows), np.int64)
        wrong |= a != b
    if wrong.any():
        bad = int(np.argmax(wrong))
        got, expected = mine.shape_of(int(rows[bad])), theirs.shape_of(int(to[bad]))
        name = mine.name(int(rows[bad]))
        raise TableError(
            f"tensor {name!r}: requested as shape {got}, published as {expected}",
            tensor=name,
            got=got,
            expected=expected,
        )
    return ids, used


def order_requests(
    buffers: TensorDict,
    tensor: Int64,
    start: Sequence[Int64],
    step: Sequence[Int64],
    count: Sequence[Int64],
    stride: Sequence[Int64],
    buffer: Int64,
    dst_offset: Int64,
    origin: Int64,
    n_dims: int,
) -> Requests:
    """Drop empty requests, order by tensor (stable), number the geometry classes."""
    n = len(tensor)
    alive = np.ones(n, np.bool_)
    for c in count:
        alive &= c > 0
    order: Int64 | None = None
    if not alive.all():
        order = np.flatnonzero(alive)
    by_tensor = tensor if order is None else tensor[order]
    if len(by_tensor) > 1 and int(np.diff(by_tensor).min()) < 0:
        inner = np.argsort(by_tensor, kind="stable")
        order = inner if order is None else order[inner]

    def pick(columns: Sequence[Int64], fill: int) -> list[Int64]:
        taken = [c if order is None else c[order] for c in columns]
        return pad(taken, n_dims, fill, n if order is None else len(order))

    def one(c: Int64) -> Int64:
        return c if order is None else c[order]

    starts, steps, counts, strides = pick(start, 0), pick(step, 1), pick(count, 1), pick(stride, 0)
    # a stride along a dim of one element says nothing: take it out of the class
    strides = [np.where(c == 1, 0, s) for c, s in zip(counts, strides, strict=True)]
    target = one(buffer)
    label = buffers.dtype_code[target] if len(buffers) else target
    columns = [label, *starts, *steps, *counts, *strides]
    varying = [c for c in columns if len(c) and not (c == c[0]).all()] or columns[:1]
    geometry, first = classify(varying)
    return Requests(one(tensor), starts, steps, counts, strides, target, one(dst_offset), one(origin), geometry, first)


@dataclass(frozen=True, slots=True)
class Materialised:
    """A source box that the engine's own loader consumes.

    Attributes
    ----------
    request : int
        Row in the read table.
    tensor : str
    dtype : str
        As published.
    start, stop : tuple of int
        The box that is staged.
    buffer : int
        Index in `Plan.buffers` of the planner's own buffer that holds the box, row-major.
    destination : int
        Index of the buffer that the loader writes.
    order : int
        Program order.
    later : tuple of int
        Rows of copies and constants that write later into what the loader writes, and have the last word
        (`execute.run_loader`).
    own_elems : int
        Destination elements that nothing writes later.
    """

    request: int
    tensor: str
    dtype: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    buffer: int
    destination: int
    order: int
    later: tuple[int, ...] = ()
    own_elems: int = 0

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.tensor


def stage_materialised(
    sources: ShardTable,
    reads: ReadTable,
    union_id: Int64,
    budget_bytes: int,
    outlived: Mapping[int, tuple[tuple[int, ...], int]],
) -> tuple[TensorDict, list[Materialised]]:
    """Give each materialised request a buffer of its own, after the read table's buffers.

    Raises
    ------
    PlanError
        A box over the staging budget, or a stepped one.
    """
    rows = np.flatnonzero(reads.kind == KIND_MATERIALISED).tolist()
    buffers = reads.buffers
    if not rows:
        return buffers, []
    names, labels, shapes = list(buffers.names_list), [], []
    for i in range(len(buffers)):
        labels.append(buffers.dtype_label(i))
        shapes.append(buffers.shape_of(i))
    out = []
    tensors = sources.tensors
    taken = set(names)
    for row in rows:
        t = int(union_id[int(reads.tensor_id[row])])
        n = int(tensors.ndim[t])
        name = tensors.name(t)
        keep = range(reads.n_dims - n, reads.n_dims)
        if any(int(reads.step[d][row]) != 1 for d in keep):
            raise PlanError(f"tensor {name!r}: a materialised request must be a box, not stepped", tensor=name)
        start = tuple(int(reads.start[d][row]) for d in keep)
        counts = tuple(int(reads.count[d][row]) for d in keep)
        n_bytes = int(np.prod(counts, dtype=np.int64)) * int(tensors.bits[t]) // 8
        if n_bytes > budget_bytes:
            raise PlanError(
                f"tensor {name!r}: the loader needs {n_bytes} bytes of real values, over the staging budget of "
                f"{budget_bytes} bytes",
                tensor=name,
                got=n_bytes,
                expected=budget_bytes,
            )
        buffer_name = f"materialised:{row}:{name}"[:4000]
        while buffer_name in taken:
            buffer_name += "'"
        taken.add(buffer_name)
        stop = tuple(a + c for a, c in zip(start, counts, strict=True))
        out.append(
            Materialised(
                row,
                name,
                tensors.dtype_label(t),
                start,
                stop,
                len(names),
                int(reads.buffer_id[row]),
                int(reads.order[row]),
                *outlived.get(row, ((), int(reads.volume[row]))),
            )
        )
        names.append(buffer_name)
        labels.append(tensors.dtype_label(t))
        shapes.append(counts)
    return TensorDict.build(names, labels, shapes), out


__all__ = [
    "KIND_CONSTANT",
    "Materialised",
    "Requests",
    "order_requests",
    "pad",
    "resolve_tensors",
    "stage_materialised",
]
