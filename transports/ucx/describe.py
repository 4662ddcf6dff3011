"""What UCX would use here, and what a user should know about it: the UCX half of ``reshard doctor``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.transports.regions import MemoryKind
from reshard.transports.ucx.context import DEFAULTS, Context
from reshard.transports.ucx.library import Library, load_library

NETWORK = ("rc", "dc", "gga", "srd", "ugni")
"""Prefixes of UCX transports that read another host's memory in hardware."""
CMA_SINCE = (1, 20)
"""Before this version UCX has no CMA for endpoints that survive their peers."""
ONE_HOST: Mapping[MemoryKind, frozenset[str]] = {
    "dram": frozenset({"cma", "xpmem", "knem"}),
    "vram": frozenset({"cuda_ipc", "rocm_ipc"}),
}
"""UCX transports that read another process's memory directly, by the kind of memory on both sides."""

_RESOURCE = re.compile(r"#\s+resource \d+\s+:.*-- (?P<transport>[^/\s]+)/(?P<device>\S+)")


@dataclass(frozen=True, slots=True)
class UcxDescription:
    """Outcome of `describe`.

    Attributes
    ----------
    path, origin : str
        Of the library; see `reshard.transports.ucx.library.Library`.
    version : str
    memory_kinds : tuple of str
        Kinds of memory that it can read and write.
    resources : tuple of (str, str)
        (transport, device) pairs that it may choose from, such as ``("tcp", "eth0")``.
    environment : mapping of str to str
        ``UCX_*`` variables in force.
    warnings : tuple of str
        What is slower or riskier than it need be, and what to do about it.
    """

    path: str
    origin: str
    version: str
    memory_kinds: tuple[MemoryKind, ...]
    resources: tuple[tuple[str, str], ...]
    environment: Mapping[str, str]
    warnings: tuple[str, ...]


def describe(library: str = "", config: Mapping[str, str] | None = None) -> UcxDescription:
    """Load UCX and ask it what it has.

    Parameters
    ----------
    library : str
        See `load_library`.
    config : mapping of str to str
        UCX settings without the ``UCX_`` prefix.

    Raises
    ------
    TransportUnavailableError
        If there is no UCX that works here.
    """
    loaded = load_library(library)
    context = Context(loaded, dict(config or {}))
    try:
        found = _RESOURCE.finditer(loaded.capture(loaded.ucp.ucp_context_print_info, context.handle))
        resources = tuple((match["transport"], match["device"]) for match in found)
        kinds = context.memory_kinds()
    finally:
        context.close()
    environment = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
    return UcxDescription(
        loaded.path,
        loaded.origin,
        ".".join(map(str, loaded.version)),
        kinds,
        resources,
        environment,
        tuple(_warnings(loaded, resources, environment)),
    )


def one_sided(
    transports: tuple[tuple[str, str], ...], local_memory: MemoryKind = "dram", remote_memory: MemoryKind = "dram"
) -> bool:
    """Return whether memory is read one-sidedly over these (transport, device) pairs; else UCX would emulate it."""
    names = {name for name, _ in transports}
    if any(name.startswith(NETWORK) for name in names):
        return True
    kinds = {local_memory, remote_memory}
    return any(kinds == {kind} and names.intersection(direct) for kind, direct in ONE_HOST.items())


def _warnings(library: Library, resources: tuple[tuple[str, str], ...], environment: Mapping[str, str]) -> list[str]:
    warnings = []
    names = {name for name, _ in resources}
    if not any(name.startswith(NETWORK) for name in names):
        hint = (
            "; the libucx wheel has no InfiniBand: install UCX with it and set RESHARD_UCX_LIBRARY=system"
            if library.origin == "wheel"
            else ""
        )
        warnings.append(f"between hosts peers are read by messages over TCP, which the owner's process answers{hint}")
    if not names & ONE_HOST["dram"]:
        warnings.append("on one host peers are read by messages: UCX has no CMA here (UCX_TLS, or ptrace rights)")
    elif library.version < CMA_SINCE:
        warnings.append("on one host peers are read by messages: before 1.20 UCX has no CMA that survives a peer")
    for key, value in DEFAULTS.items():
        if environment.get(f"UCX_{key}", value) != value:
            was = environment[f"UCX_{key}"]
            warnings.append(
                f"UCX_{key}={was} in the environment, perhaps set by a library: it does not reach this transport "
                f"(which uses {value}), but it does reach other users of UCX, such as NIXL agents"
            )
    return warnings
