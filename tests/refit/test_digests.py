"""Attempts to change a cell without changing its digest (REFIT.md, "Verification"; case D8)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.refit.digests import CELL_BYTES, SEEDS, Digester, cell_tag, digest_bytes, root_of, weights

RNG = np.random.default_rng(20261130)


def digest(values: np.ndarray, label: str = "") -> bytes:
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return digest_bytes(flat, label or values.dtype.name, values.shape)


def slow(values: np.ndarray, label: str) -> bytes:
    """The same number by the definition, in Python integers."""
    raw = values.tobytes()
    raw += b"\0" * (-len(raw) % 4)
    sums = list(cell_tag(label, values.shape))
    for i in range(len(raw) // 4):
        lane = int.from_bytes(raw[4 * i : 4 * i + 4], "little")
        for k, seed in enumerate(SEEDS):
            sums[k] += lane * int(weights(seed)[i])
    return b"".join((s % 2**64).to_bytes(8, "little") for s in sums)


@given(st.binary(min_size=1, max_size=200))
def test_equals_its_definition(raw: bytes) -> None:
    values = np.frombuffer(raw, np.uint8)
    assert digest(values) == slow(values, "uint8")


def test_pieces_do_not_show() -> None:
    values = RNG.integers(0, 256, CELL_BYTES, dtype=np.uint8)
    lanes = values.view(np.uint32).astype(object)
    expected = [
        sum(lanes * weights(s).astype(object)) + t for s, t in zip(SEEDS, cell_tag("uint8", values.shape), strict=True)
    ]
    assert digest(values) == b"".join((e % 2**64).to_bytes(8, "little") for e in expected)


def test_weights_are_odd_and_distinct_modulo_2_to_33() -> None:
    for seed in SEEDS:
        w = weights(seed)
        assert w.shape == (CELL_BYTES // 4,)
        assert bool((w & np.uint64(1)).all())
        assert len(np.unique(w & np.uint64(2**33 - 1))) == len(w)
    a, b = (weights(s) & np.uint64(2**33 - 1) for s in SEEDS)
    assert int((a == b).sum()) < 4


def test_weights_are_no_arithmetic_progression() -> None:
    """Sign flips at i, j, k, l cancel where w_i - w_j = w_k - w_l modulo 2**33; never in both seeds at once."""
    n = 4096
    both = []
    for seed in SEEDS:
        w = (weights(seed)[:n] & np.uint64(2**33 - 1)).astype(np.int64)
        both.append((w[1:] - w[:-1]) % 2**33)
    pairs = np.stack(both, axis=1)
    assert len(np.unique(pairs, axis=0)) == n - 1


@pytest.mark.parametrize("n_flips", [2, 4, 6, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint16"])
def test_even_numbers_of_sign_flips_are_seen(dtype: str, n_flips: int) -> None:
    item = np.dtype(dtype).itemsize
    bits = RNG.integers(0, 256, 4096 * item, dtype=np.uint8).view(f"u{item}")
    before = digest(bits)
    for _ in range(200):
        changed = bits.copy()
        at = RNG.choice(bits.size, n_flips, replace=False)
        changed[at] ^= np.array(1 << (8 * item - 1), bits.dtype)
        assert digest(changed) != before


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_any_swap_of_two_differing_elements_is_seen(dtype: str) -> None:
    """Exhaustive over pairs in a small cell with the values that trick weaker sums: 0, 1, -1, 2."""
    top = np.iinfo(dtype).max
    base = np.array([0, 1, top, 2] * 10, dtype)
    RNG.shuffle(base)
    before = digest(base)
    for i in range(base.size):
        for j in range(i):
            if base[i] != base[j]:
                swapped = base.copy()
                swapped[[i, j]] = swapped[[j, i]]
                assert digest(swapped) != before, (i, j)


def test_elements_at_different_halves_of_lanes_cannot_trade_places() -> None:
    halves = np.zeros(64, np.uint16)
    for i in range(64):
        for j in range(64):
            if i != j:
                a, b = halves.copy(), halves.copy()
                a[i], b[j] = 1, 1
                assert digest(a) != digest(b)


def test_swapped_far_lanes_are_seen() -> None:
    values = RNG.integers(0, 4, CELL_BYTES // 4, dtype=np.uint32)
    before = digest(values)
    for _ in range(200):
        i, j = RNG.choice(values.size, 2, replace=False)
        if values[i] != values[j]:
            swapped = values.copy()
            swapped[[i, j]] = swapped[[j, i]]
            assert digest(swapped) != before


def test_permuted_rows_and_shifted_tiles_are_seen() -> None:
    tile = RNG.standard_normal((64, 64)).astype(np.float32)
    seen = {digest(tile)}
    for r in range(1, 64):
        seen.add(digest(np.roll(tile, r, axis=0)))
        seen.add(digest(np.roll(tile, r, axis=1)))
        swapped = tile.copy()
        swapped[[0, r]] = swapped[[r, 0]]
        seen.add(digest(swapped))
    assert len(seen) == 1 + 3 * 63


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4095, 4096, 4097])
def test_one_changed_bit_is_seen_wherever_it_is(at: int) -> None:
    raw = RNG.integers(0, 256, 4098, dtype=np.uint8)
    before = digest(raw)
    for bit in range(8):
        changed = raw.copy()
        changed[at] ^= np.uint8(1 << bit)
        assert digest(changed) != before


def test_zeros_of_other_shapes_and_dtypes_differ() -> None:
    seen = {
        digest(np.zeros(shape, d))
        for shape in [(8,), (4, 2), (2, 4), (16,), (8, 1)]
        for d in ("uint8", "int8", "float32")
    }
    assert len(seen) == 15
    assert digest(np.zeros(4, np.uint16), "bfloat16") != digest(np.zeros(4, np.uint16), "float16")


def test_address_does_not_matter() -> None:
    raw = RNG.integers(0, 256, 1000, dtype=np.uint8)
    room = np.zeros(1100, np.uint8)
    room[13:1013] = raw
    assert digest(room[13:1013]) == digest(raw)


def test_too_long_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        Digester().digest(np.zeros(CELL_BYTES + 1, np.uint8), (0, 0), np.zeros(2, np.uint64))


def test_roots_bind_order_and_prefix() -> None:
    a = np.arange(8, dtype=np.uint64).reshape(4, 2)
    roots = {root_of(a), root_of(a[::-1]), root_of(a, b"x"), root_of(a[:3])}
    assert len(roots) == 4
    assert all(len(r) == 32 for r in roots)
