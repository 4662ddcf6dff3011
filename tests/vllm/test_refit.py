"""A vLLM engine that was refitted says what a vLLM started from the same step's checkpoint says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.children import Child, ChildError
from tests.vllm.conftest import TRANSPORT, Site, all_ask

STEPS = 3


def save_initial(site: Site, trainers: list[Child]) -> Path:
    folder = site.folder / "initial"
    all_ask(trainers, "save", folder=str(folder))
    return folder


def refitted(site: Site, trainers: list[Child], engine: Child) -> dict[int, Answer]:
    """Three refits with optimizer steps between; what the engine says and holds after each."""
    said = {}
    for step in range(1, STEPS + 1):
        all_ask(trainers, "train", step=step)
        all_ask(trainers, "publish", step=step)
        all_ask(trainers, "save", folder=str(site.folder / f"step-{step}"))
        engine.ask("refit", info={"step": step, "timeout_s": 60.0})
        said[step] = answer(engine)
    return said


Answer = tuple[list[list[int]], list[dict[str, str]]]
"""The tokens, and a digest of each tensor that serves, in its kernel's layout, rank by rank."""


def answer(engine: Child) -> Answer:
    return engine.ask("generate"), engine.ask("weights")


def answer_of_checkpoint(site: Site, folder: Path, tp: int = 1) -> Answer:
    engine = site.engine(folder, refits=False, tp=tp)
    try:
        return answer(engine)
    finally:
        site.end(engine)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_tied", "llama", "mixtral", "gemma3"])
def test_tokens_after_each_refit_are_those_of_its_checkpoint(site: Site, family: str) -> None:
    trainers = site.trainers(family)
    engine = site.engine(save_initial(site, trainers), refits=True)
    before = answer(engine)
    engine.ask("init", info=site.info())
    said = refitted(site, trainers, engine)
    site.end(engine)
    tokens = [before[0], *(said[step][0] for step in said)]
    assert len({str(t) for t in tokens}) == 1 + STEPS, "an optimizer step changed no token, so equal ones prove nothing"
    for step in (1, STEPS):
        assert said[step] == answer_of_checkpoint(site, site.folder / f"step-{step}"), f"step {step}"


@pytest.mark.timeout(600)
def test_a_loader_that_computes_with_values(site: Site) -> None:
    """Mamba's ``A_log`` is exponentiated on the way in. The CPU build cannot run the model: its bytes are compared."""
    trainers = site.trainers("mamba")
    engine = site.engine(save_initial(site, trainers), refits=True)
    before = engine.ask("weights")
    engine.ask("init", info=site.info())
    all_ask(trainers, "train", step=1)
    all_ask(trainers, "publish", step=1)
    all_ask(trainers, "save", folder=str(site.folder / "step-1"))
    engine.ask("refit", info={"step": 1, "timeout_s": 60.0})
    after = engine.ask("weights")
    site.end(engine)
    assert after != before
    started = site.engine(site.folder / "step-1", refits=False)
    assert after == started.ask("weights")


@pytest.mark.timeout(600)
def test_two_tensor_parallel_ranks_change_together(site: Site) -> None:
    trainers = site.trainers("qwen3_moe")
    engine = site.engine(save_initial(site, trainers), refits=True, tp=2)
    engine.ask("init", info=site.info())
    said = refitted(site, trainers, engine)
    site.end(engine)
    assert said[STEPS] == answer_of_checkpoint(site, site.folder / f"step-{STEPS}", tp=2)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another hidden size": ({"changes": {"hidden_size": 192}}, "does not take published tensor"),
    "a missing layer": ({"changes": {"num_hidden_layers": 1}}, "under the floor"),
    "renamed experts": ({"rename": {".experts.": ".specialists."}}, "does not take published tensor .*specialists"),
}


@pytest.mark.timeout(600)
def test_a_wrong_model_is_refused_and_the_engine_goes_on(site: Site) -> None:
    right = site.trainers("qwen3_moe", n=1)
    engine = site.engine(save_initial(site, right), refits=True)
    before = engine.ask("generate")
    for number, (what, (wrong, message)) in enumerate(WRONG.items()):
        trainers = site.trainers("qwen3_moe", n=1, model=f"wrong-{number}", **wrong)
        all_ask(trainers, "publish", step=1)
        engine.ask("init", info=site.info(model=f"wrong-{number}"))
        with pytest.raises(ChildError, match=message) as caught:
            engine.ask("refit", info={"timeout_s": 30.0})
        print(what, "->", str(caught.value)[:300])
        site.end(trainers[0])
        assert engine.ask("generate") == before, what
    engine.ask("init", info=site.info())
    all_ask(right, "train", step=1)
    all_ask(right, "publish", step=1)
    engine.ask("refit", info={"timeout_s": 30.0})
    assert engine.ask("generate") != before


@pytest.mark.timeout(600)
def test_the_trainer_side_drives_a_whole_update(site: Site) -> None:
    """`send_weights` through vLLM's trainer factory: a sharded source, and any `WeightSource`."""
    trainers = site.trainers("llama", n=1)
    engine = site.engine(save_initial(site, trainers), refits=True)
    before = engine.ask("generate")
    folder = site.folder / "sent"
    for source in ("checkpoint", "module"):
        info = {"rendezvous": site.rendezvous, "model": source, "run_id": source, "transport": TRANSPORT}
        engine.ask("send", source=source, info=info | {"folder": str(folder)})
        said = answer(engine)
        assert said[0] != before
    site.end(engine)
    assert said == answer_of_checkpoint(site, folder)


@pytest.mark.timeout(600)
def test_an_install_that_fails_leaves_the_kernel_tensors_in_place_and_is_mended(site: Site) -> None:
    trainers = site.trainers("qwen3_moe", n=1)
    engine = site.engine(save_initial(site, trainers), refits=True)
    (before,) = engine.ask("weights")
    engine.ask("init", info=site.info())
    all_ask(trainers, "train", step=1)
    all_ask(trainers, "publish", step=1)
    all_ask(trainers, "save", folder=str(site.folder / "step-1"))
    engine.ask("break_next_install")
    with pytest.raises(ChildError, match="sabotaged"):
        engine.ask("refit", info={"step": 1, "timeout_s": 60.0})
    (torn,) = engine.ask("weights")
    assert torn.keys() == before.keys(), "a layer was left in its load layout"
    assert torn != before, "the install failed before it touched anything: not what this test is about"
    engine.ask("refit", info={"step": 1, "timeout_s": 60.0})
    mended = answer(engine)
    site.end(engine)
    assert mended == answer_of_checkpoint(site, site.folder / "step-1")
