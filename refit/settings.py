"""The environment settings of a refit, each read when it is used and validated with a message that names it.

| variable | meaning | default |
|---|---|---|
| `RESHARD_REQUIRE_FULL_COVERAGE` | 1 turns the coverage gate on | off |
| `RESHARD_COVERAGE_FLOOR` | least fraction of the engine's bytes that the gate accepts | 0.995 |
| `RESHARD_MIN_GBPS` | rate in Gb/s under which `REFIT_SLOW_THROUGHPUT` is logged; 0 is off | 0 |
| `RESHARD_MAX_GBPS` | rate in Gb/s over which a refit is refused as impossible; 0 is off | 0 |
| `RESHARD_DEBUG_SENTINEL` | 1 fills destinations with 0xA5 before each read | off |
| `RESHARD_RETRY_ATTEMPTS` | tries of a dial or a question, in all | what the rendezvous suggests, else 3 |
| `RESHARD_RETRY_BACKOFF_S` | pause before the second try, seconds | likewise, else 0.05 |
| `RESHARD_RETRY_FACTOR` | what the pause grows by | likewise, else 2 |
| `RESHARD_RETRY_MAX_BACKOFF_S` | where the pause stops growing, seconds | likewise, else 2 |
| `RESHARD_RETRY_DEADLINE_S` | no try begins later than this, seconds; 0 is the call's own deadline | likewise, else 0 |
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass

logger = logging.getLogger("reshard.refit")

__all__ = [
    "RetrySettings",
    "coverage_floor",
    "debug_sentinel",
    "expandable_segments",
    "max_gbps",
    "min_gbps",
    "require_full_coverage",
    "retry",
]

_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("", "0", "false", "no", "off"))


def _flag(name: str) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{name}={text!r}: expected one of 1, true, yes, on, 0, false, no, off")


def require_full_coverage(override: bool | None) -> bool:
    """Whether the coverage gate is on: the caller's choice, else ``RESHARD_REQUIRE_FULL_COVERAGE``."""
    return _flag("RESHARD_REQUIRE_FULL_COVERAGE") if override is None else override


def debug_sentinel(override: bool | None) -> bool:
    """Whether destinations are filled with a sentinel before each read."""
    return _flag("RESHARD_DEBUG_SENTINEL") if override is None else override


def coverage_floor(override: float | None) -> float:
    """The gate's floor: the caller's, else ``RESHARD_COVERAGE_FLOOR``, else 0.995.

    Raises
    ------
    ValueError
        If it is not a fraction in [0.0, 1.0].
    """
    where = "coverage_floor"
    value: float
    if override is None:
        text = os.environ.get("RESHARD_COVERAGE_FLOOR", "").strip() or "0.995"
        where = "RESHARD_COVERAGE_FLOOR"
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{where}={text!r}: expected a fraction in [0.0, 1.0]") from None
    else:
        value = float(override)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{where}={value!r}: expected a fraction in [0.0, 1.0]")
    return value


def _rate(name: str) -> float:
    """A rate in Gb/s; what is negative, not finite or no number is off, and says so."""
    text = os.environ.get(name, "").strip()
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        logger.warning("%s=%r is not a finite rate of at least 0 Gb/s: the check is off", name, text)
        return 0.0
    return value


def min_gbps() -> float:
    """Throughput floor in Gb/s; 0 is off."""
    return _rate("RESHARD_MIN_GBPS")


def max_gbps() -> float:
    """Throughput ceiling in Gb/s; 0 is off."""
    return _rate("RESHARD_MAX_GBPS")


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """The retry policy as far as the environment says it; None where it says nothing."""

    attempts: int | None = None
    backoff_s: float | None = None
    factor: float | None = None
    max_backoff_s: float | None = None
    deadline_s: float | None = None


def retry() -> RetrySettings:
    """What ``RESHARD_RETRY_*`` say.

    Raises
    ------
    ValueError
        For what is no number, or out of range, naming the variable.
    """
    attempts = _number("RESHARD_RETRY_ATTEMPTS", 1.0)
    if attempts is not None and attempts != int(attempts):
        raise ValueError(f"RESHARD_RETRY_ATTEMPTS={attempts:g}: expected a whole number of at least 1")
    return RetrySettings(
        int(attempts) if attempts is not None else None,
        _number("RESHARD_RETRY_BACKOFF_S", 0.0),
        _number("RESHARD_RETRY_FACTOR", 1.0),
        _number("RESHARD_RETRY_MAX_BACKOFF_S", 0.0),
        _number("RESHARD_RETRY_DEADLINE_S", 0.0),
    )


def _number(name: str, least: float) -> float | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{name}={text!r}: expected a finite number of at least {least:g}")
    return value


def expandable_segments() -> str:
    """The variable by which torch was told to use expandable CUDA segments, which cannot be registered; else empty."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for option in os.environ.get(name, "").split(","):
            key, _, value = option.partition(":")
            if key.strip().lower() == "expandable_segments" and value.strip().lower() in _TRUE:
                return name
    return ""
