"""The demo's processes: they answer, their failures are told, and none of them is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.refit.demo.channel import MAX_MESSAGE_BYTES, Message
from reshard.refit.demo.settings import DemoError, DemoSettings
from reshard.refit.demo.supervisor import Child, ChildrenFailed, Supervisor

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
OBEDIENT = "tests.refit.supervised:obedient"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone_within(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor((), tmp_path, environment=ENVIRONMENT, grace_s=0.5, stop_grace_s=0.5) as running:
        yield running


def two(supervisor: Supervisor) -> list[Child]:
    children = [supervisor.start(f"child-{n}", OBEDIENT, {"greeting": f"hello {n}"}) for n in range(2)]
    ready = supervisor.wait(children, timeout_s=20)
    assert {name: answer["greeting"] for name, answer in ready.items()} == {"child-0": "hello 0", "child-1": "hello 1"}
    return children


def test_children_answer_and_report_events(supervisor: Supervisor) -> None:
    children = two(supervisor)
    events: list[tuple[str, Message]] = []
    answers = supervisor.ask(
        children, {"do": "echo", "text": "é"}, timeout_s=20, on_event=lambda name, event: events.append((name, event))
    )
    assert {name: (answer["echo"], answer["pid"]) for name, answer in answers.items()} == {
        child.name: ("é", child.pid) for child in children
    }
    assert sorted(events, key=str) == [(f"child-{n}", {"stage": "echoing"}) for n in range(2)]


def test_one_command_for_each_child(supervisor: Supervisor) -> None:
    children = two(supervisor)
    answers = supervisor.ask(
        children, {child.name: {"do": "echo", "text": child.name} for child in children}, timeout_s=20
    )
    assert {name: answer["echo"] for name, answer in answers.items()} == {c.name: c.name for c in children}


def test_a_failed_command_is_told_and_the_child_goes_on(supervisor: Supervisor) -> None:
    children = two(supervisor)
    with pytest.raises(ChildrenFailed) as caught:
        supervisor.ask(children[:1], {"do": "fail", "text": "now"}, timeout_s=20)
    assert caught.value.failures == {"child-0": "ValueError: told to fail: now"}
    assert supervisor.ask(children, {"do": "echo", "text": "x"}, timeout_s=20).keys() == {"child-0", "child-1"}


def test_an_unknown_command_is_refused(supervisor: Supervisor) -> None:
    with pytest.raises(ChildrenFailed, match="got 'fly', expected one of echo, fail, die, hang"):
        supervisor.ask(two(supervisor), {"do": "fly"}, timeout_s=20)


def test_a_killed_child_is_named_at_once(supervisor: Supervisor) -> None:
    first, second = two(supervisor)
    with pytest.raises(ChildrenFailed) as caught:
        supervisor.ask([first, second], {first.name: {"do": "die"}, second.name: {"do": "hang"}}, timeout_s=60)
    assert "was killed by signal 9; it printed:\nstarted: hello 0" in caught.value.failures[first.name]
    assert caught.value.failures[second.name] == "did not answer after others failed"


def test_a_child_that_dies_while_others_are_asked_is_named(supervisor: Supervisor) -> None:
    first, second = two(supervisor)
    first.kill()
    with pytest.raises(ChildrenFailed, match=f"child-0: process {first.pid} was killed by signal 9"):
        supervisor.ask([second], {"do": "hang"}, timeout_s=60)


def test_a_child_that_fails_to_start_says_why(supervisor: Supervisor) -> None:
    child = supervisor.start("stillborn", "tests.refit.supervised:stillborn", {})
    with pytest.raises(ChildrenFailed, match="stillborn: RuntimeError: no such luck"):
        supervisor.wait([child], timeout_s=20)


def test_a_deadline_ends_the_wait(supervisor: Supervisor) -> None:
    with pytest.raises(ChildrenFailed, match="child-0: did not answer in time"):
        supervisor.ask(two(supervisor)[:1], {"do": "hang"}, timeout_s=0.3)


def test_long_messages_and_double_names_are_refused(supervisor: Supervisor) -> None:
    children = two(supervisor)
    with pytest.raises(ValueError, match=f"expected at most {MAX_MESSAGE_BYTES}"):
        supervisor.ask(children, {"do": "echo", "text": "x" * MAX_MESSAGE_BYTES}, timeout_s=20)
    with pytest.raises(DemoError, match="was started already"):
        supervisor.start("child-0", OBEDIENT, {"greeting": ""})


def test_closing_ends_obedient_and_hanging_children(tmp_path: Path) -> None:
    with Supervisor((), tmp_path, environment=ENVIRONMENT, grace_s=0.1, stop_grace_s=4.0) as supervisor:
        children = two(supervisor)
        with pytest.raises(ChildrenFailed):
            supervisor.ask(children[:1], {"do": "hang"}, timeout_s=0.1)
        pids = [child.pid for child in children]
    assert gone_within(pids, 10) == []
    assert children[1].exit_status == 0


def test_a_killed_nursery_is_told_and_takes_its_children_along(supervisor: Supervisor) -> None:
    children = two(supervisor)
    os.kill(supervisor._nursery.pid, signal.SIGKILL)
    with pytest.raises(DemoError, match=r"the nursery \(process \d+\) has ended with status -9"):
        supervisor.ask(children, {"do": "hang"}, timeout_s=30)
    assert gone_within([child.pid for child in children], 10) == []


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="No module named 'no_such_module'"):
        Supervisor(("no_such_module",), tmp_path, environment=ENVIRONMENT)


PARENT = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background inherits that it is ignored
from reshard.refit.demo.supervisor import Supervisor
supervisor = Supervisor((), Path(sys.argv[1]))
children = [supervisor.start(f"child-{n}", "tests.refit.supervised:obedient", {"greeting": ""}) for n in range(3)]
supervisor.wait(children, timeout_s=20)
print(*(child.pid for child in children), supervisor._nursery.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_parent(tmp_path: Path, number: signal.Signals) -> None:
    """However the supervisor's process ends, its children end too: the kernel sees to it."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 4
        assert all(map(is_running, pids))
        parent.send_signal(number)
        parent.wait(20)
        assert gone_within(pids, 20) == []
    finally:
        parent.kill()
        parent.wait(20)
        if parent.stdout is not None:
            parent.stdout.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt"}, "--model: got 'gpt', expected one of moe, dense"),
        ({"trainers": 0}, "--trainers: got 0"),
        ({"tensor_parallel": 3}, "--tp: got 3, expected a divisor of the 8 query heads"),
        ({"layers": 0}, "--layers: got 0"),
        ({"kill": "trainer-2"}, "--kill: got 3 refits, expected 2"),
        ({"kill": "trainer-2", "refits": 2}, "--kill: got --cut-hints, expected none"),
        ({"timeout_s": float("nan")}, "--timeout: got nan"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(DemoError) as caught:
        DemoSettings(**options)  # type: ignore[arg-type]
    assert message in str(caught.value)
