"""Which names may travel? One rule for tensors, holders, layouts and claims."""

from __future__ import annotations

from typing import Final

from reshard.planner.errors import TableError

MAX_NAME_BYTES: Final = 4096


def check_name(name: str) -> bytes:
    """UTF-8 of a tensor or holder name.

    Raises
    ------
    TableError
        It is empty, holds a NUL, cannot be encoded, or is longer than 4,096 bytes.
    """
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TableError(f"name {name!r} is not valid Unicode", tensor=name, got=name) from error
    if not raw:
        raise TableError("a name is empty; expected 1 to 4096 bytes", got=0, expected=MAX_NAME_BYTES)
    if b"\0" in raw:
        raise TableError(f"name {name!r} holds a NUL byte", tensor=name, got=name)
    if len(raw) > MAX_NAME_BYTES:
        raise TableError(
            f"name {name[:40]!r}... has {len(raw)} bytes; expected at most {MAX_NAME_BYTES}",
            tensor=name,
            got=len(raw),
            expected=MAX_NAME_BYTES,
        )
    return raw


def check_label(label: str, where: str) -> None:
    """The same rule for a layout's or claim's name.

    Raises
    ------
    TableError
        As `check_name`, saying where.
    """
    try:
        check_name(label)
    except TableError as error:
        raise TableError(f"{where}: {error}", got=label, where=where) from error
