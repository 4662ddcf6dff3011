"""vLLM's own model classes as one rank of many would have them, in one process: the other ranks are not there.

`rank_of` sets up vLLM's parallel state over torch's *fake* process group, whose collectives do nothing, and gives the
configuration; `built` builds the model on a device. Everything is taken down at the end, so that one process can be
one rank after another.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A model's configuration, the rank that it is built for, and what else vLLM is told."""

    config: dict[str, Any]
    tp: int = 1
    pp: int = 1
    rank: int = 0
    expert_parallel: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


@contextmanager
def rank_of(case: Case) -> Iterator[Any]:
    import torch
    import torch.distributed as dist
    import vllm.distributed.parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.engine.arg_utils import EngineArgs

    shares = CpuCommunicator._all_group_ranks_share_shm_group_name
    amx = torch.cpu._is_amx_tile_supported
    same_node = state.in_the_same_node_as
    new_group, queue = dist.new_group, MessageQueue.create_from_process_group
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=64,
            tensor_parallel_size=case.tp,
            pipeline_parallel_size=case.pp,
            enable_expert_parallel=case.expert_parallel,
            distributed_executor_backend="mp" if case.tp * case.pp > 1 else None,
            **case.engine,
        ).create_engine_config()
        config.parallel_config.rank = case.rank
        world = case.tp * case.pp
        dist.init_process_group(backend="fake", store=FakeStore(), rank=case.rank, world_size=world)
        dist.new_group = lambda ranks=None, *a, **k: new_group(ranks, backend="fake")  # nobody would answer
        MessageQueue.create_from_process_group = staticmethod(lambda *a, **k: None)
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        torch.cpu._is_amx_tile_supported = lambda: True  # what is built here is loaded and never run
        state.in_the_same_node_as = lambda group, *a: [True] * dist.get_world_size(group)
        try:
            with set_current_vllm_config(config):
                state.init_distributed_environment(world, case.rank, "env://", 0, backend="fake")
                state.initialize_model_parallel(case.tp, case.pp, backend="fake")
                yield config
        finally:
            dist.new_group, MessageQueue.create_from_process_group = new_group, queue
            CpuCommunicator._all_group_ranks_share_shm_group_name = shares
            state.in_the_same_node_as, torch.cpu._is_amx_tile_supported = same_node, amx
            state.destroy_model_parallel()
            state.destroy_distributed_environment()


def built(config: Any, device: str) -> Any:
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    with set_default_torch_dtype(torch.bfloat16), torch.device(device):
        return initialize_model(config)
