"""A vLLM engine under test, driven through its own public calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.vllm.children import answer
from tests.vllm.models import N_NEW_TOKENS, PROMPTS


class Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        backend = WeightTransferConfig(backend="reshard") if arguments.get("refits") else None
        self.llm = LLM(
            model=arguments["checkpoint"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=64,
            max_num_seqs=8,
            weight_transfer_config=backend,
            **arguments.get("llm", {}),
        )

    def init(self, info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": info})

    def refit(self, info: dict[str, Any]) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": info})
        self.llm.finish_weight_update()

    def generate(self) -> list[list[int]]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0.0, max_tokens=N_NEW_TOKENS, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": list(p)} for p in PROMPTS]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts, sampling, use_tqdm=False)]


def main() -> None:
    engine = Engine(json.loads(Path(sys.argv[2]).read_text()))
    answer(sys.argv[1], {"init": engine.init, "refit": engine.refit, "generate": engine.generate})


if __name__ == "__main__":
    main()
