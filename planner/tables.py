"""What do all holders hold? `ShardTable`: parts side by side, never concatenated.

1. Parts are put in canonical order, by holder name: the order of arrival changes nothing.
2. Their tensor dictionaries are unified by digest, then by name; a name must mean one dtype and shape
   everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np

from reshard.planner.classify import Int64, column
from reshard.planner.dictionaries import TensorDict
from reshard.planner.errors import ConflictError, TableError
from reshard.planner.shards import Holder, ShardPart


class ShardTable:
    """The shard tables of many holders.

    Parameters
    ----------
    parts : iterable of ShardPart
        One a holder; their order does not matter.

    Raises
    ------
    TableError
        Two parts of one holder.
    ConflictError
        A tensor with two dtypes, shapes or stored axes; both holders are named.

    Attributes
    ----------
    parts : tuple of ShardPart
        In order of holder name.
    tensors : TensorDict
        All tensors of all parts.
    id_maps : tuple of (int64 array or None)
        For each part, tensor id in the part to tensor id in `tensors`; None is the identity.
    """

    __slots__ = ("__dict__", "_distinct", "id_maps", "parts", "tensors")

    def __init__(self, parts: Iterable[ShardPart], _like: ShardTable | None = None) -> None:
        self.parts: tuple[ShardPart, ...] = tuple(sorted(parts, key=lambda part: part.holder.name))
        for a, b in zip(self.parts, self.parts[1:], strict=False):
            if a.holder.name == b.holder.name:
                raise TableError(f"holder {a.holder.name!r} has two parts; expected one", where=a.holder.name)
        self._distinct: _Distinct = _unify(self.parts, _like._distinct if _like is not None else None)
        self.tensors = self._distinct.union
        self.id_maps = tuple(self._distinct.maps[number] for number in self._distinct.which)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """In order of name."""
        return tuple(part.holder for part in self.parts)

    @property
    def n_shards(self) -> int:
        """Rows of all parts."""
        return sum(len(part) for part in self.parts)

    @cached_property
    def by_name(self) -> dict[str, int]:
        """Holder name to part number."""
        return {part.holder.name: i for i, part in enumerate(self.parts)}

    def replace(self, changed: Iterable[ShardPart] = (), removed: Iterable[str] = ()) -> ShardTable:
        """A table with some holders' parts replaced, added or removed."""
        parts = {part.holder.name: part for part in self.parts}
        for name in removed:
            if parts.pop(name, None) is None:
                raise TableError(f"holder {name!r} is not in the table", where=name)
        for part in changed:
            parts[part.holder.name] = part
        return ShardTable(parts.values(), _like=self)


@dataclass(frozen=True, eq=False, slots=True)
class _Distinct:
    """The distinct dictionaries of a table and their union; `which` of them each part has."""

    dictionaries: tuple[TensorDict, ...]
    which: tuple[int, ...]
    union: TensorDict
    maps: tuple[Int64 | None, ...]


def _unify(parts: tuple[ShardPart, ...], known: _Distinct | None) -> _Distinct:
    """One dictionary for all parts, and each distinct dictionary's map into it."""
    objects: dict[int, int] = {}
    for i, part in enumerate(parts):
        objects.setdefault(id(part.tensors), i)
    by_object: dict[int, int] = {}
    by_digest: dict[bytes, int] = {}
    distinct: list[TensorDict] = []
    owner: list[str] = []
    for key, i in objects.items():
        # one object needs no digest; several may be equal
        digest = parts[i].tensors.digest if len(objects) > 1 else b""
        by_object[key] = by_digest.setdefault(digest, len(distinct))
        if by_object[key] == len(distinct):
            distinct.append(parts[i].tensors)
            owner.append(parts[i].holder.name)
    which = [by_object[id(part.tensors)] for part in parts]
    if known is not None and len(known.dictionaries) == len(distinct):
        same = all(a is b or a.digest == b.digest for a, b in zip(known.dictionaries, distinct, strict=True))
        if same:
            return _Distinct(known.dictionaries, tuple(which), known.union, known.maps)
    if not distinct:
        return _Distinct((), (), TensorDict.build([], [], []), ())
    union, maps = (distinct[0], [None]) if len(distinct) == 1 else _merge(distinct, owner)
    return _Distinct(tuple(distinct), tuple(which), union, tuple(maps))


def _merge(distinct: list[TensorDict], owner: list[str]) -> tuple[TensorDict, list[Int64 | None]]:
    index = dict(distinct[0].index_of)
    home = [np.zeros(len(distinct[0]), np.int64)]  # dictionary that a union tensor came from
    rows: list[Int64] = [np.arange(len(distinct[0]))]
    maps: list[Int64 | None] = [None]
    for number, tensors in enumerate(distinct[1:], 1):
        names = tensors.names_list
        mapped = np.fromiter(map(index.get, names, repeat(-1)), np.int64, len(names))
        new = np.flatnonzero(mapped < 0)
        mapped[new] = np.arange(len(index), len(index) + len(new))
        added = names if len(new) == len(names) else [names[i] for i in new.tolist()]
        index.update(zip(added, range(len(index), len(index) + len(new)), strict=True))
        home.append(np.full(len(new), number))
        rows.append(new)
        maps.append(column(mapped, "id map"))
    all_home = np.concatenate(home)
    axes: dict[int, tuple[str, ...]] = {}
    for tensors, mapped_ids in zip(distinct, maps, strict=True):
        for i, value in tensors.axes.items():
            axes.setdefault(int(mapped_ids[i]) if mapped_ids is not None else i, value)
    if len(all_home) == len(distinct[0]) and axes == distinct[0].axes:
        union = distinct[0]
    else:
        union = TensorDict.merged(distinct, rows, index, axes)
    for tensors, mapped_ids, name in zip(distinct, maps, owner, strict=True):
        _check_agreement(union, tensors, mapped_ids, name, owner, all_home)
    return union, maps


def _check_agreement(
    union: TensorDict,
    tensors: TensorDict,
    mapped: Int64 | None,
    name: str,
    owner: list[str],
    home: Int64,
) -> None:
    ids = np.arange(len(tensors)) if mapped is None else mapped
    wrong = (union.dtype_code[ids] != tensors.dtype_code) | (union.ndim[ids] != tensors.ndim)
    for back in range(1, tensors.n_dims + 1):
        size = union.shape[-back][ids] if back <= union.n_dims else np.ones(len(ids), np.int64)
        wrong |= size != tensors.shape[-back]
    if not wrong.any() and not tensors.axes and not union.axes:
        return
    for i, t in enumerate(ids.tolist() if union.axes or tensors.axes else ()):
        wrong[i] |= tensors.axes.get(i) != union.axes.get(t)
    if not wrong.any():
        return
    bad = int(np.argmax(wrong))
    t = int(ids[bad])
    other = owner[int(home[t])]
    got = (tensors.dtype_label(bad), tensors.shape_of(bad), tensors.axes.get(bad))
    expected = (union.dtype_label(t), union.shape_of(t), union.axes.get(t))
    dim = -1
    if len(got[1]) == len(expected[1]):
        dim = next((d for d, (x, y) in enumerate(zip(got[1], expected[1], strict=True)) if x != y), -1)
    raise ConflictError(
        f"tensor {union.name(t)!r}: holder {name!r} says {got[0]} {got[1]} axes {got[2]}, "
        f"holder {other!r} says {expected[0]} {expected[1]} axes {expected[2]}",
        holders=(other, name),
        tensor=union.name(t),
        dim=dim,
        got=got,
        expected=expected,
        where=name,
    )
