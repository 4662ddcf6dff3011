"""A vLLM model as an engine: captured with its own class, installed by its own layerwise reload.

1. `VllmEngine.capture` runs the model's ``load_weights`` on traced tensors, over its load layout on the meta device
   (`reshard.refit.engines.vllm_layout`): the weights that serve are not touched, whatever layout they are in.
2. The receiver fills shadow buffers of the load layout; sources whose values the loader computes with are loaded into
   them by the loader itself (`VllmEngine.load_materialised`).
3. `VllmEngine.install`, after the group's decision, starts vLLM's layerwise reload, gives each layer a copy of its
   shadow buffers, lets vLLM post-process it (packing, quantisation, absorbed projections) and copy the result into
   the kernel tensors that serve, whose addresses stay. If that fails the kernel tensors are put back into the model,
   and the group goes into quarantine.

Since the load layout is not kept, each refit must write all that the loader writes: ``only=`` is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from reshard.planner.errors import ReshardError, require
from reshard.refit.capture import record
from reshard.refit.devices import tensor_of
from reshard.refit.engine import Captured, EngineParameter
from reshard.refit.engines.loader import Loader, captured_of
from reshard.refit.engines.places import live_spans, places_of, signature_of, torch_dtype
from reshard.refit.engines.vllm_cpu import keeps_scales, packs_again
from reshard.refit.engines.vllm_layout import LoadPlace, load_layout, load_places
from reshard.refit.errors import RefitError, UnsupportedLoaderError
from reshard.refit.names import names_of
from reshard.refit.residency import Span
from reshard.refit.tensors import SourceTensor

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig

    from reshard.refit.devices import Memory

__all__ = ["VllmEngine"]


class VllmEngine:
    """An engine over a model that vLLM built.

    Parameters
    ----------
    model
        The worker's model (``model_runner.get_model()``).
    model_config
        vLLM's, for its finalisation of attention layers.
    device
        The worker's device.
    load_weights
        ``model.load_weights`` by default.
    allow_unattributed
        Patterns of source names that may end in memory that belongs to no parameter.
    """

    swaps = False
    install_mode = "shadow"

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        model_config: ModelConfig,
        device: torch.device | str = "cpu",
        load_weights: Loader | None = None,
        allow_unattributed: Sequence[str] = (),
    ) -> None:
        loader = load_weights if load_weights is not None else getattr(model, "load_weights", None)
        if not callable(loader):
            raise RefitError(f"{type(model).__name__} has no load_weights")
        self.model = model
        self._loader: Loader = loader
        self._model_config = model_config
        self._device = device
        self._allow = names_of(allow_unattributed, "allow_unattributed")
        self._places = {p.place.name: p for p in load_places(model)}
        self._shown: dict[str, SourceTensor] = {}
        self._padded: frozenset[str] = frozenset()
        self._written: frozenset[str] = frozenset()

    @property
    def must_write(self) -> tuple[str, ...]:
        """Parameters that each refit must write: all that the loader writes."""
        return tuple(name for name in self._places if name in self._written)

    def live_spans(self) -> list[Span]:
        """Where the live kernel tensors lie, for `reshard.refit.residency`."""
        return live_spans(self.model)

    # -- the Engine protocol

    def parameters(self) -> Sequence[EngineParameter]:
        """All parameters of the load layout, without padding, and those buffers that the loader writes."""
        return [
            EngineParameter(name, p.place.label, tuple(int(n) for n in p.place.tensor.shape), p.load_bytes)
            for name, p in self._places.items()
            if p.load_bytes and (p.is_parameter or name in self._written)
        ]

    def signature(self) -> bytes:
        """Changes when a kernel tensor was reallocated, reshaped or retyped."""
        return signature_of(places_of(self.model))

    def capture(self, manifest: Sequence[SourceTensor]) -> Captured:
        """Dry-run the loader over the load layout on the meta device.

        Raises
        ------
        UnsupportedLoaderError, UnattributedWriteError
            As `reshard.refit.capture.record`.
        """
        with load_layout(self.model):
            places = {name: p.current() for name, p in self._places.items()}
            recording = record(
                self._named_failures,
                [(s.name, torch_dtype(s.dtype), s.shape) for s in manifest],
                [d for p in places.values() if p.dense for d in p.destinations()],
                allow_unattributed=lambda name: any(fnmatchcase(name, pattern) for pattern in self._allow),
            )
        self._shown = {s.name: s for s in manifest}
        captured = captured_of(recording, self._shown, places)
        self._written = frozenset(captured.reads.buffers.names_list)
        by_loader = dict(zip(captured.loader_buffers, captured.loader_bytes, strict=True))
        self._padded = frozenset(
            name
            for name in self._written
            if self._places[name].load_elems < self._places[name].place.tensor.numel()
            or by_loader.get(name, 0) == self._places[name].place.nbytes
        )
        return captured

    def _named_failures(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load; a loader's own complaint (often a bare assertion) names the published tensor that it met."""
        met = ""

        def handed() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal met
            for met, tensor in weights:  # noqa: UP028  (the name is kept)
                yield met, tensor

        try:
            self._loader(handed())
        except ReshardError:
            raise
        except Exception as error:
            raise UnsupportedLoaderError(
                f"{type(self.model).__name__}.load_weights does not take published tensor {met!r}: "
                f"{type(error).__name__}: {error}",
                source=met,
            ) from error

    def read_live(self, name: str, into: Memory) -> None:
        """Zeros, for declared padding and for what the loader writes whole; else refused.

        Raises
        ------
        RefitError
            The loader leaves a part of the parameter as it is, and what serves now is in a kernel layout.
        """
        if name not in self._padded:
            raise RefitError(
                f"parameter {name!r} is written in part, and what serves now is in a kernel layout: a refit of a vLLM "
                "model must write each parameter whole"
            )
        tensor_of(into).zero_()

    def load_materialised(self, sources: Mapping[str, Memory], buffers: Mapping[str, Memory]) -> None:
        """Run the loader on staged sources over the load layout, whose memory is ``buffers`` where they name it."""
        require("torch", extra="torch")
        import torch

        memory: dict[tuple[int, str], Callable[[torch.Tensor], torch.Tensor]] = {}
        for name, raw in buffers.items():
            place = self._places[name]

            def make(meta: torch.Tensor, place: LoadPlace = place, raw: Memory = raw) -> torch.Tensor:
                return place.place.view_of(raw, meta)

            memory |= {(id(site.layer), site.attribute): make for site in place.sites}
        weights = [
            (name, tensor_of(raw).view(torch_dtype(self._shown[name].dtype)).view(self._shown[name].shape))
            for name, raw in sources.items()
        ]
        with load_layout(self.model, memory), torch.no_grad():
            self._loader(weights)

    def install(self, buffers: Mapping[str, Memory]) -> None:
        """Let vLLM reload each layer from its shadow buffers.

        Raises
        ------
        Exception
            Whatever vLLM's post-processing raises; the model has its kernel tensors again, some already rewritten.
        """
        require("torch", extra="torch")
        import torch
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        wanted: dict[int, list[tuple[str, LoadPlace, Memory]]] = {}
        for name, raw in buffers.items():
            for site in self._places[name].sites:
                wanted.setdefault(id(site.layer), []).append((site.attribute, self._places[name], raw))
        try:
            with torch.no_grad(), torch.device(self._device):
                initialize_layerwise_reload(self.model)
                for layer in self.model.modules():
                    if id(layer) in wanted:
                        _reload_layer(layer, wanted[id(layer)])
                finalize_layerwise_reload(self.model, self._model_config)
        except BaseException:
            _restore_kernel_tensors(self.model)
            raise


def _reload_layer(layer: torch.nn.Module, parts: Iterable[tuple[str, LoadPlace, Memory]]) -> None:
    """Give one layer, which vLLM has put into its load layout, its new weights, and let vLLM process them."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    info = get_layerwise_info(layer)
    if not info.can_load():
        raise RefitError(f"{type(layer).__name__} was finished twice in one install")
    deferred = is_deferred_attention_layer(layer)
    for attribute, place, raw in parts:
        target = getattr(layer, attribute)
        fresh = place.place.view_of(raw, target)
        if deferred:  # vLLM replays these itself once all other layers are done
            bound = inspect.signature(default_weight_loader).bind(target, fresh)
            info.loaded_weights.append((attribute, bound))
            info.load_numel += target.numel()
            continue
        if target.is_meta:
            # A copy: post-processing may keep views of what it is given, and the shadow buffer is read into again.
            copied = materialize_meta_tensor(target)
            copied.copy_(fresh)
            setattr(layer, attribute, copied)
        else:  # vLLM loads these in place
            target.data.copy_(fresh)
        if attribute in info.kernel_non_persistent_buffers and info.kernel_tensors is not None:
            info.kernel_tensors[1][attribute].data.copy_(fresh)
    if not deferred:
        with packs_again(layer), keeps_scales(layer):
            _layerwise_process(layer, info)


def _restore_kernel_tensors(model: torch.nn.Module) -> None:
    """Put the tensors that serve back into every layer that vLLM has not finished."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        LOADING_LAYERS,
        _place_kernel_tensors,
        get_layerwise_info,
    )

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
