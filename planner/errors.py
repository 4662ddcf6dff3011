"""What can go wrong: one tree, drawn here, that every package of `reshard` hangs its own errors on.

    ReshardError
      TableError (ValueError)            a shard or read table breaks one of its rules
        ConflictError                    two holders say different things about one tensor
      CoverageError (ValueError)         a requested box has no source
      OverlapError (ValueError)          bytes would be written, or are held, twice without a claim
      DTypeError (TypeError)             unknown dtype label, refused cast, cut inside a byte
      PlanError (ValueError)             anything else that `plan()` refuses
      MissingDependencyError (ImportError)

Every error carries the facts as fields, and says what, where, got and expected in its message.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

Box = tuple[tuple[int, int], ...]


def format_box(box: Sequence[tuple[int, int]]) -> str:
    """Half-open intervals as text.

    >>> format_box(((0, 4), (2, 3)))
    '[0, 4) x [2, 3)'
    """
    return " x ".join(f"[{start}, {stop})" for start, stop in box) or "the scalar"


class ReshardError(Exception):
    """The root of every error that `reshard` raises on purpose."""


class TableError(ReshardError, ValueError):
    """A table breaks a rule.

    Attributes
    ----------
    tensor : str
        Name of the tensor concerned, "" where none is.
    dim : int
        Dimension of the tensor as published (not padded), -1 where none is.
    got, expected : object
        What was found and what the rule asks for.
    where : str
        The holder, row or table.
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str = "",
        dim: int = -1,
        got: object = None,
        expected: object = None,
        where: str = "",
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.dim = dim
        self.got = got
        self.expected = expected
        self.where = where


class ConflictError(TableError):
    """Two holders disagree about a tensor, or hold one box without claiming to be replicas.

    Attributes
    ----------
    holders : tuple of str
        The holders' names.
    """

    def __init__(
        self,
        message: str,
        *,
        holders: Sequence[str],
        tensor: str = "",
        dim: int = -1,
        got: object = None,
        expected: object = None,
        where: str = "",
    ) -> None:
        super().__init__(message, tensor=tensor, dim=dim, got=got, expected=expected, where=where)
        self.holders = tuple(holders)


class CoverageError(ReshardError, ValueError):
    """A requested part of a tensor is held by nobody.

    Attributes
    ----------
    tensor : str
    missing : list of box
        Boxes ``((start, stop), ...)`` in global elements that were requested and have no source.
    failures : dict
        Tensor name to missing boxes, for all tensors concerned (a sample where there are many).
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str = "",
        missing: Sequence[Box] = (),
        failures: dict[str, list[Box]] | None = None,
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.missing = list(missing)
        self.failures = failures if failures is not None else ({tensor: self.missing} if tensor else {})


class OverlapError(ReshardError, ValueError):
    """Two shards of one layout overlap, or two requests write the same bytes in no order.

    Attributes
    ----------
    tensor : str
        The source tensor or the destination buffer.
    boxes : list of box
        The two that overlap, where boxes describe them.
    holders : tuple of str
    """

    def __init__(
        self, message: str, *, tensor: str = "", boxes: Sequence[Box] = (), holders: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.boxes = list(boxes)
        self.holders = tuple(holders)


class DTypeError(ReshardError, TypeError):
    """A dtype label is unknown, a cast is refused, or a cut falls inside a byte.

    Attributes
    ----------
    tensor, got, expected : object
    """

    def __init__(self, message: str, *, tensor: str = "", got: object = None, expected: object = None) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.got = got
        self.expected = expected


class PlanError(ReshardError, ValueError):
    """`plan()` refuses for a reason that no other error names (a budget, an unknown tensor, a setting)."""

    def __init__(self, message: str, *, tensor: str = "", got: object = None, expected: object = None) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.got = got
        self.expected = expected


class MissingDependencyError(ReshardError, ImportError):
    """An optional package is used and not installed, or not in a version that can be used.

    Attributes
    ----------
    package : str
    extra : str
        The extra of `reshard` that installs it.
    """

    def __init__(self, package: str, extra: str, state: str = "not installed") -> None:
        super().__init__(f"{package!r} is needed here and {state}: pip install 'reshard[{extra}]'")
        self.package = package
        self.extra = extra


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module where it is used.

    Raises
    ------
    MissingDependencyError
        It is not installed; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if missing.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingDependencyError(module.split(".")[0], extra) from error
