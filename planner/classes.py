"""Which tensors pose the same problem? Planning by class: solve one member, broadcast to the others.

Two tensors are of one class if they have equal dtype and shape, requests of equal geometry in equal order,
and shards of equal geometry at the same parts. FSDP of a model with 18,867 tensors has nine classes.

1. Keep only the shards of requested tensors, by part; nothing is concatenated.
2. Guess classes from shape and requests alone, and compare every part's geometry column with that of the
   class's first member. Where all ranks shard alike (FSDP), this is the whole work: one pass.
3. If members differ, hash all parts' geometries into one word a tensor, classify again, and compare again.
   Members that even then differ from their first one (hash collisions) become classes of their own.
   Membership is never a matter of a hash.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planner.classify import WEIGHTS, Bool, Int64, UInt64, classify, hash_rows, mix64, ragged_arange
from reshard.planner.needs import PartRows, needed_numbers, needed_rows
from reshard.planner.requests import Requests
from reshard.planner.tables import ShardTable
from reshard.planner.template_shards import TemplateShards, template_shards


@dataclass(frozen=True, eq=False)
class Classes:
    """Needed tensors by class.

    Attributes
    ----------
    tensor : int64[T]
        Union ids of the needed tensors, ascending.
    cls : int64[T]
    first : int64[C]
        First member of each class (a needed-tensor number).
    members, member_start : int64[T], int64[C + 1]
        Needed-tensor numbers by class, each class ascending.
    request_first, n_requests : int64[T]
        Each needed tensor's requests are ``request_first + j``, ``j < n_requests``.
    parts : tuple of PartRows
    shards : TemplateShards
    """

    tensor: Int64
    cls: Int64
    first: Int64
    members: Int64
    member_start: Int64
    request_first: Int64
    n_requests: Int64
    parts: tuple[PartRows, ...]
    shards: TemplateShards

    def __len__(self) -> int:
        return len(self.first)


def build_classes(
    sources: ShardTable, requests: Requests, n_dims: int, parts: tuple[PartRows, ...] | None = None
) -> Classes:
    """Group the requested tensors into classes, exactly.

    Parameters
    ----------
    sources : ShardTable
    requests : Requests
        Ordered by tensor.
    n_dims : int
        Dim columns of the templates.
    parts : tuple of PartRows, optional
        The needed rows, if they are known.
    """
    tensor, n_requests, request_first = _requested(requests)
    if parts is None:
        number = needed_numbers(tensor, len(sources.tensors))
        parts = tuple(
            needed_rows(part, id_map, number) for part, id_map in zip(sources.parts, sources.id_maps, strict=True)
        )
    key = [sources.tensors.shape_class[0][tensor], *_request_key(requests, request_first, n_requests)]
    _, rep = _grouped(key)
    rep = _agree_on_requests(rep, requests, request_first, n_requests)
    bad = _compare(parts, rep)
    if bad.any():
        key.append(_hash_parts(parts, len(tensor)).view(np.int64))
        _, rep = _grouped(key)
        rep = _agree_on_requests(rep, requests, request_first, n_requests)
        bad = _compare(parts, rep)
        rep = np.where(bad, np.arange(len(rep)), rep)
    cls, first = classify([rep])
    members, member_start = _by_class(cls, len(first))
    shards = template_shards(parts, first, n_dims, len(tensor))
    return Classes(tensor, cls, first, members, member_start, request_first, n_requests, parts, shards)


def _by_class(cls: Int64, n_classes: int) -> tuple[Int64, Int64]:
    """Members by class, ascending, and where each class starts."""
    start = np.zeros(n_classes + 1, np.int64)
    np.cumsum(np.bincount(cls, minlength=n_classes), out=start[1:])
    return np.argsort(cls.astype(np.int32), kind="stable"), start


def _requested(requests: Requests) -> tuple[Int64, Int64, Int64]:
    """Distinct tensors of requests in order, how many requests each has, and the first of them."""
    ids = requests.tensor
    new = np.ones(len(ids), np.bool_)
    new[1:] = ids[1:] != ids[:-1]
    first = np.flatnonzero(new)
    return ids[first], np.diff(np.append(first, len(ids))), first


def _request_key(requests: Requests, first: Int64, counts: Int64) -> list[Int64]:
    """Columns that tell request sequences apart (up to hash collisions)."""
    if len(requests) == len(first):
        return [requests.geometry]
    nth = ragged_arange(counts)
    word = mix64((requests.geometry + (nth << 32)).view(np.uint64))
    return [counts, np.add.reduceat(word, first).view(np.int64)]


def _grouped(key: list[Int64]) -> tuple[Int64, Int64]:
    cls, first = classify(key)
    return cls, first[cls]


def _agree_on_requests(rep: Int64, requests: Requests, first: Int64, counts: Int64) -> Int64:
    """Members whose request sequence differs from their representative's stand alone."""
    if len(requests) == len(first):
        return rep
    nth = ragged_arange(counts)
    owner = np.repeat(np.arange(len(first)), counts)
    other = np.repeat(first[rep], counts) + np.minimum(nth, np.repeat(counts[rep], counts) - 1)
    bad = counts != counts[rep]
    bad[owner[requests.geometry[other] != requests.geometry]] = True
    return np.where(bad, np.arange(len(rep)), rep)


def _counts(rows: PartRows, n: int) -> tuple[Int64, Int64]:
    counts = np.bincount(rows.tensor, minlength=n)
    return counts, np.cumsum(counts) - counts


def _compare(parts: tuple[PartRows, ...], rep: Int64) -> Bool:
    """Tensors whose shards differ from their representative's in some part, exactly."""
    n = len(rep)
    bad = np.zeros(n, np.bool_)
    dense, other = np.empty(n, np.int64), np.empty(n, np.int64)
    differs = np.empty(n, np.bool_)
    for rows in parts:
        checked = [rows.part.geometry_id] if rows.part.one_group else [rows.part.geometry_id, rows.part.replica_group]
        if rows.unique:
            for i, values in enumerate(checked):
                here = rows.take(values)
                if len(here) < n:
                    dense.fill(-1 if i == 0 else -2)
                    dense[rows.tensor] = here
                    here = dense
                np.take(here, rep, out=other, mode="clip")
                np.not_equal(here, other, out=differs)
                np.logical_or(bad, differs, out=bad)
            continue
        counts, first = _counts(rows, n)
        bad |= counts != counts[rep]
        mine = rows.tensor
        theirs = rep[mine]
        nth = np.arange(len(mine)) - first[mine]
        at = first[theirs] + np.minimum(nth, np.maximum(counts[theirs] - 1, 0))
        at = np.minimum(at, len(mine) - 1)
        for values in checked:
            here = rows.take(values)
            bad[mine[here != here[at]]] = True
    return bad


def _hash_parts(parts: tuple[PartRows, ...], n: int) -> UInt64:
    """One word a tensor over (part, occurrence, geometry, replica group) of all its shards."""
    out = np.zeros(n, np.uint64)
    tables: dict[int, UInt64] = {}
    for i, rows in enumerate(parts):
        geometries = rows.part.geometries
        table = tables.get(id(geometries))
        if table is None:
            table = tables[id(geometries)] = mix64(np.arange(1, len(geometries) + 1, dtype=np.uint64))
        seed = mix64(np.array([i + 1], np.uint64))[0] | np.uint64(1)
        word = table[rows.take(rows.part.geometry_id)] * seed
        if not rows.part.one_group:
            word = mix64(word + rows.take(rows.part.replica_group).view(np.uint64) * WEIGHTS[3])
        if rows.unique:
            if len(word) == n:
                out += word
            else:
                out[rows.tensor] += word
            continue
        counts, first = _counts(rows, n)
        nth = np.arange(len(word)) - first[rows.tensor]
        word = mix64(word + nth.view(np.uint64) * WEIGHTS[5])
        some = np.flatnonzero(counts)
        if len(some):
            out[some] += np.add.reduceat(word, first[some])
    return out


def reclassify(
    old: Classes, sources: ShardTable, requests: Requests, parts: tuple[PartRows, ...], kept: Int64, n_dims: int
) -> Classes:
    """Classes after some parts changed, looking only at those.

    Parameters
    ----------
    old : Classes
        Of the table before; membership is proved for all parts that are kept.
    parts : tuple of PartRows
        All parts of the table now.
    kept : int64[P_old]
        Number now of each old part, -1 for those that changed or vanished.

    Returns
    -------
    Classes
        Equal to what `build_classes` makes of the new table.
    """
    fresh = np.ones(len(parts), np.bool_)
    fresh[kept[kept >= 0]] = False
    numbers = np.flatnonzero(fresh).tolist()
    changed = tuple(parts[i] for i in numbers)
    rep = old.first[old.cls]
    cls, first = old.cls, old.first
    members, member_start = old.members, old.member_start
    if _compare(changed, rep).any():
        _, rep = _grouped([old.cls, _hash_parts(changed, len(rep)).view(np.int64)])
        rep = np.where(_compare(changed, rep), np.arange(len(rep)), rep)
        cls, first = classify([rep])
        members, member_start = _by_class(cls, len(first))
    shards = _merge_shards(old, kept, first, template_shards(changed, first, n_dims, len(cls), numbers))
    key = [sources.tensors.shape_class[0][old.tensor[first]], *_template_key(old, requests, first, shards)]
    alike, alike_first = classify(key)
    parent = old.cls[first]
    if (parent != parent[alike_first[alike]]).any():
        # classes that only the changed parts told apart may be one now (those of one old class differ in these parts)
        return build_classes(sources, requests, n_dims, parts)
    return Classes(old.tensor, cls, first, members, member_start, old.request_first, old.n_requests, parts, shards)


def _merge_shards(old: Classes, kept: Int64, first: Int64, changed: TemplateShards) -> TemplateShards:
    """Template shards of the new classes: kept parts' from each class's old class, and the changed parts'."""
    parent = old.cls[first]
    number = kept[old.shards.part]
    stay = np.flatnonzero(number >= 0)
    counts = np.bincount(old.shards.cls[stay], minlength=len(old.first))
    begin = np.cumsum(counts) - counts
    n = counts[parent]
    row = stay[np.repeat(begin[parent], n) + ragged_arange(n)]
    cls = np.concatenate([np.repeat(np.arange(len(first)), n), changed.cls])
    part = np.concatenate([number[row], changed.part])
    nth = np.concatenate([old.shards.nth[row], changed.nth])
    order = np.lexsort([nth, part, cls])

    def joined(kept_values: Int64, new_values: Int64) -> Int64:
        return np.concatenate([kept_values[row], new_values])[order]

    return TemplateShards(
        cls[order],
        part[order],
        nth[order],
        [joined(a, b) for a, b in zip(old.shards.start, changed.start, strict=True)],
        [joined(a, b) for a, b in zip(old.shards.stop, changed.stop, strict=True)],
        joined(old.shards.replica_group, changed.replica_group),
    )


def _template_key(old: Classes, requests: Requests, first: Int64, shards: TemplateShards) -> list[Int64]:
    """One word a class over all that makes classes differ, shape apart: equal classes have equal words."""
    n = old.n_requests[first]
    nth = ragged_arange(n)
    geometry = requests.geometry[np.repeat(old.request_first[first], n) + nth]
    word = np.zeros(len(first), np.uint64)
    np.add.at(word, np.repeat(np.arange(len(first)), n), mix64((geometry + (nth << 32)).view(np.uint64)))
    columns = [shards.part, shards.nth, shards.replica_group, *shards.start, *shards.stop]
    np.add.at(word, shards.cls, mix64(hash_rows(columns)))
    return [word.view(np.int64)]
