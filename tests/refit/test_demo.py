"""`reshard demo` as a user runs it: every byte compared, and a killed trainer told from a good refit."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.refit.leftovers import orphaned_segments, segments

from reshard.planner.errors import MissingDependencyError
from reshard.refit.demo.run import run_demo as run_in_this_process
from reshard.refit.demo.settings import DemoSettings
from reshard.transports.registry import probe

ROOT = Path(__file__).resolve().parents[2]
MAIN = "from reshard.refit.cli import main; main()"
INTERRUPTIBLE = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {MAIN}"
"""A run in the background inherits that SIGINT is ignored."""
pytestmark = pytest.mark.timeout(400)

needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(n) is None for n in ("torch", "transformers", "safetensors", "grpc", "typer", "rich")),
    reason="the demo needs torch, transformers, safetensors, grpcio, typer and rich",
)


def reshard(*arguments: str, timeout_s: float = 350.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )


def processes_of(folder: Path) -> list[int]:
    """Processes whose output still goes to a log in the folder."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                target = (entry / "fd" / "1").readlink()
            except OSError:
                continue
            if folder in target.parents:
                found.append(int(entry.name))
    return found


def run_demo(folder: Path, *options: str, transport: str = "memory") -> subprocess.CompletedProcess[str]:
    if reason := probe(transport):
        pytest.skip(f"transport {transport}: {reason}")
    before = segments()
    done = reshard(
        "demo", "--transport", transport, "--keep", str(folder), "--json", str(folder / "report.json"), *options
    )
    assert processes_of(folder) == []
    assert orphaned_segments(before) == set()
    return done


def check(
    folder: Path,
    done: subprocess.CompletedProcess[str],
    *,
    tensor_parallel: int,
    trainers: int,
    cut_hints: bool = True,
) -> None:
    """With cut hints the second refit plans anew, for buffers laid out by what the ranks read, and verifies it all."""
    n_cold = 2 if cut_hints else 1
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["schema"] == "reshard-demo-v1"
    assert report["published"].keys() == {f"trainer-{rank}" for rank in range(trainers)}
    assert [refit["step"] for refit in report["refits"]] == list(range(n_cold + 1))
    for refit in report["refits"]:
        assert refit["ranks"].keys() == {f"inference-{rank}" for rank in range(tensor_parallel)}
        for rank in refit["ranks"].values():
            assert rank["cold"] == (refit["step"] < n_cold)
            assert rank["coverage_pct"] == 100.0
            assert rank["certificate"]["unwritten_bytes"] == 0
            certificate = rank["certificate"]
            assert certificate["written_bytes"] + certificate["filled_bytes"] == certificate["requested_bytes"] > 0
            assert rank["wire_bytes"] >= rank["useful_bytes"] > 0
            assert rank["wire_bytes"] >= rank["verified_bytes"] > 0
            if cut_hints and refit["step"]:
                assert rank["verified_bytes"] == rank["wire_bytes"] == rank["useful_bytes"]
            assert {"discover", "read", "verify", "vote", "install"} <= rank["stages"].keys()
            assert f"{rank['n_descriptors']:,}" in done.stdout
    assert report["refits"][0]["tokens"] != report["refits"][1]["tokens"], "the optimizer's step changed nothing"
    assert "written exactly once" in done.stdout
    assert {"capture", "plan"} <= report["refits"][0]["ranks"]["inference-0"]["stages"].keys()


@needs_packages
def test_the_demo(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    check(tmp_path, done, tensor_parallel=2, trainers=4)
    published = json.loads((tmp_path / "report.json").read_text())["published"]
    assert [published[f"trainer-{rank}"]["n_expert_tensors"] for rank in range(4)] == [6, 6, 6, 0]
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tensor_parallel", "trainers", "transport"),
    [
        pytest.param((), 2, 4, "nixl", id="nixl"),
        pytest.param(("--model", "dense"), 2, 4, "memory", id="dense-tied"),
        pytest.param(("--tp", "4", "--trainers", "3", "--layers", "2"), 4, 3, "memory", id="fewer-kv-heads-than-ranks"),
        pytest.param(("--tp", "1", "--trainers", "1", "--layers", "1"), 1, 1, "memory", id="one-to-one"),
        pytest.param(("--trainers", "7"), 2, 7, "memory", id="seven-trainers"),
        pytest.param(("--sharding", "hsdp"), 2, 4, "memory", id="hsdp"),
        pytest.param(("--sharding", "fsdp+tp"), 2, 4, "memory", id="fsdp-over-tp"),
    ],
)
def test_other_layouts(
    tmp_path: Path, options: tuple[str, ...], tensor_parallel: int, trainers: int, transport: str
) -> None:
    check(
        tmp_path, run_demo(tmp_path, *options, transport=transport), tensor_parallel=tensor_parallel, trainers=trainers
    )


@needs_packages
@pytest.mark.slow
def test_without_cut_hints_some_cells_are_read_in_part(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--no-cut-hints")
    check(tmp_path, done, tensor_parallel=2, trainers=4, cut_hints=False)
    for refit in json.loads((tmp_path / "report.json").read_text())["refits"]:
        for rank in refit["ranks"].values():
            assert 0 < rank["verified_bytes"] < rank["wire_bytes"]


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "nixl"])
def test_a_killed_trainer(tmp_path: Path, transport: str) -> None:
    """Both ranks keep the old weights, the error names the holder, the exit code is not zero, nothing is left."""
    done = run_demo(tmp_path, "--kill", "trainer-2", transport=transport)
    assert done.returncode == 1
    assert "trainer-2 was killed in the middle of the refit to step 1" in done.stderr
    for rank in range(2):
        line = next(line for line in done.stderr.splitlines() if line.startswith(f"inference-{rank}: "))
        assert "trainer-2" in line
    assert "inference-0, inference-1: the weights of step 0 still serve, bit for bit" in done.stderr
    assert not (tmp_path / "report.json").exists()


@needs_packages
@pytest.mark.slow
def test_a_killed_trainer_with_a_replica(tmp_path: Path) -> None:
    """The ranks go on with the replica in the same refit, and every byte is compared as ever."""
    done = run_demo(tmp_path, "--kill", "trainer-2", "--sharding", "hsdp")
    check(tmp_path, done, tensor_parallel=2, trainers=4, cut_hints=False)
    ranks = json.loads((tmp_path / "report.json").read_text())["refits"][1]["ranks"]
    took_over = [rank["failovers"] for rank in ranks.values()]
    assert ["trainer-2"] in took_over
    assert all(failovers in ([], ["trainer-2"]) for failovers in took_over)


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Neither processes nor temporary files, and no trace on the screen."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "demo", "--transport", "memory"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 0: publishing"):
                break
        folder = next(tmp_path.glob("reshard-demo-*"))
        assert len(processes_of(folder)) >= 8
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode not in (0, -number), errors
        assert "Traceback" not in errors
        assert processes_of(folder) == []
        assert list(tmp_path.glob("reshard-demo-*")) == []
    finally:
        process.kill()
        process.wait(20)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
    with pytest.raises(MissingDependencyError, match=r"reshard\[demo\]"):
        run_in_this_process(DemoSettings(transport="memory"), lambda *_: None)


@pytest.mark.skipif(importlib.util.find_spec("typer") is None, reason="the command line needs typer")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--transport", "carrier-pigeon"), "--transport carrier-pigeon: transport 'carrier-pigeon' is unknown"),
        (("--tp", "5"), "--tp: got 5, expected a divisor of the 8 query heads"),
        (("--model", "huge"), "--model: got 'huge', expected one of moe, dense"),
        (("--sharding", "hsdp", "--trainers", "3"), "--sharding hsdp: got 3 trainers, expected an even number"),
        (("--kill", "trainer-9"), "--kill: got 'trainer-9', expected one of trainer-0"),
        (("--json", "/nowhere/report.json"), "--json /nowhere/report.json: /nowhere is no folder"),
        pytest.param(("--keep", __file__), "the folder cannot be made: File exists", marks=needs_packages),
        pytest.param(("--timeout", "0.5"), "its imports took over 0.", marks=needs_packages),
    ],
)
def test_wrong_options_are_refused_at_once(options: tuple[str, ...], message: str) -> None:
    done = reshard("demo", *options, timeout_s=120)
    assert done.returncode == 1
    assert done.stderr.startswith("reshard: DemoError: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
