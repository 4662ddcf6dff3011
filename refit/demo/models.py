"""Which model does the demo move, how is it saved as a checkpoint, and what does it say?

1. `build_config` gives the Hugging Face configuration; `build_model` the model, the same on every rank (fixed seed).
2. `save_checkpoint` writes full tensors with the model's own `save_pretrained`, in the dtypes that are served.
3. `greedy_tokens` runs the model: the one piece of code that both the trainer's weights and the refitted ones go
   through.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reshard.planner.errors import require
from reshard.refit.demo.engine import ModelShape
from reshard.refit.demo.settings import N_QUERY_HEADS, DemoSettings

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "KEPT_IN_FLOAT32",
    "PROMPTS",
    "build_config",
    "build_model",
    "greedy_tokens",
    "model_from_tensors",
    "model_shape",
    "save_checkpoint",
    "serving_dtype",
]

SEED: Final = 20
HIDDEN: Final = 256
N_EXPERTS: Final = 6
VOCABULARY: Final = 1021

KEPT_IN_FLOAT32: Final = ("*.mlp.gate.weight",)
"""Names that go out as they are: routers decide by small differences; the reference engine holds them in float32."""

PROMPTS: Final[tuple[tuple[int, ...], ...]] = ((1, 2, 3, 5, 8, 13), (1020, 7, 512), (42,), (99, 98, 97, 96, 95))
N_NEW_TOKENS: Final = 12


def build_config(settings: DemoSettings) -> PretrainedConfig:
    """Return the configuration: Qwen3-MoE, or dense Qwen3 with tied embeddings."""
    transformers = require("transformers", extra="demo")
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": N_QUERY_HEADS,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config: PretrainedConfig
    if settings.model == "dense":
        config = transformers.Qwen3Config(**common, intermediate_size=512, tie_word_embeddings=True)
    else:
        config = transformers.Qwen3MoeConfig(
            **common,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_experts=N_EXPERTS,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        )
    return config


def build_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a freshly initialised model in float32; the same on each rank that calls this."""
    require("torch", extra="torch")
    import torch

    transformers = require("transformers", extra="demo")
    torch.manual_seed(SEED)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def model_shape(config: PretrainedConfig) -> ModelShape:
    """Return the sizes that the inference engine needs."""
    n_experts = int(getattr(config, "num_experts", 0) or 0)
    return ModelShape(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.moe_intermediate_size if n_experts else config.intermediate_size,
        experts=n_experts,
        tied=bool(config.tie_word_embeddings),
    )


def serving_dtype(name: str) -> torch.dtype:
    """Return the dtype that a tensor is published, saved and served in."""
    require("torch", extra="torch")
    import torch

    kept = any(fnmatch.fnmatchcase(name, pattern) for pattern in KEPT_IN_FLOAT32)
    dtype: torch.dtype = torch.float32 if kept else torch.bfloat16
    return dtype


def model_from_tensors(config: PretrainedConfig, tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """Return a model that holds full tensors (module names) in their own dtypes."""
    require("torch", extra="torch")
    import torch

    with torch.random.fork_rng():
        model = build_model(config)
    model.load_state_dict(dict(tensors), strict=not config.tie_word_embeddings, assign=True)
    model.tie_weights()
    return model


def save_checkpoint(config: PretrainedConfig, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Save full tensors as a checkpoint, as `save_pretrained` names and stores them.

    Parameters
    ----------
    config
        The model's configuration.
    tensors
        Full tensors under the module's names, in the dtypes to save.
    folder
        Where to.
    """
    model_from_tensors(config, tensors).save_pretrained(folder)


def greedy_tokens(config: PretrainedConfig, tensors: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """Return what a model of these weights, all cast to bfloat16, answers to each of `PROMPTS`, greedily.

    Parameters
    ----------
    config
        The model's configuration.
    tensors
        Full tensors under the module's names.
    """
    require("torch", extra="torch")
    import torch

    model = model_from_tensors(config, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}).train(
        False
    )
    answers: list[list[int]] = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            answers.append(_continue(model, prompt))
    return answers


def _continue(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    require("torch", extra="torch")
    import torch

    tokens = torch.tensor([list(prompt)])
    for _ in range(N_NEW_TOKENS):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer
