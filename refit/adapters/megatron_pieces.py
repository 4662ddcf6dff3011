"""What do the kinds of Megatron parameters hold, in terms of global tensors? Pure functions, without Megatron.

1. A `Piece` says that some rows (or columns) of a local parameter are some rows (or columns) of a named global tensor.
2. `column_pieces`, `row_pieces`, `gated_pieces`, `interleaved_pieces`, `qkv_pieces` and `vocabulary_pieces` describe
   the kinds of parameters that there are.
3. `cut_pieces` makes `LocalTensor`s of a parameter and its pieces, as views.
4. `layer_offset` and `expert_range` make stage-local layer numbers and rank-local expert numbers global.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.planner.errors import TableError
from reshard.refit.tensors import LocalTensor

if TYPE_CHECKING:
    from reshard.refit.tensors import ArrayLike

__all__ = [
    "Piece",
    "column_pieces",
    "cut_pieces",
    "expert_range",
    "gated_pieces",
    "interleaved_pieces",
    "layer_offset",
    "qkv_pieces",
    "row_pieces",
    "vocabulary_pieces",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some indices of one dim of a local parameter, as indices of a dim of a global tensor.

    Parameters
    ----------
    name
        The global tensor.
    shape
        Its global shape.
    dim
        The dim that is cut.
    start
        First global index on that dim.
    count
        How many.
    local_start, local_step
        Local index of global index start + k is local_start + local_step * k.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    count: int
    local_start: int
    local_step: int = 1

    @property
    def local_stop(self) -> int:
        """Return the local index after the last one."""
        return self.local_start + self.local_step * (self.count - 1) + 1 if self.count else self.local_start


def column_pieces(name: str, shape: tuple[int, ...], *, rank: int, size: int) -> list[Piece]:
    """Column-parallel: an equal share of the output rows."""
    part = _share(shape[0], size, f"{name}: rows")
    return [Piece(name, shape, 0, rank * part, part, 0)]


def row_pieces(name: str, shape: tuple[int, ...], *, rank: int, size: int) -> list[Piece]:
    """Row-parallel: an equal share of the input columns."""
    part = _share(shape[1], size, f"{name}: columns")
    return [Piece(name, shape, 1, rank * part, part, 0)]


def gated_pieces(names: Sequence[str], shape: tuple[int, ...], *, rank: int, size: int) -> list[Piece]:
    """Gated linear unit: each rank holds its share of the gate's rows above its share of the up projection's.

    Parameters
    ----------
    names
        The tensors that lie one above the other in the local parameter (gate, up), each of `shape`.

    Examples
    --------
    Intermediate size 4 over two ranks: rank 1 holds gate rows 2 and 3, then up rows 2 and 3.

    >>> [(p.name, p.start, p.count, p.local_start) for p in gated_pieces(("gate", "up"), (4, 8), rank=1, size=2)]
    [('gate', 2, 2, 0), ('up', 2, 2, 2)]
    """
    part = _share(shape[0], size, f"{names[0]}: rows")
    return [Piece(name, shape, 0, rank * part, part, at * part) for at, name in enumerate(names)]


def interleaved_pieces(
    names: Sequence[str], shape: tuple[int, ...], *, rank: int, size: int, dim: int = 0
) -> list[Piece]:
    """Tensors that alternate index by index along a dim (gate, up, gate, up, ...), an equal share of each.

    Examples
    --------
    >>> [(p.name, p.local_start, p.local_step) for p in interleaved_pieces(("gate", "up"), (3, 8), rank=0, size=1)]
    [('gate', 0, 2), ('up', 1, 2)]
    """
    part = _share(shape[dim], size, f"{names[0]}: dim {dim}")
    return [Piece(name, shape, dim, rank * part, part, at, len(names)) for at, name in enumerate(names)]


def qkv_pieces(
    names: Sequence[str],
    *,
    heads: int,
    groups: int,
    head_dim: int,
    inner: tuple[int, ...],
    rank: int,
    size: int,
) -> list[Piece]:
    """Fused QKV, group by group: the query heads of a KV group, its key head, its value head.

    The fused rows are shared out equally, wherever that cuts: with fewer groups than ranks most ranks hold query rows
    alone, and only the last rank of each group holds its key and value.

    Parameters
    ----------
    names
        Names of the query, key and value tensors.
    heads, groups, head_dim
        Query heads, KV heads, rows a head.
    inner
        The other dims: (hidden,) for a weight, () for a bias.

    Examples
    --------
    Four query heads in two groups, two rows a head: the query is fused rows 0 to 3 and 8 to 11.

    >>> pieces = qkv_pieces("qkv", heads=4, groups=2, head_dim=2, inner=(8,), rank=0, size=1)
    >>> [(p.name, p.start, p.count, p.local_start) for p in pieces]
    [('q', 0, 4, 0), ('k', 0, 2, 4), ('v', 0, 2, 6), ('q', 4, 4, 8), ('k', 2, 2, 12), ('v', 2, 2, 14)]
    """
    query, key, value = names
    q_rows = _share(heads, groups, f"{query}: query heads over KV groups") * head_dim
    part = _share(heads * head_dim + 2 * groups * head_dim, size, f"{query}: fused rows")
    first, last = rank * part, (rank + 1) * part
    pieces: list[Piece] = []
    fused = 0
    for group in range(groups):
        for name, rows, total in (
            (query, q_rows, heads * head_dim),
            (key, head_dim, groups * head_dim),
            (value, head_dim, groups * head_dim),
        ):
            low, high = max(fused, first), min(fused + rows, last)
            if low < high:
                start = group * rows + low - fused
                pieces.append(Piece(name, (total, *inner), 0, start, high - low, low - first))
            fused += rows
    return pieces


def vocabulary_pieces(name: str, shape: tuple[int, ...], *, padded: int, rank: int, size: int) -> list[Piece]:
    """Vocabulary-parallel: a share of the padded rows; rows of padding belong to no tensor.

    Parameters
    ----------
    shape
        True shape of the global tensor, without padding.
    padded
        Rows with padding.
    """
    part = _share(padded, size, f"{name}: padded rows")
    if padded < shape[0]:
        raise TableError(f"tensor {name!r} dim 0: got {padded} padded rows, expected at least {shape[0]}", tensor=name)
    start = min(rank * part, shape[0])
    count = min((rank + 1) * part, shape[0]) - start
    return [Piece(name, shape, 0, start, count, 0)] if count else []


def expert_range(experts: int, *, rank: int, size: int) -> range:
    """Return the global numbers of an expert-parallel rank's experts, in local order.

    Examples
    --------
    >>> expert_range(512, rank=1, size=8)
    range(64, 128)
    """
    part = _share(experts, size, "experts")
    return range(rank * part, (rank + 1) * part)


def layer_offset(layers: int, *, rank: int, size: int, chunk: int = 0, chunks: int = 1) -> int:
    """Return the global number of a pipeline stage's first layer, where all stages have equally many.

    Parameters
    ----------
    layers
        Layers of the whole model.
    rank, size
        Pipeline rank and size.
    chunk, chunks
        Virtual pipeline stage and their number (interleaved schedule).

    Examples
    --------
    >>> layer_offset(48, rank=2, size=4), layer_offset(48, rank=2, size=4, chunk=1, chunks=2)
    (24, 36)
    """
    return chunk * _share(layers, chunks, "layers over virtual stages") + rank * (
        _share(layers, chunks * size, "layers over pipeline stages")
    )


def cut_pieces(local: ArrayLike, pieces: Iterable[Piece], label: str, claim: int = -1) -> list[LocalTensor]:
    """Return a local parameter's pieces as views of it.

    Parameters
    ----------
    local
        The parameter, with the dims of the global tensors.
    pieces
        What it holds.
    label
        Its dtype label.
    claim
        Replica claim number; -1 claims nothing.

    Raises
    ------
    TableError
        If the pieces do not fit the parameter's shape.
    """
    found: list[LocalTensor] = []
    for piece in pieces:
        got = tuple(int(n) for n in local.shape)
        others = tuple(n for dim, n in enumerate(piece.shape) if dim != piece.dim)
        if (
            len(got) != len(piece.shape)
            or piece.local_stop > got[piece.dim]
            or tuple(n for dim, n in enumerate(got) if dim != piece.dim) != others
        ):
            raise TableError(
                f"tensor {piece.name!r} {piece.shape} dim {piece.dim}: got a local parameter of shape {got}, expected "
                f"at least {piece.local_stop} on that dim and {others} on the others",
                tensor=piece.name,
                dim=piece.dim,
            )
        index = [slice(None)] * len(got)
        index[piece.dim] = slice(piece.local_start, piece.local_stop, piece.local_step)
        start = tuple(piece.start if dim == piece.dim else 0 for dim in range(len(got)))
        found.append(LocalTensor(piece.name, label, piece.shape, start, local[tuple(index)], claim))
    return found


def _share(total: int, size: int, what: str) -> int:
    if size < 1 or total % size:
        raise TableError(f"{what}: {total} does not divide by {size}")
    return total // size
