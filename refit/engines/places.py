"""Where does a torch model keep its weights? Every parameter and buffer once, with all its names.

Tied parameters (one memory, two names) are one `Place` with aliases. A place is *writable* if its elements lie
dense in memory; its destination buffer then has the physical order of dims, so that element offsets in the buffer
are those in the parameter's memory.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.planner import Buffer
from reshard.planner.dtypes import BY_LABEL
from reshard.planner.errors import require
from reshard.refit.devices import tensor_of
from reshard.refit.errors import RefitError
from reshard.refit.recording import Destination, storage_key
from reshard.refit.residency import Span, span_of

if TYPE_CHECKING:
    import torch

    from reshard.refit.devices import Memory

__all__ = ["Place", "label_of", "live_spans", "physical_order", "places_of", "signature_of", "torch_dtype"]


def label_of(dtype: torch.dtype) -> str:
    """The planner's label of a torch dtype, or its own name where the planner has none."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(label: str) -> torch.dtype:
    """The torch dtype of a planner label (from the allow-list, never by look-up of an arbitrary name).

    Raises
    ------
    RefitError
        If this torch has none.
    """
    require("torch", extra="torch")
    import torch

    found = getattr(torch, label, None) if label in BY_LABEL else None
    if not isinstance(found, torch.dtype):
        raise RefitError(f"torch {torch.__version__} has no dtype for {label!r}")
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """One piece of a model's memory.

    Attributes
    ----------
    name, aliases
        The first name found, and the others.
    tensors
        The distinct tensor objects that show this memory.
    dense
        Whether it can be a destination.
    order
        Dims by falling stride.
    """

    name: str
    aliases: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    dense: bool
    order: tuple[int, ...]

    @classmethod
    def made(cls, names: Sequence[str], tensors: tuple[torch.Tensor, ...], order: tuple[int, ...]) -> Place:
        """The place of some tensors that show one piece of memory under some names."""
        return cls(names[0], tuple(names[1:]), tensors, _is_dense(tensors[0], order), order)

    @property
    def tensor(self) -> torch.Tensor:
        """The first of its tensors."""
        return self.tensors[0]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(self.tensor.numel() * self.tensor.element_size())

    @property
    def label(self) -> str:
        """Dtype label."""
        return label_of(self.tensor.dtype)

    def buffer(self) -> Buffer:
        """Its destination buffer, dims in physical order."""
        return Buffer(self.name, tuple(int(self.tensor.shape[d]) for d in self.order), self.label)

    def destination(self) -> Destination:
        """What capture recognises it by."""
        t = self.tensor
        item = t.element_size()
        return Destination(self.name, storage_key(t), int(t.storage_offset()) * item, self.nbytes, item, t.dtype)

    def destinations(self) -> list[Destination]:
        """`destination` of each of its tensors, for a place whose tensors lie in storages of their own (meta)."""
        item = self.tensor.element_size()
        return [
            Destination(self.name, key, first, self.nbytes, item, self.tensor.dtype)
            for key, first in dict.fromkeys((storage_key(t), int(t.storage_offset()) * item) for t in self.tensors)
        ]

    def view_of(self, raw: Memory, like: torch.Tensor | None = None) -> torch.Tensor:
        """``raw`` (its destination buffer's bytes) shown with the shape and strides of one of its tensors."""
        require("torch", extra="torch")

        shown = self.tensor if like is None else like
        flat: torch.Tensor = tensor_of(raw).view(shown.dtype)
        return flat.as_strided(shown.shape, shown.stride())


def places_of(model: torch.nn.Module) -> list[Place]:
    """All parameters and buffers of ``model``, in its own order, each piece of memory once."""
    names: dict[tuple[int, int, int, str], list[str]] = {}
    tensors: dict[tuple[int, int, int, str], list[torch.Tensor]] = {}
    both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in both:
        if tensor.device.type == "meta":
            raise RefitError(f"parameter {name!r} is on the meta device; materialise the model before refitting it")
        key = (
            tensor.untyped_storage().data_ptr() if tensor.numel() else -len(names) - 1,
            int(tensor.storage_offset()),
            int(tensor.numel()),
            str(tensor.dtype),
        )
        names.setdefault(key, []).append(name)
        shown = tensors.setdefault(key, [])
        if not any(t is tensor for t in shown):
            shown.append(tensor)
    made = []
    for key, found in names.items():
        first = tensors[key][0]
        made.append(Place.made(found, tuple(tensors[key]), physical_order(first)))
    return made


def live_spans(model: torch.nn.Module) -> list[Span]:
    """The addresses of all parameters and buffers that are not on the meta device, those of one memory once."""
    found: dict[tuple[int, int], Span] = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.device.type != "meta":
            span = span_of(name, tensor.detach())
            found.setdefault((span.address, span.nbytes), span)
    return list(found.values())


def physical_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dims by falling stride, those of one element first."""
    keys = [
        (-float(s) if n > 1 else -math.inf, d)
        for d, (n, s) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return tuple(d for _, d in sorted(keys))


def _is_dense(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    if tensor.numel() == 0 or label_of(tensor.dtype) not in BY_LABEL:
        return False
    step = 1
    for d in reversed(order):
        if tensor.shape[d] > 1:
            if tensor.stride(d) != step:
                return False
            step *= int(tensor.shape[d])
    return True


def signature_of(places: Sequence[Place]) -> bytes:
    """Changes when a parameter was reallocated, reshaped or retyped."""
    hasher = hashlib.sha256()
    for place in places:
        for t in place.tensors:
            row = (place.name, place.aliases, t.dtype, tuple(t.shape), t.stride(), t.data_ptr())
            hasher.update(repr(row).encode())
    return hasher.digest()
