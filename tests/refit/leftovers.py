"""What a run leaves on the machine, told from what other runs own."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["orphaned_segments", "segments"]


def segments() -> set[str]:
    """Names of the shared-memory segments that there are; semaphores of multiprocessing are never ours."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if not entry.name.startswith("sem.mp-")}


def orphaned_segments(before: set[str]) -> set[str]:
    """Segments that were not there before and that no living process has mapped, a second later still.

    A second, because others on this machine make segments too, and are for a moment between making one and mapping it.
    """
    new = _unmapped(segments() - before)
    if new:
        time.sleep(1)
        new = _unmapped(new & segments())
    return new & segments()


def _unmapped(new: set[str]) -> set[str]:
    for entry in Path("/proc").iterdir():
        if new and entry.name.isdigit():
            try:
                maps = (entry / "maps").read_text()
            except OSError:
                continue
            new = {name for name in new if f"/dev/shm/{name}" not in maps}
    return new
