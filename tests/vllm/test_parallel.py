"""Engines of several workers: pipeline, expert and data parallelism; compiled ones; refused updates and starts.

Each engine starts from version 0's checkpoint, is refitted to version 1, which changes every weight, and back: it must
then say and hold again what it did when vLLM had loaded the checkpoint.

Two things vLLM 0.32's CPU build cannot do, so that bytes are compared and not tokens: with expert parallelism its
fused-experts kernel dies of a segmentation fault (``cpu_fused_moe.cpp``) at the first prompt, and with data parallelism
over a mixture-of-experts model its communicator raises NotImplementedError (``all_gatherv``).
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.vllm.children import Child, ChildError
from tests.vllm.conftest import TRANSPORT, VLLM_ENV, Site

OLD, NEW = 0, 1
PROMPTS = [[1, 2, 3, 5, 8, 13], [508, 7, 412]]
N_TOKENS = 16
LLM = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
ENV = VLLM_ENV | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
pytestmark = pytest.mark.timeout(900)


class Parallel:
    """A trainer whose versions are saved and published, and engines of one parallel configuration."""

    def __init__(self, site: Site, family: str) -> None:
        self.site, self.family, self.step = site, family, 0
        arguments = {"family": family, "store": f"{site.folder} {family}"}
        arguments |= {"rendezvous": site.rendezvous, "transport": TRANSPORT}
        (self.sender,) = site._start("tests.vllm.sender", [(f"sender-{family}", arguments)], {"OMP_NUM_THREADS": "1"})
        self.checkpoint = str(site.folder / family)
        self.sender.ask("save", number=OLD, folder=self.checkpoint)
        self._numbers = itertools.count()

    @contextmanager
    def engine(self, **llm: Any) -> Iterator[Child]:
        name = f"{self.family}-engine-{next(self._numbers)}"
        arguments = {"checkpoint": self.checkpoint, "refits": True, "llm": LLM | llm}
        (engine,) = self.site._start("tests.vllm.serving", [(name, arguments)], ENV)
        try:
            yield engine
        finally:
            self.site.end(engine)

    def publish(self, version: int) -> int:
        self.step += 1
        self.sender.ask("publish", step=self.step, number=version, model=self.family)
        return self.step

    def refit(self, engine: Child, version: int) -> None:
        engine.ask("refit", info={"step": self.publish(version), "timeout_s": 60.0})

    def info(self, **more: Any) -> dict[str, Any]:
        return self.site.info(model=self.family, group=f"{self.family}-{next(self._numbers)}", **more)

    def check_bytes(self, engine: Child) -> None:
        """To the new version and back, by what each worker holds."""
        before = engine.ask("weights")
        self.refit(engine, NEW)
        between = engine.ask("weights")
        assert [set(held) for held in between] == [set(held) for held in before]
        for held, was in zip(between, before, strict=True):
            assert not [name for name in was if "weight" in name and held[name] == was[name]]
        self.refit(engine, OLD)
        assert engine.ask("weights") == before


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from reshard.rendezvous.service import serve

    with serve(listen="127.0.0.1:0") as server:
        made = Site(tmp_path_factory.mktemp("parallel"), server.address)
        try:
            yield made
        finally:
            for child in made.children:
                child.close()


@pytest.fixture(scope="module")
def dense(site: Site) -> Parallel:
    return Parallel(site, "qwen3_tied")


@pytest.fixture(scope="module")
def experts(site: Site) -> Parallel:
    return Parallel(site, "qwen3_moe")


def say(engine: Child, replica: int | None = None) -> Any:
    return engine.ask("say", prompts=PROMPTS, n_tokens=N_TOKENS, replica=replica)


# The CPU build makes what the second stage receives into only when it warms up, which it leaves out when it is eager.
PIPELINE = {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}}


def test_two_pipeline_stages_and_what_a_refused_update_leaves(dense: Parallel) -> None:
    with dense.engine(**PIPELINE) as engine:
        old = say(engine)
        engine.ask("init", info=dense.info())
        for _ in range(3):  # each error must be its own, not one that an earlier call left in a queue
            dense.step += 1
            unknown = f"step {dense.step + 100}"
            failed = rf"update_weights failed on 2 of 2 workers: worker 0: .*{unknown}.*worker 1: .*{unknown}"
            with pytest.raises(ChildError, match=failed):
                engine.ask("refit", info={"step": dense.step + 100, "timeout_s": 2.0})
        assert say(engine) == old
        dense.check_bytes(engine)
        assert say(engine) == old
        dense.refit(engine, NEW)
        assert say(engine) != old
        first, second = engine.ask("weights")
        assert first.keys() != second.keys()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_an_engine_that_is_compiled(dense: Parallel) -> None:
    """vLLM's default, which all other tests turn off to start sooner: compiled graphs take the new weights too."""
    with dense.engine(enforce_eager=False) as engine:
        old = say(engine)
        engine.ask("init", info=dense.info())
        dense.refit(engine, NEW)
        assert say(engine) != old
        dense.refit(engine, OLD)
        assert say(engine) == old


def test_two_expert_parallel_ranks_and_what_is_refused_at_the_start(experts: Parallel) -> None:
    with experts.engine(tensor_parallel_size=2, enable_expert_parallel=True) as engine:
        engine.ask("init", info=experts.info())
        experts.check_bytes(engine)
        first, second = engine.ask("weights")
        assert [n for n in first if "w13_weight" in n and first[n] == second[n]] == []
        by_vllm, by_us, of_lora = engine.ask("refusals")
        assert "Expert parallelism load balancing is only supported on" in by_vllm
        assert by_us.startswith("RefitError: enable_eplb: vLLM moves experts between ranks while it serves")
        assert of_lora.startswith("RefitError: enable_lora: vLLM puts its adapters' layers around the model's")


def test_replicas_of_a_mixture_of_experts_are_one_group(experts: Parallel) -> None:
    with experts.engine(data_parallel_size=2, enable_expert_parallel=True) as engine:
        engine.ask("init", info=experts.info())
        experts.check_bytes(engine)


def test_replicas_of_a_dense_model_as_one_group_and_each_for_itself(dense: Parallel) -> None:
    """vLLM calls all replicas of a server at the same time, so they may be one group."""
    with dense.engine(data_parallel_size=2) as engine:
        old = say(engine, 0)
        assert say(engine, 1) == old
        engine.ask("init", info=dense.info(engines=2))
        dense.refit(engine, NEW)
        new = say(engine, 0)
        assert say(engine, 1) == new != old
        engine.ask("init", info=dense.info())
        dense.refit(engine, OLD)
        assert say(engine, 0) == say(engine, 1) == old
        with pytest.raises(ChildError, match=r"engine=2: expected one in \[0, 2\)"):
            engine.ask("init", info=dense.info(engines=2, engine=2))
