"""What a vLLM engine does with a wrong model, a failed install, and vLLM's own trainer-side interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.children import Child, ChildError
from tests.vllm.conftest import Site, all_ask, answer


def save(site: Site, trainers: list[Child], name: str) -> Path:
    folder = site.folder / name
    all_ask(trainers, "save", folder=str(folder))
    return folder


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another hidden size": ({"changes": {"hidden_size": 192}}, "does not take published tensor"),
    "a missing layer": ({"changes": {"num_hidden_layers": 1}}, "under the floor"),
    "renamed experts": ({"rename": {".experts.": ".specialists."}}, "does not take published tensor .*specialists"),
}


@pytest.mark.timeout(900)
def test_a_wrong_model_is_refused_and_the_engine_goes_on(site: Site) -> None:
    """The wrong trainer has hung up by then: whoever read a byte of it, or only connected, would fail otherwise."""
    right = site.trainers("qwen3_moe", n=1)
    engine = site.engine(save(site, right, "initial"), refits=True)
    before = answer(engine)
    for number, (what, (wrong, message)) in enumerate(WRONG.items()):
        trainers = site.trainers("qwen3_moe", n=1, model=f"wrong-{number}", **wrong)
        all_ask(trainers, "publish", step=1)
        all_ask(trainers, "hang_up")
        engine.ask("init", info=site.info(model=f"wrong-{number}"))
        with pytest.raises(ChildError, match=message) as caught:
            engine.ask("refit", info={"timeout_s": 30.0})
        print(what, "->", str(caught.value)[:300])
        site.end(*trainers)
        assert answer(engine) == before, what
    engine.ask("init", info=site.info())
    all_ask(right, "train", step=1)
    all_ask(right, "publish", step=1)
    engine.ask("refit", info={"timeout_s": 30.0})
    assert answer(engine) == site.answer_of(save(site, right, "step-1")) != before


@pytest.mark.timeout(900)
def test_the_trainer_side_drives_a_whole_update(site: Site) -> None:
    """`send_weights` through vLLM's trainer factory: a sharded source, and any `WeightSource`. Over NIXL."""
    trainers = site.trainers("llama", n=1)
    engine = site.engine(save(site, trainers, "initial"), refits=True)
    before = engine.ask("generate")
    folder = site.folder / "sent"
    for source in ("checkpoint", "module"):
        info = {"rendezvous": site.rendezvous, "model": source, "run_id": source, "transport": "nixl"}
        engine.ask("send", source=source, info=info | {"folder": str(folder)})
        said = answer(engine)
        assert said[0] != before
    assert said == site.answer_of(folder)


@pytest.mark.timeout(900)
def test_an_install_that_fails_leaves_the_kernel_tensors_in_place_and_is_mended(site: Site) -> None:
    trainers = site.trainers("qwen3_moe", n=1)
    engine = site.engine(save(site, trainers, "initial"), refits=True)
    (before,) = engine.ask("weights")
    engine.ask("init", info=site.info())
    all_ask(trainers, "train", step=1)
    all_ask(trainers, "publish", step=1)
    step_1 = save(site, trainers, "step-1")
    engine.ask("break_next_install")
    with pytest.raises(ChildError, match="sabotaged"):
        engine.ask("refit", info={"step": 1, "timeout_s": 60.0})
    (torn,) = engine.ask("weights")
    assert torn.keys() == before.keys(), "a layer was left in its load layout"
    assert torn != before, "the install failed before it touched anything: not what this test is about"
    engine.ask("refit", info={"step": 1, "timeout_s": 60.0})
    assert answer(engine) == site.answer_of(step_1)
