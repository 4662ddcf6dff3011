"""How are the demo's processes started, asked, watched and, whatever happens, ended?

1. `Supervisor()` starts the nursery (`reshard.refit.demo.nursery`), which imports the slow packages once.
2. `start` forks a named child from it, whose output goes to a log file, and returns its `Child`.
3. `ask` sends a command to some children and waits, with a deadline, until each has answered, failed or died. All
   children are watched all the time: one that dies ends the wait of everybody, within a grace.
4. `close` asks the children to stop, and kills what does not. It runs on failure too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from reshard.refit.demo.channel import Channel, ChannelClosed, JsonValue, Message, remaining_s
from reshard.refit.demo.nursery import MAX_REQUEST_BYTES
from reshard.refit.demo.settings import DemoError

__all__ = ["Child", "ChildrenFailed", "Supervisor"]

LOG_TAIL_BYTES: Final = 2000
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Numeric libraries start no threads in the nursery, so that it can be forked, and the ranks share a few cores."""


class ChildrenFailed(DemoError):
    """Some of the demo's processes failed.

    Parameters
    ----------
    failures
        What went wrong, by name of the process.
    answers
        What the others answered, by name.
    """

    def __init__(self, failures: Mapping[str, str], answers: Mapping[str, Message]) -> None:
        self.failures = dict(failures)
        self.answers = dict(answers)
        super().__init__("\n".join(f"{name}: {text}" for name, text in sorted(self.failures.items())))


@dataclass(eq=False, slots=True)
class Child:
    """A process that the nursery forked.

    Parameters
    ----------
    name
        Its unique name, e.g. "trainer-2".
    channel
        The supervisor's end of its channel.
    log
        The file that its standard output and error go to.
    pid
        Its process id.
    exit_status
        Its exit status once it has ended (negative: minus the signal's number), else None.
    """

    name: str
    channel: Channel
    log: Path
    pid: int
    exit_status: int | None = None
    failure: str = ""

    def kill(self, *, timeout_s: float = 10.0) -> None:
        """Kill the process (SIGKILL) and wait until it has ended.

        Raises
        ------
        DemoError
            If it has not ended in time.
        """
        if self.exit_status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                ended, _, _ = select.select([descriptor], [], [], timeout_s)
            finally:
                os.close(descriptor)
            if not ended:
                raise DemoError(f"{self.name}: process {self.pid} did not end within {timeout_s:g} s of SIGKILL")

    def log_tail(self) -> str:
        """Return the end of what the process printed."""
        data = self.log.read_bytes()[-LOG_TAIL_BYTES:] if self.log.exists() else b""
        return data.decode(errors="replace")


@dataclass(eq=False, slots=True)
class Supervisor:
    """Starts, asks and ends child processes.

    Parameters
    ----------
    modules
        What the nursery imports before the first fork.
    log_folder
        Folder of the children's log files.
    timeout_s
        Deadline of the nursery's imports and of each start, in seconds.
    environment
        Environment variables to set in the nursery and so in all children.
    grace_s
        Once a child has failed, how long the others may still take to answer, in seconds.
    stop_grace_s
        How long the children may take to stop before they are killed, in seconds.

    Notes
    -----
    Make it in the main thread: the nursery dies with the *thread* that made it.
    """

    modules: Sequence[str]
    log_folder: Path
    timeout_s: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 15.0
    stop_grace_s: float = 5.0
    children: dict[str, Child] = field(default_factory=dict)
    _control: Channel = field(init=False)
    _nursery: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = Channel(ours, peer="nursery")
        log = self.log_folder / "nursery.log"
        with theirs, log.open("wb") as output:
            self._nursery = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "reshard.refit.demo.nursery",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    *self.modules,
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **ONE_THREAD, **self.environment},
                start_new_session=True,
            )
        try:
            self._control.receive(timeout_s=self.timeout_s)
        except (ChannelClosed, TimeoutError) as error:
            self.close()
            late = isinstance(error, TimeoutError)
            why = f"its imports took over {self.timeout_s:g} s" if late else "it ended"
            printed = log.read_text(errors="replace")[-LOG_TAIL_BYTES:].strip()
            said = f"; it printed:\n{printed}" if printed else ""
            raise DemoError(f"the nursery did not start: {why}{said}") from error

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, name: str, target: str, arguments: Mapping[str, JsonValue]) -> Child:
        """Fork a child that calls `target(channel, **arguments)`.

        Parameters
        ----------
        name
            Unique name of the child.
        target
            "module:function".
        arguments
            JSON values.
        """
        if name in self.children:
            raise DemoError(f"start {name!r}: a process of this name was started already")
        request = json.dumps({"name": name, "target": target, "arguments": dict(arguments)}).encode()
        if len(request) > MAX_REQUEST_BYTES:
            raise DemoError(
                f"start {name!r}: the arguments take {len(request)} bytes, expected at most {MAX_REQUEST_BYTES}"
            )
        log = self.log_folder / f"{name}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("wb") as output:
            socket.send_fds(self._control.socket, [request], [theirs.fileno(), output.fileno()])
        deadline = time.monotonic() + self.timeout_s
        while True:
            message = self._hear_nursery(remaining_s(deadline))
            if message.get("started") == name:
                break
            self._note_exit(message)
        child = self.children[name] = Child(name, Channel(ours, peer=name), log, pid=_integer(message["pid"]))
        return child

    def ask(
        self,
        children: Sequence[Child],
        command: Mapping[str, JsonValue],
        *,
        timeout_s: float,
        on_event: Callable[[str, Message], None] | None = None,
    ) -> dict[str, Message]:
        """Send a command to each child and return what each answered, by name.

        Parameters
        ----------
        children
            Whom to ask.
        command
            One command for all, `{"do": ...}`, or one for each name.
        timeout_s
            Seconds until all must have answered.
        on_event
            Called with (name, message) for each message that is not an answer.

        Raises
        ------
        ChildrenFailed
            If a child answered with an error, died, or did not answer in time, or if any other child of this supervisor
            died meanwhile.
        """
        for child in children:
            message = dict(command) if "do" in command else _message(command[child.name])
            with contextlib.suppress(ChannelClosed):
                child.channel.send(message)
        return self.wait(children, timeout_s=timeout_s, on_event=on_event)

    def wait(
        self,
        children: Sequence[Child],
        *,
        timeout_s: float,
        on_event: Callable[[str, Message], None] | None = None,
    ) -> dict[str, Message]:
        """Wait for one answer of each child, as `ask` does: a process answers once of itself, when it is ready."""
        answers: dict[str, Message] = {}
        failures: dict[str, str] = {}
        asked = {child.name for child in children}
        deadline = time.monotonic() + timeout_s
        while waiting := {name for name in asked if name not in answers and name not in failures}:
            if time.monotonic() >= deadline:
                reason = "did not answer after others failed" if failures else "did not answer in time"
                failures.update(dict.fromkeys(waiting, reason))
                break
            n_failures = len(failures)
            for name, message in self._receive(deadline):
                if "answer" in message and name in asked:
                    answers[name] = _message(message["answer"])
                elif "error" in message or "failed" in message:
                    failures[name] = str(message.get("error", message.get("failed")))
                elif on_event is not None:
                    on_event(name, message)
            for child in self.children.values():
                if child.exit_status is not None and child.name not in answers and child.name not in failures:
                    failures[child.name] = self._obituary(child)
            if len(failures) > n_failures == 0:
                deadline = min(deadline, time.monotonic() + self.grace_s)
        ordered = {child.name: answers[child.name] for child in children if child.name in answers}
        if failures:
            raise ChildrenFailed(failures, ordered)
        return ordered

    def forget(self, child: Child) -> None:
        """Watch a child no longer: that it has ended is known, and is nobody's failure any more."""
        del self.children[child.name]
        if child.channel.fileno() >= 0:
            child.channel.close()

    def _receive(self, deadline: float) -> list[tuple[str, Message]]:
        """Wait for messages of any child, or for an exit; note the exits, return the messages."""
        alive = {child.channel: child for child in self.children.values() if child.channel.fileno() >= 0}
        ready, _, _ = select.select([self._control, *alive], [], [], remaining_s(deadline))
        received: list[tuple[str, Message]] = []
        for channel in ready:
            if channel is self._control:
                continue
            child = alive[channel]
            try:
                received.append((child.name, channel.receive(timeout_s=1.0)))
            except ChannelClosed:
                channel.close()
        if self._control in ready:
            self._note_exit(self._hear_nursery(1.0))
        return received

    def _hear_nursery(self, timeout_s: float) -> Message:
        try:
            return self._control.receive(timeout_s=timeout_s)
        except ChannelClosed as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._nursery.wait(self.stop_grace_s)
            raise DemoError(
                f"the nursery (process {self._nursery.pid}) has ended with status {self._nursery.returncode}, and all "
                "its children with it: was it killed, for want of memory perhaps?"
            ) from error

    def _note_exit(self, message: Message) -> None:
        child = self.children.get(str(message.get("exited")))
        if child is not None:
            child.exit_status = _integer(message["status"])

    def _obituary(self, child: Child) -> str:
        status = child.exit_status
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"exited with status {status}"
        tail = child.log_tail().strip()
        return f"process {child.pid} {how}" + (f"; it printed:\n{tail}" if tail else "")

    def close(self) -> None:
        """End all children and the nursery: ask, then kill. Nothing is left behind."""
        for child in self.children.values():
            if child.exit_status is None and child.channel.fileno() >= 0:
                with contextlib.suppress(ChannelClosed, OSError):
                    child.channel.send({"do": "stop"})
        deadline = time.monotonic() + self.stop_grace_s
        with contextlib.suppress(DemoError, ChannelClosed, TimeoutError, OSError):
            while any(child.exit_status is None for child in self.children.values()) and time.monotonic() < deadline:
                self._receive(deadline)
        for child in self.children.values():
            if child.channel.fileno() >= 0:
                child.channel.close()
        self._control.close()
        try:
            self._nursery.wait(self.stop_grace_s)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()


def _integer(value: JsonValue) -> int:
    if not isinstance(value, int):
        raise TypeError(f"got {value!r}, expected an integer")
    return value


def _message(value: JsonValue) -> Message:
    if not isinstance(value, dict):
        raise TypeError(f"got {value!r}, expected an object")
    return value
