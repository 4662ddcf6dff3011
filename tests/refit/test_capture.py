"""Dry runs of loaders: affine copies become requests that reproduce them; the rest is materialised or refused.

The property: executing the captured requests (and the loader, for what is materialised) on real sources gives
exactly the parameters that the loader itself gives on a copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from reshard.planner import Holder, Shard, ShardPart, ShardTable, plan
from reshard.planner.errors import TableError
from reshard.planner.execute import execute
from reshard.planner.options import PlanOptions
from reshard.refit.engines.loader import LoaderEngine
from reshard.refit.engines.torch_module import TorchModuleEngine
from reshard.refit.errors import UnattributedWriteError, UnsupportedLoaderError
from reshard.refit.tensors import SourceTensor

Weights = Iterable[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    """Parameters by shape, and a loader given from outside."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], load: Callable[[Model, Weights], None]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, -7.0), requires_grad=False))
        self._load = load

    def load_weights(self, weights: Weights) -> None:
        self._load(self, weights)


def sources_of(tensors: dict[str, torch.Tensor]) -> tuple[ShardTable, dict[str, list[np.ndarray]]]:
    """One holder with every tensor, and its memory."""
    shards, blobs, at = [], [], 0
    for name, t in tensors.items():
        raw = t.contiguous().reshape(-1).view(torch.uint8).numpy()
        shape = tuple(t.shape)
        shards.append(Shard(name, str(t.dtype).removeprefix("torch."), shape, (0,) * t.dim(), shape, 0, at))
        blobs.append(raw)
        at += raw.nbytes
    memory = np.concatenate(blobs) if blobs else np.zeros(0, np.uint8)
    return ShardTable([ShardPart.from_shards(Holder("h"), shards, [at])]), {"h": [memory]}


def captured_equals_loaded(
    shapes: dict[str, tuple[int, ...]], load: Callable[[Model, Weights], None], tensors: dict[str, torch.Tensor]
) -> tuple[LoaderEngine, object]:
    """Check the property; returns the engine and what was captured."""
    live, reference = Model(shapes, load), Model(shapes, load)
    reference.load_weights(list(tensors.items()))
    engine = LoaderEngine(live)
    before = {n: p.clone() for n, p in live.named_parameters()}
    manifest = [SourceTensor(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]
    captured = engine.capture(manifest)
    assert all(torch.equal(p, before[n]) for n, p in live.named_parameters()), "capture touched the engine"
    table, memory = sources_of(tensors)
    made = plan(table, captured.reads, PlanOptions())
    buffers = {n: np.zeros(int(b), np.uint8) for n, b in zip(made.buffers.names_list, made.buffer_bytes, strict=True)}
    for name, raw in buffers.items():
        engine.read_live(name, raw)
    execute(made, memory, list(buffers.values()))
    if captured.materialised:
        staged = {
            n: tensors[n].contiguous().reshape(-1).view(torch.uint8).numpy().copy() for n in captured.materialised
        }
        engine.load_materialised(staged, {n: buffers[n] for n in captured.loader_buffers})
    assert all(torch.equal(p, before[n]) for n, p in live.named_parameters()), "loading touched the engine"
    engine.install(buffers)
    for name, p in live.named_parameters():
        assert torch.equal(p, dict(reference.named_parameters())[name]), name
    return engine, captured


def t(*shape: int) -> torch.Tensor:
    """Distinct values, exact in float32."""
    return torch.arange(float(np.prod(shape, dtype=int))).reshape(shape)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda w: w,
    "narrow": lambda w: w.narrow(0, 2, 4),
    "select": lambda w: w[3],
    "step": lambda w: w[::3],
    "step_columns": lambda w: w[:, 1::2],
    "transpose": lambda w: w.t(),
    "permute_contiguous": lambda w: w.t().contiguous(),
    "permute_contiguous_view": lambda w: w.t().contiguous().view(-1),
    "merge": lambda w: w.reshape(-1),
    "merge_slice": lambda w: w.reshape(-1)[5:29],
    "split": lambda w: w.unflatten(0, (2, 4)),
    "split_permute": lambda w: w.unflatten(0, (2, 4)).permute(1, 0, 2),
    "split_permute_merge": lambda w: w.unflatten(0, (2, 4)).permute(1, 0, 2).reshape(8, 6),
    "chunk": lambda w: w.chunk(2, dim=0)[1],
    "split_list": lambda w: w.split([2, 5, 1])[1],
    "unbind": lambda w: w.unbind(1)[2],
    "expand": lambda w: w[:1].expand(5, 6),
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(0, 3, 2),
    "squeeze": lambda w: w[:, None, :].squeeze(1),
    "cat": lambda w: torch.cat([w[4:], w[:4]]),
    "cat_columns": lambda w: torch.cat([w[:, 3:], w[:, :3]], dim=1),
    "stack": lambda w: torch.stack([w[0::2], w[1::2]], dim=1),
    "clone_of_step": lambda w: w[::2].clone()[1:],
    "as_strided": lambda w: w.as_strided((3, 5), (7, 2), 1),
    "movedim": lambda w: w.unflatten(1, (3, 2)).movedim(2, 0),
    "to_same": lambda w: w.to("cpu").to(torch.float32),
    "detach": lambda w: w.detach(),
    "flatten_of_contiguous_permute": lambda w: w.unflatten(0, (4, 2)).permute(1, 0, 2).contiguous().flatten()[7:40],
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_is_captured_as_requests(name: str) -> None:
    view = VIEWS[name]
    source = t(8, 6)
    shape = tuple(view(source).shape)

    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            model.p.data.copy_(view(w))

    _, captured = captured_equals_loaded({"p": shape}, load, {"w": source})
    assert captured.materialised == ()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["narrow", "transpose", "step", "split_permute_merge", "cat"])
def test_strided_destinations(name: str) -> None:
    view = VIEWS[name]
    shape = tuple(view(t(8, 6)).shape)

    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            target = model.p.data[:, ::2][: shape[1], 1 : 1 + shape[0]].t()
            target.copy_(view(w))

    captured_equals_loaded({"p": (12, 30)}, load, {"w": t(8, 6)})


def test_a_fill_and_then_a_partial_copy() -> None:
    """C1: rows 0 to 9 from the source, 10 to 15 filled; 16 elements written, once each."""

    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            model.p.data.fill_(0)
            model.p.data[:10].copy_(w)

    _, captured = captured_equals_loaded({"p": (16,)}, load, {"w": t(10) + 1})
    table, _ = sources_of({"w": t(10)})
    certificate = plan(table, captured.reads, PlanOptions()).certificate  # type: ignore[attr-defined]
    assert certificate.written_bytes == 40
    assert certificate.filled_bytes == 24


def test_the_later_of_two_overlapping_copies_wins() -> None:
    """C2: ten elements are read, not twelve."""

    def load(model: Model, weights: Weights) -> None:
        for name, w in weights:
            (model.p.data[0:6] if name == "a" else model.p.data[4:10]).copy_(w)

    _, captured = captured_equals_loaded({"p": (10,)}, load, {"a": t(6), "b": t(6) + 100})
    table, _ = sources_of({"a": t(6), "b": t(6)})
    assert plan(table, captured.reads, PlanOptions()).economics.useful_bytes == 40  # type: ignore[attr-defined]


def test_reading_a_parameter_back_materialises_it() -> None:
    """C3."""

    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            model.p.data.copy_(w)
            model.p.data.copy_(-torch.exp(model.p.data))

    _, captured = captured_equals_loaded({"p": (5,)}, load, {"w": t(5)})
    assert captured.materialised == ("w",)  # type: ignore[attr-defined]
    assert captured.loader_bytes == (20,)  # type: ignore[attr-defined]


def test_the_last_of_two_sources_in_one_small_parameter() -> None:
    """C4."""

    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            model.p.data.copy_(w)

    captured_equals_loaded({"p": (2,)}, load, {"a.weight_shape": t(2), "b.weight_shape": t(2) + 5})


def test_branching_on_a_value_is_refused_naming_the_source() -> None:
    """C6."""
    for decide in (
        lambda w: bool(w.max() > 0),
        lambda w: float(w[0]) > 0,
        lambda w: w.sum().item() > 0,
        lambda w: torch.equal(w, w),
        lambda w: w.nonzero().numel() > 0,
        lambda w: w.tolist(),
        lambda w: w.numpy(),
    ):

        def load(model: Model, weights: Weights, decide: Callable[[torch.Tensor], object] = decide) -> None:
            for _, w in weights:
                if decide(w):
                    model.p.data.copy_(w)

        engine = LoaderEngine(Model({"p": (5,)}, load))
        with pytest.raises(UnsupportedLoaderError, match=r"'layers\.0\.w'"):
            engine.capture([SourceTensor("layers.0.w", "float32", (5,))])


def copy_into(name: str, *more: Callable[[Model], object]) -> Callable[[Model, torch.Tensor], None]:
    """Copy a source into a parameter, and then do more."""

    def do(model: Model, w: torch.Tensor) -> None:
        getattr(model, name).data.copy_(w)
        for each in more:
            each(model)

    return do


READ_BACK: dict[str, Callable[[Model, torch.Tensor], None]] = {
    "copied": copy_into("p", lambda m: m.q.data.copy_(m.p.data)),
    "computed": copy_into("p", lambda m: m.q.data.copy_(m.p.data * 2)),
    "in_part": copy_into("p", lambda m: m.q.data[:2].copy_(m.p.data[2:]), lambda m: m.q.data[2:].fill_(7)),
    "transposed": copy_into("p", lambda m: m.q.data.copy_(m.p.data.clone().t())),
    "through_scratch": copy_into("p", lambda m: m.q.data.copy_(torch.zeros(4, 4).copy_(m.p.data))),
    "in_a_chain": copy_into("p", lambda m: m.q.data.copy_(m.p.data), lambda m: m.r.data.copy_(m.q.data)),
    "and_overwritten": copy_into("p", lambda m: m.q.data.copy_(m.p.data), lambda m: m.p.data.fill_(1)),
    "and_of_what_is_not_loaded": copy_into("p", lambda m: m.q.data.copy_(m.r.data + m.p.data)),
}


@pytest.mark.parametrize("name", READ_BACK)
@pytest.mark.parametrize("after", [True, False])
def test_a_parameter_made_of_another_one_is_made_of_the_new_one(name: str, after: bool) -> None:
    """Not of the weights that serve while the loader runs, which may be another version's."""

    def load(model: Model, weights: Weights) -> None:
        for source, w in weights:
            if source == "v":
                model.s.data.copy_(w)
            elif not after:
                READ_BACK[name](model, w)
            else:
                kept = w
        if after:
            READ_BACK[name](model, kept)

    shapes = dict.fromkeys("pqrs", (4, 4))
    _, captured = captured_equals_loaded(shapes, load, {"w": t(4, 4), "v": t(4, 4) + 50})
    assert captured.materialised == ("w",)  # type: ignore[attr-defined]


@pytest.mark.parametrize("when", ["at another source", "before all", "after all"])
def test_what_is_done_in_place_at_any_time_is_done(when: str) -> None:
    def load(model: Model, weights: Weights) -> None:
        if when == "before all":
            model.p.data.fill_(2)
        for source, w in weights:
            if source == "w":
                model.p.data.add_(w)
            elif when == "at another source":
                model.p.data.mul_(3)
        if when == "after all":
            model.p.data.mul_(3)

    captured_equals_loaded({"p": (5,)}, load, {"w": t(5), "v": t(5)})


def test_a_loader_that_does_otherwise_with_fewer_sources_is_refused() -> None:
    """It has collected them all, so that nothing tells at which one it changes the parameter."""

    def load(model: Model, weights: Weights) -> None:
        for source, w in list(weights):
            if source == "w":
                model.p.data.copy_(w.exp())
            else:
                model.p.data.mul_(3)

    engine = LoaderEngine(Model({"p": (5,)}, load))
    with pytest.raises(
        UnsupportedLoaderError, match="computes 'p', and does otherwise where it is handed the 1 sources"
    ):
        engine.capture([SourceTensor(n, "float32", (5,)) for n in ("w", "v")])

    def needs_both(model: Model, weights: Weights) -> None:
        given = dict(weights)
        model.p.data.copy_(given["w"].exp())
        model.q.data.copy_(given["v"])

    engine = LoaderEngine(Model({"p": (5,), "q": (5,)}, needs_both))
    with pytest.raises(UnsupportedLoaderError, match=r"does not run on the 1 sources .* KeyError: 'v'"):
        engine.capture([SourceTensor(n, "float32", (5,)) for n in ("w", "v")])


COMPUTED: dict[str, Callable[[Model, torch.Tensor], None]] = {
    "exp": lambda m, w: m.p.data.copy_(w.exp()),
    "add": lambda m, w: m.p.data.copy_(w + 1),
    "add_in_place": lambda m, w: (m.p.data.copy_(w), m.p.data.add_(1)),
    "mul_source_in_place": lambda m, w: m.p.data.copy_(w.clone().mul_(2)),
    "cast": lambda m, w: m.p.data.copy_(w.to(torch.bfloat16)),
    "index": lambda m, w: m.p.data.copy_(w[torch.tensor([4, 3, 2, 1, 0])]),
    "scratch": lambda m, w: m.p.data.copy_(torch.empty(5).copy_(w)),
    "padded_scratch": lambda m, w: m.p.data.copy_(torch.nn.functional.pad(w[:3], (0, 2))),
    "index_put": lambda m, w: m.p.data.__setitem__(torch.tensor([4, 3, 2, 1, 0]), w),
    "where": lambda m, w: m.p.data.copy_(torch.where(w > 2, w, 0.0)),
    "sort": lambda m, w: m.p.data.copy_(w.flip(0).sort().values),
    "values_of_bits": lambda m, w: m.p.data.copy_(w.view(torch.int32)),
    "bits": lambda m, w: m.p.data.view(torch.int32).copy_(w.view(torch.int32)),
    "into_bits": lambda m, w: m.p.data.view(torch.int32).copy_(w),
    "out": lambda m, w: torch.add(w, 1, out=m.p.data),
    "zeros_like": lambda m, w: m.p.data.copy_(torch.zeros_like(w).add_(w)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_loaders_that_compute_run_on_real_values(name: str) -> None:
    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            COMPUTED[name](model, w)

    _, captured = captured_equals_loaded({"p": (5,)}, load, {"w": t(5)})
    assert captured.materialised == ("w",)  # type: ignore[attr-defined]


def test_computing_on_one_source_leaves_the_others_as_requests() -> None:
    def load(model: Model, weights: Weights) -> None:
        for name, w in weights:
            if name == "a":
                model.p.data[:4].copy_(w)
            elif name == "b":
                model.p.data[4:].copy_(w * 2)
            else:
                model.q.data.copy_(w)

    _, captured = captured_equals_loaded({"p": (8,), "q": (3,)}, load, {"a": t(4), "b": t(4), "c": t(3)})
    assert captured.materialised == ("a", "b")  # type: ignore[attr-defined]
    assert captured.loader_buffers == ("p",)  # type: ignore[attr-defined]


def test_scalars_by_item() -> None:
    """vLLM's default weight loader fills one-element parameters with ``loaded_weight.item()``."""

    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            model.p.data.fill_(w.item())

    _, captured = captured_equals_loaded({"p": (1,)}, load, {"w": torch.tensor([2.5])})
    assert captured.materialised == ()  # type: ignore[attr-defined]


def test_constants_of_every_kind() -> None:
    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            model.p.data[0:2].copy_(w)
            model.p.data[2:4] = 3
            model.p.data[4:6].zero_()
            model.p.data[6:8].copy_(torch.full((2,), 1.5))
            model.p.data[8:10] = torch.tensor(2.0)

    _, captured = captured_equals_loaded({"p": (10,)}, load, {"w": t(2)})
    assert captured.materialised == ()  # type: ignore[attr-defined]


def test_a_write_into_unknown_memory_is_named_and_can_be_allowed() -> None:
    def load(model: Model, weights: Weights) -> None:
        for name, w in weights:
            if name == "extra":
                model.__dict__["hidden"] = torch.empty(3)
                model.__dict__["hidden"].copy_(w)
            else:
                model.p.data.copy_(w)

    model = Model({"p": (3,)}, load)
    manifest = [SourceTensor("w", "float32", (3,)), SourceTensor("extra", "float32", (3,))]
    with pytest.raises(UnattributedWriteError, match=r"source 'extra'.*no view of a known parameter"):
        LoaderEngine(model).capture(manifest)
    captured = LoaderEngine(model, allow_unattributed=["ext*"]).capture(manifest)
    assert captured.consumed == frozenset(("w",))


def test_a_loader_that_replaces_parameters_is_refused() -> None:
    def load(model: Model, weights: Weights) -> None:
        for _ in weights:
            model.p = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    with pytest.raises(UnsupportedLoaderError, match="replaced parameters"):
        LoaderEngine(Model({"p": (3,)}, load)).capture([SourceTensor("w", "float32", (3,))])


def test_tied_parameters_are_one_destination() -> None:
    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            model.p.data.copy_(w)

    model = Model({"p": (3,)}, load)
    model.head = model.p
    engine = LoaderEngine(model)
    assert [p.name for p in engine.parameters()] == ["p"]
    captured = engine.capture([SourceTensor("w", "float32", (3,))])
    raw = np.arange(3, dtype=np.float32).view(np.uint8)
    engine.install({"p": raw})
    assert model.head.tolist() == model.p.tolist() == [0, 1, 2]
    assert captured.reads.buffers.names_list == ["p"]


def test_parameters_that_are_views_of_one_storage_keep_apart() -> None:
    def load(model: Model, weights: Weights) -> None:
        for name, w in weights:
            getattr(model, name).data.copy_(w)

    flat = torch.zeros(10)
    model = Model({}, load)
    model.a = torch.nn.Parameter(flat[:4].view(2, 2), requires_grad=False)
    model.b = torch.nn.Parameter(flat[4:], requires_grad=False)
    captured = LoaderEngine(model).capture([SourceTensor("a", "float32", (2, 2)), SourceTensor("b", "float32", (6,))])
    assert captured.reads.buffers.names_list == ["a", "b"]
    assert captured.reads.dst_offset.tolist() == [0, 0]


def test_transposed_parameters_install_in_their_own_strides() -> None:
    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            model.p.data.copy_(w)

    live = Model({}, load)
    live.p = torch.nn.Parameter(torch.zeros(6, 4).t(), requires_grad=False)
    engine = LoaderEngine(live)
    captured = engine.capture([SourceTensor("w", "float32", (4, 6))])
    table, memory = sources_of({"w": t(4, 6)})
    made = plan(table, captured.reads, PlanOptions())
    raw = np.zeros(96, np.uint8)
    execute(made, memory, [raw])
    engine.install({"p": raw})
    assert live.p.stride() == (1, 4)
    assert torch.equal(live.p, t(4, 6))


def test_a_plain_module_takes_no_shape_that_only_broadcasts() -> None:
    with pytest.raises(TableError, match=r"'weight' has shape \(1, 4\), parameter 'weight' has \(3, 4\)"):
        TorchModuleEngine(torch.nn.Linear(4, 3)).capture([SourceTensor("weight", "float32", (1, 4))])


def test_loaders_in_a_list_see_all_tensors() -> None:
    """Loaders may sort or collect before they copy."""

    def load(model: Model, weights: Weights) -> None:
        for name, w in sorted(weights, key=lambda pair: pair[0], reverse=True):
            model.p.data[int(name)].copy_(w)

    captured_equals_loaded({"p": (3, 2)}, load, {str(i): t(2) + i for i in range(3)})
