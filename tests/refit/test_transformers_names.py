"""Checkpoint names and views of transformers models, against what their own `save_pretrained` writes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the adapter for transformers needs it")
import torch
import transformers
from safetensors.torch import load_file

from reshard.planner.errors import TableError
from reshard.refit.adapters.converts import split_interleaved_experts
from reshard.refit.adapters.placements import Split, held_boxes
from reshard.refit.adapters.torch_dtensor import local_tensors, named_tensors, tied_names
from reshard.refit.adapters.transformers_names import CheckpointNames
from reshard.refit.tensors import LocalTensor

SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "deepseek-v2": (
        "DeepseekV2Config",
        {**MLA, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "topk_method": "greedy"},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**MLA, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 4}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 4}),
}


def build(family: str) -> transformers.PreTrainedModel:
    name, options = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, name)(**{**SMALL, **options})
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


def saved(model: transformers.PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def pasted(parts: list[LocalTensor]) -> dict[str, torch.Tensor]:
    """Put boxes together, each element exactly once."""
    full: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    for part in parts:
        assert isinstance(part.data, torch.Tensor)
        full.setdefault(part.name, torch.full(part.shape, float("nan"), dtype=part.data.dtype))
        counts.setdefault(part.name, torch.zeros(part.shape, dtype=torch.int64))
        where = tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))
        full[part.name][where] = part.data
        counts[part.name][where] += 1
    assert all(bool((count == 1).all()) for count in counts.values())
    return full


def cut(held: list[LocalTensor], ranks: int, dim: int) -> list[list[LocalTensor]]:
    """Share whole tensors out over some ranks along a dim (the last one where a tensor has fewer)."""
    shares: list[list[LocalTensor]] = []
    for rank in range(ranks):
        own: list[LocalTensor] = []
        for tensor in held:
            along = min(dim, len(tensor.shape) - 1)
            splits = [[Split(ranks, rank)] if d == along else [] for d in range(len(tensor.shape))]
            for box in held_boxes(tensor.shape, splits):
                where = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
                own.append(LocalTensor(tensor.name, tensor.dtype, tensor.shape, box.start, tensor.data[where]))
        shares.append(own)
    return shares


def same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_views_are_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = build(family)
    held = CheckpointNames.of_model(model).apply(local_tensors(model))
    same(pasted(held), saved(model, tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_copied(family: str) -> None:
    model = build(family)
    own = {tensor.untyped_storage().data_ptr() for tensor in named_tensors(model).values()}
    for part in CheckpointNames.of_model(model).apply(local_tensors(model)):
        assert isinstance(part.data, torch.Tensor)
        assert part.data.untyped_storage().data_ptr() in own, part.name


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3"])
def test_sharded_stacks_keep_their_global_experts(family: str, dim: int, tmp_path: Path) -> None:
    """Sharded over experts (one of four ranks holds none), over rows, or over columns: the same checkpoint."""
    model = build(family)
    names = CheckpointNames.of_model(model)
    shares = cut(local_tensors(model), 4, dim)
    same(pasted([part for share in shares for part in names.apply(share)]), saved(model, tmp_path))


def test_a_rank_publishes_its_own_experts_under_their_global_numbers() -> None:
    """N3: six experts over four ranks are 2, 2, 2, 0, and rank 1's local expert 0 is expert 2."""
    model = build("qwen3-moe")
    shares = [CheckpointNames.of_model(model).apply(share) for share in cut(local_tensors(model), 4, 0)]
    experts = [
        sorted({int(part.name.split(".experts.")[1].split(".")[0]) for part in share if ".experts." in part.name})
        for share in shares
    ]
    assert experts == [[0, 1], [2, 3], [4, 5], []]


def test_a_tied_head_is_published_once() -> None:
    model = build("llama-tied")
    held = {part.name for part in CheckpointNames.of_model(model).apply(local_tensors(model))}
    assert "lm_head.weight" not in held
    assert tied_names(model) == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("dim", range(3))
def test_interleaved_projections_are_taken_apart(dim: int, tmp_path: Path) -> None:
    """G13: rows 0, 2, 4 are the gate's and 1, 3, 5 the up's, whichever way the stack is sharded."""
    model = build("gpt-oss")
    names = CheckpointNames.of_convert(named_tensors(model), split_interleaved_experts)
    full = pasted([part for share in cut(local_tensors(model), 3, dim) for part in names.apply(share)])
    checkpoint = saved(model, tmp_path)
    for layer, expert in itertools.product(range(2), range(4)):
        at = f"model.layers.{layer}.mlp.experts."
        stacked = checkpoint[f"{at}gate_up_proj"][expert].T
        bias = checkpoint[f"{at}gate_up_proj_bias"][expert]
        for first, shard in enumerate(("gate", "up")):
            rows = list(range(first, stacked.shape[0], 2))
            assert torch.equal(full.pop(f"{at}{expert}.{shard}_proj.weight"), stacked[rows])
            assert torch.equal(full.pop(f"{at}{expert}.{shard}_proj.bias"), bias[rows])
        assert torch.equal(full.pop(f"{at}{expert}.down_proj.weight"), checkpoint[f"{at}down_proj"][expert].T)
        assert torch.equal(full.pop(f"{at}{expert}.down_proj.bias"), checkpoint[f"{at}down_proj_bias"][expert])
    same(full, {name: tensor for name, tensor in checkpoint.items() if ".experts." not in name})


def test_a_conversion_that_computes_is_refused() -> None:
    with pytest.raises(TableError, match=r"'doubled': its conversion computes new values"):
        CheckpointNames.of_convert({"w": torch.ones(2, 3)}, lambda name, tensor: {"doubled": tensor * 2})


def test_a_conversion_that_merges_dims_is_refused() -> None:
    with pytest.raises(TableError, match=r"'flat': its dims do not run along dims of 'w' \(4, 3\)"):
        CheckpointNames.of_convert({"w": torch.ones(4, 3)}, lambda name, tensor: {"flat": tensor.reshape(12)[1:]})


def test_a_view_of_other_values_is_refused() -> None:
    with pytest.raises(TableError, match=r"'bits': got a view as torch\.int32 of 'w', expected torch\.float32"):
        CheckpointNames.of_convert({"w": torch.ones(4, 3)}, lambda name, tensor: {"bits": tensor.view(torch.int32)})


def test_a_tensor_that_a_checkpoint_would_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    def without_norms(model: object, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if "layernorm" not in name}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", without_norms)
    with pytest.raises(TableError, match=r"'model\.layers\.0\.input_layernorm\.weight' and 3 more: .* makes nothing"):
        CheckpointNames.of_model(build("llama"))


def test_names_that_are_made_twice_or_are_unknown_are_refused() -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(TableError, match="'c' is made twice, once of 'b'"):
        CheckpointNames.of_convert(tensors, lambda name, tensor: {"c": tensor})
    names = CheckpointNames.of_convert(tensors, lambda name, tensor: {name: tensor})
    with pytest.raises(TableError, match="'z' is none of the 2 tensors"):
        names.apply([LocalTensor("z", "float32", (2,), (0,), torch.ones(2))])


def test_dims_of_one_element_and_selections() -> None:
    """A stack of one expert, a scale of shape (1,), and a select at the stack's end."""
    source = torch.arange(24.0).reshape(4, 1, 6)
    names = CheckpointNames.of_convert(
        {"w": source},
        lambda name, tensor: {
            "last": tensor[3],
            "kept": tensor[1:2],
            "element": tensor[2, 0, 5:6],
            "scalar": tensor[2, 0, 4],
            "steps": tensor[::3, 0, 1::2],
        },
    )
    got = pasted(names.apply([LocalTensor("w", "float32", (4, 1, 6), (0, 0, 0), source)]))
    assert torch.equal(got["last"], source[3])
    assert torch.equal(got["kept"], source[1:2])
    assert torch.equal(got["element"], source[2, 0, 5:6])
    assert torch.equal(got["scalar"], source[2, 0, 4])
    assert torch.equal(got["steps"], source[::3, 0, 1::2])
