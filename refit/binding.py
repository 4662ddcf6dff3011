"""One version's addresses made into prepared lists: data by wave, headers before and after, digests beside.

Regions that a version names must have the sizes that its table gave: a plan was checked against the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.errors import RefitError

if TYPE_CHECKING:
    from reshard.planner import Plan
    from reshard.refit.links import Links
    from reshard.rendezvous.types import SlotRecord
    from reshard.transports.base import Prepared, Transport

__all__ = ["Bound", "bind_version"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Bound:
    """Prepared lists for one version's bases and one shadow arena."""

    waves: list[list[Prepared]]
    before: list[Prepared]
    beside: list[Prepared]
    after: list[Prepared]

    def close(self) -> None:
        """Free the lists."""
        for prepared in (p for group in (*self.waves, self.before, self.beside, self.after) for p in group):
            prepared.close()


def bind_version(
    transport: Transport,
    links: Links,
    plan: Plan,
    records: Sequence[SlotRecord],
    destination_bases: U64,
    staging_base: int,
    meta: Mapping[str, U8],
    *,
    local_memory: str,
    local_device: int,
) -> Bound:
    """Prepare all lists of one version.

    Parameters
    ----------
    records
        Of the plan's holders, in its order.
    destination_bases, staging_base
        Addresses of the plan's buffers and of the staging arena.
    meta
        ``before``, ``after`` and ``digests``, each joined by a NUL with the holder's name, to the memory they are
        read into.

    Raises
    ------
    RefitError
        A region whose size is not what the table said.
    TransportError
        A list that the transport refuses; nothing stays prepared.
    """
    for record, expected in zip(records, plan.region_bytes, strict=True):
        _check_regions(record, expected)
    relative = plan.bind(
        {r.slot: r.region_bases for r in records},
        destination_bases,
        staging_base,
        strided=False,
        local_device=local_device,
        local_memory=local_memory,
    )
    made = Bound([], [], [], [])
    try:
        for wave in relative.waves:
            lists: list[Prepared] = []
            made.waves.append(lists)
            for rows in wave:
                lists.append(transport.prepare(links.peer(rows.holder.name), rows.local, rows.remote))
        for record in records if meta else ():
            _prepare_meta(transport, links, record, meta, made)
    except BaseException:
        made.close()
        raise
    return made


def _check_regions(record: SlotRecord, expected: Int64) -> None:
    if record.region_bytes.shape != expected.shape or bool((record.region_bytes != expected).any()):
        raise RefitError(
            f"holder {record.slot!r}: its version names regions of {record.region_bytes.tolist()} bytes, "
            f"its table {expected.tolist()}"
        )


def _prepare_meta(transport: Transport, links: Links, record: SlotRecord, meta: Mapping[str, U8], made: Bound) -> None:
    peer = links.peer(record.slot)

    def one(region: int, local: U8) -> Prepared:
        remote = np.array([[record.region_bases[region], local.nbytes, record.device]], np.uint64)
        here = np.array([[local.ctypes.data, local.nbytes, 0]], np.uint64)
        return transport.prepare(peer, here, remote)

    if record.header_region >= 0:
        made.before.append(one(record.header_region, meta[f"before\0{record.slot}"]))
        made.after.append(one(record.header_region, meta[f"after\0{record.slot}"]))
    digests = meta[f"digests\0{record.slot}"]
    if record.digest_region >= 0 and digests.nbytes:
        made.beside.append(one(record.digest_region, digests))
