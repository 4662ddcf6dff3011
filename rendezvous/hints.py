"""Where do receivers cut the source tensors? Their hints to the publishers, by layout epoch.

Pure transitions, as in :mod:`reshard.rendezvous.state`. A hint that says something new starts a layout epoch. A
publisher takes the hints of one layout epoch, lays out its buffers by them, and names that epoch when it opens a
version, so that publishers which took different hints are found out. Some older sets are kept, so that all ranks of a
trainer can take the same one.
"""

from __future__ import annotations

from reshard.rendezvous import limits
from reshard.rendezvous.errors import InvalidRequestError, StaleError
from reshard.rendezvous.records import Hint, Hints, HintSet, hints_key
from reshard.rendezvous.view import View

__all__ = ["get_hints", "put_hint"]

_KEPT_SETS = 8


def put_hint(view: View, model: str, hint: Hint) -> int:
    """Record a receiver's hint; returns the newest layout epoch, which includes it."""
    known = view.get(hints_key(model)) or Hints(model)
    newest = known.sets[0] if known.sets else HintSet(0, ())
    if hint in newest.hints:
        return newest.layout_epoch
    others = [other for other in newest.hints if (other.group, other.member) != (hint.group, hint.member)]
    if len(others) >= limits.MAX_MEMBERS:
        raise InvalidRequestError("member", f"{len(others)} receivers of {model!r} have hints, the most that are kept")
    hints = tuple(sorted((*others, hint), key=lambda row: (row.group, row.member)))
    latest = HintSet(newest.layout_epoch + 1, hints)
    view.put(hints_key(model), Hints(model, (latest, *known.sets[: _KEPT_SETS - 1])))
    return latest.layout_epoch


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
