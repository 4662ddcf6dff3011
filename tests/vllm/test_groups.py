"""Several engines in one group take a version together or not at all; their calls are made at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.vllm.children import Child
from tests.vllm.conftest import TRANSPORT, VLLM_ENV, Site

from reshard.refit.engines.vllm_clients import SeveralEngines
from reshard.refit.errors import RefitError

PROMPTS = [[1, 2, 3, 5, 8, 13], [508, 7, 412]]
N_TOKENS = 16
LLM = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
pytestmark = pytest.mark.timeout(300)


class ChildClient:
    """vLLM's ``VLLMWeightSyncClient`` over an engine under test."""

    def __init__(self, engine: Child) -> None:
        self.engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.ask("init", info=init_info)

    def start_weight_update(self) -> None:
        self.engine.ask("start")

    def update_weights(self, update_info: Any) -> None:
        self.engine.ask("update", info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.ask("finish", version=weight_version)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Child, list[Child]]]:
    from reshard.rendezvous.service import serve

    with serve(listen="127.0.0.1:0") as server:
        site = Site(tmp_path_factory.mktemp("groups"), server.address)
        try:
            arguments = {"family": "qwen3_tied", "store": str(site.folder)}
            arguments |= {"rendezvous": site.rendezvous, "transport": TRANSPORT}
            (sender,) = site._start("tests.vllm.sender", [("sender", arguments)], {"OMP_NUM_THREADS": "1"})
            for version in (0, 1):
                sender.ask("save", number=version, folder=str(site.folder / str(version)))
            served = {"checkpoint": str(site.folder / "0"), "refits": True, "llm": LLM}
            new = {"checkpoint": str(site.folder / "1"), "llm": LLM}
            wanted = [("engine-0", served), ("engine-1", served), ("new", new)]
            yield site, sender, site._start("tests.vllm.serving", wanted, VLLM_ENV)
        finally:
            for child in site.children:
                child.close()


def say(engine: Child) -> Any:
    return engine.ask("say", prompts=PROMPTS, n_tokens=N_TOKENS)


def test_two_engines_take_a_version_together_or_not_at_all(engines: tuple[Site, Child, list[Child]]) -> None:
    site, sender, (first, second, started) = engines
    old, new = say(first), say(started)
    assert say(second) == old != new
    sender.ask("publish", step=1, number=1, model="policy")
    several = SeveralEngines([ChildClient(first), ChildClient(second)])
    several.init_weight_transfer_engine(site.info())

    alone = ChildClient(first)
    alone.start_weight_update()
    with pytest.raises(Exception, match=r"ABORT|did not vote|missing") as told:
        alone.update_weights({"step": 1, "timeout_s": 6.0})
    print(told.value)
    assert say(first) == say(second) == old

    several.start_weight_update()
    several.update_weights({"step": 1, "timeout_s": 60.0})
    several.finish_weight_update("1")
    assert say(first) == say(second) == new

    several.start_weight_update()
    with pytest.raises(
        RefitError, match=r"update_weights failed on 2 of 2 engines: engine 0: .*step 9.*engine 1: .*step 9"
    ):
        several.update_weights({"step": 9, "timeout_s": 2.0})
    assert say(first) == say(second) == new


def test_an_update_is_opened_on_all_engines_or_on_none(engines: tuple[Site, Child, list[Child]]) -> None:
    _, _, (first, second, _) = engines
    second.ask("start")
    several = SeveralEngines([ChildClient(first), ChildClient(second)])
    with pytest.raises(RefitError, match=r"start_weight_update failed on 1 of 2 engines: engine 1: .*already active"):
        several.start_weight_update()
    second.ask("finish")
    several.start_weight_update()
    several.finish_weight_update()
