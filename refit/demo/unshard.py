"""How do the ranks of the reference engine become one full model again?

The inverse of `reshard.refit.demo.engine`'s loaders, written apart from them: it knows the layout, not the loaders,
so that a mistake in one is not undone by the other.

1. Row-parallel parameters are joined along columns, column-parallel ones along rows, block by block where several
   matrices are fused; the vocabulary's padding is cut off, and must be zero.
2. What every rank holds whole must be equal bit for bit on all of them.
3. The result has the names of the transformers module, its stacked experts included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.planner.errors import require
from reshard.refit.demo.engine import ModelShape
from reshard.refit.demo.settings import DemoError

if TYPE_CHECKING:
    import torch

__all__ = ["unshard"]


def unshard(shape: ModelShape, ranks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return full tensors under the transformers module's names.

    Parameters
    ----------
    shape
        The model's sizes.
    ranks
        Each rank's parameters by the engine's names, in rank order.

    Raises
    ------
    DemoError
        If replicated parameters differ between ranks, or padding is not zero.
    """
    require("torch", extra="torch")
    import torch

    full: dict[str, torch.Tensor] = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        stem = name.removesuffix(".weight")
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = torch.cat(parts, 0)
            if padded[shape.vocabulary :].any():
                raise DemoError(f"{name}: the vocabulary's padding is not zero")
            full[name] = padded[: shape.vocabulary]
        elif name.endswith(".qkv_proj.weight"):
            prefix = stem.removesuffix("qkv_proj")
            for shard, tensor in _split_qkv(shape, parts).items():
                full[f"{prefix}{shard}_proj.weight"] = tensor
        elif name.endswith(".gate_up_proj.weight"):
            prefix = stem.removesuffix("gate_up_proj")
            full[f"{prefix}gate_proj.weight"], full[f"{prefix}up_proj.weight"] = _split_halves(parts, 0)
        elif name.endswith(".experts.w13_weight"):
            gate, up = _split_halves(parts, 1)
            full[name.replace("w13_weight", "gate_up_proj")] = torch.cat([gate, up], 1)
        elif name.endswith(".experts.w2_weight"):
            full[name.replace("w2_weight", "down_proj")] = torch.cat(parts, 2)
        elif name.endswith((".o_proj.weight", ".down_proj.weight")):
            full[name] = torch.cat(parts, 1)
        else:
            full[name] = _same(name, parts)
    return full


def _split_halves(parts: Sequence[torch.Tensor], dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each part holds gate rows above up rows: join the gates and join the ups."""
    require("torch", extra="torch")
    import torch

    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([half[0] for half in halves], dim), torch.cat([half[1] for half in halves], dim)


def _split_qkv(shape: ModelShape, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    require("torch", extra="torch")
    import torch

    n_ranks = len(parts)
    q_rows = shape.heads // n_ranks * shape.head_dim
    kv_rows = max(shape.kv_heads // n_ranks, 1) * shape.head_dim
    copies = max(n_ranks // shape.kv_heads, 1)
    split = [(part[:q_rows], part[q_rows:-kv_rows], part[-kv_rows:]) for part in parts]
    for first in range(0, n_ranks, copies):
        for rank in range(first + 1, first + copies):
            for shard in (1, 2):
                _same(f"KV heads of ranks {first} and {rank}", [split[first][shard], split[rank][shard]])
    return {
        "q": torch.cat([s[0] for s in split]),
        "k": torch.cat([s[1] for s in split[::copies]]),
        "v": torch.cat([s[2] for s in split[::copies]]),
    }


def _same(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    require("torch", extra="torch")
    import torch

    for rank, part in enumerate(parts):
        if not torch.equal(part, parts[0]):
            raise DemoError(f"{name}: rank {rank} differs from rank 0")
    return parts[0]
