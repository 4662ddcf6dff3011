"""Where do receivers cut the source tensors? Their hints to the publishers, by layout epoch.

Pure transitions, as in :mod:`reshard.rendezvous.state`. A hint that says something new starts a layout epoch. A
publisher takes the hints of one layout epoch, lays out its buffers by them, and names that epoch when it opens a
version, so that publishers which took different hints are found out. Some older sets are kept, so that all ranks of a
trainer can take the same one. A new set leaves out receivers whose group is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from reshard.rendezvous import limits
from reshard.rendezvous.errors import InvalidRequestError, StaleError
from reshard.rendezvous.keys import group_key, hints_key
from reshard.rendezvous.records import Hint, Hints, HintSet
from reshard.rendezvous.retention import KEEP_LOST_S, use_model
from reshard.rendezvous.view import View

__all__ = ["get_hints", "put_hint"]

_KEPT_SETS = 8


def put_hint(view: View, model: str, hint: Hint) -> int:
    """Record a receiver's hint; returns the newest layout epoch, which includes it."""
    use_model(view, model)
    known = view.get(hints_key(model)) or Hints(model)
    newest = known.sets[0] if known.sets else HintSet(0, ())
    others = [other for other in newest.hints if (other.group, other.member) != (hint.group, hint.member)]
    said = replace(hint, said_at=view.now)
    if hint in newest.hints:
        before = next(other for other in newest.hints if other == hint)
        if before.said_at + KEEP_LOST_S <= view.now:  # not at each call: it is written for the next set alone
            view.put(
                hints_key(model),
                replace(known, sets=(_hint_set(newest.layout_epoch, (*others, said)), *known.sets[1:])),
            )
        return newest.layout_epoch
    others = _without_forgotten(view, model, others)
    if len(others) >= limits.MAX_MEMBERS:
        raise InvalidRequestError("member", f"{len(others)} receivers of {model!r} have hints, the most that are kept")
    latest = _hint_set(newest.layout_epoch + 1, (*others, said))
    view.put(hints_key(model), Hints(model, (latest, *known.sets[: _KEPT_SETS - 1])))
    return latest.layout_epoch


def _hint_set(layout_epoch: int, hints: Iterable[Hint]) -> HintSet:
    return HintSet(layout_epoch, tuple(sorted(hints, key=lambda row: (row.group, row.member))))


def _without_forgotten(view: View, model: str, hints: list[Hint]) -> list[Hint]:
    """Leave out what was said over an hour ago by members of a group that is forgotten."""
    old = sorted({hint.group for hint in hints if hint.said_at + KEEP_LOST_S <= view.now})
    records = view.get_many([group_key(model, name) for name in old], watch=False)
    gone = {name for name, record in zip(old, records, strict=True) if record is None}
    return [hint for hint in hints if hint.group not in gone or hint.said_at + KEEP_LOST_S > view.now]


def get_hints(view: View, model: str, layout_epoch: int | None) -> HintSet:
    """Return the hints of a layout epoch (None: the newest); layout epoch 0 has none."""
    known = view.get(hints_key(model))
    sets = (*known.sets, HintSet(0, ())) if known is not None else (HintSet(0, ()),)
    if layout_epoch is None:
        return sets[0]
    for hints in sets:
        if hints.layout_epoch == layout_epoch:
            return hints
    raise StaleError(f"{model!r} has no hints of layout epoch {layout_epoch}; the newest is {sets[0].layout_epoch}")
