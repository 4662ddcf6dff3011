"""What a test here needs: a rendezvous service, trainer ranks and vLLM engines as child processes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.ports import lasting_port
from tests.vllm.children import Child, Hosts

TRANSPORT = os.environ.get("RESHARD_TEST_VLLM_TRANSPORT", "memory")
VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for `apply_model`, by which the tests look at the weights
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each engine of one worker is bound to the same core
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

Answer = tuple[list[list[int]], list[dict[str, str]]]
"""The tokens, and a digest of each tensor that serves, in its kernel's layout, rank by rank."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.vllm)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; run `make test-vllm`"))


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("h"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def port() -> int:
    """A port by which the ranks of an engine that runs in several of our children find each other, time and again."""
    return lasting_port()


class Site:
    """The processes of one test, or of several that share an engine."""

    def __init__(self, folder: Path, rendezvous: str, hosts: Hosts | None = None, port: int = 0) -> None:
        self.folder, self.rendezvous = folder, rendezvous
        self.children: list[Child] = []
        self._hosts, self._port = hosts, port
        self._hosted: list[Child] = []
        self._numbers = itertools.count()

    @property
    def hosts(self) -> Hosts:
        if self._hosts is None:
            raise RuntimeError("this site was made without hosts")
        return self._hosts

    def trainers(self, family: str, n: int = 2, *, model: str = "policy", **more: Any) -> list[Child]:
        """FSDP2 ranks that train one model together."""
        shared = {
            "n": n,
            "store": str(self.folder / f"store-{next(self._numbers)}"),
            "seed": 7,
            "family": family,
            "rendezvous": self.rendezvous,
            "transport": TRANSPORT,
            "model": model,
            **more,
        }
        # A process keeps its rank from use to use: torch caches what a mesh means to a rank by the mesh alone.
        env = [{"OMP_NUM_THREADS": "1", "TRAINER_RANK": str(rank)} for rank in range(n)]
        return self._take("tests.vllm.trainer", [(env[rank], shared | {"rank": rank}) for rank in range(n)])

    def engine(self, checkpoint: Path, *, refits: bool, tp: int = 1, **more: Any) -> Child:
        """An engine as vLLM builds it by default: its core, and each tensor-parallel rank, in a process of its own."""
        (engine,) = self.engines(checkpoint, [{"tensor_parallel_size": tp} | more], refits=refits)
        return engine

    def engines(self, checkpoint: Path, each: Sequence[dict[str, Any]], *, refits: bool) -> list[Child]:
        """Several, started together: each with arguments of its own for vLLM's `LLM`."""
        shared = {"checkpoint": str(checkpoint), "refits": refits}
        return self._take("tests.vllm.engine", [(VLLM_ENV, shared | {"llm": llm}) for llm in each])

    def answer_of(self, checkpoint: Path, tp: int = 1, *, generates: bool = True) -> Answer:
        """What a vLLM started from a checkpoint says and holds; its ranks are children of ours, to save imports."""
        llm: dict[str, Any] = {"tensor_parallel_size": tp}
        ranks: list[dict[str, str]] = [{}]
        if tp > 1:
            llm["distributed_executor_backend"] = "external_launcher"
            at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
            at |= {"WORLD_SIZE": str(tp), "LOCAL_WORLD_SIZE": str(tp)}
            ranks = [at | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(tp)]
        env = VLLM_ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        arguments = {"checkpoint": str(checkpoint), "refits": False, "llm": llm}
        started = self._take("tests.vllm.engine", [(env | rank, arguments) for rank in ranks])
        tokens, *others = all_ask(started, "generate") if generates else [[]]
        assert all(other == tokens for other in others), "the ranks of one engine say different things"
        weights = [digests for of_rank in all_ask(started, "weights") for digests in of_rank]
        self.end(*started)
        return tokens, weights

    def info(self, **more: Any) -> dict[str, Any]:
        return {"rendezvous": self.rendezvous, "model": "policy", "transport": TRANSPORT, **more}

    def end(self, *children: Child) -> None:
        hosted = [child for child in children if child in self._hosted]
        for child in children:
            (self._hosted if child in self._hosted else self.children).remove(child)
            if child not in hosted:
                child.close()
        if hosted:
            self.hosts.give(hosted)

    def close(self) -> None:
        self.end(*self.children, *self._hosted)

    def _take(self, module: str, wanted: Sequence[tuple[dict[str, str], dict[str, Any]]]) -> list[Child]:
        made = self.hosts.take(module, wanted)
        self._hosted += made
        return made

    def _start(self, module: str, named: list[tuple[str, dict[str, Any]]], env: dict[str, str]) -> list[Child]:
        made = []
        for name, arguments in named:
            path = self.folder / f"{name}.json"
            path.write_text(json.dumps(arguments))
            made.append(Child(module, self.folder, name, env, str(path)))
            self.children.append(made[-1])
        for child in made:
            child.accept(300)
        return made


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, hosts: Hosts, port: int) -> Iterator[Site]:
    from reshard.rendezvous.service import serve

    with serve(listen="127.0.0.1:0") as server:
        made = Site(tmp_path_factory.mktemp("v"), server.address, hosts, port)
        try:
            yield made
        finally:
            made.close()


def all_ask(children: list[Child], command: str, **arguments: Any) -> list[Any]:
    for child in children:
        child.post(command, **arguments)
    return [child.result(120) for child in children]


def answer(engine: Child) -> Answer:
    """What an engine says and holds now."""
    return engine.ask("generate"), engine.ask("weights")
