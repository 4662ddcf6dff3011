"""A trainer rank under test: transformers, FSDP2 over gloo, AdamW; it publishes bfloat16 and saves checkpoints."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tests.vllm.children import host
from tests.vllm.models import VOCABULARY, config_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard.refit.adapters.torch_dtensor import local_tensors
from reshard.refit.adapters.transformers_names import CheckpointNames
from reshard.refit.publisher import Publisher
from reshard.rendezvous import Rendezvous
from reshard.transports import open_transport

BIAS = "e_score_correction_bias"
"""DeepSeek's router bias: a float32 buffer, on every rank, that never goes through bfloat16."""


class Trainer:
    def __init__(self, arguments: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.arguments = arguments
        self.rank, self.n = arguments["rank"], arguments["n"]
        dist.init_process_group(
            "gloo", store=dist.FileStore(arguments["store"], self.n), rank=self.rank, world_size=self.n
        )
        torch.manual_seed(arguments["seed"])
        self.config = config_of(arguments["family"], **arguments.get("changes", {}))
        self.model = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (self.n,))
        body = self.model.model if hasattr(self.model, "model") else self.model.backbone
        for layer in body.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.names = CheckpointNames.of_model(self.model)
        self.rename = arguments.get("rename", {})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.service = Rendezvous.connect(arguments["rendezvous"])
        self.wire = open_transport(arguments["transport"])
        slots = [f"trainer-{r}" for r in range(self.n)]
        self.publisher = Publisher(
            self.wire,
            self.service,
            model=arguments["model"],
            slot=slots[self.rank],
            slots=slots,
            wire_dtype="bfloat16",
            wire_dtype_exceptions=[f"*{BIAS}"],
        )
        self.epoch = self.publisher.open_epoch(arguments["store"])

    def publish(self, step: int) -> None:
        held = []
        for tensor in self.names.apply(local_tensors(self.model, plain_ranks=range(self.n))):
            name = tensor.name
            for old, new in self.rename.items():
                name = name.replace(old, new)
            held.append(tensor if name == tensor.name else _renamed(tensor, name))
        self.publisher.publish(epoch=self.epoch, step=step, tensors=held, empty=not held, timeout_s=60)

    def train(self, step: int) -> float:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        tokens = torch.randint(0, VOCABULARY, (2, 24), generator=generator)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for bias in self.biases().values():  # as DeepSeek balances its experts: by a rule, the same on every rank
            bias += 0.1 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(step))
        return float(loss.detach())

    def biases(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self.model.named_buffers() if name.endswith(BIAS)}

    def save(self, folder: str) -> None:
        full = {n: p.full_tensor().detach().to(torch.bfloat16) for n, p in self.model.named_parameters()}
        full |= {name: bias.clone() for name, bias in self.biases().items()}
        if self.rank == 0:
            saved = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
            saved.load_state_dict(full, strict=False, assign=True)
            saved.tie_weights()
            saved.save_pretrained(folder)

    def load(self, folder: str) -> None:
        """Take a checkpoint's values."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        set_model_state_dict(self.model, loaded.state_dict(), options=StateDictOptions(full_state_dict=True))

    def connect(self, url: str, model: str) -> None:
        """Join an engine over HTTP by vLLM's own trainer-side interface."""
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory

        from reshard.refit.engines.vllm_trainer import ReshardTrainerInitInfo, checkpoint_source
        from reshard.refit.engines.vllm_worker import register

        register()
        info = ReshardTrainerInitInfo(
            rank=self.rank,
            world_size=self.n,
            rendezvous=self.arguments["rendezvous"],
            model=model,
            run_id=self.arguments["store"],
            transport=self.arguments["transport"],
            timeout_s=60.0,
        )
        client = HTTPVLLMWeightSyncClient(url)
        source = checkpoint_source(self.model)
        self.sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    def send(self) -> None:
        self.sender.send_weights()

    def send_and_leave(self) -> None:
        self.sender.send_weights()
        self.sender.shutdown()

    def hang_up(self) -> None:
        """Let nobody read any more, without a word to the rendezvous."""
        self.wire.close()

    def close(self) -> None:
        self.publisher.close()
        self.wire.close()
        self.service.close()
        dist.destroy_process_group()


def _renamed(tensor: Any, name: str) -> Any:
    from dataclasses import replace

    return replace(tensor, name=name)


if __name__ == "__main__":
    commands = ("publish", "train", "save", "load", "connect", "send", "send_and_leave", "hang_up")
    host(sys.argv[1], Trainer, commands)
