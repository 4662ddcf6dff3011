"""``make soak``: the demo's model, the optimizer stepping between, every version's bytes compared; nothing grows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the demo's model needs torch")
pytest.importorskip("transformers", reason="the demo's model needs transformers")

from benchmarks.soak import TOLERATED, WARM_UP, Usage, grown, sampled

from reshard.transports import registry

USAGE = Usage(500.0, 400_000, 50, 4, 16, 31.0, 0, 12, 4, 88, 0, 2, 2)


RUNS = [("memory", 2000), ("nixl", 600), ("ucx", 600)]


@pytest.mark.parametrize("name", list(asdict(USAGE)))
def test_growth_is_seen(name: str) -> None:
    share, more = TOLERATED.get(name, (0.0, 0.0))
    before = asdict(USAGE)[name]
    limit = before * (1 + share) + more
    assert not grown([USAGE, replace(USAGE, **{name: limit})])
    assert grown([USAGE, replace(USAGE, **{name: limit + 1})]) == {name: (before, limit + 1)}


@pytest.mark.parametrize("n_refits", sorted({n for _, n in RUNS}))
@pytest.mark.parametrize(("name", "each"), [*((n, 1) for n in asdict(USAGE) if n != "rss_mib"), ("rss_mib", 1 / 8)])
def test_the_least_that_leaks_with_each_refit_is_seen_in_each_run(name: str, each: float, n_refits: int) -> None:
    """One of anything, or 128 KiB; with room for as much noise as that is."""
    leaking = [replace(USAGE, **{name: asdict(USAGE)[name] + each * n}) for n in sampled(n_refits)]
    ((before, after),) = grown(leaking).values()
    share, more = TOLERATED.get(name, (0.0, 0.0))
    assert after - before > 1.5 * (before * share + more)


def test_what_is_held_for_a_moment_is_no_growth() -> None:
    noisy = replace(USAGE, rss_mib=900.0, objects=500_000, descriptors=60, threads=9)
    assert grown([USAGE, USAGE, noisy, noisy, USAGE, noisy]) == {}
    assert set(grown([USAGE, noisy, USAGE, noisy, noisy, noisy])) == {"rss_mib", "objects", "descriptors", "threads"}


def test_it_is_sampled_from_the_warm_up_to_the_end() -> None:
    for n_refits in (WARM_UP + 1, WARM_UP + 7, 300, 600, 2000):
        due = sampled(n_refits)
        assert (due[0], due[-1]) == (WARM_UP, n_refits)
        assert len(due) <= 42


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("transport", "n_refits"), RUNS)
def test_nothing_grows(transport: str, n_refits: int, tmp_path: Path) -> None:
    if reason := registry.probe(transport):
        pytest.skip(reason)
    out = tmp_path / "usage.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--refits", str(n_refits), "--grpc"]
    done = subprocess.run(
        [*command, "--transport", transport, "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{n_refits} refits, every version's bytes equal; nothing grew" in done.stdout
    samples = json.loads(out.read_text())
    assert samples[-1]["refits"] == n_refits
    assert samples[-1]["leases"] == 0
