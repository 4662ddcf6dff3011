"""Several engines in one group take a version together or not at all; their calls are made at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.vllm.children import Child, ChildError
from tests.vllm.conftest import TRANSPORT, VLLM_ENV, Site

from reshard.refit.engines.vllm_clients import SeveralEngines
from reshard.refit.errors import RefitError

PROMPTS = [[1, 2, 3, 5, 8, 13], [508, 7, 412]]
N_TOKENS = 16
LLM = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
pytestmark = pytest.mark.timeout(900)


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
            sender.ask("save", number=0, folder=str(site.folder / "0"))
            served = {"checkpoint": str(site.folder / "0"), "refits": True, "llm": LLM}
            wanted = [("engine-0", served), ("engine-1", served)]
            yield site, sender, site._start("tests.vllm.serving", wanted, VLLM_ENV)
        finally:
            for child in site.children:
                child.close()


def say(engine: Child) -> Any:
    return engine.ask("say", prompts=PROMPTS, n_tokens=N_TOKENS)


def test_two_engines_take_a_version_together_or_not_at_all(engines: tuple[Site, Child, list[Child]]) -> None:
    site, sender, (first, second) = engines
    old = say(first)
    assert say(second) == old
    sender.ask("publish", step=1, number=1, model="policy")
    several = SeveralEngines([ChildClient(first), ChildClient(second)])
    several.init_weight_transfer_engine(site.info())

    alone = ChildClient(first)
    alone.start_weight_update()
    with pytest.raises(ChildError, match=r"without the votes of \['vllm/engine1/dp0/rank0'\]; the old weights"):
        alone.update_weights({"step": 1, "timeout_s": 10.0})
    assert say(first) == say(second) == old

    update(several, 1)
    new = say(first)
    assert say(second) == new != old

    several.start_weight_update()
    failed = r"update_weights failed on 2 of 2 engines: engine 0: .*step 9.*engine 1: .*step 9"
    with pytest.raises(RefitError, match=failed):
        several.update_weights({"step": 9, "timeout_s": 2.0})
    assert say(first) == say(second) == new

    sender.ask("publish", step=2, number=0, model="policy")  # what vLLM loaded from the checkpoint
    update(several, 2)
    assert say(first) == say(second) == old


def test_an_update_is_opened_on_all_engines_or_on_none(engines: tuple[Site, Child, list[Child]]) -> None:
    _, _, (first, second) = engines
    second.ask("start")
    several = SeveralEngines([ChildClient(first), ChildClient(second)])
    with pytest.raises(RefitError, match=r"start_weight_update failed on 1 of 2 engines: engine 1: .*already active"):
        several.start_weight_update()
    second.ask("finish")
    several.start_weight_update()
    several.finish_weight_update()


def test_a_quarantined_group_is_mended_and_serves_nothing_until_then(engines: tuple[Site, Child, list[Child]]) -> None:
    """One engine cannot install what both have agreed on. Ends both engines, so it is the last test here."""
    site, sender, (first, second) = engines
    several = SeveralEngines([ChildClient(first), ChildClient(second)])
    several.init_weight_transfer_engine(site.info(model="torn", group="torn"))
    sender.ask("publish", step=1, number=0, model="torn")
    update(several, 1)
    old = say(first)
    sender.ask("publish", step=2, number=1, model="torn")
    for engine in (first, second):
        engine.ask("pause", mode="abort")
    torn = r"failed on 2 of 2 engines: engine 0: .*sabotaged.*engine 1: .*did not finish installing"
    first.ask("break_next_install")
    several.start_weight_update()
    with pytest.raises(RefitError, match=torn):
        several.update_weights({"step": 2, "timeout_s": 20.0})
    update(several, 2)
    for engine in (first, second):
        engine.ask("resume")
    new = say(first)
    assert say(second) == new != old

    first.ask("break_next_install")
    sender.ask("publish", step=3, number=0, model="torn")
    several.start_weight_update()
    with pytest.raises(RefitError, match=torn):
        several.update_weights({"step": 3, "timeout_s": 20.0})
    for engine in (first, second):  # vLLM ends an engine whose step raises
        engine.ask("begin", prompts={"torn": PROMPTS[0]}, n_tokens=1)
        request = engine.ask("end")["torn"]
        assert request["tokens"] == []
        assert "EngineDeadError" in request["error"]
        assert "is quarantined: it serves nothing until a refit completes" in engine.log.read_text(errors="replace")


def update(several: SeveralEngines, step: int) -> None:
    several.start_weight_update()
    several.update_weights({"step": step, "timeout_s": 60.0})
    several.finish_weight_update(str(step))
