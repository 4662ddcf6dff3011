"""``make soak``: the demo's model, the optimizer stepping between, every version's bytes compared; nothing grows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the demo's model needs torch")
pytest.importorskip("transformers", reason="the demo's model needs transformers")

from benchmarks.soak import TOLERATED, Usage, grown

from reshard.transports import registry

USAGE = Usage(500.0, 400_000, 50, 4, 16, 31.0, 0, 12, 4, 88, 0, 2, 2)


@pytest.mark.parametrize("name", list(asdict(USAGE)))
def test_growth_is_seen(name: str) -> None:
    share, more = TOLERATED.get(name, (0.0, 0.0))
    before = asdict(USAGE)[name]
    limit = before * (1 + share) + more
    assert not grown(USAGE, replace(USAGE, **{name: limit}))
    assert grown(USAGE, replace(USAGE, **{name: limit + 1})) == {name: (before, limit + 1)}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("transport", "n_refits"), [("memory", 2000), ("nixl", 300), ("ucx", 300)])
def test_nothing_grows(transport: str, n_refits: int, tmp_path: Path) -> None:
    if reason := registry.probe(transport):
        pytest.skip(reason)
    out = tmp_path / "usage.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--refits", str(n_refits), "--grpc"]
    done = subprocess.run(
        [*command, "--transport", transport, "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{n_refits} refits, every version's bytes equal; nothing grew" in done.stdout
    samples = json.loads(out.read_text())
    assert samples[-1]["refits"] == n_refits
    assert samples[-1]["leases"] == 0
