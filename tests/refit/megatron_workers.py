"""What each gloo rank of `test_megatron_core.py` runs: a GPT model of Megatron Core's own layers, on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from reshard.refit.adapters import megatron
from reshard.refit.adapters.megatron_pieces import layer_offset
from reshard.refit.demo.channel import Channel

VOCABULARY, PADDED, LAYERS = 45, 48, 4
TOKENS = ((1, 5, 9, 2, 7, 44), (3, 3, 0, 8, 40, 11))
MODEL = megatron.MegatronModel(
    layers=LAYERS,
    hidden=16,
    heads=8,
    groups=2,
    head_dim=4,
    intermediate=32,
    vocabulary=VOCABULARY,
    padded_vocabulary=PADDED,
)
MOE = megatron.MegatronModel(
    layers=LAYERS,
    hidden=16,
    heads=8,
    groups=2,
    head_dim=4,
    intermediate=32,
    vocabulary=VOCABULARY,
    padded_vocabulary=PADDED,
    experts=4,
    expert_intermediate=8,
)


def expert_input() -> torch.Tensor:
    """What each expert is run on."""
    return torch.linspace(-1, 1, 3 * MODEL.hidden).view(3, MODEL.hidden)


def run_rank(
    channel: Channel, *, rank: int, world: int, tensors: int, stages: int, experts: int, store: str, file: str
) -> None:
    """Build this rank's part, save what the adapter makes of it and, without pipeline stages, the logits."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    # Megatron asks CUDA for its device and keeps CUDA random states for dropout; there is no CUDA here, and no dropout.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    parallel_state.initialize_model_parallel(
        tensors, stages, expert_model_parallel_size=experts, expert_tensor_parallel_size=1 if experts > 1 else None
    )
    model = MOE if experts > 1 else MODEL
    options: dict[str, Any] = {}
    if model.experts:
        options = {"num_moe_experts": model.experts, "moe_ffn_hidden_size": model.expert_intermediate}
        options |= {"expert_model_parallel_size": experts, "expert_tensor_parallel_size": 1}
    config = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.intermediate,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensors,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=True,
        **options,
    )
    torch.manual_seed(5)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=model.experts or None)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=PADDED,
        max_sequence_length=32,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        parallel_output=False,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
    ).train(False)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim == 1:
                generator = torch.Generator().manual_seed(parameter.numel())
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    first = layer_offset(model.layers, rank=stage, size=stages)
    if first != get_transformer_layer_offset(config, pp_rank=stage):
        raise AssertionError("Megatron counts layers in another way")
    place = megatron.MegatronRank(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        tensors=tensors,
        expert=parallel_state.get_expert_model_parallel_rank() if model.experts else 0,
        experts=experts,
        first_layer=first,
    )
    held = megatron.local_tensors(dict(gpt.named_parameters()), model, place)
    logits = None
    if stages == 1 and not model.experts:
        tokens = torch.tensor(TOKENS)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.triu(torch.ones(1, 1, tokens.shape[1], tokens.shape[1]), 1).bool()
        with torch.no_grad():
            logits = gpt(tokens, positions, mask)
    outputs: dict[str, torch.Tensor] = {}
    if model.experts:
        for number, layer in enumerate(gpt.decoder.layers):
            for expert, module in zip(layer.mlp.local_expert_indices, layer.mlp.experts.local_experts, strict=True):
                with torch.no_grad():  # ranks draw the same numbers: each expert is made to differ
                    for parameter in module.parameters():
                        parameter += 0.01 * (1 + expert + model.experts * number)
                    outputs[f"model.layers.{first + number}.mlp.experts.{expert}"] = module(expert_input())[0]
    boxes = [(p.name, p.shape, p.start, p.stop, torch.as_tensor(p.data).clone()) for p in held]
    torch.save((boxes, logits, outputs), file)
    channel.send({"answer": {"n_boxes": len(held)}})
    dist.barrier()
    dist.destroy_process_group()
