"""A trainer of one process under test: it publishes versions by name, saves their checkpoints, and drives engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.vllm.children import answer
from tests.vllm.models import config_of

from reshard.refit.adapters.torch_dtensor import local_tensors
from reshard.refit.adapters.transformers_names import CheckpointNames
from reshard.refit.publisher import Publisher
from reshard.rendezvous import Rendezvous
from reshard.transports import open_transport


class Sender:
    """Any number of versions of one model: version 0 is drawn from the seed, each other one is moved away from it.

    All of it is float32, so that the tokens of an engine do not depend on how its steps were batched.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.arguments = arguments
        self.service = Rendezvous.connect(arguments["rendezvous"])
        self.wire = open_transport(arguments["transport"])
        self.publishers: dict[str, tuple[Publisher, int]] = {}
        self.engines: dict[str, Any] = {}

    def version(self, number: int, **changes: Any) -> Any:
        torch.manual_seed(23)
        config = config_of(self.arguments["family"], **(self.arguments.get("changes", {}) | changes))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if number:
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.08 * torch.randn(parameter.shape, generator=generator)
        return model

    def save(self, number: int, folder: str) -> None:
        self.version(number).save_pretrained(folder)

    def publish(self, step: int, number: int, model: str, changes: dict[str, Any] | None = None) -> None:
        if model not in self.publishers:
            made = Publisher(self.wire, self.service, model=model, slot="trainer", slots=["trainer"])
            self.publishers[model] = made, made.open_epoch(f"{model} of {self.arguments['store']}")
        publisher, epoch = self.publishers[model]
        shown = self.version(number, **(changes or {}))
        tensors = CheckpointNames.of_model(shown).apply(local_tensors(shown))
        publisher.publish(epoch=epoch, step=step, tensors=tensors, timeout_s=60)

    def connect(self, model: str, urls: list[str], options: dict[str, Any] | None = None) -> None:
        """Join an engine over HTTP by vLLM's own trainer-side interface."""
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory

        from reshard.refit.engines.vllm_trainer import ReshardTrainerInitInfo, checkpoint_source
        from reshard.refit.engines.vllm_worker import register

        register()
        shown = self.version(0)
        (url,) = urls
        made = WeightTransferTrainerFactory.trainer_init(
            ReshardTrainerInitInfo(
                rank=0,
                world_size=1,
                rendezvous=self.arguments["rendezvous"],
                model=model,
                run_id=f"{model} of {self.arguments['store']}",
                transport=self.arguments["transport"],
                engine_options=options,
                timeout_s=60.0,
            ),
            client=HTTPVLLMWeightSyncClient(url),
            source=checkpoint_source(shown),
        )
        self.engines[model] = made, shown

    def send(self, model: str, number: int) -> None:
        made, shown = self.engines[model]
        shown.load_state_dict(self.version(number).state_dict())
        made.send_weights()

    def disconnect(self, model: str) -> None:
        made, _ = self.engines.pop(model)
        made.shutdown()

    def close(self) -> None:
        for model in list(self.engines):
            self.disconnect(model)
        for publisher, _ in self.publishers.values():
            publisher.close()
        self.wire.close()
        self.service.close()


if __name__ == "__main__":
    sender = Sender(json.loads(Path(sys.argv[2]).read_text()))
    commands = (sender.save, sender.publish, sender.connect, sender.send, sender.disconnect)
    answer(sys.argv[1], {command.__name__: command for command in commands})
    sender.close()
