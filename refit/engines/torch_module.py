"""A plain torch module, or a Hugging Face model, as an engine: published names are parameter names.

The module has no loader of its own, so a plain one is used: each published tensor is copied into the parameter or
buffer of the same (possibly renamed) name; tensors with no such parameter are left for other ranks of the group,
whose vote covers all names together. Of two tensors for one parameter (tied weights, published by both names) the later
one is read and the other is not; a line says so, since nobody can tell here that they are equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from reshard.planner.errors import TableError
from reshard.refit.engines.loader import LoaderEngine

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

__all__ = ["TorchModuleEngine"]


class TorchModuleEngine(LoaderEngine):
    """An engine over a module without ``load_weights``.

    Parameters
    ----------
    module
        The live module.
    rename
        Published name -> parameter name, as a mapping (names that it lacks stay) or a function (None leaves the
        tensor out).
    commit, allow_unattributed
        As in `LoaderEngine`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        commit: Literal["swap", "copy"] = "swap",
        allow_unattributed: Sequence[str] = (),
    ) -> None:
        self._rename = rename
        super().__init__(module, load_weights=self._load, commit=commit, allow_unattributed=allow_unattributed)

    def _name(self, published: str) -> str | None:
        if self._rename is None:
            return published
        if callable(self._rename):
            return self._rename(published)
        return self._rename.get(published, published)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        filled: dict[int, str] = {}
        for published, value in weights:
            name = self._name(published)
            target = targets.get(name) if name is not None else None
            if target is None:
                continue
            if (before := filled.get(id(target))) is not None:
                logger.warning(
                    "published tensors %r and %r both fill parameter %r: the latter is read, the former is not; they "
                    "must be equal (tied weights), which the trainer can declare with aliases=",
                    before,
                    published,
                    name,
                )
            filled[id(target)] = published
            if tuple(target.shape) != tuple(value.shape):
                raise TableError(
                    f"published tensor {published!r} has shape {tuple(value.shape)}, parameter {name!r} has "
                    f"{tuple(target.shape)}",
                    tensor=published,
                    got=tuple(value.shape),
                    expected=tuple(target.shape),
                )
            target.data.copy_(value)
