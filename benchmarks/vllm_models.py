"""vLLM's own model classes on the meta device, from a configuration alone: nothing is allocated, nothing is downloaded.

`meta_model` needs vLLM (its CPU build) and leaves its process with that one model's parallel state.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

__all__ = ["QWEN3_30B", "meta_model"]

QWEN3_30B: dict[str, object] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
"""The numbers of the public configuration of Qwen3-30B-A3B."""


@contextmanager
def meta_model(configuration: Mapping[str, object]) -> Iterator[tuple[torch.nn.Module, VllmConfig]]:
    """A model of one rank and its configuration, inside vLLM's ``set_current_vllm_config``."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(configuration))
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64
        ).create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
            initialize_model_parallel(1, 1)
            with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
                model = initialize_model(config)
            yield model, config
