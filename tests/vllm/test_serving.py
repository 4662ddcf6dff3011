"""What each of vLLM's pause modes does to requests in flight when the weights change, and to the prefix cache.

One engine serves all tests. It starts from version 0 and each test moves it to version 1, whose tokens come from an
engine that was started from its checkpoint. Everything is float32: tokens do not depend on how steps were batched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.vllm.children import Child, ChildError
from tests.vllm.conftest import TRANSPORT, VLLM_ENV, Site

OLD, NEW = 0, 1
N_TOKENS = 160
N_BEFORE = 40
PROMPTS = {"long": [*range(100, 170)], "short": [5, 6, 7]}
LLM = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
pytestmark = pytest.mark.timeout(900)


@dataclass
class Live:
    site: Site
    sender: Child
    engine: Child
    new: Child
    old_tokens: dict[str, list[int]]
    step: int = 0

    def publish(self, version: int) -> int:
        self.step += 1
        self.sender.ask("publish", step=self.step, number=version, model="policy")
        return self.step

    def refit(self, version: int) -> None:
        self.engine.ask("refit", info={"step": self.publish(version), "timeout_s": 60.0})

    def begin(self) -> None:
        self.engine.ask("begin", prompts=PROMPTS, n_tokens=N_TOKENS)

    def label(self, back: int = 0) -> str:
        """vLLM's weight version after the last refit, or some refits before it."""
        step = self.step - back
        return f"step {step}" if step else "default"

    def new_tokens(self, prompt: list[int], n: int) -> list[int]:
        """What an engine that was started from the new version's checkpoint says."""
        (said,) = self.new.ask("say", prompts=[prompt], n_tokens=n)
        return said


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    from reshard.rendezvous.service import serve

    with serve(listen="127.0.0.1:0") as server:
        site = Site(tmp_path_factory.mktemp("serving"), server.address)
        try:
            changes = {"max_position_embeddings": 512}
            arguments = {"family": "llama", "changes": changes, "store": str(site.folder)}
            arguments |= {"rendezvous": site.rendezvous, "transport": TRANSPORT}
            (sender,) = site._start("tests.vllm.sender", [("sender", arguments)], {"OMP_NUM_THREADS": "1"})
            for version in (OLD, NEW):
                sender.ask("save", number=version, folder=str(site.folder / str(version)))
            engines = [
                (name, {"checkpoint": str(site.folder / str(version)), "refits": version == OLD, "llm": LLM})
                for name, version in (("engine", OLD), ("new", NEW))
            ]
            engine, new = site._start("tests.vllm.serving", engines, VLLM_ENV)
            said = engine.ask("say", prompts=list(PROMPTS.values()), n_tokens=N_TOKENS)
            engine.ask("slow_down")
            engine.ask("init", info=site.info())
            yield Live(site, sender, engine, new, dict(zip(PROMPTS, said, strict=True)))
        finally:
            for child in site.children:
                child.close()


@pytest.fixture
def live(engine: Live) -> Iterator[Live]:
    yield engine
    engine.engine.ask("pause", mode="abort")
    engine.refit(OLD)
    engine.engine.ask("resume")
    engine.engine.ask("end")
    said = engine.engine.ask("say", prompts=[PROMPTS["short"]], n_tokens=N_BEFORE)
    assert said == [engine.old_tokens["short"][:N_BEFORE]], "the test left an engine that is not as it was"


def paused_refit(live: Live, mode: str, clear_cache: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pause requests in flight, refit, resume; what they had when they were paused, and what they have at the end.

    A request that comes during the pause is answered after it.
    """
    live.begin()
    live.engine.ask("pause", mode=mode, clear_cache=clear_cache, after=N_BEFORE)
    at_pause = live.engine.ask("progress")
    assert live.engine.ask("is_paused")
    live.engine.ask("begin", prompts={"late": PROMPTS["long"]}, n_tokens=N_BEFORE)
    live.refit(NEW)
    assert live.engine.ask("progress") == at_pause | {"late": EMPTY}, "something was generated during the pause"
    live.engine.ask("resume")
    return at_pause, live.engine.ask("end")


EMPTY = {"tokens": [], "finish_reason": None, "n_cached": None, "error": "", "versions": []}


@pytest.mark.parametrize("clear_cache", [True, False])
def test_abort_ends_requests_with_what_they_have(live: Live, clear_cache: bool) -> None:
    at_pause, at_end = paused_refit(live, "abort", clear_cache)
    for name, old in live.old_tokens.items():
        request = at_end[name]
        n = len(request["tokens"])
        assert N_BEFORE <= n < N_TOKENS
        assert request == at_pause[name]
        assert request["finish_reason"] == "abort"
        assert request["tokens"] == old[:n]
        assert request["versions"] == [[live.label(1), 0, n]]
    check_new(live, at_end["late"], stale=not clear_cache)


@pytest.mark.parametrize("clear_cache", [True, False])
def test_wait_ends_requests_with_the_old_weights_only(live: Live, clear_cache: bool) -> None:
    at_pause, at_end = paused_refit(live, "wait", clear_cache)
    for name, old in live.old_tokens.items():
        request = at_end[name]
        assert request == at_pause[name]
        assert request["finish_reason"] == "length"
        assert request["tokens"] == old
        assert request["versions"] == [[live.label(1), 0, N_TOKENS]]
    check_new(live, at_end["late"], stale=not clear_cache)


@pytest.mark.parametrize("clear_cache", [True, False])
def test_keep_goes_on_with_the_new_weights(live: Live, clear_cache: bool) -> None:
    """With the cache cleared what was said is computed anew; else new weights attend to the old ones' keys."""
    at_pause, at_end = paused_refit(live, "keep", clear_cache)
    for name, old in live.old_tokens.items():
        n = len(at_pause[name]["tokens"])
        request = at_end[name]
        assert N_BEFORE <= n < N_TOKENS
        assert at_pause[name]["finish_reason"] is None
        assert request["finish_reason"] == "length"
        assert request["versions"] == [[live.label(1), 0, n], [live.label(), n, N_TOKENS]]
        assert request["tokens"][:n] == old[:n]
        goes_on = live.new_tokens(PROMPTS[name] + old[:n], N_TOKENS - n)
        assert goes_on != old[n:]
        assert (request["tokens"][n:] == goes_on) is clear_cache
    if clear_cache:  # the kept request with the same prompt has put it into the cache again, by the new weights
        assert at_end["late"]["tokens"] == live.new_tokens(PROMPTS["long"], N_BEFORE)
    else:
        check_new(live, at_end["late"], stale=True)


def check_new(live: Live, request: dict[str, Any], *, stale: bool) -> None:
    """A request after the update is answered by the new weights, over the old ones' cache if that is stale."""
    new = live.new_tokens(PROMPTS["long"], N_BEFORE)
    assert new != live.old_tokens["long"][:N_BEFORE]
    assert request["finish_reason"] == "length"
    assert request["versions"] == [[live.label(), 0, N_BEFORE]]
    assert bool(request["n_cached"]) is stale
    assert (request["tokens"] == new) is not stale


def test_without_a_reset_the_prefix_cache_is_stale(live: Live) -> None:
    """`update_weights` does not touch the cache: the documented sequence does."""
    live.engine.ask("say", prompts=[PROMPTS["long"]], n_tokens=1)
    live.refit(NEW)
    check_new(live, answer(live, PROMPTS["long"]), stale=True)
    assert live.engine.ask("reset_prefix_cache")
    check_new(live, answer(live, PROMPTS["long"]), stale=False)


def test_without_a_pause_the_prefix_cache_cannot_be_reset(live: Live) -> None:
    """Requests in flight wait for the update and go on; the cache is reset only if they are computed anew."""
    live.begin()
    live.engine.ask("reached", n_tokens=N_BEFORE)
    live.refit(NEW)
    assert not live.engine.ask("reset_prefix_cache")
    assert live.engine.ask("reset_prefix_cache", running=True)
    for name, request in live.engine.ask("end").items():
        assert request["finish_reason"] == "length"
        assert request["tokens"][:N_BEFORE] == live.old_tokens[name][:N_BEFORE]
        assert request["tokens"] != live.old_tokens[name]
    assert answer(live, PROMPTS["long"])["tokens"] == live.new_tokens(PROMPTS["long"], N_BEFORE)


def answer(live: Live, prompt: list[int]) -> dict[str, Any]:
    live.engine.ask("begin", prompts={"asked": prompt}, n_tokens=N_BEFORE)
    asked: dict[str, Any] = live.engine.ask("end")["asked"]
    return asked


def test_a_refused_update_leaves_kept_requests_as_they_were(live: Live) -> None:
    live.begin()
    live.engine.ask("pause", mode="keep", after=N_BEFORE)
    with pytest.raises(ChildError, match="step 999"):
        live.engine.ask("refit", info={"step": 999, "timeout_s": 2.0})
    assert live.engine.ask("is_paused")
    live.engine.ask("resume")
    for name, request in live.engine.ask("end").items():
        assert request["finish_reason"] == "length"
        assert request["tokens"] == live.old_tokens[name]
