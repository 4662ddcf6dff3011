"""Engines of several workers: pipeline, expert and data parallelism; refused updates; what is refused at the start.

Two things vLLM 0.32's CPU build cannot do, so that bytes are compared and not tokens: with expert parallelism its
fused-experts kernel dies of a segmentation fault (``cpu_fused_moe.cpp``) at the first prompt, and with data parallelism
over a mixture-of-experts model its communicator raises NotImplementedError (``all_gatherv``).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.children import Child, ChildError
from tests.vllm.conftest import TRANSPORT, VLLM_ENV, Site

from reshard.refit.engines.vllm_worker import ReshardInitInfo, group_of
from reshard.refit.errors import RefitError

OLD, NEW = 0, 1
PROMPTS = [[1, 2, 3, 5, 8, 13], [508, 7, 412]]
N_TOKENS = 16
LLM = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
ENV = VLLM_ENV | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
pytestmark = pytest.mark.timeout(400)


class Parallel:
    """A trainer whose versions are saved and published, and engines of one parallel configuration."""

    def __init__(self, site: Site, family: str) -> None:
        self.site, self.family, self.step = site, family, 0
        arguments = {"family": family, "store": f"{site.folder} {family}"}
        arguments |= {"rendezvous": site.rendezvous, "transport": TRANSPORT}
        (self.sender,) = site._start("tests.vllm.sender", [(f"sender-{family}", arguments)], {"OMP_NUM_THREADS": "1"})
        for version in (OLD, NEW):
            self.sender.ask("save", number=version, folder=self.folder(version))

    def folder(self, version: int) -> str:
        return str(self.site.folder / f"{self.family}-{version}")

    def engine(self, version: int, *, refits: bool, **llm: Any) -> Child:
        arguments = {"checkpoint": self.folder(version), "refits": refits, "llm": LLM | llm}
        name = f"{'served' if refits else 'started'}-{len(self.site.children)}"
        (engine,) = self.site._start("tests.vllm.serving", [(name, arguments)], ENV)
        return engine

    def publish(self, version: int) -> int:
        self.step += 1
        self.sender.ask("publish", step=self.step, number=version, model=self.family)
        return self.step

    def refit(self, engine: Child, version: int) -> None:
        engine.ask("refit", info={"step": self.publish(version), "timeout_s": 60.0})

    def info(self, **more: Any) -> dict[str, Any]:
        return self.site.info(model=self.family, group=f"{self.family}-{len(self.site.children)}", **more)


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
    engine = dense.engine(OLD, refits=True, **PIPELINE)
    before = say(engine)
    engine.ask("init", info=dense.info())
    for _ in range(3):  # each error must be its own, not one that an earlier call left in a queue
        dense.step += 1
        step = dense.step + 100
        failed = rf"update_weights failed on 2 of 2 workers: worker 0: .*step {step}.*worker 1: .*step {step}"
        with pytest.raises(ChildError, match=failed) as told:
            engine.ask("refit", info={"step": step, "timeout_s": 2.0})
    print(told.value)
    assert say(engine) == before
    dense.refit(engine, NEW)
    after, held = say(engine), engine.ask("weights")
    dense.site.end(engine)
    started = dense.engine(NEW, refits=False, **PIPELINE)
    assert after == say(started) != before
    assert held == started.ask("weights")
    assert len(held) == 2
    assert held[0].keys() != held[1].keys()
    dense.site.end(started)


def test_two_expert_parallel_ranks_hold_what_a_started_engine_holds(experts: Parallel) -> None:
    llm = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    engine = experts.engine(OLD, refits=True, **llm)
    before = engine.ask("weights")
    engine.ask("init", info=experts.info())
    experts.refit(engine, NEW)
    after = engine.ask("weights")
    experts.site.end(engine)
    started = experts.engine(NEW, refits=False, **llm)
    assert after == started.ask("weights") != before
    assert after[0] != after[1]
    experts.site.end(started)


def test_replicas_of_a_dense_model_as_one_group_and_each_for_itself(dense: Parallel) -> None:
    """vLLM calls all replicas of a server at the same time, so they may be one group."""
    engine = dense.engine(OLD, refits=True, data_parallel_size=2)
    started = dense.engine(NEW, refits=False)
    old, new = say(engine, 0), say(started)
    assert say(engine, 1) == old != new
    for version, expected, more in ((NEW, new, {"engines": 2}), (OLD, old, {})):
        engine.ask("init", info=dense.info(**more))
        dense.refit(engine, version)
        assert say(engine, 0) == say(engine, 1) == expected
    with pytest.raises(ChildError, match=r"data-parallel replica 1 is not in \[0, 1\)|engines=3|engine=") as told:
        engine.ask("init", info=dense.info(engines=2, engine=2))
    print(told.value)
    dense.site.end(engine)
    dense.site.end(started)


def test_replicas_of_a_mixture_of_experts_are_one_group(experts: Parallel) -> None:
    engine = experts.engine(OLD, refits=True, data_parallel_size=2, enable_expert_parallel=True)
    before = engine.ask("weights")
    engine.ask("init", info=experts.info())
    experts.refit(engine, NEW)
    after = engine.ask("weights")
    experts.site.end(engine)
    assert after != before
    started = experts.engine(NEW, refits=False, data_parallel_size=2, enable_expert_parallel=True)
    assert after == started.ask("weights")
    experts.site.end(started)


def parallel(**changes: int) -> Any:
    sizes = {"data_parallel_size": 1, "data_parallel_index": 0, "world_size": 2, "rank": 1}
    return SimpleNamespace(**(sizes | changes))


def info(**more: Any) -> ReshardInitInfo:
    return ReshardInitInfo(rendezvous="r:1", model="m", **more)


def test_groups() -> None:
    pair = ("vllm/rank0", "vllm/rank1")
    assert group_of(info(), parallel()) == ("vllm", pair, "vllm/rank1")
    name, members, member = group_of(info(), parallel(data_parallel_index=1))
    assert (name, members[0], member) == ("vllm/dp1", "vllm/dp1/rank0", "vllm/dp1/rank1")
    name, members, member = group_of(info(), parallel(data_parallel_size=2, data_parallel_index=1))
    assert (name, len(members), members.index(member)) == ("vllm", 4, 3)
    name, members, member = group_of(info(engines=3), parallel(data_parallel_index=2))
    assert (name, len(members), members.index(member)) == ("vllm", 6, 5)
    name, members, member = group_of(info(engines=2, engine=1), parallel(data_parallel_size=2))
    assert (name, len(members), members.index(member)) == ("vllm", 8, 5)
    with pytest.raises(RefitError, match=r"replica 2 is not in \[0, 2\)"):
        group_of(info(engines=2), parallel(data_parallel_index=2))
    with pytest.raises(RefitError, match="without engine"):
        group_of(info(engines=2), parallel(data_parallel_size=2))
    with pytest.raises(ValueError, match=r"engine=2: expected one in \[0, 2\)"):
        info(engines=2, engine=2)
    with pytest.raises(ValueError, match="engines=0"):
        info(engines=0)


def test_eplb_is_refused_when_the_engine_starts() -> None:
    """By us; and before us, on a CPU, by vLLM itself."""
    import torch
    from vllm.config import ParallelConfig, WeightTransferConfig

    from reshard.refit.engines.vllm_worker import worker_engine_type

    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True), model_config=None)
    with pytest.raises(RefitError, match="enable_eplb: vLLM moves experts"):
        worker_engine_type()(
            WeightTransferConfig(backend="reshard"), config, torch.device("cpu"), torch.nn.Linear(1, 1)
        )
    with pytest.raises(ValueError, match="Expert parallelism load balancing is only supported on"):
        ParallelConfig(enable_eplb=True, enable_expert_parallel=True, tensor_parallel_size=2)
