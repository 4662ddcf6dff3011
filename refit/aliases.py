"""Are tensors that were declared equal (tied weights) equal in this version? One digest root a box, under one key.

A slot that holds a tensor of an alias class publishes, for each box of it, the root of the box's cell digests, under a
key that names the class and the box and not the tensor. The rendezvous compares equal keys of different slots and
refuses a version in which they differ, naming both holders; two tensors of one slot are compared here, before anything
is published. Boxes that are cut differently on different holders have different keys: those are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from reshard.planner import ShardPart
from reshard.planner.errors import format_box
from reshard.refit.cells import CellGrid, row_box
from reshard.refit.digests import root_of
from reshard.refit.errors import PublishError

__all__ = ["alias_roots", "class_of"]

_KEY_BYTES = 1024


def class_of(name: str, aliases: Mapping[str, str]) -> str:
    """The tensor that ``name`` was declared to equal, or itself.

    Raises
    ------
    PublishError
        Aliases that go round in a circle.

    Examples
    --------
    >>> class_of("lm_head", {"lm_head": "wte", "wte": "embed"})
    'embed'
    """
    seen = [name]
    while (target := aliases.get(seen[-1])) is not None:
        if target in seen:
            raise PublishError(f"aliases go round in a circle: {' -> '.join([*seen, target])}")
        seen.append(target)
    return seen[-1]


def alias_roots(
    part: ShardPart, grid: CellGrid, digests: npt.NDArray[np.uint64], aliases: Mapping[str, str], *, slot: str
) -> dict[str, bytes]:
    """Key -> root of 32 bytes, for each box of this slot that belongs to an alias class.

    Parameters
    ----------
    digests : uint64[n_cells, 2]
        Of the grid's cells.
    aliases
        Name -> name of a tensor with equal content.

    Raises
    ------
    PublishError
        Two tensors of this slot that were declared equal and differ.
    """
    classes = {class_of(name, aliases) for name in aliases}
    roots: dict[str, bytes] = {}
    owner: dict[str, str] = {}
    for row in range(len(part.tensor_id)):
        tensor = int(part.tensor_id[row])
        name = part.tensors.name(tensor)
        known = class_of(name, aliases)
        cells = slice(int(grid.first[row]), int(grid.first[row + 1]))
        if known not in classes or cells.start == cells.stop:
            continue
        start, stop = row_box(part, row)
        key = f"alias {known} {format_box(list(zip(start, stop, strict=True)))}"
        if len(key.encode()) > _KEY_BYTES:
            key = f"alias {hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
        content = (part.tensors.dtype_label(tensor), part.tensors.shape_of(tensor), start, stop)
        root = root_of(digests[cells], repr(content).encode())
        if roots.setdefault(key, root) != root:
            raise PublishError(
                f"slot {slot!r}: tensors {owner[key]!r} and {name!r} are declared equal and differ in box "
                f"{format_box(list(zip(start, stop, strict=True)))}"
            )
        owner[key] = name
    return roots
