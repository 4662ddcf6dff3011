"""A clock that stands still: what depends on time is tested without any passing."""

from __future__ import annotations

import pytest


class StoppedClock:
    """In place of the module ``time``: nothing passes but what is slept.

    Parameters
    ----------
    monkeypatch, modules
        Where it is put, for as long as the test runs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now_s = 1000.0
        for module in modules:
            monkeypatch.setattr(f"{module}.time", self)

    def monotonic(self) -> float:
        """Seconds, as `time.monotonic`."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
