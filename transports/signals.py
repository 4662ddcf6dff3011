"""Keeping a native library's hands off the process's signals.

UCX installs a SIGHUP handler when it is loaded (the process then no longer dies of SIGHUP), in some builds also
handlers for SIGSEGV and its kind.  A library that is loaded into a trainer has no business with either.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator

_SIGACTION_BYTES = 1024  # more than any ``struct sigaction``; it is only handed back


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Restore every signal's disposition at the end."""
    libc = ctypes.CDLL(None)
    kept: dict[int, ctypes.Array[ctypes.c_char]] = {}
    for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        buffer = ctypes.create_string_buffer(_SIGACTION_BYTES)
        if libc.sigaction(int(one), None, buffer) == 0:
            kept[int(one)] = buffer
    try:
        yield
    finally:
        for number, buffer in kept.items():
            libc.sigaction(number, buffer, None)
