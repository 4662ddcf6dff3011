"""Casts against torch where it is installed, and against exact values everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reference import CASTS, cast_one

from reshard.planner.convert import can_cast, cast, cast_bytes, storage_dtype
from reshard.planner.errors import DTypeError

SMALL = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def float32_samples() -> np.ndarray:
    """Every 16-bit prefix with its rounding neighbours, and the edges of every small format."""
    prefixes = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    edges = np.array([448, 464, 464.01, 480, 57344, 61439, 61440, 61441, 240, 248, 65504, 65520, 1e-45], np.float32)
    swept = (prefixes[:, None] | low[None, :]).reshape(-1).view(np.float32)
    return np.concatenate([swept, edges, -edges])


@pytest.mark.parametrize("label", [*SMALL, "float16", "float64"])
def test_encoding_float32_equals_torch(label: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    values = float32_samples()
    got = cast("float32", label, values)
    want = torch.from_numpy(values).to(getattr(torch, label))
    width = {1: torch.uint8, 2: torch.uint16, 8: torch.int64}[got.dtype.itemsize]
    same = got.view(f"u{got.dtype.itemsize}") == want.view(width).numpy().view(f"u{got.dtype.itemsize}")
    assert np.all(same | np.isnan(values))
    assert np.isnan(cast(label, "float32", got)[np.isnan(values)]).all()


@pytest.mark.parametrize("label", [*SMALL, "float16", "float8_e8m0fnu"])
def test_decoding_every_code_equals_torch(label: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    stored = storage_dtype(label)
    codes = np.arange(1 << (8 * stored.itemsize)).astype(f"u{stored.itemsize}")
    got = cast(label, "float32", codes.view(stored))
    want = torch.from_numpy(codes.copy()).view(getattr(torch, label)).to(torch.float32).numpy()
    assert np.all((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want)))


@pytest.mark.parametrize("label", SMALL)
def test_codes_survive_the_way_through_float32(label: str) -> None:
    stored = storage_dtype(label)
    codes = np.arange(1 << (8 * stored.itemsize)).astype(stored)
    wide = cast(label, "float32", codes)
    back = cast("float32", label, wide)
    finite = np.isfinite(wide)
    assert np.array_equal(back[finite], codes[finite])
    assert np.isnan(cast(label, "float32", back))[np.isnan(wide)].all()


@pytest.mark.parametrize(("src", "dst"), CASTS)
@given(seed=st.integers(0, 2**32 - 1))
def test_casts_equal_the_reference(src: str, dst: str, seed: int) -> None:
    size = storage_dtype(src).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, 64 * size, dtype=np.uint8)
    raw[size - 1 :: size] &= 0xBF
    want = b"".join(cast_one(src, dst, raw[i : i + size].tobytes()) for i in range(0, raw.size, size))
    assert cast_bytes(src, dst, raw).tobytes() == want


@pytest.mark.parametrize(
    ("src", "dst", "before", "after"),
    [
        ("bfloat16", "float32", "803f", "0000803f"),  # case D2
        ("float32", "bfloat16", "0000807f", "807f"),  # infinity
        (
            "float32",
            "bfloat16",
            "0100807f",
            "c07f",
        ),  # a NaN whose payload is all in the dropped half
        ("float32", "bfloat16", "ffff7f7f", "807f"),  # the largest float32 rounds to infinity
        ("float32", "bfloat16", "0080803f", "803f"),  # a tie, to the even neighbour below
        ("float32", "bfloat16", "0080813f", "823f"),  # a tie, to the even neighbour above
        ("float32", "bfloat16", "01000080", "0080"),  # the smallest negative number keeps its sign
        ("bool", "uint8", "0100", "0100"),
        ("int64", "int32", "ffffffffffffffff", "ffffffff"),
    ],
)
def test_exact_bytes(src: str, dst: str, before: str, after: str) -> None:
    raw = np.frombuffer(bytes.fromhex(before), np.uint8)
    assert cast_bytes(src, dst, raw).tobytes().hex() == after


@given(st.integers(0, 5), st.integers(0, 3))
def test_shape_and_strides_of_the_input_do_not_matter(rows: int, columns: int) -> None:
    base = np.arange(2 * rows * 2 * columns, dtype=np.float32).reshape(2 * rows, 2 * columns)
    strided = base[::2, ::2].T
    got = cast("float32", "bfloat16", strided)
    assert got.shape == strided.shape
    assert np.array_equal(cast("bfloat16", "float32", got), strided)


def test_pieces_meet_without_a_seam() -> None:
    values = np.random.default_rng(0).standard_normal(100_003).astype(np.float32)
    whole = cast("float32", "bfloat16", values)
    assert np.array_equal(whole[65_530:65_540], cast("float32", "bfloat16", values[65_530:65_540]))


@pytest.mark.parametrize("label", ["bfloat17", "torch.save", ""])
def test_labels_come_from_the_allow_list(label: str) -> None:
    with pytest.raises(DTypeError):
        storage_dtype(label)
    assert not can_cast(label, "float32")


def test_refusals() -> None:
    with pytest.raises(DTypeError, match="block scale"):
        cast("float32", "float8_e8m0fnu", np.ones(2, np.float32))
    with pytest.raises(DTypeError, match="4 bits"):
        storage_dtype("int4")
    with pytest.raises(DTypeError, match="stored as uint16"):
        cast("bfloat16", "float32", np.ones(2, np.float32))
    with pytest.raises(DTypeError, match="7 bytes"):
        cast_bytes("float32", "bfloat16", np.zeros(7, np.uint8))
    assert not can_cast("float32", "float8_e8m0fnu")
    assert can_cast("int4", "int4")
