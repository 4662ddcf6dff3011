"""Zero-storage tensors that remember which elements of which source they show.

A loader is run on `Traced` tensors: each wraps a meta tensor, so every view operation of torch (narrow, select,
permute, steps, unflatten, merging reshapes ...) moves offset, sizes and strides exactly as it would on real memory,
and nothing is allocated.

1. The meta tensor's storage stands for a *virtual storage*: a source tensor as published, or the result of a copy
   (``clone``, ``contiguous``, ``cat``, ``stack``) made of pieces of other virtual storages.
2. `resolve` walks from a view back through those pieces to the published tensors, and gives source-aligned requests.
3. A tensor that was computed (and not merely moved) has no virtual storage, only a *taint*: the names it depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from reshard.planner.affine import source_aligned
from reshard.planner.errors import require
from reshard.refit.errors import UnsupportedLoaderError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = [
    "AlignedRead",
    "Origin",
    "Piece",
    "Storage",
    "Strided",
    "meta_of",
    "origin_of",
    "resolve",
    "trace",
    "traced",
    "traced_type",
]

MAX_BOXES = 65_536
"""Most source-aligned boxes that one copy may fall into."""


@dataclass(frozen=True, slots=True)
class Strided:
    """An affine view of a storage: offset, sizes and strides in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Strided:
        """The view that ``tensor`` is of its own storage."""
        return cls(int(tensor.storage_offset()), tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())))

    def expand(self, sizes: Sequence[int]) -> Strided:
        """Broadcast to ``sizes`` by torch's rules (stride 0 where a dim is repeated)."""
        pad = len(sizes) - len(self.sizes)
        strides = [0] * pad
        for size, stride, target in zip(self.sizes, self.strides, tuple(sizes)[pad:], strict=True):
            strides.append(stride if size == target else 0)
        return Strided(self.offset, tuple(sizes), tuple(strides))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a copied storage (``start``, ``sizes`` in its own shape) and the view that filled it."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    view: Strided
    storage: Storage


@dataclass(frozen=True, slots=True)
class Storage:
    """A virtual storage: a published tensor (``pieces`` empty), or a copy made of pieces; row-major in ``shape``."""

    shape: tuple[int, ...]
    source: str = ""
    pieces: tuple[Piece, ...] = ()

    @property
    def sources(self) -> frozenset[str]:
        """The published tensors that it shows."""
        if not self.pieces:
            return frozenset((self.source,)) if self.source else frozenset()
        return frozenset[str]().union(*(p.storage.sources for p in self.pieces))


@dataclass(frozen=True, slots=True)
class AlignedRead:
    """``source[start + step * k] -> dst_offset + sum(k * dst_strides)`` for ``k`` in ``[0, count)``; elements."""

    source: str
    start: tuple[int, ...]
    step: tuple[int, ...]
    count: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]


def resolve(storage: Storage, view: Strided, dst: Strided) -> list[AlignedRead]:
    """Describe the copy of ``view`` of ``storage`` into the equally sized ``dst`` by reads of published tensors.

    Raises
    ------
    PlanError
        If the copy falls into more than `MAX_BOXES` boxes.
    """
    done: list[AlignedRead] = []
    todo: list[tuple[Storage, Strided, Strided]] = [(storage, view, dst)]
    while todo:
        here, src, out = todo.pop()
        aligned = source_aligned(
            here.shape, src.offset, src.sizes, src.strides, out.offset, out.strides, max_views=MAX_BOXES
        )
        for box in aligned:
            if not here.pieces:
                done.append(AlignedRead(here.source, box.start, box.step, box.counts, box.dst_offset, box.dst_stride))
                continue
            for piece in here.pieces:
                cut = _clip(box.start, box.step, box.counts, piece)
                if cut is None:
                    continue
                first, count = cut
                dst_offset = box.dst_offset + sum(k * s for k, s in zip(first, box.dst_stride, strict=True))
                local = [a + st * k - p for a, st, k, p in zip(box.start, box.step, first, piece.start, strict=True)]
                inner = Strided(
                    piece.view.offset + sum(c * s for c, s in zip(local, piece.view.strides, strict=True)),
                    count,
                    tuple(st * s for st, s in zip(box.step, piece.view.strides, strict=True)),
                )
                todo.append((piece.storage, inner, Strided(dst_offset, count, box.dst_stride)))
        if len(done) > MAX_BOXES:
            raise UnsupportedLoaderError(
                f"a copy of {sorted(storage.sources)} falls into more than {MAX_BOXES} boxes",
                source=min(storage.sources, default=""),
            )
    return done


def _clip(
    start: Sequence[int], step: Sequence[int], count: Sequence[int], piece: Piece
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """First index and number of the stepped coordinates that fall into ``piece``, or None."""
    first: list[int] = []
    size: list[int] = []
    for a, st, n, lo, extent in zip(start, step, count, piece.start, piece.sizes, strict=True):
        k0 = max(0, -((a - lo) // st)) if a < lo else 0
        k1 = min(n, (lo + extent - a + st - 1) // st)
        if k1 <= k0:
            return None
        first.append(k0)
        size.append(k1 - k0)
    return tuple(first), tuple(size)


@dataclass(slots=True)
class Origin:
    """What a traced tensor is: a view of a virtual storage, or computed from the tainting names."""

    storage: Storage | None
    taint: frozenset[str] = field(default_factory=frozenset)

    @property
    def names(self) -> frozenset[str]:
        """Every published tensor (and ``param:NAME``) that it depends on."""
        return self.taint | (self.storage.sources if self.storage is not None else frozenset())


class Traced(Protocol):
    """What the wrapper subclass adds to a tensor."""

    meta: torch.Tensor
    origin: Origin


@cache
def traced_type() -> type[torch.Tensor]:
    """The wrapper subclass (made on first use, since torch is optional)."""
    require("torch", extra="torch")
    import torch

    class TracedTensor(torch.Tensor):
        """A tensor without storage that knows which elements of a published tensor it shows."""

        meta: torch.Tensor
        origin: Origin

        @staticmethod
        def __new__(cls: type, meta: torch.Tensor, origin: Origin) -> TracedTensor:
            made: TracedTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                meta.shape,
                strides=meta.stride(),
                storage_offset=meta.storage_offset(),
                dtype=meta.dtype,
                device=torch.device("cpu"),
            )
            made.meta = meta
            made.origin = origin
            return made

        def __init__(self, meta: torch.Tensor, origin: Origin) -> None:
            del meta, origin

        def item(self) -> torch.Tensor:  # type: ignore[override]
            """A traced scalar: it can be written (``param.fill_(w.item())``), but nothing can branch on it."""
            return self.reshape(())

        def numpy(self, *, force: bool = False) -> NoReturn:
            """Refused: there are no values."""
            raise self.escapes("numpy()")

        def tolist(self) -> NoReturn:
            """Refused: there are no values."""
            raise self.escapes("tolist()")

        def __array__(self, dtype: object = None) -> NoReturn:
            raise self.escapes("numpy.asarray()")

        def escapes(self, how: str) -> UnsupportedLoaderError:
            """The refusal of a loader that looks at values."""
            names = sorted(self.origin.names)
            return UnsupportedLoaderError(
                f"the loader takes the values of {', '.join(map(repr, names[:3]))} out of torch ({how}); "
                "capture cannot follow them there",
                source=names[0] if names else "",
            )

        def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
            names = ", ".join(sorted(self.origin.names))
            return f"Traced({names}: {self.dtype} {tuple(self.shape)})"

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
        ) -> object:
            names = sorted({n for a in args if isinstance(a, cls) for n in a.origin.names})
            raise UnsupportedLoaderError(
                f"the loader used {', '.join(names) or 'a traced tensor'} ({func}) after its load_weights had "
                "returned, "
                "or in another thread; capture follows the calling thread only",
                source=names[0] if names else "",
            )

    return TracedTensor


def trace(name: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A traced tensor that stands for the whole published tensor ``name``."""
    require("torch", extra="torch")
    import torch

    meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return traced(meta, Origin(Storage(tuple(shape), source=name)))


def traced(meta: torch.Tensor, origin: Origin) -> torch.Tensor:
    """Wrap a meta tensor whose storage ``origin`` describes."""
    return cast("Callable[[torch.Tensor, Origin], torch.Tensor]", traced_type())(meta, origin)


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """The meta tensor inside a traced one."""
    return cast("Traced", tensor).meta


def origin_of(tensor: torch.Tensor) -> Origin:
    """Where a traced tensor's values come from."""
    return cast("Traced", tensor).origin
