"""Other users of UCX in one process: NIXL with a UCX of its own, ucxx, ucx-py, and a second transport of ours."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reshard.transports import open_transport, read
from reshard.transports.registry import probe
from reshard.transports.ucx import UcxTransport

pytestmark = pytest.mark.skipif(bool(UcxTransport.probe()), reason=f"ucx does not work here: {UcxTransport.probe()}")

PYTHON_SETTING = "RESHARD_TEST_{}_PYTHON"

_OURS = """
def ours(backend="ucx"):
    import numpy as np
    from reshard.transports import open_transport, read
    with open_transport(backend) as one, open_transport(backend) as two:
        a, b = one.allocate(1 << 20), two.allocate(1 << 20)
        b.array[:] = 7
        one.register([a.region]); two.register([b.region])
        peer = one.connect(two.endpoint(), timeout_s=60.0)
        row = lambda region: np.array([[region.address, 1 << 20, 0]], np.uint64)
        read(one, [one.prepare(peer, row(a.region), row(b.region))], timeout_s=60.0)
        assert (a.array == 7).all()
"""

_THEIRS = """
def theirs():
    import asyncio, numpy as np, {module} as module
    async def go():
        got = []
        async def serve(ep):
            buffer = np.empty(1 << 16, np.uint8)
            await ep.recv(buffer)
            got.append(buffer)
            await ep.close()
        listener = module.create_listener(serve)
        ep = await module.create_endpoint("127.0.0.1", listener.port)
        await ep.send(np.full(1 << 16, 9, np.uint8))
        while not got:
            await asyncio.sleep(0.01)
        assert (got[0] == 9).all()
        await ep.close()
        listener.close()
    asyncio.run(asyncio.wait_for(go(), 60))
"""


def test_two_transports_of_one_process_read_each_other():
    row = lambda region: np.array([[region.address, region.nbytes, 0]], np.uint64)  # noqa: E731
    with open_transport("ucx") as one, open_transport("ucx", tls="tcp") as two:
        regions = {}
        for transport, fill in ((one, 1), (two, 2)):
            allocation = transport.allocate(1 << 20)
            allocation.array[:] = fill
            transport.register([allocation.region])
            regions[transport.name, fill] = allocation
        first, second = regions["ucx", 1], regions["ucx", 2]
        peer = one.connect(two.endpoint(), timeout_s=60.0)
        read(one, [one.prepare(peer, row(first.region), row(second.region))], timeout_s=60.0)
        assert (first.array == 2).all()


@pytest.mark.parametrize("first", ["nixl", "ucx"])
def test_nixl_in_the_same_process(first):
    if reason := probe("nixl"):
        pytest.skip(f"nixl does not work here: {reason}")
    second = "ucx" if first == "nixl" else "nixl"
    script = f"{_OURS}\nfor backend in ({first!r}, {second!r}, {first!r}):\n    ours(backend)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", ["ucxx", "ucp"])
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_python_bindings_in_the_same_process(module, order):
    """Both go on working, in either order. ucxx pins an older libucx than ours may be, so it may live elsewhere."""
    setting = PYTHON_SETTING.format(module.upper())
    python = os.environ.get(setting, "")
    if not python:
        if importlib.util.find_spec(module) is None:
            pytest.skip(
                f"{module} is not installed here; {setting} may name an interpreter that has it, numpy and cffi: "
                "`make test-slow` has one for ucxx; ucx-py is end of life, its last release only fetches from elsewhere"
            )
        python = sys.executable
    calls = ("ours()", "theirs()") if order == "ours first" else ("theirs()", "ours()")
    script = "\n".join((_OURS, _THEIRS.format(module=module), *calls, *calls))
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [python, "-c", script],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
