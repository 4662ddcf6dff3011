"""Which dtypes may travel: an allow-list of labels with sizes and stable wire numbers.

A label is never looked up by attribute in another package ("torch.save" is not a dtype). Sub-byte dtypes
carry a packing tag: elements are packed along the last dim, low bits first, so the last dim of every box of
such a tensor must be cut at whole bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from reshard.planner.errors import DTypeError

Kind = Literal["bool", "int", "uint", "float"]


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype.

    Attributes
    ----------
    label : str
        Without a "torch." prefix.
    bits : int
        Bits of an element.
    kind : {"bool", "int", "uint", "float"}
    code : int
        Stable number on the wire and in digests.
    packing : str
        "" for whole bytes, "low-first" for sub-byte dtypes packed along the last dim.
    """

    label: str
    bits: int
    kind: Kind
    code: int
    packing: str = ""

    @property
    def pack(self) -> int:
        """Elements in a byte for sub-byte dtypes, else 1."""
        return 8 // self.bits if self.bits < 8 else 1

    @property
    def unit_bytes(self) -> int:
        """Bytes of the smallest unit that can be moved: an element, or a byte of packed elements."""
        return max(1, self.bits // 8)

    def nbytes(self, n_elems: int) -> int:
        """Bytes of `n_elems` packed elements.

        Raises
        ------
        DTypeError
            The elements do not fill whole bytes.
        """
        n_bits = n_elems * self.bits
        if n_bits % 8:
            raise DTypeError(
                f"{n_elems} elements of {self.label} do not fill whole bytes", got=n_elems, expected=self.pack
            )
        return n_bits // 8


_ROWS: Final[tuple[DType, ...]] = (
    DType("bool", 8, "bool", 1),
    DType("uint8", 8, "uint", 2),
    DType("int8", 8, "int", 3),
    DType("uint16", 16, "uint", 4),
    DType("int16", 16, "int", 5),
    DType("uint32", 32, "uint", 6),
    DType("int32", 32, "int", 7),
    DType("uint64", 64, "uint", 8),
    DType("int64", 64, "int", 9),
    DType("float16", 16, "float", 10),
    DType("bfloat16", 16, "float", 11),
    DType("float32", 32, "float", 12),
    DType("float64", 64, "float", 13),
    DType("float8_e4m3fn", 8, "float", 14),
    DType("float8_e5m2", 8, "float", 15),
    DType("float8_e8m0fnu", 8, "float", 16),
    DType("float8_e4m3fnuz", 8, "float", 17),
    DType("float8_e5m2fnuz", 8, "float", 18),
    DType("int4", 4, "int", 19, "low-first"),
    DType("uint4", 4, "uint", 20, "low-first"),
    DType("float4_e2m1fn", 4, "float", 21, "low-first"),
)

BY_LABEL: Final[dict[str, DType]] = {row.label: row for row in _ROWS}
BY_CODE: Final[dict[int, DType]] = {row.code: row for row in _ROWS}
LABELS: Final[tuple[str, ...]] = tuple(BY_LABEL)
MAX_CODE: Final[int] = max(BY_CODE)


def dtype(label: str) -> DType:
    """Look up a label in the allow-list.

    Raises
    ------
    DTypeError
        The label is not in it.

    Examples
    --------
    >>> dtype("bfloat16").bits
    16
    >>> dtype("torch.save")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    reshard.planner.errors.DTypeError: unknown dtype label 'torch.save'; expected one of: bool, uint8, ...
    """
    found = BY_LABEL.get(label)
    if found is None:
        raise DTypeError(
            f"unknown dtype label {label!r}; expected one of: {', '.join(LABELS)}", got=label, expected=LABELS
        )
    return found


def dtype_of_code(code: int) -> DType:
    """The dtype with a wire number.

    Raises
    ------
    DTypeError
        No dtype has it.
    """
    found = BY_CODE.get(int(code))
    if found is None:
        raise DTypeError(f"unknown dtype code {code}; expected 1 to {MAX_CODE}", got=code, expected=MAX_CODE)
    return found
