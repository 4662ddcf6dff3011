"""What does a tensor-parallel inference engine hold, and how does it load a checkpoint?

A small reference engine with the parameter layout and the loading protocol of vLLM's: parameters carry a
`weight_loader`, the model has `load_weights`, and a rank of a tensor-parallel group is just its sharded parameters
(it runs no forward pass; `reshard.refit.demo.unshard` puts the ranks back together for that).

1. `TensorParallel` says which rank of how many this is.
2. The `_*_parameter` functions make one parameter each, with its loader: column-parallel, merged (gate/up), fused QKV
   with replicated KV heads, row-parallel, vocabulary-parallel with padding, stacked experts, and replicated ones.
3. `ReferenceModel` holds them under vLLM's names and maps checkpoint names to (parameter, shard) in `load_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from reshard.planner.errors import require
from reshard.refit.demo.settings import DemoError

if TYPE_CHECKING:
    import torch

__all__ = ["VOCABULARY_PADDING", "ModelShape", "ReferenceModel", "TensorParallel"]

VOCABULARY_PADDING: Final = 64
"""The vocabulary is padded to a multiple of this many rows before it is split."""

QKV_SHARDS: Final = ("q", "k", "v")
_EXPERT: Final = re.compile(r"^(?P<prefix>.+\.experts)\.(?P<expert>\d+)\.(?P<shard>gate|up|down)_proj\.weight$")


class WeightLoader(Protocol):
    """Writes what this rank needs of one checkpoint tensor into a parameter."""

    def __call__(
        self, parameter: torch.Tensor, loaded: torch.Tensor, shard: str | None = None, expert: int | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank's place in its tensor-parallel group."""

    rank: int
    size: int

    def split(self, total: int, what: str) -> int:
        """Return one rank's part of `total`, which must divide evenly."""
        if total % self.size:
            raise DemoError(f"{what}: {total} does not divide by {self.size} tensor-parallel ranks")
        return total // self.size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model, from its `config.json`.

    Parameters
    ----------
    vocabulary, hidden, layers, heads, kv_heads, head_dim
        As in the Hugging Face configuration.
    intermediate
        Inner size of the dense MLP, or of one expert where `experts` > 0.
    experts
        Number of experts; 0 for a dense model.
    tied
        Whether the output head shares the embedding's weights.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int
    tied: bool


class ReferenceModel:
    """One rank's parameters of a Qwen3 or Qwen3-MoE model, with vLLM's names and loaders.

    Parameters
    ----------
    shape
        The model's sizes.
    parallel
        This rank's place in the tensor-parallel group.
    dtype
        Parameter dtype; routers are held in float32.

    Attributes
    ----------
    module
        A torch module that holds the parameters.

    Notes
    -----
    Fresh parameters hold NaN, so that one that is never written cannot pass for a loaded one.
    """

    def __init__(self, shape: ModelShape, parallel: TensorParallel, dtype: torch.dtype) -> None:
        self.shape = shape
        self.parallel = parallel
        self.dtype = dtype
        self._make = _Maker(parallel, dtype)
        import torch

        self.module = torch.nn.Module()
        self._stacked: dict[str, tuple[str, str]] = {}
        self._embedding("model.embed_tokens.weight")
        for layer in range(shape.layers):
            self._attention(f"model.layers.{layer}.self_attn")
            if shape.experts:
                self._experts(f"model.layers.{layer}.mlp")
            else:
                self._mlp(f"model.layers.{layer}.mlp")
            self._norm(f"model.layers.{layer}.input_layernorm.weight", shape.hidden)
            self._norm(f"model.layers.{layer}.post_attention_layernorm.weight", shape.hidden)
        self._norm("model.norm.weight", shape.hidden)
        if not shape.tied:
            self._embedding("lm_head.weight")

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (name, parameter)."""
        return self.module.named_parameters()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load checkpoint tensors, in any order, and return the names of the parameters written.

        Parameters
        ----------
        weights
            (checkpoint name, full tensor) pairs.

        Raises
        ------
        DemoError
            If a name belongs to no parameter.
        """
        loaded: set[str] = set()
        parameters = dict(self.module.named_parameters())
        for name, tensor in weights:
            if self.shape.tied and name == "lm_head.weight":
                continue
            target, shard, expert = self._target(name)
            parameter = parameters.get(target)
            if parameter is None:
                raise DemoError(f"checkpoint tensor {name!r}: the model has no parameter {target!r}")
            loader: WeightLoader = parameter.weight_loader  # type: ignore[attr-defined]
            loader(parameter, tensor, shard, expert)
            loaded.add(target)
        return loaded

    def _target(self, name: str) -> tuple[str, str | None, int | None]:
        """Map a checkpoint name to (parameter, shard, expert)."""
        if match := _EXPERT.match(name):
            stacked = "w2_weight" if match["shard"] == "down" else "w13_weight"
            return f"{match['prefix']}.{stacked}", match["shard"], int(match["expert"])
        for own, (target, shard) in self._stacked.items():
            if name == own:
                return target, shard, None
        return name, None, None

    def _add(self, name: str, parameter: torch.nn.Parameter, **stacked: str) -> None:
        import torch

        *path, leaf = name.split(".")
        module = self.module
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, parameter)
        for shard, checkpoint_name in stacked.items():
            self._stacked[checkpoint_name] = (name, shard)

    def _norm(self, name: str, size: int) -> None:
        self._add(name, self._make.replicated(size))

    def _embedding(self, name: str) -> None:
        self._add(name, self._make.vocabulary(self.shape.vocabulary, self.shape.hidden))

    def _attention(self, prefix: str) -> None:
        shape = self.shape
        names = {shard: f"{prefix}.{shard}_proj.weight" for shard in QKV_SHARDS}
        qkv = self._make.qkv(shape.heads, shape.kv_heads, shape.head_dim, shape.hidden)
        self._add(f"{prefix}.qkv_proj.weight", qkv, **names)
        self._add(f"{prefix}.o_proj.weight", self._make.row(shape.hidden, shape.heads * shape.head_dim))
        self._norm(f"{prefix}.q_norm.weight", shape.head_dim)
        self._norm(f"{prefix}.k_norm.weight", shape.head_dim)

    def _mlp(self, prefix: str) -> None:
        shape = self.shape
        gate_up = self._make.merged(("gate", "up"), shape.intermediate, shape.hidden)
        names = {shard: f"{prefix}.{shard}_proj.weight" for shard in ("gate", "up")}
        self._add(f"{prefix}.gate_up_proj.weight", gate_up, **names)
        self._add(f"{prefix}.down_proj.weight", self._make.row(shape.hidden, shape.intermediate))

    def _experts(self, prefix: str) -> None:
        shape = self.shape
        self._add(f"{prefix}.gate.weight", self._make.router(shape.experts, shape.hidden))
        w13, w2 = self._make.experts(shape.experts, shape.intermediate, shape.hidden)
        self._add(f"{prefix}.experts.w13_weight", w13)
        self._add(f"{prefix}.experts.w2_weight", w2)


class _Maker:
    """Makes parameters of one rank, each with its `weight_loader`."""

    def __init__(self, parallel: TensorParallel, dtype: torch.dtype) -> None:
        require("torch", extra="torch")
        self._parallel = parallel
        self._dtype = dtype

    def replicated(self, *shape: int) -> torch.nn.Parameter:
        return self._parameter(shape, _load_whole)

    def router(self, experts: int, hidden: int) -> torch.nn.Parameter:
        import torch

        return self._parameter((experts, hidden), _load_whole, torch.float32)

    def row(self, out: int, inner: int) -> torch.nn.Parameter:
        """Row-parallel: each rank holds some input columns of every output row."""
        part = self._parallel.split(inner, "row-parallel input")
        start = self._parallel.rank * part

        def load(
            parameter: torch.Tensor, loaded: torch.Tensor, shard: str | None = None, expert: int | None = None
        ) -> None:
            parameter.data.copy_(loaded.narrow(1, start, part))

        return self._parameter((out, part), load)

    def merged(self, shards: tuple[str, ...], size: int, inner: int) -> torch.nn.Parameter:
        """Merged column-parallel: some rows of each of several equal matrices, one below the other."""
        part = self._parallel.split(size, "merged output")
        start = self._parallel.rank * part

        def load(
            parameter: torch.Tensor, loaded: torch.Tensor, shard: str | None = None, expert: int | None = None
        ) -> None:
            row = shards.index(_required(shard)) * part
            parameter.data.narrow(0, row, part).copy_(loaded.narrow(0, start, part))

        return self._parameter((len(shards) * part, inner), load)

    def qkv(self, heads: int, kv_heads: int, head_dim: int, hidden: int) -> torch.nn.Parameter:
        """Fused QKV: this rank's query heads, then its key heads, then its value heads.

        With fewer KV heads than ranks, several ranks hold the same KV head.
        """
        rank, size = self._parallel.rank, self._parallel.size
        q_rows = self._parallel.split(heads, "query heads") * head_dim
        if max(kv_heads, size) % min(kv_heads, size):
            raise DemoError(f"KV heads: {kv_heads} and {size} tensor-parallel ranks: neither divides the other")
        kv_rows = max(kv_heads // size, 1) * head_dim
        kv_start = rank * kv_heads // size * head_dim
        source = {"q": (rank * q_rows, q_rows), "k": (kv_start, kv_rows), "v": (kv_start, kv_rows)}
        target = {"q": 0, "k": q_rows, "v": q_rows + kv_rows}

        def load(
            parameter: torch.Tensor, loaded: torch.Tensor, shard: str | None = None, expert: int | None = None
        ) -> None:
            start, rows = source[_required(shard)]
            parameter.data.narrow(0, target[_required(shard)], rows).copy_(loaded.narrow(0, start, rows))

        return self._parameter((q_rows + 2 * kv_rows, hidden), load)

    def vocabulary(self, rows: int, hidden: int) -> torch.nn.Parameter:
        """Vocabulary-parallel: the padded vocabulary split evenly; rows of padding are zero."""
        padded = -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
        part = self._parallel.split(padded, "padded vocabulary")
        start = self._parallel.rank * part
        own = max(min(start + part, rows) - start, 0)

        def load(
            parameter: torch.Tensor, loaded: torch.Tensor, shard: str | None = None, expert: int | None = None
        ) -> None:
            parameter.data[:own].copy_(loaded.narrow(0, min(start, rows), own))
            parameter.data[own:].fill_(0)

        return self._parameter((part, hidden), load)

    def experts(self, experts: int, intermediate: int, hidden: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """Stacked experts: w13 holds each expert's gate rows above its up rows, w2 its down columns."""
        part = self._parallel.split(intermediate, "expert size")
        start = self._parallel.rank * part

        def load(
            parameter: torch.Tensor, loaded: torch.Tensor, shard: str | None = None, expert: int | None = None
        ) -> None:
            if expert is None:
                raise DemoError("stacked experts: the loader needs an expert number")
            own = parameter.data[expert]
            if shard == "down":
                own.copy_(loaded.narrow(1, start, part))
            else:
                own.narrow(0, 0 if shard == "gate" else part, part).copy_(loaded.narrow(0, start, part))

        w13 = self._parameter((experts, 2 * part, hidden), load)
        return w13, self._parameter((experts, hidden, part), load)

    def _parameter(
        self, shape: tuple[int, ...], load: WeightLoader, dtype: torch.dtype | None = None
    ) -> torch.nn.Parameter:
        import torch

        data = torch.full(shape, float("nan"), dtype=dtype or self._dtype)
        parameter = torch.nn.Parameter(data, requires_grad=False)
        parameter.weight_loader = load  # type: ignore[attr-defined]
        return parameter


def _load_whole(
    parameter: torch.Tensor, loaded: torch.Tensor, shard: str | None = None, expert: int | None = None
) -> None:
    if parameter.shape != loaded.shape:
        raise DemoError(f"loading: got shape {tuple(loaded.shape)}, expected {tuple(parameter.shape)}")
    parameter.data.copy_(loaded)


def _required(shard: str | None) -> str:
    if shard is None:
        raise DemoError("fused parameter: the loader needs a shard name")
    return shard
