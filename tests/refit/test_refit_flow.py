"""Publish and refit in one process: bytes equal, warm refits reuse everything, failures leave the old weights."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster, expected, holds, shards_of, tp_cluster, tp_engine, weights

from reshard.planner.errors import CoverageError
from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import (
    FenceTimeoutError,
    IncompleteRefit,
    PublishError,
    QuarantinedError,
    RefitAborted,
    RefitError,
    TornReadError,
    VerificationError,
)
from reshard.refit.records import CoverageRecord
from reshard.rendezvous.errors import EqualityError, RendezvousTimeoutError
from reshard.transports.errors import TransferError


def test_every_version_arrives_and_warm_refits_make_nothing_new() -> None:
    with tp_cluster() as cluster:
        for step in range(5):
            model = weights(step)
            cluster.publish(step, model)
            reports = cluster.refit_ok(step)
            for rank, report in enumerate(reports):
                assert holds(cluster.engines[rank], model, rank)  # type: ignore[arg-type]
                assert report.cold == (step == 0)
                assert report.new_registrations == (report.new_registrations if step == 0 else 0)
                assert report.version.step == step
                assert report.useful_bytes == sum(w.nbytes for w in expected(model, rank).values())
                assert report.coverage_pct == 100.0
                assert report.certificate.unwritten_bytes == 0
                assert report.received_bytes == report.wire_bytes >= report.useful_bytes
            assert not cluster.leftovers()
        assert cluster.receivers[0].check_serving().step == 4


@pytest.mark.parametrize("commit", ["swap", "copy"])
def test_commit_modes(commit: str) -> None:
    engines = [tp_engine(0, commit=commit), tp_engine(1, commit=commit)]
    first = [e["o"] for e in engines]
    with Cluster(engines=engines) as cluster:
        for step in range(3):
            model = weights(step)
            cluster.publish(step, model)
            cluster.refit_ok(step)
            assert all(holds(e, model, r) for r, e in enumerate(engines))
    assert [e["o"] is a for e, a in zip(engines, first, strict=True)] == [commit == "copy"] * 2
    assert all(holds(e, model, r) for r, e in enumerate(engines)), "weights outlive the receiver"


def test_latest_is_one_version_for_the_group_and_after_waits_for_a_newer_one() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        served = cluster.receivers[0].check_serving()
        with pytest.raises(RendezvousTimeoutError):
            cluster.receivers[0].refit("latest", after=served, timeout_s=1.0)
        cluster.publish(1, weights(1))
        results: list[object] = []
        threads = [
            threading.Thread(target=lambda r=r: results.append(r.refit("latest", after=served, timeout_s=TIMEOUT_S)))
            for r in cluster.receivers
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(TIMEOUT_S)
        assert [r.version.step for r in results] == [1, 1]  # type: ignore[attr-defined]


def test_asyncio() -> None:
    async def both(cluster: Cluster) -> None:
        await asyncio.gather(*(r.arefit(0, timeout_s=TIMEOUT_S) for r in cluster.receivers))

    with tp_cluster() as cluster:
        cluster.publish(0, weights(3))
        asyncio.run(both(cluster))
        assert holds(cluster.engines[0], weights(3), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [0, -1, math.inf, math.nan])
def test_timeouts_are_finite_and_over_zero(timeout_s: float) -> None:
    with tp_cluster() as cluster:
        with pytest.raises(ValueError, match="finite"):
            cluster.receivers[0].refit(0, timeout_s=timeout_s)
        with pytest.raises(ValueError, match="finite"):
            cluster.publishers[0].publish(epoch=0, step=0, tensors=[], empty=True, timeout_s=timeout_s)


def test_wire_dtype_casts_floats_and_leaves_exceptions_and_integers() -> None:
    """D1: a float32 router bias of 1.001 stays exact; D2: bf16 0x3F80 becomes fp32 0x3F800000."""
    bias = np.array([1.001, -1.001], np.float32)
    model = {"router.bias": bias, "w": np.array([1.0, 1.001], np.float32), "ids": np.array([1, 70000], np.int64)}
    engine = ArrayEngine(
        {"router.bias": np.zeros(2, np.float32), "w": np.zeros(2, np.float32), "ids": np.zeros(2, np.int64)}
    )
    settings = {"wire_dtype": "bfloat16", "wire_dtype_exceptions": ["*router*"]}
    with Cluster(1, engines=[engine], publisher_settings=settings) as cluster:
        cluster.publishers[0].publish(epoch=0, step=0, tensors=local_tensors(model), timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
    assert np.array_equal(engine["router.bias"].view(np.uint32), bias.view(np.uint32))
    assert engine["w"].view(np.uint32).tolist() == [0x3F800000, 0x3F800000]
    assert engine["ids"].tolist() == [1, 70000]


def test_two_casts_into_one_parameter_keep_their_places() -> None:
    """D4."""
    from reshard.refit.engines.arrays import take

    engine = ArrayEngine(
        {"ab": np.zeros((4, 2), np.float32)},
        layout={"ab": [take("a", into=np.s_[0:2]), take("b", into=np.s_[2:4])]},
    )
    bf16 = {"a": np.array([[0x3F80, 0x4000]] * 2, np.uint16), "b": np.array([[0x4040, 0x4080]] * 2, np.uint16)}
    with Cluster(1, engines=[engine]) as cluster:
        tensors = local_tensors(bf16, dtypes={"a": "bfloat16", "b": "bfloat16"})
        cluster.publishers[0].publish(epoch=0, step=0, tensors=tensors, timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
    assert engine["ab"].tolist() == [[1.0, 2.0]] * 2 + [[3.0, 4.0]] * 2


def test_memory_that_is_not_what_its_label_says_is_refused() -> None:
    """D3: a (4, 4) tensor labelled bf16 whose memory is fp32."""
    with pytest.raises(PublishError, match=r"labelled bfloat16 \(2 bytes an element\) but the memory holds float32"):
        local_tensors({"w": np.zeros((4, 4), np.float32)}, dtypes={"w": "bfloat16"})


def test_a_slot_without_tensors_says_so() -> None:
    with tp_cluster() as cluster:
        with pytest.raises(PublishError, match="holds nothing says so"):
            cluster.publishers[0].publish(epoch=0, step=0, tensors=[], timeout_s=TIMEOUT_S)
        cluster.publishers[0].publish(epoch=0, step=0, tensors=shards_of(weights(), 0, 1), timeout_s=TIMEOUT_S)
        cluster.publishers[1].publish(epoch=0, step=0, tensors=[], empty=True, timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
        assert holds(cluster.engines[0], weights(), 0)  # type: ignore[arg-type]


def test_a_missing_shard_is_refused_before_any_byte_moves() -> None:
    """N4: the error names tensor and rows; the old weights serve; no lease is left."""
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        model = weights(1)
        for i, p in enumerate(cluster.publishers):
            tensors = [t for t in shards_of(model, i, 2) if not (i == 1 and t.name == "k")]
            p.publish(epoch=0, step=1, tensors=tensors, layout_epoch=1, timeout_s=TIMEOUT_S)
        first, error = cluster.refit(1)
        assert isinstance(first, RefitAborted)
        assert isinstance(error, CoverageError)
        assert error.tensor == "k"
        assert error.missing == [((4, 8), (0, 16))]
        for rank in range(2):
            assert holds(cluster.engines[rank], weights(0), rank)  # type: ignore[arg-type]
            assert cluster.receivers[rank].check_serving().step == 0
        assert not cluster.leftovers()


def test_one_member_that_cannot_go_on_aborts_the_group() -> None:
    """R3: the other one keeps its old weights too, and the next refit succeeds."""
    fail = {"on": False}

    def stage(name: str) -> None:
        if fail["on"] and name == "verify":
            assert cluster.all_joined()
            raise RuntimeError("disk full")

    with tp_cluster() as cluster:
        cluster.receivers[1].close()
        cluster.receivers[1] = cluster.receiver(1, on_stage=stage)
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        fail["on"] = True
        first, second = cluster.refit(1)
        assert isinstance(second, RuntimeError)
        assert isinstance(first, RefitAborted)
        assert "disk full" in str(first)
        for rank in range(2):
            assert holds(cluster.engines[rank], weights(0), rank)  # type: ignore[arg-type]
            assert cluster.receivers[rank].check_serving().step == 0
        assert not cluster.leftovers()
        fail["on"] = False
        cluster.refit_ok(1)
        assert all(holds(cluster.engines[r], weights(1), r) for r in range(2))  # type: ignore[arg-type]


class _Breaks(ArrayEngine):
    """Fails while installing, when told to."""

    broken = False

    def install(self, buffers: object) -> None:  # type: ignore[override]
        if self.broken:
            raise OSError("no room on the device")
        super().install(buffers)  # type: ignore[arg-type]


def test_a_failed_install_quarantines_everybody_and_a_new_refit_mends_it() -> None:
    """R9."""
    whole = {"q": np.zeros((8, 16), np.float32), "k": np.zeros((8, 16), np.float32)}
    engines = [_Breaks({n: a.copy() for n, a in whole.items()}), _Breaks({n: a.copy() for n, a in whole.items()})]
    model = {n: w for n, w in weights(0).items() if n in whole}
    with Cluster(2, engines=engines) as cluster:
        cluster.publish(0, model)
        engines[1].broken = True
        first, second = cluster.refit(0)
        assert isinstance(first, QuarantinedError)
        assert isinstance(second, QuarantinedError)
        assert "no room on the device" in str(second)
        for r in cluster.receivers:
            assert r.state == "quarantined"
            with pytest.raises(QuarantinedError, match="serves nothing"):
                r.check_serving()
        assert not cluster.leftovers()
        engines[1].broken = False
        cluster.refit_ok(0)
        assert all(np.array_equal(e["k"], model["k"]) for e in engines)
        assert [r.state for r in cluster.receivers] == ["serving", "serving"]


def test_quarantine_refuses_a_refit_that_needs_old_weights() -> None:
    from reshard.refit.engines.arrays import take

    engine = _Breaks({"w": np.zeros((4, 2), np.float32)}, layout={"w": [take("w", np.s_[0:2], into=np.s_[0:2])]})
    with Cluster(1, engines=[engine]) as cluster:
        cluster.publish(0, {"w": np.ones((4, 2), np.float32)})
        engine.broken = True
        assert isinstance(cluster.refit(0)[0], QuarantinedError)
        engine.broken = False
        (error,) = cluster.refit(0)
        assert isinstance(error, QuarantinedError)
        assert "in part" in str(error)


def test_partly_written_parameters_keep_their_other_bytes() -> None:
    from reshard.refit.engines.arrays import take

    engine = ArrayEngine(
        {"w": np.full((4, 2), 7, np.float32), "keep": np.full(3, 5, np.float32)},
        layout={"w": [take("w", np.s_[0:2], into=np.s_[1:3])]},
    )
    with Cluster(1, engines=[engine]) as cluster:
        for step in range(3):
            cluster.publish(step, {"w": np.full((4, 2), step, np.float32)})
            (report,) = cluster.refit_ok(step)
            assert engine["w"].tolist() == [[7, 7], [step, step], [step, step], [7, 7]]
            assert engine["keep"].tolist() == [5, 5, 5]
            assert report.coverage.params_part_written_sample == ("w",)
            assert report.coverage.params_never_written_sample == ("keep",)


def test_only_takes_some_tensors() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        reports = cluster.refit_ok(1, only=["k", "nor*"])
        for rank, engine in enumerate(cluster.engines):
            old, new = expected(weights(0), rank), expected(weights(1), rank)
            assert np.array_equal(engine["qk"][:4], old["qk"][:4])  # type: ignore[index]
            assert np.array_equal(engine["qk"][4:], new["qk"][4:])  # type: ignore[index]
            assert np.array_equal(engine["o"], old["o"])  # type: ignore[index]
            assert np.array_equal(engine["norm"], new["norm"])  # type: ignore[index]
            assert reports[rank].coverage.params_never_written_sample == ("o",)


def test_coverage_of_a_quarter(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """N2: 48 equal engine layers, sources for 12."""
    layers = {f"layers.{i:02}.w": np.zeros((4, 8), np.float32) for i in range(48)}
    source = {name: np.ones((4, 8), np.float32) for name in list(layers)[:12]}
    engine = ArrayEngine(layers)
    with Cluster(1, engines=[engine]) as cluster:
        cluster.publish(0, source)
        (report,) = cluster.refit_ok(0)
        record = report.coverage
        assert isinstance(record, CoverageRecord)
        assert (record.coverage_pct, record.params_never_written, record.engine_params) == (25.0, 36, 48)
        assert record.params_never_written_sample == tuple(f"layers.{i}.w" for i in range(12, 22))
        (line,) = (r for r in caplog.records if r.getMessage().startswith("REFIT_COVERAGE "))
        assert line.levelname == "WARNING"
        monkeypatch.setenv("RESHARD_REQUIRE_FULL_COVERAGE", "1")
        cluster.receivers[0].close()
        cluster.receivers[0] = cluster.receiver(0)
        (error,) = cluster.refit(0)
        assert isinstance(error, IncompleteRefit)
        assert isinstance(error, RuntimeError)
        assert "25.0000 %" in str(error)
        assert "36 of 48 parameters are never written" in str(error)
        assert "bytes that are never requested are never checked" in str(error)
        assert not cluster.leftovers()


def test_names_that_do_not_meet_are_both_named(caplog: pytest.LogCaptureFixture) -> None:
    """N6: one source unconsumed, one parameter unwritten, no commit."""
    engine = ArrayEngine({"visual.blocks.0.w": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        cluster.publish(0, {"visual.decoder.layers.0.w": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
        (error,) = cluster.refit(0)
        assert isinstance(error, RefitAborted)
        assert "visual.decoder.layers.0.w" in str(error)
        assert engine["b"].tolist() == [0, 0, 0, 0]
        assert "visual.blocks.0.w" in caplog.text
        cluster.receivers[0].close()
        cluster.receivers[0] = cluster.receiver(0, allow_unconsumed=["visual.*"])
        cluster.refit_ok(0)
        assert engine["b"].tolist() == [1, 1, 1, 1]


def test_a_rank_may_read_nothing_and_a_group_may_not() -> None:
    """N7."""
    some, none = ArrayEngine({"w": np.zeros(4, np.float32)}), ArrayEngine({"mine": np.zeros(4, np.float32)})
    with Cluster(1, engines=[some, none]) as cluster:
        cluster.publish(0, {"w": np.ones(4, np.float32)})
        cluster.refit_ok(0)
        assert some["w"].tolist() == [1, 1, 1, 1]
    with Cluster(1, engines=[none], receiver_settings={"allow_unconsumed": ["*"]}) as cluster:
        cluster.publish(0, {"w": np.ones(4, np.float32)})
        (error,) = cluster.refit(0)
        assert isinstance(error, RefitAborted)


def test_a_request_for_an_unknown_tensor_is_an_error() -> None:
    """N7, third part: what a layout names must be published."""
    from reshard.planner.errors import TableError
    from reshard.refit.engines.arrays import take

    engine = ArrayEngine({"w": np.zeros(4, np.float32)}, layout={"w": [take("typo")]})
    with Cluster(1, engines=[engine]) as cluster:
        cluster.publish(0, {"w": np.ones(4, np.float32)})
        (error,) = cluster.refit(0)
        assert isinstance(error, TableError)
        assert "'typo'" in str(error)


def test_replicas_with_different_content_are_refused_naming_both() -> None:
    """N1b."""
    engine = ArrayEngine({"w": np.zeros(4, np.float32)})
    with Cluster(2, engines=[engine]) as cluster:
        for step, other in ((0, 1.0), (1, 1.5)):
            for value, p in zip((1.0, other), cluster.publishers, strict=True):
                tensors = local_tensors({"w": np.full(4, value, np.float32)}, replica_groups={"w": 3})
                if step == 1 and p is cluster.publishers[1]:
                    with pytest.raises(EqualityError, match=r"trainer-0.*trainer-1|trainer-1.*trainer-0"):
                        p.publish(epoch=0, step=step, tensors=tensors, timeout_s=TIMEOUT_S)
                else:
                    p.publish(epoch=0, step=step, tensors=tensors, timeout_s=TIMEOUT_S)
            if step == 0:
                (report,) = cluster.refit_ok(0)
                assert report.wire_bytes == 16
        (error,) = cluster.refit(1, timeout_s=TIMEOUT_S)
        assert isinstance(error, EqualityError)
        assert engine["w"].tolist() == [1, 1, 1, 1]


def test_a_source_that_changes_under_a_lease_is_caught() -> None:
    """D7: the seqlock does not know, the digests do; nothing is installed."""
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        buffer = cluster.publishers[1]._newest
        assert buffer is not None
        buffer.data[5] ^= 0x40
        results = cluster.refit(1)
        assert any(isinstance(r, VerificationError) for r in results)
        assert all(isinstance(r, VerificationError | RefitAborted) for r in results)
        named = next(r for r in results if isinstance(r, VerificationError))
        assert "trainer-1: q [4, 8) x [0, 16)" in str(named)
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]
        assert not cluster.leftovers()


def test_late_digests_are_caught_by_their_root() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        buffer = cluster.publishers[0]._newest
        assert buffer is not None
        buffer.digests[0, 0] ^= np.uint64(1)
        results = cluster.refit(0)
        assert any(isinstance(r, VerificationError) and "do not have the root" in str(r) for r in results)
        assert not cluster.leftovers()


def test_a_buffer_that_is_being_written_is_not_taken() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        buffer = cluster.publishers[0]._newest
        assert buffer is not None
        buffer.seqlock.begin()
        results = cluster.refit(0)
        assert any(isinstance(r, TornReadError) for r in results)


def test_a_failing_read_installs_nothing_even_over_a_sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5: destinations are prefilled with 0xA5, the read fails, the old weights stay."""
    monkeypatch.setenv("RESHARD_DEBUG_SENTINEL", "1")
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))

        def broken(*args: object, **kwargs: object) -> object:
            assert cluster.all_joined()
            raise TransferError("the wire broke")

        monkeypatch.setattr(cluster.receiver_transports[0], "wait", broken)
        first, second = cluster.refit(1)
        assert isinstance(first, TransferError)
        assert isinstance(second, RefitAborted)
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]
        assert not cluster.leftovers()


def test_bytes_that_were_never_delivered_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debug mode: a transport that says that it read and has not is found out, even with digests off."""
    from reshard.refit import reader as reader_module

    monkeypatch.setenv("RESHARD_DEBUG_SENTINEL", "1")
    engine = ArrayEngine({"w": np.zeros((64, 4), np.float32), "v": np.zeros(4, np.float32)})
    model = {"w": np.ones((64, 4), np.float32), "v": np.ones(4, np.float32)}
    with Cluster(1, engines=[engine], receiver_settings={"verify": "off"}) as cluster:
        cluster.publish(0, model)
        cluster.refit_ok(0)
        real = reader_module.read_waves

        def lying(transport: object, waves: list[list[object]], *args: object, **more: object) -> object:
            moved = [p for wave in waves for p in wave if p.nbytes > 64]  # type: ignore[attr-defined]
            totals = real(transport, [[p for p in w if p not in moved] for w in waves], *args, **more)  # type: ignore[arg-type]
            totals.nbytes += sum(p.nbytes for p in moved)  # type: ignore[attr-defined]
            return totals

        monkeypatch.setattr(reader_module, "read_waves", lying)
        (error,) = cluster.refit(0)
        assert isinstance(error, VerificationError)
        assert "'w': 1024 bytes from byte 0 on still hold the sentinel 0xA5" in str(error)
        assert engine["w"].tolist() == model["w"].tolist()


@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_the_sentinel_keeps_what_a_refit_does_not_write(install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.refit.engines.arrays import take

    monkeypatch.setenv("RESHARD_DEBUG_SENTINEL", "1")
    engine = ArrayEngine({"w": np.full((4, 2), 7, np.float32)}, layout={"w": [take("w", np.s_[0:2], into=np.s_[1:3])]})
    with Cluster(1, engines=[engine], receiver_settings={"install": install}) as cluster:
        cluster.publish(0, {"w": np.zeros((4, 2), np.float32)})
        cluster.refit_ok(0)
        assert engine["w"].tolist() == [[7, 7], [0, 0], [0, 0], [7, 7]]


def test_one_buffer_waits_for_its_readers_or_skips() -> None:
    settings = {"buffers": 1}
    with tp_cluster(publisher_settings=settings) as cluster:
        cluster.publish(0, weights(0))
        worker = cluster.receivers[0].worker()
        manifest = cluster.rendezvous.await_version(
            "m", group="other", members=["x"], member="x", worker=worker, want=0, timeout_s=TIMEOUT_S
        )
        with pytest.raises(FenceTimeoutError, match=r"trainer-0.*was still being read"):
            cluster.publishers[0].publish(epoch=0, step=1, tensors=shards_of(weights(1), 0, 2), timeout_s=1.0)
        cluster.rendezvous.release_lease(manifest.lease)
        cluster.publish(1, weights(1))
        cluster.refit_ok(1)
        assert holds(cluster.engines[0], weights(1), 0)  # type: ignore[arg-type]


def test_skip_on_busy() -> None:
    with tp_cluster(publisher_settings={"buffers": 1, "on_busy": "skip"}) as cluster:
        cluster.publish(0, weights(0))
        worker = cluster.receivers[0].worker()
        manifest = cluster.rendezvous.await_version(
            "m", group="other", members=["x"], member="x", worker=worker, want=0, timeout_s=TIMEOUT_S
        )
        assert [p.skipped for p in cluster.publish(1, weights(1))] == [True, True]
        cluster.rendezvous.release_lease(manifest.lease)
        cluster.refit_ok(0)
        assert [p.skipped for p in cluster.publish(2, weights(2))] == [False, False]
        cluster.refit_ok(2)


def test_a_reallocated_destination_is_noticed() -> None:
    """D6: no write goes to the old memory; the next refit replans."""
    engine = ArrayEngine({"w": np.zeros(4, np.float32)}, commit="copy")
    with Cluster(1, engines=[engine]) as cluster:
        cluster.publish(0, {"w": np.full(4, 1, np.float32)})
        cluster.refit_ok(0)
        old = engine["w"]
        engine._arrays["w"] = np.zeros(4, np.float32)
        cluster.publish(1, {"w": np.full(4, 2, np.float32)})
        (report,) = cluster.refit_ok(1)
        assert report.cold
        assert engine["w"].tolist() == [2, 2, 2, 2]
        assert old.tolist() == [1, 1, 1, 1]


def test_a_destination_reallocated_during_the_refit_is_refused() -> None:
    engine = ArrayEngine({"w": np.zeros(4, np.float32)}, commit="copy")

    def stage(name: str) -> None:
        if name == "vote":
            engine._arrays["w"] = np.zeros(4, np.float32)

    with Cluster(1, engines=[engine], receiver_settings={"on_stage": stage}) as cluster:
        cluster.publish(0, {"w": np.full(4, 1, np.float32)})
        (error,) = cluster.refit(0)
        assert isinstance(error, QuarantinedError)
        assert "reallocated" in str(error)


def test_impossible_throughput_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """T4, through a whole refit."""
    from reshard.refit.errors import ImpossibleThroughputError

    monkeypatch.setenv("RESHARD_MAX_GBPS", "1e-9")
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        results = cluster.refit(0)
        assert any(isinstance(r, ImpossibleThroughputError) for r in results)
        assert all(not e["qk"].any() for e in cluster.engines)  # type: ignore[index]


def test_a_second_refit_at_once_is_refused() -> None:
    with tp_cluster() as cluster:
        inside = threading.Event()
        error: list[BaseException] = []

        def stage(name: str) -> None:
            if name == "read" and not inside.is_set():
                inside.set()
                try:
                    cluster.receivers[0].refit(0, timeout_s=1)
                except RefitError as e:
                    error.append(e)

        cluster.receivers[0].close()
        cluster.receivers[0] = cluster.receiver(0, on_stage=stage)
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        assert "refitting already" in str(error[0])


def test_settings_are_checked() -> None:
    with tp_cluster() as cluster:
        cluster.publisher_settings = {"buffers": 3}
        cluster.members = ["tp0", "tp0"]
        with pytest.raises(PublishError, match="buffers=3"):
            cluster.publisher(0)
        with pytest.raises(RefitError, match="distinct members"):
            cluster.receiver(0)


@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_verification_switched_on_between_refits_verifies(install: str) -> None:
    with tp_cluster(receiver_settings={"verify": "off", "install": install}) as cluster:
        cluster.publish(0, weights(0))
        blind, _ = cluster.refit_ok(0)
        receiver = cluster.receivers[0]
        receiver.verify = "full"
        cluster.publish(1, weights(1))
        seeing, _ = cluster.refit_ok(1)
        receiver.verify = "off"
        cluster.publish(2, weights(2))
        again, _ = cluster.refit_ok(2)
        with pytest.raises(ValueError, match="'on': expected 'off', 'sample' or 'full'"):
            receiver.verify = "on"  # type: ignore[assignment]
    assert blind.verified.verified_bytes == again.verified.verified_bytes == 0
    assert seeing.verified.verified_bytes > 0
