"""What does this rank of a torch trainer hold? Plain tensors, DTensors and modules under FSDP2, HSDP or TP.

1. A module's FSDP2 parts are put back into their sharded state, then its parameters and persistent buffers are
   listed.
2. For a DTensor the mesh and its placements say which boxes this rank holds (`reshard.refit.adapters.placements`);
   the local tensor's shape must agree. A `Partial` placement is refused: its values are not the parameter's values.
3. Mesh dims that replicate make a claim: the ranks along them hold equal content. The claim's number is a digest of
   those global ranks, so that two pipeline stages that use one name by mistake never look like replicas.
4. Each box is yielded as a view of the local tensor, without a copy. A rank that holds nothing yields nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from reshard.planner.errors import TableError, require
from reshard.refit.adapters.placements import HeldBox, Split, held_boxes, held_runs
from reshard.refit.names import names_of
from reshard.refit.tensors import LocalTensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

WRAPPERS: Final = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))
"""Parts of names that `torch.compile` and activation checkpointing put in."""

__all__ = ["local_tensors", "named_tensors", "replica_claim", "tied_names"]


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and persistent buffers by name, each piece of memory once.

    FSDP2 parts that are unsharded at the moment (after a forward pass, say) are resharded first, since their parameters
    would otherwise be the gathered copies. A tied parameter is listed under its first name (see `tied_names`). What
    wrappers put into names (`torch.compile`, activation checkpointing, DDP) is left out.

    Parameters
    ----------
    module
        Any module; its parameters may be DTensors.

    Raises
    ------
    TableError
        If two tensors have one name once the wrappers' parts are left out, or a part is under FSDP1, which flattens
        parameters and keeps no boxes of them.
    """
    require("torch", extra="torch")
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        if isinstance(part, FullyShardedDataParallel):
            raise TableError(
                f"module {name or type(part.module).__name__!r} is under FullyShardedDataParallel (FSDP1): its ranks "
                "hold stretches of flattened parameters and no boxes; shard it with fully_shard (FSDP2)"
            )
    persistent = set(module.state_dict(keep_vars=True))
    listed: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
    listed += [(name, buffer) for name, buffer in module.named_buffers() if name in persistent]
    prefix = _wrapper_prefix(module)
    named: dict[str, torch.Tensor] = {}
    for wrapped_name, tensor in listed:
        name = _without_wrappers(wrapped_name, prefix)
        if name in named:
            raise TableError(f"tensor {name!r}: two tensors of the module have this name", tensor=name)
        named[name] = tensor
    return named


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the names of tied parameters that `named_tensors` leaves out, with the names they are listed under."""
    prefix = _wrapper_prefix(module)
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    everything = module.named_parameters(remove_duplicate=False)
    return {
        _without_wrappers(name, prefix): _without_wrappers(first[id(parameter)], prefix)
        for name, parameter in everything
        if first[id(parameter)] != name
    }


def _wrapper_prefix(module: torch.nn.Module) -> str:
    """Return what `DistributedDataParallel` puts before every name."""
    from torch.nn.parallel import DistributedDataParallel

    return "module." if isinstance(module, DistributedDataParallel) else ""


def _without_wrappers(name: str, prefix: str) -> str:
    return ".".join(part for part in name.removeprefix(prefix).split(".") if part not in WRAPPERS)


def local_tensors(
    source: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    plain_ranks: Sequence[int] | None = None,
    copies_over: Sequence[str] = (),
) -> list[LocalTensor]:
    """Return the boxes that this rank holds, as views of its local tensors.

    Parameters
    ----------
    source
        A module, or names with tensors. Names must be the global ones (a pipeline stage's local layer numbers are not).
    plain_ranks
        Global ranks that hold equal copies of the tensors that are not DTensors (data parallelism, buffers). None
        claims nothing: a plain tensor published by two holders is then a conflict.
    copies_over
        Names of dims of the root mesh along which tensors that are not laid over them are equal copies: with tensor
        parallelism under FSDP2 a norm's mesh is the "fsdp" dim alone, and `copies_over=("tp",)` says that the ranks
        along "tp" hold the same. Nothing is assumed otherwise, since pipeline stages look just the same.

    Returns
    -------
    list of LocalTensor
        Empty where this rank holds nothing; publish with `empty=True` then.

    Raises
    ------
    TableError
        For a `Partial` placement, a placement of an unknown kind, or a local tensor whose shape is not what the
        placements say; for a module under FSDP1, and for a parameter that DeepSpeed ZeRO-3 has partitioned.
    TypeError
        ``copies_over`` as a bare string.
    """
    require("torch", extra="torch")
    import torch
    from torch.distributed.tensor import DTensor

    copies_over = names_of(copies_over, "copies_over")
    named = named_tensors(source) if isinstance(source, torch.nn.Module) else source
    plain_claim = replica_claim(plain_ranks) if plain_ranks is not None and len(plain_ranks) > 1 else -1
    found: list[LocalTensor] = []
    for name, tensor in named.items():
        if isinstance(tensor, DTensor):
            found += _dtensor_boxes(name, tensor, copies_over)
        elif tensor.numel():
            shape = tuple(tensor.shape)
            data = tensor.detach()
            found.append(LocalTensor(name, _label(tensor), shape, (0,) * len(shape), data, plain_claim))
        elif (whole := getattr(tensor, "ds_shape", None)) is not None:
            raise TableError(
                f"tensor {name!r}: got no elements, expected shape {tuple(whole)}: DeepSpeed ZeRO-3 has it "
                "partitioned; publish from within deepspeed.zero.GatheredParameters",
                tensor=name,
            )
    return found


def replica_claim(ranks: Iterable[int]) -> int:
    """Return the claim number of some global ranks that hold equal content: 62 bits of a digest of them, sorted."""
    text = ",".join(str(rank) for rank in sorted(ranks))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def _dtensor_boxes(name: str, tensor: DTensor, copies_over: Sequence[str]) -> list[LocalTensor]:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shape = tuple(tensor.shape)
    splits: list[list[Split]] = [[] for _ in shape]
    replicating: list[int] = []
    for mesh_dim, placement in enumerate(tensor.placements):
        ranks, rank = mesh.size(mesh_dim), coordinate[mesh_dim]
        if isinstance(placement, _StridedShard):
            splits[placement.dim].append(Split(ranks, rank, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            splits[placement.dim].append(Split(ranks, rank))
        elif isinstance(placement, Replicate):
            if ranks > 1:
                replicating.append(mesh_dim)
        elif isinstance(placement, Partial):
            raise TableError(
                f"tensor {name!r}: placement {placement} on mesh dim {mesh_dim}: its ranks hold summands, not values; "
                "redistribute it first"
            )
        else:
            raise TableError(f"tensor {name!r}: placement {placement!r} on mesh dim {mesh_dim} is of an unknown kind")
    boxes = held_boxes(shape, splits)
    local = tensor.to_local().detach()
    expected = _local_shape(shape, splits)
    # An empty local tensor holds nothing, whatever its shape: FSDP2 over an empty tensor-parallel shard has (0, 0).
    if tuple(local.shape) != expected and (local.numel() or math.prod(expected)):
        raise TableError(
            f"tensor {name!r}: mesh coordinate {tuple(coordinate)}, placements {tensor.placements}: got a local tensor "
            f"of shape {tuple(local.shape)}, expected {expected}"
        )
    ranks_of_copies = _ranks_of_copies(mesh, coordinate, replicating, copies_over)
    claim = replica_claim(ranks_of_copies) if len(ranks_of_copies) > 1 else -1
    return [LocalTensor(name, _label(tensor), shape, box.start, _cut(local, box), claim) for box in boxes]


def _ranks_of_copies(
    mesh: DeviceMesh, coordinate: Sequence[int], replicating: Sequence[int], copies_over: Sequence[str]
) -> set[int]:
    """Return the global ranks that hold what this rank holds: along replicating dims and the named root dims."""
    own_slice = tuple(slice(None) if dim in replicating else at for dim, at in enumerate(coordinate))
    ranks: set[int] = set(mesh.mesh[own_slice].flatten().tolist())
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    root_names = root.mesh_dim_names or ()
    outside = [
        root_names.index(name) for name in copies_over if name in root_names and name not in (mesh.mesh_dim_names or ())
    ]
    if not outside:
        return ranks
    copies: set[int] = set()
    for rank in ranks:
        at = (root.mesh == rank).nonzero()[0].tolist()
        copies.update(
            root.mesh[tuple(slice(None) if dim in outside else i for dim, i in enumerate(at))].flatten().tolist()
        )
    return copies


def _local_shape(shape: tuple[int, ...], splits: list[list[Split]]) -> tuple[int, ...]:
    return tuple(
        sum(stop - start for start, stop in held_runs(size, of_dim)) for size, of_dim in zip(shape, splits, strict=True)
    )


def _cut(local: torch.Tensor, box: HeldBox) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.local_start, box.sizes, strict=True)):
        local = local.narrow(dim, start, size)
    return local


def _label(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
