"""The cell digests as one fused Triton kernel: one pass over the bytes, weights computed in registers, no temporary.

Torch has no integer matrix product on CUDA, and an eager product writes a temporary eight times as large as the
data. Here each program takes one tile of one cell, computes its lanes' weights from their indices, and adds its two
partial sums to the cell's digest with atomics; addition modulo 2**64 commutes, so the order does not matter.

Without a GPU the kernel runs under Triton's interpreter (``TRITON_INTERPRET=1``), as the tests do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.planner.errors import require
from reshard.refit.digests import SEEDS

if TYPE_CHECKING:
    import torch
    import triton.language as tl

__all__ = ["digest_cells_triton"]

Int64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_TILE_LANES = 4096


def digest_cells_triton(data: torch.Tensor, offset_bytes: Int64, nbytes: Int64, tags: U64) -> torch.Tensor:
    """Digest many cells; see `reshard.refit.digests_torch.digest_cells`."""
    require("torch", extra="torch")
    import torch

    device = data.device
    out = torch.from_numpy(tags.astype(np.uint64).view(np.int64).copy()).to(device)
    n_tiles = -(-np.maximum(nbytes, 1) // (4 * _TILE_LANES))
    cell = np.repeat(np.arange(len(nbytes)), n_tiles)
    if not len(cell):
        return out
    first_lane = (np.arange(len(cell)) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)) * _TILE_LANES
    columns = np.stack([cell, first_lane, offset_bytes[cell], nbytes[cell]], axis=1).astype(np.int64)
    work = torch.from_numpy(np.ascontiguousarray(columns)).to(device)
    _kernel()(data, work, out, len(cell))
    return out


@cache
def _kernel() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]:
    triton = require("triton", extra="torch")
    # The jitted function looks names up in this module, which must import without Triton.
    globals()["tl"] = import_module("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def digest(data, work, out, SEED_A: tl.constexpr, SEED_B: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        tile = tl.program_id(0).to(tl.int64)
        cell = tl.load(work + tile * 4)
        first = tl.load(work + tile * 4 + 1)
        at = tl.load(work + tile * 4 + 2)
        size = tl.load(work + tile * 4 + 3)
        lane = first + tl.arange(0, TILE).to(tl.int64)
        value = tl.zeros((TILE,), dtype=tl.uint64)
        for k in tl.static_range(4):
            byte = lane * 4 + k
            raw = tl.load(data + at + byte, mask=byte < size, other=0)
            value = value | (raw.to(tl.uint64) << (8 * k))
        for which in tl.static_range(2):
            seed = SEED_A if which == 0 else SEED_B
            low = lane.to(tl.uint32) ^ (seed & 0xFFFFFFFF).to(tl.uint32)
            low = low ^ (low >> 16)
            low = low * tl.full((TILE,), 0x7FEB352D, tl.uint32)
            low = low ^ (low >> 15)
            low = low * tl.full((TILE,), 0x846CA68B, tl.uint32)
            low = low ^ (low >> 16)
            high = lane.to(tl.uint64) + tl.full((TILE,), seed, tl.uint64)
            high = (high ^ (high >> 30)) * tl.full((TILE,), 0xBF58476D1CE4E5B9, tl.uint64)
            high = (high ^ (high >> 27)) * tl.full((TILE,), 0x94D049BB133111EB, tl.uint64)
            high = high ^ (high >> 31)
            weight = (high << 33) | (low.to(tl.uint64) << 1) | 1
            total = tl.sum((value * weight).to(tl.int64), axis=0)
            tl.atomic_add(out + cell * 2 + which, total)

    def launch(data: torch.Tensor, work: torch.Tensor, out: torch.Tensor, n_tiles: int) -> None:
        digest[(n_tiles,)](data, work, out, SEEDS[0], SEEDS[1], _TILE_LANES)

    return launch
