"""A few combinations of the fault matrix in every test run; all of them by ``make faults``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="the rendezvous service needs grpcio")

from tests.faults.combinations import Combination, combinations
from tests.faults.matrix import problems, run

from reshard.transports.registry import probe

EVERY_RUN = [
    Combination("read", "trainer killed"),
    Combination("vote", "receiver killed"),
    Combination("vote", "server killed"),
    Combination("read", "network stall"),
    Combination("connect", "wrong bytes"),
    Combination("read", "late digest"),
    Combination("verify", "slow rank"),
    Combination("allocate", "out of staging memory"),
    Combination("install", "SIGTERM"),
    Combination("vote", "trainer killed", "stream"),
    Combination("vote", "server silent"),
]
if not probe("nixl"):
    EVERY_RUN.append(Combination("read", "network stall", transport="nixl"))


@pytest.mark.timeout(400)
def test_some_combinations(tmp_path: Path) -> None:
    assert problems(run(EVERY_RUN, tmp_path, jobs=2)) == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(probe("nixl")), reason=f"nixl does not work here: {probe('nixl')}")
def test_every_fault_in_a_read_over_nixl(tmp_path: Path) -> None:
    chosen = [c for c in combinations("shadow", "nixl") if c.step == "read"]
    assert problems(run(chosen, tmp_path, jobs=2)) == {}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_every_combination(install: str, tmp_path: Path) -> None:
    assert problems(run(list(combinations(install)), tmp_path, jobs=2)) == {}
