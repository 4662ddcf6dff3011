"""Rows: are they well formed, do both sides match, and how are they cut into bounded native work?

Everything is vectorised.  A backend's list comes about in this order:

1. `pair_rows`: shape and dtype of each side, equal sizes (and counts) row by row; rows of no bytes are
   dropped;
2. `extents`: the range that each row covers, for the check against the region tables;
3. `expand_rows`: strided rows become runs, where the backend takes none;
4. `merge_adjacent`: runs that touch on both sides are joined; `split_long`: none is longer than a slice;
5. `cut_runs`: where to cut the list so that one native post blocks for a bounded time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from reshard.transports.regions import U64, Bounds, blocks

SLICE_BYTES = 64 << 20
"""Budget of one slice, in bytes; a run counts `RUN_COST_BYTES` more than it carries."""
RUN_COST_BYTES = 48 << 10
"""What posting one more run costs, as the bytes that could be copied meanwhile (about 5 us at 10 GB/s)."""

ADDRESS, NBYTES, DEVICE, STRIDE, COUNT = range(5)
_MAX = (1 << 64) - 1


def pair_rows(local: U64, remote: U64) -> tuple[U64, U64, Bounds | None, Bounds | None]:
    """Return both sides as C-contiguous arrays of rows that carry bytes, and their `bounds_of`.

    Parameters
    ----------
    local, remote : ndarray of uint64, shape (N, 3) or (N, 5)
        See `reshard.transports.base`.

    Raises
    ------
    ValueError
        If an array is malformed, or the sides differ in shape, size or count, naming the row.
    """
    local, remote = _as_rows(local, "local"), _as_rows(remote, "remote")
    if local.shape != remote.shape:
        raise ValueError(f"rows: local has shape {local.shape}, remote {remote.shape}, expected the same")
    here, there = bounds_of(local), bounds_of(remote)
    alike = here is not None and there is not None and {*here.nbytes, *there.nbytes} == {here.nbytes[0]}
    if not alike:
        _equal_column(local, remote, NBYTES, "nbytes")
    if here is not None and here.nbytes[0]:
        return local, remote, here, there
    kept = local[:, NBYTES] != 0
    if local.shape[1] == 5:
        _equal_column(local, remote, COUNT, "count")
        kept &= local[:, COUNT] != 0
    if not kept.all():
        local, remote = local[kept], remote[kept]
        here, there = bounds_of(local), bounds_of(remote)
    return local, remote, here, there


def extents(rows: U64, whose: str) -> U64:
    """Return how many bytes each row covers, from its first byte to its last.

    Raises
    ------
    ValueError
        If a strided row covers 2**64 bytes or more.
    """
    if rows.shape[1] == 3:
        return rows[:, NBYTES]
    nbytes, stride, steps = rows[:, NBYTES], rows[:, STRIDE], rows[:, COUNT] - np.uint64(1)
    room = (np.uint64(_MAX) - nbytes) // np.maximum(stride, np.uint64(1))
    wide = (stride != 0) & (steps > room)
    if wide.any():
        row = int(wide.argmax())
        raise ValueError(
            f"{whose}: row {row}: {int(rows[row, COUNT])} runs, {int(stride[row])} bytes apart, "
            "cover more than 2**64 bytes"
        )
    return np.asarray(steps * stride + nbytes, np.uint64)


def count_runs(rows: U64, max_runs: int) -> int:
    """Return the number of runs.

    Raises
    ------
    ValueError
        If there are more than ``max_runs``.
    """
    if rows.shape[1] == 3:
        n_runs = len(rows)
    else:
        count = rows[:, COUNT]
        largest = int(count.max(initial=0))
        # A count within the bound cannot make the sum of fewer than 2**24 rows wrap.
        n_runs = largest if largest > max_runs else int(count.sum())
    if n_runs > max_runs:
        raise ValueError(f"rows: {n_runs} runs in one list, expected at most {max_runs}")
    return n_runs


def total_bytes(rows: U64, bounds: Bounds | None = None) -> int:
    """Return the payload in bytes, of rows that lie inside registered regions."""
    if bounds is not None and bounds.nbytes[0] == bounds.nbytes[1]:
        return len(rows) * bounds.nbytes[0]
    if rows.shape[1] == 3:
        return int(rows[:, NBYTES].sum())
    return int((rows[:, NBYTES] * rows[:, COUNT]).sum())


def expand_rows(rows: U64, *extra: npt.NDArray[np.intp]) -> tuple[U64, list[npt.NDArray[np.intp]]]:
    """Expand (N, 5) strided rows into (M, 3) runs, in order.

    Parameters
    ----------
    rows : ndarray of uint64, shape (N, 5)
    *extra : ndarray, shape (N,) or (1,)
        Columns to repeat along; one of length 1 stays as it is.

    Returns
    -------
    (ndarray of uint64, shape (M, 3), list of ndarray)
    """
    count = rows[:, COUNT].astype(np.int64)
    first = np.cumsum(count) - count
    step = np.arange(int(count.sum()), dtype=np.int64) - np.repeat(first, count)
    runs = np.empty((len(step), 3), np.uint64)
    runs[:, ADDRESS] = np.repeat(rows[:, ADDRESS], count) + np.repeat(rows[:, STRIDE], count) * step.astype(np.uint64)
    runs[:, NBYTES] = np.repeat(rows[:, NBYTES], count)
    runs[:, DEVICE] = np.repeat(rows[:, DEVICE], count)
    return runs, [column if len(column) == 1 else np.repeat(column, count) for column in extra]


def merge_adjacent(
    local: U64, remote: U64, local_region: npt.NDArray[np.intp], remote_region: npt.NDArray[np.intp]
) -> tuple[U64, U64, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Join consecutive runs that touch on both sides and stay inside one region on each.

    Parameters
    ----------
    local, remote : ndarray of uint64, shape (N, 3)
    local_region, remote_region : ndarray of intp, shape (N,) or (1,)
        Region of each run; length 1 where all share one.
    """
    if len(local) < 2:
        return local, remote, local_region, remote_region
    if not any(_touch(local, at).any() and (_touch(local, at) & _touch(remote, at)).any() for at in blocks(len(local))):
        return local, remote, local_region, remote_region
    whole = slice(0, len(local))
    touch = _touch(local, whole) & _touch(remote, whole)
    for region in (local_region, remote_region):
        if len(region) > 1:
            touch &= region[:-1] == region[1:]
    if not touch.any():
        return local, remote, local_region, remote_region
    first = np.flatnonzero(np.concatenate(([True], ~touch)))
    sums = np.add.reduceat(local[:, NBYTES], first)
    local, remote = local[first], remote[first]
    local[:, NBYTES] = remote[:, NBYTES] = sums
    regions = [region[first] if len(region) > 1 else region for region in (local_region, remote_region)]
    return local, remote, regions[0], regions[1]


def split_long(
    local: U64,
    remote: U64,
    local_region: npt.NDArray[np.intp],
    remote_region: npt.NDArray[np.intp],
    max_bytes: int = SLICE_BYTES,
) -> tuple[U64, U64, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Cut runs longer than ``max_bytes`` into runs of at most that; arguments as in `merge_adjacent`."""
    nbytes = local[:, NBYTES]
    if not len(nbytes) or int(nbytes.max()) <= max_bytes:
        return local, remote, local_region, remote_region
    size = np.uint64(max_bytes)
    pieces = ((nbytes - np.uint64(1)) // size + np.uint64(1)).astype(np.int64)
    at = np.arange(int(pieces.sum()), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = at.astype(np.uint64) * size
    left = np.repeat(nbytes, pieces) - offset
    sides = []
    for rows in (local, remote):
        cut = np.repeat(rows, pieces, axis=0)
        cut[:, ADDRESS] += offset
        cut[:, NBYTES] = np.minimum(left, size)
        sides.append(cut)
    regions = [column if len(column) == 1 else np.repeat(column, pieces) for column in (local_region, remote_region)]
    return sides[0], sides[1], regions[0], regions[1]


def cut_runs(rows: U64, budget_bytes: int = SLICE_BYTES) -> list[int]:
    """Return run indices ``[0, ..., n_runs]`` between which lie slices of about ``budget_bytes``.

    A strided row may be cut between two of its runs; indices count runs, not rows.
    """
    if not len(rows):
        return [0]
    if rows.shape[1] == 3 and (size := int(rows[:, NBYTES].min())) == int(rows[:, NBYTES].max()):
        # All alike: where the weights' sum passes a target needs no sum.
        total, each = len(rows), size + RUN_COST_BYTES
        cuts = _targets(total * each, budget_bytes) // each
        return [0, *(int(cut) for cut in np.unique(cuts) if 0 < cut < total), total]
    weight = rows[:, NBYTES].astype(np.int64)
    weight += RUN_COST_BYTES
    if rows.shape[1] == 3:
        ends = np.cumsum(weight)
        target = _targets(int(ends[-1]), budget_bytes)
        total, cuts = len(rows), np.searchsorted(ends, target, side="right")
    else:
        count = rows[:, COUNT].astype(np.int64)
        runs, ends = np.cumsum(count), np.cumsum(weight * count)
        target = _targets(int(ends[-1]), budget_bytes)
        row = np.searchsorted(ends, target, side="right")
        total, cuts = int(runs[-1]), runs[row] - (ends[row] - target + weight[row] - 1) // weight[row]
    return [0, *(int(cut) for cut in np.unique(cuts) if 0 < cut < total), total]


def _targets(whole: int, budget: int) -> npt.NDArray[np.int64]:
    """Return where to cut ``whole`` into the fewest equal parts of at most ``budget``."""
    n_parts = -(-whole // budget)
    return (np.arange(1, n_parts, dtype=np.int64) * whole) // max(n_parts, 1)


def bounds_of(rows: U64) -> Bounds | None:
    """Return the bounds of rows of three columns, None if there are none; those of strided rows would say little."""
    return Bounds.of(rows) if len(rows) and rows.shape[1] == 3 else None


def envelopes(
    rows: U64, extent: U64, region: npt.NDArray[np.intp], bounds: Bounds | None = None
) -> list[tuple[int, int, int]]:
    """Return ``(region, start, stop)`` for each region touched: the least range that holds all rows in it."""
    if not len(rows):
        return []
    if len(region) == 1 and bounds is not None and bounds.nbytes[0] == bounds.nbytes[1]:
        return [(int(region[0]), bounds.address[0], bounds.address[1] + bounds.nbytes[0])]
    if len(region) == 1:
        stops = (int((rows[at, ADDRESS] + extent[at]).max()) for at in blocks(len(rows)))
        return [(int(region[0]), int(rows[:, ADDRESS].min()), max(stops))]
    stop = rows[:, ADDRESS] + extent
    order = np.argsort(region, kind="stable")
    touched, first = np.unique(region[order], return_index=True)
    lows = np.minimum.reduceat(rows[order, ADDRESS], first)
    highs = np.maximum.reduceat(stop[order], first)
    return [(int(r), int(a), int(b)) for r, a, b in zip(touched, lows, highs, strict=True)]


def _as_rows(rows: object, side: str) -> U64:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint64 or rows.ndim != 2 or rows.shape[1] not in (3, 5):
        got = f"{rows.dtype} {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise ValueError(f"rows: {side} is {got}, expected a uint64 array of shape (N, 3) or (N, 5)")
    return np.ascontiguousarray(rows)


def _equal_column(local: U64, remote: U64, column: int, name: str) -> None:
    for at in blocks(len(local)):
        differs = local[at, column] != remote[at, column]
        if differs.any():
            row = at.start + int(differs.argmax())
            raise ValueError(
                f"rows: row {row} {name}: local has {int(local[row, column])}, remote {int(remote[row, column])}"
            )


def _touch(rows: U64, at: slice) -> npt.NDArray[np.bool_]:
    """Return, for each row of a range that has a next one in the list, whether it ends where that begins."""
    following = rows[at.start + 1 : at.stop + 1, ADDRESS]
    ends = rows[at, ADDRESS][: len(following)] + rows[at, NBYTES][: len(following)]
    return np.asarray(ends == following)


def between(local: U64, remote: U64, start: int, stop: int) -> tuple[U64, U64]:
    """Return the rows that hold runs ``[start, stop)``, cutting strided rows at both ends."""
    if local.shape[1] == 3:
        return local[start:stop], remote[start:stop]
    ends = np.cumsum(local[:, COUNT].astype(np.int64))
    first, last = int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(ends, stop, side="left"))
    sides = []
    for rows in (local, remote):
        cut = rows[first : last + 1].copy()
        skipped = start - (int(ends[first]) - int(rows[first, COUNT]))
        cut[-1, COUNT] -= np.uint64(int(ends[last]) - stop)
        cut[0, ADDRESS] += rows[first, STRIDE] * np.uint64(skipped)
        cut[0, COUNT] -= np.uint64(skipped)
        sides.append(cut)
    return sides[0], sides[1]
