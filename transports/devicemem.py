"""Device memory, from torch, for transports that can register it."""

from __future__ import annotations

import numpy as np

from reshard.planner.errors import require
from reshard.transports.base import Allocation
from reshard.transports.errors import RegistrationError
from reshard.transports.regions import Region


def allocate_device(nbytes: int, device: int) -> Allocation:
    """Return zeroed memory of a CUDA device; ``region.owner`` is the tensor.

    Raises
    ------
    RegistrationError
        If there is no such device, or no such memory on it.
    MissingDependencyError
        If torch is not installed.
    """
    torch = require("torch", "torch")
    try:
        tensor = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
    except (RuntimeError, AssertionError) as error:
        raise RegistrationError(f"allocate: no {nbytes} bytes on device {device}: {error}") from error
    return Allocation(np.zeros(0, np.uint8), Region(int(tensor.data_ptr()), nbytes, "vram", device, tensor))
