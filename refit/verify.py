"""Which cells did a plan read whole, where did they land, and do they carry their publishers' digests?

1. `build_checks` lays a plan's blocks over the cells of the shards they read. A cell inside one block is one check;
   a cell that several blocks cover without a gap is one check of several pieces; every other touched cell was read
   in part and cannot be verified.
2. A block that is read through staging is checked there, where its cells lie contiguous, before the local copies of
   its wave (which may cast); a block that is read straight into its buffer is checked there, through its strides.
3. `Verifier` runs the checks of a version against the digests that were read beside the data, after checking those
   against the root that the rendezvous told.
"""

from __future__ import annotations

import itertools
import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from reshard.planner.dtypes import dtype_of_code
from reshard.refit.cells import CellGrid, CellPattern, row_box, row_pattern
from reshard.refit.digests import CELL_BYTES, digest_into, root_of, worker_threads
from reshard.refit.errors import UnverifiedError, VerificationError

if TYPE_CHECKING:
    from reshard.planner import Plan, ShardPart

__all__ = ["Checks", "Mode", "Verifier", "build_checks"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]
Mode = Literal["off", "sample", "full"]

STAGING = -1
_SAMPLE_OF = 16
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a piece of a cell lies after the read: ``shape`` at ``offset`` of a buffer (-1: staging), in bytes.

    ``inner`` is how many contiguous bytes an element of ``shape`` has, and ``at`` where the piece goes in the cell
    (as a slice per dim of ``shape``; empty where it is the whole cell).
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    inner: int
    at: tuple[slice, ...] = ()

    def contiguous(self) -> bool:
        """Whether its bytes lie in a row."""
        step = self.inner
        for n, s in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n > 1 and s != step:
                return False
            step *= n
        return True


@dataclass(frozen=True, slots=True)
class Check:
    """One cell to verify: which digest it must have, and where its pieces lie."""

    holder: int
    cell: int
    wave: int
    nbytes: int
    tag: tuple[int, int]
    shape: tuple[int, ...]
    pieces: tuple[Landing, ...]


@dataclass(frozen=True, slots=True)
class Checks:
    """All checks of a plan.

    Attributes
    ----------
    checks
        Grouped by wave; wave -1 holds those that are made after the last one.
    partial
        (holder, cell) read in part.
    n_cells
        Cells of each holder's table.
    """

    checks: tuple[Check, ...]
    partial: tuple[tuple[int, int], ...]
    n_cells: Mapping[str, int]
    names: tuple[str, ...]
    parts: tuple[ShardPart, ...]
    grids: tuple[CellGrid, ...]

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
    covered: dict[tuple[int, int], list[_Part]] = {}
    for block in _blocks_of(plan):
        part, grid = parts[block.holder], grids[block.holder]
        cells = _Cells.of(part, block.row)
        first = int(grid.first[block.row])
        lo = block.start[len(block.start) - cells.start.shape[1] :] - cells.origin
        n = block.count[len(block.count) - len(lo) :]
        by = block.step[len(block.step) - len(lo) :]
        strides = tuple(block.strides[len(block.strides) - len(lo) :].tolist())
        hi = lo + (n - 1) * by + 1
        dense = bool(((by == 1) | (n == 1)).all())
        ends = cells.start + cells.shape
        touched = np.all((cells.start < hi) & (ends > lo), axis=1)
        inside = touched & np.all((cells.start >= lo) & (ends <= hi), axis=1) & dense
        for k in np.flatnonzero(touched).tolist():
            if inside[k]:
                if block.staging >= 0:
                    at = block.staging + int(grid.offset_bytes[first + k]) - block.src_offset
                    landing, wave = Landing(STAGING, at, (cells.nbytes(k),), (1,), 1), block.wave
                else:
                    at = (
                        block.dst_offset + int(((cells.start[k] - lo) * strides).sum()) if strides else block.dst_offset
                    )
                    landing, wave = Landing(block.buffer, at, cells.shape_of(k), strides, cells.item), -1
                checks.append(cells.check(block.holder, first, k, wave, (landing,)))
            known = covered.setdefault((block.holder, first + k), [])
            known.append(_Part(cells, k, first, lo, hi, block, strides, bool(inside[k]), dense and block.staging < 0))
    partial: list[tuple[int, int]] = []
    for key, found in covered.items():
        if any(part.whole for part in found):
            continue
        check = _assembled(key[0], found)
        if check is None:
            partial.append(key)
        else:
            checks.append(check)
    checks.sort(key=lambda c: (c.wave, c.holder, c.cell))
    sizes = {name: len(grid) for name, grid in zip(names, grids, strict=True)}
    return Checks(tuple(checks), tuple(sorted(partial)), sizes, names, parts, grids)


@dataclass(frozen=True, slots=True)
class _Block:
    """One row of `Plan.blocks`."""

    holder: int
    row: int
    src_offset: int
    buffer: int
    dst_offset: int
    wave: int
    staging: int
    start: Int64
    step: Int64
    count: Int64
    strides: Int64


def _blocks_of(plan: Plan) -> Iterator[_Block]:
    blocks = plan.blocks
    scalars = (
        blocks.holder,
        blocks.row,
        blocks.src_offset_bytes,
        blocks.buffer,
        blocks.dst_offset_bytes,
        blocks.wave,
        blocks.staging_offset_bytes,
    )
    dims = [
        np.stack(columns, axis=1) if columns else np.zeros((len(blocks), 0), np.int64)
        for columns in (blocks.start, blocks.step, blocks.count, blocks.dst_stride_bytes)
    ]
    for i, row in enumerate(zip(*(column.tolist() for column in scalars), strict=True)):
        yield _Block(*row, *(dim[i] for dim in dims))


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of one shard row, in the units of blocks: for packed dtypes the last dim is in bytes."""

    pattern: CellPattern
    origin: Int64
    start: Int64
    shape: Int64
    item: int

    @classmethod
    def of(cls, part: ShardPart, row: int) -> _Cells:
        pattern, origin = row_pattern(part, row), np.array(row_box(part, row)[0], np.int64)
        kind = dtype_of_code(int(part.tensors.dtype_code[int(part.tensor_id[row])]))
        start, shape = pattern.start, pattern.shape
        if kind.pack > 1 and len(origin):
            start, shape, origin = start.copy(), shape.copy(), origin.copy()
            for column in (start[:, -1], shape[:, -1], origin[-1:]):
                column //= kind.pack
        return cls(pattern, origin, start, shape, kind.unit_bytes)

    def nbytes(self, k: int) -> int:
        return int(self.pattern.nbytes[k])

    def shape_of(self, k: int) -> tuple[int, ...]:
        return tuple(self.shape[k].tolist())

    def check(self, holder: int, first: int, k: int, wave: int, pieces: tuple[Landing, ...]) -> Check:
        tag = (int(self.pattern.tags[k, 0]), int(self.pattern.tags[k, 1]))
        return Check(holder, first + k, wave, self.nbytes(k), tag, self.shape_of(k), pieces)


@dataclass(frozen=True, slots=True)
class _Part:
    """A block that covers a cell, wholly or in part; ``usable`` if its bytes stay where they land."""

    cells: _Cells
    k: int
    first: int
    lo: Int64
    hi: Int64
    block: _Block
    strides: tuple[int, ...]
    whole: bool
    usable: bool


def _assembled(holder: int, found: Sequence[_Part]) -> Check | None:
    """A check of several pieces if the parts cover the cell exactly once, else None."""
    one = found[0]
    cells, k = one.cells, one.k
    start, end = cells.start[k], cells.start[k] + cells.shape[k]
    boxes: list[tuple[Int64, Int64]] = []
    landings: list[Landing] = []
    for part in found:
        if not part.usable:
            return None
        lo, hi = np.maximum(part.lo, start), np.minimum(part.hi, end)
        boxes.append((lo, hi))
        offset = part.block.dst_offset + int(((lo - part.lo) * part.strides).sum())
        at = tuple(slice(a, b) for a, b in zip((lo - start).tolist(), (hi - start).tolist(), strict=True))
        landings.append(Landing(part.block.buffer, offset, tuple((hi - lo).tolist()), part.strides, cells.item, at))
    if sum(math.prod((hi - lo).tolist()) for lo, hi in boxes) != math.prod(cells.shape_of(k)):
        return None
    if any(bool(((a < d) & (c < b)).all()) for (a, b), (c, d) in itertools.combinations(boxes, 2)):
        return None
    return cells.check(holder, one.first, k, -1, tuple(landings))


class Verifier:
    """Checks one version.

    Parameters
    ----------
    checks
        Of the plan.
    mode
        ``full``, ``sample`` (one cell in 16, others at each version) or ``off``.
    seed
        Chooses the sample; the version's (epoch, step).
    """

    def __init__(self, checks: Checks, mode: Mode, seed: tuple[int, int]) -> None:
        self._checks = checks
        self._salt = zlib.crc32(repr(seed).encode())
        self._mode = mode
        self._by_wave: dict[int, list[Check]] = {}
        for check in checks.checks if mode != "off" else ():
            if mode == "full" or (check.cell * 2654435761 + check.holder * 40503 + self._salt) % _SAMPLE_OF == 0:
                self._by_wave.setdefault(check.wave, []).append(check)
        self.verified_bytes = 0
        self.n_cells = 0
        self.staged_seconds = 0.0
        """Seconds spent on cells in staging, between the waves."""
        self._digests: list[U64 | None] = [None] * len(checks.names)

    def trust(self, digests: Mapping[str, U64], roots: Mapping[str, bytes]) -> None:
        """Take the digests that were read, after checking them against the roots that the rendezvous told.

        Holders without a root (digests off) are left unverified.

        Raises
        ------
        VerificationError
            If a holder's digests do not have its root.
        """
        self._digests = []
        for name in self._checks.names:
            root = roots.get(name, b"")
            if not root or name not in digests:
                self._digests.append(None)
                continue
            if root_of(digests[name]) != root:
                raise VerificationError(
                    f"holder {name!r}: the digests read from it do not have the root that it published"
                )
            self._digests.append(digests[name])

    def check_wave(self, wave: int, staging: U8, buffers: Sequence[U8], *, lost: frozenset[str] = frozenset()) -> None:
        """Verify what lies in staging after ``wave`` (wave -1: in the buffers), ``lost`` holders apart.

        Raises
        ------
        VerificationError
            Naming the cells that differ.
        """
        gone = {i for i, name in enumerate(self._checks.names) if name in lost}
        todo = [c for c in self._by_wave.get(wave, ()) if self._digests[c.holder] is not None and c.holder not in gone]
        if not todo:
            return
        since = time.perf_counter()
        n_threads = worker_threads(sum(c.nbytes for c in todo))
        shares = [todo[i::n_threads] for i in range(n_threads)]
        if n_threads == 1:
            failed = [self._failures(todo, staging, buffers)]
        else:
            with ThreadPoolExecutor(n_threads, thread_name_prefix="reshard-verify") as pool:
                failed = list(pool.map(lambda share: self._failures(share, staging, buffers), shares))
        bad = [c for part in failed for c in part]
        if wave >= 0:
            self.staged_seconds += time.perf_counter() - since
        if bad:
            shown = [self._checks.describe(c.holder, c.cell) for c in bad[:_SHOWN]]
            raise VerificationError(
                f"{len(bad)} of {len(todo)} cells do not have their publisher's digest: {'; '.join(shown)}", cells=shown
            )
        self.verified_bytes += sum(c.nbytes for c in todo)
        self.n_cells += len(todo)

    def _failures(self, checks: Sequence[Check], staging: U8, buffers: Sequence[U8]) -> list[Check]:
        scratch = np.empty(CELL_BYTES, np.uint8)
        got = np.zeros(2, np.uint64)
        failed = []
        for check in checks:
            digest_into(_bytes_of(check, staging, buffers, scratch), check.tag, got)
            expected = self._digests[check.holder]
            if expected is None or got[0] != expected[check.cell, 0] or got[1] != expected[check.cell, 1]:
                failed.append(check)
        return failed

    def require_all(self, received_bytes: int) -> None:
        """Raise UnverifiedError if anything received was not verified."""
        if self._mode == "full" and not self._checks.partial and self.verified_bytes >= received_bytes:
            return
        shown = [self._checks.describe(h, c) for h, c in self._checks.partial[:_SHOWN]]
        raise UnverifiedError(
            f"{self.verified_bytes} of {received_bytes} bytes were verified (mode {self._mode}); "
            f"{len(self._checks.partial)} cells were "
            f"read in part{': ' if shown else ''}{'; '.join(shown)}; give the publisher this receiver's cut "
            "hints, or drop require_verified"
        )


def _bytes_of(check: Check, staging: U8, buffers: Sequence[U8], scratch: U8) -> U8:
    """The cell's bytes, contiguous: where they lie, or gathered into ``scratch``."""
    first = check.pieces[0]
    memory = staging if first.buffer == STAGING else buffers[first.buffer]
    if not first.at and first.contiguous():
        return memory[first.offset : first.offset + check.nbytes]
    out = scratch[: check.nbytes]
    cell = out.view(f"V{first.inner}").reshape(check.shape)
    for piece in check.pieces:
        memory = buffers[piece.buffer]
        view = np.lib.stride_tricks.as_strided(
            memory[piece.offset : piece.offset + piece.inner].view(f"V{piece.inner}"), piece.shape, piece.strides
        )
        cell[piece.at or ...] = view
    return out
