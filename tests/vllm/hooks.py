"""What tests do to a model inside vLLM's workers."""

from __future__ import annotations

import time
from typing import Any

STEP_S = 0.01


def slow_down(model: Any) -> None:
    """Make each step take `STEP_S` more, so that a driver on a busy machine keeps up with the engine."""
    model.register_forward_pre_hook(lambda *_: time.sleep(STEP_S))
