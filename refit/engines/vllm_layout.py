"""In which layout does a vLLM model take weights? The load layout, which its kernels' layouts may have replaced.

When vLLM builds a model it keeps, for each layer, what its parameters and buffers look like before any weight is
loaded (``record_metadata_for_reloading``). From that record:

1. `load_places` lists every piece of memory of the load layout, tied parameters once.
2. `load_layout` puts the load layout into the model for the length of a ``with`` block, on the meta device or in
   memory that the caller gives, and then puts everything back as it was. Nothing that serves is read or written.

Verified against vLLM 0.32; everything of vLLM's that is used here is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.planner.errors import require
from reshard.refit.engines.places import Place, physical_order
from reshard.refit.errors import RefitError
from reshard.refit.recording import storage_key

if TYPE_CHECKING:
    import torch

__all__ = ["LoadPlace", "Site", "load_layout", "load_places"]


@dataclass(frozen=True, slots=True)
class Site:
    """One attribute of one layer: a parameter or a buffer in the load layout."""

    layer: torch.nn.Module
    attribute: str


@dataclass(frozen=True, slots=True)
class LoadPlace:
    """One piece of memory of the load layout.

    Attributes
    ----------
    place
        Its name, shape and order; its tensors are on the meta device, one for each site.
    sites
        Where it belongs; several for tied parameters.
    is_parameter
        False for buffers, most of which no checkpoint holds.
    load_elems
        Elements that a checkpoint fills; fewer than all where vLLM declares padding.
    """

    place: Place
    sites: tuple[Site, ...]
    is_parameter: bool
    load_elems: int

    def current(self) -> Place:
        """The place as it is inside `load_layout`, where some tensors are new ones."""
        tensors = tuple(getattr(site.layer, site.attribute) for site in self.sites)
        return Place.made([self.place.name, *self.place.aliases], tensors, self.place.order)

    @property
    def load_bytes(self) -> int:
        """Bytes that a checkpoint fills."""
        return self.load_elems * int(self.place.tensor.element_size())


def load_places(model: torch.nn.Module) -> list[LoadPlace]:
    """All parameters and buffers of the load layout, in the model's order.

    Parameters whose live memory is one (tied weights) are one place, also where vLLM's record keeps them apart.

    Raises
    ------
    RefitError
        If vLLM has no record of the model: it was built by other means than vLLM's own.
    """
    require("vllm", extra="vllm")
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    found: dict[tuple[object, ...], list[tuple[str, Site, torch.Tensor, bool]]] = {}
    for prefix, layer in model.named_modules():
        if layer not in LAYERWISE_INFO:
            raise RefitError(
                f"layer {prefix or type(model).__name__!r} has no record of its load layout; only models that vLLM "
                "built can be refitted"
            )
        with load_layout_of(layer) as loaded:
            for attribute, (tensor, live, is_parameter) in loaded.items():
                name = f"{prefix}.{attribute}" if prefix else attribute
                same = (
                    live is not None and not live.is_meta and live.numel() and tuple(live.shape) == tuple(tensor.shape)
                )
                key: tuple[object, ...] = (
                    (storage_key(live), live.storage_offset(), tuple(live.shape), live.dtype)
                    if same and live is not None
                    else ("own", storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape))
                )
                found.setdefault(key, []).append((name, Site(layer, attribute), tensor, is_parameter))
    places = []
    for entries in found.values():
        names = [name for name, *_ in entries]
        tensors = tuple(tensor for _, _, tensor, _ in entries)
        order = physical_order(tensors[0])
        place = Place.made(names, tensors, order)
        elems = int(getattr(tensors[0], "weight_loader_numel", tensors[0].numel()))
        places.append(LoadPlace(place, tuple(e[1] for e in entries), any(e[3] for e in entries), elems))
    return places


@contextmanager
def load_layout_of(layer: torch.nn.Module) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor | None, bool]]]:
    """One layer in its load layout: attribute -> (meta tensor, live tensor of that name or None, is a parameter)."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, restore_layer_on_meta, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs

    info = get_layerwise_info(layer)
    if info.can_load():
        raise RefitError(f"a weight update of {type(layer).__name__} is under way already")
    parameters, buffers = dict(layer._parameters), dict(layer._buffers)
    transient, others = set(layer._non_persistent_buffers_set), dict(layer.__dict__)
    live = {name: t for name, t in (parameters | buffers).items() if t is not None}
    kept = SKIP_LOAD_TENSORS - {"e_score_correction_bias"}
    try:
        restore_layer_on_meta(layer, info)
        for table in (layer._parameters, layer._buffers):
            for name, tensor in list(table.items()):
                if tensor is None or name in kept:
                    continue
                if not tensor.is_meta:  # vLLM loads these in place; a dry run must not
                    table[name] = tensor = to_meta_tensor(tensor)
                _unwrap_loader(tensor)
        yield {
            name: (tensor, live.get(name), table is layer._parameters)
            for table in (layer._parameters, layer._buffers)
            for name, tensor in table.items()
            if tensor is not None and tensor.is_meta and name not in kept
        }
    finally:
        for table, before in ((layer._parameters, parameters), (layer._buffers, buffers)):
            for name, tensor in table.items():
                if tensor is not None and tensor is not before.get(name):
                    sanitize_layer_refs(tensor, layer)
            table.clear()
            table.update(before)  # type: ignore[arg-type]
        layer._non_persistent_buffers_set.clear()
        layer._non_persistent_buffers_set.update(transient)
        for name in others.keys() - layer.__dict__.keys():
            layer.__dict__[name] = others[name]


@contextmanager
def load_layout(
    model: torch.nn.Module, memory: Mapping[tuple[int, str], Callable[[torch.Tensor], torch.Tensor]] | None = None
) -> Iterator[None]:
    """The whole model in its load layout.

    Parameters
    ----------
    memory
        (id of the layer, attribute) -> makes, from the meta tensor, a tensor to be used instead of it.
    """
    with ExitStack() as stack:
        for layer in list(model.modules()):
            loaded = stack.enter_context(load_layout_of(layer))
            for attribute, (tensor, _, is_parameter) in loaded.items():
                make = (memory or {}).get((id(layer), attribute))
                if make is not None:
                    table = layer._parameters if is_parameter else layer._buffers
                    table[attribute] = _like(make(tensor), tensor)  # type: ignore[assignment]
        yield


def _like(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Give ``tensor`` the class and the attributes (loader, dims) of ``model``."""
    tensor.__class__ = model.__class__
    tensor.__dict__ = model.__dict__.copy()
    return tensor


def _unwrap_loader(tensor: torch.Tensor) -> None:
    """Take off what an earlier reload left around the parameter's own loader."""
    loader = getattr(tensor, "weight_loader", None)
    while loader is not None and getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
        tensor.weight_loader = loader  # type: ignore[attr-defined]
