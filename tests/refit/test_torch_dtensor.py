"""The boxes that the DTensor adapter reads off placements: as arithmetic, and against `full_tensor()` on gloo ranks."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.planner.errors import TableError
from reshard.refit.adapters.placements import HeldBox, Split, held_boxes, held_runs
from reshard.refit.demo.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[2]
DTENSOR_MODULES = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo")


def over(ranks: int) -> list[list[tuple[int, int]]]:
    return [held_runs(6, [Split(ranks, rank)]) for rank in range(ranks)]


def test_g1_six_elements_over_four_ranks() -> None:
    assert over(4) == [[(0, 2)], [(2, 4)], [(4, 6)], []]


def test_g2_and_g4_uneven_rows() -> None:
    assert [held_runs(5, [Split(4, r)]) for r in range(4)] == [[(0, 2)], [(2, 4)], [(4, 5)], []]
    assert [held_runs(7, [Split(3, r)]) for r in range(3)] == [[(0, 3)], [(3, 6)], [(6, 7)]]


def test_g3_two_mesh_dims_split_two_rows() -> None:
    held = {(i, j): held_boxes((2, 3), [[Split(2, i), Split(4, j)], []]) for i in range(2) for j in range(4)}
    assert held[0, 0] == [HeldBox((0, 0), (1, 3), (0, 0))]
    assert held[1, 0] == [HeldBox((1, 0), (2, 3), (0, 0))]
    assert [at for at, boxes in held.items() if not boxes] == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param(4, {(0, 0): [(0, 1)], (1, 0): [(1, 2)], (0, 1): [(2, 3)], (1, 1): [(3, 4)]}, id="G5"),
        pytest.param(6, {(0, 0): [(0, 2)], (1, 0): [(2, 3)], (0, 1): [(3, 5)], (1, 1): [(5, 6)]}, id="G6"),
    ],
)
def test_fsdp_over_tensor_parallelism(size: int, expected: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    assert {at: held_runs(size, [Split(2, at[0], factor=2), Split(2, at[1])]) for at in expected} == expected


def test_g8_vocabulary_over_256_ranks() -> None:
    sizes = [sum(b - a for a, b in held_runs(151936, [Split(256, rank)])) for rank in range(256)]
    assert sizes == [594] * 255 + [466]


def test_a_strided_split_alone_leaves_several_boxes() -> None:
    boxes = held_boxes((8, 2), [[Split(2, 1, factor=2)], []])
    assert boxes == [HeldBox((2, 0), (4, 2), (0, 0)), HeldBox((6, 0), (8, 2), (2, 0))]


def test_a_rank_outside_its_mesh_dim_is_refused() -> None:
    with pytest.raises(TableError, match="rank 4 of 4"):
        Split(4, 4)


@st.composite
def meshes(draw: st.DrawFn) -> list[tuple[int, int]]:
    return draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3))


@given(size=st.integers(0, 60), mesh=meshes())
def test_the_ranks_of_a_mesh_hold_each_index_once(size: int, mesh: list[tuple[int, int]]) -> None:
    """Whatever the splits, the ranks' runs partition the dim, and equal slicing an array the slow way."""
    held: list[int] = []
    for coordinate in np.ndindex(*(ranks for ranks, _ in mesh)):
        splits = [Split(ranks, at, factor) for (ranks, factor), at in zip(mesh, coordinate, strict=True)]
        expected = np.arange(size)
        for split in splits:
            pieces = [chunk(piece, split.ranks)[split.rank] for piece in chunk(expected, split.factor)]
            expected = np.concatenate(pieces)
        got = [index for start, stop in held_runs(size, splits) for index in range(start, stop)]
        assert got == expected.tolist()
        held += got
    assert sorted(held) == list(range(size))


def chunk(array: np.ndarray, n: int) -> list[np.ndarray]:
    """torch.chunk, with the empty pieces that DTensor adds."""
    step = -(-len(array) // n)
    return [array[i * step : (i + 1) * step] for i in range(n)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_leave_names_as_they_are() -> None:
    torch = pytest.importorskip("torch", reason="the DTensor adapter needs torch")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from reshard.refit.adapters.torch_dtensor import named_tensors

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    model = Model()
    plain = {name: tensor.data_ptr() for name, tensor in named_tensors(model).items()}
    model.layers[0] = torch.compile(checkpoint_wrapper(model.layers[0]))
    assert any("_orig_mod._checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert {name: tensor.data_ptr() for name, tensor in named_tensors(model).items()} == plain
    assert {name: tensor.data_ptr() for name, tensor in named_tensors(torch.compile(model)).items()} == plain


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore::FutureWarning")
def test_shards_without_boxes_are_refused(tmp_path: Path) -> None:
    """FSDP1 flattens parameters; DeepSpeed ZeRO-3 leaves empty ones and keeps the true shape beside them."""
    torch = pytest.importorskip("torch", reason="the DTensor adapter needs torch")
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    from reshard.refit.adapters.torch_dtensor import local_tensors

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wrapped = FullyShardedDataParallel(torch.nn.Linear(3, 2), device_id=torch.device("cpu"), use_orig_params=True)
        with pytest.raises(TableError, match=r"module '1' is under FullyShardedDataParallel \(FSDP1\)"):
            local_tensors(torch.nn.Sequential(torch.nn.Linear(2, 3), wrapped))
    finally:
        dist.destroy_process_group()
    partitioned = torch.nn.Linear(3, 2, bias=False)
    partitioned.weight.data = torch.empty(0)
    partitioned.weight.ds_shape = torch.Size([2, 3])
    with pytest.raises(TableError, match=r"'weight': got no elements, expected shape \(2, 3\): DeepSpeed ZeRO-3"):
        local_tensors(partitioned)


def run_on_gloo(folder: Path, world: int, mesh_shapes: list[list[int]], timeout_s: float) -> list[int]:
    pytest.importorskip("torch", reason="the DTensor adapter needs torch")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with Supervisor(DTENSOR_MODULES, folder, environment=environment) as supervisor:
        ranks = [
            supervisor.start(
                f"rank-{rank}",
                "tests.refit.dtensor_workers:run_rank",
                {"rank": rank, "world": world, "store": str(folder / "store"), "meshes": mesh_shapes},
            )
            for rank in range(world)
        ]
        answers = supervisor.wait(ranks, timeout_s=timeout_s)
    return [int(str(answer["n_checked"])) for answer in answers.values()]


def test_boxes_equal_full_tensors(tmp_path: Path) -> None:
    checked = run_on_gloo(tmp_path, 4, [[4], [3], [2, 2]], timeout_s=110)
    assert min(checked) > 50


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_boxes_equal_full_tensors_on_all_meshes_up_to_eight_ranks(tmp_path: Path) -> None:
    mesh_shapes = [[n] for n in range(1, 9)] + [[a, b] for a in range(1, 9) for b in range(1, 9) if a * b <= 8]
    checked = run_on_gloo(tmp_path, 8, mesh_shapes, timeout_s=380)
    assert min(checked) > 500
