"""ModelExpress's shard-table blobs (``mx.reshard.shard_table.v1``), read into tables and written from them.

A trainer rank that publishes for ModelExpress puts one JSON object into its metadata: its NIXL agent (metadata in base
64, name, ``host:port``), optionally the training step, and for each tensor its name, ``torch.`` dtype, element size,
global shape and shards, each with agent, device, address, offset, shape and optionally a content digest. So a trainer
that knows nothing of `reshard` can be read, and one that does can serve ModelExpress's receivers. Fields: ModelExpress
0.7.0, ``refit/reshard/rendezvous.py``.

1. `read_publication` checks a blob whole and makes a `ShardPart` of each agent's shards.
2. Addresses become regions: shards whose bytes overlap share one, so no region spans two registrations that merely
   touch.
3. `write_publication` writes what ModelExpress's own client would, byte for byte.
4. `read_stamp` reads who, which step and how many tensors without building anything.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.planner.dictionaries import TensorDict
from reshard.planner.dtypes import dtype
from reshard.planner.errors import DTypeError, TableError
from reshard.planner.geometries import GeometryDict
from reshard.planner.shards import Holder, Memory, ShardPart
from reshard.planner.tables import ShardTable
from reshard.rendezvous.errors import InvalidRequestError
from reshard.rendezvous.limits import MAX_ENDPOINT_BYTES, MAX_REGIONS, check_bytes, check_int, check_name
from reshard.rendezvous.modelexpress_blob import (
    MAX_ADDRESS,
    MAX_STEP,
    SCHEMA,
    TORCH,
    Rows,
    Stamp,
    agent_metadata_of,
    parse_blob,
    read_stamp,
    stamp_of,
)

__all__ = ["SCHEMA", "Publication", "PublishedTable", "Stamp", "read_publication", "read_stamp", "write_publication"]


@dataclass(frozen=True, eq=False, slots=True)
class PublishedTable:
    """One agent's shards, where they are, and what they contain.

    Attributes
    ----------
    part : ShardPart
        N rows; the holder is named for the agent.
    region_bases : uint64[R]
        Address of each region of `part`.
    digests : tuple of (str or None)
        ModelExpress's content digest of each row, None where it gave none; () where it gave none at all.

    Raises
    ------
    TableError
        The lengths do not fit `part`, or a region wraps around the address space.
    """

    part: ShardPart
    region_bases: npt.NDArray[np.uint64]
    digests: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        holder, n_regions = self.part.holder.name, len(self.part.region_bytes)
        bases = self.region_bases
        if bases.dtype != np.uint64 or bases.shape != (n_regions,):
            raise TableError(
                f"agent {holder!r}: region_bases are {bases.dtype}{list(bases.shape)}; expected uint64[{n_regions}]",
                got=bases.shape,
                expected=(n_regions,),
                where=holder,
            )
        room = np.uint64(MAX_ADDRESS) - bases
        wraps = self.part.region_bytes.astype(np.uint64) > room
        if wraps.any():
            raise TableError(f"agent {holder!r}: region {int(wraps.argmax())} wraps the address space", where=holder)
        if len(self.digests) not in (0, len(self.part)):
            raise TableError(
                f"agent {holder!r}: {len(self.digests)} digests; expected none or {len(self.part)}",
                got=len(self.digests),
                expected=len(self.part),
                where=holder,
            )


@dataclass(frozen=True, eq=False, slots=True)
class Publication:
    """One trainer rank's blob.

    Attributes
    ----------
    agent_name, metadata_endpoint : str
        The NIXL agent that publishes, and ``host:port`` of its listener or "".
    agent_metadata : bytes
        The agent's own metadata, opaque.
    tables : tuple of PublishedTable
        One for each agent that owns shards (nearly always the publisher alone), in order of first appearance; never
        none when read.
    publisher_step : int or None
        The training step whose weights these are; None is unknown and never step 0.
    """

    agent_name: str
    metadata_endpoint: str
    agent_metadata: bytes
    tables: tuple[PublishedTable, ...]
    publisher_step: int | None = None


def read_publication(blob: bytes, *, host: str = "", memory: Memory = "vram", replica_group: int = -1) -> Publication:
    """Check a blob and make tables of it.

    Parameters
    ----------
    blob : bytes
        UTF-8 JSON.
    host, memory : str
        For the holders; the format says neither.
    replica_group : int
        For every row. -1 claims nothing, so that two ranks with one box are a conflict when planned. ModelExpress's own
        receiver takes shards of equal boxes for replicas unasked; to do so too, claim one group (0, say) for all
        publications.

    Returns
    -------
    Publication
        All tables share one tensor dictionary, in the blob's order.

    Raises
    ------
    InvalidRequestError
        Not such a blob; names the field, ``tensors[3].shards[0].addr``.
    TableError, ConflictError, DTypeError
        A table that the planner refuses, an agent on two devices, or a tensor with two dtypes or shapes.
    """
    payload = parse_blob(blob)
    stamp = stamp_of(payload)
    agent_metadata = agent_metadata_of(payload)
    tables = _tables(Rows(payload["tensors"]), stamp.agent_name, host, memory, replica_group)
    return Publication(stamp.agent_name, stamp.metadata_endpoint, agent_metadata, tables, stamp.publisher_step)


def write_publication(publication: Publication, *, empty_entries: bool = False) -> bytes:
    """Write the blob that ModelExpress's client would write.

    Parameters
    ----------
    publication : Publication
        Tensors are written in dictionary order, each one's shards table by table, row by row.
    empty_entries : bool
        Whether to write also the dictionary's tensors that have no shard, which a receiver of ModelExpress counts as
        published.

    Returns
    -------
    bytes
        ASCII JSON.

    Raises
    ------
    InvalidRequestError
        A name or the step is out of bounds.
    DTypeError
        A dtype without whole bytes.
    TableError
        Named axes, which the format cannot say, so that a reader would take the dims for another order.
    ConflictError
        The tables disagree about a tensor.
    """
    check_name("agent_name", publication.agent_name)
    check_bytes("agent_metadata", publication.agent_metadata, at_most=MAX_ENDPOINT_BYTES)
    check_name("metadata_endpoint", publication.metadata_endpoint, empty_ok=True)
    ShardTable(table.part for table in publication.tables)  # refuses tables that disagree
    entries: dict[str, dict[str, object]] = {}
    shards: dict[str, list[dict[str, object]]] = {}
    for table in publication.tables:
        _add_entries(entries, shards, table.part.tensors)
        _add_shards(shards, table)
    payload: dict[str, object] = {
        "schema": SCHEMA,
        "agent_name": publication.agent_name,
        "metadata_endpoint": publication.metadata_endpoint,
        "agent_meta_b64": base64.b64encode(publication.agent_metadata).decode("ascii"),
        "tensors": [
            {**entry, "shards": shards[name]} for name, entry in entries.items() if empty_entries or shards[name]
        ],
    }
    if publication.publisher_step is not None:
        payload["publisher_step"] = check_int(
            "publisher_step", publication.publisher_step, at_least=0, at_most=MAX_STEP
        )
    return json.dumps(payload).encode("utf-8")


def _tables(rows: Rows, publisher: str, host: str, memory: Memory, replica_group: int) -> tuple[PublishedTable, ...]:
    tensors = TensorDict.build(rows.names, rows.dtypes, rows.shapes)
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    geometry_id = np.array(
        [boxes.setdefault((o, s), len(boxes)) for o, s in zip(rows.offsets, rows.sizes, strict=True)], np.int64
    )
    geometries = GeometryDict.build((o, tuple(a + b for a, b in zip(o, s, strict=True))) for o, s in boxes)
    # A publication without shards has an empty table of its publisher, which keeps the dictionary.
    numbers: dict[str, int] = {} if rows.agents else {publisher: 0}
    agent = np.array([numbers.setdefault(name, len(numbers)) for name in rows.agents], np.int64)
    addresses = np.array(rows.addresses, np.uint64)
    n_bytes = np.array(rows.n_bytes, np.uint64)
    tables = []
    for name, number in numbers.items():
        mine = np.flatnonzero(agent == number)
        devices = sorted({rows.devices[row] for row in mine.tolist()})
        if len(devices) > 1:
            raise TableError(
                f"agent {name!r} owns shards on devices {devices}; a holder has one",
                got=devices,
                expected=1,
                where=name,
            )
        bases, lengths, region = _regions(addresses[mine], n_bytes[mine], name)
        part = ShardPart(
            Holder(name, host, memory, devices[0] if devices else 0),
            tensors,
            geometries,
            rows.tensor_id[mine],
            geometry_id[mine],
            region,
            (addresses[mine] - bases[region]).astype(np.int64),
            np.full(len(mine), replica_group, np.int64),
            lengths,
        )
        digests = tuple(rows.digests[row] for row in mine.tolist())
        tables.append(PublishedTable(part, bases, digests if any(d is not None for d in digests) else ()))
    return tuple(tables)


def _regions(
    address: npt.NDArray[np.uint64], n_bytes: npt.NDArray[np.uint64], agent: str
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Bases, lengths in bytes, and each shard's region: the unions of extents that share a byte."""
    if not len(address):
        return address, np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.lexsort((n_bytes, address))
    start, stop = address[order], address[order] + n_bytes[order]
    reach = np.maximum.accumulate(stop)
    opens = np.ones(len(order), np.bool_)
    opens[1:] = start[1:] >= reach[:-1]
    number = np.cumsum(opens) - 1
    bases = start[opens]
    if len(bases) > MAX_REGIONS:
        raise InvalidRequestError(
            "tensors", f"agent {agent!r} has {len(bases)} separate regions, at most {MAX_REGIONS}"
        )
    last = np.append(np.flatnonzero(opens)[1:], len(order)) - 1
    lengths = reach[last] - bases
    if int(lengths.max()) > np.iinfo(np.int64).max:
        raise InvalidRequestError("tensors", f"agent {agent!r} has a region of {int(lengths.max())} bytes")
    region = np.empty(len(order), np.int64)
    region[order] = number
    return bases, lengths.astype(np.int64), region


def _add_entries(
    entries: dict[str, dict[str, object]], shards: dict[str, list[dict[str, object]]], tensors: TensorDict
) -> None:
    if tensors.axes:
        name = tensors.name(min(tensors.axes))
        raise TableError(
            f"tensor {name!r} has stored axes {tensors.axes[min(tensors.axes)]}, which {SCHEMA} cannot say", tensor=name
        )
    for index, name in enumerate(tensors.names_list):
        if name in entries:
            continue
        known = dtype(tensors.dtype_label(index))
        if known.bits % 8:
            raise DTypeError(f"tensor {name!r}: {known.label} has no whole bytes, which {SCHEMA} needs", tensor=name)
        entries[name] = {
            "name": name,
            "dtype": f"{TORCH}{known.label}",
            "elsize": known.bits // 8,
            "full_shape": list(tensors.shape_of(index)),
        }
        shards[name] = []


def _add_shards(shards: dict[str, list[dict[str, object]]], table: PublishedTable) -> None:
    part, names = table.part, table.part.tensors.names_list
    # A shard without bytes may name any region: its address says nothing.
    inside = (part.region >= 0) & (part.region < len(table.region_bases))
    bases = np.append(table.region_bases, np.uint64(0))[np.where(inside, part.region, len(table.region_bases))]
    addresses = (bases + part.offset_bytes.astype(np.uint64)).tolist()
    boxes = list(zip(*_box_lists(part.geometries), strict=True))
    digests: Sequence[str | None] = table.digests or (None,) * len(part)
    rows = zip(part.tensor_id.tolist(), part.geometry_id.tolist(), addresses, digests, strict=True)
    for tensor, geometry, address, digest in rows:
        start, shape = boxes[geometry]
        encoded: dict[str, object] = {
            "agent_name": part.holder.name,
            "device_id": part.holder.device,
            "addr": address,
            "shard_offset": start,
            "shape": shape,
        }
        if digest is not None:
            encoded["digest"] = digest
        shards[names[tensor]].append(encoded)


def _box_lists(geometries: GeometryDict) -> tuple[list[list[int]], list[list[int]]]:
    """Start and shape of each geometry, without the padding."""
    n_dims = geometries.n_dims
    start = np.stack(geometries.start, axis=1) if n_dims else np.zeros((len(geometries), 0), np.int64)
    stop = np.stack(geometries.stop, axis=1) if n_dims else start
    ranks = geometries.ndim.tolist()
    starts = [row[n_dims - rank :] for row, rank in zip(start.tolist(), ranks, strict=True)]
    shapes = [row[n_dims - rank :] for row, rank in zip((stop - start).tolist(), ranks, strict=True)]
    return starts, shapes
