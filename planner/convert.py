"""What the bytes of values are in another dtype.

Pure NumPy, and equal bit for bit to what torch's CPU casts give for every value that is not a NaN; a NaN
stays a NaN. Values are held in *storage* arrays: the native NumPy dtype where there is one, else the unsigned
integer of the same width (bfloat16 is ``uint16``, the float8 family ``uint8``).

1. Small floats are decoded to float32, exactly: bfloat16 by a shift, a float8 by its table of 256 values.
2. Native dtypes cast with NumPy's own ``astype``, which rounds to nearest even.
3. Small floats are encoded from float32, to nearest even in integer arithmetic.

A cast from float64 to bfloat16 or float8 passes through float32, as torch's does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from reshard.planner.dtypes import dtype
from reshard.planner.errors import DTypeError

__all__ = ["can_cast", "cast", "cast_bytes", "storage_dtype"]

_NATIVE: dict[str, np.dtype[np.generic]] = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "uint16": np.dtype(np.uint16),
    "int16": np.dtype(np.int16),
    "uint32": np.dtype(np.uint32),
    "int32": np.dtype(np.int32),
    "uint64": np.dtype(np.uint64),
    "int64": np.dtype(np.int64),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True, slots=True)
class _Float8:
    """An 8-bit float. `top` is the code of its largest finite value, `overflow` of what lies above it."""

    mantissa_bits: int
    bias: int
    top: int
    overflow: int
    nan: int
    signed_zero: bool


# Open Compute 8-bit formats (OFP8) and their FNUZ cousins, which have one NaN (0x80) and no negative zero. As
# in torch 2.13, e4m3fn saturates; e5m2 overflows to infinity, and the FNUZ formats to their NaN.
_FLOAT8 = {
    "float8_e4m3fn": _Float8(mantissa_bits=3, bias=7, top=0x7E, overflow=0x7E, nan=0x7F, signed_zero=True),
    "float8_e5m2": _Float8(mantissa_bits=2, bias=15, top=0x7B, overflow=0x7C, nan=0x7F, signed_zero=True),
    "float8_e4m3fnuz": _Float8(mantissa_bits=3, bias=8, top=0x7F, overflow=0x80, nan=0x80, signed_zero=False),
    "float8_e5m2fnuz": _Float8(mantissa_bits=2, bias=16, top=0x7F, overflow=0x80, nan=0x80, signed_zero=False),
}

_PIECE_ELEMS = 1 << 15
"""Small floats are converted in pieces of this many elements, so that the temporaries stay in the cache."""

_SMALL_STORAGE: dict[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e8m0fnu": np.dtype(np.uint8),
    **dict.fromkeys(_FLOAT8, np.dtype(np.uint8)),
}


def storage_dtype(label: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype that holds one element of `label`.

    Raises
    ------
    DTypeError
        The label is unknown, or several elements share a byte (int4, float4), so that no array can hold one.

    Examples
    --------
    >>> storage_dtype("bfloat16"), storage_dtype("float32")
    (dtype('uint16'), dtype('float32'))
    """
    found: np.dtype[np.generic] | None = _NATIVE.get(label, _SMALL_STORAGE.get(label))
    if found is None:
        known = dtype(label)
        raise DTypeError(f"dtype '{label}' has {known.bits} bits an element: no array holds one, so none is cast")
    return found


def can_cast(src: str, dst: str) -> bool:
    """Return whether :func:`cast` converts `src` to `dst`; a dtype to itself always does.

    Examples
    --------
    >>> can_cast("bfloat16", "float32"), can_cast("int4", "float32"), can_cast("float32", "float8_e8m0fnu")
    (True, False, False)
    """
    if src == dst:
        return True
    whole = _NATIVE.keys() | _SMALL_STORAGE.keys()
    return src in whole and dst in whole and dst != "float8_e8m0fnu"


def cast(src: str, dst: str, values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Convert a storage array of dtype `src` to a storage array of dtype `dst`.

    Parameters
    ----------
    src, dst : str
        Dtype labels.
    values : ndarray
        Any shape and strides, of dtype ``storage_dtype(src)``.

    Returns
    -------
    ndarray
        The same shape, of dtype ``storage_dtype(dst)``; `values` itself if the labels are equal.

    Raises
    ------
    DTypeError
        A label is unknown or has fewer than 8 bits, `values` has another dtype, or `dst` is
        ``float8_e8m0fnu``: a block scale is chosen by its quantiser, never rounded to.

    Examples
    --------
    >>> bf16 = cast("float32", "bfloat16", np.array([1.0, 1.00390625, -0.0], np.float32))
    >>> [hex(code) for code in bf16]
    ['0x3f80', '0x3f80', '0x8000']
    >>> cast("bfloat16", "float32", bf16)
    array([ 1.,  1., -0.], dtype=float32)
    """
    expected = storage_dtype(src)
    if values.dtype != expected:
        raise DTypeError(f"values of dtype '{src}' are stored as {expected}: got an array of {values.dtype}")
    if src == dst:
        return values
    if dst == "float8_e8m0fnu":
        raise DTypeError(f"cannot cast '{src}' to 'float8_e8m0fnu': a block scale is not rounded to")
    out = np.empty(values.shape, storage_dtype(dst))
    if src in _NATIVE and dst in _NATIVE:
        with np.errstate(over="ignore", invalid="ignore"):
            out[...] = values
        return out
    flat_values, flat_out = np.ascontiguousarray(values).reshape(-1), out.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, flat_out.size, _PIECE_ELEMS):
            piece = flat_values[first : first + _PIECE_ELEMS]
            native = piece if src in _NATIVE else _decode(src, piece)
            flat_out[first : first + _PIECE_ELEMS] = (
                native if dst in _NATIVE else _encode(dst, native.astype(np.float32, copy=False))
            )
    return out


def cast_bytes(src: str, dst: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Convert packed little-endian bytes of dtype `src` to packed bytes of dtype `dst`.

    Parameters
    ----------
    src, dst : str
        Dtype labels.
    raw : ndarray of uint8, shape (n_elems * itemsize,)
        The elements, contiguous.

    Returns
    -------
    ndarray of uint8, shape (n_elems * itemsize of `dst`,)

    Raises
    ------
    DTypeError
        As :func:`cast`, or the bytes are not a whole number of elements.
    """
    stored = storage_dtype(src)
    if raw.size % stored.itemsize:
        raise DTypeError(f"{raw.size} bytes are not a whole number of '{src}' elements of {stored.itemsize} bytes")
    values = np.ascontiguousarray(raw).view(stored)
    return np.ascontiguousarray(cast(src, dst, values)).view(np.uint8)


def _decode(label: str, codes: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """Return the float32 values of small-float codes; every one is exact."""
    if label == "bfloat16":
        return np.left_shift(codes.astype(np.uint32), np.uint32(16)).view(np.float32)
    decoded: npt.NDArray[np.float32] = _float8_table(label)[codes]
    return decoded


@cache
def _float8_table(label: str) -> npt.NDArray[np.float32]:
    """Return the float32 value of each of the 256 codes of a float8 dtype."""
    codes = np.arange(256)
    if label == "float8_e8m0fnu":
        values = np.ldexp(1.0, codes - 127)
        values[0xFF] = np.nan
    else:
        form = _FLOAT8[label]
        magnitude = codes & 0x7F
        mantissa = magnitude & ((1 << form.mantissa_bits) - 1)
        exponent = magnitude >> form.mantissa_bits
        hidden = np.where(exponent > 0, 1 << form.mantissa_bits, 0)
        values = np.ldexp((mantissa + hidden).astype(float), np.maximum(exponent, 1) - form.bias - form.mantissa_bits)
        values[magnitude > form.top] = np.nan
        if form.top < form.overflow < form.nan:
            values[magnitude == form.overflow] = np.inf
        values = np.where(codes & 0x80, -values, values)
        if not form.signed_zero:
            values[form.nan] = np.nan
    table = values.astype(np.float32)
    table.setflags(write=False)
    return table


def _encode(label: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.generic]:
    if label == "bfloat16":
        return _to_bfloat16(values)
    return _to_float8(_FLOAT8[label], values)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = np.right_shift(bits, np.uint32(16))
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    out = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        out[nan] = ((bits[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return out


def _to_float8(form: _Float8, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Round float32 to nearest even in units of the target's last place."""
    bits = values.view(np.uint32)
    sign = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
    magnitude = (bits & np.uint32(0x7FFFFFFF)).astype(np.int64)
    nan = magnitude > 0x7F800000
    # A normal result keeps the float32 exponent, rebased; carries of the rounding run into it.
    drop = 23 - form.mantissa_bits
    half = (1 << (drop - 1)) - 1
    odd = (magnitude >> drop) & 1
    normal = ((magnitude + half + odd) >> drop) - ((127 - form.bias) << form.mantissa_bits)
    # A subnormal result counts multiples of the smallest positive value; rint rounds to nearest even.
    smallest = 1 - form.bias - form.mantissa_bits
    scaled = np.ldexp(np.abs(values).astype(np.float64), -smallest)
    threshold = (127 + 1 - form.bias) << 23
    with np.errstate(invalid="ignore"):
        subnormal = np.rint(np.where(magnitude < threshold, scaled, 0.0)).astype(np.int64)
    code = np.where(magnitude < threshold, subnormal, normal)
    over = code > form.top
    code = np.where(over, form.overflow & 0x7F, code).astype(np.uint8)
    code = np.where(nan, form.nan & 0x7F, code).astype(np.uint8)
    signed = code | sign
    if not form.signed_zero:
        signed = np.where(code == 0, np.uint8(0), signed)
        signed = np.where(nan | over, np.uint8(form.nan), signed)
    return signed.astype(np.uint8)
