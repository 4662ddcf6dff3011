"""What a run leaves on the machine, told from what other runs own."""

from __future__ import annotations

from pathlib import Path

__all__ = ["orphaned_segments", "segments"]


def segments() -> set[str]:
    """Names of the shared-memory segments that there are."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def orphaned_segments(before: set[str]) -> set[str]:
    """Segments that were not there before and that no living process has mapped."""
    new = segments() - before
    for entry in Path("/proc").iterdir():
        if new and entry.name.isdigit():
            try:
                maps = (entry / "maps").read_text()
            except OSError:
                continue
            new = {name for name in new if f"/dev/shm/{name}" not in maps}
    return new & segments()
