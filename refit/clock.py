"""Seconds by stage of one refit or one publication, and a hook at the start of each."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["STAGES", "StageClock"]

STAGES = (
    "discover",
    "capture",
    "plan",
    "certify",
    "connect",
    "allocate",
    "read",
    "verify",
    "load",
    "release",
    "vote",
    "install",
    "check",
    "serve",
)
"""Names of the stages, in order; a warm refit skips those from ``capture`` to ``certify``."""


class StageClock:
    """Times stages one after another.

    Parameters
    ----------
    on_stage
        Called with the stage's name when it starts; what it raises fails the refit like any other failure.
    """

    def __init__(self, on_stage: Callable[[str], None] | None = None) -> None:
        self._on_stage = on_stage
        self._since = time.perf_counter()
        self.stage = ""
        self.seconds: dict[str, float] = {}

    def enter(self, stage: str) -> None:
        """End the running stage and start ``stage``."""
        self.stop()
        self.stage = stage
        if self._on_stage is not None:
            self._on_stage(stage)
        self._since = time.perf_counter()

    def stop(self) -> dict[str, float]:
        """End the running stage; returns seconds by stage."""
        if self.stage:
            self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + time.perf_counter() - self._since
            self.stage = ""
        return self.seconds
