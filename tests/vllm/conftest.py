"""What a test here needs: a rendezvous service, trainer ranks and vLLM engines as child processes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.children import Child

TRANSPORT = os.environ.get("RESHARD_TEST_VLLM_TRANSPORT", "auto")
VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for `apply_model`, by which the tests look at the weights
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.vllm)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; run `make test-vllm`"))


class Site:
    """One test's processes."""

    def __init__(self, folder: Path, rendezvous: str) -> None:
        self.folder, self.rendezvous = folder, rendezvous
        self.children: list[Child] = []
        self._numbers = itertools.count()

    def trainers(self, family: str, n: int = 2, *, model: str = "policy", **more: Any) -> list[Child]:
        run = next(self._numbers)
        made = []
        for rank in range(n):
            arguments = {
                "rank": rank,
                "n": n,
                "store": str(self.folder / f"store-{run}"),
                "seed": 7,
                "family": family,
                "rendezvous": self.rendezvous,
                "transport": TRANSPORT,
                "model": model,
                **more,
            }
            made.append((f"trainer{run}-{rank}", arguments))
        return self._start("tests.vllm.trainer", made, {"OMP_NUM_THREADS": "1"})

    def engine(self, checkpoint: Path, *, refits: bool, tp: int = 1, **more: Any) -> Child:
        env = VLLM_ENV | ({"VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[:tp])} if tp > 1 else {})
        llm = {"tensor_parallel_size": tp} | more
        arguments = {"checkpoint": str(checkpoint), "refits": refits, "llm": llm}
        (engine,) = self._start("tests.vllm.engine", [(f"engine{next(self._numbers)}", arguments)], env)
        return engine

    def info(self, **more: Any) -> dict[str, Any]:
        return {"rendezvous": self.rendezvous, "model": "policy", "transport": TRANSPORT, **more}

    def end(self, child: Child) -> None:
        self.children.remove(child)
        child.close()

    def _start(self, module: str, named: list[tuple[str, dict[str, Any]]], env: dict[str, str]) -> list[Child]:
        made = []
        for name, arguments in named:
            path = self.folder / f"{name}.json"
            path.write_text(json.dumps(arguments))
            made.append(Child(module, self.folder, name, env, str(path)))
            self.children.append(made[-1])
        for child in made:
            child.accept(180)
        return made


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from reshard.rendezvous.service import serve

    with serve(listen="127.0.0.1:0") as server:
        made = Site(tmp_path_factory.mktemp("v"), server.address)
        try:
            yield made
        finally:
            for child in made.children:
                child.close()


def all_ask(children: list[Child], command: str, **arguments: Any) -> list[Any]:
    for child in children:
        child.post(command, **arguments)
    return [child.result(120) for child in children]
