"""How large may each thing be that a peer can send? Bounds, and checks that name the field at fault.

Every type in :mod:`reshard.rendezvous.types` runs these checks when it is built, so the in-process rendezvous
and the gRPC service refuse the same things in the same words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from reshard.planner.geometries import MAX_NDIM as MAX_RANK
from reshard.rendezvous.errors import InvalidRequestError

__all__ = [
    "CHUNK_BYTES",
    "DIGEST_BYTES",
    "ID_BYTES",
    "MAX_CELLS",
    "MAX_DICT_ROWS",
    "MAX_DIM_ELEMS",
    "MAX_ENDPOINTS",
    "MAX_ENDPOINTS_BYTES",
    "MAX_ENDPOINT_BYTES",
    "MAX_EPOCH_JUMP",
    "MAX_MEMBERS",
    "MAX_MESSAGE_BYTES",
    "MAX_NAME_BYTES",
    "MAX_PATTERNS",
    "MAX_RANK",
    "MAX_REGIONS",
    "MAX_ROOTS",
    "MAX_ROOT_NAMES_BYTES",
    "MAX_ROWS",
    "MAX_SLOTS",
    "MAX_STEP",
    "MAX_TABLE_BYTES",
    "MAX_TIMEOUT_S",
    "MAX_TOPOLOGY_BYTES",
    "MAX_TTL_S",
    "MAX_UPLOADS_BYTES",
    "check_bytes",
    "check_choice",
    "check_digest",
    "check_id",
    "check_int",
    "check_name",
    "check_names",
    "check_patterns",
    "check_sequence",
    "check_timeout",
    "check_total",
    "check_ttl",
]

MAX_NAME_BYTES = 4096  # UTF-8 bytes of any name: tensors, slots, members, models
MAX_DIM_ELEMS = 2**40  # elements along one dim
MAX_ROWS = 10**7  # rows of a table part
MAX_DICT_ROWS = 2**20  # tensors or boxes of a dictionary
MAX_CELLS = 2**26  # values of all columns of a message together: constant columns cost nothing on the wire
MAX_REGIONS = 65536  # regions of a holder
MAX_SLOTS = 16384  # slots of a version
MAX_MEMBERS = 16384  # ranks of a group
MAX_ENDPOINTS = 16  # transports that a worker offers
MAX_ENDPOINT_BYTES = 1 << 20  # one transport's endpoint message
MAX_ENDPOINTS_BYTES = 2 << 20  # all of a worker's endpoint messages
MAX_ROOTS = 4096  # replica groups and aliases of a slot
MAX_ROOT_NAMES_BYTES = 512 << 10  # the names of a slot's replica groups and aliases together
MAX_STEP = 2**62  # of epochs, steps and layout epochs
MAX_EPOCH_JUMP = 2**20  # by which a version may open an epoch that open_epoch did not allocate
MAX_PATTERNS = 256  # of names that a vote allows to go unconsumed
MAX_TABLE_BYTES = 256 << 20  # a dictionary or part, encoded, however many chunks it comes in
MAX_UPLOADS_BYTES = 1 << 30  # all unfinished uploads of a service together
MAX_TOPOLOGY_BYTES = 1 << 30  # the unchanging part of a version's slots
CHUNK_BYTES = 1 << 20  # data per message of a chunked stream
MAX_MESSAGE_BYTES = 4 << 20  # one gRPC message; larger things travel in chunks
MAX_TTL_S = 3600.0
MAX_TIMEOUT_S = 7 * 86400.0
DIGEST_BYTES = 32
ID_BYTES = 16  # workers, versions, leases, transactions: random, written as 32 hex digits


def check_name(field: str, value: object, *, empty_ok: bool = False, max_bytes: int = MAX_NAME_BYTES) -> str:
    """A name: text without NUL, not empty, at most `max_bytes` of UTF-8. It is not normalised."""
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"expected text, got {type(value).__name__}")
    if not value and not empty_ok:
        raise InvalidRequestError(field, "empty name")
    if "\0" in value:
        raise InvalidRequestError(field, "name holds a NUL character")
    try:
        n_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(field, "name is not valid Unicode (lone surrogate)") from None
    if n_bytes > max_bytes:
        raise InvalidRequestError(field, f"name of {n_bytes} bytes, at most {max_bytes}")
    return value


def check_names(field: str, values: Iterable[object], *, at_most: int, at_least: int = 1) -> tuple[str, ...]:
    """A list of distinct names."""
    check_sequence(field, values)
    names = tuple(values)
    if not at_least <= len(names) <= at_most:
        raise InvalidRequestError(field, f"{len(names)} names, expected {at_least} to {at_most}")
    checked = tuple(check_name(f"{field}[{i}]", name) for i, name in enumerate(names))
    seen: set[str] = set()
    for name in checked:
        if name in seen:
            raise InvalidRequestError(field, f"name {name!r:.80} is given twice")
        seen.add(name)
    return checked


def check_sequence(field: str, values: object) -> None:
    """Not one text, whose letters would pass for names."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequestError(field, f"expected a sequence of names, got {values!r:.80}")


def check_total(field: str, n_bytes: int, at_most: int) -> None:
    """Bytes of several things together."""
    if n_bytes > at_most:
        raise InvalidRequestError(field, f"{n_bytes} bytes in all, at most {at_most}")


def check_patterns(field: str, values: Iterable[object]) -> tuple[str, ...]:
    """``fnmatch`` patterns of names."""
    return check_names(field, values, at_most=MAX_PATTERNS, at_least=0)


def check_bytes(field: str, value: object, *, at_most: int, at_least: int = 0) -> bytes:
    """A byte string of bounded length."""
    if not isinstance(value, bytes):
        raise InvalidRequestError(field, f"expected bytes, got {type(value).__name__}")
    if not at_least <= len(value) <= at_most:
        raise InvalidRequestError(field, f"{len(value)} bytes, expected {at_least} to {at_most}")
    return value


def check_digest(field: str, value: object, *, empty_ok: bool = False) -> bytes:
    """A 32-byte digest."""
    if empty_ok and value == b"":
        return b""
    return check_bytes(field, value, at_least=DIGEST_BYTES, at_most=DIGEST_BYTES)


def check_id(field: str, value: object, *, empty_ok: bool = False) -> str:
    """An identifier: 32 lower-case hex digits."""
    if isinstance(value, str) and ((empty_ok and not value) or _is_id(value)):
        return value
    raise InvalidRequestError(field, f"expected {2 * ID_BYTES} lower-case hex digits, got {value!r:.80}")


def _is_id(value: str) -> bool:
    return len(value) == 2 * ID_BYTES and all(c in "0123456789abcdef" for c in value)


def check_int(field: str, value: object, *, at_least: int, at_most: int) -> int:
    """An integer in a closed range; booleans are not integers."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(field, f"expected an integer, got {type(value).__name__}")
    if not at_least <= value <= at_most:
        raise InvalidRequestError(field, f"{value} lies outside [{at_least}, {at_most}]")
    return value


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(field, f"got {value!r:.80}, expected one of {', '.join(choices)}")
    return value


def check_timeout(field: str, value: object, *, at_most: float = MAX_TIMEOUT_S) -> float:
    """Seconds: a finite number over 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(field, f"expected seconds, got {type(value).__name__}")
    if not math.isfinite(value) or value <= 0 or value > at_most:
        raise InvalidRequestError(field, f"{value} s; expected a finite number over 0, at most {at_most:g}")
    return float(value)


def check_ttl(field: str, value: object) -> float:
    """A time to live in seconds, over 0 and at most an hour."""
    return check_timeout(field, value, at_most=MAX_TTL_S)
