"""How does a model with a LoRA adapter go to an engine that knows nothing of adapters? Merged, as a plain checkpoint.

1. `merged_names`, once: the names that ``merge_and_unload().save_pretrained()`` would write, as views of the module's
   tensors. The adapter's own tensors have none.
2. `merged`, around each publishing: the adapter is added to the weights and taken away again. FSDP2 parts are put into
   their sharded state first, since what is added to gathered copies is lost with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from reshard.planner.errors import require
from reshard.refit.adapters.torch_dtensor import named_tensors
from reshard.refit.adapters.transformers_names import CheckpointNames

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = ["merged", "merged_names"]


def merged_names(model: PeftModel) -> CheckpointNames:
    """Return the checkpoint names of the model under a PEFT adapter.

    Parameters
    ----------
    model
        A PEFT model over a transformers 5 model; its parameters may be DTensors. Its active adapter is the one that
        counts where modules are trained whole (``modules_to_save``).

    Raises
    ------
    TableError
        As `CheckpointNames.of_model`.
    """
    require("transformers", extra="demo")
    from transformers.core_model_loading import revert_weight_conversion

    whole = cast("PreTrainedModel", model.get_base_model())
    of_adapter, saved_module = f".{model.base_model.prefix}", f".modules_to_save.{model.active_adapter}."

    def run(metas: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        base: dict[str, torch.Tensor] = {}
        for name, meta in metas.items():
            if of_adapter not in name and ".original_module." not in name:
                plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
                base[plain.replace(saved_module, ".")] = meta
        converted: Mapping[str, torch.Tensor] = revert_weight_conversion(whole, base)
        return converted

    return CheckpointNames._trace(named_tensors(model), run)


@contextmanager
def merged(model: PeftModel) -> Iterator[None]:
    """Have the adapter in the weights for the length of a ``with`` block; on all ranks, since it may communicate.

    Where it can be added to some modules only, these are taken apart again before the error is raised.

    Adding and taking away rounds: keep the weights in float32, or expect them to drift by their last bits.
    """
    named_tensors(model)
    try:
        model.merge_adapter()
        yield
    finally:
        named_tensors(model)
        model.unmerge_adapter()
