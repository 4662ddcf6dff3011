"""Adapters alone, and named modules alone: published by two ranks and refitted without the rest of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="these tests refit transformers models")
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from reshard.refit.adapters.placements import Split, held_boxes
from reshard.refit.adapters.subsets import select
from reshard.refit.adapters.torch_dtensor import local_tensors
from reshard.refit.adapters.transformers_names import CheckpointNames
from reshard.refit.engines.torch_module import TorchModuleEngine
from reshard.refit.report import RefitReport
from reshard.refit.tensors import LocalTensor


def build(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=32,
    )
    return LlamaForCausalLM(config)


def share(held: list[LocalTensor], rank: int) -> list[LocalTensor]:
    """Rows of rank 0 or 1."""
    own: list[LocalTensor] = []
    for tensor in held:
        splits = [[Split(2, rank)] if dim == 0 else [] for dim in range(len(tensor.shape))]
        for box in held_boxes(tensor.shape, splits):
            where = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            own.append(LocalTensor(tensor.name, tensor.dtype, tensor.shape, box.start, tensor.data[where]))
    return own


def refit(cluster: Cluster, step: int, held: list[LocalTensor], *, only: tuple[str, ...] = ()) -> RefitReport:
    for rank, publisher in enumerate(cluster.publishers):
        own = share(held, rank)
        publisher.publish(epoch=0, step=step, tensors=own, empty=not own, timeout_s=TIMEOUT_S)
    return cluster.refit_ok(step, only=only)[0]


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def changed(before: Mapping[str, torch.Tensor], module: torch.nn.Module) -> set[str]:
    return {name for name, value in values(module).items() if not torch.equal(value, before[name])}


def test_named_modules_are_published_without_the_rest() -> None:
    trainer, engine = build(1), build(2)
    held = select(local_tensors(trainer), ["*.layers.1.*", "lm_head.*"], without=["*layernorm*"])
    before = values(engine)
    with Cluster(engines=[TorchModuleEngine(engine)]) as cluster:
        report = refit(cluster, 0, held)
    expected = {tensor.name for tensor in held}
    assert changed(before, engine) == expected
    assert all(torch.equal(value, values(engine)[name]) for name, value in values(trainer).items() if name in expected)
    assert report.coverage.params_installed == len(expected) == 8
    assert 0 < report.coverage_pct < 100


def test_a_receiver_takes_named_modules_of_all_that_is_published() -> None:
    trainer, engine = build(1), build(2)
    before = values(engine)
    with Cluster(engines=[TorchModuleEngine(engine)]) as cluster:
        refit(cluster, 0, local_tensors(trainer), only=("*.mlp.down_proj.*",))
        assert changed(before, engine) == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)}
        refit(cluster, 1, local_tensors(trainer))
    assert all(torch.equal(value, values(engine)[name]) for name, value in values(trainer).items())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_alone(tmp_path: Path) -> None:
    """Only the adapter moves; its published names and values are those that PEFT saves."""
    peft = pytest.importorskip("peft", reason="LoRA adapters are tested with PEFT's own")
    from safetensors.torch import load_file

    def with_lora(seed: int) -> torch.nn.Module:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model: torch.nn.Module = peft.get_peft_model(build(seed), config)
        return model

    trainer, engine = with_lora(1), with_lora(2)
    held = CheckpointNames.of_peft(trainer).apply(local_tensors(trainer))
    trainer.save_pretrained(tmp_path)  # type: ignore[operator]
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.name for tensor in held} == saved.keys()
    assert all(torch.equal(torch.as_tensor(tensor.data), saved[tensor.name]) for tensor in held)

    before = values(engine)
    adapted = copy.deepcopy(engine)
    peft.set_peft_model_state_dict(adapted, saved)

    def to_parameter(name: str) -> str:
        return name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")

    with Cluster(engines=[TorchModuleEngine(engine, rename=to_parameter)]) as cluster:
        report = refit(cluster, 0, held)
    assert changed(before, engine) == {to_parameter(name) for name in saved}
    assert all(torch.equal(value, values(engine)[name]) for name, value in values(adapted).items())
    assert report.useful_bytes == sum(tensor.nbytes for tensor in saved.values())
    assert report.coverage.params_never_written > 0
