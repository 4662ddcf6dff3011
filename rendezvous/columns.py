"""How does a set of integer columns become one small compressed frame, and back, without a loop over rows?

As ``proto/v1/tables.proto`` says: each column is transformed, its values stored in the fewest of 1, 2, 4 or 8
bytes, its bytes transposed, all columns put one after another, and the whole compressed with zstd.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.planner.errors import require
from reshard.rendezvous import limits
from reshard.rendezvous.errors import InvalidRequestError
from reshard.rendezvous.optional import tables_pb

if TYPE_CHECKING:
    from types import ModuleType

    from zstandard import ZstdDecompressor

__all__ = ["compress", "decompress", "pack_columns", "pack_names", "unpack_columns", "unpack_names"]

Int64 = npt.NDArray[np.int64]

_LEVEL = 12  # tables are encoded once, by their publisher, and decoded by all receivers
_WIDTHS = ((1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64))
_U64 = 2**64


def _zstd() -> ModuleType:
    return require("zstandard", extra="rendezvous")


class _Contexts(threading.local):
    """One decompression context a thread: making one costs more than a small frame."""

    made: ZstdDecompressor | None = None


_contexts = _Contexts()


def _decompressor() -> ZstdDecompressor:
    if _contexts.made is None:
        _contexts.made = _zstd().ZstdDecompressor()
    return _contexts.made


def compress(data: bytes) -> bytes:
    """Compress with zstd; the frame states its content size."""
    packed: bytes = _zstd().ZstdCompressor(level=_LEVEL).compress(data)
    return packed


def decompress(field: str, frame: bytes, n_bytes: int) -> bytes:
    """Decompress a frame of exactly `n_bytes`; nothing larger is ever allocated.

    Raises
    ------
    InvalidRequestError
        Naming `field`: not a zstd frame, or of another size.
    """
    zstd = _zstd()
    try:
        stated = zstd.frame_content_size(frame)
        if stated != n_bytes:
            raise InvalidRequestError(field, f"frame states {stated} bytes, its columns need {n_bytes}")
        data: bytes = _decompressor().decompress(frame, max_output_size=max(n_bytes, 1), allow_extra_data=False)
    except zstd.ZstdError as error:
        raise InvalidRequestError(field, f"not a zstd frame: {error}") from None
    if len(data) != n_bytes:
        raise InvalidRequestError(field, f"frame holds {len(data)} bytes, its columns need {n_bytes}")
    return data


def pack_columns(columns: Iterable[Int64]) -> tuple[list[tables_pb.Column], bytes]:
    """Describe columns and compress them into one frame.

    For each, the transform that compresses best is taken.
    """
    packed = [_pack_column(np.ascontiguousarray(column, np.int64)) for column in columns]
    return [meta for meta, _ in packed], compress(b"".join(data for _, data in packed))


def _pack_column(column: Int64) -> tuple[tables_pb.Column, bytes]:
    if not column.size:
        return tables_pb.Column(transform=tables_pb.TRANSFORM_CONSTANT), b""
    low, high = int(column.min()), int(column.max())
    if low == high:
        return tables_pb.Column(transform=tables_pb.TRANSFORM_CONSTANT, base=low), b""
    delta = np.diff(column, prepend=np.int64(0))
    candidates = [
        _store(column, tables_pb.TRANSFORM_RAW),
        _store(delta, tables_pb.TRANSFORM_DELTA),
    ]
    return min(candidates, key=lambda candidate: len(_zstd().compress(candidate[1], 3)))


def _store(values: Int64, transform: tables_pb.Transform) -> tuple[tables_pb.Column, bytes]:
    base = int(values.min())
    stored = values.view(np.uint64) - np.uint64(base % _U64)
    top = int(stored.max())
    width, dtype = next((w, d) for w, d in _WIDTHS if top < 1 << (8 * w))
    planes = stored.astype(dtype).astype(f"<u{width}", copy=False).view(np.uint8).reshape(-1, width)
    meta = tables_pb.Column(transform=transform, width=width, base=base)
    return meta, planes.T.tobytes()


def unpack_columns(field: str, metas: Sequence[tables_pb.Column], lengths: Sequence[int], frame: bytes) -> list[Int64]:
    """Decode a frame into its columns.

    Parameters
    ----------
    field
        Name of the message, for errors.
    metas
        One a column.
    lengths
        Rows of each column; the caller has bounded them.
    frame
        zstd.

    Raises
    ------
    InvalidRequestError
        Another number of columns, a bad width or transform, or a frame that does not match.
    """
    if len(metas) != len(lengths):
        raise InvalidRequestError(f"{field}.columns", f"{len(metas)} columns, expected {len(lengths)}")
    if sum(lengths) > limits.MAX_CELLS:
        raise InvalidRequestError(f"{field}.columns", f"{sum(lengths)} values in all, at most {limits.MAX_CELLS}")
    n_bytes = 0
    for i, (meta, length) in enumerate(zip(metas, lengths, strict=True)):
        constant = meta.transform == tables_pb.TRANSFORM_CONSTANT
        if meta.transform not in (
            tables_pb.TRANSFORM_RAW,
            tables_pb.TRANSFORM_DELTA,
            tables_pb.TRANSFORM_CONSTANT,
        ):
            raise InvalidRequestError(f"{field}.columns[{i}].transform", f"unknown value {meta.transform}")
        if meta.width not in ((0,) if constant else (1, 2, 4, 8)):
            raise InvalidRequestError(f"{field}.columns[{i}].width", f"{meta.width} bytes; expected 1, 2, 4 or 8")
        n_bytes += meta.width * length
    data = decompress(f"{field}.frame", frame, n_bytes)
    columns: list[Int64] = []
    at = 0
    for meta, length in zip(metas, lengths, strict=True):
        if meta.transform == tables_pb.TRANSFORM_CONSTANT:
            columns.append(_frozen(np.full(length, meta.base, np.int64)))
            continue
        width = meta.width
        planes = np.frombuffer(data, np.uint8, width * length, at).reshape(width, length)
        at += width * length
        if width == 1:
            values = planes[0].astype(np.int64)
        else:
            values = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(length).astype(np.int64)
        if meta.base:
            values += np.int64(meta.base)
        if meta.transform == tables_pb.TRANSFORM_DELTA:
            np.cumsum(values, out=values)
        columns.append(_frozen(values))
    return columns


def pack_names(names: Sequence[str]) -> tuple[int, bytes]:
    """Compress names, each ended by a NUL. Returns the bytes before compression, and the frame."""
    blob = "".join(f"{name}\0" for name in names).encode()
    return len(blob), compress(blob)


def unpack_names(field: str, frame: bytes, n_names: int, n_bytes: int) -> list[str]:
    """Decode what :func:`pack_names` encoded; the caller has bounded both numbers."""
    blob = decompress(f"{field}.frame", frame, n_bytes)
    if blob[-1:] not in (b"\0", b"") or blob.count(b"\0") != n_names:
        raise InvalidRequestError(f"{field}.frame", f"expected {n_names} names, each ended by a NUL")
    try:
        names = blob.decode().split("\0")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{field}.frame", f"names are not valid UTF-8: {error.reason}") from None
    return names[:-1]


def _frozen(column: Int64) -> Int64:
    column.flags.writeable = False
    return column
