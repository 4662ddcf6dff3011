"""Watching a process of this host without asking it anything: is it alive, and does its beacon still say the same?

A process descriptor cannot be deceived by a reused pid; the beacon's page is mapped, so that a look at it is a load.
A look costs about a microsecond, and no native library takes part: nothing is sent to a process that is not the one
that the endpoint message came from.
"""

from __future__ import annotations

import os
import select
import weakref

import numpy as np
import numpy.typing as npt

from reshard.transports.beacon import BEACON_BYTES, beacon_image, check_beacon
from reshard.transports.endpoint import Endpoint
from reshard.transports.errors import PeerError, blamed
from reshard.transports.identity import ProcessIdentity
from reshard.transports.shared import map_from


class PeerWatch:
    """See the module.

    Parameters
    ----------
    peer : str
        For messages.
    endpoint : Endpoint
        What its beacon must agree with.
    identity : ProcessIdentity
        A process that is visible from here.
    control : int
        Its descriptor of the shared page that begins with its beacon.

    Raises
    ------
    PeerError
        If the process is gone or another one by now, or its beacon disagrees.
    """

    __slots__ = ("__weakref__", "_close", "_endpoint", "_head", "_healthy", "_page", "_peer", "_process", "pid")

    def __init__(self, peer: str, endpoint: Endpoint, identity: ProcessIdentity, control: int) -> None:
        self._peer = peer
        self._endpoint = endpoint
        self._healthy = beacon_image(endpoint)
        self.pid = identity.pid
        try:
            self._process = os.pidfd_open(identity.pid)
        except OSError as error:
            raise blamed(error, peer, f"process {identity.pid}") from error
        except (OverflowError, ValueError) as error:
            raise PeerError(f"peer {peer!r}: no process {identity.pid}: {error}", peer=peer) from error
        self._close = weakref.finalize(self, os.close, self._process)  # also when a rebuilt agent drops its links
        try:
            identity.check(peer)  # only now that the descriptor holds the process, whichever it is
            self._page: npt.NDArray[np.uint8] = map_from(identity.pid, control, BEACON_BYTES, peer)
            self._head = self._page.data[: len(self._healthy)]
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise `PeerError` if the peer has exited, closed, or withdrawn regions."""
        if self._process < 0 or self._exited():
            raise PeerError(f"peer {self._peer!r}: process {self.pid} has exited", peer=self._peer)
        if self._head.tobytes() != self._healthy:
            check_beacon(self._page, self._endpoint, self._peer)

    def _exited(self) -> bool:
        gone = select.poll()  # one a call: a poll object is not for several threads at once
        gone.register(self._process, select.POLLIN)
        return bool(gone.poll(0))

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        self._process = -1
        self._close()
