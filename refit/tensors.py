"""What a trainer hands to a publisher, and what a receiver sees of it.

`LocalTensor` is one contiguous-box piece of a global tensor in local memory, as the adapters yield it;
`SourceTensor` is a published global tensor as the capture sees it. Neither imports torch: a ``data`` that is a
torch tensor is recognised by its module when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from reshard.planner.dtypes import dtype as parse_dtype
from reshard.refit.errors import PublishError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    ArrayLike: TypeAlias = "NDArray[np.generic] | torch.Tensor"

__all__ = ["LocalTensor", "SourceTensor", "is_torch"]


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
        The local piece: a NumPy array or a torch tensor of any strides. Sub-byte and bfloat16 values in NumPy are
        given as raw bytes or integers of the same width (``bfloat16`` as ``uint16``).
    replica_group
        A non-negative claim number: pieces of one box with equal claims have equal content. -1 claims nothing.
    axes
        Names of the stored axes where they matter (``("in", "out")``), else None.
    wire_dtype
        The dtype to publish as, if this tensor departs from the publisher's own rule; None follows the rule.
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
        parse_dtype(self.dtype)
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
        item_bytes = parse_dtype(self.dtype).bits // 8
        got = int(self.data.element_size() if is_torch(self.data) else self.data.itemsize)  # type: ignore[union-attr]
        if parse_dtype(self.dtype).bits >= 8 and got != item_bytes:
            raise PublishError(
                f"tensor {self.name!r}: labelled {self.dtype} ({item_bytes} bytes an element) but the memory has "
                f"{got} bytes an element"
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


def full(name: str, dtype: str, data: ArrayLike, *, replica_group: int = -1) -> LocalTensor:
    """A tensor that this process holds whole."""
    shape: Sequence[int] = tuple(int(n) for n in data.shape)
    return LocalTensor(name, dtype, tuple(shape), (0,) * len(shape), data, replica_group)
