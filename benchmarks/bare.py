"""The same reads by the native libraries' own calls, as a careful user would write them: no checks, no deadline."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reshard.transports import decode_endpoint
from reshard.transports.base import Peer
from reshard.transports.identity import ProcessIdentity
from reshard.transports.lists import ConnectedPeer
from reshard.transports.regions import U64, Region


class BareNixl:
    """An agent of its own, which writes to ``target``."""

    def __init__(self, target: Region) -> None:
        import nixl_cu12 as nixl

        self.agent = nixl.nixl_agent("bare", nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.agent.register_memory([(target.address, target.nbytes, 0, "")], "DRAM")

    def connect(self, endpoint: bytes) -> str:
        """Connect to the agent behind one of our endpoint messages; return its name."""
        from reshard.transports.nixl.transport import _PAYLOAD

        blob = decode_endpoint(endpoint).payload[ProcessIdentity.NBYTES + _PAYLOAD.size :]
        remote = bytes(self.agent.add_remote_agent(blob)).decode()
        self.agent.make_connection(remote)
        return remote

    def prepare(self, peer: str, local: U64, remote: U64) -> tuple[object, ...]:
        """Return a transfer request with what it needs to stay alive."""
        n = int(local[:, 4].sum()) if local.shape[1] == 5 else len(local)
        mine = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
        theirs = self.agent.prep_xfer_dlist(peer, remote, "DRAM")
        index = np.arange(n, dtype=np.int32)
        return self.agent.make_prepped_xfer("READ", mine, index, theirs, index), mine, theirs

    @staticmethod
    def release(prepared: tuple[Any, ...]) -> None:
        """Release a request and then its lists."""
        for handle in prepared:
            handle.release()

    def read(self, prepared: Sequence[tuple[object, ...]]) -> Callable[[], None]:
        """Return a function that posts all and polls each until it has ended."""
        handles = [item[0] for item in prepared]

        def run() -> None:
            active = [handle for handle in handles if self.agent.transfer(handle) != "DONE"]
            while active:
                active = [handle for handle in active if self.agent.check_xfer_state(handle) == "PROC"]

        return run


class BareUcx:
    """Single reads on connections of ours."""

    def __init__(self) -> None:
        from reshard.transports.ucx.library import load_library

        self.ucp: Any = load_library().ucp
        self.ffi = load_library().ffi

    def prepare(self, peer: Peer, local: U64, remote: U64) -> tuple[object, ...]:
        """Return the arguments of one read."""
        from reshard.transports.ucx.peers import UcxPeer

        assert isinstance(peer, ConnectedPeer)
        native = peer.native
        assert isinstance(native, UcxPeer)
        params = self.ffi.new("ucp_request_param_t *")
        pointers = [self.ffi.cast("void *", int(row[0, 0])) for row in (local, remote)]
        key = self.ffi.cast("void *", int(native.keys(np.zeros(1, np.intp))[0]))
        return native.lane._worker.handle, native.lane._endpoint_at, *pointers, int(local[0, 1]), key, params

    def read(self, prepared: Sequence[tuple[object, ...]]) -> Callable[[], None]:
        """Return a function that posts all and makes progress on each until it has ended."""
        get, progress, check = self.ucp.ucp_get_nbx, self.ucp.ucp_worker_progress, self.ucp.ucp_request_check_status

        def run() -> None:
            active = []
            for worker, endpoint, local, remote, nbytes, key, params in prepared:
                if request := get(endpoint, local, nbytes, remote, key, params):
                    active.append((worker, request))
            for worker, request in active:
                while check(request) == 1:
                    progress(worker)
                self.ucp.ucp_request_free(request)

        return run


_IOV_MAX = 1024


def vm_read(pid: int, local: U64, remote: U64) -> Callable[[], None]:
    """Return a function that reads rows by ``process_vm_readv``, the system call that UCX's CMA transport uses."""
    libc = ctypes.CDLL(None, use_errno=True)
    sides = [np.ascontiguousarray(rows[:, :2]) for rows in (local, remote)]

    def run() -> None:
        for start in range(0, len(local), _IOV_MAX):
            n = ctypes.c_ulong(min(_IOV_MAX, len(local) - start))
            to, of = (ctypes.c_void_p(side[start:].ctypes.data) for side in sides)
            done = libc.process_vm_readv(pid, to, n, of, n, ctypes.c_ulong(0))
            if done < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "process_vm_readv")

    return run
