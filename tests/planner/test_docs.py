"""The examples of docs/planner.md and of the planner's docstrings run; so does the transport that the docs show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import socket
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.planner.world import World

import reshard.planner
from reshard.planner import CostModel, Plan
from reshard.planner.execute import execute

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planner.md"
MODULES = sorted(module.name for module in pkgutil.iter_modules(reshard.planner.__path__))


def test_the_page_runs() -> None:
    result = doctest.testfile(str(DOCS), module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run(name: str) -> None:
    module = importlib.import_module(f"reshard.planner.{name}")
    assert doctest.testmod(module).failed == 0


def shown_transport() -> tuple[str, ModuleType]:
    (code,) = re.findall(r"<!-- custom transport -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    module = ModuleType("shown_transport")
    exec(compile(code, str(DOCS), "exec"), module.__dict__)
    return code, module


def transfer(made: Plan, world: World, module: ModuleType) -> list[np.ndarray]:
    """Serve each holder from a thread of its own and read the plan through real sockets."""
    addresses, threads, listeners = {}, [], []
    memory = world.memory()
    for holder in made.holders:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(60)
        listeners.append(listener)
        addresses[holder.name] = listener.getsockname()
        thread = threading.Thread(target=module.serve, args=(memory[holder.name], listener), daemon=True)
        thread.start()
        threads.append(thread)
    try:
        return module.read(made, addresses, 60)
    finally:
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize("budget", [1, 64])
@pytest.mark.parametrize("label", ["bfloat16", "float32"])
def test_the_shown_transport_reads_a_plan(budget: int, label: str) -> None:
    """Spans in several waves, strided exact runs, a cast, a fill, and a materialised tensor."""
    world = World()
    world.ramp("w", 40, 32)
    world.ramp("norm", 40)
    for rank in range(3):
        world.hold(f"r{rank}", "w", (14 * rank,), (min(14 * rank + 14, 40),))
    world.hold("r1", "norm")
    world.buffer("down", 40, 5, label=label)
    world.buffer("norm", 48, label="bfloat16")
    world.buffer("a", 40)
    world.copy("w", np.s_[:, 3:8], 0)
    world.fill(7, 1)
    world.copy("norm", ..., 1, np.s_[:40])
    world.copy("norm", ..., 2, kind="materialised")
    made = world.plan(max_runs_per_block=budget, staging_bytes=4096, cost=CostModel(descriptor_s=0.0))
    code, module = shown_transport()
    assert len([line for line in code.splitlines() if line.strip()]) <= 41
    got = transfer(made, world, module)
    want = execute(made, world.memory(), [np.zeros(n, np.uint8) for n in made.buffer_bytes.tolist()])
    assert [buffer.tobytes() for buffer in got] == [buffer.tobytes() for buffer in want]
    assert made.economics.wire_bytes > 0
    assert made.n_waves > 1 or budget > 1


def test_the_shown_transport_serves_nothing_outside_a_region() -> None:
    _, module = shown_transport()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    thread = threading.Thread(target=module.serve, args=([np.zeros(8, np.uint8)], listener), daemon=True)
    thread.start()
    with (
        socket.create_connection(listener.getsockname(), 60) as peer,
        pytest.raises(ConnectionError, match="hung up with 4 bytes"),
    ):
        module.fetch(peer, 0, 6, np.zeros(4, np.uint8))
    thread.join(60)
    listener.close()
    assert not thread.is_alive()
