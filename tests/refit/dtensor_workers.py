"""What each gloo rank of `test_torch_dtensor.py` runs: DTensors of many kinds against `full_tensor()`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from reshard.planner.errors import TableError
from reshard.refit.adapters.torch_dtensor import local_tensors, replica_claim, tied_names
from reshard.refit.demo.channel import Channel

SHAPES = ((7, 5), (6,), (2, 3, 4), (16, 9), (1, 3))


def run_rank(channel: Channel, *, rank: int, world: int, store: str, meshes: list[list[int]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    n_checked = 0
    try:
        for shape in meshes:
            n_members = math.prod(shape)
            names = ("outer", "inner")[: len(shape)]
            mesh = DeviceMesh("cpu", torch.arange(n_members).view(*shape), mesh_dim_names=names)
            members = dist.new_group(list(range(n_members)))
            for tensor, full in dtensors(mesh):
                check(tensor, full, members)
                n_checked += 1
            for module, whole, copies_over in modules(mesh):
                for parameter, full in zip(module.parameters(), whole.parameters(), strict=True):
                    check(parameter, full.detach(), members, copies_over)
                    n_checked += 1
            refuses_partial(mesh)
            refuses_other_shapes(mesh)
            if mesh.get_coordinate() is not None:
                whole_module(mesh)
        channel.send({"answer": {"n_checked": n_checked}})
    finally:
        dist.destroy_process_group()


def dtensors(mesh: DeviceMesh) -> Iterator[tuple[DTensor, torch.Tensor]]:
    """DTensors of every shape with every combination of placements over the mesh, each with its full tensor."""
    for shape in SHAPES:
        full = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float32).view(shape)
        kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placements in itertools.product(kinds, repeat=mesh.ndim):
            yield distribute_tensor(full, mesh, placements), full
        if mesh.ndim == 2:
            for dim in range(len(shape)):
                strided = [_StridedShard(dim, split_factor=mesh.size(1)), Shard(dim)]
                yield distribute_tensor(full, mesh, strided, src_data_rank=None), full
                lone = [_StridedShard(dim, split_factor=3), Replicate()]
                yield distribute_tensor(full, mesh, lone, src_data_rank=None), full
    scalar = torch.tensor(3.5, dtype=torch.bfloat16)
    yield distribute_tensor(scalar, mesh, [Replicate()] * mesh.ndim), scalar


class Layer(nn.Module):
    """Two linear maps, to be split by columns and by rows, and a norm."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, 10, bias=True)
        self.down = nn.Linear(10, 6, bias=False)
        self.scale = nn.Parameter(torch.randn(3))


def modules(mesh: DeviceMesh) -> Iterator[tuple[nn.Module, nn.Module, tuple[str, ...]]]:
    """FSDP2 on a 1-D mesh; HSDP and FSDP over tensor parallelism on a 2-D one."""
    if mesh.get_coordinate() is None:
        return
    if mesh.ndim == 1:
        module = Layer(1)
        fully_shard(module, mesh=mesh)
        yield module, Layer(1), ()
        return
    hybrid = Layer(2)
    fully_shard(hybrid, mesh=mesh)
    yield hybrid, Layer(2), ()
    both = Layer(3)
    parallelize_module(both, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(both, mesh=mesh["outer"])
    yield both, Layer(3), ("inner",)


def check(
    tensor: torch.Tensor, full: torch.Tensor, members: dist.ProcessGroup | None, copies_over: tuple[str, ...] = ()
) -> None:
    """All ranks' boxes, pasted together, are the full tensor; each element is held as often as dims replicate it."""
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    held = local_tensors({"t": tensor}, copies_over=copies_over)
    if mesh.get_coordinate() is None:
        assert held == []
        return
    own = tensor.to_local()
    for box in held:
        assert isinstance(box.data, torch.Tensor)
        assert box.data.untyped_storage().data_ptr() == own.untyped_storage().data_ptr(), "a copy was made"
    described = [(box.start, box.stop, box.replica_group, torch.as_tensor(box.data).clone()) for box in held]
    everybody: list[Any] = [None] * dist.get_world_size(members)
    dist.all_gather_object(everybody, described, group=members)
    if gathers(tensor):
        assert torch.equal(tensor.full_tensor(), full)
    replicas = len(everybody) // mesh.size()
    for size, placement in zip(mesh.shape, tensor.placements, strict=True):
        replicas *= size if isinstance(placement, Replicate) else 1
    pasted = torch.full_like(full, float("nan"))
    counts = torch.zeros(full.shape, dtype=torch.int64)
    claims: dict[Any, set[int]] = {}
    for boxes in everybody:
        for start, stop, claim, data in boxes:
            where = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            pasted[where] = data
            counts[where] += 1
            claims.setdefault((start, stop), set()).add(claim)
            assert (claim >= 0) == (replicas > 1), (tensor.placements, claim)
    assert torch.equal(pasted, full), (tensor.placements, pasted, full)
    assert bool((counts == replicas).all()), (tensor.placements, counts)
    assert all(len(of_box) == 1 for of_box in claims.values()), claims


def gathers(tensor: DTensor) -> bool:
    """Whether torch 2.13 can gather it: not strided splits that are uneven, nor one over ranks that hold nothing."""
    inner = tensor.placements[-1]
    if tensor.device_mesh.ndim == 2 and isinstance(inner, Shard) and tensor.placements[0] != Replicate():
        size, ranks = tensor.shape[inner.dim], tensor.device_mesh.size(1)
        if -(-size // -(-size // ranks)) < ranks:
            return False
    strided = {placement.dim: placement.split_factor for placement in tensor.placements if is_strided(placement)}
    for dim, factor in strided.items():
        ranks = [
            tensor.device_mesh.size(mesh_dim)
            for mesh_dim, placement in enumerate(tensor.placements)
            if not isinstance(placement, Replicate) and placement.dim == dim
        ]
        if tensor.shape[dim] % math.prod([factor, *ranks]):
            return False
    return True


def is_strided(placement: Placement) -> bool:
    return isinstance(placement, _StridedShard)


def refuses_partial(mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        return
    summands = DTensor.from_local(torch.ones(4), mesh, [Partial()] * mesh.ndim)
    with pytest.raises(TableError, match="summands"):
        local_tensors({"sum": summands})


def refuses_other_shapes(mesh: DeviceMesh) -> None:
    """Uneven shards that somebody cut by another rule than torch's."""
    if mesh.get_coordinate() is None:
        return
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    shape = torch.Size([2 * mesh.size(0)])
    short = DTensor.from_local(torch.ones(1), mesh, placements, run_check=False, shape=shape, stride=(1,))
    with pytest.raises(TableError, match=r"'short': .* got a local tensor of shape \(1,\), expected \(2,\)"):
        local_tensors({"short": short})


class Mixed(nn.Module):
    """Parameters of two dtypes, tied weights, and buffers of which one is persistent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False, dtype=torch.bfloat16)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all of them."""
        hidden: torch.Tensor = self.second(self.first(x).bfloat16()).float()
        return hidden


def whole_module(mesh: DeviceMesh) -> None:
    """After a forward pass FSDP2 or HSDP may hold gathered parameters; the adapter publishes the sharded ones."""
    module = Mixed()
    whole = {name: value.clone() for name, value in module.state_dict().items()}
    for part in (module.second, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    with torch.no_grad():
        module(torch.ones(1, 6))
    assert not any(isinstance(parameter, DTensor) for parameter in module.parameters()), "nothing is gathered: no test"
    ranks = mesh.mesh.flatten().tolist()
    held = local_tensors(module, plain_ranks=ranks)
    assert tied_names(module) == {"tied.weight": "first.weight"}
    inner = mesh.ndim - 1
    rank, size = mesh.get_local_rank(inner), mesh.size(inner)
    coordinate = mesh.get_coordinate()
    copies = mesh.mesh[:, coordinate[1]].tolist() if mesh.ndim == 2 else [dist.get_rank()]
    chunk = -(-6 // size)
    rows = (min(rank * chunk, 6), min((rank + 1) * chunk, 6))
    expected = {"seen": ((), ())}
    if rows[0] < rows[1]:
        expected |= dict.fromkeys(("first.weight", "second.weight"), ((rows[0], 0), (rows[1], 6)))
    assert {box.name: (box.start, box.stop) for box in held} == expected
    for box in held:
        where = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        assert torch.equal(torch.as_tensor(box.data), whole[box.name][where]), box.name
        assert box.dtype == str(whole[box.name].dtype).removeprefix("torch.")
        holders = ranks if box.name == "seen" else copies
        assert box.replica_group == (replica_claim(holders) if len(holders) > 1 else -1), box.name
