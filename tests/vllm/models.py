"""Tiny models of the families under test, as transformers configurations."""

from __future__ import annotations

import hashlib
from typing import Any

VOCABULARY = 509
PROMPTS = (
    [1, 2, 3, 5, 8, 13],
    [508, 7, 412],
    [42],
    [99, 98, 97, 96, 95],
    [17] * 9,
    [300, 2],
    [250, 4, 250, 4],
    [77, 78],
)
N_NEW_TOKENS = 16

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}


def config_of(family: str, **changes: Any) -> Any:
    import transformers

    if family == "qwen3_moe":
        kind, own = (
            transformers.Qwen3MoeConfig,
            {
                "head_dim": 32,
                "intermediate_size": 256,
                "moe_intermediate_size": 64,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "tie_word_embeddings": False,
            },
        )
    elif family == "qwen3_tied":
        kind, own = transformers.Qwen3Config, {"head_dim": 32, "intermediate_size": 256, "tie_word_embeddings": True}
    elif family == "llama":
        kind, own = transformers.LlamaConfig, {"intermediate_size": 256, "tie_word_embeddings": False}
    elif family == "mixtral":
        kind, own = (
            transformers.MixtralConfig,
            {
                "intermediate_size": 128,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "tie_word_embeddings": False,
            },
        )
    elif family == "gemma3":
        kind, own = (
            transformers.Gemma3TextConfig,
            {
                "head_dim": 32,
                "intermediate_size": 256,
                "sliding_window": 64,
                "initializer_range": 0.02,  # Gemma scales its embeddings, and larger ones only ever repeat the prompt
            },
        )
    elif family == "deepseek_v3":
        kind, own = (
            transformers.DeepseekV3Config,
            {
                "intermediate_size": 256,
                "moe_intermediate_size": 64,
                "first_k_dense_replace": 1,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "topk_method": "noaux_tc",
                "q_lora_rank": 64,
                "kv_lora_rank": 512,  # with 64 for positions: what vLLM's MLA kernel for CPUs takes
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 32,
                "v_head_dim": 32,
                "num_key_value_heads": 4,
                "tie_word_embeddings": False,
            },
        )
    elif family == "mamba":
        return transformers.MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            state_size=16,
            time_step_rank=8,
            tie_word_embeddings=False,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            **changes,
        )
    else:
        raise ValueError(family)
    return kind(**(COMMON | own | changes))


def digests(model: Any) -> dict[str, str]:
    """A digest of each parameter and buffer, as it lies in memory now."""
    import torch

    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in named
        if t.numel()
    }


def sabotage(model: Any) -> None:
    """Make the post-processing of one layer fail, once, when other layers have been finished already."""
    layer = model.model.layers[-1].self_attn.o_proj
    method = layer.quant_method
    process = method.process_weights_after_loading

    def fail_once(shown: Any) -> None:
        if shown is layer:
            method.process_weights_after_loading = process
            raise RuntimeError("sabotaged")
        process(shown)

    method.process_weights_after_loading = fail_once
