"""Which UCX library is used, and whether we may bind to it.

1. The ``library`` setting, else ``RESHARD_UCX_LIBRARY``, says where to look: ``"wheel"`` (``libucx-cu12`` or
   ``-cu13``), ``"system"`` (what the dynamic loader finds), a path to a ``libucp.so``, or nothing: the wheel if it
   is there, else the system's.
2. It is opened with local symbols, so that it and the renamed copy inside NIXL do not see each other, and once a
   process for each path. Handlers that it sets as it loads (one for SIGHUP, which would no longer end the process;
   in some builds for SIGSEGV) are taken back: a library has no business with the process's signal handlers.
3. Its version is asked of the library itself, and checked against the range that `declarations` was written for.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.planner.errors import require
from reshard.transports.descriptors import require_descriptors
from reshard.transports.errors import TransportUnavailableError
from reshard.transports.signals import signal_handlers_kept
from reshard.transports.ucx.declarations import CDEF, ERR_LAST, NEWEST_TRIED, OLDEST

if TYPE_CHECKING:
    from cffi import FFI

_log = logging.getLogger(__name__)

SETTING = "RESHARD_UCX_LIBRARY"
ERROR_FLOOR = (1 << 64) + ERR_LAST
"""What a native call returns is an error from here on, success if it is 0, and else a request."""
_NAMES = ("libucp.so.0", "libucp.so")


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded UCX.

    Attributes
    ----------
    ffi : cffi.FFI
        With `declarations.CDEF` declared.
    ucp : cffi library
        UCX's own functions.
    path : str
        What was opened: an absolute path, or the name that the loader resolved.
    origin : str
        ``"wheel"``, ``"system"`` or ``"path"``.
    version : tuple of (int, int, int)
        As the library says.
    store_status : int
        Address of libc's ``memset``, which `requests` uses as completion callback.
    """

    ffi: FFI
    ucp: Any  # cffi looks functions up by name; `declarations` holds their types
    path: str
    origin: str
    version: tuple[int, int, int]
    store_status: int

    def status_text(self, status: int) -> str:
        """Return UCX's words for a status, with its number."""
        text: bytes = self.ffi.string(self.ucp.ucs_status_string(status))
        return f"{text.decode('ascii', 'replace')} (UCX status {status})"

    def capture(self, printer: Callable[[int, object], None], handle: int) -> str:
        """Return what a native ``print_info`` function writes about a handle."""
        ffi, libc = self.ffi, self.ffi.dlopen(None)
        text, size = ffi.new("char **"), ffi.new("size_t *")
        stream = libc.open_memstream(text, size)
        try:
            printer(handle, stream)
        finally:
            libc.fclose(stream)
        captured: bytes = ffi.string(text[0])
        libc.free(text[0])
        return captured.decode("utf-8", "replace")


CONTEXT_DESCRIPTORS = 16
"""The first context takes 4, for a thread of UCX's: with fewer left UCX aborts the process."""

_loaded: dict[str, Library] = {}
_lock = threading.Lock()


def load_library(choice: str = "") -> Library:
    """Load UCX.

    Parameters
    ----------
    choice : str
        ``"wheel"``, ``"system"``, a path, or empty: `SETTING`, else the wheel, else the system's.

    Raises
    ------
    TransportUnavailableError
        If cffi or the library is missing, cannot be loaded, or is of a version that was never tried.
    TransportError
        If there are too few file descriptors left for it and a context.
    """
    require_descriptors(CONTEXT_DESCRIPTORS, "loading UCX")
    choice = choice or os.environ.get(SETTING, "")
    with _lock:
        found = _loaded.get(choice)
        if found is None:
            found = _load_first(choice)
            for (
                other
            ) in _loaded.values():  # one binding for each library, however it was chosen: types are of a binding
                if other.path == found.path:
                    found = replace(other, origin=found.origin)
            _loaded[choice] = found
        return found


def _load_first(choice: str) -> Library:
    if not hasattr(os, "memfd_create"):
        raise TransportUnavailableError("transport 'ucx': UCX exists for Linux only", extra="ucx")
    candidates = _candidates(choice)
    reasons = []
    for origin, path in candidates:
        try:
            return _open(origin, path)
        except (OSError, AttributeError, TransportUnavailableError) as error:
            reasons.append(f"{origin} {path}: {error}")
    where = "; ".join(reasons) or "no libucx-cu12 or libucx-cu13 wheel and no libucp.so.0 for the loader"
    raise TransportUnavailableError(
        f"transport 'ucx': no usable UCX library ({SETTING}={choice!r}): {where}; pip install 'reshard[ucx]'",
        package="libucx-cu12",
        extra="ucx",
    )


def _candidates(choice: str) -> list[tuple[str, str]]:
    if choice not in ("", "wheel", "system"):
        path = Path(choice)
        if path.is_dir():
            path = next((path / name for name in _NAMES if (path / name).exists()), path)
        return [("path", str(path.resolve()) if path.exists() else choice)]
    found: list[tuple[str, str]] = []
    if choice != "system":
        spec = importlib.util.find_spec("libucx")
        for folder in spec.submodule_search_locations or () if spec else ():
            found += [("wheel", str(p.resolve())) for n in _NAMES if (p := Path(folder, "lib", n)).exists()][:1]
    if choice != "wheel":
        name = ctypes.util.find_library("ucp")
        found += [("system", name)] if name else []
    return found


def _open(origin: str, path: str) -> Library:
    ffi = require("cffi", extra="ucx").FFI()
    ffi.cdef(CDEF)
    libc = ffi.dlopen(None)
    with signal_handlers_kept():
        ucp = ffi.dlopen(path, ffi.RTLD_LOCAL | ffi.RTLD_NOW)
    numbers = [ffi.new("unsigned *") for _ in range(3)]
    ucp.ucp_get_version(*numbers)
    version = (int(numbers[0][0]), int(numbers[1][0]), int(numbers[2][0]))
    if version[0] != OLDEST[0] or version[:2] < OLDEST:
        raise TransportUnavailableError(
            f"UCX {'.'.join(map(str, version))} at {path}: expected {'.'.join(map(str, OLDEST))} "
            f"to {'.'.join(map(str, NEWEST_TRIED))}",
            package="libucx-cu12",
            extra="ucx",
        )
    if version[:2] > NEWEST_TRIED:
        _log.warning("UCX %s at %s is newer than any that was tried", ".".join(map(str, version)), path)
    return Library(ffi, ucp, path, origin, version, int(ffi.cast("uintptr_t", libc.memset)))
