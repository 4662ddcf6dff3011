"""A vLLM engine that was refitted says what a vLLM started from the same step's checkpoint says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.children import Child, ChildError
from tests.vllm.conftest import Site, all_ask

STEPS = 3


def save_initial(site: Site, trainers: list[Child]) -> Path:
    folder = site.folder / "initial"
    all_ask(trainers, "save", folder=str(folder))
    return folder


def refitted_tokens(site: Site, trainers: list[Child], engine: Child) -> dict[int, list[list[int]]]:
    """Three refits with optimizer steps between; the tokens after each."""
    said = {}
    for step in range(1, STEPS + 1):
        all_ask(trainers, "train", step=step)
        all_ask(trainers, "publish", step=step)
        all_ask(trainers, "save", folder=str(site.folder / f"step-{step}"))
        engine.ask("refit", info={"step": step, "timeout_s": 60.0})
        said[step] = engine.ask("generate")
    return said


def tokens_of_checkpoint(site: Site, folder: Path, tp: int = 1) -> list[list[int]]:
    engine = site.engine(folder, refits=False, tp=tp)
    try:
        said: list[list[int]] = engine.ask("generate")
        return said
    finally:
        site.end(engine)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_tied", "llama", "mixtral", "gemma3"])
def test_tokens_after_each_refit_are_those_of_its_checkpoint(site: Site, family: str) -> None:
    trainers = site.trainers(family)
    engine = site.engine(save_initial(site, trainers), refits=True)
    before = engine.ask("generate")
    engine.ask("init", info=site.info())
    said = refitted_tokens(site, trainers, engine)
    site.end(engine)
    assert said[1] != before, "training changed nothing, so equal tokens would prove nothing"
    assert len({str(tokens) for tokens in said.values()}) == STEPS
    for step in (1, STEPS):
        assert said[step] == tokens_of_checkpoint(site, site.folder / f"step-{step}"), f"step {step}"


@pytest.mark.timeout(600)
def test_two_tensor_parallel_ranks_change_together(site: Site) -> None:
    trainers = site.trainers("qwen3_moe")
    engine = site.engine(save_initial(site, trainers), refits=True, tp=2)
    engine.ask("init", info=site.info())
    said = refitted_tokens(site, trainers, engine)
    site.end(engine)
    assert said[STEPS] == tokens_of_checkpoint(site, site.folder / f"step-{STEPS}", tp=2)


WRONG = {
    "another hidden size": {"changes": {"hidden_size": 192}},
    "a missing layer": {"changes": {"num_hidden_layers": 1}},
    "renamed experts": {"rename": {".experts.": ".specialists."}},
}


@pytest.mark.timeout(600)
def test_a_wrong_model_is_refused_and_the_engine_goes_on(site: Site) -> None:
    right = site.trainers("qwen3_moe", n=1)
    engine = site.engine(save_initial(site, right), refits=True)
    before = engine.ask("generate")
    for number, (what, wrong) in enumerate(WRONG.items()):
        trainers = site.trainers("qwen3_moe", n=1, model=f"wrong-{number}", **wrong)
        all_ask(trainers, "publish", step=1)
        engine.ask("init", info=site.info(model=f"wrong-{number}"))
        with pytest.raises(ChildError):
            engine.ask("refit", info={"timeout_s": 30.0})
        site.end(trainers[0])
        assert engine.ask("generate") == before, what
    engine.ask("init", info=site.info())
    all_ask(right, "train", step=1)
    all_ask(right, "publish", step=1)
    engine.ask("refit", info={"timeout_s": 30.0})
    assert engine.ask("generate") != before
