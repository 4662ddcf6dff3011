"""`vllm serve` under test: started as a user starts it, and asked over HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ports import lasting_port
from tests.vllm.children import ROOT


class HTTPFailure(RuntimeError):
    """The server answered with an error; `status` is its code."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Server:
    def __init__(self, checkpoint: Path, folder: Path, env: Mapping[str, str], options: Sequence[str]) -> None:
        port = lasting_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"server-{port}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(checkpoint)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port), *options],
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **env},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> None:
        """Until it serves."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get("health")
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start\n{self.tail()}") from None
                time.sleep(0.3)
            else:
                return

    def get(self, path: str) -> Any:
        return self._ask("GET", path)

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        return self._ask("POST", path, json=body, params=query)

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        import requests

        answer = requests.request(method, f"{self.url}/{path}", timeout=120, **more)
        if answer.status_code != 200:
            raise HTTPFailure(answer.status_code, answer.text)
        return answer.json() if answer.text else None

    def say(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        sampling = {"temperature": 0.0, "max_tokens": n_tokens, "ignore_eos": True, "detokenize": False}
        answer = self.post("inference/v1/generate", {"token_ids": list(prompt), "sampling_params": sampling})
        (choice,) = answer["choices"]
        tokens: list[int] = choice["token_ids"]
        return tokens

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
