"""The cell digests of `reshard.refit.digests` for torch tensors, on the tensors' own device.

`digest_cells` gives the same numbers bit for bit. On CUDA it uses the fused Triton kernel where Triton is
installed, and eager operations in cache-sized pieces elsewhere; neither waits for the device, so one synchronise a
version is enough.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.planner.errors import MissingDependencyError, require
from reshard.refit.digests import SEEDS, weights

if TYPE_CHECKING:
    import torch

__all__ = ["digest_cells"]

Int64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_PIECE_LANES = 1 << 15


def digest_cells(
    data: torch.Tensor, offset_bytes: Int64, nbytes: Int64, tags: U64, *, eager: bool = False
) -> torch.Tensor:
    """Digest many cells of one buffer.

    Parameters
    ----------
    data
        uint8 of shape (n,), contiguous, on any device.
    offset_bytes, nbytes : int64[n_cells]
        Where each cell lies in ``data``.
    tags : uint64[n_cells, 2]
        Of `reshard.refit.digests.cell_tag`.
    eager
        Never use the Triton kernel.

    Returns
    -------
    torch.Tensor
        int64 of shape (n_cells, 2) on the device of ``data``: the digests' bits. Not synchronised.
    """
    if data.device.type == "cuda" and not eager:
        try:
            from reshard.refit.digests_triton import digest_cells_triton

            return digest_cells_triton(data, offset_bytes, nbytes, tags)
        except MissingDependencyError:
            pass
    require("torch", extra="torch")
    import torch

    out = torch.from_numpy(tags.astype(np.uint64).view(np.int64).copy()).to(data.device)
    tables = [_weights(seed, data.device) for seed in SEEDS]
    for i, (at, size) in enumerate(zip(offset_bytes.tolist(), nbytes.tolist(), strict=True)):
        lanes = _lanes(data[at : at + size])
        for first in range(0, lanes.numel(), _PIECE_LANES):
            wide = lanes[first : first + _PIECE_LANES].to(torch.int64) & 0xFFFFFFFF
            for k, table in enumerate(tables):
                out[i, k] += (wide * table[first : first + wide.numel()]).sum()
    return out


@cache
def _weights(seed: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.from_numpy(weights(seed).view(np.int64).copy()).to(device)


def _lanes(cell: torch.Tensor) -> torch.Tensor:
    """The cell as int32 lanes, padded with zeros; a copy only where address or length are no multiple of 4."""
    import torch

    if cell.numel() % 4:
        cell = torch.nn.functional.pad(cell, (0, -cell.numel() % 4))
    elif cell.storage_offset() % 4:
        cell = cell.clone()
    return cell.view(torch.int32)
