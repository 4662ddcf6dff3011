"""A holder failed in the middle of a read: fetch what it owed from its replicas, and nothing else.

1. The plan's blocks that the lost holders had to deliver become a read table of their own, into the same
   destination buffers.
2. It is planned over the holders that are left, with staging of its own; what nobody else has is a `CoverageError`.
3. It is read and verified like any plan. If another holder fails on the way, the same is done once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from reshard.planner import ReadTable, plan
from reshard.planner.errors import PlanError
from reshard.refit.checks import build_checks
from reshard.refit.deadline import Deadline
from reshard.refit.reader import Reader
from reshard.refit.verify import Mode, Verifier
from reshard.refit.waves import WireTotals

if TYPE_CHECKING:
    from reshard.planner import Plan, ShardTable
    from reshard.refit.devices import Memory
    from reshard.rendezvous.types import Manifest
    from reshard.transports.base import Transport

__all__ = ["Rescue", "owed_by", "rescue"]


@dataclass(slots=True)
class Rescue:
    """What a rescue reads, and around whom; filled in as it goes.

    Attributes
    ----------
    lost
        Holders that are given up: at the beginning those whose rows are to be read from others.
    moved
        All that moved.
    received_bytes
        What of it stands.
    verifiers
        Of what was read.
    """

    lost: frozenset[str]
    moved: WireTotals = field(default_factory=WireTotals)
    received_bytes: int = 0
    verifiers: list[Verifier] = field(default_factory=list)


def owed_by(made: Plan, lost: frozenset[str]) -> ReadTable:
    """Requests for exactly what ``lost`` holders had to deliver.

    Raises
    ------
    PlanError
        For packed sub-byte tensors, whose boxes are not expressed in elements.
    """
    blocks, reads = made.blocks, made.reads
    numbers = [i for i, h in enumerate(made.holders) if h.name in lost]
    rows = np.flatnonzero(np.isin(blocks.holder, numbers))
    request = blocks.request[rows]
    bits = made.buffers.bits[blocks.buffer[rows]]
    if bool((bits < 8).any()):
        raise PlanError("a lost holder's packed sub-byte tensors cannot be read again by rows")
    item = bits // 8
    return ReadTable(
        reads.tensors,
        made.buffers,
        reads.tensor_id[request],
        tuple(c[rows] for c in blocks.start),
        tuple(c[rows] for c in blocks.step),
        tuple(c[rows] for c in blocks.count),
        blocks.buffer[rows],
        blocks.dst_offset_bytes[rows] // item,
        tuple(c[rows] // item for c in blocks.dst_stride_bytes),
        np.zeros(len(rows), np.int64),
        np.zeros(len(rows), np.int64),
    )


def rescue(
    transport: Transport,
    main: Reader,
    made: Plan,
    manifest: Manifest,
    into: Rescue,
    deadline: Deadline,
    *,
    verify: Mode,
    buffers: Mapping[str, Memory],
    stall_s: float | None,
    on_allocate: Callable[[str, int], None] | None = None,
) -> None:
    """Read what the holders in ``into.lost`` owed; what was read is in ``into``, also where this raises.

    Raises
    ------
    CoverageError
        What no other holder has.
    TransportError, VerificationError
        As any read.
    """
    sources: ShardTable = made.sources
    owed, owed_plan = owed_by(made, into.lost), made
    version = manifest.version
    while True:
        left = sources.replace(removed=[name for name in sorted(into.lost) if name in sources.by_name])
        owed_plan = plan(left, owed, made.options)
        checks = build_checks(owed_plan) if verify != "off" else None
        verifier = (
            Verifier(checks, verify, (version.epoch, version.step), deadline, main.device)
            if checks is not None
            else None
        )
        reader = Reader(transport, swaps=False, on_allocate=on_allocate, links=main.links, device=main.device)
        moved = WireTotals()
        try:
            reader.adopt(owed_plan, checks.n_cells if checks is not None else {}, borrowed=buffers)
            main.links.ensure([manifest.slot(h.name) for h in owed_plan.holders], deadline, exact=False)
            reader.arenas.allocate()
            reader.read(
                reader.bind(manifest), manifest, deadline, moved, verifier=verifier, may_lose=True, stall_s=stall_s
            )
            if verifier is not None:
                into.verifiers.append(verifier)
                verifier.finish(moved.lost)
        finally:
            reader.release()
            into.moved.add(moved)
            into.received_bytes += moved.kept_bytes
        if not moved.lost:
            return
        into.lost |= set(moved.lost)
        owed = owed_by(owed_plan, frozenset(moved.lost))
