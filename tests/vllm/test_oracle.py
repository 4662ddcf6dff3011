"""Capture for ranks and models that this machine does not run, against vLLM's own loader: same class, same rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.vllm_models import QWEN3_30B
from benchmarks.workloads import specs
from tests.vllm.children import ROOT
from tests.vllm.conftest import VLLM_ENV
from tests.vllm.models import config_of

Tensors = list[tuple[str, str, tuple[int, ...]]]
BLOCK = 128


def small(family: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """A tiny configuration and its checkpoint's tensors, as transformers has them."""
    import torch
    import transformers

    from reshard.refit.adapters.torch_dtensor import local_tensors
    from reshard.refit.adapters.transformers_names import CheckpointNames

    config = config_of(family, **changes)
    config.architectures = [architecture]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shown = CheckpointNames.of_model(model).apply(local_tensors(model))
    tensors = [(t.name, t.dtype, tuple(t.shape)) for t in shown]
    return {"config": config.to_dict(), "tensors": tensors}


def in_fp8_blocks(made: dict[str, Any]) -> dict[str, Any]:
    """The same as a checkpoint in fp8 with one scale for each block of 128 x 128."""
    tensors: Tensors = []
    for name, dtype, shape in made["tensors"]:
        if "_proj" in name and len(shape) == 2:
            tensors.append((name, "float8_e4m3fn", shape))
            scale = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            tensors.append((f"{name.removesuffix('.weight')}.weight_scale_inv", "float32", scale))
        else:
            tensors.append((name, dtype, shape))
    quantised = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    return {"config": made["config"] | {"quantization_config": quantised}, "tensors": tensors}


def full(model: str, config: dict[str, Any]) -> dict[str, Any]:
    tensors = [(s.name, "float32" if "e_score" in s.name else "bfloat16", s.shape) for s in specs(model)]
    return {"config": config, "tensors": tensors, "meta": True}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen3_moe, tensor parallel": lambda: small("qwen3_moe", "Qwen3MoeForCausalLM") | {"tp": 2, "rank": 1},
    "qwen3_moe, expert parallel": lambda: (
        small("qwen3_moe", "Qwen3MoeForCausalLM") | {"tp": 2, "rank": 1, "expert_parallel": True}
    ),
    "qwen3_moe, last pipeline stage": lambda: small("qwen3_moe", "Qwen3MoeForCausalLM") | {"pp": 2, "rank": 1},
    "deepseek_v3, tensor parallel": lambda: small("deepseek_v3", "DeepseekV3ForCausalLM") | {"tp": 2, "rank": 1},
    "deepseek_v3, expert parallel": lambda: (
        small("deepseek_v3", "DeepseekV3ForCausalLM") | {"tp": 2, "rank": 0, "expert_parallel": True}
    ),
    "qwen3, fp8 in blocks": lambda: in_fp8_blocks(small("qwen3_tied", "Qwen3ForCausalLM", head_dim=BLOCK)),
    "mamba, computes": lambda: small("mamba", "MambaForCausalLM"),
    "Qwen3-30B-A3B, TP8": lambda: full("qwen3-30b-a3b", QWEN3_30B) | {"tp": 8, "rank": 3},
    "Qwen3-30B-A3B, TP2 x PP4": lambda: full("qwen3-30b-a3b", QWEN3_30B) | {"tp": 2, "pp": 4, "rank": 5},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each case gave, from one process."""
    path = tmp_path_factory.mktemp("oracle") / "cases.json"
    path.write_text(json.dumps([{"name": name, **make()} for name, make in CASES.items()]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.oracle", str(path)],
        cwd=ROOT,
        env={**os.environ, **VLLM_ENV, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert len(lines) == len(CASES), done.stderr[-4000:]
    return {line["name"]: line for line in lines}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_what_is_captured_is_what_the_loader_does(found: dict[str, dict[str, Any]], name: str) -> None:
    case = found[name]
    print(case)
    assert "error" not in case, case["error"]
    # Scales of attention's cache, which a checkpoint may hold and this one does not.
    never_written = [n for n in case["never_written"] if "fp8" not in name or not n.endswith("_scale")]
    assert never_written == []
    if "differing" in case:
        assert case["differing"] == []
        assert case["compared_bytes"] >= 0.999 * case["parameter_bytes"] > 0
    else:
        assert case["requested_bytes"] == case["parameter_bytes"] > 1e9
    assert bool(case["materialised"]) == ("computes" in name)
