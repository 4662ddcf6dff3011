"""Run a loader on real values without touching the engine: its writes go to shadow buffers.

Used for materialised sources, after they were staged and before the group votes. Under the dispatch mode every
operation that reads or writes the memory of a shadowed destination works on its shadow; a write to any other
destination is dropped, since the plan's own copies have already put the right bytes into its shadow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING

from reshard.planner.errors import require
from reshard.refit.recording import Destination

if TYPE_CHECKING:
    import torch

__all__ = ["run_redirected"]


def run_redirected(
    loader: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    weights: Iterable[tuple[str, torch.Tensor]],
    destinations: Sequence[Destination],
    shadows: Mapping[str, torch.Tensor],
) -> None:
    """Call ``loader(weights)`` with ``destinations`` replaced by ``shadows`` (name -> flat typed tensor)."""
    with _redirector_type()(destinations, shadows):
        loader(weights)


@cache
def _redirector_type() -> Callable[[Sequence[Destination], Mapping[str, torch.Tensor]], AbstractContextManager[object]]:
    require("torch", extra="torch")
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    class Redirector(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Replaces views of live memory by views of shadows, operation by operation."""

        def __init__(self, destinations: Sequence[Destination], shadows: Mapping[str, torch.Tensor]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.shadows = shadows
            self.by_storage: dict[int, list[Destination]] = {}
            for d in destinations:
                self.by_storage.setdefault(d.storage_ptr, []).append(d)

        def find(self, tensor: torch.Tensor) -> Destination | None:
            known = self.by_storage.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if known is None:
                return None
            at = tensor.storage_offset() * tensor.element_size()
            return next((d for d in known if d.first_byte <= at < d.first_byte + d.nbytes), None)

        def __torch_dispatch__(
            self,
            func: torch._ops.OpOverload,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            kwargs = kwargs or {}
            returns = func._schema.returns
            if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
                return func(*args, **kwargs)
            originals: dict[int, torch.Tensor] = {}

            def shadow(value: object) -> object:
                if not isinstance(value, torch.Tensor):
                    return value
                tensor: torch.Tensor = value
                place = self.find(tensor)
                if place is None or place.name not in self.shadows:
                    return tensor
                offset = int(tensor.storage_offset()) - place.first_byte // place.item_bytes
                typed = self.shadows[place.name].view(tensor.dtype)
                made = typed.as_strided(tensor.shape, tensor.stride(), offset)
                originals[id(made)] = tensor
                return made

            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    target = args[i] if i < len(args) else kwargs.get(argument.name)
                    for t in pytree.tree_leaves(target):
                        if (
                            isinstance(t, torch.Tensor)
                            and (d := self.find(t)) is not None
                            and d.name not in self.shadows
                        ):
                            return target if len(returns) else None
            out = func(*pytree.tree_map(shadow, args), **pytree.tree_map(shadow, kwargs))
            return pytree.tree_map(lambda t: originals.get(id(t), t) if isinstance(t, torch.Tensor) else t, out)

    return Redirector
