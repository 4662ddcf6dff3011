"""What vLLM 0.32's own reload leaves undone for its CPU kernels, as context managers around one layer's processing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

__all__ = ["keeps_scales", "packs_again"]

_scales: WeakKeyDictionary[torch.nn.Module, list[torch.Tensor]] = WeakKeyDictionary()
"""Per layer what `keeps_scales` keeps."""


@contextmanager
def packs_again(layer: torch.nn.Module) -> Iterator[None]:
    """Let the CPU's fused-experts kernel pack weights that it has packed before.

    vLLM 0.32 packs them only while a method has no kernel yet, so its own reload leaves unpacked weights to a kernel
    that takes them for packed ones. The method is shown none for the length of the processing; the kernel that serves,
    which refers to tensors that stay, is given back.
    """
    from vllm.platforms import current_platform

    method = getattr(layer, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    if method is None or kernel is None or not current_platform.is_cpu():
        yield
        return
    method.moe_kernel = None
    try:
        yield
    finally:
        method.moe_kernel = kernel


@contextmanager
def keeps_scales(layer: torch.nn.Module) -> Iterator[None]:
    """Keep the scales that the CPU's int8 kernel was made with.

    vLLM 0.32 gives oneDNN the address of the scales that post-processing made, copies them into the tensors that serve
    and lets them go; the kernel then reads freed memory. Vectors only: the kernel has a packed copy of the weights.
    """
    from vllm.platforms import current_platform

    method = getattr(layer, "quant_method", None)
    if method is None or not current_platform.is_cpu():
        yield
        return
    process, own = method.process_weights_after_loading, vars(method).get("process_weights_after_loading")

    def kept(shown: torch.nn.Module) -> None:
        process(shown)
        made = [t for t in shown._parameters.values() if t is not None]
        _scales[shown] = [t.data for t in made if t.numel() == max(t.shape, default=1)]

    method.process_weights_after_loading = kept
    try:
        yield
    finally:
        if method.process_weights_after_loading is kept:
            if own is None:
                del method.process_weights_after_loading
            else:
                method.process_weights_after_loading = own
