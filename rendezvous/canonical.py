"""Records as bytes, one spelling each, so that ranks can compare records by comparing bytes.

The form is JSON in ASCII with sorted keys and no white space. It holds objects, lists, text, signed 64-bit
integers, booleans and null, and one value has one spelling:

1. `canonical_record` writes dataclass instances as objects, enums by their value (checked in its turn) and
   tuples as lists. It refuses everything else, and stops as soon as the bytes would exceed the caller's
   bound, so that its work is bounded by it.
2. `decode_record` refuses duplicate keys first, then anything that `canonical_record` would not have written.
3. `contract_digest` is SHA-256 of the canonical bytes.

Every refusal is a `ContractError` whose field is the path of the value, ``$.shape[1]``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TypeAlias

from reshard.rendezvous.errors import ContractError, ContractTypeError

__all__ = [
    "MAX_ITEMS",
    "MAX_NESTING",
    "MAX_RECORD_BYTES",
    "Plain",
    "canonical_record",
    "check_max_bytes",
    "contract_digest",
    "decode_record",
]

MAX_RECORD_BYTES = 1 << 20
"""The most that any caller may allow one record."""
MAX_NESTING = 16
"""Objects and lists within one another."""
MAX_ITEMS = 4096
"""Entries of one object or list."""

_INT64_MIN = -(1 << 63)
_INT64_MAX = (1 << 63) - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
_RECORD = "canonical record"

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | bool | None"
"""What a canonical record decodes to."""


def check_max_bytes(max_bytes: int) -> int:
    """Return `max_bytes` if it is an integer in [1, `MAX_RECORD_BYTES`].

    Raises
    ------
    ContractError
        It is not; a `ContractTypeError` when it is no `int` (a boolean is none).
    """
    if type(max_bytes) is not int:
        raise ContractTypeError(_RECORD, "max_bytes", f"{type(max_bytes).__name__} {max_bytes!r}", "int")
    if not 1 <= max_bytes <= MAX_RECORD_BYTES:
        raise ContractError(_RECORD, "max_bytes", str(max_bytes), f"an integer in [1, {MAX_RECORD_BYTES}]")
    return max_bytes


def canonical_record(value: object, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return the one JSON spelling of `value`.

    Parameters
    ----------
    value : object
        A dataclass instance, enum member, dict, list, tuple, str, int, bool or None, and these within one
        another. Subclasses of the built-in ones are other types.
    max_bytes : int
        The most bytes of the result, 1 to `MAX_RECORD_BYTES`.

    Returns
    -------
    bytes
        ASCII, at most `max_bytes` long.

    Raises
    ------
    ContractError
        "unsupported type" (floats, bytes and every other), a key that is not text, a "reference cycle",
        nesting over `MAX_NESTING`, over `MAX_ITEMS` entries in one object or list, an integer outside signed
        64 bits, text with lone surrogates (two spellings of one text would exist), more than `max_bytes`, or
        `max_bytes` itself.

    Examples
    --------
    >>> canonical_record({"b": (1, True), "a": None}, 64)
    b'{"a":null,"b":[1,true]}'
    """
    writer = _Writer(check_max_bytes(max_bytes))
    writer.write(value, "$", 0)
    return "".join(writer.parts).encode("ascii")


def decode_record(data: bytes, max_bytes: int = MAX_RECORD_BYTES) -> Plain:
    """Return the value of a canonical record.

    Parameters
    ----------
    data : bytes
        As written by `canonical_record`.
    max_bytes : int
        The most bytes to look at, 1 to `MAX_RECORD_BYTES`.

    Returns
    -------
    dict, list, str, int, bool or None
        Dataclasses come back as dicts, enums as their values, tuples as lists.

    Raises
    ------
    ContractError
        Not bytes, too long, not JSON, a duplicate key (before any other fault of the content), or any other
        spelling than the canonical one.

    Examples
    --------
    >>> decode_record(b'{"a":[1,2]}', 64)
    {'a': [1, 2]}
    """
    check_max_bytes(max_bytes)
    if type(data) is not bytes:
        raise ContractTypeError(_RECORD, "$", type(data).__name__, "bytes")
    if len(data) > max_bytes:
        raise ContractError(_RECORD, "$", f"{len(data)} bytes", f"at most {max_bytes}")
    try:
        value = json.loads(data.decode("ascii"), object_pairs_hook=_unique, parse_int=_integer)
    except ContractError:
        raise
    except RecursionError:
        raise ContractError(_RECORD, "$", "nesting far over the limit", f"at most {MAX_NESTING}") from None
    except ValueError as error:  # not ASCII, or not JSON
        raise ContractError(_RECORD, "$", f"no canonical JSON: {error}", "ASCII JSON") from None
    # One rule for everything else: whatever is canonical comes out as it went in, and the writer says what is
    # wrong with the rest.
    again = canonical_record(value, MAX_RECORD_BYTES)
    if again != data:
        at = next(
            (i for i, (a, b) in enumerate(zip(again, data, strict=False)) if a != b),
            min(len(again), len(data)),
        )
        raise ContractError(
            _RECORD,
            "$",
            f"{data[at : at + 16]!r} at byte {at}",
            f"{again[at : at + 16]!r}, the canonical spelling",
        )
    plain: Plain = value
    return plain


def contract_digest(value: object, max_bytes: int = MAX_RECORD_BYTES) -> str:
    """Return SHA-256 of `value`'s canonical record, 64 lower-case hex digits.

    Raises
    ------
    ContractError
        As `canonical_record`.

    Examples
    --------
    >>> contract_digest({})[:8]
    '44136fa3'
    """
    return hashlib.sha256(canonical_record(value, max_bytes)).hexdigest()


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ContractError(_RECORD, f"$..{_shown(key)}", "a duplicate key", "each key once")
            seen.add(key)
    return result


def _shown(key: str) -> str:
    return key[:80].encode("ascii", "backslashreplace").decode("ascii")


def _integer(digits: str) -> int:
    # Longer than any int64: whatever its value, it is out of range, and converting it could take long.
    return int(digits) if len(digits) <= 20 else _INT64_MAX + 1


class _Writer:
    """Writes one record into `parts`, and gives up at the byte that exceeds the bound."""

    def __init__(self, max_bytes: int) -> None:
        self.parts: list[str] = []
        self.max_bytes = max_bytes
        self.left = max_bytes
        self.open_ids: set[int] = set()  # what is being written: all alive, so their ids are theirs

    def write(self, value: object, path: str, depth: int) -> None:
        """Write `value`, which lies within `depth` objects and lists."""
        if value is None:
            self._put("null", path)
        elif value is True or value is False:
            self._put("true" if value else "false", path)
        elif type(value) is int:
            if not _INT64_MIN <= value <= _INT64_MAX:
                raise ContractError(_RECORD, path, f"an integer of {value.bit_length()} bits", "signed 64 bits")
            self._put(str(value), path)
        elif type(value) is str:
            self._put_text(value, path)
        elif isinstance(value, Enum):
            with self._opened(value, path):
                self.write(value.value, path, depth)
        elif type(value) is dict:
            self._write_object(value, value, path, depth)
        elif type(value) is list or type(value) is tuple:
            self._write_list(value, path, depth)
        elif is_dataclass(value) and not isinstance(value, type):
            members: dict[object, object] = {field.name: getattr(value, field.name) for field in fields(value)}
            self._write_object(value, members, path, depth)
        else:
            raise ContractTypeError(
                _RECORD,
                path,
                f"unsupported type {type(value).__module__}.{type(value).__qualname__}",
                "dataclass, enum, dict, list, tuple, str, int, bool or None",
            )

    def _write_object(self, owner: object, members: dict[object, object], path: str, depth: int) -> None:
        self._check_container(len(members), path, depth, owner)
        keys: list[str] = []
        for key in members:
            if type(key) is not str:
                raise ContractTypeError(_RECORD, path, f"a key of type {type(key).__name__}", "text keys")
            keys.append(key)
        keys.sort()
        with self._opened(owner, path):
            self._put("{", path)
            for index, key in enumerate(keys):
                if index:
                    self._put(",", path)
                below = f"{path}.{_shown(key)}"
                self._put_text(key, below)
                self._put(":", below)
                self.write(members[key], below, depth + 1)
            self._put("}", path)

    def _write_list(self, entries: list[object] | tuple[object, ...], path: str, depth: int) -> None:
        self._check_container(len(entries), path, depth, entries)
        with self._opened(entries, path):
            self._put("[", path)
            for index, entry in enumerate(entries):
                if index:
                    self._put(",", path)
                self.write(entry, f"{path}[{index}]", depth + 1)
            self._put("]", path)

    def _check_container(self, n_items: int, path: str, depth: int, owner: object) -> None:
        if id(owner) in self.open_ids:  # before the nesting: a cycle is the better explanation
            raise ContractError(_RECORD, path, "a reference cycle", "a tree")
        if depth >= MAX_NESTING:
            raise ContractError(_RECORD, path, f"nesting over {MAX_NESTING}", f"at most {MAX_NESTING}")
        if n_items > MAX_ITEMS:
            raise ContractError(_RECORD, path, f"{n_items} items", f"at most {MAX_ITEMS} items")

    @contextmanager
    def _opened(self, owner: object, path: str) -> Iterator[None]:
        if id(owner) in self.open_ids:
            raise ContractError(_RECORD, path, "a reference cycle", "a tree")
        self.open_ids.add(id(owner))
        yield
        self.open_ids.remove(id(owner))

    def _put_text(self, text: str, path: str) -> None:
        if len(text) > self.left:  # before it is escaped: the bound is on work too
            self._too_long(path)
        if _SURROGATE.search(text):
            raise ContractError(_RECORD, path, "text with lone surrogates", "Unicode text")
        self._put(json.dumps(text), path)

    def _put(self, text: str, path: str) -> None:
        self.left -= len(text)
        if self.left < 0:
            self._too_long(path)
        self.parts.append(text)

    def _too_long(self, path: str) -> None:
        raise ContractError(_RECORD, path, f"more than {self.max_bytes} bytes", f"at most {self.max_bytes}")
