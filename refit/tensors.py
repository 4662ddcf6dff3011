"""What a trainer hands to a publisher, and what a receiver sees of it.

`LocalTensor` is one contiguous-box piece of a global tensor in local memory, as the adapters yield it;
`SourceTensor` is a published global tensor as the capture sees it. Neither imports torch: a ``data`` that is a
torch tensor is recognised by its module when it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from reshard.planner.dtypes import dtype as parse_dtype
from reshard.planner.errors import DTypeError
from reshard.refit.errors import PublishError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    ArrayLike: TypeAlias = "NDArray[np.generic] | torch.Tensor"

__all__ = ["LocalTensor", "SourceTensor", "is_torch", "tensors_of"]


def is_torch(value: object) -> bool:
    """Whether ``value`` is a torch tensor, without importing torch."""
    return any(c.__module__.partition(".")[0] == "torch" and c.__name__ == "Tensor" for c in type(value).__mro__)


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A box of a global tensor that this process holds.

    Parameters
    ----------
    name
        Globally unique name (normally the Hugging Face name).
    dtype
        Label from `reshard.planner.dtypes`, of the elements of ``data``.
    shape
        Global shape.
    start
        Where the box starts, one entry a dim; it spans ``data.shape``.
    data
        The local piece: a NumPy array or a torch tensor of any strides. What NumPy has no dtype for is given as
        integers of the same width (``bfloat16`` as ``uint16``), packed elements of less than a byte as their bytes,
        labelled ``uint8``.
    replica_group
        A non-negative claim number: pieces of one box with equal claims have equal content. -1 claims nothing.
    axes
        Names of the stored axes where they matter (``("in", "out")``), else None.
    wire_dtype
        The dtype to publish as, if this tensor departs from the publisher's own rule; None follows the rule.

    Raises
    ------
    PublishError
        A box outside of the tensor, or memory that does not hold elements of ``dtype`` in this machine's byte order.
    DTypeError
        A label that is none.
    TypeError
        A name that is no text, or data that is neither an array nor a tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    data: ArrayLike
    replica_group: int = -1
    axes: tuple[str, ...] | None = None
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"tensor {self.name!r}: a name of type {type(self.name).__name__}, expected text")
        if not (is_torch(self.data) or isinstance(self.data, np.ndarray | np.generic)):
            raise TypeError(
                f"tensor {self.name!r}: data of type {type(self.data).__name__}, expected a NumPy array or a torch "
                "tensor"
            )
        self._check_memory()
        local = tuple(int(n) for n in self.data.shape)
        if not len(self.shape) == len(self.start) == len(local):
            raise PublishError(
                f"tensor {self.name!r}: rank of shape {self.shape}, start {self.start} and local data {local} differ"
            )
        for dim, (first, size, total) in enumerate(zip(self.start, local, self.shape, strict=True)):
            if first < 0 or first + size > total:
                raise PublishError(
                    f"tensor {self.name!r} dim {dim}: local box [{first}, {first + size}) lies outside the global "
                    f"size {total}"
                )

    def _check_memory(self) -> None:
        """Raise unless ``data`` holds elements of ``dtype``, as this machine stores them."""
        try:
            bits = parse_dtype(self.dtype).bits
        except DTypeError as error:
            raise DTypeError(f"tensor {self.name!r}: {error}", got=error.got, expected=error.expected) from None
        if bits < 8:
            raise PublishError(
                f"tensor {self.name!r}: {self.dtype} packs {8 // bits} elements in a byte; publish its packed bytes, "
                "labelled uint8"
            )
        if is_torch(self.data):
            kind, label = str(self.data.layout), str(self.data.dtype).removeprefix("torch.")  # type: ignore[union-attr]
            if kind != "torch.strided" or self.data.is_nested:  # type: ignore[union-attr]
                raise PublishError(f"tensor {self.name!r}: layout {kind}, expected a strided tensor")
            same, raw = label == self.dtype, False
            got = int(self.data.element_size())  # type: ignore[union-attr]
        else:
            stored = self.data.dtype
            if not stored.isnative:  # type: ignore[union-attr]
                raise PublishError(
                    f"tensor {self.name!r}: stored as {stored.str}, expected this machine's byte order; "  # type: ignore[union-attr]
                    "array.astype(array.dtype.newbyteorder('=')) is"
                )
            label, got = stored.name, stored.itemsize  # type: ignore[union-attr]
            same, raw = label == self.dtype, stored.kind in "biuV"  # type: ignore[union-attr]
        if got != bits // 8 or not (same or raw):
            raise PublishError(
                f"tensor {self.name!r}: labelled {self.dtype} ({bits // 8} bytes an element) but the memory holds "
                f"{label} ({got} bytes an element)"
            )

    @property
    def stop(self) -> tuple[int, ...]:
        """Where the box ends, one entry a dim (half-open)."""
        return tuple(a + int(n) for a, n in zip(self.start, self.data.shape, strict=True))

    @property
    def n_elems(self) -> int:
        """Elements held here."""
        n = 1
        for size in self.data.shape:
            n *= int(size)
        return n


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A published tensor: name, dtype label, global shape and, where the publisher says so, stored axes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] | None = None


def tensors_of(given: Iterable[LocalTensor], whose: str) -> list[LocalTensor]:
    """What a caller gave to be published, as a list.

    Parameters
    ----------
    whose
        Begins the message: ``"slot 'trainer-0'"``.

    Raises
    ------
    TypeError
        It is no sequence of `LocalTensor`.
    PublishError
        A tensor on torch's meta device, which has no data.
    """
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(
            f"{whose}: tensors of type {type(given).__name__}, expected a sequence of LocalTensor; local_tensors() of "
            "reshard.refit.adapters makes it"
        )
    found = list(given)
    for number, tensor in enumerate(found):
        if not isinstance(tensor, LocalTensor):
            raise TypeError(
                f"{whose}: tensors[{number}] is of type {type(tensor).__name__}, expected LocalTensor; local_tensors() "
                "of reshard.refit.adapters makes them"
            )
        if is_torch(tensor.data) and tensor.data.is_meta:  # type: ignore[union-attr]
            raise PublishError(f"{whose}: tensor {tensor.name!r} is on meta, which has no data")
    return found


def full(name: str, dtype: str, data: ArrayLike, *, replica_group: int = -1) -> LocalTensor:
    """A tensor that this process holds whole."""
    shape: Sequence[int] = tuple(int(n) for n in data.shape)
    return LocalTensor(name, dtype, tuple(shape), (0,) * len(shape), data, replica_group)
