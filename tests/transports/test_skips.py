"""Tests of transports are skipped for a reason that is said, or not at all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("*.py"))
SKIPS = {"skip", "skipif", "importorskip", "xfail"}


def skips(tree: ast.AST) -> list[ast.expr]:
    """Uses of pytest's ways to leave a test out, called or as bare decorators."""
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    bare = [mark for node in ast.walk(tree) for mark in getattr(node, "decorator_list", ())]
    return [node for node in (*called, *bare) if name(node) in SKIPS]


def name(node: ast.expr) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    return called.attr if isinstance(called, ast.Attribute) else ""


def has_reason(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return any(keyword.arg == "reason" for keyword in node.keywords) or (name(node) == "skip" and bool(node.args))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_skip_has_a_reason(path):
    tree = ast.parse(path.read_text())
    assert [node.lineno for node in skips(tree) if not has_reason(node)] == []


def test_skips_without_a_reason_are_found():
    good = ast.parse("pytest.skip('why')\npytest.mark.skipif(True, reason='y')\npytest.importorskip('m', reason='y')")
    bad = ast.parse(
        "@pytest.mark.skip\ndef f(): ...\npytest.skip()\npytest.importorskip('m')\npytest.mark.skipif(True)"
    )
    assert [has_reason(node) for node in skips(good)] == [True] * 3
    assert [has_reason(node) for node in skips(bad)] == [False] * 4
