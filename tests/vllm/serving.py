"""A vLLM engine that serves while it is refitted: `AsyncLLM`, whose requests go on between questions."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.children import answer
from tests.vllm.hooks import refusals, slow_down
from tests.vllm.models import digests, sabotage


@dataclass
class Request:
    """What has come back of one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    n_cached: int | None = None
    error: str = ""
    versions: list[list[Any]] = field(default_factory=list)


class Serving:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        settings = {
            "model": arguments["checkpoint"],
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_num_seqs": 8,
            "block_size": 32,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        } | arguments.get("llm", {})
        if arguments.get("refits"):
            settings["weight_transfer_config"] = WeightTransferConfig(backend="reshard")

        async def start() -> Any:
            self.news = asyncio.Event()
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

        self.llm = self._run(start())
        self.requests: dict[str, Request] = {}
        self.tasks: dict[str, asyncio.Future[None]] = {}

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    # -- requests

    def begin(self, prompts: dict[str, list[int]], n_tokens: int, replica: int | None = None) -> None:
        """Ask for exactly ``n_tokens`` greedy tokens for each prompt; the answers collect in the background."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=n_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

        async def collect(name: str, prompt: list[int], made: Request) -> None:
            try:
                async for output in self.llm.generate(
                    {"prompt_token_ids": prompt}, sampling, request_id=name, data_parallel_rank=replica
                ):
                    (said,) = output.outputs
                    made.tokens += said.token_ids
                    made.finish_reason, made.n_cached = said.finish_reason, output.num_cached_tokens
                    made.versions = [[v.version, v.start, v.end] for v in said.weight_versions or ()]
                    self.news.set()
            except Exception as error:
                made.error = f"{type(error).__name__}: {error}"

        async def start() -> None:
            for name, prompt in prompts.items():
                made = self.requests[name] = Request()
                self.tasks[name] = asyncio.ensure_future(collect(name, prompt, made))

        self._run(start())

    def progress(self) -> dict[str, dict[str, Any]]:
        """What has come back so far."""
        return {name: dict(vars(request)) for name, request in self.requests.items()}

    def end(self) -> dict[str, dict[str, Any]]:
        """Wait for all requests, and forget them."""

        async def wait() -> None:
            await asyncio.wait_for(asyncio.gather(*self.tasks.values()), 60)

        self._run(wait())
        done = self.progress()
        self.requests, self.tasks = {}, {}
        return done

    def say(self, prompts: list[list[int]], n_tokens: int, replica: int | None = None) -> list[list[int]]:
        """Greedy tokens for each prompt, one after the other, each with an empty prefix cache."""
        said = []
        for prompt in prompts:
            if not self.reset_prefix_cache():
                raise RuntimeError("the prefix cache was not reset: requests are running")
            self.begin({"say": prompt}, n_tokens, replica)
            said.append(self.end()["say"]["tokens"])
        return said

    def reached(self, n_tokens: int) -> None:
        """Wait until each request has so many tokens."""
        self._run(self._reached(n_tokens))

    async def _reached(self, n_tokens: int) -> None:
        while any(len(r.tokens) < n_tokens for n, r in self.requests.items() if not self.tasks[n].done()):
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)

    # -- vLLM's own calls

    def pause(self, mode: str, clear_cache: bool = True, after: int = 0) -> None:
        """Pause, as soon as each request has ``after`` so many tokens."""

        async def pause() -> None:
            await self._reached(after)
            await self.llm.pause_generation(mode=mode, clear_cache=clear_cache)

        self._run(pause())

    def resume(self) -> None:
        self._run(self.llm.resume_generation())

    def is_paused(self) -> bool:
        return bool(self._run(self.llm.is_paused()))

    def reset_prefix_cache(self, running: bool = False) -> bool:
        return bool(self._run(self.llm.reset_prefix_cache(reset_running_requests=running)))

    def init(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._run(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(info)))

    def start(self) -> None:
        self._run(self.llm.start_weight_update())

    def update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._run(self.llm.update_weights(WeightTransferUpdateRequest(info)))

    def finish(self, version: str | None = None) -> None:
        self._run(self.llm.finish_weight_update(version))

    def refit(self, info: dict[str, Any]) -> None:
        self.start()
        self.update(info)
        self.finish(f"step {info['step']}")

    def draft(self) -> None:
        self._run(self.llm.start_draft_weight_update())

    def slow_down(self) -> None:
        self._run(self.llm.collective_rpc("apply_model", args=(slow_down,)))

    def break_next_install(self) -> None:
        self._run(self.llm.collective_rpc("apply_model", args=(sabotage,)))

    def weights(self) -> Any:
        return self._run(self.llm.collective_rpc("apply_model", args=(digests,)))


if __name__ == "__main__":
    serving = Serving(json.loads(Path(sys.argv[2]).read_text()))
    commands = (
        *(serving.begin, serving.progress, serving.reached, serving.end, serving.say),
        *(serving.pause, serving.resume, serving.is_paused, serving.reset_prefix_cache),
        *(serving.init, serving.start, serving.update, serving.finish, serving.refit),
        *(serving.draft, serving.weights, serving.slow_down, serving.break_next_install, refusals),
    )
    answer(sys.argv[1], {command.__name__: command for command in commands})
    serving.llm.shutdown()
