"""A torch model whose weights are repacked after they are loaded: quantised, permuted or fused into kernel layouts.

The engine remembers the *load layout*: which parameters and buffers the model had, of which shapes and strides,
when it was built.

1. Capture runs the loader on the load layout, put back for a moment with memory that is never touched.
2. Install puts the load layout back for good, fills it from copies of the shadow buffers, and calls the model's own
   ``after_load``.

So the same weights refitted twice give the same final bytes. Since nothing of the kernel layouts is used, every
parameter must be part of each refit; and what is left cannot be served on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.refit.devices import tensor_of
from reshard.refit.engine import Captured, EngineParameter
from reshard.refit.engines.loader import Loader, LoaderEngine
from reshard.refit.engines.places import Place, places_of
from reshard.refit.errors import RefitError
from reshard.refit.tensors import SourceTensor

if TYPE_CHECKING:
    import torch

    from reshard.refit.devices import Memory

    Tensors = dict[str, torch.Tensor | None]

__all__ = ["RepackingEngine"]


@dataclass(frozen=True, slots=True)
class _Geometry:
    """How a tensor lies in the load layout."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Geometry:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class _Tables:
    """One module's parameters and buffers."""

    module: torch.nn.Module
    parameters: Tensors
    buffers: Tensors

    @classmethod
    def of(cls, model: torch.nn.Module) -> list[_Tables]:
        return [cls(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]

    def put(self) -> None:
        """Give the module these tables again."""
        self.module._parameters.clear()
        self.module._parameters.update(self.parameters)  # type: ignore[arg-type]
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (t for t in (*self.parameters.values(), *self.buffers.values()) if t is not None)


class RepackingEngine(LoaderEngine):
    """An engine over a model with a step after loading.

    Parameters
    ----------
    model
        In its load layout, that is before ``after_load`` was ever called.
    after_load
        Called with the model after each install; it may replace, retype or delete parameters.
    load_weights, allow_unattributed
        As in `LoaderEngine`.
    """

    keeps_load_layout = False

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        after_load: Callable[[torch.nn.Module], object],
        load_weights: Loader | None = None,
        allow_unattributed: Sequence[str] = (),
    ) -> None:
        super().__init__(model, load_weights=load_weights, commit="copy", allow_unattributed=allow_unattributed)
        self._after_load = after_load
        self._layout = _Tables.of(model)
        self._geometry = {id(t): (t, _Geometry.of(t)) for tables in self._layout for t in tables.tensors()}
        own = {name for name, _ in model.named_parameters()}
        self.must_write = tuple(p.name for p in places_of(model) if p.name in own and p.nbytes)
        """Parameters that each refit must write, since nothing of the kernel layouts can be kept."""
        self._parameters = [
            EngineParameter(p.name, p.label, tuple(int(n) for n in p.tensor.shape), p.nbytes)
            for p in places_of(model)
            if p.nbytes
        ]

    def parameters(self) -> Sequence[EngineParameter]:
        """Those of the load layout."""
        return self._parameters

    def capture(self, manifest: Sequence[SourceTensor]) -> Captured:
        """Dry-run the loader on the load layout."""
        with self._load_layout():
            return super().capture(manifest)

    def load_materialised(self, sources: Mapping[str, Memory], buffers: Mapping[str, Memory]) -> None:
        """Run the loader on the load layout."""
        with self._load_layout():
            super().load_materialised(sources, buffers)

    def read_live(self, name: str, into: Memory) -> None:
        """Refused: the live bytes are in a kernel layout."""
        raise RefitError(f"parameter {name!r} is live in a kernel layout only; a refit must write all of it")

    def write_live(self, buffers: Mapping[str, Memory]) -> None:
        """Refused: the live memory is in a kernel layout."""
        raise RefitError(f"{type(self.model).__name__} is live in kernel layouts and cannot be streamed into")

    def install(self, buffers: Mapping[str, Memory]) -> None:
        """Fill the load layout from copies of ``buffers`` and repack it."""
        import torch

        places: list[Place]
        with self._load_layout():
            places = places_of(self.model)
        for tables in self._layout:
            tables.put()
        with torch.no_grad():
            for place in places:
                if place.name not in buffers:
                    continue
                raw = tensor_of(buffers[place.name])
                for tensor in place.tensors:
                    # A copy: the shadow buffer is read into again at the next refit.
                    geometry = self._geometry[id(tensor)][1]
                    flat = raw.clone().view(geometry.dtype)
                    tensor.data = flat.as_strided(geometry.shape, geometry.stride).to(geometry.device)
        self._after_load(self.model)

    @contextmanager
    def _load_layout(self) -> Iterator[None]:
        """The load layout, with memory that nobody has written where the kernel layout has taken its own away."""
        import torch

        kernel = _Tables.of(self.model)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tables in self._layout:
            tables.put()
        for tensor, geometry in self._geometry.values():
            if _Geometry.of(tensor) != geometry:
                kept.append((tensor, tensor.data))
                tensor.data = torch.empty_strided(
                    geometry.shape, geometry.stride, dtype=geometry.dtype, device=geometry.device
                )
        try:
            yield
        finally:
            for tensor, data in kept:
                tensor.data = data
            for tables in kernel:
                tables.put()
