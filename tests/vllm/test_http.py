"""vLLM's HTTP server and its RLHF routes, driven by our trainer side and by plain requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.vllm.children import Child, ChildError
from tests.vllm.conftest import TRANSPORT, VLLM_ENV, Site
from tests.vllm.server import HTTPFailure, Server

PROMPT = [1, 2, 3, 5, 8, 13]
N_TOKENS = 16
OPTIONS = (
    *("--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out"),
    *("--dtype", "float32", "--max-model-len", "64", "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32"),
    *("--weight-transfer-config", '{"backend":"reshard"}'),
)
LLM = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
pytestmark = pytest.mark.timeout(300)


@dataclass
class Served:
    site: Site
    sender: Child
    server: Server
    tokens: dict[int, list[int]]
    """Of each version, as an engine that was started from its checkpoint says."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from reshard.rendezvous.service import serve

    with serve(listen="127.0.0.1:0") as rendezvous:
        site = Site(tmp_path_factory.mktemp("http"), rendezvous.address)
        server: Server | None = None
        try:
            arguments = {"family": "qwen3_tied", "store": str(site.folder)}
            arguments |= {"rendezvous": site.rendezvous, "transport": TRANSPORT}
            (sender,) = site._start("tests.vllm.sender", [("sender", arguments)], {"OMP_NUM_THREADS": "1"})
            folders = [site.folder / str(version) for version in range(3)]
            for version, folder in enumerate(folders):
                sender.ask("save", number=version, folder=str(folder))
            server = Server(folders[0], site.folder, VLLM_ENV | {"VLLM_SERVER_DEV_MODE": "1"}, OPTIONS)
            started = [(f"started-{v}", {"checkpoint": str(folders[v]), "llm": LLM}) for v in (1, 2)]
            engines = site._start("tests.vllm.serving", started, VLLM_ENV)
            server.wait(120)
            said = [engine.ask("say", prompts=[PROMPT], n_tokens=N_TOKENS)[0] for engine in engines]
            site.end(engines[0])
            site.end(engines[1])
            yield Served(site, sender, server, {0: server.say(PROMPT, N_TOKENS), 1: said[0], 2: said[1]})
        finally:
            if server is not None:
                server.close()
            for child in site.children:
                child.close()


def test_the_trainer_side_drives_the_routes(served: Served) -> None:
    """`WeightTransferTrainerFactory.trainer_init` and `send_weights` over vLLM's `HTTPVLLMWeightSyncClient`."""
    assert len({str(t) for t in served.tokens.values()}) == 3
    served.sender.ask("connect", model="sent", urls=[served.server.url])
    for number in (1, 2):
        served.server.post("pause", mode="keep")
        assert served.server.get("is_paused") == {"is_paused": True}
        served.sender.ask("send", model="sent", number=number)
        assert served.server.get("weight_info") == {"weight_version": f"0:{number}"}
        served.server.post("resume")
        assert served.server.say(PROMPT, N_TOKENS) == served.tokens[number]
    served.sender.ask("disconnect", model="sent")


def test_plain_requests_drive_the_routes(served: Served) -> None:
    server = served.server
    server.post("init_weight_transfer_engine", {"init_info": served.site.info()})
    for step, number in enumerate((1, 2), start=1):
        served.sender.ask("publish", step=step, number=number, model="policy")
        server.post("pause", mode="abort")
        server.post("start_weight_update")
        server.post("update_weights", {"update_info": {"step": step, "timeout_s": 60.0}})
        server.post("finish_weight_update", {"weight_version": f"step {step}"})
        server.post("resume")
        assert server.get("weight_info") == {"weight_version": f"step {step}"}
        assert server.say(PROMPT, N_TOKENS) == served.tokens[number]
    server.post("shutdown_weight_transfer_engine")
    server.post("start_weight_update")
    with pytest.raises(HTTPFailure, match="update_weights before init_weight_transfer_engine") as told:
        server.post("update_weights", {"update_info": {}})
    assert told.value.status == 500
    assert server.say(PROMPT, N_TOKENS) == served.tokens[2]


WRONG_UPDATES = {
    "a step that nobody published": ({"step": 77, "timeout_s": 2.0}, "step 77"),
    "another key": ({"stepp": 1}, "unexpected keyword argument 'stepp'"),
    "an epoch alone": ({"epoch": 1}, "epoch=1 without a step"),
}


def test_a_wrong_update_is_an_http_error_and_the_server_goes_on(served: Served) -> None:
    server = served.server
    with pytest.raises(HTTPFailure, match="rendezvous is empty") as told:
        server.post("init_weight_transfer_engine", {"init_info": {"rendezvous": "", "model": "policy"}})
    assert told.value.status == 500
    server.post("init_weight_transfer_engine", {"init_info": served.site.info(model="other")})
    served.sender.ask("publish", step=1, number=1, model="other")
    before = server.say(PROMPT, N_TOKENS)
    for what, (update, message) in WRONG_UPDATES.items():
        server.post("start_weight_update")
        with pytest.raises(HTTPFailure, match=message) as told:
            server.post("update_weights", {"update_info": update})
        assert told.value.status == 500, what
        assert server.say(PROMPT, N_TOKENS) == before, what
    server.post("start_weight_update")
    server.post("update_weights", {"update_info": {"timeout_s": 60.0}})
    server.post("finish_weight_update")
    server.post("reset_prefix_cache")
    assert server.say(PROMPT, N_TOKENS) == served.tokens[1]


def test_an_error_reaches_the_trainer(served: Served) -> None:
    """A model of another shape is refused, through the client, with vLLM's status."""
    with pytest.raises(ChildError, match="500 Server Error"):
        served.sender.ask("connect", model="sent", urls=[served.server.url], options={"verify": "perhaps"})
    served.server.get("health")


def test_a_draft_model_is_refused(served: Served) -> None:
    with pytest.raises(HTTPFailure, match="does not support draft model weight updates"):
        served.server.post("start_draft_weight_update")
