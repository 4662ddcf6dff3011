"""What is a source tensor? `TensorDict`: the content-addressed dictionary of names, dtypes and shapes.

It is columnar, immutable and checked once. Shapes are left-padded with 1 in memory; digests and the wire see
them unpadded.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from reshard.planner.classify import Int64, classify, column
from reshard.planner.digesting import digest_column, digest_dims
from reshard.planner.dtypes import BY_CODE, MAX_CODE, dtype
from reshard.planner.errors import DTypeError, TableError
from reshard.planner.geometries import MAX_NDIM, padded_dims
from reshard.planner.packed_names import PackedNames

MAX_TENSOR_BYTES: Final = 1 << 62
_MAX_BYTES: Final = 2.0**61.9  # in floating point, so a little less

_BITS: Final[Int64] = np.zeros(MAX_CODE + 1, np.int64)
for _code, _row in BY_CODE.items():
    _BITS[_code] = _row.bits


@dataclass(frozen=True, eq=False)
class TensorDict:
    """Names, dtypes and global shapes of T source tensors.

    Parameters
    ----------
    names : PackedNames
        T distinct names.
    dtype_code : int64[T]
        Wire numbers of `reshard.planner.dtypes`.
    ndim : int64[T]
        Rank as published, 0 to 8.
    shape : tuple of D int64[T]
        Elements, left-padded with 1. D is any number from the greatest rank to 8.
    axes : mapping
        Tensor index to names of its stored axes, for the tensors that say so.

    Raises
    ------
    TableError
        Negative or absurd sizes, ranks over 8, columns of other lengths.
    DTypeError
        An unknown dtype code, or sub-byte rows that do not fill whole bytes.
    """

    names: PackedNames
    dtype_code: Int64
    ndim: Int64
    shape: tuple[Int64, ...]
    axes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fix = object.__setattr__
        fix(self, "dtype_code", column(self.dtype_code, "dtype_code"))
        fix(self, "ndim", column(self.ndim, "ndim"))
        fix(self, "shape", tuple(column(c, f"shape[{d}]") for d, c in enumerate(self.shape)))
        fix(self, "axes", {int(k): tuple(v) for k, v in sorted(self.axes.items())})
        self._check()

    @classmethod
    def build(
        cls,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        axes: Mapping[int, tuple[str, ...]] | None = None,
    ) -> TensorDict:
        """From Python objects.

        Parameters
        ----------
        names, dtypes : sequence of str
        shapes : sequence of sequence of int
        axes : mapping, optional
        """
        packed = PackedNames.pack(names)
        for name, shape in zip(names, shapes, strict=True):
            if len(shape) > MAX_NDIM:
                raise TableError(
                    f"tensor {name!r}: rank {len(shape)}; expected at most {MAX_NDIM}",
                    tensor=name,
                    got=len(shape),
                    expected=MAX_NDIM,
                )
        n_dims = max((len(s) for s in shapes), default=0)
        return cls(
            packed,
            column([dtype(label).code for label in dtypes], "dtype_code"),
            column([len(s) for s in shapes], "ndim"),
            padded_dims(shapes, n_dims, 1),
            axes or {},
        )

    def __len__(self) -> int:
        return len(self.ndim)

    def _check(self) -> None:
        n = len(self.ndim)
        lengths = {
            "names": len(self.names),
            "dtype_code": len(self.dtype_code),
            **{f"shape[{d}]": len(c) for d, c in enumerate(self.shape)},
        }
        for what, length in lengths.items():
            if length != n:
                raise TableError(f"tensor dictionary: {what} has {length} rows; expected {n}", got=length, expected=n)
        if n == 0:
            return
        if int(self.ndim.min()) < 0 or int(self.ndim.max()) > min(MAX_NDIM, len(self.shape)):
            bad = int(np.argmax((self.ndim < 0) | (self.ndim > min(MAX_NDIM, len(self.shape)))))
            raise TableError(
                f"tensor {self.name(bad)!r}: rank {int(self.ndim[bad])}; "
                f"expected 0 to {min(MAX_NDIM, len(self.shape))}",
                tensor=self.name(bad),
                got=int(self.ndim[bad]),
                expected=len(self.shape),
            )
        code = self.dtype_code
        if int(code.min()) < 0 or int(code.max()) > MAX_CODE or int(self.bits.min()) == 0:
            bad = int(np.argmin((code >= 0) & (code <= MAX_CODE) & (_BITS[np.clip(code, 0, MAX_CODE)] > 0)))
            raise DTypeError(
                f"tensor {self.name(bad)!r}: unknown dtype code {int(code[bad])}",
                tensor=self.name(bad),
                got=int(code[bad]),
                expected=MAX_CODE,
            )
        n_bytes = self.bits / 8  # as floats, which no product of extents overflows
        for d, dim in enumerate(self.shape):
            padding = self.ndim < len(self.shape) - d
            if int(dim.min()) < 0 or (dim[padding] != 1).any():
                bad = int(np.argmax((dim < 0) | (padding & (dim != 1))))
                real = d - (len(self.shape) - int(self.ndim[bad]))
                raise TableError(
                    f"tensor {self.name(bad)!r} dim {real}: size {int(dim[bad])}; expected 0 or more (padding 1)",
                    tensor=self.name(bad),
                    dim=real,
                    got=int(dim[bad]),
                    expected=1 if real < 0 else 0,
                )
            n_bytes *= np.maximum(dim, 1)
        if float(n_bytes.max()) > _MAX_BYTES:
            bad = int(np.argmax(n_bytes))
            raise TableError(
                f"tensor {self.name(bad)!r}: shape {self.shape_of(bad)} is 2**{np.log2(n_bytes[bad]):.1f} bytes; "
                "expected under 2**61.9",
                tensor=self.name(bad),
                got=self.shape_of(bad),
                expected=MAX_TENSOR_BYTES,
            )
        packed = self.bits < 8
        if packed.any():
            last = self.shape[-1] if self.shape else np.ones(n, np.int64)
            cut = packed & ((self.ndim == 0) | (last * self.bits % 8 != 0))
            if cut.any():
                bad = int(np.argmax(cut))
                raise DTypeError(
                    f"tensor {self.name(bad)!r}: rows of {int(last[bad])} {int(self.bits[bad])}-bit elements do not "
                    "fill whole bytes",
                    tensor=self.name(bad),
                    got=self.shape_of(bad),
                    expected=8 // int(self.bits[bad]),
                )

    @property
    def n_dims(self) -> int:
        """Number of (padded) dim columns."""
        return len(self.shape)

    @cached_property
    def bits(self) -> Int64:
        """int64[T]: bits of an element."""
        return column(_BITS[self.dtype_code], "bits")

    @property
    def names_list(self) -> list[str]:
        """All names, in order."""
        return self.names.strings

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Name to index."""
        return dict(zip(self.names_list, range(len(self)), strict=True))

    @cached_property
    def shape_class(self) -> tuple[Int64, Int64]:
        """Classes of equal (dtype, rank, shape): class of each tensor, first tensor of each class."""
        return classify([self.dtype_code, self.ndim, *self.shape])

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that address the content."""
        hasher = hashlib.sha256(b"reshard.TensorDict.2\0")
        hasher.update(struct.pack("<q", len(self.names.blob)))
        hasher.update(self.names.blob)
        digest_column(hasher, self.dtype_code)
        digest_dims(hasher, self.ndim, self.shape)
        hasher.update(repr(sorted(self.axes.items())).encode())
        return hasher.digest()

    def name(self, i: int) -> str:
        """Name of tensor `i`."""
        return self.names.text(i)

    def index(self, name: str) -> int:
        """Index of a name.

        Raises
        ------
        KeyError
            It is not in the dictionary.
        """
        return self.index_of[name]

    def shape_of(self, i: int) -> tuple[int, ...]:
        """Shape of tensor `i` as published."""
        return tuple(int(c[i]) for c in self.shape[len(self.shape) - int(self.ndim[i]) :])

    def dtype_label(self, i: int) -> str:
        """Dtype label of tensor `i`."""
        return BY_CODE[int(self.dtype_code[i])].label

    @classmethod
    def merged(
        cls,
        sources: Sequence[TensorDict],
        rows: Sequence[Int64],
        index: dict[str, int],
        axes: Mapping[int, tuple[str, ...]],
    ) -> TensorDict:
        """Some rows of dictionaries that are checked already, one after another; nothing is checked again.

        Parameters
        ----------
        sources, rows
            Which rows of which dictionary; together their names are the keys of `index`, in order.
        """
        n_dims = max((d.n_dims for d in sources), default=0)
        picked_names = [
            d.names if len(picked) == len(d) else d.names.take(picked) for d, picked in zip(sources, rows, strict=True)
        ]

        def dim(d: TensorDict, back: int, picked: Int64) -> Int64:
            return d.shape[-back][picked] if back <= d.n_dims else np.ones(len(picked), np.int64)

        pairs = list(zip(sources, rows, strict=True))
        out = object.__new__(cls)
        values: dict[str, object] = {
            "names": PackedNames.joined(picked_names, list(index)),
            "dtype_code": column(np.concatenate([d.dtype_code[r] for d, r in pairs]), "dtype_code"),
            "ndim": column(np.concatenate([d.ndim[r] for d, r in pairs]), "ndim"),
            "shape": tuple(
                column(np.concatenate([dim(d, back, r) for d, r in pairs]), "shape") for back in range(n_dims, 0, -1)
            ),
            "axes": dict(sorted(axes.items())),
            "index_of": index,
        }
        for name, value in values.items():
            object.__setattr__(out, name, value)
        return out

    def take(self, rows: Int64) -> TensorDict:
        """A dictionary of some of the tensors, in the order given."""
        back = {int(old): new for new, old in enumerate(rows.tolist())}
        axes = {back[i]: a for i, a in self.axes.items() if i in back}
        return TensorDict(
            self.names.take(rows), self.dtype_code[rows], self.ndim[rows], tuple(c[rows] for c in self.shape), axes
        )
