"""Sets of boxes, many at a time: are they disjoint, and what is left of one after others are taken away?

Everything here works on columns (one array a dim) with a group number a row; rows of different groups never
meet. Proofs are exact: a set of boxes is split by planes that cut none of them until single boxes remain
(that settles every sharding made by nested splits); what no plane splits is compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from reshard.planner.classify import Bool, Int64, ragged_arange

Dims = Sequence[Int64]
_PAIR_CHUNK: Final = 1 << 20


def _ranked(lo: Int64, hi: Int64) -> tuple[Int64, Int64]:
    """Coordinates replaced by their ranks, so that arithmetic on them cannot overflow."""
    values, inverse = np.unique(np.concatenate([lo, hi]), return_inverse=True)
    if len(values) == 2:
        # every box spans the same interval: nothing to split here
        return np.zeros(len(lo), np.int64), np.ones(len(lo), np.int64)
    return inverse[: len(lo)].astype(np.int64), inverse[len(lo) :].astype(np.int64)


def find_overlap(group: Int64, lo: Dims, hi: Dims) -> tuple[int, int] | None:
    """Two rows of one group whose boxes intersect, or None if all are disjoint.

    Parameters
    ----------
    group : int64[N]
    lo, hi : D int64[N]
        Half-open, not empty.

    Returns
    -------
    tuple of int or None
        Row numbers, the lesser first.
    """
    active = np.arange(len(group))
    _, part = np.unique(group, return_inverse=True)
    part = part.astype(np.int64)
    active, part = _drop_singles(active, part)
    if len(active) == 0:
        return None
    # rows of a part are adjacent from here on
    order = np.argsort(part, kind="stable")
    active, part = active[order], part[order]
    ranks = []
    for a, b in zip(lo, hi, strict=True):
        a, b = a[active], b[active]
        if len(a) and (a == a[0]).all() and (b == b[0]).all():
            continue
        ranks.append(_ranked(a, b))
    local = np.arange(len(active))
    progress = True
    while progress and len(local):
        progress = False
        for a, b in ranks:
            local, part, split = _split(local, part, a, b)
            progress |= split
            if len(local) == 0:
                return None
    for i, j in _pairs(part):
        x, y = local[i], local[j]
        meet = np.ones(len(x), np.bool_)
        for a, b in ranks:
            meet &= (a[x] < b[y]) & (a[y] < b[x])
        if meet.any():
            k = int(np.argmax(meet))
            p, q = int(active[x[k]]), int(active[y[k]])
            return min(p, q), max(p, q)
    return None


def _drop_singles(rows: Int64, part: Int64) -> tuple[Int64, Int64]:
    counts = np.bincount(part)
    keep = counts[part] > 1
    kept = part[keep]
    number = np.cumsum(counts > 1) - 1
    return rows[keep], number[kept]


def _split(local: Int64, part: Int64, lo: Int64, hi: Int64) -> tuple[Int64, Int64, bool]:
    """Split each part at the planes of one dim that cut no box."""
    a, b = lo[local], hi[local]
    stride = int(b.max()) + 2
    order = np.argsort(part * stride + a, kind="stable")
    part, a, b, local = part[order], a[order], b[order], local[order]
    reach = np.maximum.accumulate(part * stride + b)
    new = np.ones(len(a), np.bool_)
    new[1:] = part[1:] * stride + a[1:] >= reach[:-1]
    fresh = np.cumsum(new) - 1
    split = int(fresh[-1]) > int(part[-1])
    local, fresh = _drop_singles(local, fresh)
    return local, fresh, split


def _pairs(part: Int64) -> Iterator[tuple[Int64, Int64]]:
    """All pairs i < j of rows in one part (rows of a part are adjacent), in chunks."""
    n = len(part)
    if n == 0:
        return
    ends = np.searchsorted(part, part, side="right")
    later = ends - np.arange(n) - 1
    cuts = np.flatnonzero(np.diff(np.cumsum(later) // _PAIR_CHUNK)) + 1
    for rows in np.split(np.arange(n), cuts):
        counts = later[rows]
        first = np.repeat(rows, counts)
        yield first, first + 1 + ragged_arange(counts)


def cross(left_group: Int64, right_group: Int64, n_groups: int) -> tuple[Int64, Int64]:
    """All (left, right) pairs of equal group; both group columns ascending."""
    n_right = np.bincount(right_group, minlength=n_groups)
    first_right = np.cumsum(n_right) - n_right
    counts = n_right[left_group]
    left = np.repeat(np.arange(len(left_group)), counts)
    return left, np.repeat(first_right[left_group], counts) + ragged_arange(counts)


def subtract(
    group: Int64, lo: Dims, hi: Dims, other_group: Int64, other_lo: Dims, other_hi: Dims
) -> tuple[Int64, list[Int64], list[Int64]]:
    """What is left of each box after all boxes of the same group on the other side are taken away.

    Returns
    -------
    origin : int64[P]
        Row on the left that each remaining box comes from, ascending.
    lo, hi : D int64[P]
        Disjoint boxes.
    """
    n_groups = int(max(group.max(initial=-1), other_group.max(initial=-1))) + 1
    by_group = np.argsort(other_group, kind="stable")
    left, right = cross(group, other_group[by_group], n_groups)
    right = by_group[right]
    meet = np.ones(len(left), np.bool_)
    for a, b, c, d in zip(lo, hi, other_lo, other_hi, strict=True):
        meet &= (a[left] < d[right]) & (c[right] < b[left])
    left, right = left[meet], right[meet]
    n_cuts = np.bincount(left, minlength=len(group))
    first_cut = np.cumsum(n_cuts) - n_cuts
    origin = np.arange(len(group))
    now_lo, now_hi = [c.copy() for c in lo], [c.copy() for c in hi]
    for round_no in range(int(n_cuts.max(initial=0))):
        due = n_cuts[origin] > round_no
        knife = right[first_cut[origin[due]] + round_no]
        kept = [[c[~due] for c in now_lo], [c[~due] for c in now_hi]]
        cut_origin, cut_lo, cut_hi = _cut(
            origin[due],
            [c[due] for c in now_lo],
            [c[due] for c in now_hi],
            [c[knife] for c in other_lo],
            [c[knife] for c in other_hi],
        )
        origin = np.concatenate([origin[~due], cut_origin])
        now_lo = [np.concatenate(pair) for pair in zip(kept[0], cut_lo, strict=True)]
        now_hi = [np.concatenate(pair) for pair in zip(kept[1], cut_hi, strict=True)]
    order = np.lexsort([*reversed(now_lo), origin])
    return origin[order], [c[order] for c in now_lo], [c[order] for c in now_hi]


def _cut(
    origin: Int64, lo: list[Int64], hi: list[Int64], knife_lo: list[Int64], knife_hi: list[Int64]
) -> tuple[Int64, list[Int64], list[Int64]]:
    """Each box minus its one knife: at most 2 D slabs, peeled dim by dim."""
    meets: Bool = np.ones(len(origin), np.bool_)
    for a, b, c, d in zip(lo, hi, knife_lo, knife_hi, strict=True):
        meets &= (a < d) & (c < b)
    out_origin = [origin[~meets]]
    out_lo, out_hi = [[c[~meets]] for c in lo], [[c[~meets]] for c in hi]
    origin = origin[meets]
    lo, hi = [c[meets] for c in lo], [c[meets] for c in hi]
    knife_lo, knife_hi = [c[meets] for c in knife_lo], [c[meets] for c in knife_hi]
    for dim in range(len(lo)):
        for below in (True, False):
            begin = lo[dim] if below else knife_hi[dim]
            end = knife_lo[dim] if below else hi[dim]
            some = begin < end
            out_origin.append(origin[some])
            for e in range(len(lo)):
                out_lo[e].append(begin[some] if e == dim else lo[e][some])
                out_hi[e].append(end[some] if e == dim else hi[e][some])
        lo[dim] = np.maximum(lo[dim], knife_lo[dim])
        hi[dim] = np.minimum(hi[dim], knife_hi[dim])
    return np.concatenate(out_origin), [np.concatenate(c) for c in out_lo], [np.concatenate(c) for c in out_hi]


def volumes(lo: Dims, hi: Dims, n: int) -> Int64:
    """Elements of each box."""
    out = np.ones(n, np.int64)
    for a, b in zip(lo, hi, strict=True):
        out *= b - a
    return out
