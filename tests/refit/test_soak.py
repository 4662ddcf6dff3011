"""A short run of ``make soak``: the demo's model, the optimizer stepping between, every version's bytes compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

N_REFITS = 120


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["memory", "nixl"])
def test_nothing_grows(transport: str, tmp_path: Path) -> None:
    from reshard.transports import registry

    if transport == "nixl" and (reason := registry.probe("nixl")):
        pytest.skip(reason)
    out = tmp_path / "usage.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--refits", str(N_REFITS)]
    done = subprocess.run(
        [*command, "--transport", transport, "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{N_REFITS} refits, every version's bytes equal; nothing grew" in done.stdout
    samples = json.loads(out.read_text())
    assert samples[-1]["refits"] == N_REFITS
    assert samples[-1]["leases"] == 0
