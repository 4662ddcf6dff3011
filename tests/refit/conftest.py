"""Small batches for all tests of this folder, so that what they read is verified while more is read."""

from __future__ import annotations

import pytest

from reshard.refit import reader


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are too small for the default of 64 MiB."""
    monkeypatch.setattr(reader, "BATCH_BYTES", 256)
