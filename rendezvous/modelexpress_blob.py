"""The JSON of a ModelExpress blob, checked: one object a tensor, one row a shard, and nothing believed.

1. `parse_blob` refuses what is not one JSON object of the schema, and duplicate keys at any depth.
2. `Rows` turns the tensors into lists, one entry a tensor and one row a shard, each value of its type and within its
   bounds. A missing or wrong value is named by its place, ``tensors[3].shards[0].addr``.
3. `read_stamp` reads who, which step and how many tensors by looking at the two ends and counting, without building
   anything.

Optional keys are absent and never null; keys that are not known are ignored, as the format grows by optional keys.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from reshard.planner.dtypes import dtype
from reshard.planner.errors import ConflictError, DTypeError
from reshard.planner.geometries import MAX_NDIM
from reshard.rendezvous.errors import InvalidRequestError
from reshard.rendezvous.limits import (
    MAX_DIM_ELEMS,
    MAX_ENDPOINT_BYTES,
    MAX_ROWS,
    MAX_TABLE_BYTES,
    check_bytes,
    check_int,
    check_name,
)

__all__ = [
    "MAX_ADDRESS",
    "MAX_STEP",
    "SCHEMA",
    "TORCH",
    "Rows",
    "Stamp",
    "agent_metadata_of",
    "parse_blob",
    "read_stamp",
    "stamp_of",
]

SCHEMA = "mx.reshard.shard_table.v1"
TORCH = "torch."

MAX_STEP = (1 << 63) - 1
MAX_ADDRESS = (1 << 64) - 1
_MAX_DEVICE = (1 << 31) - 1
_TEXT = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_HEAD = re.compile(
    rb'\{"schema": "' + re.escape(SCHEMA.encode()) + rb'", "agent_name": (' + _TEXT + rb'), "metadata_endpoint": ('
    + _TEXT + rb'), "agent_meta_b64": "[A-Za-z0-9+/=]*", "tensors": \['
)  # fmt: skip
_TAIL = re.compile(rb'\](?:, "publisher_step": (0|[1-9][0-9]{0,18}))?\}')
_TAIL_BYTES = 48
_TOP_KEYS = tuple(f'"{key}": '.encode() for key in ("schema", "metadata_endpoint", "agent_meta_b64", "tensors"))


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a publication says of itself, its tensors apart.

    Attributes
    ----------
    agent_name, metadata_endpoint : str
        The NIXL agent, and ``host:port`` of its listener or "".
    publisher_step : int or None
        The training step; None is unknown and never step 0.
    n_tensors : int
        Entries of the table.
    """

    agent_name: str
    metadata_endpoint: str
    publisher_step: int | None
    n_tensors: int


def read_stamp(blob: bytes) -> Stamp:
    """Read who published, which step, and how many tensors, without building the table.

    A blob laid out as ModelExpress's client writes it is not parsed: its two ends are read and its entries counted. The
    table is not looked at and not vouched for. Any other layout is parsed, with all that `read_publication` says about
    its top level.

    Parameters
    ----------
    blob : bytes
        UTF-8 JSON.

    Raises
    ------
    InvalidRequestError
        Not such a blob; names the field.
    """
    check_bytes("blob", blob, at_least=1, at_most=MAX_TABLE_BYTES)
    head = _HEAD.match(blob)
    tail_at = blob.rfind(b"]", max(0, len(blob) - _TAIL_BYTES))
    tail = _TAIL.fullmatch(blob, tail_at) if tail_at >= 0 else None
    # In valid JSON a key's quotes are real quotes, so these byte strings occur as keys and never inside a text.
    if head is None or tail is None or any(blob.count(key) != 1 for key in _TOP_KEYS):
        return stamp_of(parse_blob(blob))
    n_tensors = blob.count(b'{"name": ', head.end())
    if n_tensors != blob.count(b'"full_shape": ') or blob.count(b'"publisher_step": ') != (tail[1] is not None):
        return stamp_of(parse_blob(blob))
    return Stamp(
        check_name("agent_name", _text("agent_name", head[1])),
        check_name("metadata_endpoint", _text("metadata_endpoint", head[2]), empty_ok=True),
        None if tail[1] is None else check_int("publisher_step", int(tail[1]), at_least=0, at_most=MAX_STEP),
        n_tensors,
    )


def parse_blob(blob: bytes) -> dict[str, object]:
    """Return the blob's JSON object, of the right schema and without duplicate keys."""
    check_bytes("blob", blob, at_least=1, at_most=MAX_TABLE_BYTES)
    try:
        payload = json.loads(blob.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise InvalidRequestError("blob", "nested far too deep") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError("blob", f"not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError("blob", f"not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise InvalidRequestError("blob", f"expected a JSON object, got {type(payload).__name__}")
    schema = _required(payload, "schema", "schema")
    if schema != SCHEMA:
        raise InvalidRequestError("schema", f"got {schema!r:.80}, expected {SCHEMA!r}")
    return payload


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for index, name in enumerate(names) if name in names[:index])
        raise InvalidRequestError("blob", f"duplicate key {repeated!a:.80}")
    return result


def _text(field: str, literal: bytes) -> str:
    try:
        value: object = json.loads(literal)
    except ValueError as error:
        raise InvalidRequestError(field, f"not JSON: {error}") from None
    return str(value)


def agent_metadata_of(payload: dict[str, object]) -> bytes:
    """Return the NIXL agent's metadata of a parsed blob."""
    encoded = _required(payload, "agent_meta_b64", "agent_meta_b64")
    if not isinstance(encoded, str):
        raise InvalidRequestError("agent_meta_b64", f"expected text, got {type(encoded).__name__}")
    try:
        metadata = base64.b64decode(encoded.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise InvalidRequestError("agent_meta_b64", f"not base 64: {error}") from None
    return check_bytes("agent_meta_b64", metadata, at_most=MAX_ENDPOINT_BYTES)


def stamp_of(payload: dict[str, object]) -> Stamp:
    """Return the stamp of a parsed blob."""
    step: int | None = None
    if "publisher_step" in payload:
        step = check_int("publisher_step", payload["publisher_step"], at_least=0, at_most=MAX_STEP)
    return Stamp(
        check_name("agent_name", _required(payload, "agent_name", "agent_name")),
        check_name("metadata_endpoint", payload.get("metadata_endpoint", ""), empty_ok=True),
        step,
        len(_list("tensors", _required(payload, "tensors", "tensors"))),
    )


def _required(mapping: dict[str, object], key: str, field: str) -> object:
    if key not in mapping:
        raise InvalidRequestError(field, "missing")
    return mapping[key]


def _list(field: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise InvalidRequestError(field, f"expected a list, got {type(value).__name__}")
    if len(value) > MAX_ROWS:
        raise InvalidRequestError(field, f"{len(value)} entries, at most {MAX_ROWS}")
    return value


Where = Callable[[int], str]


def _objects(values: Sequence[object], where: Where) -> list[dict[str, object]]:
    objects: list[dict[str, object]] = []
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidRequestError(where(index), f"expected an object, got {type(value).__name__}")
        objects.append(value)
    return objects


def _values(objects: list[dict[str, object]], key: str, where: Where) -> list[object]:
    for index, each in enumerate(objects):
        if key not in each:
            raise InvalidRequestError(f"{where(index)}.{key}", "missing")
    return [each[key] for each in objects]


def _ints(values: Iterable[object], where: Where, most: int) -> list[int]:
    return [
        value if type(value) is int and 0 <= value <= most else check_int(where(index), value, at_least=0, at_most=most)
        for index, value in enumerate(values)
    ]


def _texts(values: Iterable[object], where: Where) -> list[str]:
    return [check_name(where(index), value) for index, value in enumerate(values)]


def _dims(values: Iterable[object], where: Where) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for index, value in enumerate(values):
        sizes = _list(where(index), value)
        if len(sizes) > MAX_NDIM:
            raise InvalidRequestError(where(index), f"rank {len(sizes)}, at most {MAX_NDIM}")
        rows.append(tuple(_ints(sizes, lambda dim, index=index: f"{where(index)}[{dim}]", MAX_DIM_ELEMS)))  # type: ignore[misc]
    return rows


class Rows:
    """A blob's tensors and shards as checked lists: one entry a tensor, and one row a shard."""

    def __init__(self, entries: object) -> None:
        tensors = _objects(_list("tensors", entries), lambda i: f"tensors[{i}]")
        names = _texts(_values(tensors, "name", _entry), lambda i: f"tensors[{i}].name")
        labels = _values(tensors, "dtype", _entry)
        sizes = _ints(_values(tensors, "elsize", _entry), lambda i: f"tensors[{i}].elsize", 1 << 10)
        shapes = _dims(_values(tensors, "full_shape", _entry), lambda i: f"tensors[{i}].full_shape")
        self.names: list[str] = []
        self.dtypes: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        index_of: dict[str, int] = {}
        number: list[int] = []
        for i, name in enumerate(names):
            label = _dtype_label(name, labels[i], sizes[i], i)
            known = index_of.setdefault(name, len(index_of))
            number.append(known)
            if known == len(self.names):
                self.names.append(name)
                self.dtypes.append(label)
                self.shapes.append(shapes[i])
            elif (label, shapes[i]) != (self.dtypes[known], self.shapes[known]):
                raise ConflictError(
                    f"tensors[{i}]: tensor {name!r} is {label} {shapes[i]}; expected {self.dtypes[known]} "
                    f"{self.shapes[known]} as in its first entry",
                    holders=(),
                    tensor=name,
                    got=(label, shapes[i]),
                    expected=(self.dtypes[known], self.shapes[known]),
                )
        lists = [_list(f"tensors[{i}].shards", v) for i, v in enumerate(_values(tensors, "shards", _entry))]
        counts = [len(shards) for shards in lists]
        if sum(counts) > MAX_ROWS:
            raise InvalidRequestError("tensors", f"{sum(counts)} shards, at most {MAX_ROWS}")
        first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

        def where(row: int) -> str:
            entry = int(np.searchsorted(first, row, side="right")) - 1
            return f"tensors[{entry}].shards[{row - int(first[entry])}]"

        def at(key: str) -> Where:
            return lambda row: f"{where(row)}.{key}"

        shards = _objects(list(chain.from_iterable(lists)), where)
        self.tensor_id = np.repeat(np.array(number, np.int64), counts)
        self.agents = _texts(_values(shards, "agent_name", where), at("agent_name"))
        self.devices = _ints(_values(shards, "device_id", where), at("device_id"), _MAX_DEVICE)
        self.addresses = _ints(_values(shards, "addr", where), at("addr"), MAX_ADDRESS)
        self.offsets = _dims(_values(shards, "shard_offset", where), at("shard_offset"))
        self.sizes = _dims(_values(shards, "shape", where), at("shape"))
        self.digests = [
            check_name(at("digest")(r), s["digest"]) if "digest" in s else None for r, s in enumerate(shards)
        ]
        self.n_bytes: list[int] = []
        for row, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if len(offset) != len(size):
                raise InvalidRequestError(
                    at("shape")(row), f"rank {len(size)}, expected {len(offset)} as of shard_offset"
                )
            n_bytes = dtype(self.dtypes[int(self.tensor_id[row])]).bits // 8
            for extent in size:
                n_bytes *= extent
            if self.addresses[row] + n_bytes > MAX_ADDRESS:
                raise InvalidRequestError(at("addr")(row), f"{n_bytes} bytes from there wrap the address space")
            self.n_bytes.append(n_bytes)


def _entry(index: int) -> str:
    return f"tensors[{index}]"


def _dtype_label(name: str, label: object, elsize: int, index: int) -> str:
    if not isinstance(label, str):
        raise InvalidRequestError(f"tensors[{index}].dtype", f"expected text, got {type(label).__name__}")
    known = dtype(label.removeprefix(TORCH))
    if known.bits != 8 * elsize:
        raise DTypeError(
            f"tensors[{index}]: tensor {name!r} of {label} has an elsize of {elsize}; expected {known.bits / 8:g}",
            tensor=name,
            got=elsize,
            expected=known.bits / 8,
        )
    return known.label
