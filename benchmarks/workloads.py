"""Planner workloads made from public model configurations (numbers only): who holds what, and what one rank reads.

1. `specs(model)` lists a checkpoint's tensors with the role that decides how each is cut.
2. `fsdp`, `hsdp` and `megatron` say which boxes each source rank holds, as columns per holder.
3. `engine_rank` says what one inference rank reads: tensor parallel everywhere, experts tensor or expert parallel,
   into the fused parameters of a vLLM-like engine.
4. `shard_table` and `read_table` turn both into the planner's tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reshard.planner import Buffer, GeometryDict, Holder, ReadRequest, ReadTable, ShardPart, ShardTable, TensorDict

ITEM_BYTES = 2
ALIGN_BYTES = 512
DTYPE = "bfloat16"

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """The numbers of a public configuration."""

    layers: int
    hidden: int
    vocab: int
    inter: int
    heads: int
    kv: int = 0
    head_dim: int = 0
    qk_norm: bool = False
    experts: int = 0
    moe_inter: int = 0
    dense_first: int = 0
    shared: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    nope: int = 0
    rope: int = 0
    v_dim: int = 0


MODELS = {
    "qwen3-30b-a3b": Model(
        48, 2048, 151936, 6144, 32, kv=4, head_dim=128, qk_norm=True, experts=128, moe_inter=768
    ),
    "llama-3.1-70b": Model(80, 8192, 128256, 28672, 64, kv=8, head_dim=128),
    "deepseek-v3": Model(
        61, 7168, 129280, 18432, 128, experts=256, moe_inter=2048, dense_first=3, shared=1, q_lora=1536,
        kv_lora=512, nope=128, rope=64, v_dim=128,
    ),
    "kimi-k2": Model(
        61, 7168, 163840, 18432, 64, experts=384, moe_inter=2048, dense_first=1, shared=1, q_lora=1536,
        kv_lora=512, nope=128, rope=64, v_dim=128,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One tensor of a checkpoint. `layer` is -1 before the first and 10**6 behind the last; `expert` -1 for none."""

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int
    expert: int = -1


def specs(model: str) -> list[Spec]:
    """Every tensor of a model's checkpoint, in file order."""
    m = MODELS[model]
    found = [Spec("model.embed_tokens.weight", (m.vocab, m.hidden), "vocab", -1)]
    for layer in range(m.layers):
        found += _layer_specs(m, layer)
    found.append(Spec("model.norm.weight", (m.hidden,), "whole", 10**6))
    found.append(Spec("lm_head.weight", (m.vocab, m.hidden), "vocab", 10**6))
    return found


def _layer_specs(m: Model, layer: int) -> list[Spec]:
    prefix = f"model.layers.{layer}."
    rows: list[tuple[str, tuple[int, ...], str]] = [("input_layernorm", (m.hidden,), "whole")]
    if m.q_lora:
        rows += [
            ("self_attn.q_a_proj", (m.q_lora, m.hidden), "fused_a"),
            ("self_attn.q_a_layernorm", (m.q_lora,), "whole"),
            ("self_attn.q_b_proj", (m.heads * (m.nope + m.rope), m.q_lora), "column"),
            ("self_attn.kv_a_proj_with_mqa", (m.kv_lora + m.rope, m.hidden), "fused_a"),
            ("self_attn.kv_a_layernorm", (m.kv_lora,), "whole"),
            ("self_attn.kv_b_proj", (m.heads * (m.nope + m.v_dim), m.kv_lora), "column"),
            ("self_attn.o_proj", (m.hidden, m.heads * m.v_dim), "row"),
        ]
    else:
        rows += [
            ("self_attn.q_proj", (m.heads * m.head_dim, m.hidden), "q"),
            ("self_attn.k_proj", (m.kv * m.head_dim, m.hidden), "k"),
            ("self_attn.v_proj", (m.kv * m.head_dim, m.hidden), "v"),
            ("self_attn.o_proj", (m.hidden, m.heads * m.head_dim), "row"),
        ]
        if m.qk_norm:
            rows += [("self_attn.q_norm", (m.head_dim,), "whole"), ("self_attn.k_norm", (m.head_dim,), "whole")]
    rows.append(("post_attention_layernorm", (m.hidden,), "whole"))
    if not (m.experts and layer >= m.dense_first):
        rows += _mlp("mlp.", m.inter, m.hidden)
        return [Spec(f"{prefix}{name}.weight", shape, role, layer) for name, shape, role in rows]
    rows.append(("mlp.gate", (m.experts, m.hidden), "whole"))
    found = [Spec(f"{prefix}{name}.weight", shape, role, layer) for name, shape, role in rows]
    if m.q_lora:
        bias = f"{prefix}mlp.gate.e_score_correction_bias"
        found.append(Spec(bias, (m.experts,), "whole", layer))
    for expert in range(m.experts):
        for name, shape, role in _mlp(f"mlp.experts.{expert}.", m.moe_inter, m.hidden):
            found.append(Spec(f"{prefix}{name}.weight", shape, f"expert_{role}", layer, expert))
    if m.shared:
        for name, shape, role in _mlp("mlp.shared_experts.", m.moe_inter * m.shared, m.hidden):
            found.append(Spec(f"{prefix}{name}.weight", shape, role, layer))
    return found


def _mlp(prefix: str, inter: int, hidden: int) -> list[tuple[str, tuple[int, ...], str]]:
    return [
        (f"{prefix}gate_proj", (inter, hidden), "gate"),
        (f"{prefix}up_proj", (inter, hidden), "up"),
        (f"{prefix}down_proj", (hidden, inter), "row"),
    ]


@dataclass(eq=False)
class Holdings:
    """What one source rank holds: per row a tensor, a box (by index into `boxes`) and a replica group."""

    name: str
    host: str
    tensor: np.ndarray
    box: np.ndarray
    group: np.ndarray
    boxes: list[Box]


@dataclass(eq=False)
class Sources:
    """All source ranks over one list of tensors."""

    specs: list[Spec]
    holders: list[Holdings] = field(default_factory=list)

    @property
    def n_shards(self) -> int:
        return sum(len(holder.tensor) for holder in self.holders)


def fsdp(tensors: Sequence[Spec], n_ranks: int) -> Sources:
    """Fully sharded on dim 0 by torch's rule: chunks of ceil(rows / ranks); trailing ranks may hold nothing."""
    return hsdp(tensors, 1, n_ranks)


def hsdp(tensors: Sequence[Spec], n_replicas: int, n_ranks: int) -> Sources:
    """`n_replicas` copies of a model, each fully sharded over `n_ranks`; copies are claimed replicas."""
    shapes = sorted({spec.shape for spec in tensors})
    number = {shape: index for index, shape in enumerate(shapes)}
    shape_of = np.array([number[spec.shape] for spec in tensors])
    sources = Sources(list(tensors))
    for rank in range(n_replicas * n_ranks):
        shard = rank % n_ranks
        boxes, usable = [], np.zeros(len(shapes), bool)
        for index, shape in enumerate(shapes):
            chunk = -(-shape[0] // n_ranks)
            start, stop = min(shard * chunk, shape[0]), min((shard + 1) * chunk, shape[0])
            usable[index] = stop > start
            boxes.append(((start, *(0 for _ in shape[1:])), (stop, *shape[1:])))
        rows = np.flatnonzero(usable[shape_of])
        group = np.full(len(rows), 0 if n_replicas > 1 else -1)
        sources.holders.append(_held(rank, rows, shape_of[rows], group, boxes))
    return sources


def _held(rank: int, tensor: np.ndarray, box: np.ndarray, group: np.ndarray, boxes: list[Box]) -> Holdings:
    return Holdings(f"trainer-{rank:04d}", f"node-{rank // 8:03d}", tensor, box, group, boxes)


def megatron(model: str, tensors: Sequence[Spec], *, tp: int, pp: int, ep: int, dp: int = 1) -> Sources:
    """Megatron TP x PP x EP x DP with one alias a q/k/v band; rank = (dp * PP + pp) * TP + tp.

    Expert e of a stage lives on expert rank e // (experts / EP), counted over the stage's (dp, tp) ranks.
    """
    m = MODELS[model]
    per_stage = -(-m.layers // pp)
    rows: list[list[tuple[int, Box, int]]] = [[] for _ in range(tp * pp * dp)]
    for index, spec in enumerate(tensors):
        stage = 0 if spec.layer < 0 else min(spec.layer // per_stage, pp - 1)
        if spec.expert >= 0:
            owner = spec.expert // (m.experts // ep)
            whole = ((0, 0), spec.shape)
            for flat in range(owner, tp * dp, ep):
                replica, lane = divmod(flat, tp)
                rows[(replica * pp + stage) * tp + lane].append((index, whole, 1))
            continue
        for lane in range(tp):
            for box in _megatron_boxes(m, spec, lane, tp):
                for replica in range(dp):
                    rows[(replica * pp + stage) * tp + lane].append((index, box, 1))
    sources = Sources(list(tensors))
    for rank, held in enumerate(rows):
        boxes = list(dict.fromkeys(box for _, box, _ in held))
        number = {box: position for position, box in enumerate(boxes)}
        columns = np.array([(tensor, number[box], group) for tensor, box, group in held], np.int64).reshape(-1, 3)
        sources.holders.append(_held(rank, columns[:, 0], columns[:, 1], columns[:, 2], boxes))
    return sources


def _megatron_boxes(m: Model, spec: Spec, lane: int, tp: int) -> list[Box]:
    shape = spec.shape
    if spec.role in ("whole", "fused_a"):
        return [((0,) * len(shape), shape)]
    if spec.role == "row":
        width = shape[1] // tp
        return [((0, lane * width), (shape[0], (lane + 1) * width))]
    if spec.role in ("q", "k", "v"):
        return _qkv_bands(m, spec, lane, tp)
    width = -(-shape[0] // tp)
    start, stop = min(lane * width, shape[0]), min((lane + 1) * width, shape[0])
    return [((start, 0), (stop, shape[1]))] if stop > start else []


def _qkv_bands(m: Model, spec: Spec, lane: int, tp: int) -> list[Box]:
    """Rows of q, k or v that a rank holds out of Megatron's per-group [q .. q k v] interleaving."""
    per_group = m.heads // m.kv
    group_rows = (per_group + 2) * m.head_dim
    rows = m.kv * group_rows // tp
    low, high = lane * rows, (lane + 1) * rows
    found: list[Box] = []
    for group in range(m.kv):
        first = group * group_rows
        begin, length, target = {
            "q": (first, per_group * m.head_dim, group * per_group * m.head_dim),
            "k": (first + per_group * m.head_dim, m.head_dim, group * m.head_dim),
            "v": (first + (per_group + 1) * m.head_dim, m.head_dim, group * m.head_dim),
        }[spec.role]
        start, stop = max(low, begin), min(high, begin + length)
        if start < stop:
            found.append(((target + start - begin, 0), (target + stop - begin, spec.shape[1])))
    return found


@dataclass(eq=False)
class Reads:
    """What one inference rank reads: buffers, and per copy a source box and where it lands (elements)."""

    specs: list[Spec]
    buffers: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]]] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)

    def buffer(self, name: str, shape: tuple[int, ...]) -> int:
        if name not in self._index:
            self._index[name] = len(self.buffers)
            self.buffers.append((name, shape))
        return self._index[name]

    def add(
        self, spec: int, start: tuple[int, ...], count: tuple[int, ...], buffer: int, offset: int, row_elems: int
    ) -> None:
        """Read a box into rows of `row_elems` elements of a buffer, from element `offset` on."""
        stride = (1,) if len(count) == 1 else (row_elems, 1)
        self.rows.append((spec, start, count, buffer, offset, stride))

    @property
    def useful_bytes(self) -> int:
        return sum(math.prod(row[2]) for row in self.rows) * ITEM_BYTES


def engine_rank(model: str, tensors: Sequence[Spec], *, tp: int, rank: int, ep: int = 1) -> Reads:
    """One rank of an engine: attention and dense layers TP over `tp`, experts TP (`ep` = 1) or EP over `ep`."""
    m = MODELS[model]
    reads = Reads(list(tensors))
    lane = rank % tp
    for index, spec in enumerate(tensors):
        parent = spec.name.rsplit(".", 2)[0]
        if spec.expert >= 0:
            _read_expert(m, reads, index, spec, tp, lane, ep, rank)
        elif spec.role == "whole":
            buffer = reads.buffer(spec.name, spec.shape)
            reads.add(index, (0,) * len(spec.shape), spec.shape, buffer, 0, spec.shape[-1])
        elif spec.role == "fused_a":
            rows = m.q_lora + m.kv_lora + m.rope
            buffer = reads.buffer(f"{parent}.fused_qkv_a_proj.weight", (rows, m.hidden))
            first = 0 if spec.name.endswith("q_a_proj.weight") else m.q_lora
            reads.add(index, (0, 0), spec.shape, buffer, first * m.hidden, m.hidden)
        elif spec.role == "row":
            width = spec.shape[1] // tp
            buffer = reads.buffer(spec.name, (spec.shape[0], width))
            reads.add(index, (0, lane * width), (spec.shape[0], width), buffer, 0, width)
        elif spec.role in ("q", "k", "v"):
            _read_qkv(m, reads, index, spec, tp, lane, parent)
        elif spec.role in ("gate", "up"):
            width, columns = spec.shape[0] // tp, spec.shape[1]
            buffer = reads.buffer(f"{parent}.gate_up_proj.weight", (2 * width, columns))
            offset = 0 if spec.role == "gate" else width * columns
            reads.add(index, (lane * width, 0), (width, columns), buffer, offset, columns)
        else:
            width, columns = -(-spec.shape[0] // tp), spec.shape[1]
            start, stop = min(lane * width, spec.shape[0]), min((lane + 1) * width, spec.shape[0])
            buffer = reads.buffer(spec.name, (width, columns))
            reads.add(index, (start, 0), (stop - start, columns), buffer, 0, columns)
    return reads


def _read_qkv(m: Model, reads: Reads, index: int, spec: Spec, tp: int, lane: int, parent: str) -> None:
    q_rows, kv_rows = m.heads // tp * m.head_dim, max(1, m.kv // tp) * m.head_dim
    buffer = reads.buffer(f"{parent}.qkv_proj.weight", (q_rows + 2 * kv_rows, m.hidden))
    if spec.role == "q":
        start, rows, first = lane * q_rows, q_rows, 0
    else:
        start, rows = lane // max(1, tp // m.kv) * kv_rows, kv_rows
        first = q_rows + (kv_rows if spec.role == "v" else 0)
    reads.add(index, (start, 0), (rows, m.hidden), buffer, first * m.hidden, m.hidden)


def _read_expert(m: Model, reads: Reads, index: int, spec: Spec, tp: int, lane: int, ep: int, rank: int) -> None:
    n_local = m.experts // ep
    local = spec.expert - rank % ep * n_local
    if not 0 <= local < n_local:
        return
    width = m.moe_inter // tp if ep == 1 else m.moe_inter
    first = lane * width if ep == 1 else 0
    experts = spec.name.rsplit(".", 3)[0]
    if spec.role == "expert_row":
        buffer = reads.buffer(f"{experts}.w2_weight", (n_local, m.hidden, width))
        reads.add(index, (0, first), (m.hidden, width), buffer, local * m.hidden * width, width)
        return
    buffer = reads.buffer(f"{experts}.w13_weight", (n_local, 2 * width, m.hidden))
    offset = (2 * local + (spec.role == "expert_up")) * width * m.hidden
    reads.add(index, (first, 0), (width, m.hidden), buffer, offset, m.hidden)


def shard_table(sources: Sources) -> ShardTable:
    """The planner's table, by parts, as a receiver has it after decoding: one tensor dictionary per distinct set."""
    names = [spec.name for spec in sources.specs]
    shapes = [spec.shape for spec in sources.specs]
    whole = TensorDict.build(names, [DTYPE] * len(names), shapes)
    dictionaries: dict[bytes, tuple[TensorDict, np.ndarray]] = {}
    parts = []
    for held in sources.holders:
        geometry = GeometryDict.build(held.boxes)
        nbytes = np.array([math.prod(b - a for a, b in zip(*box, strict=True)) for box in held.boxes]) * ITEM_BYTES
        padded = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        sizes = padded[held.box] if len(held.box) else np.zeros(0, np.int64)
        offset = np.cumsum(sizes) - sizes
        used = np.unique(held.tensor)
        if len(used) == len(names):
            dictionary, tensor = whole, held.tensor
        else:
            known = dictionaries.get(used.tobytes())
            if known is None:
                known = whole.take(used), np.searchsorted(used, np.arange(len(names)))
                dictionaries[used.tobytes()] = known
            dictionary, tensor = known[0], known[1][held.tensor]
        zeros = np.zeros(len(offset), np.int64)
        parts.append(
            ShardPart(
                Holder(held.name, host=held.host),
                dictionary,
                geometry,
                tensor.astype(np.int64),
                held.box.astype(np.int64),
                zeros,
                offset,
                held.group.astype(np.int64),
                np.array([max(1, int(sizes.sum()))], np.int64),
            )
        )
    return ShardTable(parts)


def read_table(reads: Reads) -> ReadTable:
    """The planner's read table."""
    buffers = [Buffer(name, shape, DTYPE) for name, shape in reads.buffers]
    requests = []
    for spec, start, count, buffer, offset, stride in reads.rows:
        tensor = reads.specs[spec]
        requests.append(
            ReadRequest(tensor.name, tensor.shape, DTYPE, start, (1,) * len(start), count, buffer, offset, stride)
        )
    return ReadTable.build(buffers, requests)
