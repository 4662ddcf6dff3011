"""How do the planner's tables become messages, and messages tables?

Each part is a message that names two dictionary messages by digest (``proto/v1/tables.proto``). Decoding ends
in the planner's own constructors, which check every rule of a table, and in a comparison of the digest with
the one that was asked for. Rows are never looped over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from reshard.planner.cuts import Cuts
from reshard.planner.dictionaries import TensorDict
from reshard.planner.errors import ReshardError
from reshard.planner.geometries import GeometryDict
from reshard.planner.packed_names import PackedNames
from reshard.planner.shards import Holder, ShardPart
from reshard.rendezvous import limits
from reshard.rendezvous.columns import (
    Int64,
    compress,
    decompress,
    pack_columns,
    pack_names,
    unpack_columns,
    unpack_names,
)
from reshard.rendezvous.errors import InvalidRequestError
from reshard.rendezvous.optional import tables_pb

__all__ = [
    "cuts_from_message",
    "cuts_to_message",
    "geometries_from_message",
    "geometries_to_message",
    "names_digest",
    "names_from_message",
    "names_to_message",
    "part_from_message",
    "part_to_message",
    "tensors_from_message",
    "tensors_to_message",
]

_MAX_NAMES_BYTES = 64 << 20
_UNKNOWN = Holder("-")
Bool = npt.NDArray[np.bool_]


def tensors_to_message(tensors: TensorDict) -> tables_pb.TensorDict:
    """Encode a tensor dictionary."""
    columns, frame = pack_columns([tensors.dtype_code, tensors.ndim, *_real_dims(tensors.ndim, tensors.shape)])
    return tables_pb.TensorDict(
        n_tensors=len(tensors),
        names_bytes=len(tensors.names.blob),
        columns=columns,
        dim_rows=_dim_rows(tensors.ndim),
        frame=frame,
        names_frame=compress(tensors.names.blob),
        axes=[tables_pb.TensorAxes(tensor=i, axes=axes) for i, axes in sorted(tensors.axes.items())],
    )


def tensors_from_message(message: tables_pb.TensorDict, digest: bytes) -> TensorDict:
    """Decode a tensor dictionary and check its digest.

    Raises
    ------
    InvalidRequestError
        A count out of bounds, a frame that does not fit, a rule of the planner broken, another digest.
    """
    n = limits.check_int("tensors.n_tensors", message.n_tensors, at_least=0, at_most=limits.MAX_DICT_ROWS)
    n_bytes = limits.check_int("tensors.names_bytes", message.names_bytes, at_least=0, at_most=_MAX_NAMES_BYTES)
    (dtype_code,), dims = _unpack_dims("tensors", message, n, n_heads=1, per_dim=1)
    dims.check_extents("tensors.shape", 0)
    names = decompress("tensors.names_frame", message.names_frame, n_bytes)
    if (found := PackedNames.count(names)) != n:  # before anything is done for each of them
        raise InvalidRequestError("tensors.names_frame", f"holds {found} names, expected {n}")
    axes: dict[int, tuple[str, ...]] = {}
    for i, row in enumerate(message.axes):
        where = f"tensors.axes[{i}]"
        index = limits.check_int(f"{where}.tensor", row.tensor, at_least=0, at_most=n - 1)
        axes[index] = limits.check_names(f"{where}.axes", row.axes, at_least=0, at_most=limits.MAX_RANK)
    with _planner_says("tensors"):
        tensors = TensorDict(PackedNames(names), dtype_code, dims.rank, dims.padded(0, 1), axes)
        _check_digest("tensors", tensors.digest, digest)
    return tensors


def geometries_to_message(geometries: GeometryDict) -> tables_pb.GeometryDict:
    """Encode a geometry dictionary."""
    starts = _real_dims(geometries.ndim, geometries.start)
    stops = _real_dims(geometries.ndim, geometries.stop)
    dims = [column for a, b in zip(starts, stops, strict=True) for column in (a, b - a)]
    columns, frame = pack_columns([geometries.ndim, *dims])
    return tables_pb.GeometryDict(
        n_geometries=len(geometries), columns=columns, dim_rows=_dim_rows(geometries.ndim), frame=frame
    )


def geometries_from_message(message: tables_pb.GeometryDict, digest: bytes) -> GeometryDict:
    """Decode a geometry dictionary and check its digest; errors as for tensors."""
    n = limits.check_int("geometries.n_geometries", message.n_geometries, at_least=0, at_most=limits.MAX_DICT_ROWS)
    _, dims = _unpack_dims("geometries", message, n, n_heads=0, per_dim=2)
    dims.check_extents("geometries.start", 0)
    dims.check_extents("geometries.extent", 1)
    starts = dims.padded(0, 0)
    stops = tuple(a + b for a, b in zip(starts, dims.padded(1, 1), strict=True))
    with _planner_says("geometries"):
        geometries = GeometryDict(dims.rank, starts, stops)
        _check_digest("geometries", geometries.digest, digest)
    return geometries


def part_to_message(part: ShardPart) -> tables_pb.ShardPart:
    """Encode a part, without its holder; its dictionaries go by digest."""
    plain, plain_unit = _scaled(part.offset_bytes)
    gaps = part.offset_bytes - _bump(part.tensors, part.geometries, part.tensor_id, part.geometry_id)
    bump, bump_unit = _scaled(np.diff(gaps, prepend=np.int64(0)))
    codings = (
        (tables_pb.OFFSET_CODING_BUMP, bump, bump_unit),
        (tables_pb.OFFSET_CODING_PLAIN, plain, plain_unit),
    )
    coding, offsets, unit = min(codings, key=lambda row: len(pack_columns([row[1]])[1]))
    columns, frame = pack_columns(
        [part.tensor_id, part.geometry_id, part.region, part.replica_group, offsets, part.region_bytes]
    )
    return tables_pb.ShardPart(
        tensors_digest=part.tensors.digest,
        geometries_digest=part.geometries.digest,
        n_rows=len(part),
        n_regions=len(part.region_bytes),
        columns=columns,
        offset_coding=coding,
        offset_unit=unit,
        frame=frame,
        layout=part.layout,
        claim=part.claim,
    )


def part_from_message(
    message: tables_pb.ShardPart, tensors: TensorDict, geometries: GeometryDict, digest: bytes
) -> ShardPart:
    """Decode a part with its dictionaries and check its digest. The holder is a placeholder: see ``with_holder``.

    Raises
    ------
    InvalidRequestError
        As for dictionaries.
    """
    n = limits.check_int("part.n_rows", message.n_rows, at_least=0, at_most=limits.MAX_ROWS)
    n_regions = limits.check_int("part.n_regions", message.n_regions, at_least=0, at_most=limits.MAX_REGIONS)
    unit = limits.check_int("part.offset_unit", message.offset_unit, at_least=1, at_most=2**62)
    limits.check_name("part.layout", message.layout, empty_ok=True)
    limits.check_name("part.claim", message.claim, empty_ok=True)
    columns = unpack_columns("part", message.columns, [n, n, n, n, n, n_regions], message.frame)
    tensor_id, geometry_id, region, replica_group, offsets, region_bytes = columns
    _check_ids("part.tensor_id", tensor_id, len(tensors))
    _check_ids("part.geometry_id", geometry_id, len(geometries))
    if unit != 1:
        offsets = offsets * np.int64(unit)
    if message.offset_coding == tables_pb.OFFSET_CODING_BUMP:
        offsets = np.cumsum(offsets)
        offsets += _bump(tensors, geometries, tensor_id, geometry_id)
    elif message.offset_coding != tables_pb.OFFSET_CODING_PLAIN:
        raise InvalidRequestError("part.offset_coding", f"unknown value {message.offset_coding}")
    with _planner_says("part"):
        part = ShardPart(
            _UNKNOWN,
            tensors,
            geometries,
            tensor_id,
            geometry_id,
            region,
            offsets,
            replica_group,
            region_bytes,
            message.layout,
            message.claim,
        )
        _check_digest("part", part.digest, digest)
    return part


def names_digest(names: Sequence[str]) -> bytes:
    """32 bytes that address a set of names: SHA-256 over the sorted names, each ended by a NUL."""
    return hashlib.sha256("".join(f"{name}\0" for name in sorted(set(names))).encode()).digest()


def names_to_message(names: Iterable[str]) -> tables_pb.NameSet:
    """Encode a set of names."""
    ordered = sorted(set(names))
    n_bytes, frame = pack_names(ordered)
    return tables_pb.NameSet(n_names=len(ordered), names_bytes=n_bytes, frame=frame)


def names_from_message(message: tables_pb.NameSet, digest: bytes) -> frozenset[str]:
    """Decode a set of names and check its digest."""
    n = limits.check_int("names.n_names", message.n_names, at_least=0, at_most=limits.MAX_DICT_ROWS)
    n_bytes = limits.check_int("names.names_bytes", message.names_bytes, at_least=0, at_most=_MAX_NAMES_BYTES)
    names = unpack_names("names", message.frame, n, n_bytes)
    _check_digest("names", names_digest(names), digest)
    return frozenset(names)


def cuts_to_message(cuts: Cuts) -> tables_pb.CutTable:
    """Encode where a receiver cuts the source tensors."""
    columns, frame = pack_columns([np.diff(cuts.offsets), cuts.coordinates])
    return tables_pb.CutTable(
        tensors=tensors_to_message(cuts.tensors),
        tensors_digest=cuts.tensors.digest,
        n_axes=len(cuts.offsets) - 1,
        n_coordinates=len(cuts.coordinates),
        columns=columns,
        frame=frame,
    )


def cuts_from_message(message: tables_pb.CutTable, digest: bytes) -> Cuts:
    """Decode where a receiver cuts the source tensors and check its digest; errors as for dictionaries."""
    limits.check_digest("cuts.tensors_digest", message.tensors_digest)
    tensors = tensors_from_message(message.tensors, message.tensors_digest)
    most = limits.MAX_DICT_ROWS * limits.MAX_RANK
    n_axes = limits.check_int("cuts.n_axes", message.n_axes, at_least=0, at_most=most)
    n = limits.check_int("cuts.n_coordinates", message.n_coordinates, at_least=0, at_most=most)
    counts, coordinates = unpack_columns("cuts", message.columns, [n_axes, n], message.frame)
    offsets = np.zeros(n_axes + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    with _planner_says("cuts"):
        cuts = Cuts(tensors, offsets, coordinates)
        _check_digest("cuts", cuts.digest, digest)
    return cuts


class _Dims:
    """Per-dim columns as the wire has them: only the cells that exist, dim by dim from the last."""

    def __init__(self, rank: Int64, cells: Sequence[Sequence[Int64]], masks: Sequence[Bool | None]) -> None:
        self.rank = rank
        self._cells = cells
        self._masks = masks

    def check_extents(self, field: str, which: int) -> None:
        """Refuse values outside [0, 2^40]."""
        for back, cells in enumerate(self._cells, 1):
            low, high = int(cells[which].min()), int(cells[which].max())
            if low < 0 or high > limits.MAX_DIM_ELEMS:
                worst = low if low < 0 else high
                raise InvalidRequestError(field, f"{worst} in dim -{back}, expected 0 to {limits.MAX_DIM_ELEMS}")

    def padded(self, which: int, pad: int) -> tuple[Int64, ...]:
        """The columns left-padded, first dim first."""
        columns = []
        for cells, mask in zip(self._cells, self._masks, strict=True):
            if mask is None:
                columns.append(cells[which])
                continue
            column = np.full(len(self.rank), pad, np.int64)
            column[mask] = cells[which]
            columns.append(column)
        return tuple(reversed(columns))


def _unpack_dims(
    field: str,
    message: tables_pb.TensorDict | tables_pb.GeometryDict,
    n: int,
    *,
    n_heads: int,
    per_dim: int,
) -> tuple[list[Int64], _Dims]:
    """Decode `n_heads` columns of n rows, the ranks, and per dim `per_dim` columns of the cells that exist."""
    limits.check_int(f"{field}.dim_rows", len(message.dim_rows), at_least=0, at_most=limits.MAX_RANK)
    rows = [
        limits.check_int(f"{field}.dim_rows[{i}]", count, at_least=1, at_most=n)
        for i, count in enumerate(message.dim_rows)
    ]
    lengths = [n] * (n_heads + 1) + [count for count in rows for _ in range(per_dim)]
    columns = unpack_columns(field, message.columns, lengths, message.frame)
    heads, rank, cells = columns[:n_heads], columns[n_heads], columns[n_heads + 1 :]
    masks: list[Bool | None] = []
    for back, count in enumerate(rows, 1):
        mask = rank >= back
        if np.count_nonzero(mask) != count:
            raise InvalidRequestError(f"{field}.dim_rows[{back - 1}]", f"{count} rows; the ranks say otherwise")
        masks.append(None if count == n else mask)
    if n and int(rank.max()) > len(rows):
        raise InvalidRequestError(f"{field}.dim_rows", f"{len(rows)} dims for a rank of {int(rank.max())}")
    grouped = [cells[i : i + per_dim] for i in range(0, len(cells), per_dim)]
    return heads, _Dims(rank, grouped, masks)


def _real_dims(rank: Int64, padded: Sequence[Int64]) -> list[Int64]:
    """Only the cells that exist, dim by dim from the last."""
    dims = [(column, rank >= back) for back, column in enumerate(reversed(padded), 1)]
    return [column[mask] for column, mask in dims if mask.any()]


def _dim_rows(rank: Int64) -> list[int]:
    top = int(rank.max()) if rank.size else 0
    return [int(np.count_nonzero(rank >= back)) for back in range(1, top + 1)]


def _bump(tensors: TensorDict, geometries: GeometryDict, tensor_id: Int64, geometry_id: Int64) -> Int64:
    """Offsets of shards that lie one after another: the bytes of all shards before each."""
    ends = np.cumsum(geometries.volume[geometry_id] * tensors.bits[tensor_id] // 8)
    offsets = np.zeros(len(ends), np.int64)
    offsets[1:] = ends[:-1]
    return offsets


def _scaled(values: Int64) -> tuple[Int64, int]:
    """Divide by the greatest common divisor: offsets are aligned, so their low bits say nothing."""
    unit = int(np.gcd.reduce(values)) if values.size else 0
    return (values // unit, unit) if unit > 1 else (values, 1)


def _check_ids(field: str, ids: Int64, bound: int) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < bound:
        raise InvalidRequestError(field, f"ids span [{int(ids.min())}, {int(ids.max())}]; the dictionary has {bound}")


def _check_digest(field: str, got: bytes, expected: bytes) -> None:
    if got != expected:
        raise InvalidRequestError(field, f"content has digest {got.hex()[:16]}..., expected {expected.hex()[:16]}...")


@contextmanager
def _planner_says(field: str) -> Iterator[None]:
    """Turn what the planner refuses into an error that names the message."""
    try:
        yield
    except InvalidRequestError:
        raise
    except ReshardError as error:
        raise InvalidRequestError(field, str(error)) from error
