"""Megatron Core's own layers, where it is installed: what the adapter publishes is the model that Megatron runs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from reshard.refit.demo.supervisor import Supervisor

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("megatron", "transformers")),
    reason="megatron-core or transformers is not installed",
)

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "PYTHONWARNINGS": "ignore"}


def run(
    folder: Path, *, tensors: int, stages: int, experts: int = 1
) -> tuple[dict[str, Any], dict[str, set[int]], object, dict[str, Any]]:
    """Return the full tensors that the ranks publish, how often their elements are published, rank 0's logits, and what
    each expert makes of `expert_input`."""
    import torch

    world = max(tensors * stages, experts)
    with Supervisor(("megatron.core.models.gpt.gpt_layer_specs",), folder, environment=ENVIRONMENT) as supervisor:
        ranks = [
            supervisor.start(
                f"rank-{rank}",
                "tests.refit.megatron_workers:run_rank",
                {
                    "rank": rank,
                    "world": world,
                    "tensors": tensors,
                    "stages": stages,
                    "experts": experts,
                    "store": str(folder / "store"),
                    "file": str(folder / f"rank-{rank}.pt"),
                },
            )
            for rank in range(world)
        ]
        supervisor.wait(ranks, timeout_s=110)
    full: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    logits, outputs = None, {}
    for rank in range(world):
        boxes, of_rank, of_experts = torch.load(folder / f"rank-{rank}.pt")
        outputs |= of_experts
        logits = of_rank if rank == 0 else logits
        for name, shape, start, stop, data in boxes:
            where = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            full.setdefault(name, torch.full(shape, float("nan")))[where] = data
            counts.setdefault(name, torch.zeros(shape, dtype=torch.int64))[where] += 1
    return dict(full), {name: set(count.unique().tolist()) for name, count in counts.items()}, logits, outputs


@pytest.mark.parametrize(
    "tensors", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4]
)
def test_published_tensors_make_the_model_that_megatron_runs(tmp_path: Path, tensors: int) -> None:
    """A Llama of them has the logits of Megatron's GPT: also with fewer KV heads (2) than ranks (4)."""
    import torch
    from tests.refit.megatron_workers import MODEL, TOKENS, VOCABULARY
    from transformers import LlamaConfig, LlamaForCausalLM

    full, counts, logits, _ = run(tmp_path, tensors=tensors, stages=1)
    assert {name for name, n in counts.items() if n != {1}} == (
        {name for name in counts if "norm" in name} if tensors > 1 else set()
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=MODEL.hidden,
        num_hidden_layers=MODEL.layers,
        num_attention_heads=MODEL.heads,
        num_key_value_heads=MODEL.groups,
        head_dim=MODEL.head_dim,
        intermediate_size=MODEL.intermediate,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    llama = LlamaForCausalLM(config).train(False)
    llama.load_state_dict(full, strict=True)
    with torch.no_grad():
        got = llama(torch.tensor(TOKENS)).logits
    assert isinstance(logits, torch.Tensor)
    torch.testing.assert_close(got, logits[..., :VOCABULARY], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("tensors", "stages", "experts"), [(2, 2, 1), (1, 4, 1), (1, 1, 2)])
def test_stages_and_experts_have_global_numbers(tmp_path: Path, tensors: int, stages: int, experts: int) -> None:
    import torch
    from tests.refit.megatron_workers import LAYERS, MOE, expert_input

    full, counts, _, outputs = run(tmp_path, tensors=tensors, stages=stages, experts=experts)
    assert {int(name.split(".")[2]) for name in full if ".layers." in name} == set(range(LAYERS))
    if experts > 1:
        numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in full if ".experts." in name}
        assert numbers == set(range(MOE.experts))
        assert counts == {name: {1 if ".experts." in name else 2} for name in full}
        assert len(outputs) == LAYERS * MOE.experts
        for name, made in outputs.items():  # by Megatron's own number of the expert
            gate, up, down = (full[f"{name}.{matrix}_proj.weight"] for matrix in ("gate", "up", "down"))
            inner = torch.nn.functional.silu(expert_input() @ gate.T) * (expert_input() @ up.T)
            torch.testing.assert_close(inner @ down.T, made, msg=lambda said, name=name: f"{name}: {said}")
    else:
        assert counts == {name: {tensors if "norm" in name else 1} for name in full}
