"""Which boxes of Hugging Face tensors does one Megatron rank hold? Megatron itself is not imported.

1. `MegatronModel` and `MegatronRank` are the sizes and the place in the parallel layout.
2. `local_tensors` maps a GPT model's parameter names (Megatron Core's) to global, Hugging Face names and to pieces of
   those tensors (`reshard.refit.adapters.megatron_pieces`). A name that it does not know, or a layer or expert number
   that it cannot make global, is refused: nothing is guessed.

Replicas are claimed only along the ranks that the caller names (`MegatronRank.copies`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from reshard.planner.errors import TableError
from reshard.refit.adapters.megatron_pieces import (
    Piece,
    column_pieces,
    cut_pieces,
    expert_range,
    gated_pieces,
    qkv_pieces,
    row_pieces,
    vocabulary_pieces,
)
from reshard.refit.adapters.torch_dtensor import replica_claim
from reshard.refit.tensors import LocalTensor, is_torch

if TYPE_CHECKING:
    from reshard.refit.tensors import ArrayLike

__all__ = ["MegatronModel", "MegatronRank", "local_tensors"]


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """Sizes of a GPT model.

    Parameters
    ----------
    layers, hidden, heads, groups, head_dim
        As Megatron's `num_layers`, `hidden_size`, `num_attention_heads`, `num_query_groups`, `kv_channels`.
    intermediate
        Inner size of a dense MLP (`ffn_hidden_size`).
    vocabulary, padded_vocabulary
        True and padded vocabulary size.
    experts, expert_intermediate, shared_intermediate
        Number of experts and inner size of each (`moe_ffn_hidden_size`), and of all shared experts together; 0: none.
    gated
        Whether MLPs are gated linear units.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    intermediate: int
    vocabulary: int
    padded_vocabulary: int
    experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    gated: bool = True


@dataclass(frozen=True, slots=True)
class MegatronRank:
    """A rank's place in the parallel layout.

    Parameters
    ----------
    tensor, tensors
        Tensor-parallel rank and size.
    expert, experts
        Expert-parallel rank and size.
    expert_tensor, expert_tensors
        Tensor-parallel rank and size within an expert.
    first_layer
        Global number of this stage's layer 0 (`layer_offset`).
    copies
        Global ranks that hold equal copies, by kind of parameter: "sharded" (split over tensor parallelism: the
        data-parallel group), "replicated" (not split: data- times tensor-parallel) and "expert" (the expert
        data-parallel group). A kind left out claims nothing.
    """

    tensor: int = 0
    tensors: int = 1
    expert: int = 0
    experts: int = 1
    expert_tensor: int = 0
    expert_tensors: int = 1
    first_layer: int = 0
    copies: Mapping[str, Sequence[int]] | None = None

    def claim(self, kind: str) -> int:
        """Return the claim number of a kind of parameter, -1 where nothing is claimed."""
        ranks = (self.copies or {}).get(kind, ())
        return replica_claim(ranks) if len(ranks) > 1 else -1


_LAYER: Final = re.compile(r"^decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)$")
_EXPERT: Final = (
    re.compile(r"^mlp\.experts\.(?P<matrix>linear_fc[12])\.weight(?P<expert>\d+)$"),
    re.compile(r"^mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<matrix>linear_fc[12])\.weight$"),
)
_STACKED_EXPERTS: Final = re.compile(r"^mlp\.experts\.weight(?P<matrix>[12])$")

_REPLICATED: Final = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}


def local_tensors(
    named: Mapping[str, ArrayLike | None],
    model: MegatronModel,
    rank: MegatronRank,
    *,
    shared_name: str = "shared_expert",
) -> list[LocalTensor]:
    """Return what a rank holds of a GPT model, under global Hugging Face names, as views.

    Parameters
    ----------
    named
        Parameters by Megatron Core's names (`decoder.layers.0.self_attention.linear_qkv.weight`, ...), with this
        stage's own layer numbers and this rank's own expert numbers. `_extra_state` entries and None are skipped.
    model, rank
        The sizes, and the place in the layout.
    shared_name
        What the family calls shared experts: "shared_expert" (Qwen2-MoE) or "shared_experts" (DeepSeek).

    Raises
    ------
    TableError
        For a name of unknown meaning, a layer or expert number out of range, or a shape that does not fit.
    """
    naming = _Naming(model, rank, shared_name)
    found: list[LocalTensor] = []
    for name, local in named.items():
        if local is None or name.endswith("_extra_state"):
            continue
        found += naming.parameter(name.removeprefix("module."), local)
    return [tensor for tensor in found if tensor.n_elems]


@dataclass(frozen=True, slots=True)
class _Naming:
    """Maps one parameter at a time."""

    model: MegatronModel
    rank: MegatronRank
    shared_name: str

    def parameter(self, name: str, local: ArrayLike) -> list[LocalTensor]:
        model, rank = self.model, self.rank
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            target = "lm_head.weight" if name == "output_layer.weight" else "model.embed_tokens.weight"
            pieces = vocabulary_pieces(
                target,
                (model.vocabulary, model.hidden),
                padded=model.padded_vocabulary,
                rank=rank.tensor,
                size=rank.tensors,
            )
            return self._cut(local, pieces, "sharded")
        if name == "decoder.final_layernorm.weight":
            return self._whole("model.norm.weight", local)
        match = _LAYER.match(name)
        if match is None:
            raise TableError(f"parameter {name!r}: no rule gives it a global name", tensor=name)
        layer = rank.first_layer + int(match["layer"])
        if layer >= model.layers:
            raise TableError(
                f"parameter {name!r}: global layer {layer} (first layer {rank.first_layer}), expected at most "
                f"{model.layers - 1}",
                tensor=name,
            )
        return self._layer(f"model.layers.{layer}.", match["rest"], local, name)

    def _layer(self, prefix: str, rest: str, local: ArrayLike, name: str) -> list[LocalTensor]:
        model, tp = self.model, {"rank": self.rank.tensor, "size": self.rank.tensors}
        if rest in _REPLICATED:
            return self._whole(prefix + _REPLICATED[rest], local)
        kind = rest.rpartition(".")[2]
        if rest.startswith("self_attention.linear_qkv.") and kind in ("weight", "bias"):
            pieces = qkv_pieces(
                [f"{prefix}self_attn.{shard}_proj.{kind}" for shard in "qkv"],
                heads=model.heads,
                groups=model.groups,
                head_dim=model.head_dim,
                inner=(model.hidden,) if kind == "weight" else (),
                **tp,
            )
            return self._cut(local, pieces, "sharded")
        if rest == "self_attention.linear_proj.weight":
            shape = (model.hidden, model.heads * model.head_dim)
            return self._cut(local, row_pieces(f"{prefix}self_attn.o_proj.weight", shape, **tp), "sharded")
        if rest in ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"):
            inner = (model.hidden,) if kind == "weight" else ()
            return self._cut(local, self._fc1(f"{prefix}mlp", model.intermediate, inner, kind, **tp), "sharded")
        if rest == "mlp.linear_fc2.weight":
            shape = (model.hidden, model.intermediate)
            return self._cut(local, row_pieces(f"{prefix}mlp.down_proj.weight", shape, **tp), "sharded")
        if rest == "mlp.shared_experts.linear_fc1.weight":
            target = f"{prefix}mlp.{self.shared_name}"
            pieces = self._fc1(target, model.shared_intermediate, (model.hidden,), kind, **tp)
            return self._cut(local, pieces, "sharded")
        if rest == "mlp.shared_experts.linear_fc2.weight":
            shape = (model.hidden, model.shared_intermediate)
            target = f"{prefix}mlp.{self.shared_name}.down_proj.weight"
            return self._cut(local, row_pieces(target, shape, **tp), "sharded")
        for match in filter(None, (pattern.match(rest) for pattern in _EXPERT)):
            return self._expert(prefix, int(match["expert"]), match["matrix"] == "linear_fc1", local, name)
        if stacked := _STACKED_EXPERTS.match(rest):
            return self._stacked(prefix, stacked["matrix"] == "1", local, name)
        raise TableError(f"parameter {name!r}: no rule gives it a global name", tensor=name)

    def _fc1(self, target: str, rows: int, inner: tuple[int, ...], kind: str, *, rank: int, size: int) -> list[Piece]:
        if not self.model.gated:
            return column_pieces(f"{target}.up_proj.{kind}", (rows, *inner), rank=rank, size=size)
        names = [f"{target}.{shard}_proj.{kind}" for shard in ("gate", "up")]
        return gated_pieces(names, (rows, *inner), rank=rank, size=size)

    def _expert(self, prefix: str, expert: int, first: bool, local: ArrayLike, name: str) -> list[LocalTensor]:
        """One expert's matrix, out x in, under its global number."""
        model, rank = self.model, self.rank
        own = expert_range(model.experts, rank=rank.expert, size=rank.experts)
        if expert >= len(own):
            raise TableError(
                f"parameter {name!r}: local expert {expert}, expected at most {len(own) - 1} ({model.experts} experts "
                f"over {rank.experts} ranks)",
                tensor=name,
            )
        target = f"{prefix}mlp.experts.{own[expert]}"
        etp = {"rank": rank.expert_tensor, "size": rank.expert_tensors}
        if first:
            pieces = self._fc1(target, model.expert_intermediate, (model.hidden,), "weight", **etp)
        else:
            pieces = row_pieces(f"{target}.down_proj.weight", (model.hidden, model.expert_intermediate), **etp)
        return self._cut(local, pieces, "expert")

    def _stacked(self, prefix: str, first: bool, local: ArrayLike, name: str) -> list[LocalTensor]:
        """All of a rank's experts in one matrix whose memory is [expert, in, out] (`GroupedMLP`)."""
        own = expert_range(self.model.experts, rank=self.rank.expert, size=self.rank.experts)
        outer = (len(own), self.model.hidden, -1) if first else (len(own), -1, self.model.hidden)
        experts = local.reshape(outer)
        return [
            tensor
            for expert in range(len(own))
            for tensor in self._expert(prefix, expert, first, experts[expert].T, name)
        ]

    def _whole(self, target: str, local: ArrayLike) -> list[LocalTensor]:
        shape = tuple(int(n) for n in local.shape)
        return [
            LocalTensor(target, _label(local), shape, (0,) * len(shape), _plain(local), self.rank.claim("replicated"))
        ]

    def _cut(self, local: ArrayLike, pieces: Sequence[Piece], kind: str) -> list[LocalTensor]:
        return cut_pieces(_plain(local), pieces, _label(local), self.rank.claim(kind))


def _plain(local: ArrayLike) -> ArrayLike:
    detach: Callable[[], ArrayLike] | None = getattr(local, "detach", None) if is_torch(local) else None
    return detach() if detach is not None else local


def _label(local: ArrayLike) -> str:
    return str(local.dtype).removeprefix("torch.")
