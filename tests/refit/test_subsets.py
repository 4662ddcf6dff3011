"""Adapters alone, and named modules alone: published by two ranks and refitted without the rest of the model."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="these tests refit transformers models")
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from reshard.refit.adapters.peft_merged import merged, merged_names
from reshard.refit.adapters.placements import Split, held_boxes
from reshard.refit.adapters.subsets import select
from reshard.refit.adapters.torch_dtensor import local_tensors
from reshard.refit.adapters.transformers_names import CheckpointNames
from reshard.refit.demo.supervisor import Supervisor
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


@pytest.mark.parametrize("patterns", [{"only": "visual.*"}, {"without": "visual.*"}])
def test_a_bare_pattern_is_no_list_of_patterns(patterns: dict[str, str]) -> None:
    """One of its characters is ``*``: it would take all, or leave all out."""
    with pytest.raises(TypeError, match=r"did you mean \['visual\.\*'\]"):
        select([], **patterns)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"did you mean \['tp'\]"):
        local_tensors({}, copies_over="tp")


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


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("family", ["dense", "experts"])
def test_a_merged_adapter_goes_out_as_a_plain_checkpoint(family: str, tmp_path: Path) -> None:
    """For engines that know nothing of adapters: what `merge_and_unload` would save, and the trainer keeps both."""
    peft = pytest.importorskip("peft", reason="LoRA adapters are tested with PEFT's own")
    from safetensors.torch import load_file

    base = build(1) if family == "dense" else mixture()
    targets = {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["lm_head"], "init_lora_weights": False}
    trainer = peft.get_peft_model(base, peft.LoraConfig(r=4, **targets))
    names = merged_names(trainer)
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    with merged(trainer):
        held = names.apply(local_tensors(trainer))
        published = {tensor.name: torch.as_tensor(tensor.data).clone() for tensor in held}
        own = {parameter.untyped_storage().data_ptr() for parameter in trainer.parameters()}
        copied = [t.name for t in held if torch.as_tensor(t.data).untyped_storage().data_ptr() not in own]
    assert copied == []
    torch.testing.assert_close(trainer.state_dict(), before)
    copy.deepcopy(trainer).merge_and_unload().save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert published.keys() == saved.keys()
    torch.testing.assert_close(published, saved)
    assert not torch.equal(
        published["model.layers.0.self_attn.q_proj.weight"], before[f"{PEFT_NAME}.base_layer.weight"]
    )


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:Already unmerged:UserWarning")
def test_an_adapter_that_cannot_be_merged_whole_is_taken_apart_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", reason="LoRA adapters are tested with PEFT's own")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    trainer = peft.get_peft_model(build(1), config)
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    *_, last = (m for m in trainer.modules() if isinstance(m, peft.tuners.lora.Linear))

    def fails(**_: object) -> None:
        assert not torch.equal(trainer.state_dict()[f"{PEFT_NAME}.base_layer.weight"], before_q), "merged so far"
        raise MemoryError("no room for the delta")

    before_q = before[f"{PEFT_NAME}.base_layer.weight"]
    monkeypatch.setattr(last, "merge", fails)
    with pytest.raises(MemoryError, match="no room"), merged(trainer):
        raise AssertionError("it was not merged")
    torch.testing.assert_close(trainer.state_dict(), before)


PEFT_NAME = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.slow
def test_an_adapter_is_merged_into_the_shards_of_fsdp2(tmp_path: Path) -> None:
    """Also after a forward pass, when each rank has gathered the parameters: what is added to those would be lost."""
    pytest.importorskip("peft", reason="LoRA adapters are tested with PEFT's own")
    root = Path(__file__).resolve().parents[2]
    environment = {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "PYTHONWARNINGS": "ignore"}
    with Supervisor(("torch.distributed.fsdp", "peft"), tmp_path, environment=environment) as supervisor:
        arguments = {"world": 2, "store": str(tmp_path / "store")}
        ranks = [
            supervisor.start(f"rank-{rank}", "tests.refit.peft_workers:run_rank", {"rank": rank} | arguments)
            for rank in range(2)
        ]
        answers = supervisor.wait(ranks, timeout_s=110)
    names = sorted(name for name in build(1).state_dict())
    assert [answer["names"] for answer in answers.values()] == [names, names]


def mixture() -> PreTrainedModel:
    """A model whose parameters are not those of its checkpoints: stacked experts."""
    config = MixtralConfig(
        vocab_size=37,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=24,
        num_local_experts=3,
    )
    return MixtralForCausalLM(config)
