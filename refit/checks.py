"""Which cells does a plan read whole, and where do they land?

1. `build_checks` lays a plan's blocks over the cells of the shards they read. What one block takes of one cell is its
   *share* of it (`reshard.refit.shares`).
2. A share that is the whole cell, read straight into its buffer, is checked there, through its strides.
3. Other shares are put together to whole cells: in staging, before the local copies of their wave (which may cast),
   where the spans bring every byte of the cell, wanted or not; else in the buffers, after the copies.
4. A cell is read in part, and cannot be verified, where some of what was read of it is in no check.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.refit.assembling import put_together
from reshard.refit.cells import CellGrid, row_box, row_pattern
from reshard.refit.shares import STAGING, Block, Cells, Check, Landing, Share

if TYPE_CHECKING:
    from reshard.planner import Plan, ShardPart

logger = logging.getLogger(__name__)

__all__ = ["STAGING", "Check", "Checks", "Landing", "build_checks", "warn_of_partial"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Checks:
    """All checks of a plan.

    Attributes
    ----------
    checks
        Grouped by wave; wave -1 holds those that are made after the last one.
    partial
        (holder, cell) of which not everything that was read and is used can be verified.
    n_cells
        Cells of each holder's table.
    """

    checks: tuple[Check, ...]
    partial: tuple[tuple[int, int], ...]
    n_cells: Mapping[str, int]
    names: tuple[str, ...]
    parts: tuple[ShardPart, ...]
    grids: tuple[CellGrid, ...]

    @property
    def proves_bytes(self) -> int:
        """Bytes that all checks together prove."""
        return sum(check.proves_bytes for check in self.checks)

    def describe(self, holder: int, cell: int) -> str:
        """``holder: tensor [start, stop) x ...`` of one cell."""
        part, grid = self.parts[holder], self.grids[holder]
        row = int(np.searchsorted(grid.first, cell, side="right")) - 1
        pattern = row_pattern(part, row)
        k = cell - int(grid.first[row])
        start, _ = row_box(part, row)
        box = [
            (a + int(s), a + int(s) + int(n)) for a, s, n in zip(start, pattern.start[k], pattern.shape[k], strict=True)
        ]
        spans = " x ".join(f"[{a}, {b})" for a, b in box) or "the scalar"
        return f"{self.names[holder]}: {part.tensors.name(int(part.tensor_id[row]))} {spans}"


def build_checks(plan: Plan) -> Checks:
    """Lay the plan's blocks over the cells that they touch. Loops over blocks; made once for each plan."""
    names = tuple(h.name for h in plan.holders)
    parts = tuple(plan.sources.parts[plan.sources.by_name[name]] for name in names)
    grids = tuple(CellGrid.of(part) for part in parts)
    checks: list[Check] = []
    shares: dict[tuple[int, int], list[Share]] = {}
    shapes: dict[tuple[int, int, int], Cells] = {}
    code = [part.tensors.dtype_code[part.tensor_id] if len(part) else part.tensor_id for part in parts]
    for block in _blocks_of(plan):
        part, grid = parts[block.holder], grids[block.holder]
        kind = (block.holder, int(part.geometry_id[block.row]), int(code[block.holder][block.row]))
        cells = shapes.get(kind)
        if cells is None:
            cells = shapes[kind] = Cells.of(part, block.row)
        first = int(grid.first[block.row])
        for cut in cells.cut(block.geometry):
            number = first + cut.k
            share = Share(cells, first, int(grid.offset_bytes[number]), block, cut)
            if share.direct and share.whole:
                checks.append(share.check())
            shares.setdefault((block.holder, number), []).append(share)
    partial: list[tuple[int, int]] = []
    for key, found in shares.items():
        if all(share.direct and share.whole for share in found):
            continue
        made, complete = put_together(found)
        checks += made
        if not complete:
            partial.append(key)
    checks.sort(key=lambda c: (c.wave, c.holder, c.cell))
    sizes = {name: len(grid) for name, grid in zip(names, grids, strict=True)}
    return Checks(tuple(checks), tuple(sorted(partial)), sizes, names, parts, grids)


def warn_of_partial(whose: str, plans: Iterable[tuple[Plan, Checks]]) -> None:
    """One line if anything that these plans read and use cannot be verified; where it begins, and what helps."""
    made = list(plans)
    n_cells = sum(len(checks.partial) for _, checks in made)
    if not n_cells:
        return
    wire_bytes = sum(plan.economics.wire_bytes for plan, _ in made)
    unverified = wire_bytes - sum(checks.proves_bytes for _, checks in made)
    first = next(checks.describe(*checks.partial[0]) for _, checks in made if checks.partial)
    logger.warning(
        "%s: %d of %d bytes of each refit cannot be verified: %d cells are read in part (the first is %s); publishers "
        "that lay their buffers out by the cut hints make them whole",
        whose,
        unverified,
        wire_bytes,
        n_cells,
        first,
    )


def _blocks_of(plan: Plan) -> Iterator[Block]:
    blocks = plan.blocks
    scalars = (
        blocks.holder,
        blocks.row,
        blocks.src_offset_bytes,
        blocks.buffer,
        blocks.dst_offset_bytes,
        blocks.wave,
        blocks.staging_offset_bytes,
        blocks.span_offset_bytes,
        blocks.span_bytes,
        blocks.converts,
    )
    dims = np.stack([*blocks.start, *blocks.step, *blocks.count, *blocks.dst_stride_bytes], axis=1)
    geometries, size = dims.tobytes(), dims.shape[1] * dims.itemsize
    for i, row in enumerate(zip(*(column.tolist() for column in scalars), strict=True)):
        yield Block._make((*row, geometries[i * size : (i + 1) * size]))
