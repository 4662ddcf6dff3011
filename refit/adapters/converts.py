"""Names of one's own: `convert` functions for `CheckpointNames.of_convert`.

A `convert` function is called once for each of a module's tensors, with its name and a meta tensor of its global
shape, and returns views of that tensor by the names to publish. transformers' own conversion
(`CheckpointNames.of_model`) gives the names of its checkpoints; the functions here give others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["split_interleaved_experts"]


def split_interleaved_experts(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Take gpt-oss's stacked experts apart: one gate, up and down projection per expert, out x in, with biases.

    gpt-oss stores `gate_up_proj` as [expert, in, 2 * out] with gate and up columns in turn, and `down_proj` as
    [expert, in, out]; engines that load experts one by one want `experts.3.gate_proj.weight` and so on.

    Parameters
    ----------
    name
        The module's name of the tensor.
    tensor
        The tensor, or a meta tensor of its shape.
    """
    stem, _, leaf = name.rpartition(".experts.")
    views: dict[str, torch.Tensor] = {}
    if leaf in ("gate_up_proj", "gate_up_proj_bias"):
        for expert in range(tensor.shape[0]):
            for first, shard in enumerate(("gate_proj", "up_proj")):
                prefix = f"{stem}.experts.{expert}.{shard}"
                if leaf.endswith("_bias"):
                    views[f"{prefix}.bias"] = tensor[expert, first::2]
                else:
                    views[f"{prefix}.weight"] = tensor[expert, :, first::2].T
    elif leaf in ("down_proj", "down_proj_bias"):
        for expert in range(tensor.shape[0]):
            prefix = f"{stem}.experts.{expert}.down_proj"
            if leaf.endswith("_bias"):
                views[f"{prefix}.bias"] = tensor[expert]
            else:
                views[f"{prefix}.weight"] = tensor[expert].T
    else:
        views[name] = tensor
    return views
