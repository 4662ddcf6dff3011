"""How do many Python processes start fast, and how is none of them left behind?

One process, the *nursery*, imports the slow packages once and forks a child per request, so seven processes pay for one
import of torch. It never starts a thread and never runs any of the children's work, so forking it is safe.

1. `serve` (run as `python -m reshard.refit.demo.nursery FD`) imports what it is told to, then answers requests.
2. A request carries a name, a target "module:function", its arguments and, as a passed file descriptor, the child's
   end of its channel (`reshard.refit.demo.supervisor` holds the other end).
3. The nursery dies with its parent and the children die with the nursery (`PR_SET_PDEATHSIG`), even by SIGKILL; when
   its control channel closes it kills and reaps whatever is left.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from types import FrameType
from typing import Final, NoReturn

from reshard.refit.demo.channel import Channel, ChannelClosed, Message

__all__ = ["MAX_REQUEST_BYTES", "die_with_parent", "serve"]

MAX_REQUEST_BYTES: Final = 1 << 16
"""Longest request, in bytes: one request is one datagram of a SOCK_SEQPACKET pair."""

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however the parent ends (Linux).

    Parameters
    ----------
    parent_pid
        The expected parent. If it is gone already, this process exits at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


@dataclass(slots=True)
class _Nursery:
    """The children of this process, by pid, and the channel to the supervisor."""

    control: socket.socket
    names: dict[int, str] = field(default_factory=dict)
    pidfds: dict[int, int] = field(default_factory=dict)

    def send(self, message: Message) -> None:
        self.control.send(json.dumps(message).encode())

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self.control.fileno(), *self.pidfds.values()], [], [])
            for pid in [pid for pid, pidfd in self.pidfds.items() if pidfd in ready]:
                self._reap(pid)
            if self.control.fileno() in ready:
                data, descriptors, _, _ = socket.recv_fds(self.control, MAX_REQUEST_BYTES, 2)
                if not data:
                    return
                request = json.loads(data)
                channel_fd, log_fd = descriptors
                pid = self._fork(request, channel_fd, log_fd)
                os.close(channel_fd)
                os.close(log_fd)
                self.send({"started": request["name"], "pid": pid})

    def _reap(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        os.close(self.pidfds.pop(pid))
        self.send({"exited": self.names.pop(pid), "status": os.waitstatus_to_exitcode(status)})

    def _fork(self, request: Message, channel_fd: int, log_fd: int) -> int:
        nursery_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(request, channel_fd, log_fd, nursery_pid)
        self.names[pid] = str(request["name"])
        self.pidfds[pid] = os.pidfd_open(pid)
        return pid

    def _run_child(self, request: Message, channel_fd: int, log_fd: int, nursery_pid: int) -> NoReturn:
        status = 1
        try:
            die_with_parent(nursery_pid)
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, _raise_exit)
            self.control.close()
            for pidfd in self.pidfds.values():
                os.close(pidfd)
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # one that is killed has said it
            os.close(log_fd)
            channel = Channel(socket.socket(fileno=channel_fd), peer="supervisor")
            status = _call(str(request["target"]), request["arguments"], channel)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - this process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def close(self) -> None:
        """Kill and reap every child."""
        for pid in list(self.names):
            os.kill(pid, signal.SIGKILL)
        for pid, pidfd in self.pidfds.items():
            os.waitpid(pid, 0)
            os.close(pidfd)
        self.names.clear()
        self.pidfds.clear()


def _raise_exit(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _call(target: str, arguments: object, channel: Channel) -> int:
    """Call `module:function(channel, **arguments)`; a failure is reported on the channel, and is the exit status."""
    module_name, _, function_name = target.partition(":")
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments of {target}: got {type(arguments).__name__}, expected a mapping")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        function(channel, **arguments)
    except ChannelClosed:
        return 0
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        traceback.print_exc()
        channel.send({"failed": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def serve(control_fd: int, parent_pid: int, modules: list[str]) -> None:
    """Import `modules`, say so on the control channel, and fork children until the channel closes.

    Parameters
    ----------
    control_fd
        File descriptor of this end of a SOCK_SEQPACKET pair.
    parent_pid
        Process that owns the other end; this process dies with it.
    modules
        Names of modules to import before the first fork. None of them may start a thread.
    """
    die_with_parent(parent_pid)
    nursery = _Nursery(socket.socket(fileno=control_fd))
    try:
        for module in modules:
            importlib.import_module(module)
        n_threads = len(os.listdir("/proc/self/task"))
        if n_threads != 1:
            raise RuntimeError(f"importing {', '.join(modules)} started {n_threads - 1} threads: forking is not safe")
        nursery.send({"ready": os.getpid()})
        nursery.run()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        nursery.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
