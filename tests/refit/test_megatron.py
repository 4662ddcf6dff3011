"""Megatron-style parameters: the field's cases by hand, and whole models sharded by slicing and put together again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster

from reshard.planner.errors import TableError
from reshard.refit.adapters import megatron, megatron_pieces
from reshard.refit.adapters.megatron import MegatronModel, MegatronRank
from reshard.refit.adapters.megatron_pieces import Piece
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.tensors import LocalTensor
from reshard.rendezvous.errors import EqualityError

Tensors = dict[str, np.ndarray]


def global_rows(pieces: list[Piece], base: dict[str, int]) -> list[int]:
    """For each local row, its row in the concatenation of the tensors at the given offsets."""
    rows: dict[int, int] = {}
    for piece in pieces:
        for k in range(piece.count):
            rows[piece.local_start + piece.local_step * k] = base[piece.name] + piece.start + k
    return [rows[at] for at in sorted(rows)]


def test_g9_gated_linear_unit() -> None:
    base = {"gate": 0, "up": 4}
    held = [global_rows(megatron_pieces.gated_pieces(("gate", "up"), (4, 2), rank=r, size=2), base) for r in range(2)]
    assert held == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_g10_qkv_by_group() -> None:
    pieces = megatron_pieces.qkv_pieces("qkv", heads=4, groups=2, head_dim=2, inner=(3,), rank=0, size=1)
    fused = {
        name: [p.local_start + k for p in pieces if p.name == name for k in range(p.count)] for name in ("q", "k", "v")
    }
    assert fused == {"q": [0, 1, 2, 3, 8, 9, 10, 11], "k": [4, 5, 12, 13], "v": [6, 7, 14, 15]}


def test_g11_fewer_kv_heads_than_ranks() -> None:
    shares = [
        megatron_pieces.qkv_pieces("qkv", heads=64, groups=2, head_dim=128, inner=(8,), rank=rank, size=8)
        for rank in range(8)
    ]
    rows = [[(p.name, p.count) for p in share] for share in shares]
    last = [("q", 832), ("k", 128), ("v", 128)]
    assert rows == [[("q", 1088)]] * 3 + [last] + [[("q", 1088)]] * 3 + [last]
    key = [(p.start, p.start + p.count) for share in shares for p in share if p.name == "k"]
    assert key == [(0, 128), (128, 256)]


def test_g13_interleaved_rows() -> None:
    pieces = megatron_pieces.interleaved_pieces(("gate", "up"), (3, 2), rank=0, size=1)
    assert [p.local_start + p.local_step * k for p in pieces for k in range(p.count)] == [0, 2, 4, 1, 3, 5]
    local = np.arange(12).reshape(6, 2)
    gate, up = megatron_pieces.cut_pieces(local, pieces, "int64")
    assert np.asarray(gate.data)[:, 0].tolist() == [0, 4, 8]
    assert np.asarray(up.data)[:, 0].tolist() == [2, 6, 10]


def test_g14_stacked_experts() -> None:
    """Expert 1's first up row starts at element 12 of a stack [2, 4, 2] with gate above up."""
    stack = np.arange(16).reshape(2, 4, 2)
    _, up = megatron_pieces.cut_pieces(
        stack[1], megatron_pieces.gated_pieces(("gate", "up"), (2, 2), rank=0, size=1), "int64"
    )
    assert int(np.asarray(up.data).flat[0]) == 12


def test_n3_global_experts() -> None:
    assert megatron_pieces.expert_range(512, rank=1, size=8) == range(64, 128)


def test_layer_offsets() -> None:
    assert [megatron_pieces.layer_offset(12, rank=rank, size=4) for rank in range(4)] == [0, 3, 6, 9]
    chunks = [megatron_pieces.layer_offset(8, rank=r, size=2, chunk=c, chunks=2) for c in range(2) for r in range(2)]
    assert chunks == [0, 2, 4, 6]
    with pytest.raises(TableError, match="layers over pipeline stages: 10 does not divide by 4"):
        megatron_pieces.layer_offset(10, rank=0, size=4)


# -- a whole model, sharded by slicing full tensors as Megatron's documentation says, and put together again

DENSE = MegatronModel(
    layers=4, hidden=6, heads=8, groups=2, head_dim=2, intermediate=8, vocabulary=13, padded_vocabulary=16
)
MOE = MegatronModel(
    layers=4,
    hidden=6,
    heads=8,
    groups=4,
    head_dim=2,
    intermediate=8,
    vocabulary=13,
    padded_vocabulary=16,
    experts=4,
    expert_intermediate=8,
    shared_intermediate=8,
)


def full_tensors(model: MegatronModel) -> Tensors:
    rng = np.random.default_rng(3)

    def make(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    q, kv, h = model.heads * model.head_dim, model.groups * model.head_dim, model.hidden
    full = {
        "model.embed_tokens.weight": make(model.vocabulary, h),
        "lm_head.weight": make(model.vocabulary, h),
        "model.norm.weight": make(h),
    }
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        full |= {f"{at}self_attn.q_proj.weight": make(q, h), f"{at}self_attn.o_proj.weight": make(h, q)}
        full |= {f"{at}self_attn.k_proj.weight": make(kv, h), f"{at}self_attn.v_proj.weight": make(kv, h)}
        full |= {f"{at}input_layernorm.weight": make(h), f"{at}post_attention_layernorm.weight": make(h)}
        mlps = {f"{at}mlp": model.intermediate}
        if model.experts:
            full[f"{at}mlp.gate.weight"] = make(model.experts, h)
            mlps = {f"{at}mlp.experts.{e}": model.expert_intermediate for e in range(model.experts)}
            mlps[f"{at}mlp.shared_expert"] = model.shared_intermediate
        for mlp, size in mlps.items():
            full |= {f"{mlp}.gate_proj.weight": make(size, h), f"{mlp}.up_proj.weight": make(size, h)}
            full[f"{mlp}.down_proj.weight"] = make(h, size)
    return full


def shard(full: Tensors, model: MegatronModel, rank: MegatronRank, layers: range, stacked: bool) -> Tensors:
    """What Megatron would hold: chunks of whole fused matrices."""
    local: Tensors = {}
    tp, etp = (rank.tensor, rank.tensors), (rank.expert_tensor, rank.expert_tensors)

    def rows(matrix: np.ndarray, at: tuple[int, int]) -> np.ndarray:
        return np.split(matrix, at[1], 0)[at[0]]

    def columns(matrix: np.ndarray, at: tuple[int, int]) -> np.ndarray:
        return np.split(matrix, at[1], 1)[at[0]]

    def fc1(mlp: str, at: tuple[int, int]) -> np.ndarray:
        return np.concatenate([rows(full[f"{mlp}.gate_proj.weight"], at), rows(full[f"{mlp}.up_proj.weight"], at)])

    if layers.start == 0:
        padding = np.zeros((model.padded_vocabulary - model.vocabulary, model.hidden), np.float32)
        padded = np.concatenate([full["model.embed_tokens.weight"], padding])
        local["embedding.word_embeddings.weight"] = rows(padded, tp)
    if layers.stop == model.layers:
        padding = np.zeros((model.padded_vocabulary - model.vocabulary, model.hidden), np.float32)
        local["output_layer.weight"] = rows(np.concatenate([full["lm_head.weight"], padding]), tp)
        local["decoder.final_layernorm.weight"] = full["model.norm.weight"]
    for number, layer in enumerate(layers):
        at, to = f"model.layers.{layer}.", f"decoder.layers.{number}."
        shape = (model.groups, -1, model.head_dim, model.hidden)
        fused = np.concatenate([full[f"{at}self_attn.{s}_proj.weight"].reshape(shape) for s in "qkv"], 1)
        local[f"{to}self_attention.linear_qkv.weight"] = rows(fused.reshape(-1, model.hidden), tp)
        local[f"{to}self_attention.linear_qkv.layer_norm_weight"] = full[f"{at}input_layernorm.weight"]
        local[f"{to}self_attention.linear_proj.weight"] = columns(full[f"{at}self_attn.o_proj.weight"], tp)
        local[f"{to}pre_mlp_layernorm.weight"] = full[f"{at}post_attention_layernorm.weight"]
        if not model.experts:
            local[f"{to}mlp.linear_fc1.weight"] = fc1(f"{at}mlp", tp)
            local[f"{to}mlp.linear_fc2.weight"] = columns(full[f"{at}mlp.down_proj.weight"], tp)
            continue
        local[f"{to}mlp.router.weight"] = full[f"{at}mlp.gate.weight"]
        local[f"{to}mlp.shared_experts.linear_fc1.weight"] = fc1(f"{at}mlp.shared_expert", tp)
        local[f"{to}mlp.shared_experts.linear_fc2.weight"] = columns(
            full[f"{at}mlp.shared_expert.down_proj.weight"], tp
        )
        experts = np.split(np.arange(model.experts), rank.experts)[rank.expert]
        first = [fc1(f"{at}mlp.experts.{e}", etp) for e in experts]
        second = [columns(full[f"{at}mlp.experts.{e}.down_proj.weight"], etp) for e in experts]
        if stacked:
            weight1 = np.stack([matrix.T for matrix in first])
            weight2 = np.stack([matrix.T for matrix in second])
            local[f"{to}mlp.experts.weight1"] = weight1.reshape(model.hidden, -1)
            local[f"{to}mlp.experts.weight2"] = weight2.reshape(-1, model.hidden)
        else:
            for e, (one, two) in enumerate(zip(first, second, strict=True)):
                local[f"{to}mlp.experts.linear_fc1.weight{e}"] = one
                local[f"{to}mlp.experts.local_experts.{e}.linear_fc2.weight"] = two
    return local


def pasted(parts: list[LocalTensor]) -> tuple[Tensors, dict[str, int]]:
    full: Tensors = {}
    counts: Tensors = {}
    for part in parts:
        full.setdefault(part.name, np.full(part.shape, np.nan, np.float32))
        counts.setdefault(part.name, np.zeros(part.shape, np.int64))
        where = tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))
        full[part.name][where] = np.asarray(part.data)
        counts[part.name][where] += 1
    for name, count in counts.items():
        assert count.min() == count.max(), name
    return full, {name: int(count.max()) for name, count in counts.items()}


def ranks(tp: int, pp: int, ep: int) -> Iterator[tuple[MegatronRank, range]]:
    """Pipeline x tensor parallelism for the dense part; experts over all tensor ranks, split ep x etp."""
    for stage, tensor in itertools.product(range(pp), range(tp)):
        layers = range(4 // pp * stage, 4 // pp * (stage + 1))
        first = megatron_pieces.layer_offset(4, rank=stage, size=pp)
        assert first == layers.start
        yield MegatronRank(tensor, tp, tensor % ep, ep, tensor // ep, tp // ep, first), layers


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (2, 1, 1), (2, 2, 2), (4, 1, 2), (4, 4, 4), (8, 1, 4)])
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_ranks_put_together_are_the_model(model: MegatronModel, tp: int, pp: int, ep: int, stacked: bool) -> None:
    full = full_tensors(model)
    held: list[LocalTensor] = []
    for rank, layers in ranks(tp, pp, ep):
        held += megatron.local_tensors(shard(full, model, rank, layers, stacked), model, rank)
    got, counts = pasted(held)
    assert got.keys() == full.keys()
    for name, tensor in full.items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)
    replicated = {name for name in full if "norm" in name or name.endswith("mlp.gate.weight")}
    assert counts == {name: tp if name in replicated else 1 for name in full}


def test_views_are_not_copies_and_claims_are_the_callers() -> None:
    rank = MegatronRank(1, 2, copies={"replicated": (0, 1), "sharded": (1,)})
    local = shard(full_tensors(DENSE), DENSE, rank, range(4), stacked=False)
    held = megatron.local_tensors(local, DENSE, rank)
    bases = [array.base if array.base is not None else array for array in local.values()]
    assert all(any(np.shares_memory(np.asarray(part.data), base) for base in bases) for part in held)
    claimed = {part.name for part in held if part.replica_group >= 0}
    assert claimed == {part.name for part in held if "norm" in part.name}
    unclaimed = megatron.local_tensors(local, DENSE, MegatronRank(1, 2))
    assert {part.replica_group for part in unclaimed} == {-1}


def test_data_parallel_ranks_publish_and_an_engine_takes_it() -> None:
    """TP2 x PP2 x DP2, experts over all ranks of a stage: claimed copies are replicas, and are compared."""
    full = full_tensors(MOE)
    held: list[list[LocalTensor]] = []
    for replica in range(2):
        for i, (place, layers) in enumerate(ranks(2, 2, 2)):
            of_stage = [2 * (i // 2) + j for j in (0, 1, 4, 5)]
            rank = replace(place, expert=2 * replica + place.tensor, experts=4)
            rank = replace(rank, copies={"sharded": (i, i + 4), "expert": (i + 4 * replica,), "replicated": of_stage})
            local = shard(full, MOE, rank, layers, stacked=False)
            own = {name: array.copy() for name, array in local.items()} if replica else local
            held.append(megatron.local_tensors(own, MOE, rank))
    engine = ArrayEngine({name: np.zeros_like(tensor) for name, tensor in full.items()})
    with Cluster(len(held), [engine]) as cluster:

        def publish(step: int) -> None:
            for publisher, own in zip(cluster.publishers, held, strict=True):
                publisher.publish(epoch=0, step=step, tensors=own, timeout_s=TIMEOUT_S)

        publish(0)
        (report,) = cluster.refit_ok(0)
        assert report.coverage_pct == 100
        for name, tensor in full.items():
            np.testing.assert_array_equal(engine[name], tensor, err_msg=name)
        norm = next(part for part in held[5] if part.name.endswith("norm.weight"))
        np.asarray(norm.data)[0] += 1
        with pytest.raises(EqualityError, match=r"slots 'trainer-0' and 'trainer-5' claim equal content .* and differ"):
            publish(1)


def test_a_rank_of_padding_alone_holds_no_rows() -> None:
    """Ranks whose share of the padded vocabulary is padding publish nothing of it."""
    pieces = [megatron_pieces.vocabulary_pieces("e", (9, 2), padded=16, rank=rank, size=4) for rank in range(4)]
    assert [[(p.start, p.count) for p in share] for share in pieces] == [[(0, 4)], [(4, 4)], [(8, 1)], []]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder.layers.0.mlp.mystery.weight", (2, 2), "no rule gives it a global name"),
        ("mtp.layers.0.weight", (2, 2), "no rule gives it a global name"),
        ("decoder.layers.2.mlp.router.weight", (4, 6), r"global layer 4 \(first layer 2\), expected at most 3"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight2", (16, 6), "local expert 2, expected at most 1"),
        ("decoder.layers.0.self_attention.linear_proj.weight", (6, 4), r"expected at least 8 on that dim"),
        (
            "decoder.layers.0.self_attention.linear_proj.weight",
            (5, 8),
            r"expected at least 8 .* and \(6,\) on the others",
        ),
    ],
)
def test_what_cannot_be_made_global_is_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    rank = MegatronRank(0, 2, 0, 2, 0, 1, first_layer=2)
    local = {name: np.zeros(shape, np.float32)}
    with pytest.raises(TableError, match=message):
        megatron.local_tensors(local, MOE, rank)
