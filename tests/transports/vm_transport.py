"""A third party's backend, whole: one-sided reads by ``process_vm_readv``; docs/transports.md explains it."""

import ctypes
import os
import struct

import numpy as np

from reshard.transports import backend as b

PAYLOAD = struct.Struct("<iQ")  # pid, address of the beacon
LIBC = ctypes.CDLL(None, use_errno=True)


class VmTransport(b.CommonTransport):
    name = "vm"
    capabilities = b.Capabilities(("dram",), True, False, "none", 1 << 24, True, True, False)

    def __init__(self):
        super().__init__()
        self._page = b.allocate_pages(b.BEACON_BYTES)
        self._beacon = b.Beacon(self._page, self.incarnation)

    def allocate(self, nbytes, *, memory="dram", device=0):
        return b.allocate_host(nbytes)

    def _withdrawn(self, generation):
        self._beacon.withdraw(generation)

    def _stop_serving(self):
        self._beacon.close()

    def _shut_down(self):
        pass

    def _payload(self):
        return PAYLOAD.pack(os.getpid(), self._page.ctypes.data)

    def _dial(self, peer, deadline):
        peer.native = PAYLOAD.unpack(peer.endpoint.payload)
        self._gate(peer).post()
        return peer.native

    def _gate(self, peer):
        pid, beacon = peer.native
        image = np.zeros(b.BEACON_BYTES, np.uint8)
        here, there = (np.array([[at, image.nbytes, 0]], np.uint64) for at in (image.ctypes.data, beacon))
        return b.Call(lambda: (vm_read(peer, pid, here, there), b.check_beacon(image, peer.endpoint, peer.name)))

    def _build(self, peer, work):
        spans = zip(work.cuts[:-1], work.cuts[1:], strict=True)
        pieces = [b.between(work.local, work.remote, start, stop) for start, stop in spans]
        return [b.Call(lambda piece=piece: vm_read(peer, peer.native[0], *piece)) for piece in pieces]


def vm_read(peer, pid, local, remote):
    for at in range(0, len(local), 1024):  # IOV_MAX
        here, there = (np.ascontiguousarray(side[at : at + 1024, :2]) for side in (local, remote))
        n = ctypes.c_ulong(len(here))
        pointers = [ctypes.c_void_p(side.ctypes.data) for side in (here, there)]
        if LIBC.process_vm_readv(pid, pointers[0], n, pointers[1], n, ctypes.c_ulong(0)) != here[:, 1].sum():
            raise b.PeerError(f"peer {peer.name!r}: {os.strerror(ctypes.get_errno())}", peer=peer.name)
