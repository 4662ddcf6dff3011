"""One version's addresses made into prepared lists: data by batch, headers before and after, digests beside.

Regions that a version names must have the sizes that its table gave: a plan was checked against the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.batches import Portion, complete_with, n_batches, split_wave
from reshard.refit.errors import RefitError

if TYPE_CHECKING:
    from reshard.planner import Plan
    from reshard.refit.checks import Checks
    from reshard.refit.links import Links
    from reshard.rendezvous.types import SlotRecord
    from reshard.transports.base import Prepared, Transport

__all__ = ["Batch", "Bound", "bind_version"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """Lists that are posted together: a wave, or the share of it that is read before the next share.

    ``ends_wave``: with it the wave has landed.
    """

    wave: int
    ends_wave: bool
    lists: list[Prepared]


@dataclass(slots=True)
class Bound:
    """Prepared lists for one version's bases and one shadow arena.

    Attributes
    ----------
    batches
        The data, in the order in which it is read; at least one for each wave.
    before, after
        Headers.
    beside
        Digests, read with the first batch.
    complete_with : int64[n_checks] or None
        The batch with which each of the plan's checks can be made; None where nothing is verified on the way.
    """

    batches: list[Batch]
    before: list[Prepared]
    beside: list[Prepared]
    after: list[Prepared]
    complete_with: Int64 | None = None

    def lists(self) -> Iterator[Prepared]:
        """All lists."""
        for batch in self.batches:
            yield from batch.lists
        yield from (*self.before, *self.beside, *self.after)

    def close(self) -> None:
        """Free the lists."""
        for prepared in self.lists():
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
    checks: Checks | None = None,
    batch_bytes: int = 0,
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
    checks, batch_bytes
        With both, waves are read in batches of at least so many bytes, and it is told when each check can be made;
        not where fewer bytes than that can be verified while more is read.

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
    portions: list[list[Portion]] = []
    on_the_way = sum(c.nbytes for c in checks.checks if c.wave < 0) if checks is not None else 0
    least_bytes = batch_bytes if on_the_way >= batch_bytes else 0  # batches cost lists, and pay by what is verified
    try:
        for number, wave in enumerate(relative.waves):
            split = split_wave(wave, n_batches(wave, least_bytes))
            portions += split
            for i, share in enumerate(split):
                batch = Batch(number, i == len(split) - 1, [])
                made.batches.append(batch)
                for portion in share:
                    batch.lists.append(transport.prepare(links.peer(portion.holder), portion.local, portion.remote))
        for record in records if meta else ():
            _prepare_meta(transport, links, record, meta, made)
    except BaseException:
        made.close()
        raise
    if checks is not None and len(portions) > len(relative.waves):
        made.complete_with = _complete_with(checks, records, portions, made.batches)
    return made


def _complete_with(
    checks: Checks, records: Sequence[SlotRecord], portions: Sequence[Sequence[Portion]], batches: Sequence[Batch]
) -> Int64:
    """The batch with which each check's cell is there, and copied out of staging where it goes through it."""
    out = np.full(len(checks.checks), len(portions) - 1, np.int64)
    holders = np.array([c.holder for c in checks.checks], np.int64)
    cells = np.array([c.cell for c in checks.checks], np.int64)
    bases = {r.slot: np.asarray(r.region_bases, np.uint64) for r in records}
    for number, name in enumerate(checks.names):
        mine = np.flatnonzero(holders == number)
        if not len(mine):
            continue
        rows = [(i, p.remote) for i, share in enumerate(portions) for p in share if p.holder == name]
        grid, cell = checks.grids[number], cells[mine]
        start = bases[name][grid.region[cell]] + grid.offset_bytes[cell].astype(np.uint64)
        out[mine] = complete_with(rows, start, grid.nbytes[cell], len(portions) - 1)
    ends_wave = np.array([i for i, batch in enumerate(batches) if batch.ends_wave], np.int64)
    after = np.array([c.after_wave for c in checks.checks], np.int64)
    return np.where(after < 0, out, np.maximum(out, ends_wave[after]))


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
