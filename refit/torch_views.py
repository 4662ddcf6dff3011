"""Strided views of rows of bytes as torch tensors: what the planner's offsets and strides mean on a device.

Torch has no negative strides and no views at odd addresses, so a view is made of the widest integer that offsets,
strides and runs allow; dims that run backwards are turned round on both sides; elements at odd addresses are
gathered byte by byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.planner.errors import PlanError, require

if TYPE_CHECKING:
    import torch

__all__ = ["Strided", "copy_runs", "elements_of", "put_elements"]


@dataclass(frozen=True, slots=True)
class Strided:
    """Bytes ``[offset, ...)`` of a row, as ``shape`` pieces ``strides`` bytes apart, each of ``inner`` bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    inner: int

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return self.inner == 0 or 0 in self.shape

    def forward(self) -> tuple[Strided, tuple[int, ...]]:
        """The same bytes with no negative stride, and the dims that were turned round."""
        turned = tuple(d for d, s in enumerate(self.strides) if s < 0)
        first = self.offset + sum((self.shape[d] - 1) * self.strides[d] for d in turned)
        return Strided(first, self.shape, tuple(abs(s) for s in self.strides), self.inner), turned

    def widest(self, storage_offset: int) -> int:
        """The widest integer, 8, 4, 2 or 1 bytes, that all of it is made of."""
        steps = [s for n, s in zip(self.shape, self.strides, strict=True) if n > 1]
        return math.gcd(8, storage_offset + self.offset, self.inner, *steps)

    @property
    def extent(self) -> int:
        """Bytes from the first to one past the last; strides must not be negative."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.inner

    def require_inside(self, nbytes: int) -> None:
        """Raise PlanError unless it lies inside a row of so many bytes."""
        if self.offset < 0 or self.offset + self.extent > nbytes:
            raise PlanError(
                f"a view of [{self.offset}, {self.offset + self.extent}) lies outside its {nbytes} bytes",
                got=self.offset + self.extent,
                expected=nbytes,
            )


def _view(memory: torch.Tensor, at: Strided, width: int) -> torch.Tensor:
    """``(*shape, inner / width)`` integers of ``width`` bytes."""
    at.require_inside(int(memory.numel()))
    row = memory[at.offset : at.offset + at.extent].view(_integer(width))
    return row.as_strided((*at.shape, at.inner // width), (*(s // width for s in at.strides), 1))


def copy_runs(source: torch.Tensor, src: Strided, target: torch.Tensor, dst: Strided) -> None:
    """Copy pieces of equal shape and inner bytes, unchanged. Enqueued on the current stream."""
    if src.empty:
        return
    src_on, src_turned = src.forward()
    dst_on, dst_turned = dst.forward()
    width = math.gcd(src_on.widest(int(source.storage_offset())), dst_on.widest(int(target.storage_offset())))
    values = _view(source, src_on, width)
    turned = tuple(set(src_turned) ^ set(dst_turned))
    _view(target, dst_on, width).copy_(values.flip(turned) if turned else values, non_blocking=True)


def elements_of(memory: torch.Tensor, at: Strided, dtype: torch.dtype) -> torch.Tensor:
    """Elements of ``dtype`` (``inner`` is their size) of shape ``at.shape``; a copy where they lie at odd addresses."""
    require("torch", extra="torch")
    import torch

    on, turned = at.forward()
    wide = on.widest(int(memory.storage_offset())) == on.inner
    raw = _view(memory, on, on.inner if wide else 1)
    if turned:
        raw = raw.flip(turned)  # as integers: not every device turns small floats round
    if turned or not wide:
        raw = raw.clone(memory_format=torch.contiguous_format)
    return raw.view(dtype).squeeze(-1)


def put_elements(memory: torch.Tensor, at: Strided, values: torch.Tensor) -> None:
    """Write elements of shape ``at.shape`` (``inner`` is their size); the reverse of `elements_of`."""
    require("torch", extra="torch")
    import torch

    on, turned = at.forward()
    width = on.widest(int(memory.storage_offset()))
    raw = values.contiguous().unsqueeze(-1).view(torch.uint8).view(_integer(width))
    _view(memory, on, width).copy_(raw.flip(turned) if turned else raw, non_blocking=True)


def _integer(width: int) -> torch.dtype:
    require("torch", extra="torch")
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
