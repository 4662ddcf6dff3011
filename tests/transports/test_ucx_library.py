"""Which library is loaded, what it is told, and what stays as it was in the process around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from reshard.transports import Region, RegistrationError, TransportUnavailableError, open_transport
from reshard.transports.ucx import UcxTransport
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.context import Context
from reshard.transports.ucx.describe import _warnings, describe, one_sided
from reshard.transports.ucx.library import SETTING, load_library

pytestmark = pytest.mark.skipif(bool(UcxTransport.probe()), reason=f"ucx does not work here: {UcxTransport.probe()}")


def run(script: str, **environ: str) -> str:
    """Run a script in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_absent_library_is_named_with_its_remedy(tmp_path):
    with pytest.raises(TransportUnavailableError, match=r"reshard\[ucx\]") as caught:
        load_library(str(tmp_path / "libucp.so"))
    assert str(tmp_path) in str(caught.value)
    assert caught.value.extra == "ucx"


def test_a_library_that_is_not_ucx_is_refused():
    # libucs is a shared library of UCX without the functions that we need.
    stranger = Path(load_library("wheel").path).with_name("libucs.so.0")
    with pytest.raises(TransportUnavailableError, match="libucs"):
        load_library(str(stranger))


@pytest.mark.parametrize(("version", "fits"), [((1, 17, 0), False), ((1, 18, 0), True), ((2, 0, 0), False)])
def test_versions_before_the_oldest_and_of_another_abi_are_refused(version, fits, monkeypatch):
    from reshard.transports.ucx import library

    real = library.require("cffi", extra="ucx")

    class Impostor:
        """cffi's FFI, with a library of another version."""

        def __init__(self) -> None:
            self._ffi = real.FFI()

        def __getattr__(self, name: str) -> object:
            return getattr(self._ffi, name)

        def dlopen(self, path: str | None, flags: int = 0) -> object:
            if path is None:
                return self._ffi.dlopen(None)

            def ucp_get_version(*numbers: object) -> None:
                for at, value in zip(numbers, version, strict=True):
                    at[0] = value  # type: ignore[index]

            return SimpleNamespace(ucp_get_version=ucp_get_version)

    monkeypatch.setattr(library, "require", lambda *_, **__: SimpleNamespace(FFI=Impostor))
    if fits:
        assert library._open("path", "x").version == version
    else:
        with pytest.raises(TransportUnavailableError, match=r"expected 1\.18"):
            library._open("path", "x")


def test_the_setting_chooses_the_library(monkeypatch):
    chosen = load_library("wheel")
    monkeypatch.setenv(SETTING, chosen.path)
    assert load_library().origin == "path"
    monkeypatch.setenv(SETTING, "/nowhere/libucp.so")
    with pytest.raises(TransportUnavailableError, match="/nowhere"):
        open_transport("ucx")


def test_nixl_own_ucx_can_be_chosen():
    nixl = pytest.importorskip("nixl_cu12", reason="nixl-cu12 is not installed")
    folder = Path(nixl.__file__).parents[1] / "nixl_cu12.libs"
    with open_transport("ucx", library=str(next(folder.glob("libucp-*.so*")))) as transport:
        assert isinstance(transport, UcxTransport)
        assert transport.capabilities.one_sided


def test_importing_loads_nothing():
    script = """
import sys, reshard.transports.ucx
print(sorted({'cffi', 'torch', 'nixl_cu12', 'libucx'} & set(sys.modules)), 'libucp' in open('/proc/self/maps').read())
"""
    assert run(script).split() == ["[]", "False"]


def test_opening_leaves_signals_and_environment_alone():
    script = """
import os, json, threading
from pathlib import Path
from reshard.transports import open_transport
def caught():
    return [l for l in Path('/proc/self/status').read_text().splitlines() if l.startswith('SigCgt')][0]
threading.Thread(target=int).start()  # glibc has a signal of its own from the first thread on
environment, signals = dict(os.environ), caught()
with open_transport('ucx') as transport:
    loaded = Path('/proc/self/maps').read_text()
    print('@' + json.dumps([environment == dict(os.environ), signals == caught(), 'libucs_signal' in loaded]))
"""
    line = next(line for line in run(script).splitlines() if line.startswith("@"))
    assert json.loads(line[1:]) == [True, True, False]


_HOW_IT_READS = """
import sys, numpy as np
from reshard.transports import open_transport, read
with open_transport('ucx', config={config}) as one, open_transport('ucx', config={config}) as two:
    a, b = one.allocate(1 << 20), two.allocate(1 << 20)
    b.array[:] = 7
    one.register([a.region]); two.register([b.region])
    peer = one.connect(two.endpoint(), timeout_s=60)
    row = lambda region: np.array([[region.address, 1 << 20, 0]], np.uint64)
    read(one, [one.prepare(peer, row(a.region), row(b.region))], timeout_s=60)
    assert (a.array == 7).all()
    print('by messages:', peer.native.by_messages('dram', 'dram'))
"""


def how_it_reads(output: str) -> str:
    """Return what UCX's own report, switched on by UCX_PROTO_INFO, says about reads into host memory."""
    lines = output.splitlines()
    at = max(i for i, line in enumerate(lines) if "remote memory read by ucp_get" in line)
    return " ".join(lines[at : at + 6])


def test_a_rendezvous_threshold_in_the_environment_does_not_reach_us():
    """ucxx sets it on import; UCX then uses no CMA at all, and could only emulate reads in software, over TCP."""
    environ = {"UCX_RNDV_THRESH": "8192", "UCX_PROTO_INFO": "y"}
    assert "by messages: True" in run(_HOW_IT_READS.format(config={"RNDV_THRESH": "8192"}), **environ)
    assert "zero-copy" in how_it_reads(run(_HOW_IT_READS.format(config={}), **environ))


def test_unknown_settings_are_refused_by_name():
    with pytest.raises(TransportUnavailableError, match="NO_SUCH_THING='1'"):
        open_transport("ucx", config={"NO_SUCH_THING": "1"})
    with pytest.raises(TransportUnavailableError, match="no_such_transport"):
        open_transport("ucx", tls="no_such_transport")


class Recorder:
    """UCX's functions, of which those that register memory only take notes."""

    def __init__(self, context: Context, memory_types: int) -> None:
        self._ucp = context.library.ucp
        self.mapped: list[dict[str, int]] = []
        context._memory_types = memory_types

    def __getattr__(self, name: str) -> object:
        return getattr(self._ucp, name)

    def ucp_mem_map(self, context: int, params: object, handle: object) -> int:
        names = ("field_mask", "length", "prot", "memory_type")
        self.mapped.append({name: int(getattr(params, name)) for name in names})
        handle[0] = 0x77  # type: ignore[index]
        return d.OK

    def ucp_rkey_pack(self, context: int, memh: int, key: object, size: object) -> int:
        return -4  # UCS_ERR_NO_MEMORY

    def ucp_mem_unmap(self, context: int, memh: int) -> int:
        assert memh == 0x77
        self.mapped.append({})
        return d.OK


def test_memory_kinds_reach_ucx_and_a_failure_leaves_nothing_mapped():
    context = Context(load_library(), {})
    try:
        recorder = Recorder(context, 1 << d.MEMORY_TYPE_HOST | 1 << d.MEMORY_TYPE_CUDA)
        context.library = replace(context.library, ucp=recorder)
        assert context.memory_kinds() == ("dram", "vram")
        for memory, number in (("dram", 0), ("vram", 1)):
            with pytest.raises(RegistrationError, match=f"{memory} region.*ucp_rkey_pack"):
                context.map(Region(0x10000, 4096, memory, 0))
            mapped, unmapped = recorder.mapped[-2:]
            assert mapped["memory_type"] == number
            assert mapped["length"] == 4096
            assert mapped["field_mask"] & d.MEM_MAP_FIELD_MEMORY_TYPE
            assert mapped["prot"] & d.MEM_PROT_REMOTE_READ
            assert unmapped == {}
    finally:
        context.library = load_library()
        context.close()


def test_device_memory_is_refused_where_ucx_cannot_reach_it():
    context = Context(load_library(), {"TLS": "tcp"})
    try:
        assert context.memory_kinds() == ("dram",)
        with pytest.raises(RegistrationError, match="UCX reaches dram memory here"):
            context.map(Region(0x10000, 4096, "vram", 0))
        with pytest.raises(RegistrationError, match="no empty memory"):
            context.map(Region(0x10000, 0))
    finally:
        context.close()


def test_description_names_library_devices_and_emulation(monkeypatch):
    monkeypatch.setenv("UCX_RNDV_THRESH", "8192")
    found = describe(config={"TLS": "tcp"})
    assert Path(found.path).exists() or found.origin == "system"
    assert found.version.startswith("1.")
    assert {name for name, _ in found.resources} == {"tcp"}
    text = "; ".join(found.warnings)
    assert "between hosts peers are read by messages" in text
    assert "on one host peers are read by messages" in text
    assert "UCX_RNDV_THRESH=8192" in text


TCP, CMA, IPC = ("tcp", "lo"), ("cma", "memory"), ("cuda_ipc", "cuda")


@pytest.mark.parametrize(
    ("transports", "here", "there", "expected"),
    [
        ((TCP,), "dram", "dram", False),
        ((TCP, CMA), "dram", "dram", True),
        ((TCP, CMA), "vram", "dram", False),
        ((TCP, CMA), "vram", "vram", False),
        ((TCP, IPC), "vram", "vram", True),
        ((TCP, IPC), "dram", "dram", False),
        ((TCP, CMA, IPC), "dram", "vram", False),
        ((("rc_mlx5", "mlx5_0:1"),), "vram", "dram", True),
    ],
)
def test_what_is_read_one_sidedly_is_told_by_the_transports(transports, here, there, expected):
    assert one_sided(transports, here, there) is expected


@pytest.mark.parametrize(("version", "warned"), [((1, 19, 0), True), ((1, 20, 0), False)])
def test_a_version_without_cma_for_what_survives_peers_is_warned_of(version, warned):
    library = replace(load_library(), version=version)
    found = "; ".join(_warnings(library, (("rc_mlx5", "mlx5_0:1"), ("cma", "memory")), {}))
    assert ("before 1.20" in found) is warned
