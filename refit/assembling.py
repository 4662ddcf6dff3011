"""How do the shares of one cell make it whole, so that it can be verified?

1. The spans of one wave lie in staging together: where they bring every byte of the cell, it is one check there.
2. What is left lies in the buffers once the copies are done, unless these cast: shares that cover the cell exactly once
   are one check of several pieces.
3. Shares that leave some elements out are laid over others that make a whole cell, which is checked on its own: then
   the digest is right only if they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from reshard.refit.shares import Box, Check, Image, Share

__all__ = ["put_together"]

Item = TypeVar("Item")


def put_together(found: Sequence[Share]) -> tuple[list[Check], bool]:
    """The checks of one cell, besides those of its whole direct shares; and whether all shares are verified then."""
    if len(found) == 1 and found[0].direct:
        return [], found[0].whole
    made: list[Check] = []
    proven = [s for s in found if s.direct and s.whole]
    left = [s for s in found if s.direct and not s.whole]
    for wave in sorted({share.block.wave for share in found if not share.direct}):
        staged = [s for s in found if not s.direct and s.block.wave == wave]
        checks, done = _in_staging(staged, wave)
        made += checks
        proven += [s for s in staged if s.image() in done]
        left += [s for s in staged if s.image() not in done]
    cast = any(s.block.converts for s in left)
    checks, complete = _in_buffers(
        [s for s in left if not s.block.converts], [s for s in proven if not s.block.converts]
    )
    return made + checks, complete and not cast


def _in_staging(shares: Sequence[Share], wave: int) -> tuple[list[Check], set[Image]]:
    """Checks of what the spans of one wave bring of a cell, and the images that are verified by them."""
    one = shares[0]
    made: list[Check] = []
    done: set[Image] = set()
    layers = _layers(sorted({share.image() for share in shares}), Image.box)
    for images, base in _whole(layers, (one.cell_bytes,), Image.box):
        pieces = [image.landing(one.cell_bytes) for image in (*base, *images)]
        made.append(one.check(pieces, sum(i.stop - i.start for i in images), wave=wave))
        done.update(images)
    return made, done


def _in_buffers(open_: Sequence[Share], proven: Sequence[Share]) -> tuple[list[Check], bool]:
    """Checks of shares that lie in buffers, with the help of proven ones; and whether all are verified then."""
    if not open_:
        return [], True
    one = open_[0]
    shape = tuple(one.cells.shape[one.cut.k].tolist())
    order = sorted(open_, key=lambda s: s.block.buffer)
    known = {id(share) for share in proven}
    made: list[Check] = []
    counted: dict[tuple[int, Image], npt.NDArray[np.bool_]] = {}

    def fresh_bytes(share: Share) -> int:
        """Bytes of it that came only now: those of one span may end up in several buffers."""
        if share.direct:
            return share.n_bytes
        seen = counted.setdefault((share.block.wave, share.image()), np.zeros(shape, np.bool_))
        n = int((~seen[share.box]).sum())
        seen[share.box] = True
        return n * share.cells.item

    n_done = 0
    for shares, base in _whole(_layers([*order, *proven], lambda s: s.box), shape, lambda s: s.box):
        fresh = [s for s in shares if id(s) not in known]
        if not fresh:
            continue
        n_done += len(fresh)
        used = [*base, *shares]
        after = max((s.block.wave for s in used if not s.direct), default=-1)
        made.append(one.check([s.landing(s.box) for s in used], sum(map(fresh_bytes, fresh)), after_wave=after))
    return made, n_done == len(open_)


def _layers(items: Iterable[Item], box_of: Callable[[Item], Box]) -> list[list[Item]]:
    """The items in layers in which none shares an element with another one, each in the first that takes it."""
    layers: list[list[Item]] = []
    for item in items:
        for layer in layers:
            if not any(_may_meet(box_of(item), box_of(other)) for other in layer):
                layer.append(item)
                break
        else:
            layers.append([item])
    return layers


def _whole(
    layers: Sequence[list[Item]], shape: tuple[int, ...], box_of: Callable[[Item], Box]
) -> Iterator[tuple[list[Item], list[Item]]]:
    """Layers that cover a cell of ``shape``, and others with a layer that does to lay them over."""

    def covers(layer: list[Item]) -> bool:
        return sum(math.prod(len(range(s.start, s.stop, s.step)) for s in box_of(item)) for item in layer) == size

    size = math.prod(shape)
    base = next((layer for layer in layers if covers(layer)), None)
    for layer in layers:
        if covers(layer):
            yield layer, []
        elif base is not None:
            yield layer, base


def _may_meet(one: Box, other: Box) -> bool:
    """False if two stepped boxes share no element; True if they may."""
    return all(
        a.start < b.stop and b.start < a.stop and (a.start - b.start) % math.gcd(a.step, b.step) == 0
        for a, b in zip(one, other, strict=True)
    )
