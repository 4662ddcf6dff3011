"""Hypothesis profiles `dev` (the default), `ci` and `nightly` (RESHARD_HYPOTHESIS_PROFILE); SIGINT reaches commands."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

_SLOW_MACHINES = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("dev", max_examples=60, deadline=None, suppress_health_check=_SLOW_MACHINES)
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=_SLOW_MACHINES,
)
settings.register_profile(
    "nightly", max_examples=5_000, deadline=None, print_blob=True, suppress_health_check=_SLOW_MACHINES
)
settings.load_profile(os.environ.get("RESHARD_HYPOTHESIS_PROFILE", "dev"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; commands under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
