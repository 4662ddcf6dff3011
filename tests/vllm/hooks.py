"""What tests do inside processes that have vLLM: to a worker's model, or with its configuration."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

STEP_S = 0.03


def slow_down(model: Any) -> None:
    """Make each step take `STEP_S` more, so that a driver on a busy machine keeps up with the engine."""
    model.register_forward_pre_hook(lambda *_: time.sleep(STEP_S))


def refusals() -> list[str]:
    """What is said to who turns on expert load balancing (by vLLM on a CPU, by us where vLLM takes it) or LoRA."""
    import torch
    from vllm.config import LoRAConfig, ParallelConfig, WeightTransferConfig

    from reshard.refit.engines.vllm_worker import worker_engine_type

    def refused_by_us(eplb: bool, lora: LoRAConfig | None) -> None:
        parallel = SimpleNamespace(enable_eplb=eplb)
        config: Any = SimpleNamespace(parallel_config=parallel, model_config=None, lora_config=lora)
        backend = WeightTransferConfig(backend="reshard")
        worker_engine_type()(backend, config, torch.device("cpu"), torch.nn.Linear(1, 1))

    refused = (
        lambda: ParallelConfig(enable_eplb=True, enable_expert_parallel=True, tensor_parallel_size=2),
        lambda: refused_by_us(True, None),
        lambda: refused_by_us(False, LoRAConfig()),
    )
    told = []
    for refuse in refused:
        try:
            refuse()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told
