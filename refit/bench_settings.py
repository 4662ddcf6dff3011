"""What a rank's workbench is told once, by its receiver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.refit.engine import InstallMode
from reshard.refit.planning import Gate
from reshard.refit.verify import Mode

if TYPE_CHECKING:
    from reshard.planner import PlanOptions

__all__ = ["BenchSettings"]


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How one rank plans, checks and installs; see `reshard.refit.receiver.Receiver` for each."""

    model: str
    group: str
    member: str
    rank: int
    options: PlanOptions
    gate: Gate
    install_mode: InstallMode
    stream_bytes: int
    verify: Mode
    cut_hints: bool
