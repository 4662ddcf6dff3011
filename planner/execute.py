"""What a plan does to bytes: local copies, fills, and a whole plan on in-memory arrays.

`run_copies` and `run_fills` are what a receiver runs on the host between reads. `execute` runs everything on arrays
that stand for the holders' regions: the reference that transports are held against.

1. Each copy or fill is one NumPy assignment between two strided views; views are made with their buffer's bounds
   checked, so that a wrong plan raises and never writes outside.
2. A cast reads whole elements out of staging and converts on the way.
3. `execute` reads wave k + 1 before it copies wave k out of staging, as a receiver with two waves in flight does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.planner.convert import cast, storage_dtype
from reshard.planner.dtypes import BY_CODE
from reshard.planner.errors import PlanError

if TYPE_CHECKING:
    from reshard.planner.classify import Int64
    from reshard.planner.plans import Plan
    from reshard.planner.requests import Materialised

__all__ = ["allocate_buffers", "execute", "run_copies", "run_fills", "run_loader"]

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[np.generic]


def allocate_buffers(plan: Plan) -> list[Bytes]:
    """Return a zeroed uint8 array for each of `plan.buffers`, those for materialised requests included."""
    return [np.zeros(n, np.uint8) for n in plan.buffer_bytes.tolist()]


def run_copies(plan: Plan, wave: int, staging: Bytes, buffers: Sequence[Bytes]) -> None:
    """Copy what one wave staged into the buffers, casting where dtypes differ.

    Parameters
    ----------
    plan : Plan
    wave : int
    staging : uint8 array of at least ``plan.staging_bytes``
        After the wave's reads have completed.
    buffers : sequence of uint8 array
        One for each of ``plan.buffers``.

    Raises
    ------
    PlanError
        An array is missing, too short, or not a contiguous row of bytes.
    """
    copies = plan.copies(wave)
    if not len(copies):
        return
    _check_bytes("the staging arena", staging, plan.staging_bytes)
    _check_buffers(plan, buffers)
    src_code, dst_code = copies.src_code.tolist(), copies.dst_code.tolist()
    rows = zip(
        copies.staging_offset_bytes.tolist(),
        copies.buffer.tolist(),
        copies.dst_offset_bytes.tolist(),
        copies.src_unit.tolist(),
        _shapes(copies.count, copies.run_units),
        _shapes(copies.src_stride_bytes, copies.src_unit),
        _shapes(copies.dst_stride_bytes, copies.dst_unit),
        src_code,
        dst_code,
        strict=True,
    )
    for src_offset, buffer, dst_offset, src_unit, shape, src_strides, dst_strides, src, dst in rows:
        if src == dst:
            unit = _raw(src_unit)
            source = np.ndarray(shape, unit, staging, src_offset, src_strides)
            np.ndarray(shape, unit, buffers[buffer], dst_offset, dst_strides)[...] = source
            continue
        src_label, dst_label = BY_CODE[src].label, BY_CODE[dst].label
        values: Array = np.ndarray(shape, storage_dtype(src_label), staging, src_offset, src_strides)
        target: Array = np.ndarray(shape, storage_dtype(dst_label), buffers[buffer], dst_offset, dst_strides)
        target[...] = cast(src_label, dst_label, values)


def run_fills(plan: Plan, buffers: Sequence[Bytes]) -> None:
    """Write the plan's constants.

    Parameters
    ----------
    plan : Plan
    buffers : sequence of uint8 array
        One for each of ``plan.buffers``.

    Raises
    ------
    PlanError
        As :func:`run_copies`.
    """
    fills = plan.fills
    if not len(fills):
        return
    _check_buffers(plan, buffers)
    rows = zip(
        fills.buffer.tolist(),
        fills.dst_offset_bytes.tolist(),
        fills.unit.tolist(),
        _shapes(fills.count),
        _shapes(fills.dst_stride_bytes),
        fills.values,
        strict=True,
    )
    for buffer, offset, unit, shape, strides, value in rows:
        target: Array = np.ndarray(shape, _raw(unit), buffers[buffer], offset, strides)
        target[...] = np.frombuffer(value, _raw(unit))[0]


def run_loader(plan: Plan, buffers: Sequence[Bytes], load: Callable[[Materialised, Bytes], None]) -> None:
    """Run the engine's own loader on each materialised request, after all reads, copies and fills.

    They run in program order. What the plan itself writes later in program order than a materialised request, into
    the same elements, is in its buffer by then: it is kept, whatever the loader writes there.

    Parameters
    ----------
    plan : Plan
    buffers : sequence of uint8 array
        One for each of ``plan.buffers``.
    load : callable
        Given the request and the bytes of its box, writes into the buffer ``buffers[request.destination]``.

    Raises
    ------
    PlanError
        As :func:`run_copies`.
    """
    _check_buffers(plan, buffers)
    for row in sorted(plan.materialised, key=lambda row: row.order):
        views = _written_by(plan, row.later, buffers)
        kept = [view.copy() for view in views]
        load(row, buffers[row.buffer])
        for view, values in zip(views, kept, strict=True):
            view[...] = values


def _written_by(plan: Plan, rows: Sequence[int], buffers: Sequence[Bytes]) -> list[Array]:
    """Views of the elements that some copies and constants of the read table write, after program order."""
    requests, fills, views = plan.requests, plan.fills, []
    for i in np.flatnonzero(np.isin(requests.origin, rows)).tolist():
        buffer = int(requests.buffer[i])
        bits = int(plan.buffers.bits[buffer])
        # packed elements go by the byte: their innermost dim is contiguous
        shape = [int(c[i]) for c in requests.count]
        strides = [int(s[i]) * bits // 8 for s in requests.stride]
        if bits < 8:
            shape[-1], strides[-1] = shape[-1] * bits // 8, 1
        first = int(requests.dst_offset[i]) * bits // 8
        views.append(np.ndarray(shape, _raw(max(bits // 8, 1)), buffers[buffer], first, strides))
    for i in np.flatnonzero(np.isin(fills.request, rows)).tolist():
        shape, strides = [int(c[i]) for c in fills.count], [int(s[i]) for s in fills.dst_stride_bytes]
        unit = _raw(int(fills.unit[i]))
        views.append(np.ndarray(shape, unit, buffers[int(fills.buffer[i])], int(fills.dst_offset_bytes[i]), strides))
    return views


def execute(
    plan: Plan, sources: Mapping[str, Sequence[Bytes]], buffers: Sequence[Bytes], *, staging: Bytes | None = None
) -> list[Bytes]:
    """Run a whole plan on arrays that stand for the holders' memory.

    Parameters
    ----------
    plan : Plan
    sources : mapping of holder name to sequence of uint8 array
        The bytes of each region of each of ``plan.holders``.
    buffers : sequence of uint8 array
        The read table's buffers, or all of ``plan.buffers``; what is missing of the latter is allocated.
    staging : uint8 array, optional
        The staging arena; allocated if absent.

    Returns
    -------
    list of uint8 array
        One for each of ``plan.buffers``.

    Raises
    ------
    PlanError
        A holder, region or buffer is missing, or is shorter than the tables say.

    Examples
    --------
    >>> from reshard.planner import Buffer, Holder, ReadRequest, ReadTable, Shard, ShardPart, ShardTable, plan
    >>> rows = np.arange(8, dtype=np.uint8).reshape(4, 2)
    >>> parts = [
    ...     ShardPart.from_shards(Holder("top"), [Shard("w", "uint8", (4, 2), (0, 0), (2, 2))], [4]),
    ...     ShardPart.from_shards(Holder("end"), [Shard("w", "uint8", (4, 2), (2, 0), (4, 2))], [4]),
    ... ]
    >>> column = ReadRequest("w", (4, 2), "uint8", (0, 1), (1, 1), (4, 1), 0, 0, (1, 0))
    >>> made = plan(ShardTable(parts), ReadTable.build([Buffer("p", (4,), "uint8")], [column]))
    >>> execute(made, {"top": [rows[:2].reshape(-1)], "end": [rows[2:].reshape(-1)]}, [np.zeros(4, np.uint8)])[0]
    array([1, 3, 5, 7], dtype=uint8)
    """
    targets = list(buffers)
    targets += [np.zeros(n, np.uint8) for n in plan.buffer_bytes[len(targets) :].tolist()]
    _check_buffers(plan, targets)
    regions = [_regions(plan, number, sources) for number in range(len(plan.holders))]
    arena = np.zeros(plan.staging_bytes, np.uint8) if staging is None else staging
    _check_bytes("the staging arena", arena, plan.staging_bytes)
    for wave in range(plan.n_waves):
        _read(plan, wave, regions, targets, arena)
        if wave:
            run_copies(plan, wave - 1, arena, targets)
    if plan.n_waves:
        run_copies(plan, plan.n_waves - 1, arena, targets)
    run_fills(plan, targets)
    return targets


def _read(plan: Plan, wave: int, regions: Sequence[Sequence[Bytes]], targets: Sequence[Bytes], arena: Bytes) -> None:
    """Do what a transport does with the rows of one wave."""
    rows = plan.rows(wave)
    columns = zip(
        rows.holder.tolist(),
        rows.region.tolist(),
        rows.src_offset_bytes.tolist(),
        rows.dst_buffer.tolist(),
        rows.dst_offset_bytes.tolist(),
        _shapes((rows.count, rows.run_bytes)),
        _shapes((rows.src_stride_bytes,), 1),
        _shapes((rows.dst_stride_bytes,), 1),
        strict=True,
    )
    for holder, region, src_offset, buffer, dst_offset, shape, src_strides, dst_strides in columns:
        source: Bytes = np.ndarray(shape, np.uint8, regions[holder][region], src_offset, src_strides)
        target = arena if buffer < 0 else targets[buffer]
        np.ndarray(shape, np.uint8, target, dst_offset, dst_strides)[...] = source


def _shapes(columns: Sequence[Int64], last: Int64 | int | None = None) -> Iterator[tuple[int, ...]]:
    """Turn dim columns, and one more innermost column or constant, into a tuple a row."""
    dims = [column.tolist() for column in columns]
    if last is not None:
        n_rows = len(dims[0]) if dims else len(np.atleast_1d(last))
        dims.append([last] * n_rows if isinstance(last, int) else last.tolist())
    return zip(*dims, strict=True)


def _raw(unit_bytes: int) -> np.dtype[np.generic]:
    """Return a dtype that moves units of so many bytes unchanged."""
    if unit_bytes in (1, 2, 4, 8):
        return np.dtype(f"u{unit_bytes}")
    return np.dtype(f"V{unit_bytes}")


def _regions(plan: Plan, number: int, sources: Mapping[str, Sequence[Bytes]]) -> Sequence[Bytes]:
    name, sizes = plan.holders[number].name, plan.region_bytes[number].tolist()
    found = sources.get(name)
    if found is None or len(found) < len(sizes):
        raise PlanError(
            f"holder {name!r}: got {'no' if found is None else len(found)} regions, expected {len(sizes)}",
            got=None if found is None else len(found),
            expected=len(sizes),
        )
    for region, (array, size) in enumerate(zip(found, sizes, strict=False)):
        _check_bytes(f"region {region} of holder {name!r}", array, size)
    return found


def _check_buffers(plan: Plan, buffers: Sequence[Bytes]) -> None:
    if len(buffers) != len(plan.buffers):
        raise PlanError(
            f"got {len(buffers)} buffers, expected {len(plan.buffers)}: one for each of plan.buffers",
            got=len(buffers),
            expected=len(plan.buffers),
        )
    for number, (array, size) in enumerate(zip(buffers, plan.buffer_bytes.tolist(), strict=True)):
        if array.nbytes < size or array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            _check_bytes(f"buffer {plan.buffers.name(number)!r}", array, size)


def _check_bytes(what: str, array: Bytes, n_bytes: int) -> None:
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise PlanError(
            f"{what}: got {array.dtype} of shape {array.shape}, expected a contiguous row of uint8",
            got=array.dtype,
            expected=np.uint8,
        )
    if array.nbytes < n_bytes:
        raise PlanError(f"{what}: got {array.nbytes} bytes, expected {n_bytes}", got=array.nbytes, expected=n_bytes)
