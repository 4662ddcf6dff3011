"""The parts of the vLLM plug-in that need no vLLM: groups of engines, calls to several engines, workers' replies,
trainer ranks whose calls end alike."""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reshard.refit.demo.supervisor import Supervisor
from reshard.refit.engines.vllm_clients import SeveralEngines, ask_engine
from reshard.refit.engines.vllm_replies import Reply, call_worker, values_of
from reshard.refit.engines.vllm_trainer import ReshardTrainerInitInfo
from reshard.refit.engines.vllm_worker import ReshardInitInfo, group_of
from reshard.refit.errors import RefitError

ROOT = Path(__file__).resolve().parents[2]


def parallel(**changes: int) -> Any:
    sizes = {"data_parallel_size": 1, "data_parallel_index": 0, "world_size": 2, "rank": 1}
    return SimpleNamespace(**(sizes | changes))


def info(**more: Any) -> ReshardInitInfo:
    return ReshardInitInfo(rendezvous="r:1", model="m", **more)


def test_a_token_is_not_shown() -> None:
    """vLLM prints what it is given."""
    trainer = ReshardTrainerInitInfo(rank=0, world_size=1, rendezvous="r:1", model="m", run_id="r", token="hunter2")
    for told in (info(token="hunter2"), trainer):
        assert told.token == "hunter2"
        assert "hunter2" not in repr(told)
    assert trainer.of_engine()["token"] == "hunter2"


# what vLLM says of a worker (over `parallel`'s), what `init_info` says, group, number of members, this one
GROUPS = [
    ({}, {}, "vllm", 2, "vllm/rank1"),
    ({"data_parallel_index": 1}, {}, "vllm/dp1", 2, "vllm/dp1/rank1"),
    ({"data_parallel_size": 2, "data_parallel_index": 1}, {}, "vllm", 4, "vllm/engine0/dp1/rank1"),
    ({"data_parallel_index": 2}, {"engines": 3}, "vllm", 6, "vllm/engine2/dp0/rank1"),
    ({}, {"engines": 3, "engine": 1, "group": "g"}, "g", 6, "g/engine1/dp0/rank1"),
    ({"data_parallel_size": 2}, {"engines": 2, "engine": 1}, "vllm", 8, "vllm/engine1/dp0/rank1"),
]


@pytest.mark.parametrize(("vllm", "given", "group", "n_members", "member"), GROUPS)
def test_groups(vllm: dict[str, int], given: dict[str, Any], group: str, n_members: int, member: str) -> None:
    name, members, me = group_of(info(**given), parallel(**vllm))
    assert (name, len(members), me) == (group, n_members, member)
    assert len(set(members)) == n_members
    assert me in members


def test_all_workers_of_a_group_name_the_same_members() -> None:
    said = [
        group_of(info(engines=2, engine=e), parallel(data_parallel_size=2, data_parallel_index=d, rank=r))
        for e in range(2)
        for d in range(2)
        for r in range(2)
    ]
    assert len({(group, members) for group, members, _ in said}) == 1
    assert tuple(member for _, _, member in said) == said[0][1]


def test_an_engine_outside_its_group_is_refused() -> None:
    with pytest.raises(RefitError, match=r"replica 2 is not in \[0, 2\)"):
        group_of(info(engines=2), parallel(data_parallel_index=2))
    with pytest.raises(RefitError, match="engines=2 without engine"):
        group_of(info(engines=2), parallel(data_parallel_size=2))
    with pytest.raises(ValueError, match=r"engine=2: expected one in \[0, 2\)"):
        info(engines=2, engine=2)
    with pytest.raises(ValueError, match="engines=0: expected 1 or more"):
        info(engines=0)


class Client:
    """Its ``update_weights`` returns once as many clients are in theirs as the barrier wants."""

    def __init__(self, barrier: threading.Barrier, fails: str = "") -> None:
        self.barrier, self.fails = barrier, fails
        self.calls: list[object] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(init_info)

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update_info: Any) -> None:
        self.barrier.wait(10)
        self._call("update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise OSError("no route")


def test_each_call_goes_to_all_engines_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    clients = [Client(barrier) for _ in range(3)]
    several = SeveralEngines(clients)
    several.init_weight_transfer_engine({"model": "m"})
    several.start_weight_update()
    several.update_weights({"step": 1})
    several.finish_weight_update("1")
    for e, client in enumerate(clients):
        assert client.calls == [{"model": "m", "engine": e, "engines": 3}, "start", "update", "finish"]
    with pytest.raises(ValueError, match="clients is empty"):
        SeveralEngines([])


@pytest.mark.parametrize("fails", ["start", "update"])
def test_an_error_names_its_engine(fails: str) -> None:
    barrier = threading.Barrier(2)
    clients = [Client(barrier), Client(barrier, fails)]
    several = SeveralEngines(clients)
    message = f"{fails}.* failed on 1 of 2 engines: engine 1: OSError: no route"

    def drive() -> None:
        several.start_weight_update()
        several.update_weights({})

    with pytest.raises(RefitError, match=message) as told:
        drive()
    assert isinstance(told.value.__cause__, OSError)
    if fails == "start":  # the engine that had opened an update has closed it
        assert clients[0].calls == ["start", "finish"]


def test_an_http_error_says_what_the_server_said() -> None:
    def refused() -> None:
        error = OSError("500 Server Error")
        error.response = SimpleNamespace(text="step 9 is gone")  # type: ignore[attr-defined]
        raise error

    with pytest.raises(RefitError, match="update_weights: 500 Server Error: step 9 is gone") as told:
        ask_engine("update_weights", refused)
    assert isinstance(told.value.__cause__, OSError)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the ranks talk over torch.distributed")
def test_a_call_ends_alike_on_all_trainer_ranks(tmp_path: Path) -> None:
    """Nobody returns before the engine has the weights, and what fails on one rank is an error on all."""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with Supervisor(("torch.distributed",), tmp_path, environment=environment) as supervisor:
        ranks = [
            supervisor.start(
                f"rank-{rank}",
                "tests.refit.vllm_rank_workers:run_rank",
                {"rank": rank, "world": 2, "store": str(tmp_path / "store"), "done": str(tmp_path / "done")},
            )
            for rank in range(2)
        ]
        first, second = supervisor.wait(ranks, timeout_s=50).values()
    failed = "PublishError: publishing step 3 failed on 1 of 2 trainer ranks: rank 1: ValueError: no room"
    assert first == {"waited": True, "told": failed, "alone": ""}
    own = "ValueError: no room"
    assert second == {"waited": True, "told": own, "alone": own}


def test_replies_of_workers() -> None:
    class Worker:
        def update_weights(self, step: int) -> int:
            if step < 0:
                raise ValueError(f"step={step}")
            return step

    replies = [call_worker("update_weights", Worker(), step=step) for step in (3, -1, -2)]
    assert replies == [Reply(None, 3), Reply("ValueError: step=-1", None), Reply("ValueError: step=-2", None)]
    assert values_of("update_weights", replies[:1]) == [3]
    failed = "update_weights failed on 2 of 3 workers: worker 1: ValueError: step=-1; worker 2: ValueError: step=-2"
    with pytest.raises(RefitError, match=failed):
        values_of("update_weights", replies)
