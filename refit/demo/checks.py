"""Is what was refitted what the engine's own loader makes of a checkpoint, bit for bit?

1. `read_checkpoint` yields the tensors of a saved checkpoint.
2. `compare_with_checkpoint` loads them with the same loaders into a second model and compares every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reshard.planner.errors import require
from reshard.refit.demo.engine import ReferenceModel
from reshard.refit.demo.settings import DemoError

if TYPE_CHECKING:
    import torch

__all__ = ["bits_differ", "compare_with_checkpoint", "read_checkpoint"]

MAX_NAMED: Final = 5
"""How many differing parameters an error names."""


def read_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a saved checkpoint, file by file.

    Raises
    ------
    DemoError
        If the folder holds no safetensors file.
    """
    require("safetensors", extra="demo")
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DemoError(f"{folder}: no *.safetensors file")
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)


def compare_with_checkpoint(model: ReferenceModel, folder: Path) -> int:
    """Return how many elements were compared; all of them are equal in every bit.

    Parameters
    ----------
    model
        The refitted rank.
    folder
        A saved checkpoint.

    Raises
    ------
    DemoError
        If any bit differs, naming the parameters and counting the elements.
    """
    expected = ReferenceModel(model.shape, model.parallel, model.dtype)
    expected.load_weights(read_checkpoint(folder))
    wanted = dict(expected.named_parameters())
    differing: list[str] = []
    n_elems = 0
    for name, parameter in model.named_parameters():
        n_elems += parameter.numel()
        if n_different := bits_differ(parameter, wanted.pop(name)):
            differing.append(f"{name}: {n_different} of {parameter.numel()} elements")
    if differing or wanted:
        more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
        raise DemoError(f"not what the loader makes of the checkpoint: {'; '.join(differing[:MAX_NAMED])}{more}")
    return n_elems


def bits_differ(left: torch.Tensor, right: torch.Tensor) -> int:
    """Return how many elements of two tensors differ in any bit: 0.0 differs from -0.0, a NaN equals itself.

    Raises
    ------
    DemoError
        If their shapes or dtypes differ.
    """
    require("torch", extra="torch")
    import torch

    if left.shape != right.shape or left.dtype != right.dtype:
        raise DemoError(f"compare: got {left.dtype}{tuple(left.shape)}, expected {right.dtype}{tuple(right.shape)}")
    width = left.element_size()
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8).view(-1, width) for t in (left, right)]
    return int((as_bytes[0] != as_bytes[1]).any(1).sum())
