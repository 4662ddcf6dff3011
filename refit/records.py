"""The records that a refit leaves in the log: one line each, ``MARKER {json}``, keys sorted.

Each record is a frozen dataclass, returned to the caller too; markers and schemas are stable constants. All go
through the logger ``reshard.refit``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from reshard.refit import settings
from reshard.refit.errors import ImpossibleThroughputError

logger = logging.getLogger("reshard.refit")

__all__ = [
    "MARKERS",
    "CoverageRecord",
    "DiscoveryRecord",
    "ImpossibleThroughputRecord",
    "Record",
    "SlowThroughputRecord",
    "StagesRecord",
    "check_throughput",
    "emit",
    "implied_gbps",
]


@dataclass(frozen=True, slots=True)
class Record:
    """Base of all records: a marker, a schema label and JSON fields."""

    marker: ClassVar[str] = ""
    schema: ClassVar[str] = ""

    def payload(self) -> dict[str, object]:
        """The record as JSON-able fields, schema included."""
        return {"schema": self.schema, **dataclasses.asdict(self)}

    def line(self) -> str:
        """``MARKER {json}`` with sorted keys, on one line."""
        return f"{self.marker} {json.dumps(self.payload(), sort_keys=True, allow_nan=False)}"


@dataclass(frozen=True, slots=True)
class CoverageRecord(Record):
    """How much of the engine a plan writes; emitted at each plan, before an incomplete one is refused."""

    marker: ClassVar[str] = "REFIT_COVERAGE"
    schema: ClassVar[str] = "refit-coverage-v1"

    rank: int
    params_installed: int
    engine_params: int
    dest_bytes: int
    filled_bytes: int
    engine_bytes: int
    coverage_pct: float
    params_never_written: int
    params_never_written_sample: tuple[str, ...]
    params_part_written: int
    params_part_written_sample: tuple[str, ...]
    copies_captured: int
    unsupported: int
    unsupported_sample: tuple[str, ...]
    unsupported_causes: tuple[tuple[str, int], ...]
    planned_wire_bytes: int
    extra_wire_bytes: int
    descriptors: int
    descriptor_savings: int
    full_pull_sources: int
    unbounded_sources: int
    converts: int
    fallback: str


@dataclass(frozen=True, slots=True)
class StagesRecord(Record):
    """Seconds by stage and bytes of one refit."""

    marker: ClassVar[str] = "REFIT_STAGES"
    schema: ClassVar[str] = "refit-stages-v1"

    rank: int
    member: str
    model: str
    epoch: int
    step: int
    mode: str
    cold: bool
    outcome: str
    stages_s: Mapping[str, float]
    total_s: float
    useful_bytes: int
    wire_bytes: int
    verified_bytes: int
    received_bytes: int
    descriptors: int
    wire_s: float
    implied_gbps: float
    new_registrations: int
    failovers: int


@dataclass(frozen=True, slots=True)
class SlowThroughputRecord(Record):
    """The implied rate was under the floor."""

    marker: ClassVar[str] = "REFIT_SLOW_THROUGHPUT"
    schema: ClassVar[str] = "refit-slow-throughput-v1"

    wire_bytes: int
    wire_s: float
    implied_gbps: float
    floor_gbps: float
    shortfall_x: float
    context: Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class ImpossibleThroughputRecord(Record):
    """The implied rate was over the ceiling; the refit is refused."""

    marker: ClassVar[str] = "REFIT_IMPOSSIBLE_THROUGHPUT"
    schema: ClassVar[str] = "refit-impossible-throughput-v1"

    wire_bytes: int
    wire_s: float
    implied_gbps: float
    ceiling_gbps: float
    excess_x: float
    context: Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class DiscoveryRecord(Record):
    """What one await of a version found."""

    marker: ClassVar[str] = "REFIT_DISCOVERY"
    schema: ClassVar[str] = "refit-discovery-v1"

    rank: int
    member: str
    model: str
    epoch: int
    step: int
    slots: int
    slots_empty: int
    tensors: int
    shards: int
    tables_fetched: int
    changed: bool
    seconds: float


MARKERS: tuple[str, ...] = tuple(
    kind.marker
    for kind in (CoverageRecord, StagesRecord, SlowThroughputRecord, ImpossibleThroughputRecord, DiscoveryRecord)
)
"""All marker strings."""


def emit(record: Record, level: int = logging.INFO) -> None:
    """Log one record on one line."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", record.line())


def implied_gbps(wire_bytes: int, wire_s: float) -> float:
    """Bytes times 8 over seconds over 1e9; 0.0 where nothing moved, infinite where it moved in no time."""
    if wire_bytes == 0:
        return 0.0
    return wire_bytes * 8 / wire_s / 1e9 if wire_s > 0 else float("inf")


def check_throughput(
    wire_bytes: int, wire_s: float, context: Mapping[str, str | int]
) -> SlowThroughputRecord | ImpossibleThroughputRecord | None:
    """Compare a read's implied rate with the floor and the ceiling; emit the record that applies, and return it.

    Parameters
    ----------
    wire_bytes
        Bytes that the transport says it moved.
    wire_s
        Seconds on the wire, without any preparation in Python.
    context
        Rank, step and the like, copied into the record.

    Raises
    ------
    ImpossibleThroughputError
        If the rate is strictly over ``RESHARD_MAX_GBPS``.
    """
    rate = implied_gbps(wire_bytes, wire_s)
    shown = rate if rate != float("inf") else 1e308
    ceiling = settings.max_gbps()
    if ceiling and rate > ceiling:
        impossible = ImpossibleThroughputRecord(
            wire_bytes, round(wire_s, 6), round(shown, 3), ceiling, round(min(shown / ceiling, 1e308), 3), dict(context)
        )
        emit(impossible, logging.WARNING)
        raise ImpossibleThroughputError(
            f"{wire_bytes} bytes in {wire_s:.6f} s are {shown:.1f} Gb/s, over RESHARD_MAX_GBPS={ceiling:g}: they "
            "cannot have "
            "moved; nothing is installed",
            implied_gbps=rate,
            ceiling_gbps=ceiling,
        )
    floor = settings.min_gbps()
    if floor and wire_bytes and rate < floor:
        slow = SlowThroughputRecord(
            wire_bytes,
            round(wire_s, 6),
            round(rate, 3),
            floor,
            round(min(floor / max(rate, 1e-300), 1e308), 3),
            dict(context),
        )
        emit(slow, logging.WARNING)
        return slow
    return None
