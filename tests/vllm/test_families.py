"""A vLLM engine that was refitted says what a vLLM started from the same step's checkpoint says.

For each family of models, an engine of one rank and one of two serve side by side. FSDP2 ranks train a model, first two
of them and then four, and the engines follow three of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.vllm.children import Child, ChildError, Hosts
from tests.vllm.conftest import Answer, Site, all_ask

STEPS = (1, 2, 3)
TENSOR_PARALLEL = (1, 2)
GENERATING = ("qwen3_tied", "qwen3_moe", "llama", "mixtral", "gemma3", "deepseek_v3")
NOT_ON_CPUS = {"mamba": "Dimension out of range"}
"""Families that vLLM's CPU build loads and cannot run, with its own error at the first prompt."""


@dataclass
class Engines:
    """The engines of one family, by their tensor-parallel size, with what they said before their first refit."""

    family: str
    site: Site
    engines: dict[int, Child]
    last: dict[int, Answer]

    def answer(self, engine: Child) -> Answer:
        tokens = engine.ask("generate") if self.family in GENERATING else []
        return tokens, engine.ask("weights")


@pytest.fixture(scope="module", params=[*GENERATING, *NOT_ON_CPUS])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, hosts: Hosts, port: int
) -> Iterator[Engines]:
    from reshard.rendezvous.service import serve

    with serve(listen="127.0.0.1:0") as server:
        site = Site(tmp_path_factory.mktemp("v"), server.address, hosts, port)
        try:
            trainers = site.trainers(request.param, n=1, model="initial", seed=3)
            folder = site.folder / "initial"
            all_ask(trainers, "save", folder=str(folder))
            site.end(*trainers)
            started = site.engines(folder, [{"tensor_parallel_size": tp} for tp in TENSOR_PARALLEL], refits=True)
            made = Engines(request.param, site, dict(zip(TENSOR_PARALLEL, started, strict=True)), {})
            made.last = {tp: made.answer(engine) for tp, engine in made.engines.items()}
            yield made
        finally:
            site.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("n_trainers", [2, 4])
def test_each_refit_is_its_checkpoint(engines: Engines, n_trainers: int) -> None:
    """Three refits in a row with optimizer steps between; tokens and every byte that serves are compared at each."""
    site, model = engines.site, f"of-{n_trainers}"
    trainers = site.trainers(engines.family, n=n_trainers, model=model)
    for tp, engine in engines.engines.items():
        engine.ask("init", info=site.info(model=model, group=f"tp{tp}"))
    for step in STEPS:
        all_ask(trainers, "train", step=step)
        all_ask(trainers, "publish", step=step)
        folder = site.folder / f"{model}-step-{step}"
        all_ask(trainers, "save", folder=str(folder))
        for tp, engine in engines.engines.items():
            engine.ask("refit", info={"step": step, "timeout_s": 60.0})
            said = engines.answer(engine)
            where = f"{engines.family}, {n_trainers} trainers, TP{tp}, step {step}"
            assert said[1] != engines.last[tp][1], f"{where}: the optimizer step changed no weight"
            if engines.family in GENERATING:
                assert said[0] != engines.last[tp][0], f"{where}: it changed no token, so equal ones prove nothing"
            tokens, weights = site.answer_of(folder, tp, generates=engines.family in GENERATING)
            assert said[1] == weights, f"{where}: other bytes in {different(said[1], weights)}"
            assert said[0] == tokens, where
            engines.last[tp] = said
    site.end(*trainers)


def different(got: list[dict[str, str]], expected: list[dict[str, str]]) -> list[tuple[int, str]]:
    """The tensors, with their ranks, whose digests differ or that only one side has."""
    return [
        (rank, name)
        for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", NOT_ON_CPUS)
def test_families_whose_tokens_are_not_compared_cannot_run_here(site: Site, family: str) -> None:
    trainers = site.trainers(family, n=1)
    all_ask(trainers, "save", folder=str(site.folder / "initial"))
    with pytest.raises(ChildError, match=NOT_ON_CPUS[family]):
        site.answer_of(site.folder / "initial")
