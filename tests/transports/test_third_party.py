"""A third party's backend: found by its entry point, named where it fails to load, and held to the contract."""

from __future__ import annotations

import ast
import ctypes
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from reshard.transports import available, backend, names, open_transport
from reshard.transports.errors import TransportUnavailableError
from reshard.transports.registry import probe
from reshard.transports.testing import TransportContract

HERE = Path(__file__).parent


def vm_read_works() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    vectors = [(ctypes.c_ulong * 2)(ctypes.addressof(buffer), 1) for buffer in (target, source)]
    return bool(libc.process_vm_readv(os.getpid(), vectors[0], 1, vectors[1], 1, 0) == 1)


def install(folder: Path, entry_points: str) -> None:
    """Lay out what pip would: a distribution's metadata with entry points."""
    info = folder / "vm_transport-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vm-transport\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[reshard.transports]\n{entry_points}\n")


@pytest.mark.slow
@pytest.mark.skipif(not vm_read_works(), reason="process_vm_readv is not allowed in this sandbox")
class TestVm(TransportContract):
    backend = "vm"

    @classmethod
    def setup_class(cls) -> None:
        cls._site = TemporaryDirectory()
        cls._before = list(sys.path)
        install(Path(cls._site.name), "vm = vm_transport:VmTransport")
        sys.path[:0] = [cls._site.name, str(HERE)]
        cls.environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        try:
            super().teardown_class()
        finally:
            sys.path[:] = cls._before
            cls._site.cleanup()

    def test_it_is_listed_and_opened_by_name(self) -> None:
        assert "vm" in names()
        assert next(row for row in available() if row.name == "vm").ok
        with open_transport("vm") as transport:
            assert transport.name == "vm"


def test_the_example_is_forty_lines_and_uses_only_public_names() -> None:
    """All it has of reshard is `reshard.transports.backend`, and there only what that module lists."""
    text = (HERE / "vm_transport.py").read_text()
    tree = ast.parse(text)
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert modules == ["reshard.transports", "ctypes", "os", "struct", "numpy"]
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "b"
    }
    assert names
    assert names <= set(backend.__all__)
    assert all(hasattr(backend, name) for name in backend.__all__)
    code = [line for line in text.splitlines() if line.strip() and not line.startswith(("import ", "from ", '"""'))]
    assert len(code) <= 40


def test_a_broken_plug_in_is_named_and_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "broken = no_such_module_of_ours:Thing\nempty = reshard.transports:nothing_here")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, part in (("broken", "no_such_module_of_ours"), ("empty", "nothing_here")):
        assert part in probe(name)
        with pytest.raises(TransportUnavailableError, match=part):
            open_transport(name)
    assert next(row for row in available() if row.name == "memory").ok


def test_an_unknown_backend_names_those_that_exist() -> None:
    with pytest.raises(TransportUnavailableError, match=r"'carrier-pigeon' is unknown.*nixl.*ucx.*memory.*auto"):
        open_transport("carrier-pigeon")


def test_auto_takes_no_settings() -> None:
    with pytest.raises(TypeError, match="workers"):
        open_transport("auto", workers=2)


def test_auto_falls_back_and_says_why_when_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.transports import registry

    monkeypatch.setattr(registry, "probe", lambda name: "" if name == "memory" else "not today")
    with open_transport("auto") as transport:
        assert transport.name == "memory"
    monkeypatch.setattr(registry, "probe", lambda name: f"{name} is broken")
    with pytest.raises(TransportUnavailableError, match=r"nixl is broken; .*memory is broken"):
        open_transport("auto")
