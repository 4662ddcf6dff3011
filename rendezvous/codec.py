"""How are records and descriptions written down? Frozen dataclasses as JSON, by their declared types.

Bytes are hex, arrays hex of their little-endian words, enums their values, tuples lists. Decoding builds each dataclass
through its constructor, so its own checks run; a field that the writer did not know yet takes its default, one that
this reader does not know any more is passed over. This is the form of records in Redis and of ``Describe``.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Hashable, ItemsView, Mapping
from enum import Enum
from functools import cache
from typing import Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from reshard.rendezvous.errors import RendezvousError

__all__ = ["decode", "encode", "to_plain"]

T = TypeVar("T")
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def encode(value: object) -> bytes:
    """Encode a dataclass as JSON bytes."""
    return json.dumps(to_plain(value), separators=(",", ":"), ensure_ascii=False).encode()


def to_plain(value: object) -> Json:
    """Turn a dataclass into JSON's own types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes().hex()
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field: to_plain(getattr(value, field)) for field in _fields(type(value))}
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode(kind: type[T], blob: bytes) -> T:
    """Decode JSON bytes into a dataclass of type `kind`.

    Raises
    ------
    RendezvousError
        The bytes are no such record.
    """
    try:
        return cast("T", _decoder(cast("Hashable", kind))(json.loads(blob)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RendezvousError(f"these {len(blob)} bytes are no {kind.__name__}: {error}") from error


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _decoder(kind: Hashable) -> Callable[[Json], object]:
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        parts = {name: _decoder(hints[name]) for name in _fields(kind)}
        return lambda value: kind(**{name: parts[name](item) for name, item in _members(value) if name in parts})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: kind(value)
    if kind is bytes:
        return lambda value: bytes.fromhex(cast("str", value))
    if origin is tuple:
        item = _decoder(args[0])
        return lambda value: tuple(item(entry) for entry in cast("list[Json]", value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        item = _decoder(args[1])
        return lambda value: {key: item(entry) for key, entry in cast("dict[str, Json]", value).items()}
    if origin is np.ndarray:
        dtype = np.dtype(get_args(args[1])[0])
        little = dtype.newbyteorder("<")
        return lambda value: _frozen(np.frombuffer(bytes.fromhex(cast("str", value)), little).astype(dtype))
    if origin in (Union, types.UnionType):
        inner = _decoder(next(arg for arg in args if arg is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is Literal or kind in (str, int, float, bool):
        return lambda value: value
    raise TypeError(f"cannot decode {kind!r}")


def _members(value: Json) -> ItemsView[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return value.items()


def _frozen(column: np.ndarray[tuple[int], np.dtype[np.generic]]) -> object:
    column.flags.writeable = False
    return column
