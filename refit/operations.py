"""What does a torch operation do with its arguments: which does it write, is it a view, does it look at values?

The answers are those of torch's own schemas, and a few lists of names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Operation = torch._ops.OpOverload

__all__ = ["ESCAPES", "VALUE_FREE", "is_view", "on_each", "tensors_in", "written_by"]

VALUE_FREE = frozenset(
    (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
    )
)
"""Operations that look at their argument's shape and dtype alone."""

ESCAPES = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero", "allclose"))
"""Operations whose answer in Python depends on values."""


def tensors_in(args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """Tensors among the arguments; an operation's argument is at most a list of them."""
    import torch

    out: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            out.append(value)
        elif isinstance(value, list | tuple):
            out += [t for t in value if isinstance(t, torch.Tensor)]
    return out


def on_each(change: Callable[[object], object], value: object) -> object:
    """``change`` applied to an argument, or to each item of one that is a list."""
    return [change(v) for v in value] if isinstance(value, list | tuple) else change(value)


@cache
def _written_arguments(func: Operation) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_by(func: Operation, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """The tensors that a call writes."""
    out: list[torch.Tensor] = []
    for i, name in _written_arguments(func):
        out += tensors_in((args[i] if i < len(args) else kwargs.get(name),), {})
    return out


def is_view(func: Operation) -> bool:
    """Whether all that it returns are views of its arguments."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
