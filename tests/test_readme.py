"""Every Python block of the README runs as it stands, in a new interpreter, and every link of it leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_readme_has_its_three_examples() -> None:
    assert len(BLOCKS) == 3
    assert sum(1 for line in BLOCKS[0].splitlines() if line.strip()) <= 22


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_example_runs(number: int) -> None:
    if "import torch" in BLOCKS[number]:
        pytest.importorskip("torch", reason="the example needs torch (extra torch)")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error", "-c", BLOCKS[number]]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
