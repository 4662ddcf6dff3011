"""Child processes that answer commands: trainer ranks and vLLM engines, each with its own interpreter.

`Child` starts ``python -m MODULE ADDRESS ARGUMENTS`` in a session of its own and talks to it over a unix socket;
`answer` is the child's loop. Every question has a deadline, and closing kills whatever the child has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEY = b"reshard tests"


class ChildError(RuntimeError):
    """The child's own error, with its type's name in `kind`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Child:
    def __init__(self, module: str, folder: Path, name: str, env: Mapping[str, str], *arguments: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        address = str(folder / f"{name}.sock")
        self._listener = Listener(address, family="AF_UNIX", authkey=KEY)
        full_env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **env}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, address, *arguments],
                env=full_env,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection: Connection | None = None

    def accept(self, timeout_s: float) -> None:
        """Wait until the child is ready for questions."""
        deadline = time.monotonic() + timeout_s
        socket = self._listener._listener._socket  # type: ignore[attr-defined]
        while True:
            socket.settimeout(1.0)
            try:
                self._connection = self._listener.accept()
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} did not start\n{self.tail()}") from None
            else:
                return

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            raise RuntimeError(f"{self.name} was not accepted")
        return self._connection

    def post(self, command: str, **arguments: Any) -> None:
        self.connection.send((command, arguments))

    def result(self, timeout_s: float) -> Any:
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"{self.name}: no answer in {timeout_s} s\n{self.tail()}")
        try:
            kind, value = self.connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} died\n{self.tail()}") from None
        if kind:
            raise ChildError(kind, f"{self.name}: {value}")
        return value

    def ask(self, command: str, timeout_s: float = 120.0, **arguments: Any) -> Any:
        self.post(command, **arguments)
        return self.result(timeout_s)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def answer(address: str, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer until the other side closes."""
    with Client(address, family="AF_UNIX", authkey=KEY) as connection:
        while True:
            try:
                command, arguments = connection.recv()
            except EOFError:
                return
            try:
                reply = ("", commands[command](**arguments))
            except Exception as error:  # the parent raises it
                traceback.print_exc()
                reply = (type(error).__name__, str(error))
            connection.send(reply)
