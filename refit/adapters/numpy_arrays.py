"""NumPy arrays as local tensors: enough for a custom trainer, and for examples without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from reshard.refit.errors import PublishError
from reshard.refit.tensors import LocalTensor

__all__ = ["local_tensors"]


def local_tensors(
    arrays: Mapping[str, npt.NDArray[np.generic]],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    starts: Mapping[str, Sequence[int]] | None = None,
    dtypes: Mapping[str, str] | None = None,
    replica_groups: Mapping[str, int] | None = None,
) -> list[LocalTensor]:
    """One `LocalTensor` for each array.

    Parameters
    ----------
    arrays
        Name to local piece.
    shapes, starts
        Global shape and where the local piece starts, of the arrays that are pieces; the others are whole.
    dtypes
        Labels of arrays that NumPy has no dtype for, such as ``bfloat16`` over uint16.
    replica_groups
        Claims of equal content; see `LocalTensor`.

    Raises
    ------
    PublishError
        A name in one of the mappings that is not in ``arrays``, or a piece outside its tensor.

    Examples
    --------
    >>> import numpy as np
    >>> [t.stop for t in local_tensors({"w": np.zeros((2, 4))}, shapes={"w": (8, 4)}, starts={"w": (6, 0)})]
    [(8, 4)]
    """
    for what, mapping in (
        ("shapes", shapes),
        ("starts", starts),
        ("dtypes", dtypes),
        ("replica_groups", replica_groups),
    ):
        for name in mapping or {}:
            if name not in arrays:
                raise PublishError(f"{what} names {name!r}, which is no array given")
    return [
        LocalTensor(
            name,
            (dtypes or {}).get(name) or array.dtype.name,
            tuple((shapes or {}).get(name, array.shape)),
            tuple((starts or {}).get(name, (0,) * array.ndim)),
            array,
            (replica_groups or {}).get(name, -1),
        )
        for name, array in arrays.items()
    ]
