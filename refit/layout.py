"""Where does each local tensor go in a publisher's buffer, and as what dtype?

1. The wire dtype of a tensor: its own ``wire_dtype``, else the publisher's rule for floating-point tensors unless a
   pattern exempts it; integers, booleans and 8-bit floats are never cast.
2. Each tensor's box is cut where receivers will cut it (cut hints); every resulting box is stored contiguously,
   64-byte aligned.
3. The boxes become a `ShardPart`; `PackedLayout.pack` copies and casts local tensors into a buffer of that layout,
   on the tensors' own device where they are torch's.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.planner import Holder, Shard, ShardPart
from reshard.planner.convert import cast, storage_dtype
from reshard.planner.dtypes import dtype as parse_dtype
from reshard.planner.errors import require
from reshard.refit.cells import CellGrid, rows_root_key
from reshard.refit.devices import tensor_of
from reshard.refit.digests import root_of
from reshard.refit.errors import PublishError
from reshard.refit.tensors import LocalTensor, is_torch

if TYPE_CHECKING:
    import torch

    from reshard.refit.devices import Memory

__all__ = ["ALIGN_BYTES", "Cuts", "PackedLayout", "WireRule", "build_layout", "replica_groups", "signature_of"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Cuts = Mapping[str, Sequence[Sequence[int]]]
"""Tensor name -> per dim the coordinates at which receivers cut it."""

ALIGN_BYTES = 64
_CASTABLE = frozenset(("float16", "bfloat16", "float32", "float64"))


@dataclass(frozen=True, slots=True)
class WireRule:
    """``wire_dtype`` for floating-point tensors, except names that match one of ``exceptions`` (``fnmatch``)."""

    wire_dtype: str | None = None
    exceptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.wire_dtype is not None and self.wire_dtype not in _CASTABLE:
            parse_dtype(self.wire_dtype)
            raise PublishError(f"wire_dtype {self.wire_dtype!r}: expected one of {', '.join(sorted(_CASTABLE))}")

    def of(self, tensor: LocalTensor) -> str:
        """The dtype label that ``tensor`` is published as."""
        if tensor.wire_dtype is not None:
            own = tensor.wire_dtype
            if own != tensor.dtype and not {own, tensor.dtype} <= _CASTABLE:
                raise PublishError(f"tensor {tensor.name!r}: {tensor.dtype} is never cast to {own} on the wire")
            return own
        if self.wire_dtype is None or tensor.dtype not in _CASTABLE:
            return tensor.dtype
        if any(fnmatchcase(tensor.name, pattern) for pattern in self.exceptions):
            return tensor.dtype
        return self.wire_dtype


@dataclass(frozen=True, slots=True)
class _Target:
    """One stored box of local tensor number ``tensor``: a local slice, and where it goes."""

    tensor: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A publisher's buffer layout: the part that describes it, its cells, and how to fill it.

    Attributes
    ----------
    part
        Region 0 is the data; the caller adds regions for digests and header behind it.
    data_bytes
        Size of the data region.
    groups
        Replica group -> (cell numbers in canonical order, what binds their names and boxes).
    """

    part: ShardPart
    grid: CellGrid
    data_bytes: int
    targets: tuple[_Target, ...]
    wire: tuple[str, ...]
    groups: Mapping[int, tuple[npt.NDArray[np.int64], bytes]]

    def pack(self, tensors: Sequence[LocalTensor], data: Memory) -> None:
        """Copy and cast ``tensors`` (in the order that the layout was built from) into ``data``.

        Torch tensors on a device are cast there, on torch's current stream, also where ``data`` is the host's; the
        caller synchronises the device afterwards (`synchronize`).
        """
        for target in self.targets:
            tensor, label = tensors[target.tensor], self.wire[target.tensor]
            index = tuple(slice(a, b) for a, b in zip(target.start, target.stop, strict=True))
            shape = tuple(b - a for a, b in zip(target.start, target.stop, strict=True))
            nbytes = parse_dtype(label).nbytes(math.prod(shape))
            if is_torch(tensor.data):
                require("torch", extra="torch")
                import torch

                raw = tensor_of(data[target.offset_bytes : target.offset_bytes + nbytes])
                dtype: torch.dtype = getattr(torch, label)
                with torch.no_grad():
                    piece: torch.Tensor = tensor.data.detach()[index]  # type: ignore[union-attr]
                    if piece.device.type != "cpu":
                        piece = piece.to(dtype)  # here: a copy to the host would carry the wider type and cast there
                    raw.view(dtype).view(shape).copy_(piece, non_blocking=True)
            elif isinstance(data, np.ndarray):
                out = data[target.offset_bytes : target.offset_bytes + nbytes]
                _pack_numpy(np.asarray(tensor.data)[index], tensor.dtype, label, out)
            else:
                fresh = np.empty(nbytes, np.uint8)
                _pack_numpy(np.asarray(tensor.data)[index], tensor.dtype, label, fresh)
                data[target.offset_bytes : target.offset_bytes + nbytes].copy_(tensor_of(fresh))

    def roots(self, digests: U64) -> dict[str, bytes]:
        """One root per replica group over its cells in canonical order."""
        return {str(group): root_of(digests[cells], key) for group, (cells, key) in self.groups.items()}


def _pack_numpy(values: npt.NDArray[np.generic], src: str, dst: str, out: U8) -> None:
    if src == dst:
        flat = out.view(values.dtype) if values.dtype.itemsize else out
        np.copyto(flat.reshape(values.shape), values)
        return
    stored = np.ascontiguousarray(values).view(storage_dtype(src)) if values.dtype != storage_dtype(src) else values
    np.copyto(out.view(storage_dtype(dst)).reshape(values.shape), cast(src, dst, stored))


def synchronize(tensors: Sequence[LocalTensor]) -> None:
    """Wait for the device work that writes or copies ``tensors``: once per device, not per tensor."""
    seen: set[object] = set()
    for tensor in tensors:
        if not is_torch(tensor.data):
            continue
        device: torch.device = tensor.data.device  # type: ignore[assignment]
        if device.type == "cuda" and device not in seen:
            seen.add(device)
            require("torch", extra="torch").cuda.synchronize(device)


def signature_of(tensors: Sequence[LocalTensor], rule: WireRule, cuts: Cuts | None) -> bytes:
    """What a layout depends on, as 32 bytes; equal signatures mean that the layout can be used again."""
    hasher = hashlib.sha256()
    for t in tensors:
        row = (t.name, t.dtype, rule.of(t), t.shape, t.start, tuple(t.data.shape), t.replica_group, t.axes)
        hasher.update(repr(row).encode())
    hasher.update(repr(sorted((n, [list(map(int, d)) for d in c]) for n, c in (cuts or {}).items())).encode())
    return hasher.digest()


def build_layout(
    holder: Holder,
    tensors: Sequence[LocalTensor],
    rule: WireRule,
    *,
    cuts: Cuts | None = None,
    layout: str = "default",
    claim: str = "",
    extra_regions: Callable[[int], Sequence[int]] = lambda n_cells: (),
) -> PackedLayout:
    """Lay out ``tensors`` in one data region.

    Parameters
    ----------
    cuts
        Cut hints: tensor name -> per dim the coordinates where receivers cut it.
    extra_regions
        Sizes of further regions, given the number of cells (digests, header).

    Raises
    ------
    PublishError, TableError
        A tensor twice at one box, cuts of another number of dims, or anything that a `ShardPart` refuses.
    """
    seen: set[tuple[str, tuple[int, ...]]] = set()
    shards: list[Shard] = []
    targets: list[_Target] = []
    wire: list[str] = []
    end = 0
    for number, tensor in enumerate(tensors):
        label = rule.of(tensor)
        wire.append(label)
        if (tensor.name, tensor.start) in seen:
            raise PublishError(f"tensor {tensor.name!r} is given twice at {tensor.start} by holder {holder.name!r}")
        seen.add((tensor.name, tensor.start))
        for start, stop in _boxes(tensor, (cuts or {}).get(tensor.name)):
            local_start = tuple(a - o for a, o in zip(start, tensor.start, strict=True))
            local_stop = tuple(b - o for b, o in zip(stop, tensor.start, strict=True))
            shards.append(
                Shard(tensor.name, label, tensor.shape, start, stop, 0, end, tensor.replica_group, tensor.axes)
            )
            targets.append(_Target(number, local_start, local_stop, end))
            n_elems = math.prod(b - a for a, b in zip(start, stop, strict=True))
            end += -(-parse_dtype(label).nbytes(n_elems) // ALIGN_BYTES) * ALIGN_BYTES
    # The grid does not depend on region sizes, so it is taken from a first part that has the data region only.
    grid = CellGrid.of(ShardPart.from_shards(holder, shards, [end], layout, claim))
    part = ShardPart.from_shards(holder, shards, [end, *extra_regions(len(grid))], layout, claim)
    return PackedLayout(part, grid, end, tuple(targets), tuple(wire), replica_groups(part, grid))


def _boxes(tensor: LocalTensor, cuts: Sequence[Sequence[int]] | None) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The global boxes that ``tensor`` is stored as."""
    if not cuts:
        return [(tensor.start, tensor.stop)]
    if len(cuts) != len(tensor.shape):
        raise PublishError(f"tensor {tensor.name!r}: got cuts of {len(cuts)} dims, expected {len(tensor.shape)}")
    per_dim: list[list[tuple[int, int]]] = []
    for first, stop, at in zip(tensor.start, tensor.stop, cuts, strict=True):
        edges = sorted({first, stop, *(int(c) for c in at if first < int(c) < stop)})
        per_dim.append(list(itertools.pairwise(edges)) or [(first, stop)])
    return [(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in itertools.product(*per_dim)]


def replica_groups(part: ShardPart, grid: CellGrid) -> dict[int, tuple[npt.NDArray[np.int64], bytes]]:
    """Replica group -> its cells in canonical order (by name and box), and what binds those names and boxes."""
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(part.replica_group.tolist()):
        if group >= 0 and grid.first[row] < grid.first[row + 1]:
            rows_of.setdefault(group, []).append(row)
    made = {}
    for group, rows in rows_of.items():
        rows.sort(
            key=lambda r: (
                part.tensors.name(int(part.tensor_id[r])),
                tuple(int(c[part.geometry_id[r]]) for c in part.geometries.start),
            )
        )
        cells = np.concatenate([np.arange(grid.first[r], grid.first[r + 1]) for r in rows])
        made[group] = (cells, rows_root_key(part, rows))
    return made
