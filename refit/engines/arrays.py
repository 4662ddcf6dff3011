"""An engine of NumPy arrays: no torch, no loader, the layout said outright.

    engine = ArrayEngine(
        {"qkv": np.zeros((96, 64), np.float32), "norm": np.zeros(64, np.float32)},
        layout={"qkv": [take("q", np.s_[0:32], into=np.s_[0:32]), take("k", np.s_[0:32], into=np.s_[32:64]), ...]},
    )

Arrays that ``layout`` does not name take the whole published tensor of their own name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from reshard.planner import Buffer, ReadRequest, ReadTable
from reshard.planner.convert import storage_dtype
from reshard.planner.errors import DTypeError, TableError
from reshard.refit.devices import host_bytes
from reshard.refit.engine import Captured, EngineParameter
from reshard.refit.errors import RefitError
from reshard.refit.residency import Span, spans_of
from reshard.refit.tensors import SourceTensor

if TYPE_CHECKING:
    from types import EllipsisType

    from reshard.refit.devices import Memory

    Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]

__all__ = ["ArrayEngine", "Take", "take"]

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Take:
    """``array[into] = source[index]``, with ``axes`` permuted on the way if given."""

    source: str
    index: Index
    into: Index
    axes: tuple[int, ...] | None


def take(source: str, index: Index = ..., *, into: Index = ..., axes: Sequence[int] | None = None) -> Take:
    """A piece of a layout: NumPy's basic indexing on both sides.

    Parameters
    ----------
    source
        Name of the published tensor.
    index
        Which part of it; slices with steps of 1 or more, integers, ``...``.
    into
        Which part of the array it fills; shapes must be equal.
    axes
        Permutes the taken part (as `numpy.transpose`) before it is written.
    """
    return Take(source, index, into, tuple(axes) if axes is not None else None)


class ArrayEngine:
    """An engine over named arrays.

    Parameters
    ----------
    arrays
        The parameters. C-contiguous. After a refit read them from the engine: ``engine["w"]``.
    layout
        For each array the pieces that fill it; an array that is not named takes the tensor of its own name whole.
    dtypes
        Dtype labels of arrays that NumPy has no dtype for (``{"w": "bfloat16"}`` over uint16 storage).
    commit
        ``swap`` makes the refitted buffers the arrays (fast; earlier array objects keep the old version until the
        refit after next); ``copy`` writes into the caller's own arrays.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        *,
        layout: Mapping[str, Sequence[Take]] | None = None,
        dtypes: Mapping[str, str] | None = None,
        commit: Literal["swap", "copy"] = "swap",
    ) -> None:
        if commit not in ("swap", "copy"):
            raise ValueError(f"commit={commit!r}: expected 'swap' or 'copy'")
        self._arrays: dict[str, Array] = dict(arrays)
        self._layout = dict(layout or {})
        self._dtypes = dict(dtypes or {})
        self.swaps = commit == "swap"
        self.paused = False
        for name in self._layout:
            if name not in self._arrays:
                raise TableError(f"layout names array {name!r}, which the engine does not have", tensor=name)
        for name, array in self._arrays.items():
            if not array.flags.c_contiguous:
                raise TableError(f"array {name!r} is not C-contiguous", tensor=name)
            if not array.dtype.isnative:
                raise TableError(
                    f"array {name!r}: stored as {array.dtype.str}, expected this machine's byte order",
                    tensor=name,
                    got=array.dtype.str,
                    expected=array.dtype.newbyteorder("=").str,
                )
            label = self._label(name)
            try:
                item_bytes = storage_dtype(label).itemsize
            except DTypeError as error:
                raise DTypeError(
                    f"array {name!r}: {error}", tensor=name, got=error.got, expected=error.expected
                ) from None
            if item_bytes != array.dtype.itemsize:
                raise TableError(
                    f"array {name!r}: labelled {label} but stored as {array.dtype} ({array.dtype.itemsize} bytes "
                    "an element)",
                    tensor=name,
                    got=array.dtype.itemsize,
                    expected=item_bytes,
                )

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __len__(self) -> int:
        return len(self._arrays)

    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(self._arrays)

    def _label(self, name: str) -> str:
        return self._dtypes.get(name) or self._arrays[name].dtype.name

    def live_spans(self) -> list[Span]:
        """Where the arrays lie, for `reshard.refit.residency`."""
        return spans_of(self._arrays.items())

    # -- the Engine protocol

    def parameters(self) -> Sequence[EngineParameter]:
        """All arrays."""
        return [EngineParameter(n, self._label(n), a.shape, a.nbytes) for n, a in self._arrays.items()]

    def signature(self) -> bytes:
        """Changes when an array was replaced by another object of other shape or address."""
        hasher = hashlib.sha256()
        for name, array in self._arrays.items():
            hasher.update(repr((name, self._label(name), array.shape, array.ctypes.data)).encode())
        return hasher.digest()

    def capture(self, manifest: Sequence[SourceTensor]) -> Captured:
        """Turn the layout into a read table.

        Raises
        ------
        TableError
            A piece whose two sides differ in shape, or of a tensor that nobody publishes.
        """
        sources = {s.name: s for s in manifest}
        buffers: list[Buffer] = []
        requests: list[ReadRequest] = []
        consumed: set[str] = set()
        for name, array in self._arrays.items():
            pieces = self._layout.get(name)
            if pieces is None:
                pieces = [take(name)] if name in sources else []
            unknown = [p.source for p in pieces if p.source not in sources]
            if unknown:
                raise TableError(f"array {name!r} takes {unknown[0]!r}, which nobody publishes", tensor=unknown[0])
            if not pieces:
                continue
            number = len(buffers)
            buffers.append(Buffer(name, array.shape, self._label(name)))
            for piece in pieces:
                requests.append(self._request(piece, sources[piece.source], array, number, name, len(requests)))
                consumed.add(piece.source)
        return Captured(ReadTable.build(buffers, requests), len(requests), frozenset(consumed))

    def read_live(self, name: str, into: Memory) -> None:
        """Copy one array's bytes."""
        np.copyto(host_bytes(into), self._arrays[name].reshape(-1).view(np.uint8))

    def load_materialised(self, sources: Mapping[str, Memory], buffers: Mapping[str, Memory]) -> None:
        """An array engine has no loader."""
        raise RefitError(f"an ArrayEngine has no loader to run on {sorted(sources)}")

    def pause(self) -> None:
        """Note that nobody may read the arrays."""
        self.paused = True

    def resume(self) -> None:
        """Note that they may be read again."""
        self.paused = False

    def write_live(self, buffers: Mapping[str, Memory]) -> None:
        """Copy into the arrays as they are."""
        for name, raw in buffers.items():
            array = self._arrays[name]
            np.copyto(array, host_bytes(raw).view(array.dtype).reshape(array.shape))

    def install(self, buffers: Mapping[str, Memory]) -> None:
        """Swap the buffers in, or copy them into the arrays."""
        fresh: dict[str, Array] = {}
        for name, raw in buffers.items():
            array = self._arrays[name]
            fresh[name] = host_bytes(raw).view(array.dtype).reshape(array.shape)
        if self.swaps:
            self._arrays.update(fresh)
        else:
            self.write_live(buffers)

    # -- one piece

    @staticmethod
    def _request(piece: Take, source: SourceTensor, array: Array, buffer: int, name: str, order: int) -> ReadRequest:
        start, step, count, kept = _aligned(piece.index, source.shape, source.name)
        taken_shape = tuple(count[d] for d in kept)
        axes = piece.axes if piece.axes is not None else tuple(range(len(taken_shape)))
        if sorted(axes) != list(range(len(taken_shape))):
            raise TableError(
                f"array {name!r}: axes {axes} do not permute the {len(taken_shape)} dims taken of {source.name!r}",
                tensor=source.name,
            )
        taken_shape = tuple(taken_shape[a] for a in axes)
        into_start, into_step, into_count, into_kept = _aligned(piece.into, array.shape, name)
        into_shape = tuple(into_count[d] for d in into_kept)
        if into_shape != taken_shape:
            raise TableError(
                f"array {name!r}: piece of {source.name!r} has shape {taken_shape}, the part it fills has {into_shape}",
                tensor=source.name,
                got=taken_shape,
                expected=into_shape,
            )
        elems = _row_major(array.shape)
        offset = sum(s * e for s, e in zip(into_start, elems, strict=True))
        stride = [0] * len(source.shape)
        for position, axis in enumerate(axes):
            d = into_kept[position]
            stride[kept[axis]] = into_step[d] * elems[d]
        return ReadRequest(
            source.name, source.shape, source.dtype, start, step, count, buffer, offset, tuple(stride), order
        )


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _aligned(
    index: Index, shape: Sequence[int], name: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(start, step, count) for each dim, and the dims that an index keeps."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(p is ... for p in parts) > 1 or sum(p is not ... for p in parts) > len(shape):
        raise TableError(f"index {index!r} does not fit {name!r} of shape {tuple(shape)}", tensor=name)
    if ... not in parts:
        parts.append(...)
    at = parts.index(...)
    filled = parts[:at] + [slice(None)] * (len(shape) - len(parts) + 1) + parts[at + 1 :]
    start, step, count, kept = [], [], [], []
    for dim, (part, size) in enumerate(zip(filled, shape, strict=True)):
        if isinstance(part, slice):
            first, stop, by = part.indices(size)
            if by < 1:
                raise TableError(
                    f"index {index!r} of {name!r} dim {dim}: step {by}; expected 1 or more", tensor=name, dim=dim
                )
            if part.stop is not None and part.stop > size:
                raise TableError(
                    f"index {index!r} of {name!r} dim {dim}: stops at {part.stop}, the size is {size}",
                    tensor=name,
                    dim=dim,
                )
            n = len(range(first, stop, by))
            kept.append(dim)
        else:
            number = int(part)  # type: ignore[arg-type]
            if not -size <= number < size:
                raise TableError(f"index {number} of {name!r} dim {dim}: the size is {size}", tensor=name, dim=dim)
            first, by, n = number % size, 1, 1
        start.append(first)
        step.append(by)
        count.append(n)
    return tuple(start), tuple(step), tuple(count), tuple(kept)
