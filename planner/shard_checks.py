"""Does a part keep its rules? Every box lies inside its tensor, every shard inside its region.

Each (tensor shape, geometry) pair that occurs is checked once, not each shard; ids from the wire are checked
against the dictionaries first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from reshard.planner.classify import Int64
from reshard.planner.errors import DTypeError, TableError
from reshard.planner.names import check_label

if TYPE_CHECKING:
    from reshard.planner.shards import ShardPart

_TABLE_LIMIT: Final = 1 << 22


def _error(part: ShardPart, row: int, message: str, *, dim: int = -1, got: object, expected: object) -> TableError:
    name = part.tensors.name(int(part.tensor_id[row]))
    return TableError(
        f"holder {part.holder.name!r}, tensor {name!r}, shard row {row}: {message}",
        tensor=name,
        dim=dim,
        got=got,
        expected=expected,
        where=part.holder.name,
    )


def _check_ids(part: ShardPart, name: str, bound: int) -> None:
    ids: Int64 = getattr(part, name)
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= bound):
        bad = int(np.argmax((ids < 0) | (ids >= bound)))
        raise TableError(
            f"holder {part.holder.name!r}, shard row {bad}: {name} {int(ids[bad])}; expected 0 to {bound - 1}",
            got=int(ids[bad]),
            expected=bound - 1,
            where=part.holder.name,
        )


def check_part(part: ShardPart) -> None:
    """Check a part's columns, ids, boxes and extents.

    Raises
    ------
    TableError, DTypeError
        As `ShardPart` says.
    """
    n, holder = len(part.tensor_id), part.holder.name
    for what, label in (("layout", part.layout), ("claim", part.claim)):
        if label or what == "layout":
            check_label(label, f"holder {holder!r}: {what}")
    for name in ("geometry_id", "region", "offset_bytes", "replica_group"):
        if len(getattr(part, name)) != n:
            raise TableError(
                f"holder {holder!r}: column {name} has {len(getattr(part, name))} rows; expected {n}",
                got=len(getattr(part, name)),
                expected=n,
                where=holder,
            )
    if len(part.region_bytes) and int(part.region_bytes.min()) < 0:
        raise TableError(
            f"holder {holder!r}: region {int(part.region_bytes.argmin())} has {int(part.region_bytes.min())} bytes",
            got=int(part.region_bytes.min()),
            expected=0,
            where=holder,
        )
    if n == 0:
        return
    if int(part.replica_group.min()) < -1:
        bad = int(part.replica_group.argmin())
        raise _error(
            part,
            bad,
            f"replica_group {int(part.replica_group[bad])}; expected -1 or more",
            got=int(part.replica_group[bad]),
            expected=-1,
        )
    _check_ids(part, "tensor_id", len(part.tensors))
    _check_ids(part, "geometry_id", len(part.geometries))
    shard_bytes = _check_boxes(part)
    _check_extent(part, shard_bytes)


def _check_boxes(part: ShardPart) -> Int64:
    """Check each (shape class, geometry) pair that occurs; return int64[N] bytes of each shard."""
    shape_class, first = part.tensors.shape_class
    n_geometries = len(part.geometries)
    key = shape_class[part.tensor_id] * n_geometries + part.geometry_id
    n_keys = len(first) * n_geometries
    slot: Int64 | None = None
    if n_keys <= max(_TABLE_LIMIT, 4 * len(key)):
        seen = np.zeros(n_keys, np.bool_)
        seen[key] = True
        pairs = np.flatnonzero(seen)
    else:
        pairs, slot = np.unique(key, return_inverse=True)
    tensor, box = first[pairs // n_geometries], pairs % n_geometries
    wrong = part.geometries.ndim[box] != part.tensors.ndim[tensor]
    if wrong.any():
        row = int(np.argmax(key == pairs[np.argmax(wrong)]))
        got, expected = (
            int(part.geometries.ndim[part.geometry_id[row]]),
            int(part.tensors.ndim[part.tensor_id[row]]),
        )
        raise _error(part, row, f"box of rank {got}; expected rank {expected}", got=got, expected=expected)
    n_dims = max(part.tensors.n_dims, part.geometries.n_dims)
    volume = np.ones(len(pairs), np.int64)
    for d in range(-n_dims, 0):
        if -d > part.geometries.n_dims or -d > part.tensors.n_dims:
            continue
        start, stop = part.geometries.start[d][box], part.geometries.stop[d][box]
        size = part.tensors.shape[d][tensor]
        wrong = stop > size
        if wrong.any():
            pair = int(np.argmax(wrong))
            row = int(np.argmax(key == pairs[pair]))
            dim = d + int(part.tensors.ndim[tensor[pair]])
            got_box = (int(start[pair]), int(stop[pair]))
            raise _error(
                part,
                row,
                f"dim {dim}: box [{got_box[0]}, {got_box[1]}) outside the global size {int(size[pair])}",
                dim=dim,
                got=got_box,
                expected=(0, int(size[pair])),
            )
        volume *= stop - start
    bits = part.tensors.bits[tensor]
    packed = bits < 8
    if packed.any():
        pack = 8 // np.minimum(bits, 8)
        cut = packed & (volume > 0)
        cut &= (part.geometries.start[-1][box] % pack != 0) | (part.geometries.stop[-1][box] % pack != 0)
        if cut.any():
            pair = int(np.argmax(cut))
            row = int(np.argmax(key == pairs[pair]))
            name = part.tensors.name(int(part.tensor_id[row]))
            span = (int(part.geometries.start[-1][box[pair]]), int(part.geometries.stop[-1][box[pair]]))
            raise DTypeError(
                f"holder {part.holder.name!r}, tensor {name!r}: last dim cut at [{span[0]}, {span[1]}) falls "
                f"inside a byte of {int(pack[pair])} packed elements",
                tensor=name,
                got=span,
                expected=int(pack[pair]),
            )
    pair_bytes = volume * bits // 8
    if slot is not None:
        by_row: Int64 = pair_bytes[slot]
        return by_row
    table = np.zeros(n_keys, np.int64)
    table[pairs] = pair_bytes
    out: Int64 = table[key]
    return out


def _check_extent(part: ShardPart, shard_bytes: Int64) -> None:
    n_regions = len(part.region_bytes)
    if int(part.offset_bytes.min()) < 0:
        row = int(part.offset_bytes.argmin())
        got = int(part.offset_bytes[row])
        raise _error(part, row, f"offset {got} bytes; expected 0 or more", got=got, expected=0)
    if n_regions == 1 and int(part.region.min()) == 0 == int(part.region.max()):
        limit = part.region_bytes[0]
        wrong = shard_bytes > limit - part.offset_bytes
    else:
        inside = (part.region >= 0) & (part.region < n_regions)
        wrong = ~inside & (shard_bytes > 0)
        if wrong.any():
            row = int(np.argmax(wrong))
            got = int(part.region[row])
            raise _error(part, row, f"region {got}; expected 0 to {n_regions - 1}", got=got, expected=n_regions - 1)
        padded = np.append(part.region_bytes, np.int64(np.iinfo(np.int64).max))
        wrong = shard_bytes > padded[np.where(inside, part.region, n_regions)] - part.offset_bytes
    wrong &= shard_bytes > 0
    if wrong.any():
        row = int(np.argmax(wrong))
        begin, size = int(part.offset_bytes[row]), int(shard_bytes[row])
        region = int(part.region[row])
        limit_bytes = int(part.region_bytes[region])
        raise _error(
            part,
            row,
            f"bytes [{begin}, {begin + size}) outside region {region} of {limit_bytes} bytes",
            got=begin + size,
            expected=limit_bytes,
        )
