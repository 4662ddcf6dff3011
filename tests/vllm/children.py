"""Child processes that answer commands: trainer ranks and vLLM engines, each with its own interpreter.

`Child` starts ``python -m MODULE ADDRESS ARGUMENTS`` in a session of its own and talks to it over a unix socket. The
child's loop is `answer`, or `host` where one process, whose imports take seconds, builds one thing after another for
many tests; `Hosts` keeps such processes. Every question has a deadline, and closing kills whatever the child started.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
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
        self.key = (module, frozenset(env.items()))
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
        self._n_posted = 0

    def accept(self, timeout_s: float) -> None:
        """Wait until the child is ready for questions."""
        if self._connection is not None:
            return
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
        self._n_posted += 1
        self.connection.send((self._n_posted, command, arguments))

    def result(self, timeout_s: float) -> Any:
        """The answer to the last question; those to earlier ones, which a failed test did not wait for, are dropped."""
        deadline = time.monotonic() + timeout_s
        number = 0
        while number != self._n_posted:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{self.name}: no answer in {timeout_s} s\n{self.tail()}")
            try:
                number, kind, value = self.connection.recv()
            except (EOFError, ConnectionError):
                raise RuntimeError(f"{self.name} died\n{self.tail()}") from None
        if kind:
            raise ChildError(kind, f"{self.name}: {value}")
        return value

    def ask(self, command: str, timeout_s: float = 120.0, **arguments: Any) -> Any:
        self.post(command, **arguments)
        return self.result(timeout_s)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def leave(self) -> None:
        """Ask nothing more: the child ends by itself."""
        if self._connection is not None:
            self._connection.close()
        self._listener.close()

    def close(self, patience_s: float = 20.0) -> None:
        """End the child, which is given a while to clean up, and all that it started."""
        self.leave()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def answer(address: str, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer until the other side closes."""
    with Client(address, family="AF_UNIX", authkey=KEY) as connection:
        while True:
            try:
                number, command, arguments = connection.recv()
            except (EOFError, ConnectionError):
                return
            try:
                reply = (number, "", commands[command](**arguments))
            except Exception as error:  # the parent raises it
                traceback.print_exc()
                reply = (number, type(error).__name__, str(error))
            connection.send(reply)


def host(address: str, build: Callable[[dict[str, Any]], Any], commands: Sequence[str]) -> None:
    """Answer for one object after another: ``begin`` builds it, ``commands`` are its methods, ``end`` closes it."""
    held: list[Any] = []

    def begin(arguments: dict[str, Any]) -> None:
        held.append(build(arguments))

    def end() -> None:
        held.pop().close()

    def of(command: str) -> Callable[..., Any]:
        return lambda **arguments: getattr(held[-1], command)(**arguments)

    answer(address, {"begin": begin, "end": end} | {command: of(command) for command in commands})
    if held:
        end()


class Hosts:
    """Child processes that run `host`, kept for the next test that needs such a one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: dict[object, list[Child]] = {}
        self._numbers = itertools.count()

    def take(self, module: str, wanted: Sequence[tuple[Mapping[str, str], dict[str, Any]]]) -> list[Child]:
        """Have one child build each of what is wanted: (environment, arguments). All at once: they may be peers."""
        made: list[Child] = []
        try:
            for env, _ in wanted:
                idle = self._idle.get((module, frozenset(env.items())))
                name = f"{module.rpartition('.')[2]}-{next(self._numbers)}"
                made.append(idle.pop() if idle else Child(module, self._folder, name, env))
            for child in made:
                child.accept(300)
            for child, (_, arguments) in zip(made, wanted, strict=True):
                child.post("begin", arguments=arguments)
            for child in made:
                try:
                    child.result(300)
                except ChildError as error:
                    error.add_note(child.tail())
                    raise
        except BaseException:
            for child in made:
                child.close(patience_s=0)
            raise
        return made

    def give(self, children: Sequence[Child]) -> None:
        """Have the children close what they built. One that cannot is ended."""
        for child in children:
            with contextlib.suppress(OSError):
                child.post("end")
        failed: Exception | None = None
        for child in children:
            try:
                child.result(60)
            except Exception as error:
                child.close(patience_s=0)
                failed = failed or error
            else:
                self._idle.setdefault(child.key, []).append(child)
        if failed is not None:
            raise failed

    def close(self) -> None:
        idle = [child for of_key in self._idle.values() for child in of_key]
        for child in idle:  # all of them are told before the first is waited for
            child.leave()
        for child in idle:
            child.close()
