"""Torch (CPU) and Triton (its interpreter) give the digests of the NumPy form, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from reshard.refit.digests import CELL_BYTES, Digester
from reshard.refit.digests_torch import digest_cells


def cells(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cells of many lengths, adjacent and at odd addresses, one as long as allowed."""
    rng = np.random.default_rng(seed)
    nbytes = np.array([1, 2, 3, 4, 5, 7, 8, 4095, 4096, 4097, 16384, 16385, 65536, CELL_BYTES], np.int64)
    rng.shuffle(nbytes)
    gaps = rng.integers(0, 5, len(nbytes))
    offsets = np.cumsum(nbytes + gaps) - nbytes
    data = rng.integers(0, 256, int(offsets[-1] + nbytes[-1]), dtype=np.uint8)
    tags = rng.integers(0, 2**64, (len(nbytes), 2), dtype=np.uint64)
    return data, offsets, nbytes, tags


def by_numpy(data: np.ndarray, offsets: np.ndarray, nbytes: np.ndarray, tags: np.ndarray) -> np.ndarray:
    out, digester = np.zeros((len(nbytes), 2), np.uint64), Digester()
    for i, (at, size) in enumerate(zip(offsets, nbytes, strict=True)):
        digester.digest(data[at : at + size], tags[i], out[i])
    return out


@pytest.mark.parametrize("seed", range(3))
def test_torch_equals_numpy(seed: int) -> None:
    data, offsets, nbytes, tags = cells(seed)
    got = digest_cells(torch.from_numpy(data), offsets, nbytes, tags)
    assert np.array_equal(got.numpy().view(np.uint64), by_numpy(data, offsets, nbytes, tags))


def test_no_cells() -> None:
    none = np.zeros(0, np.int64)
    got = digest_cells(torch.zeros(4, dtype=torch.uint8), none, none, np.zeros((0, 2), np.uint64))
    assert got.shape == (0, 2)


_UNDER_THE_INTERPRETER = """
import numpy as np, torch
from tests.refit.test_digests_torch import by_numpy, cells
from reshard.refit.digests_triton import digest_cells_triton
data, offsets, nbytes, tags = cells(9)
few = nbytes <= 65536
offsets, nbytes, tags = offsets[few], nbytes[few], tags[few]
got = digest_cells_triton(torch.from_numpy(data), offsets, nbytes, tags)
assert np.array_equal(got.numpy().view(np.uint64), by_numpy(data, offsets, nbytes, tags))
none = np.zeros(0, np.int64)
assert digest_cells_triton(torch.zeros(4, dtype=torch.uint8), none, none, np.zeros((0, 2), np.uint64)).shape == (0, 2)
print("equal")
"""


def test_triton_equals_numpy_under_its_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", _UNDER_THE_INTERPRETER],
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
