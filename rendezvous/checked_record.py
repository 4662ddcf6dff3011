"""A frozen record whose fields are checked when it is made, and again when it comes from the wire.

Types are exact: a boolean is not an integer, and neither is any other subclass of `int`. Each refusal is a
`ContractError` that names the record's class and the field. `CheckedRecord.from_plain` makes a record of what
`decode_record` returned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from reshard.rendezvous.errors import ContractError, ContractTypeError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["CheckedRecord", "shown"]

_HEX = re.compile(r"[0-9a-f]*")

T = TypeVar("T")


def shown(value: object) -> str:
    """Return `value` for a message, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class CheckedRecord:
    """Base of the consensus records: frozen keyword-only dataclasses, checked in ``__post_init__``."""

    __slots__ = ()

    ENUMS: ClassVar[Mapping[str, type[Enum]]] = {}
    """Fields that travel as the value of an enum's member."""
    TUPLES: ClassVar[frozenset[str]] = frozenset()
    """Fields that travel as lists and are tuples here."""

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Make the record of a decoded canonical record.

        Parameters
        ----------
        plain : dict
            Field names to values; enums by value, tuples as lists.

        Returns
        -------
        CheckedRecord
            An instance of this class.

        Raises
        ------
        ContractError
            `plain` is not an object, or a field is unknown, missing or wrong.
        """
        name = cls.__name__
        if not isinstance(plain, dict):
            raise ContractTypeError(name, "$", type(plain).__name__, "an object")
        known = {field.name: field for field in fields(_as_dataclass(cls))}
        for key in plain:
            if key not in known:
                raise ContractError(name, shown(key), "an unknown field", f"only {', '.join(known)}")
        values: dict[str, object] = {}
        for key, field in known.items():
            if key in plain:
                values[key] = cls._revive(key, plain[key])
            elif field.default is MISSING:
                raise ContractError(name, key, "nothing", "a value")
        return cls(**values)

    @classmethod
    def _revive(cls, field: str, value: object) -> object:
        kind = cls.ENUMS.get(field)
        if kind is not None:
            for member in kind:
                if type(value) is str and member.value == value:
                    return member
            raise ContractError(cls.__name__, field, shown(value), f"one of {', '.join(str(m.value) for m in kind)}")
        if field in cls.TUPLES and isinstance(value, list):
            return tuple(value)
        return value

    def _fault(self, field: str, got: object, expected: str) -> ContractError:
        return ContractError(type(self).__name__, field, shown(got), expected)

    def _exact(self, field: str, value: object, kind: type[T]) -> T:
        if type(value) is not kind:
            got = f"{type(value).__name__} {shown(value)}"
            raise ContractTypeError(type(self).__name__, field, got, kind.__name__)
        return value

    def _check_int(self, field: str, least: int, most: int) -> int:
        value = self._exact(field, getattr(self, field), int)
        if not least <= value <= most:
            raise self._fault(field, value, f"an integer in [{least}, {most}]")
        return value

    def _check_text(self, field: str, max_chars: int) -> str:
        value = self._exact(field, getattr(self, field), str)
        if not 1 <= len(value) <= max_chars:
            raise self._fault(field, value, f"1 to {max_chars} characters")
        return value

    def _check_hex(self, field: str, digits: int) -> None:
        value = self._exact(field, getattr(self, field), str)
        if len(value) != digits or not _HEX.fullmatch(value):
            raise self._fault(field, value, f"{digits} lower-case hex digits")

    def _check_choice(self, field: str, choices: tuple[str, ...]) -> None:
        value = self._exact(field, getattr(self, field), str)
        if value not in choices:
            raise self._fault(field, value, " or ".join(choices))

    def _check_enum(self, field: str, kind: type[T]) -> T:
        return self._exact(field, getattr(self, field), kind)


def _as_dataclass(cls: type) -> type[DataclassInstance]:
    return cls
