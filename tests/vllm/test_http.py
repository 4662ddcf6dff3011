"""vLLM's HTTP server and its RLHF routes, driven by our trainer side and by plain requests.

The server has a draft model, which stays at version 0: it guesses tokens and must not change them.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.vllm.children import ROOT, Child, ChildError, Hosts
from tests.vllm.conftest import TRANSPORT, VLLM_ENV, Site, all_ask
from tests.vllm.server import HTTPFailure, Server

PROMPT = [1, 2, 3, 5, 8, 13]
N_TOKENS = 16
OPTIONS = (
    *("--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out"),
    *("--dtype", "float32", "--max-model-len", "64", "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32"),
    *("--weight-transfer-config", '{"backend":"reshard"}'),
)
LLM = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
pytestmark = pytest.mark.timeout(900)


@dataclass
class Served:
    site: Site
    sender: Child
    server: Server
    tokens: dict[int, list[int]]
    """Of each version; those of 0 by the server as it started from its checkpoint, those of 1 by an engine that did."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, hosts: Hosts) -> Iterator[Served]:
    from reshard.rendezvous.service import serve

    with serve(listen="127.0.0.1:0") as rendezvous:
        site = Site(tmp_path_factory.mktemp("http"), rendezvous.address, hosts)
        server: Server | None = None
        try:
            arguments = {"family": "qwen3_tied", "store": str(site.folder)}
            arguments |= {"rendezvous": site.rendezvous, "transport": TRANSPORT}
            (sender,) = site._start("tests.vllm.sender", [("sender", arguments)], {"OMP_NUM_THREADS": "1"})
            folders = [site.folder / str(version) for version in range(2)]
            for version, folder in enumerate(folders):
                sender.ask("save", number=version, folder=str(folder))
            draft = {"method": "draft_model", "model": str(folders[0]), "num_speculative_tokens": 2}
            options = (*OPTIONS, "--speculative-config", json.dumps(draft))
            server = Server(folders[0], site.folder, VLLM_ENV | {"VLLM_SERVER_DEV_MODE": "1"}, options)
            started = ("started", {"checkpoint": str(folders[1]), "llm": LLM})
            (engine,) = site._start("tests.vllm.serving", [started], VLLM_ENV)
            server.wait(120)
            (said,) = engine.ask("say", prompts=[PROMPT], n_tokens=N_TOKENS)
            site.end(engine)
            yield Served(site, sender, server, {0: server.say(PROMPT, N_TOKENS), 1: said})
        finally:
            if server is not None:
                server.close()
            site.close()


def test_the_trainer_side_drives_the_routes(served: Served) -> None:
    """`WeightTransferTrainerFactory.trainer_init` and `send_weights` over vLLM's `HTTPVLLMWeightSyncClient`."""
    assert served.tokens[0] != served.tokens[1]
    served.sender.ask("connect", model="sent", urls=[served.server.url])
    for step, number in enumerate((1, 0), start=1):
        served.server.post("pause", mode="keep")
        assert served.server.get("is_paused") == {"is_paused": True}
        served.sender.ask("send", model="sent", number=number)
        assert served.server.get("weight_info") == {"weight_version": f"0:{step}"}
        served.server.post("resume")
        assert served.server.say(PROMPT, N_TOKENS) == served.tokens[number]
    served.sender.ask("disconnect", model="sent")


def test_sharded_ranks_send_together(served: Served) -> None:
    """FSDP2 ranks: none goes on before the engine has read all of them, so each may leave at once; errors reach all."""
    ranks = served.site.trainers("qwen3_tied", n=2)
    all_ask(ranks, "connect", url=served.server.url, model="sharded")
    all_ask(ranks, "load", folder=str(served.site.folder / "1"))
    all_ask(ranks, "send")
    served.server.post("reset_prefix_cache")
    assert served.server.say(PROMPT, N_TOKENS) == served.tokens[1]
    served.server.post("start_weight_update")
    for rank in ranks:
        rank.post("send")
    own = "start_weight_update: 500 .*already active"
    others = f"update to step 2 failed on 1 of 2 trainer ranks: rank 0: .*{own}"
    for rank, told in zip(ranks, (own, others), strict=True):
        with pytest.raises(ChildError, match=told):
            rank.result(120)
    served.server.post("finish_weight_update")
    all_ask(ranks, "load", folder=str(served.site.folder / "0"))
    all_ask(ranks, "send_and_leave")
    served.server.post("reset_prefix_cache")
    assert served.server.get("weight_info") == {"weight_version": "0:3"}
    assert served.server.say(PROMPT, N_TOKENS) == served.tokens[0]
    served.site.end(*ranks)


def test_plain_requests_drive_the_routes(served: Served) -> None:
    server = served.server
    server.post("init_weight_transfer_engine", {"init_info": served.site.info()})
    for step, number in enumerate((1, 0), start=1):
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
    assert server.say(PROMPT, N_TOKENS) == served.tokens[0]


def test_the_documented_commands(served: Served) -> None:
    """docs/vllm.md's lines for a shell, run as they are but for addresses, the model's name and the transport."""
    (documented,) = re.findall(r"```sh\n(post\(\).*?)```", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL)
    shown = {"http://engine:8000": served.server.url, "trainer-host:7070": served.site.rendezvous}
    shown['"policy"'] = f'"shown", "transport": "{TRANSPORT}"'
    for step, number in ((12, 1), (13, 0)):
        served.sender.ask("publish", step=step, number=number, model="shown")
        commands = documented.replace("12", str(step))
        for name, value in shown.items():
            assert name in commands
            commands = commands.replace(name, value)
        run = ["bash", "-e", "-c", commands]
        done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert served.server.get("weight_info") == {"weight_version": f"step {step}"}
        assert served.server.say(PROMPT, N_TOKENS) == served.tokens[number]


WRONG_UPDATES = {
    "a step that nobody published": ({"step": 77, "timeout_s": 2.0}, "step 77"),
    "a part of a version": ({"only": ["model.layers.0.*"]}, "unexpected keyword argument 'only'"),
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
    served.sender.ask("publish", step=1, number=1, model="short", changes={"num_hidden_layers": 1})
    server.post("init_weight_transfer_engine", {"init_info": served.site.info(model="short")})
    server.post("start_weight_update")
    with pytest.raises(HTTPFailure, match="under the floor"):
        server.post("update_weights", {"update_info": {"timeout_s": 20.0}})
    assert server.say(PROMPT, N_TOKENS) == before
    server.post("init_weight_transfer_engine", {"init_info": served.site.info(model="other")})
    server.post("start_weight_update")
    server.post("update_weights", {"update_info": {"timeout_s": 60.0}})
    server.post("finish_weight_update")
    server.post("reset_prefix_cache")
    assert server.say(PROMPT, N_TOKENS) == served.tokens[1]


def test_an_error_reaches_the_trainer(served: Served) -> None:
    """What the engine refuses makes `trainer_init` raise, with vLLM's status."""
    with pytest.raises(ChildError, match=r"500 Server Error.*verify='perhaps'"):
        served.sender.ask("connect", model="sent", urls=[served.server.url], options={"verify": "perhaps"})
    served.server.get("health")


def test_an_update_of_the_draft_model_is_refused(served: Served) -> None:
    with pytest.raises(HTTPFailure, match="does not support draft model weight updates"):
        served.server.post("start_draft_weight_update")
