"""What really moved: the report and the record of stages of refits that end well, with other holders, or not at all."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster
from tests.refit.test_failover import at_stage, publish, replicated
from tests.refit.test_overlap import WAIT_S, crew_threads, model, one_trainer, serves, start

from reshard.refit import crew
from reshard.refit.errors import (
    HolderLostError,
    ImpossibleThroughputError,
    QuarantinedError,
    RefitAborted,
    RefitTimeoutError,
    VerificationError,
)
from reshard.refit.retry import RetryPolicy
from reshard.refit.verify import Verifier
from reshard.transports.base import Prepared, Transfer
from reshard.transports.errors import TransferError

CELLS, CELL_BYTES, N_BATCHES = 32, 1024, 8
BATCH_BYTES = CELLS * CELL_BYTES // N_BATCHES


@contextmanager
def stages_records(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], dict[str, object]]]:
    """The last record of stages."""
    caplog.set_level(logging.INFO, logger="reshard.refit")

    def last() -> dict[str, object]:
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("REFIT_STAGES ")]
        parsed: dict[str, object] = json.loads(lines[-1].partition(" ")[2])
        return parsed

    yield last


@pytest.mark.parametrize("install", ["shadow", "stream"])
@pytest.mark.parametrize("n_landed", [0, 1, 5])
def test_a_refit_whose_wire_breaks_reports_the_batches_that_landed(
    n_landed: int, install: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stages_records(caplog) as last, one_trainer(install=install) as (cluster, wire, _):
        real, n_waits = wire.wait, [0]

        def wait(transfers: list[Transfer], **more: object) -> object:
            if any(t.prepared.nbytes >= CELL_BYTES for t in transfers):
                n_waits[0] += 1
                if n_waits[0] > n_landed:
                    raise TransferError("the wire broke")
            return real(transfers, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(wire, "wait", wait)
        (error,) = cluster.refit(1)
        assert isinstance(error, TransferError if install == "shadow" else QuarantinedError)
        record = last()
        assert record["outcome"] == ("aborted" if install == "shadow" else "quarantined")
        assert record["wire_bytes"] == n_landed * BATCH_BYTES
        assert (record["wire_s"] > 0) == (record["implied_gbps"] > 0) or n_landed == 0  # type: ignore[operator]
        assert record["received_bytes"] == record["wire_bytes"]
        assert record["verified_bytes"] <= record["wire_bytes"]  # type: ignore[operator]
        monkeypatch.undo()
        cluster.publish(2, model(2))
        (report,) = cluster.refit_ok(2)
        assert report.wire_bytes == last()["wire_bytes"] == CELLS * CELL_BYTES


@pytest.mark.parametrize("why", ["bytes", "rate", "hook"])
def test_a_refit_that_is_refused_after_its_last_read_reports_everything(
    why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stages_records(caplog) as last, one_trainer() as (cluster, _, engine):
        buffer = cluster.publishers[0]._newest
        assert buffer is not None
        if why == "bytes":
            buffer.data[CELLS * CELL_BYTES - 1] ^= 0x40  # in the last cell
        elif why == "rate":
            monkeypatch.setenv("RESHARD_MAX_GBPS", "1e-9")
        else:
            cluster.receivers[0]._on_stage = at_stage("verify", lambda: (_ for _ in ()).throw(OSError("no")))
        (error,) = cluster.refit(1)
        assert isinstance(error, {"bytes": VerificationError, "rate": ImpossibleThroughputError, "hook": OSError}[why])
        record = last()
        assert record["outcome"] == "aborted"
        assert record["wire_bytes"] == record["received_bytes"] == CELLS * CELL_BYTES
        assert record["verified_bytes"] <= (CELLS - (why == "bytes")) * CELL_BYTES  # type: ignore[operator]
        assert record["wire_s"] > 0  # type: ignore[operator]
        assert record["descriptors"] > 0  # type: ignore[operator]
        assert serves(cluster, engine, 0)


def test_a_member_that_read_everything_and_is_aborted_with_its_group_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from tests.refit.cluster import expected, tp_cluster, weights

    with stages_records(caplog), tp_cluster() as cluster:
        cluster.publish(0, weights(0))

        def fail() -> None:
            assert cluster.all_joined()
            raise OSError("no")

        cluster.receivers[1]._on_stage = at_stage("read", fail)
        first, second = cluster.refit(0)
        assert isinstance(first, RefitAborted)
        assert isinstance(second, OSError)
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("REFIT_STAGES ")]
        records = {r["member"]: r for r in (json.loads(line.partition(" ")[2]) for line in lines)}
        assert records["tp0"]["outcome"] == records["tp1"]["outcome"] == "aborted"
        assert records["tp0"]["wire_bytes"] >= sum(w.nbytes for w in expected(weights(0), 0).values())
        assert records["tp1"]["wire_bytes"] == 0


def test_what_a_lost_holder_delivered_crossed_the_wire_and_does_not_stand(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header cannot be read after its data: all that it sent is read again from another."""
    cluster, _, source = replicated(3, retry=RetryPolicy(1, 0.01), require_verified=True)
    with stages_records(caplog) as last, cluster:
        cluster.receivers[0].reader.batch_bytes = 1 << 30  # one batch
        publish(cluster, source, 0)
        cluster.refit_ok(0)
        planned = cluster.receivers[0].bench.planned
        assert planned is not None
        blocks = planned.plan.blocks
        mine = np.flatnonzero(blocks.holder == [h.name for h in planned.plan.holders].index("trainer-0"))
        sent = int((blocks.run_bytes[mine] * blocks.n_runs[mine]).sum())
        assert sent > 0
        publish(cluster, source, 1)
        wire = cluster.receiver_transports[0]
        real = wire.wait

        def wait(transfers: list[Transfer], **more: object) -> object:
            stats = real(transfers, **more)  # type: ignore[arg-type]
            if any(t.prepared.nbytes >= 256 for t in transfers):
                cluster.trainer_transports[0].close()
            return stats

        monkeypatch.setattr(wire, "wait", wait)
        (report,) = cluster.refit_ok(1)
        total = sum(w.nbytes for w in source.values())
        assert report.failovers == ("trainer-0",)
        assert report.received_bytes == report.verified_bytes == total
        assert report.wire_bytes == last()["wire_bytes"] == total + sent


def test_a_failover_that_finds_no_replica_reports_what_the_others_sent(caplog: pytest.LogCaptureFixture) -> None:
    from tests.refit.cluster import weights

    from reshard.refit.engines.arrays import ArrayEngine

    source = weights(0)
    engine = ArrayEngine({name: np.zeros_like(w) for name, w in source.items()})
    with (
        stages_records(caplog) as last,
        Cluster(2, engines=[engine], receiver_settings={"retry": RetryPolicy(1)}) as cluster,
    ):
        cluster.publish(0, source)
        cluster.receivers[0]._on_stage = at_stage("read", cluster.trainer_transports[1].close)
        (error,) = cluster.refit(0)
        assert isinstance(error, HolderLostError)
        first_half = sum(w[: -(-w.shape[0] // 2)].nbytes for w in source.values())
        assert last()["wire_bytes"] == first_half
        assert last()["outcome"] == "aborted"


def test_a_digest_that_never_ends_costs_a_refit_its_deadline_and_no_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = Verifier._verify

    def stuck(self: Verifier, check: object, tool: object) -> None:
        if threading.current_thread().name.startswith("reshard-crew"):
            assert release.wait(WAIT_S)
        real(self, check, tool)  # type: ignore[arg-type]

    with one_trainer() as (cluster, _, engine):
        monkeypatch.setattr(Verifier, "_verify", stuck)
        try:
            (error,) = cluster.refit(1, timeout_s=4.0)
            assert isinstance(error, RefitTimeoutError), error
            assert "at work (trainer-0: w" in str(error)
            assert crew_threads(), "it is still at work"
            assert serves(cluster, engine, 0)
            assert not cluster.leftovers()
            monkeypatch.undo()
            cluster.publish(2, model(2))
            cluster.refit_ok(2)
            assert serves(cluster, engine, 2)
        finally:
            release.set()
        for thread in [t for t in threading.enumerate() if t.name.startswith("reshard-crew")]:
            thread.join(TIMEOUT_S)
        assert serves(cluster, engine, 2)


def test_a_failed_read_gives_a_stuck_digest_up_after_a_while_and_names_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, started = threading.Event(), threading.Event()
    real = Verifier._verify

    def stuck(self: Verifier, check: object, tool: object) -> None:
        started.set()
        assert release.wait(WAIT_S)
        real(self, check, tool)  # type: ignore[arg-type]

    with one_trainer() as (cluster, wire, engine):
        real_post, n_posts = wire.post, [0]

        def post(prepared: Prepared, **more: float) -> object:
            n_posts[0] += prepared.nbytes >= CELL_BYTES
            if n_posts[0] == 4:
                assert started.wait(WAIT_S)
                raise TransferError("the wire broke")
            return real_post(prepared, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(crew, "_GRACE_S", 1.0)
        monkeypatch.setattr(Verifier, "_verify", stuck)
        monkeypatch.setattr(wire, "post", post)
        try:
            thread, out = start(cluster, 1)
            thread.join(WAIT_S - 1)
            assert not thread.is_alive(), "what is of no use any more is not waited for long"
            assert isinstance(out[0], HolderLostError)
            assert isinstance(out[0].__cause__, TransferError)
            assert "still verifying trainer-0: w" in caplog.text
        finally:
            release.set()
        assert serves(cluster, engine, 0)
