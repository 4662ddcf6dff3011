"""Sequences of names and patterns, as callers give them: a bare string is a mistake, not a sequence of characters."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["names_of"]


def names_of(value: Iterable[str], what: str) -> tuple[str, ...]:
    """``value`` as a tuple of strings.

    Parameters
    ----------
    what
        The argument's name, for the error.

    Raises
    ------
    TypeError
        A bare string, or something in it that is none.

    Examples
    --------
    >>> names_of(["tp0", "tp1"], "members")
    ('tp0', 'tp1')
    >>> names_of("visual.*", "allow_unconsumed")
    Traceback (most recent call last):
        ...
    TypeError: allow_unconsumed: got the string 'visual.*', expected a sequence of names; did you mean ['visual.*']?
    """
    if isinstance(value, str | bytes):
        raise TypeError(f"{what}: got the string {value!r}, expected a sequence of names; did you mean [{value!r}]?")
    found = tuple(value)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{what}: got {name!r} of type {type(name).__name__}, expected strings")
    return found
