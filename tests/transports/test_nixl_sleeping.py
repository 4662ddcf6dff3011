"""The progress thread of an agent that serves sleeps, unless it is told not to, and NIXL stays as it was."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from reshard.transports import open_transport
from reshard.transports.nixl import library
from reshard.transports.nixl.sleeping import agent_class
from reshard.transports.registry import probe

pytestmark = pytest.mark.skipif(bool(probe("nixl")), reason=f"nixl does not work here: {probe('nixl')}")


def test_an_idle_agent_that_serves_leaves_the_processor_alone() -> None:
    """NIXL's wrapper makes its progress thread spin: a whole core for each trainer, while it trains."""
    code = """
import time
from reshard.transports import open_transport
with open_transport('nixl') as transport:
    transport.endpoint()
    used = time.process_time()
    time.sleep(1.0)
    print(f'{time.process_time() - used:.3f}')
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.3, "processor seconds in one idle second"


@pytest.mark.parametrize(("sleep_s", "expected_us"), [(0.01, 10_000), (0.0000011, 2), (0.0, None)])
def test_the_delay_is_what_is_asked_for(sleep_s, expected_us, monkeypatch):
    """Of the serving agent; the reading one has no progress thread, and NIXL's own class."""
    from reshard.transports.nixl import NixlTransport, agent

    asked: list[int] = []

    def noted(nixl: ModuleType, sleep_us: int) -> type:
        asked.append(sleep_us)
        return agent_class(nixl, sleep_us)

    monkeypatch.setattr(agent, "agent_class", noted)
    with open_transport("nixl", progress_sleep_s=sleep_s) as transport:
        assert isinstance(transport, NixlTransport)
        serving, reading = transport._serve(), transport._read()
        plain = library.load().nixl_agent
        assert type(reading.native) is plain
        assert isinstance(serving.native, plain)
        assert (type(serving.native) is plain) is (expected_us is None)
    assert asked == ([] if expected_us is None else [expected_us])


@pytest.mark.parametrize("bad", [-0.001, 1.5, float("nan"), float("inf"), True])
def test_a_sleep_that_is_none(bad):
    with pytest.raises(ValueError, match="progress_sleep_s"):
        open_transport("nixl", progress_sleep_s=bad)


def test_nixl_is_left_as_it_was(monkeypatch):
    """The delay reaches the native configuration of our agents, and of nobody else's."""
    nixl = library.load()
    api = sys.modules[f"{nixl.__name__}._api"]
    names = dict(vars(api))
    seen: list[int] = []

    def noted(name: str, config: object) -> object:
        """Stand in for the native agent: take note of its configuration, and start nothing."""
        seen.append(config.pthrDelay)  # type: ignore[attr-defined]
        raise RuntimeError("seen enough")

    bindings = SimpleNamespace(**{**vars(api.nixlBind), "nixlAgent": noted})
    monkeypatch.setattr(api, "nixlBind", bindings)
    for kind in (agent_class(nixl, 10_000), nixl.nixl_agent, agent_class(nixl, 5)):
        with pytest.raises(RuntimeError, match="seen enough"):
            kind("nobody", nixl.nixl_agent_config(backends=[]))
    assert seen == [10_000, 0, 5]
    monkeypatch.undo()
    assert dict(vars(api)) == names


def test_a_wrapper_that_hands_its_configuration_arguments(another_nixl):
    """As earlier releases did."""
    api = sys.modules["another_nixl._api"]
    code = """
class nixlAgentConfig:
    pthrDelay = property(lambda self: self.delay, lambda self, value: setattr(self, 'delay', value))
    def __init__(self, thread, *, listens):
        self.given = thread, listens
nixlBind = SimpleNamespace(nixlAgentConfig=nixlAgentConfig)
class nixl_agent:
    def __init__(self, name, listens=False):
        self.config = nixlBind.nixlAgentConfig(True, listens=listens)
        self.config.pthrDelay = 0
"""
    vars(api)["SimpleNamespace"] = SimpleNamespace
    exec(code, vars(api))
    another_nixl.nixl_agent = vars(api)["nixl_agent"]
    made = agent_class(another_nixl, 7)("name", listens=True)
    assert made.config.given == (True, True)
    assert made.config.pthrDelay == 7


@pytest.fixture
def another_nixl() -> Iterator[ModuleType]:
    package, api = ModuleType("another_nixl"), ModuleType("another_nixl._api")
    package.nixl_agent = type("nixl_agent", (), {})  # type: ignore[attr-defined]
    sys.modules[package.__name__], sys.modules[api.__name__] = package, api
    yield package
    del sys.modules[package.__name__], sys.modules[api.__name__]


def test_a_nixl_that_is_built_otherwise_is_used_as_it_is(another_nixl, caplog):
    with caplog.at_level(logging.WARNING, "reshard.transports.nixl"):
        assert agent_class(another_nixl, 10_000) is another_nixl.nixl_agent
    assert [record.getMessage() for record in caplog.records] == [
        "another_nixl: its agents cannot be told to sleep, and keep a processor busy"
    ]
