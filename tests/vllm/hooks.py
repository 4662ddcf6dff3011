"""What tests do inside processes that have vLLM: to a worker's model, or with its configuration."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

STEP_S = 0.01


def slow_down(model: Any) -> None:
    """Make each step take `STEP_S` more, so that a driver on a busy machine keeps up with the engine."""
    model.register_forward_pre_hook(lambda *_: time.sleep(STEP_S))


def eplb_errors() -> list[str]:
    """What a user is told who turns on expert load balancing: by vLLM on a CPU, and by us where vLLM takes it."""
    import torch
    from vllm.config import ParallelConfig, WeightTransferConfig

    from reshard.refit.engines.vllm_worker import worker_engine_type

    def refused_by_us() -> None:
        config: Any = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True), model_config=None)
        backend = WeightTransferConfig(backend="reshard")
        worker_engine_type()(backend, config, torch.device("cpu"), torch.nn.Linear(1, 1))

    def refused_by_vllm() -> None:
        ParallelConfig(enable_eplb=True, enable_expert_parallel=True, tensor_parallel_size=2)

    told = []
    for refused in (refused_by_vllm, refused_by_us):
        try:
            refused()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told
