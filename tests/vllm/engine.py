"""A vLLM engine under test, or one started from a checkpoint to compare with, driven through its own public calls."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

from tests.vllm.children import host
from tests.vllm.models import N_NEW_TOKENS, PROMPTS, digests, sabotage


def name_shared_memory_apart() -> None:
    """Put the port of the ranks' store into the name of the memory that they share.

    vLLM names it alike for all engines on the machine whose ranks somebody else starts: another run of these tests, or
    what a killed one left in /dev/shm, would be in the way.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    if not hasattr(_CPUSHMDistributed, "named_by_vllm"):
        _CPUSHMDistributed.named_by_vllm = staticmethod(_CPUSHMDistributed.make_group_name)
    port, named = os.environ["MASTER_PORT"], _CPUSHMDistributed.named_by_vllm
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{named(communicator)}-{port}")


class Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        backend = WeightTransferConfig(backend="reshard") if arguments.get("refits") else None
        self.checkpoint = arguments["checkpoint"]
        if arguments.get("llm", {}).get("distributed_executor_backend") == "external_launcher":
            name_shared_memory_apart()
        self.llm = LLM(
            model=arguments["checkpoint"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=64,
            max_num_seqs=8,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config=backend,
            **arguments.get("llm", {}),
        )

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":  # the worker was this process
            cleanup_dist_env_and_memory()
        gc.collect()

    def init(self, info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": info})

    def refit(self, info: dict[str, Any]) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": info})
        self.llm.finish_weight_update()

    def send(self, source: str, info: dict[str, Any]) -> None:
        """Train beside the engine, in this process, and send the weights by vLLM's own trainer-side interface."""
        import torch
        import transformers
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

        from reshard.refit.engines.vllm_trainer import ReshardTrainerInitInfo, checkpoint_source

        config = transformers.AutoConfig.from_pretrained(self.checkpoint)
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(info.pop("folder"))
        made = WeightTransferTrainerFactory.trainer_init(
            ReshardTrainerInitInfo(rank=0, world_size=1, timeout_s=60.0, **info),
            client=LocalClient(self.llm),
            source=checkpoint_source(model) if source == "checkpoint" else ModuleSource(model),
        )
        made.send_weights()
        made.send_weights()
        made.shutdown()

    def weights(self) -> list[dict[str, str]]:
        """A digest of each parameter and buffer that serves, in its kernel's layout, rank by rank."""
        found: list[dict[str, str]] = self.llm.apply_model(digests)
        return found

    def break_next_install(self) -> None:
        self.llm.apply_model(sabotage)

    def generate(self) -> list[list[int]]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0.0, max_tokens=N_NEW_TOKENS, ignore_eos=True, detokenize=False)
        said = []
        for prompt in PROMPTS:  # one by one: how vLLM batches several is a matter of time, and bfloat16 can tell
            (output,) = self.llm.generate({"prompt_token_ids": list(prompt)}, sampling, use_tqdm=False)
            said.append(list(output.outputs[0].token_ids))
        return said


class LocalClient:
    """vLLM's ``VLLMWeightSyncClient`` over an `LLM` of this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


if __name__ == "__main__":
    commands = ("init", "refit", "generate", "send", "weights", "break_next_install")
    host(sys.argv[1], Engine, commands)
