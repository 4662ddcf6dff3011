"""Read one plan of one version and prove what arrived: waves, replicas of lost holders, lease, rate, cells.

`read_plan` is the same for a whole shadow refit and for each step of a streamed one; nothing that it does touches
the engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.planner.errors import CoverageError, PlanError
from reshard.refit.checks import Checks
from reshard.refit.deadline import Deadline
from reshard.refit.errors import HolderLostError
from reshard.refit.records import check_throughput
from reshard.refit.report import Verified
from reshard.refit.rescue import rescue
from reshard.refit.sentinel import require_delivered
from reshard.refit.verify import Mode, Verifier
from reshard.refit.waves import WireTotals
from reshard.transports.errors import TransportError

if TYPE_CHECKING:
    from reshard.planner import Plan
    from reshard.refit.reader import Reader
    from reshard.rendezvous.types import Manifest
    from reshard.transports import Transport

logger = logging.getLogger(__name__)

__all__ = ["Loaded", "Reading", "read_plan"]


@dataclass(slots=True)
class Loaded:
    """What was read, with how much of it verified, and which holders were given up."""

    totals: WireTotals = field(default_factory=WireTotals)
    data_bytes: int = 0
    verified: Verified = field(default_factory=Verified)
    lost: frozenset[str] = frozenset()

    def add(self, other: Loaded) -> None:
        """Count another read of the same refit too."""
        self.totals.add(other.totals)
        self.data_bytes += other.data_bytes
        self.verified = self.verified.plus(other.verified)
        self.lost |= other.lost


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read: settings that do not change within a refit."""

    transport: Transport
    verify: Mode
    require_verified: bool
    stall_s: float | None
    sentinel: bool
    context: Mapping[str, str | int]
    on_allocate: Callable[[str, int], None] | None = None


def read_plan(
    how: Reading,
    reader: Reader,
    plan: Plan,
    checks: Checks | None,
    manifest: Manifest,
    deadline: Deadline,
    *,
    without: frozenset[str] = frozenset(),
    seeded: Sequence[str] = (),
    enter: Callable[[str], None] = lambda stage: None,
    check_lease: Callable[[], None] = lambda: None,
) -> Loaded:
    """Read ``plan`` into the reader's buffers.

    Parameters
    ----------
    without
        Holders given up before.
    seeded
        Buffers that hold live bytes where the plan writes nothing.
    enter
        Told when the stages ``read`` and ``verify`` begin.
    check_lease
        Called after the last read, before anything is believed.

    Raises
    ------
    HolderLostError
        A holder failed and no replica has what it owed.
    TransportError
        The only holder failed, or memory is in doubt.
    TornReadError, VerificationError, UnverifiedError, ImpossibleThroughputError
        What was read cannot be trusted.
    """
    version = manifest.version
    # Destinations that are looked at for the sentinel are verified only after that.
    bound = reader.bind(manifest, checks if how.verify != "off" and not how.sentinel else None)
    enter("read")
    verifier = (
        Verifier(checks, how.verify, (version.epoch, version.step), reader.device) if checks is not None else None
    )
    with verifier if verifier is not None else contextlib.nullcontext():
        totals = reader.read(
            bound, manifest, deadline, verifier=verifier, may_lose=len(plan.holders) > 1, stall_s=how.stall_s
        )
        out = Loaded(totals, max(totals.kept_bytes - reader.meta_bytes(totals.lost), 0), Verified(how.verify))
        verifiers: tuple[Verifier, ...] = () if verifier is None else (verifier,)
        if totals.lost:
            if verifier is not None:
                verifier.finish(totals.lost)  # before anything is written into the same buffers
            verifiers += _rescued(how, reader, plan, manifest, deadline, without, out)
        check_lease()
        if how.sentinel:
            names = plan.buffers.names_list
            require_delivered(reader.device, dict(zip(names, reader.buffers(), strict=True)), seeded)
        check_throughput(out.data_bytes, totals.seconds, how.context)
        enter("verify")
        out.verified = Verified(how.verify, received_bytes=out.data_bytes)
        if verifier is None or checks is None:
            return out
        verifier.finish(totals.lost)
    verified = sum(v.verified_bytes for v in verifiers)
    if how.require_verified and (verified < out.data_bytes or checks.partial):
        verifier.require_all(out.data_bytes)
    out.verified = Verified(
        how.verify,
        verified,
        out.data_bytes,
        sum(v.n_cells for v in verifiers),
        len(checks.partial),
        sum(v.seconds for v in verifiers),
    )
    return out


def _rescued(
    how: Reading,
    reader: Reader,
    plan: Plan,
    manifest: Manifest,
    deadline: Deadline,
    without: frozenset[str],
    out: Loaded,
) -> tuple[Verifier, ...]:
    """Read from replicas what lost holders owed; the first loss is raised where nobody else has it."""
    lost: dict[str, TransportError] = out.totals.lost
    names = frozenset(lost)
    cause = next(iter(lost.values()))
    logger.warning("lost %s in a read, turning to replicas: %s", ", ".join(sorted(names)), cause)
    buffers = dict(zip(plan.buffers.names_list, reader.buffers(), strict=True))
    try:
        found = rescue(
            how.transport,
            reader,
            plan,
            manifest,
            names | without,
            deadline,
            verify=how.verify,
            buffers=buffers,
            stall_s=how.stall_s,
            on_allocate=how.on_allocate,
        )
    except (CoverageError, PlanError) as gap:
        raise HolderLostError(names | without, cause, gap) from cause
    finally:
        reader.links.release(names)
    out.lost = found.lost
    out.totals.add(found.totals)
    out.data_bytes += found.totals.nbytes
    return found.verifiers
