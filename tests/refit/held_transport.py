"""A transport whose reads can be held back: they land when they are let go, though abandoned, as RDMA does."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import numpy.typing as npt

from reshard.transports import backend as b

U64 = npt.NDArray[np.uint64]


class HeldTransport(b.CommonTransport):
    """Peers of one process; what is read after `hold` stays in flight until its event is set."""

    name = "held"
    capabilities = b.Capabilities(("dram",), True, False, "none", 1 << 24, False, False, False)

    def __init__(self) -> None:
        super().__init__()
        self.gate: threading.Event | None = None
        self.peer = ""
        self.after = 0
        self.n_held = 0

    def hold(self, peer: str, *, after: int = 0) -> threading.Event:
        """Hold back reads of more than headers and digests from ``peer`` from now on, until the event is set.

        The first ``after`` of them go through.
        """
        self.gate, self.peer, self.after = threading.Event(), peer, after
        return self.gate

    def allocate(self, nbytes: int, *, memory: b.MemoryKind = "dram", device: int = 0) -> b.Allocation:
        """Host memory."""
        return b.allocate_host(nbytes)

    def _withdrawn(self, generation: int) -> None:
        pass

    def _shut_down(self) -> None:
        pass

    def _payload(self) -> bytes:
        return b""

    def _dial(self, peer: b.ConnectedPeer, deadline: float) -> object:
        return "connected"

    def _gate(self, peer: b.ConnectedPeer) -> b.Slice:
        return b.Call(lambda: None)

    def _build(self, peer: b.ConnectedPeer, work: b.Work) -> list[b.Slice]:
        spans = zip(work.cuts[:-1], work.cuts[1:], strict=True)
        pieces = [b.between(work.local, work.remote, start, stop) for start, stop in spans]
        return [_Copy(self, peer.name, *piece) for piece in pieces]


class _Copy(b.Call):
    """Copies on the spot, or at the first poll after its gate was opened."""

    def __init__(self, transport: HeldTransport, name: str, local: U64, remote: U64) -> None:
        super().__init__(lambda: _copy(local, remote))
        self._transport, self._name = transport, name
        self._small = int(local[:, 1].sum()) < 128
        self._gate: threading.Event | None = None

    def post(self) -> bool:
        """Complete at once, unless held."""
        t = self._transport
        if t.gate is not None and self._name == t.peer and not self._small:
            if t.after > 0:
                t.after -= 1
                return super().post()
            t.n_held += 1
            self._gate = t.gate
            return False
        return super().post()

    def poll(self) -> bool:
        """Land late."""
        gate = self._gate
        if gate is None:
            return True
        if not gate.is_set():
            return False
        self._gate = None
        return super().post()


def _copy(local: U64, remote: U64) -> None:
    for (here, n), (there, _) in zip(local[:, :2].tolist(), remote[:, :2].tolist(), strict=True):
        ctypes.memmove(here, there, n)
