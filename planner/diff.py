"""What changed? Differences between tables and between plans, and planning again from what did not change.

`replan` proves each part unchanged by identity or digest, keeps its verified classes and its segment, and
looks only at the parts that changed. The result equals `plan` of the new table. A holder that only moved its
regions needs no replan at all: bases are given to `Plan.bind`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from reshard.planner.classes import reclassify
from reshard.planner.errors import PlanError
from reshard.planner.needs import needed_numbers, needed_rows
from reshard.planner.planning import assemble_plan, plan, template_dims
from reshard.planner.plans import Plan
from reshard.planner.rows import WireRows
from reshard.planner.scales import check_block_scales
from reshard.planner.shards import ShardPart
from reshard.planner.tables import ShardTable


@dataclass(frozen=True, slots=True)
class TableDiff:
    """Holders by what happened to their parts, each in order of name.

    Attributes
    ----------
    added, removed, changed, unchanged : tuple of str
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]


def _same(a: ShardPart, b: ShardPart) -> bool:
    return a is b or a.digest == b.digest


def diff_tables(old: ShardTable, new: ShardTable) -> TableDiff:
    """Compare two tables, part by part, by identity or digest.

    Examples
    --------
    >>> from reshard.planner import Holder, Shard, ShardPart, ShardTable
    >>> a = ShardPart.from_shards(Holder("a"), [Shard("w", "int8", (2,), (0,), (2,))], [2])
    >>> diff_tables(ShardTable([a]), ShardTable([a, a.with_holder(Holder("b"))])).added
    ('b',)
    """
    before = {part.holder.name: part for part in old.parts}
    after = {part.holder.name: part for part in new.parts}
    both = [name for name in before if name in after]
    same = [name for name in both if _same(before[name], after[name])]
    equal = set(same)
    return TableDiff(
        tuple(name for name in after if name not in before),
        tuple(name for name in before if name not in after),
        tuple(name for name in both if name not in equal),
        tuple(same),
    )


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Holders by what happened to the rows read from them.

    Attributes
    ----------
    added, removed, changed, unchanged : tuple of str
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Both plans read the same rows."""
        return not (self.added or self.removed or self.changed)


def _rows_of(made: Plan) -> dict[str, list[bytes]]:
    out: dict[str, list[bytes]] = {holder.name: [] for holder in made.holders}
    for wave in range(made.n_waves):
        rows = made.rows(wave)
        cuts = np.searchsorted(rows.holder, np.arange(len(made.holders) + 1))
        for i, holder in enumerate(made.holders):
            mine = rows.take(slice(int(cuts[i]), int(cuts[i + 1])))
            names = [name for name in WireRows.__dataclass_fields__ if name != "holder"]
            out[holder.name].append(b"".join(getattr(mine, name).tobytes() for name in names))
    return out


def diff_plans(old: Plan, new: Plan) -> PlanDiff:
    """Compare the relative wire rows of two plans, holder by holder."""
    before, after = _rows_of(old), _rows_of(new)
    both = [name for name in before if name in after]
    return PlanDiff(
        tuple(name for name in after if name not in before),
        tuple(name for name in before if name not in after),
        tuple(name for name in both if before[name] != after[name]),
        tuple(name for name in both if before[name] == after[name]),
    )


def replan(made: Plan, changed: Iterable[ShardPart] = (), removed: Iterable[str] = ()) -> Plan:
    """Plan again after some holders changed, came or went.

    Parameters
    ----------
    made : Plan
        The plan for the table before.
    changed : iterable of ShardPart
        Parts of holders that are new or hold something else now.
    removed : iterable of str
        Holders that vanished.

    Returns
    -------
    Plan
        What `plan` makes of the new table.

    Raises
    ------
    PlanError
        A holder both changed and removed.
    ReshardError
        Whatever `plan` raises for the new table.
    """
    news, gone = list(changed), list(removed)
    twice = {part.holder.name for part in news} & set(gone)
    if twice:
        raise PlanError(f"holders {sorted(twice)} are both changed and removed", got=sorted(twice))
    old = made.sources
    sources = old.replace(news, gone)
    old_classes = made.templates.classes
    n_dims = template_dims(sources, made.reads)
    if sources.tensors is not old.tensors or n_dims != len(old_classes.shards.start):
        # another union dictionary means other tensor numbers: nothing of the old plan can be kept
        return plan(sources, made.reads, made.options)
    if made.options.block_scales:
        check_block_scales(sources, made.reads, made.options.block_scales)
    number = needed_numbers(old_classes.tensor, len(sources.tensors))
    now = [-1] * len(old.parts)
    parts = []
    for i, (part, id_map) in enumerate(zip(sources.parts, sources.id_maps, strict=True)):
        j = old.by_name.get(part.holder.name)
        if j is not None and _same(part, old.parts[j]):
            now[j] = i
            parts.append(old_classes.parts[j])
        else:
            parts.append(needed_rows(part, id_map, number))
    kept = np.array(now, np.int64)
    classes = reclassify(old_classes, sources, made.requests, tuple(parts), kept, n_dims)
    known = None
    if classes.members is old_classes.members:
        known = {now[s.part]: (old_classes.parts[s.part].part, s) for s in made.segments if now[s.part] >= 0}
    # what is written follows from the requests; only the table that they were held against is another
    certificate = dataclasses.replace(made.certificate, _sources=sources)
    return assemble_plan(sources, made.demand, classes, known, certificate)
