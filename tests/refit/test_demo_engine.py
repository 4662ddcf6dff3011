"""The reference engine's loaders against its unsharding, which is written apart from them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the demo's model needs transformers")
import torch

from reshard.refit.adapters.torch_dtensor import local_tensors
from reshard.refit.adapters.transformers_names import CheckpointNames
from reshard.refit.demo import models
from reshard.refit.demo.checks import bits_differ, compare_with_checkpoint, read_checkpoint
from reshard.refit.demo.engine import ReferenceModel, TensorParallel
from reshard.refit.demo.settings import DemoError, DemoSettings
from reshard.refit.demo.unshard import unshard


def checkpoint(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], ReferenceModel]:
    """Module tensors, checkpoint tensors, and a factory's first rank of a two-layer model."""
    config = models.build_config(DemoSettings(model=kind, layers=2))
    model = models.build_model(config)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    held = CheckpointNames.of_model(model).apply(local_tensors(model))
    loaded = {part.name: torch.as_tensor(part.data).to(models.serving_dtype(part.name)) for part in held}
    return named, loaded, ReferenceModel(models.model_shape(config), TensorParallel(0, 1), torch.bfloat16)


def rank_parameters(
    like: ReferenceModel, loaded: dict[str, torch.Tensor], rank: int, size: int
) -> dict[str, torch.Tensor]:
    engine = ReferenceModel(like.shape, TensorParallel(rank, size), torch.bfloat16)
    written = engine.load_weights(loaded.items())
    parameters = {name: parameter.detach() for name, parameter in engine.named_parameters()}
    assert written == parameters.keys()
    assert not any(bool(torch.isnan(parameter).any()) for parameter in parameters.values())
    return parameters


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_ranks_put_together_are_the_checkpoint(kind: str, size: int) -> None:
    """Also with fewer KV heads (2) than ranks (4, 8)."""
    named, loaded, like = checkpoint(kind)
    full = unshard(like.shape, [rank_parameters(like, loaded, rank, size) for rank in range(size)])
    expected = {name for name in named if not (like.shape.tied and name == "lm_head.weight")}
    assert full.keys() == expected
    for name in expected:
        assert bits_differ(full[name], named[name].to(models.serving_dtype(name))) == 0, name


def test_the_vocabulary_is_padded_with_zeros() -> None:
    _, loaded, like = checkpoint("moe")
    last = rank_parameters(like, loaded, 1, 2)["lm_head.weight"]
    assert last.shape == (512, 256)
    assert bool((last[1021 - 512 :] == 0).all())
    assert bool((last[: 1021 - 512] != 0).any(1).all())


def test_a_spoilt_rank_is_found() -> None:
    """The comparison can fail: replicated parameters, padding and KV copies are all looked at."""
    _, loaded, like = checkpoint("moe")
    for name, where in (
        ("model.norm.weight", (3,)),
        ("model.embed_tokens.weight", (-1, 0)),
        ("model.layers.1.self_attn.qkv_proj.weight", (-1, 0)),
    ):
        ranks = [rank_parameters(like, loaded, rank, 4) for rank in range(4)]
        ranks[3][name][where] += 1
        with pytest.raises(DemoError, match=r"differs|padding"):
            unshard(like.shape, ranks)


def test_other_weights_give_other_tokens() -> None:
    """Greedy tokens tell a trained step from the one before it, so equal tokens mean something."""
    config = models.build_config(DemoSettings(layers=1))
    named = {name: parameter.detach() for name, parameter in models.build_model(config).named_parameters()}
    tokens = models.greedy_tokens(config, named)
    assert tokens == models.greedy_tokens(config, named)
    named["lm_head.weight"] = named["lm_head.weight"].flip(0)
    assert tokens != models.greedy_tokens(config, named)


def test_bits_differ_sees_signs_of_zero_and_not_equal_nans() -> None:
    left = torch.tensor([0.0, float("nan"), 1.0])
    assert bits_differ(left, left.clone()) == 0
    assert bits_differ(left, torch.tensor([-0.0, float("nan"), 2.0])) == 2
    with pytest.raises(DemoError, match=r"got torch.float32\(3,\), expected torch.float64\(3,\)"):
        bits_differ(left, left.double())


def test_one_flipped_bit_is_told(tmp_path: Path) -> None:
    """The demo's check of a rank against a saved checkpoint names the parameter, and counts the elements."""
    config = models.build_config(DemoSettings(layers=1))
    named = {
        name: p.detach().to(models.serving_dtype(name)) for name, p in models.build_model(config).named_parameters()
    }
    models.save_checkpoint(config, named, tmp_path)
    engine = ReferenceModel(models.model_shape(config), TensorParallel(1, 2), torch.bfloat16)
    engine.load_weights(read_checkpoint(tmp_path))
    n_elems = sum(parameter.numel() for parameter in engine.module.parameters())
    assert compare_with_checkpoint(engine, tmp_path) == n_elems
    with pytest.raises(DemoError, match=r"no \*.safetensors file"):
        compare_with_checkpoint(engine, tmp_path / "nowhere")
    flipped = engine.module.get_parameter("model.layers.0.self_attn.qkv_proj.weight").view(torch.int16)
    flipped[5, 7] ^= 1
    with pytest.raises(DemoError, match=r"layers\.0\.self_attn\.qkv_proj\.weight: 1 of 49152 elements"):
        compare_with_checkpoint(engine, tmp_path)


def test_unknown_checkpoint_tensors_are_refused() -> None:
    _, _, like = checkpoint("dense")
    with pytest.raises(DemoError, match=r"'model\.extra\.weight': the model has no parameter"):
        like.load_weights([("model.extra.weight", torch.ones(1))])


def test_sizes_that_do_not_divide_are_refused() -> None:
    _, _, like = checkpoint("dense")
    with pytest.raises(DemoError, match="padded vocabulary: 1024 does not divide by 3"):
        ReferenceModel(like.shape, TensorParallel(0, 3), torch.bfloat16)
