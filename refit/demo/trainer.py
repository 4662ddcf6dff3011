"""One trainer process of the demo: an FSDP2 rank that publishes what it holds, trains, and saves.

1. All ranks build the same model and shard it with `fully_shard` over a gloo mesh (FSDP, HSDP, or FSDP over tensor
   parallelism): float32 masters, uneven and empty shards.
2. "publish" hands this rank's boxes, under checkpoint names, to a `Publisher`, which casts to bfloat16 in its copy.
3. "train" makes one AdamW step on fixed random tokens.
4. "save" gathers the full tensors (for the check alone: a refit gathers nothing); rank 0 saves them with
   `save_pretrained` and answers with the model's greedy tokens.
"""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reshard.planner.errors import require
from reshard.refit.demo import models
from reshard.refit.demo.channel import Channel, Message, serve_commands
from reshard.refit.demo.settings import DemoError, DemoSettings

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel

    from reshard.refit.publisher import Publisher

__all__ = ["MODEL_NAME", "run_trainer"]

MODEL_NAME: Final = "demo"
LEARNING_RATE: Final = 1e-2
COLLECTIVE_TIMEOUT_S: Final = 60.0
WORKER_TTL_S: Final = 5.0


def run_trainer(
    channel: Channel,
    *,
    rank: int,
    model: str,
    layers: int,
    trainers: int,
    sharding: str,
    cut_hints: bool,
    transport: str,
    rendezvous: str,
    store: str,
    timeout_s: float,
) -> None:
    """Run one trainer rank until its channel closes.

    Parameters
    ----------
    channel
        To the supervisor.
    rank
        This trainer's rank.
    model, layers, trainers, sharding, cut_hints, transport, timeout_s
        As in `DemoSettings`.
    rendezvous
        Address of the rendezvous service.
    store
        File through which the gloo ranks find each other.
    """
    require("torch", extra="torch")
    import torch

    from reshard.refit.publisher import Publisher
    from reshard.rendezvous import Rendezvous
    from reshard.transports import open_transport

    settings = DemoSettings(
        model=model, layers=layers, trainers=trainers, sharding=sharding, transport=transport, timeout_s=timeout_s
    )
    torch.set_num_threads(1)
    dist = require("torch.distributed", extra="torch")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, trainers),
        rank=rank,
        world_size=trainers,
        timeout=datetime.timedelta(seconds=min(COLLECTIVE_TIMEOUT_S, timeout_s)),
    )
    service = Rendezvous.connect(rendezvous)
    wire = open_transport(transport)
    publisher = Publisher(
        wire,
        service,
        model=MODEL_NAME,
        slot=settings.trainer_names[rank],
        slots=settings.trainer_names,
        wire_dtype="bfloat16",
        wire_dtype_exceptions=models.KEPT_IN_FLOAT32,
        cut_hints=cut_hints,
        ttl_s=WORKER_TTL_S,
    )
    try:
        trainer = _Trainer(settings, rank, publisher, epoch=service.open_epoch(MODEL_NAME, run_id=store))
        channel.send({"answer": {"transport": wire.name}})
        commands = {
            "publish": trainer.publish,
            "layout epoch": trainer.layout_epoch,
            "train": trainer.train,
            "save": trainer.save,
        }
        serve_commands(channel, commands)
    finally:
        publisher.close()
        wire.close()
        service.close()
        dist.destroy_process_group()


class _Trainer:
    """The sharded model of one rank, with its optimizer and its publisher."""

    def __init__(self, settings: DemoSettings, rank: int, publisher: Publisher, *, epoch: int) -> None:
        require("torch", extra="torch")
        import torch

        from reshard.refit.adapters.transformers_names import CheckpointNames

        self.rank = rank
        self.epoch = epoch
        self.publisher = publisher
        self.timeout_s = settings.timeout_s
        self.config: PretrainedConfig = models.build_config(settings)
        self.model: PreTrainedModel = models.build_model(self.config)
        mesh = _shard(self.model, settings)
        self.data_rank = mesh["fsdp"].get_local_rank() if settings.sharding == "fsdp+tp" else rank
        self.names = CheckpointNames.of_model(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def publish(self, command: Message) -> Message:
        from reshard.refit.adapters.torch_dtensor import local_tensors

        started = time.perf_counter()
        held = self.names.apply(local_tensors(self.model, copies_over=("tp",)))
        self.publisher.publish(
            epoch=self.epoch,
            step=_integer(command, "step"),
            tensors=held,
            empty=not held,
            layout_epoch=_integer(command, "layout_epoch"),
            timeout_s=self.timeout_s,
        )
        n_experts = len({tensor.name for tensor in held if ".experts." in tensor.name and ".layers.0." in tensor.name})
        return {"n_boxes": len(held), "n_expert_tensors": n_experts, "seconds": time.perf_counter() - started}

    def layout_epoch(self, command: Message) -> Message:
        """Answer with the newest layout epoch of the receivers' cut hints."""
        return {"layout_epoch": self.publisher.newest_layout_epoch()}

    def train(self, command: Message) -> Message:
        require("torch", extra="torch")
        import torch

        generator = torch.Generator().manual_seed(1000 * _integer(command, "step") + self.data_rank)
        tokens = torch.randint(0, self.config.vocab_size, (2, 32), generator=generator)
        self.model.train()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": float(loss)}

    def save(self, command: Message) -> Message:
        full = {name: _gather(name, parameter) for name, parameter in self.model.named_parameters()}
        if self.rank != 0:
            return {}
        served = {name: tensor.to(models.serving_dtype(name)) for name, tensor in full.items()}
        models.save_checkpoint(self.config, served, Path(str(command["folder"])))
        return {"tokens": [list(answer) for answer in models.greedy_tokens(self.config, full)]}


def _shard(model: PreTrainedModel, settings: DemoSettings) -> DeviceMesh:
    """Shard a model in place over all trainers, and return the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    n = settings.trainers
    if settings.sharding == "fsdp":
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("fsdp",))
    elif settings.sharding == "hsdp":
        mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicate", "fsdp"))
    else:
        mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("fsdp", "tp"))
    over_tensor = settings.sharding == "fsdp+tp"
    fsdp_mesh = mesh["fsdp"] if over_tensor else mesh
    for layer in model.get_submodule("model.layers").children():
        if over_tensor:
            plan: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
            plan["self_attn.o_proj"] = RowwiseParallel()
            # Each rank norms its own heads, so the gradients of these weights must be summed over the ranks.
            plan |= {f"self_attn.{name}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for name in "qk"}
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=fsdp_mesh)
    fully_shard(model, mesh=fsdp_mesh)
    return mesh


def _gather(name: str, parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        raise DemoError(f"parameter {name!r}: got a {type(parameter).__name__}, expected a DTensor")
    return parameter.full_tensor().detach()


def _integer(command: Message, name: str) -> int:
    value = command[name]
    if not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r}, expected an integer")
    return value
