"""The memory ledger, compared with what the allocator hook saw and with what the transport has registered."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from tests.refit.cluster import Cluster
from tests.refit.test_install_modes import Doubler

from reshard.planner.options import PlanOptions
from reshard.refit.engines.arrays import ArrayEngine, take
from reshard.refit.engines.loader import LoaderEngine

Taken = dict[str, list[int]]
N_ROWS = 32


def cast_model() -> tuple[dict[str, np.ndarray], ArrayEngine]:
    """Columns that are cast: every byte goes through staging, of several waves; sizes that are no multiples of 64."""
    model = {f"w{i}": np.random.default_rng(i).standard_normal((N_ROWS, 64)).astype(np.float32) for i in range(6)}
    engine = ArrayEngine(
        {name: np.zeros((N_ROWS - 1, 2), np.float64) for name in model},
        layout={name: [take(name, np.s_[1:, 3:5])] for name in model},
    )
    return model, engine


def clustered(engine: object, taken: Taken, **settings: object) -> Cluster:
    merged = {"on_allocate": lambda what, n: taken[what].append(n), **settings}
    return Cluster(1, engines=[engine], receiver_settings=merged)  # type: ignore[list-item]


@pytest.mark.parametrize("budget_parts", [1, 2, 6])
def test_each_mode_takes_what_the_other_ones_ledger_said(budget_parts: int) -> None:
    """Shadow and stream of one model: both ledgers say the same of both, and the hook saw it."""
    model, _ = cast_model()
    one = (N_ROWS - 1) * 16  # bytes of one parameter, 496 -> 512 in an arena
    stream_bytes = budget_parts * 512
    options = PlanOptions(staging_bytes=16384, max_runs_per_block=4)
    said = {}
    for install in ("shadow", "stream"):
        taken: Taken = defaultdict(list)
        engine = cast_model()[1]
        with clustered(engine, taken, options=options, install=install, stream_bytes=stream_bytes) as cluster:
            for step in range(3):
                cluster.publish(step, {name: w + step for name, w in model.items()})
                (report,) = cluster.refit_ok(step)
                assert all(np.array_equal(engine[n], w[1:, 3:5] + np.float32(step)) for n, w in model.items())
                ledger = said[install] = report.ledger
                assert ledger.engine_bytes == 6 * one
                assert (ledger.shadow_bytes, ledger.materialised_bytes) == (6 * 512, 0)
                assert ledger.stream_bytes == stream_bytes
                assert 0 < ledger.staging_bytes <= 16384
                measured = sum(sum(sizes[:1]) for what, sizes in taken.items() if what != "meta")
                assert ledger.extra_bytes(install) == measured, "the first arena of each kind"
            if install == "shadow":
                assert taken["shadow"] == [6 * 512] * 2, "and a second set, since the engine swaps"
                assert taken["staging"] == [ledger.staging_bytes]
                assert "stream" not in taken
            else:
                assert taken["stream"] == [stream_bytes], "one arena for all parts"
                assert taken["staging"] == [ledger.staging_bytes], "and one staging"
                assert "shadow" not in taken
    assert said["stream"].staging_bytes <= said["shadow"].staging_bytes


def test_a_budget_under_the_largest_parameter_is_said_in_advance() -> None:
    """`shadow` works, and its ledger says what `stream` would have to be given."""
    taken: Taken = defaultdict(list)
    engine = ArrayEngine({"a": np.zeros(300, np.float32), "b": np.zeros(4, np.float32)})
    with clustered(engine, taken, stream_bytes=64) as cluster:
        cluster.publish(0, {"a": np.ones(300, np.float32), "b": np.ones(4, np.float32)})
        (report,) = cluster.refit_ok(0)
        assert report.ledger.stream_bytes == 1216  # 1,200 bytes of 'a' in an arena
        assert report.ledger.shadow_bytes == 1216 + 64 == taken["shadow"][0]


@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_sources_that_the_loader_computes_with_are_counted(install: str) -> None:
    taken: Taken = defaultdict(list)
    with clustered(LoaderEngine(Doubler()), taken, install=install) as cluster:
        cluster.publish(0, {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
        (report,) = cluster.refit_ok(0)
        ledger = report.ledger
        assert ledger.engine_bytes == 16 + 24
        assert ledger.shadow_bytes == 128
        assert ledger.materialised_bytes == 64
        if install == "shadow":
            assert taken["loader"] == [ledger.materialised_bytes]
            assert taken["shadow"][0] == ledger.shadow_bytes
        else:
            assert taken["stream"] == [ledger.stream_bytes]
        assert ledger.extra_bytes(install) == sum(sizes[0] for what, sizes in taken.items() if what != "meta")


def test_warm_refits_and_a_close_leave_the_registered_memory_as_the_ledger_says() -> None:
    """The transport's own table of regions: nothing beside what was counted, nothing left after the close."""
    model, engine = cast_model()
    taken: Taken = defaultdict(list)
    options = PlanOptions(staging_bytes=16384, max_runs_per_block=4)
    with clustered(engine, taken, options=options) as cluster:
        transport = cluster.receiver_transports[0]
        for step in range(4):
            cluster.publish(step, model)
            (report,) = cluster.refit_ok(step)
            registered = sum(arena.nbytes for arena in cluster.receivers[0].reader.arenas.all())
            assert registered == sum(sum(sizes) for sizes in taken.values())
            assert registered == 2 * report.ledger.shadow_bytes + report.ledger.staging_bytes + taken["meta"][0]
        held = len(transport._ledger.all_entries())  # type: ignore[attr-defined]
        assert held == len(cluster.receivers[0].reader.arenas.all()) == 4
        cluster.receivers[0].close()
        assert not transport._ledger.all_entries()  # type: ignore[attr-defined]
