"""The declarations against UCX's own headers, as a C compiler sees them.

A bit that is off by one is silent: UCX then looks at another field, finds it empty, and goes on. So every offset and
every number is compared with the headers of the library in use, or of those in the folders (with a ``ucp/api``) that
``RESHARD_UCX_HEADERS`` lists, separated by colons.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from reshard.transports.ucx import UcxTransport
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.failures import PEER_GONE as OURS_GONE
from reshard.transports.ucx.library import load_library

cffi = pytest.importorskip("cffi", reason="the ucx backend needs cffi")
if reason := UcxTransport.probe():
    pytest.skip(reason, allow_module_level=True)

NESTED = {
    ("ucp_ep_params_t", "err_handler_cb"): "err_handler.cb",
    ("ucp_ep_params_t", "err_handler_arg"): "err_handler.arg",
    ("ucp_ep_attr_t", "transport_entries"): "transports.entries",
    ("ucp_ep_attr_t", "num_transport_entries"): "transports.num_entries",
    ("ucp_ep_attr_t", "transport_entry_size"): "transports.entry_size",
}
"""Fields of structures within structures, which `declarations` has flat."""

PREFIXES = {
    "PARAM_": "UCP_PARAM_",
    "FEATURE_": "UCP_FEATURE_",
    "WORKER_FIELD_": "UCP_WORKER_PARAM_FIELD_",
    "WORKER_FLAG_": "UCP_WORKER_FLAG_",
    "THREAD_": "UCS_THREAD_",
    "EP_FIELD_": "UCP_EP_PARAM_FIELD_",
    "EP_CLOSE_": "UCP_EP_CLOSE_",
    "EP_ATTR_": "UCP_EP_ATTR_",
    "ERR_HANDLING_": "UCP_ERR_HANDLING_",
    "MEM_MAP_FIELD_": "UCP_MEM_MAP_PARAM_FIELD_",
    "MEM_PROT_": "UCP_MEM_MAP_PROT_",
    "MEMORY_TYPE_": "UCS_MEMORY_TYPE_",
    "OP_FIELD_": "UCP_OP_ATTR_FIELD_",
    "OP_FLAG_": "UCP_OP_ATTR_FLAG_",
    "AM_HANDLER_FIELD_": "UCP_AM_HANDLER_PARAM_FIELD_",
    "AM_": "UCP_AM_",
    "ATTR_": "UCP_ATTR_",
    "DATATYPE_": "UCP_DATATYPE_",
}
"""What our names begin with and UCX's do; the rest is ``UCS_``."""

PEER_GONE = (
    *("UNREACHABLE", "CANCELED", "TIMED_OUT", "REJECTED", "NOT_CONNECTED", "CONNECTION_RESET"),
    *("FIRST_LINK_FAILURE", "LAST_LINK_FAILURE", "FIRST_ENDPOINT_FAILURE", "ENDPOINT_TIMEOUT"),
    "LAST_ENDPOINT_FAILURE",
)


def folders() -> list[Path]:
    """Return the include folders to compare with."""
    listed = [Path(folder) for folder in os.environ.get("RESHARD_UCX_HEADERS", "").split(":") if folder]
    if not listed:
        beside = Path(load_library().path).resolve().parent.parent / "include"
        listed = [folder for folder in (beside, Path("/usr/include")) if (folder / "ucp/api/ucp.h").exists()][:1]
    return listed


def native(name: str) -> str:
    """Return UCX's name of one of our constants."""
    ours = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return (PREFIXES[ours] if ours else "UCS_") + name.removeprefix(ours)


def program() -> str:
    """Return a C program that prints every disagreement."""
    ffi = cffi.FFI()
    ffi.cdef(d.CDEF)
    lines = []
    for name in ffi.list_types()[0]:
        kind = ffi.typeof(name)
        if kind.kind != "struct":
            continue
        for field, place in kind.fields:
            if field != "spare":
                lines.append(f"OFFSET({name}, {NESTED.get((name, field), field)}, {place.offset})")
        lines.append(f"ROOM({name}, {ffi.sizeof(name)})")
    constants = {name: value for name, value in vars(d).items() if name.isupper() and isinstance(value, int)}
    assert len(constants) > 40
    lines += [f"NUMBER({native(name)}, {value})" for name, value in constants.items()]
    gone = " && ".join(f"status != {status}" for status in sorted(OURS_GONE))
    lines += [f"{{ int status = UCS_ERR_{name}; if ({gone}) WRONG(UCS_ERR_{name}, status, 0); }}" for name in PEER_GONE]
    return "\n".join(
        (
            "#include <stddef.h>",
            "#include <stdio.h>",
            "#include <ucp/api/ucp.h>",
            '#define WRONG(name, is, said) printf("%s is %ld, declared %ld\\n", #name, (long)(is), (long)(said))',
            "#define NUMBER(name, said) if ((long)(name) != (said)) WRONG(name, name, said);",
            "#define OFFSET(type, field, said) if (offsetof(type, field) != (said)) "
            "WRONG(type.field, offsetof(type, field), said);",
            "#define ROOM(type, said) if (sizeof(type) > (said)) WRONG(sizeof type, sizeof(type), said);",
            "int main(void) {",
            *lines,
            "return 0; }",
        )
    )


def test_declarations_agree_with_the_headers(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    found = folders()
    if not found:
        pytest.skip(f"{load_library().path} has no headers beside it")
    source, binary = tmp_path / "compare.c", tmp_path / "compare"
    source.write_text(program())
    for folder in found:
        subprocess.run([compiler, f"-I{folder}", str(source), "-o", str(binary)], check=True, timeout=110)
        done = subprocess.run([str(binary)], capture_output=True, text=True, check=True, timeout=10)
        assert done.stdout == "", folder
