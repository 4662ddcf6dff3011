"""Are there file descriptors left for what a native library is about to do?

A native library that runs out of them half way through ends the process (UCX: ``Fatal: failed to set active message
handler``), or blames the peer.  So it is not begun without enough of them.
"""

from __future__ import annotations

import os
import resource

from reshard.transports.errors import OwnFaultError


def require_descriptors(n: int, what: str) -> None:
    """Refuse to begin something without enough descriptors.

    They are taken, and given back: that counts right whatever else the process has open. Another thread may take them
    meanwhile; ask for more than are needed.

    Parameters
    ----------
    n : int
        How many it may need.
    what : str
        Begins the message.

    Raises
    ------
    OwnFaultError
        If this process, or the host, has fewer left.
    """
    taken: list[int] = []
    try:
        taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(taken) < n:
            taken.append(os.dup(taken[0]))
    except OSError as error:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OwnFaultError(
            f"{what}: {len(taken)} file descriptors are left, expected at least {n} (ulimit -n is {soft}): {error}"
        ) from error
    finally:
        for fd in taken:
            os.close(fd)
