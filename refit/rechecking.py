"""Are the bytes that a receiver serves still those that it verified? Asked before it offers them to others.

The digests of the trainer's cells are kept from the refit that brought the version (`keep_digests`), 16 bytes a cell. A
receiver that serves on digests its own boxes first, and then holds every cell that lies whole in its buffers against
the trainer's digest (`recheck`). In this order a change is seen wherever it falls: before the first pass or between the
two, by the second; after it, by whoever reads. Digests taken at the refit and trusted since would miss what memory
errors and the engine itself do to weights that it serves from.

Cells that were read in part, or through staging, have no whole image in the buffers: nobody can hold them against the
trainer's digests any more, and they are counted apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.arena import Arena
from reshard.refit.checks import Check, Checks
from reshard.refit.deadline import Deadline
from reshard.refit.devices import Device
from reshard.refit.digests import root_of
from reshard.refit.verify import Verifier

if TYPE_CHECKING:
    from reshard.refit.devices import Memory
    from reshard.rendezvous.types import Manifest

__all__ = ["TrustedDigests", "keep_digests", "recheck"]

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TrustedDigests:
    """What the holders of a version published about their cells.

    Attributes
    ----------
    checks
        Which cells they are, and where they landed.
    digests
        By holder, uint64[n_cells, 2], under the root that the rendezvous told; others are left out.
    buffer_names
        What the buffer numbers of ``checks`` mean.
    """

    checks: Checks
    digests: Mapping[str, U64]
    buffer_names: tuple[str, ...]


def keep_digests(
    checks: Checks, buffer_names: Sequence[str], manifest: Manifest, digests_of: Callable[[str], U64]
) -> TrustedDigests:
    """Copy the digests that were read for a version.

    Parameters
    ----------
    digests_of
        A holder's digests as they were read, uint64[n_cells, 2]; those without their root (of a holder that was lost)
        are left out.
    """
    kept: dict[str, U64] = {}
    for slot in manifest.slots:
        if slot.slot in checks.names and slot.digest_root:
            found = digests_of(slot.slot)
            if root_of(found) == slot.digest_root:
                kept[slot.slot] = found.copy()
    return TrustedDigests(checks, kept, tuple(buffer_names))


def recheck(
    trusted: TrustedDigests, arena: Arena, device: Device, offered: Sequence[tuple[int, int]], deadline: Deadline
) -> int:
    """Hold the cells that lie whole in an arena against their trainer's digests.

    Parameters
    ----------
    offered
        Stretches ``[start, stop)`` of the arena, in bytes.

    Returns
    -------
    int
        Bytes of the cells that lie in what is offered and have their digests.

    Raises
    ------
    VerificationError
        Naming the cells that differ.
    RefitTimeoutError
        The deadline passed.
    """
    names = trusted.buffer_names
    here = [
        c
        for c in trusted.checks.checks
        if _lies_in(c, names, arena) and trusted.checks.names[c.holder] in trusted.digests
    ]
    none = np.zeros(0, np.uint8)
    buffers: list[Memory] = [arena.buffers.get(name, none) for name in names]
    checks = replace(trusted.checks, checks=tuple(here))
    roots = {name: root_of(digests) for name, digests in trusted.digests.items()}
    with Verifier(checks, "full", (0, 0), deadline, device) as verifier:
        verifier.trust(trusted.digests, roots)
        verifier.begin(none, buffers, None)
        verifier.finish()
    spans = _joined(offered)
    starts = [start for start, _ in spans]

    def is_offered(check: Check) -> bool:
        for piece in check.pieces:
            first = arena.offsets[names[piece.buffer]] + piece.offset
            extent = sum((n - 1) * abs(s) for n, s in zip(piece.shape, piece.strides, strict=True)) + piece.inner
            at = bisect_right(starts, first) - 1
            if at < 0 or first + extent > spans[at][1]:
                return False
        return True

    return sum(check.nbytes for check in here if is_offered(check))


def _lies_in(check: Check, names: Sequence[str], arena: Arena) -> bool:
    return check.wave < 0 and all(piece.buffer >= 0 and names[piece.buffer] in arena.buffers for piece in check.pieces)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, and those that touch made one."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out
