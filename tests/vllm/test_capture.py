"""Capture with vLLM's real model classes at full size, on the meta device: nothing is allocated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.vllm_models import QWEN3_30B
from tests.vllm.children import ROOT
from tests.vllm.conftest import VLLM_ENV
from tests.vllm.models import config_of


def checkpoint_names(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    import torch
    import transformers

    from reshard.refit.adapters.torch_dtensor import local_tensors
    from reshard.refit.adapters.transformers_names import CheckpointNames

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return [(t.name, tuple(t.shape)) for t in CheckpointNames.of_model(model).apply(local_tensors(model))]


def captured(folder: Path, config: Any) -> dict[str, Any]:
    import os

    config.save_pretrained(folder)
    names = folder / "names.json"
    names.write_text(json.dumps(checkpoint_names(config)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.meta_capture", str(folder), str(names)],
        cwd=ROOT,
        env={**os.environ, **VLLM_ENV, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.timeout(900)
def test_capture_of_a_30b_shaped_qwen3_moe_is_complete(tmp_path: Path) -> None:
    config = config_of("qwen3_moe", **{name: value for name, value in QWEN3_30B.items() if name != "model_type"})
    found = captured(tmp_path, config)
    print(found)
    assert found["tensors"] > 18_000
    assert found["coverage_pct"] == 100.0
    assert found["never_written"] == [] == found["materialised"]
    assert found["unconsumed"] == 0
    assert found["wire_bytes"] == found["engine_bytes"] > 60e9
