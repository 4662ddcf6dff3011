"""The house rules that a machine can check: import direction, what imports on numpy alone, the package's face."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "transports", "proto", "rendezvous", "refit")
MAY_IMPORT = {
    "planner": {"planner"},
    "transports": {"planner", "transports"},
    "proto": {"proto"},
    "rendezvous": {"planner", "proto", "rendezvous"},
    "refit": set(PACKAGES),
}


def modules(package: str) -> list[Path]:
    return sorted(p for p in (ROOT / package).rglob("*.py") if "__pycache__" not in p.parts)


def dotted(path: Path) -> str:
    parts = ["reshard", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_packages(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("reshard.") and n.split(".")[1] in PACKAGES}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    paths = modules(package)
    assert paths, f"{package} holds no module"
    wrong = {str(p): imported_packages(p) - MAY_IMPORT[package] for p in paths}
    assert {p: w for p, w in wrong.items() if w} == {}


NUMPY_ALONE = """
import importlib, sys
ALLOWED = set(sys.stdlib_module_names) | {"numpy", "reshard"}

class Deny:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"denied: {name}", name=name)
        return None

sys.meta_path.insert(0, Deny())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name}: {error}")
"""


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=100, check=False)


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "proto"])
def test_every_module_imports_on_numpy_alone(package: str) -> None:
    done = run_python(NUMPY_ALONE, *[dotted(p) for p in modules(package) if p.name != "__main__.py"])
    assert done.returncode == 0, done.stderr


def test_the_denial_denies() -> None:
    """The check above can fail: a module that is installed but not allowed is refused."""
    done = run_python(NUMPY_ALONE, "pytest")
    assert done.returncode != 0
    assert "denied: pytest" in done.stderr


def test_importing_the_face_loads_numpy_at_most() -> None:
    code = "import sys, reshard; print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    loaded = {name for name in ast.literal_eval(done.stdout) if not name.startswith("_")}
    assert loaded - {"sitecustomize", "distutils-precedence"} <= {"reshard", "numpy"}


def test_public_names_resolve() -> None:
    code = (
        "import reshard\nfor name in reshard.__all__: getattr(reshard, name)\n"
        "from reshard import Publisher, Receiver, plan\nassert callable(plan)"
    )
    done = run_python(NUMPY_ALONE.replace("for name in sys.argv[1:]:", code + "\nfor name in []:"))
    assert done.returncode == 0, done.stderr


def test_the_face_holds_links_and_next_to_nothing_else() -> None:
    face = ROOT / "src" / "reshard"
    entries = {p.name for p in face.iterdir() if p.name != "__pycache__"}
    assert entries == {"__init__.py", "__main__.py", "py.typed", *PACKAGES}
    for package in PACKAGES:
        link = face / package
        assert link.is_symlink(), f"{link} is not a symlink"
        assert os.readlink(link) == f"../../{package}"


def test_no_module_outgrows_one_concept() -> None:
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for k in PACKAGES for p in modules(k)}
    large = {name: n for name, n in sizes.items() if n > 500 and "_pb2" not in name}
    assert large == {}
