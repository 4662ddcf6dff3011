"""What a user installs: each module once, no tests, numpy alone, and an extra named wherever one is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "transports", "proto", "rendezvous", "refit")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def fetching(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run what fetches packages, again where it fails: a registry may be out of reach for a moment."""
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            break
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="needs the package `build` (extra dev)")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)]
    done = fetching(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def expected_modules() -> set[str]:
    found = {"reshard/__init__.py", "reshard/py.typed"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in {".py", ".pyi", ".proto"} and "__pycache__" not in path.parts:
                found.add("reshard/" + str(path.relative_to(ROOT)))
    return found


def check_members(names: list[str], prefix: str) -> None:
    files = [n.removeprefix(prefix) for n in names if not n.endswith("/")]
    inside = Counter(n for n in files if n.startswith("reshard/"))
    assert [n for n, k in inside.items() if k > 1] == []
    assert expected_modules() <= set(inside)
    assert not any("test" in n.split("/")[0] or n.startswith(PACKAGES) for n in files), files


def test_wheel_holds_each_module_once_and_no_tests(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    check_members(zipfile.ZipFile(wheel).namelist(), "")


def test_sdist_holds_each_module_once_and_no_tests(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not any(m.issym() or m.islnk() for m in members)
    names = [m.name.partition("/")[2] for m in members]
    check_members([n.removeprefix("src/") if n.startswith("src/") else n for n in names], "")


@pytest.fixture(scope="module")
def bare(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment that holds the wheel and numpy alone; the path of its interpreter."""
    home = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=120)
    python = home / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    done = fetching([str(python), "-m", "pip", "install", "--quiet", str(wheel)])
    assert done.returncode == 0, done.stderr
    return python


def in_bare(python: Path, code: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "MYPYPATH"}}
    command = [str(python), "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd="/")


def test_the_planner_needs_numpy_alone(bare: Path) -> None:
    code = "import reshard.planner, importlib.metadata as m; print(sorted(d.name for d in m.distributions()))"
    done = in_bare(bare, code)
    assert done.returncode == 0, done.stderr
    assert set(eval(done.stdout)) <= {"numpy", "pip", "reshard", "setuptools"}


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("from reshard import open_transport; open_transport('nixl')", "reshard[nixl]"),
        ("from reshard import open_transport; open_transport('ucx')", "reshard[ucx]"),
        ("from reshard import Rendezvous; Rendezvous.connect('127.0.0.1:1')", "reshard[rendezvous]"),
        ("import reshard.proto.v1.tables_pb2", "reshard[rendezvous]"),
        ("from reshard.refit.adapters import torch_dtensor as t; list(t.local_tensors(None))", "reshard[torch]"),
    ],
)
def test_using_what_is_absent_names_its_extra(bare: Path, code: str, extra: str) -> None:
    done = in_bare(bare, code)
    assert done.returncode != 0
    assert extra in done.stderr, done.stderr


def test_the_command_line_names_its_extra(bare: Path) -> None:
    done = subprocess.run(
        [str(bare.parent / "reshard"), "version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "reshard[cli]" in done.stderr
