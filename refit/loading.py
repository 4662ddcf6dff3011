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
from reshard.refit.rescue import Rescue, rescue
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
    """What one refit has read so far, whether or not it ended well.

    Attributes
    ----------
    wire_bytes
        Bytes of data that crossed the wire in whole lists, those of lost holders and of reads that failed included.
    received_bytes
        Those of them that stand: what a lost holder had delivered was read again from others.
    wire_s, n_descriptors
        Seconds with something in flight; native descriptors.
    verified
        How much of ``received_bytes`` was verified.
    lost
        Holders that were given up.
    """

    wire_bytes: int = 0
    received_bytes: int = 0
    wire_s: float = 0.0
    n_descriptors: int = 0
    verified: Verified = field(default_factory=Verified)
    lost: frozenset[str] = frozenset()

    def keep_only(self, before: Loaded) -> None:
        """Begin anew, with other holders, from where it stood ``before``: what has moved since does not stand."""
        self.received_bytes, self.verified = before.received_bytes, before.verified

    def count(self, moved: WireTotals, received_bytes: int) -> None:
        """Add what one read moved, and how much of it stands."""
        self.wire_bytes += moved.nbytes
        self.wire_s += moved.seconds
        self.n_descriptors += moved.n_descriptors
        self.received_bytes += received_bytes


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
    loaded: Loaded,
    *,
    without: frozenset[str] = frozenset(),
    seeded: Sequence[str] = (),
    enter: Callable[[str], None] = lambda stage: None,
    check_lease: Callable[[], None] = lambda: None,
) -> None:
    """Read ``plan`` into the reader's buffers.

    Parameters
    ----------
    loaded
        What was read is added to it, also where this raises.
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
    moved, rescued = WireTotals(), Rescue(lost=without)
    verifier = (
        Verifier(checks, how.verify, (version.epoch, version.step), deadline, reader.device)
        if checks is not None
        else None
    )
    before = loaded.received_bytes
    try:
        with verifier if verifier is not None else contextlib.nullcontext():
            may_lose = len(plan.holders) > 1
            reader.read(bound, manifest, deadline, moved, verifier=verifier, may_lose=may_lose, stall_s=how.stall_s)
            if moved.lost:
                if verifier is not None:
                    verifier.finish(moved.lost)  # before anything is written into the same buffers
                _turn_to_replicas(how, reader, plan, manifest, deadline, moved.lost, rescued)
            check_lease()
            if how.sentinel:
                names = plan.buffers.names_list
                buffers = dict(zip(names, reader.arenas.buffers(), strict=True))
                require_delivered(reader.device, buffers, seeded)
            check_throughput(moved.nbytes + rescued.moved.nbytes, moved.seconds + rescued.moved.seconds, how.context)
            enter("verify")
            if verifier is not None:
                verifier.finish(moved.lost)
    finally:
        loaded.count(moved, moved.kept_bytes)
        loaded.count(rescued.moved, rescued.received_bytes)
        loaded.lost |= rescued.lost - without
        received = loaded.received_bytes - before
        verifiers = (*(() if verifier is None else (verifier,)), *rescued.verifiers)
        loaded.verified = loaded.verified.plus(
            Verified(
                how.verify,
                sum(v.verified_bytes for v in verifiers),
                received,
                sum(v.n_cells for v in verifiers),
                sum(len(v.partial) for v in verifiers),
                sum(v.seconds for v in verifiers),
            )
        )
    if how.require_verified:
        verified = sum(v.verified_bytes for v in verifiers)
        for one in verifiers:
            one.require_all(verified, received)


def _turn_to_replicas(
    how: Reading,
    reader: Reader,
    plan: Plan,
    manifest: Manifest,
    deadline: Deadline,
    lost: Mapping[str, TransportError],
    rescued: Rescue,
) -> None:
    """Read from replicas what lost holders owed; the first loss is raised where nobody else has it."""
    names = frozenset(lost)
    cause = next(iter(lost.values()))
    logger.warning("lost %s in a read, turning to replicas: %s", ", ".join(sorted(names)), cause)
    without, rescued.lost = rescued.lost, rescued.lost | names
    buffers = dict(zip(plan.buffers.names_list, reader.arenas.buffers(), strict=True))
    try:
        rescue(
            how.transport,
            reader,
            plan,
            manifest,
            rescued,
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
