"""Which process on which host: enough to see, on one host, that a process is gone or is another one by now.

A pid alone is reused; with its start time, the boot and the pid name space it is not.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

from reshard.transports.errors import OWN_LACK, EndpointError, OwnFaultError, PeerError

_LAYOUT = struct.Struct("<16sQIQ")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Part of an endpoint message's payload.

    Attributes
    ----------
    boot : bytes
        16 bytes, one value for each boot of a host.
    pid_space : int
        Inode of the pid name space.
    pid : int
    started : int
        Start time in clock ticks since boot.
    """

    boot: bytes
    pid_space: int
    pid: int
    started: int
    NBYTES: ClassVar[int] = _LAYOUT.size

    @classmethod
    def own(cls) -> Self:
        """Return that of this process."""
        return cls(*_own(os.getpid()))

    def pack(self) -> bytes:
        """Return it as `NBYTES` bytes."""
        return _LAYOUT.pack(self.boot, self.pid_space, self.pid, self.started)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read it from the beginning of a payload.

        Raises
        ------
        EndpointError
            If the payload is too short.
        """
        if len(payload) < _LAYOUT.size:
            raise EndpointError(f"endpoint payload: got {len(payload)} bytes, expected at least {_LAYOUT.size}")
        return cls(*_LAYOUT.unpack_from(payload))

    @property
    def visible(self) -> bool:
        """Whether it is on this host and in our pid name space."""
        own = self.own()
        return (self.boot, self.pid_space) == (own.boot, own.pid_space)

    def check(self, peer: str) -> None:
        """Raise `PeerError` if it is visible from here and not there any more."""
        if self.visible and start_time(str(self.pid)) != self.started:
            raise PeerError(f"peer {peer!r}: process {self.pid} has restarted or exited", peer=peer)


@cache
def _own(pid: int) -> tuple[bytes, int, int, int]:
    """Return the fields of this process, asked of the system once."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = bytes.fromhex(file.read().strip().replace("-", ""))
        return boot, os.stat("/proc/self/ns/pid").st_ino, pid, start_time("self")
    except OSError as error:
        raise OwnFaultError(f"which process this is cannot be asked of the system: {error}") from error


def start_time(pid: str) -> int:
    """Return field 22 of ``/proc/<pid>/stat``, in clock ticks since boot; 0 if there is no such process.

    One that has exited and was not waited for yet counts as gone: it has no memory (field 23).

    Raises
    ------
    OwnFaultError
        If this process has no descriptor left to look with.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[19]) if int(fields[20]) else 0
    except OSError as error:
        if error.errno in OWN_LACK:
            raise OwnFaultError(f"process {pid} cannot be looked at: {error}") from error
        return 0
    except (IndexError, ValueError):
        return 0
