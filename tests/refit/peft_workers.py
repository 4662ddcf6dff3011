"""What each gloo rank of `test_subsets.py` runs: a LoRA adapter under FSDP2, merged while parameters are gathered."""

from __future__ import annotations

from typing import Any

import peft
import torch
import torch.distributed as dist
from tests.refit.test_subsets import build
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from reshard.refit.adapters.peft_merged import merged, merged_names
from reshard.refit.adapters.torch_dtensor import local_tensors, named_tensors
from reshard.refit.demo.channel import Channel


def run_rank(channel: Channel, *, rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    whole: Any = peft.get_peft_model(build(1), options)
    sharded: Any = peft.get_peft_model(build(1), options)
    sharded.load_state_dict(whole.state_dict())
    for layer in sharded.get_base_model().model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(sharded)
    names = merged_names(sharded)
    with torch.no_grad():
        sharded(input_ids=torch.arange(8)[None])
    if any(isinstance(parameter, DTensor) for parameter in sharded.parameters()):
        raise AssertionError("nothing is gathered: no test")
    with merged(sharded):
        held = names.apply(local_tensors(sharded))
        published = [(t.name, t.start, t.stop, torch.as_tensor(t.data).clone()) for t in held]
    with merged(whole):
        expected = {t.name: torch.as_tensor(t.data).clone() for t in merged_names(whole).apply(local_tensors(whole))}
    for name, start, stop, data in published:
        where = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        torch.testing.assert_close(data, expected[name][where], msg=lambda said, name=name: f"{name}: {said}")
    for name, parameter in named_tensors(sharded).items():
        torch.testing.assert_close(parameter.full_tensor(), whole.state_dict()[name])
    channel.send({"answer": {"names": sorted({name for name, *_ in published})}})
    dist.barrier()
    dist.destroy_process_group()
