"""How much of an engine does a plan write? In bytes, not names.

1. The certificate says for every destination buffer how many bytes are copied and how many are filled.
2. The engine says how many bytes each of its parameters has; buffers are named after parameters.
3. A parameter is installed if any byte of it is copied, filled or left to the engine's own loader; else it was never
   written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.planner.certificate import loader_bytes
from reshard.planner.errors import PlanError
from reshard.planner.plans import Plan

__all__ = ["Coverage", "PartlyWritten", "engine_coverage"]


@dataclass(frozen=True, slots=True)
class PartlyWritten:
    """A parameter of which some bytes are in no request."""

    name: str
    written_bytes: int
    engine_bytes: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a plan writes of an engine.

    Attributes
    ----------
    engine_bytes : int
        Bytes of all parameters.
    dest_bytes : int
        Bytes that the certificate proves written from sources, and those left to the engine's own loader.
    filled_bytes : int
        Bytes that the certificate proves filled with constants.
    n_parameters, n_installed : int
        Parameters in all, and those of which any byte is written or filled.
    never_written : tuple of str
        Names of the others, sorted.
    partly_written : tuple of PartlyWritten
        Installed parameters with bytes that nothing writes, sorted by name.
    """

    engine_bytes: int
    dest_bytes: int
    filled_bytes: int
    n_parameters: int
    n_installed: int
    never_written: tuple[str, ...]
    partly_written: tuple[PartlyWritten, ...]

    @property
    def percent(self) -> float:
        """Bytes written or filled, in percent of the engine's, to four decimals; 0.0 for an engine without bytes."""
        if not self.engine_bytes:
            return 0.0
        return round(100.0 * (self.dest_bytes + self.filled_bytes) / self.engine_bytes, 4)


def engine_coverage(plan: Plan, parameters: Mapping[str, int]) -> Coverage:
    """Hold a plan's certificate against an engine's parameters.

    Parameters
    ----------
    plan : Plan
    parameters : mapping of str to int
        Bytes of each of the engine's parameters, by name. Buffers of the plan that are no parameter do not count.

    Returns
    -------
    Coverage

    Raises
    ------
    PlanError
        A buffer has more bytes written than its parameter has.

    Examples
    --------
    >>> from reshard.planner import Buffer, Holder, ReadRequest, ReadTable, Shard, ShardPart, ShardTable, plan
    >>> part = ShardPart.from_shards(Holder("r0"), [Shard("w", "uint8", (6,), (0,), (6,))], [6])
    >>> read = ReadRequest("w", (6,), "uint8", (0,), (1,), (6,), 0, 0, (1,))
    >>> made = plan(ShardTable([part]), ReadTable.build([Buffer("p", (8,), "uint8")], [read]))
    >>> coverage = engine_coverage(made, {"p": 8, "q": 4})
    >>> coverage.percent, coverage.never_written, coverage.partly_written
    (50.0, ('q',), (PartlyWritten(name='p', written_bytes=6, engine_bytes=8),))
    """
    reads, certificate = plan.reads, plan.certificate
    n = len(reads.buffers)
    written = (certificate.buffer_written_bytes[:n] + loader_bytes(plan.demand)).tolist()
    filled = certificate.buffer_filled_bytes[:n].tolist()
    counts = dict(zip(reads.buffers.names_list, zip(written, filled, strict=True), strict=True))
    never, partly = [], []
    dest_bytes = filled_bytes = 0
    for name in sorted(parameters):
        size = parameters[name]
        copied, constant = counts.get(name, (0, 0))
        if copied + constant > size:
            raise PlanError(
                f"buffer {name!r}: {copied + constant} bytes are written, the engine's parameter has {size}",
                tensor=name,
                got=copied + constant,
                expected=size,
            )
        dest_bytes += copied
        filled_bytes += constant
        if copied + constant == 0 and size:
            never.append(name)
        elif copied + constant < size:
            partly.append(PartlyWritten(name, copied + constant, size))
    return Coverage(
        sum(parameters.values()),
        dest_bytes,
        filled_bytes,
        len(parameters),
        len(parameters) - len(never),
        tuple(never),
        tuple(partly),
    )
