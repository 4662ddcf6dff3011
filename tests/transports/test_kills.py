"""`benchmarks.kills` counts what it says: owners that survive their readers, and owners that do not."""

from __future__ import annotations

import os
import signal

import pytest
from benchmarks import kills

from reshard.transports.registry import probe


def test_an_owner_that_survives_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert kills.main(["--transport", "memory", "--kills", "2", "--pieces", str(1 << 20)]) == 0
    assert "memory over one host: 2 readers killed, 0 owners lost" in capsys.readouterr().out


def test_an_owner_that_dies_is_counted_and_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[kills.Owner] = []

    class Noted(kills.Owner):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self)

    def killed(*_: object, **__: object) -> None:
        if len(made) == 1:
            os.kill(made[0].process.pid, signal.SIGKILL)

    monkeypatch.setattr(kills, "Owner", Noted)
    monkeypatch.setattr(kills, "kill_a_reader", killed)
    assert kills.main(["--transport", "memory", "--kills", "3", "--pieces", str(1 << 20)]) == 1
    said = capsys.readouterr().out
    assert "3 readers killed, 1 owners lost" in said
    assert "exit code -9" in said
    assert len(made) == 2


def test_an_owner_that_serves_other_bytes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "kill_a_reader", lambda *_, **__: None)
    real = kills.pattern
    monkeypatch.setattr(kills, "pattern", lambda nbytes, seed: real(nbytes, seed + 1))
    assert kills.main(["--transport", "memory", "--kills", "1", "--pieces", str(1 << 20)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", [(), ("--tcp",)], ids=["cma", "tcp"])
def test_ucx_loses_no_owner(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := probe("ucx"):
        pytest.skip(f"ucx does not work here: {reason}")
    monkeypatch.setenv("UCX_TLS", "tcp" if path else "all")
    assert kills.main(["--transport", "ucx", "--kills", "6", *path]) == 0
