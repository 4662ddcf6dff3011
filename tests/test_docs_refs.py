"""What the pages name exists: links, anchors, files, tests, make targets, names of the package, settings, options."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
FOLDERS = "tests|benchmarks|planner|transports|rendezvous|refit|proto|docs|src"
NO_MODULES = {  # what looks like a dotted name of the package and is another thing
    "reshard.proto.v1.RendezvousService",  # gRPC
    "reshard.rendezvous.access",  # a logger
    "reshard.shard_table.v1",  # ModelExpress' format, without its first word
}
COMMANDS = ("demo", "serve", "ps", "doctor")


def code_of(page: Path) -> Iterator[str]:
    """The code spans of a page."""
    for span in re.findall(r"`([^`\n]+)`", page.read_text()):
        yield str(span)


def sources() -> str:
    files = [p for folder in FOLDERS.split("|") for p in (ROOT / folder).rglob("*.py")]
    return "\n".join(p.read_text() for p in [*files, ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "pyproject.toml"])


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\[[^\]]*\]\(([^)#\s]*)(#[^)\s]*)?\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and there.suffix == ".md":
            assert anchor[1:] in anchors_of(there), f"{page.name} links to {target}{anchor}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    for code in code_of(page):
        for path in re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]+\.\w+", code):
            assert list(ROOT.glob(path)), f"{page.name} names {path}, which does not exist"
        for target in re.findall(r"^make ([a-z][\w-]*)(?=\s|$)", code):
            assert target in targets, f"{page.name} says `make {target}`, which the Makefile has not"


def exists(dotted: str) -> bool:
    """Whether a dotted name can be imported, or is an attribute of what can."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for name in parts[n:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page: Path) -> None:
    for code in code_of(page):
        for dotted in set(re.findall(r"(?<![\w.])reshard(?:\.[A-Za-z_]\w*)+", code)) - NO_MODULES:
            assert exists(dotted), f"{page.name} names {dotted}, which does not exist"


def test_tests_and_settings_exist() -> None:
    text = sources()
    for page in PAGES:
        for code in code_of(page):
            for name in re.findall(r"(?<![\w/])(test_\w+)", code):
                here = f"def {name}(" in text or list((ROOT / "tests").rglob(f"{name}.py"))
                assert here, f"{page.name} names {name}, which is no test"
        for setting in set(re.findall(r"\bRESHARD_[A-Z0-9_]*[A-Z0-9]", page.read_text())):
            assert setting in text, f"{page.name} names the setting {setting}, which nothing reads"


def test_the_commands_options_are_documented_and_there() -> None:
    pytest.importorskip("typer", reason="typer is not installed: pip install 'reshard[cli]'")
    wide = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    pages = "\n".join(page.read_text() for page in PAGES)
    for command in COMMANDS:
        asked = [sys.executable, "-m", "reshard", command, "--help"]
        run = subprocess.run(asked, capture_output=True, text=True, env=wide, timeout=100, check=True)
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", run.stdout)) - {"--help"}
        assert bool(options) is (command != "doctor")
        for option in options:
            assert option in pages, f"`reshard {command} {option}` is on no page"
        for said in re.findall(rf"`reshard {command} ([^`]*)`|^\s*reshard {command} (.*?)(?:#.*)?$", pages, re.M):
            unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(said))) - options
            assert not unknown, f"`reshard {command}` is shown with {sorted(unknown)}, which it does not know"
