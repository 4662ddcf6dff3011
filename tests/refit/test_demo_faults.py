"""What happens when a refit goes wrong, over real processes: nothing is installed, and the error says who and what.

NumPy trainers and inference ranks (no torch), the rendezvous service over gRPC, and each transport that works here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="the rendezvous service needs grpcio")

from tests.refit.leftovers import orphaned_segments, segments
from tests.refit.numpy_ranks import EXPERT, LAYERS, ROWS

from reshard.refit.demo.channel import Message
from reshard.refit.demo.supervisor import Child, ChildrenFailed, Supervisor
from reshard.transports.registry import probe

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
SLOTS = ("trainer-0", "trainer-1", "trainer-2")
MEMBERS = ("inference-0", "inference-1")
WHOLE = {slot: [[name, 4 * at, 4 * at + 4] for name in LAYERS] for at, slot in enumerate(SLOTS)}
WHOLE["trainer-1"].append([EXPERT, 0, ROWS])


def both(steps: set[object]) -> dict[str, set[object]]:
    """The same on both ranks."""
    return dict.fromkeys(MEMBERS, steps)


@pytest.fixture(params=["memory", "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    if reason := probe(request.param):
        pytest.skip(f"transport {request.param}: {reason}")
    return str(request.param)


class Cluster:
    """Three trainers, two inference ranks and the service."""

    def __init__(self, supervisor: Supervisor, transport: str, held: dict[str, list[list[object]]]) -> None:
        self.supervisor = supervisor
        service = supervisor.start("rendezvous", "reshard.refit.demo.coordinator:run_rendezvous", {})
        address = supervisor.wait([service], timeout_s=30)["rendezvous"]["address"]
        common: Message = {"transport": transport, "rendezvous": address}
        self.trainers = {
            slot: supervisor.start(
                slot,
                "tests.refit.numpy_ranks:run_trainer",
                {**common, "slot": slot, "slots": list(SLOTS), "held": held[slot]},  # type: ignore[dict-item]
            )
            for slot in SLOTS
        }
        self.inference: list[Child] = [
            supervisor.start(
                member,
                "tests.refit.numpy_ranks:run_inference",
                {**common, "member": member, "members": list(MEMBERS), "timeout_s": 20.0},
            )
            for member in MEMBERS
        ]
        supervisor.wait([*self.trainers.values(), *self.inference], timeout_s=40)
        self.events: list[tuple[str, Message]] = []

    def publish(self, step: int) -> None:
        self.supervisor.ask(list(self.trainers.values()), {"do": "publish", "step": step}, timeout_s=30)

    def refit(self, step: int, **more: str) -> dict[str, Message]:
        return self.supervisor.ask(
            self.inference, {"do": "refit", "step": step, **more}, timeout_s=60, on_event=self.on_event
        )

    def on_event(self, name: str, event: Message) -> None:
        self.events.append((name, event))

    def steps(self) -> dict[str, set[object]]:
        """For each rank, which steps' weights its tensors are."""
        try:
            answers = self.supervisor.ask(self.inference, {"do": "holds"}, timeout_s=20)
        except ChildrenFailed as error:
            answers = error.answers
        found: dict[str, set[object]] = {}
        for name, answer in answers.items():
            steps = answer["steps"]
            assert isinstance(steps, dict)
            found[name] = set(steps.values())
        return found

    def stages(self) -> set[str]:
        return {str(event["stage"]) for _, event in self.events if "stage" in event}


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    before = segments()
    with Supervisor(("numpy",), tmp_path, environment=ENVIRONMENT, grace_s=20, stop_grace_s=5) as running:
        yield running
        pids = [child.pid for child in running.children.values()]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert orphaned_segments(before) == set()


@pytest.mark.slow
def test_refits_move_every_row(supervisor: Supervisor, transport: str) -> None:
    cluster = Cluster(supervisor, transport, WHOLE)  # type: ignore[arg-type]
    assert cluster.steps() == both({-1})
    for step in range(2):
        cluster.publish(step)
        answers = cluster.refit(step)
        assert {name: answer["cold"] for name, answer in answers.items()} == dict.fromkeys(MEMBERS, step == 0)
        assert cluster.steps() == both({step})


def test_a_trainer_killed_in_the_middle_of_a_refit(supervisor: Supervisor, transport: str) -> None:
    """Both ranks keep the old weights, and each of their errors names the holder that is gone."""
    cluster = Cluster(supervisor, transport, WHOLE)  # type: ignore[arg-type]
    cluster.publish(0)
    cluster.refit(0)
    cluster.publish(1)
    victim = cluster.trainers["trainer-1"]
    paused: set[str] = set()

    def on_event(name: str, event: Message) -> None:
        if "paused" in event:
            paused.add(name)
            if len(paused) == len(MEMBERS):
                victim.kill()
                for child in cluster.inference:
                    child.channel.send({"do": "go on"})

    command: Message = {"do": "refit", "step": 1, "pause_at": "read"}
    with pytest.raises(ChildrenFailed) as caught:
        supervisor.ask(cluster.inference, command, timeout_s=60, on_event=on_event)
    failures = caught.value.failures
    assert failures.keys() - {"trainer-1"} == set(MEMBERS), "its own end may be heard of after theirs"
    assert all("trainer-1" in failures[member] for member in MEMBERS), failures
    assert cluster.steps() == both({0})


def test_layer_names_used_twice_are_refused_naming_both_holders(supervisor: Supervisor) -> None:
    """N1: two pipeline stages that both call their first layer `layers.0.w`."""
    held = {**WHOLE, "trainer-2": [["layers.0.w", 0, 4], *WHOLE["trainer-2"]]}
    cluster = Cluster(supervisor, "memory", held)  # type: ignore[arg-type]
    cluster.publish(0)
    with pytest.raises(ChildrenFailed) as caught:
        cluster.refit(0)
    for member in MEMBERS:
        text = caught.value.failures[member]
        assert "layers.0.w" in text
        assert "trainer-0" in text
        assert "trainer-2" in text
    assert "read" not in cluster.stages()
    assert cluster.steps() == both({-1})


def test_a_shard_left_unpublished_is_refused_before_any_byte_moves(supervisor: Supervisor) -> None:
    """G16, N4: the error names the tensor and the rows."""
    held = {**WHOLE, "trainer-1": [row for row in WHOLE["trainer-1"] if row[0] != "layers.2.w"]}
    cluster = Cluster(supervisor, "memory", held)  # type: ignore[arg-type]
    cluster.publish(0)
    with pytest.raises(ChildrenFailed) as caught:
        cluster.refit(0)
    for member in MEMBERS:
        text = caught.value.failures[member]
        assert "CoverageError" in text or "Incomplete" in text
        assert "layers.2.w" in text
        assert "[4, 8)" in text
    assert "read" not in cluster.stages()
    assert cluster.steps() == both({-1})
