"""Which part of what a rank holds goes out? Named modules without the rest of the model.

A version that holds a subset is published and refitted like any other; parameters of the engine that it does not name
keep their values, and the coverage record lists them as never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from reshard.refit.names import names_of
from reshard.refit.tensors import LocalTensor

__all__ = ["select"]


def select(
    held: Iterable[LocalTensor], only: Sequence[str] = ("*",), *, without: Sequence[str] = ()
) -> list[LocalTensor]:
    """Return the tensors whose names match one of some patterns.

    Parameters
    ----------
    held
        What the rank holds.
    only
        Patterns (`fnmatch`, case matters) of the names to keep.
    without
        Patterns of names to leave out even so.

    Returns
    -------
    list of LocalTensor
        May be empty: this rank then holds nothing of the subset, and publishes with `empty=True`.

    Raises
    ------
    TypeError
        A bare string, whose characters (``*`` is one) would be taken for patterns.

    Examples
    --------
    >>> import numpy as np
    >>> from reshard.refit.tensors import full
    >>> held = [full(name, "float32", np.zeros(2, np.float32)) for name in ("a.w", "a.b", "c.w")]
    >>> [tensor.name for tensor in select(held, ["a.*"], without=["*.b"])]
    ['a.w']
    """
    only, without = names_of(only, "only"), names_of(without, "without")
    return [
        tensor
        for tensor in held
        if any(fnmatchcase(tensor.name, pattern) for pattern in only)
        and not any(fnmatchcase(tensor.name, pattern) for pattern in without)
    ]
