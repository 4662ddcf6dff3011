"""Streaming in place, one-shot loads, leases that are not kept: what each promises and what each leaves behind."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster, holds, tp_cluster, tp_engine, weights

from reshard.planner.options import PlanOptions
from reshard.refit import streaming as streaming_module
from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.engines.arrays import ArrayEngine, take
from reshard.refit.engines.loader import LoaderEngine
from reshard.refit.engines.torch_module import TorchModuleEngine
from reshard.refit.errors import (
    HolderLostError,
    PublishError,
    QuarantinedError,
    RefitAborted,
    RefitError,
    StagingBudgetError,
    UnverifiedError,
    VerificationError,
)


def streaming(**settings: object) -> Cluster:
    """Two `tp_engine` ranks that stream with an arena of 512 bytes (each needs three parts)."""
    merged = {"install": "stream", "stream_bytes": 512, **settings}
    return Cluster(engines=[tp_engine(0), tp_engine(1)], receiver_settings=merged)


def test_streaming_takes_a_small_arena_and_keeps_addresses() -> None:
    taken: list[tuple[str, int]] = []
    with streaming(on_allocate=lambda what, n: taken.append((what, n))) as cluster:
        addresses = [e[n].ctypes.data for e in cluster.engines for n in ("qk", "o", "norm")]  # type: ignore[index]
        for step in range(3):
            cluster.publish(step, weights(step))
            before = len(taken)
            reports = cluster.refit_ok(step)
            assert all(holds(cluster.engines[r], weights(step), r) for r in range(2))  # type: ignore[arg-type]
            for report in reports:
                assert report.mode == "stream"
                assert report.cold == (step == 0)
                assert report.received_bytes == report.wire_bytes
                assert report.ledger.extra_bytes("stream") <= 512 + report.ledger.staging_bytes
                assert report.ledger.stream_bytes < report.ledger.shadow_bytes
            assert len(taken) == before or step == 0
        assert addresses == [e[n].ctypes.data for e in cluster.engines for n in ("qk", "o", "norm")]  # type: ignore[index]
        assert {what for what, _ in taken} <= {"stream", "staging", "meta"}
        assert all(n <= 512 for what, n in taken if what == "stream")
        assert not any(e.paused for e in cluster.engines)  # type: ignore[attr-defined]
        assert not cluster.leftovers()


def test_the_engine_is_paused_before_anything_is_written() -> None:
    seen: list[tuple[str, bool]] = []
    engines = [tp_engine(0), tp_engine(1)]
    with Cluster(engines=engines, receiver_settings={"install": "stream", "stream_bytes": 512}) as cluster:
        cluster.receivers[0]._on_stage = lambda name: seen.append((name, engines[0].paused))
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
    assert ("vote", True) in seen
    assert seen.index(("vote", True)) < next(i for i, (name, _) in enumerate(seen) if name == "read")
    assert all(paused for name, paused in seen if name in ("vote", "read", "verify", "install"))


def test_a_failure_before_the_vote_leaves_old_weights_and_resumes() -> None:
    with streaming() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))

        def stage(name: str) -> None:
            if name == "vote":
                assert cluster.all_joined()
                raise RuntimeError("no")

        cluster.receivers[1]._on_stage = stage
        first, second = cluster.refit(1)
        assert isinstance(first, RefitAborted)
        assert str(second) == "no"
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]
        assert not any(e.paused for e in cluster.engines)  # type: ignore[attr-defined]
        assert not cluster.leftovers()


def test_wrong_bytes_while_streaming_quarantine_the_group_and_a_refit_mends_it() -> None:
    with streaming() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        buffer = cluster.publishers[0]._newest
        assert buffer is not None
        buffer.data[5] ^= 1
        results = cluster.refit(1)
        assert all(isinstance(r, QuarantinedError) for r in results)
        assert any(isinstance(r.__cause__, VerificationError) for r in results if isinstance(r, BaseException))
        assert [r.state for r in cluster.receivers] == ["quarantined"] * 2
        assert all(e.paused for e in cluster.engines)  # type: ignore[attr-defined]
        assert not cluster.leftovers()
        cluster.publish(2, weights(2))
        cluster.refit_ok(2)
        assert all(holds(cluster.engines[r], weights(2), r) for r in range(2))  # type: ignore[arg-type]
        assert not any(e.paused for e in cluster.engines)  # type: ignore[attr-defined]


@pytest.mark.parametrize("lacking", ["staging", "meta"])
def test_want_of_memory_for_streaming_leaves_nothing_registered(lacking: str) -> None:
    """Else each try would keep an arena of the whole stream budget, until the next one cannot have one."""

    def allocate(what: str, n_bytes: int) -> None:
        if what == lacking:
            raise MemoryError(f"no {n_bytes} bytes for {what}")

    engine = ArrayEngine({"q": np.zeros((8, 4), np.float64)}, layout={"q": [take("q", np.s_[:, 3:7])]})
    settings = {
        "install": "stream",
        "stream_bytes": 4096,
        "on_allocate": allocate,
        "options": PlanOptions(max_runs_per_block=1),
        "allow_unconsumed": ["*"],
    }
    with Cluster(1, engines=[engine], receiver_settings=settings) as cluster:
        cluster.publish(0, weights(0))
        transport, receiver = cluster.receiver_transports[0], cluster.receivers[0]
        for _ in range(2):
            assert isinstance(cluster.refit(0)[0], MemoryError)
            assert not receiver.reader.arenas.all()
            assert not transport._ledger.all_entries()  # type: ignore[attr-defined]
            assert len(receiver.reader.links._listeners) == 1
        receiver.reader.on_allocate = None
        receiver.reader.arenas._on_allocate = None
        cluster.refit_ok(0)
        assert np.array_equal(engine["q"], weights(0)["q"][:, 3:7].astype(np.float64))


@pytest.mark.parametrize("install", ["shadow", "stream"])
@pytest.mark.parametrize("mode", ["off", "sample"])
def test_require_verified_needs_full_verification(install: str, mode: str) -> None:
    """Else nothing would be refused (off), or each refit, in `stream` mode once the old weights are gone (sample)."""
    with streaming(install=install, verify=mode, require_verified=True) as cluster:
        cluster.publish(0, weights(0))
        for error in cluster.refit(0, timeout_s=5.0):
            assert isinstance(error, UnverifiedError | RefitAborted), error
            assert f"got '{mode}'" in str(error)
        assert [r.state for r in cluster.receivers] == ["empty"] * 2
        for receiver in cluster.receivers:
            receiver.require_verified = False
        cluster.refit_ok(0)


@pytest.mark.parametrize("why", ["published no digests", "cells would be read in part: trainer-"])
def test_what_cannot_be_verified_while_streaming_is_refused_before_the_vote(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = streaming_module.build_checks
    monkeypatch.setattr(streaming_module, "build_checks", lambda plan: replace(real(plan), partial=((0, 0),)))
    digests = "digests" not in why
    if not digests:
        monkeypatch.undo()
    engines = [tp_engine(0), tp_engine(1)]
    settings = {"install": "stream", "stream_bytes": 512}
    with Cluster(engines=engines, receiver_settings=settings, publisher_settings={"digests": digests}) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        for receiver in cluster.receivers:
            receiver.require_verified = True
        for error in cluster.refit(1, timeout_s=5.0):
            assert isinstance(error, UnverifiedError | RefitAborted), error
            assert why in str(error)
        assert [r.check_serving().step for r in cluster.receivers] == [0, 0]
        assert all(holds(engines[r], weights(0), r) for r in range(2))
        assert not any(e.paused for e in engines)


def test_a_parameter_over_the_stream_budget_is_refused_before_the_vote() -> None:
    with streaming(stream_bytes=256) as cluster:
        cluster.publish(0, weights(0))
        results = cluster.refit(0)
        assert any(isinstance(r, StagingBudgetError) and "'qk' takes 512 bytes" in str(r) for r in results)
        assert all(not e["qk"].any() for e in cluster.engines)  # type: ignore[index]


def test_an_engine_that_cannot_be_written_in_place_is_refused() -> None:
    class OnlyShadow:
        """The protocol without the streaming calls."""

        def __init__(self, engine: ArrayEngine) -> None:
            for name in ("capture", "parameters", "signature", "read_live", "load_materialised", "install"):
                setattr(self, name, getattr(engine, name))

    with pytest.raises(RefitError, match="no StreamEngine"):
        Cluster(1, engines=[OnlyShadow(tp_engine(0))], receiver_settings={"install": "stream"})


class Reducer(torch.nn.Module):
    """Sums a large source into a small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, ws: object) -> None:
        for name, w in ws:  # type: ignore[attr-defined]
            if name == "b":
                self.a.data.copy_(w.sum(1))


class Doubler(torch.nn.Module):
    """Copies one source and computes with another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.b = torch.nn.Parameter(torch.zeros(6), requires_grad=False)

    def load_weights(self, ws: object) -> None:
        for name, w in ws:  # type: ignore[attr-defined]
            if name == "a":
                self.a.data.copy_(w)
            else:
                self.b.data[2:].copy_(w * 2)


@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_computing_loaders_in_both_modes(install: str) -> None:
    model = Doubler()
    model.b.data[:2] = 7
    with Cluster(1, engines=[LoaderEngine(model)], receiver_settings={"install": install}) as cluster:
        for step in range(1, 4):
            source = {"a": np.full(4, step, np.float32), "b": np.full(4, step, np.float32)}
            cluster.publish(step, source)
            (report,) = cluster.refit_ok(step)
            assert model.a.tolist() == [step] * 4
            assert model.b.tolist() == [7, 7, *[2 * step] * 4]
            assert report.coverage.dest_bytes == 16 + 16
            assert report.coverage.params_part_written_sample == ("b",)


def test_a_materialised_source_over_the_budget_is_named_before_any_read() -> None:
    options = PlanOptions(staging_bytes=4096)
    with Cluster(1, engines=[LoaderEngine(Reducer())], receiver_settings={"options": options}) as cluster:
        cluster.publish(0, {"a": np.ones(4, np.float32), "b": np.ones((4, 2048), np.float32)})
        (error,) = cluster.refit(0)
        assert isinstance(error, StagingBudgetError)
        assert "'b'" in str(error)
        assert "32768 bytes" in str(error)
        assert "budget is 4096 bytes" in str(error)


def test_staging_stays_under_its_budget() -> None:
    """An allocator hook sees every allocation; a budget of 1 KiB makes several waves."""
    taken: list[tuple[str, int]] = []
    model = {f"w{i}": np.random.default_rng(i).standard_normal((32, 64)).astype(np.float32) for i in range(6)}
    engine = ArrayEngine(
        {name: np.zeros((32, 2), np.float64) for name in model},
        layout={name: [take(name, np.s_[:, 3:5])] for name in model},
    )
    settings = {
        "options": PlanOptions(staging_bytes=16384, max_runs_per_block=4),
        "on_allocate": lambda what, n: taken.append((what, n)),
    }
    with Cluster(1, engines=[engine], receiver_settings=settings) as cluster:
        cluster.publish(0, model)
        (report,) = cluster.refit_ok(0)
        assert all(np.array_equal(engine[n], w[:, 3:5]) for n, w in model.items())
        staging = [n for what, n in taken if what == "staging"]
        assert len(staging) == 1
        assert staging[0] <= 16384
        planned = cluster.receivers[0].bench.planned
        assert planned is not None
        assert planned.plan.n_waves > 1
        assert report.certificate.written_bytes == sum(engine[n].nbytes for n in model)


class Watched:
    """A client that writes down when leases are released."""

    def __init__(self, inner: object, order: list[str]) -> None:
        self._inner, self._order = inner, order

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def release_lease(self, lease: object, *, timeout_s: float) -> None:
        self._order.append("lease")
        self._inner.release_lease(lease, timeout_s=timeout_s)  # type: ignore[attr-defined]


def test_load_leaves_no_peer_registration_or_lease() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        order: list[str] = []
        receiver = cluster.receivers[0]
        close = receiver.reader.links.close
        receiver.reader.links.close = lambda: (order.append("peers"), close())  # type: ignore[method-assign]
        receiver.rendezvous = Watched(cluster.rendezvous, order)  # type: ignore[assignment]
        other = threading.Thread(target=lambda: cluster.receivers[1].load(0, timeout_s=TIMEOUT_S))
        other.start()
        report = receiver.load(0, timeout_s=TIMEOUT_S)
        other.join(TIMEOUT_S)
        assert order[:2] == ["peers", "lease"]
        assert report.cold
        assert all(len(r.reader.links) == 0 for r in cluster.receivers)
        assert all(holds(cluster.engines[r], weights(0), r) for r in range(2))  # type: ignore[arg-type]
        assert not cluster.leftovers()


@pytest.mark.parametrize("stage", ["certify", "allocate", "read", "verify"])
@pytest.mark.parametrize("one_shot", [True, False])
def test_a_failure_releases_peers_before_the_lease(stage: str, one_shot: bool) -> None:
    """Whatever failed: nobody may read under a lease that is gone."""
    engine = ArrayEngine({"q": np.zeros((8, 16), np.float32)})
    with Cluster(2, engines=[engine]) as cluster:
        cluster.publish(0, {"q": weights(0)["q"]})
        order: list[str] = []
        receiver = cluster.receivers[0]
        release = receiver.reader.links.release
        receiver.reader.links.release = lambda names: (order.append("peers"), release(names))  # type: ignore[method-assign]
        receiver.rendezvous = Watched(cluster.rendezvous, order)  # type: ignore[assignment]

        def fail(name: str) -> None:
            if name == stage:
                order.clear()
                raise MemoryError(f"at {stage}")

        receiver._on_stage = fail
        with pytest.raises(MemoryError, match=f"at {stage}"):
            (receiver.load if one_shot else receiver.refit)(0, timeout_s=TIMEOUT_S)
        assert "peers" in order[: order.index("lease")]
        assert order.count("lease") == 1
        assert not cluster.leftovers()
        if one_shot:
            assert len(receiver.reader.links) == 0


def test_a_failed_load_leaves_nothing_either() -> None:
    engine = ArrayEngine({"q": np.zeros((8, 16), np.float32)})
    with Cluster(2, engines=[engine]) as cluster:
        cluster.publish(0, {"q": weights(0)["q"]})
        transport = cluster.trainer_transports[1]
        cluster.receivers[0]._on_stage = lambda name: transport.close() if name == "read" else None
        with pytest.raises(HolderLostError, match="trainer-1"):
            cluster.receivers[0].load(0, timeout_s=TIMEOUT_S)
        assert len(cluster.receivers[0].reader.links) == 0
        assert not cluster.leftovers()


def test_a_load_can_be_repeated() -> None:
    engine = ArrayEngine({"q": np.zeros((8, 16), np.float32)})
    with Cluster(2, engines=[engine]) as cluster:
        for step in range(3):
            cluster.publish(step, {"q": weights(step)["q"]})
            cluster.receivers[0].load(step, timeout_s=TIMEOUT_S)
            assert np.array_equal(engine["q"], weights(step)["q"])


def test_no_lease_for_sources_that_never_change() -> None:
    seen: list[int] = []
    with tp_cluster(receiver_settings={"lease": "none"}) as cluster:
        cluster.publish(0, weights(0))
        cluster.receivers[0]._on_stage = lambda name: (
            seen.append(len(cluster.leftovers())) if name == "verify" else None
        )
        cluster.refit_ok(0)
        assert seen[0] <= 1


def test_torch_module_by_names_and_renames() -> None:
    module = torch.nn.Linear(4, 3)
    engine = TorchModuleEngine(module, rename={"w": "weight", "b": "bias"})
    pointers = module.weight.data_ptr()
    with Cluster(1, engines=[engine]) as cluster:
        for step in range(3):
            source = {"w": np.full((3, 4), step, np.float32), "b": np.arange(3, dtype=np.float32) + step}
            cluster.publish(step, source)
            cluster.refit_ok(step)
            assert module.weight.tolist() == source["w"].tolist()
            assert module.bias.tolist() == source["b"].tolist()
            assert module(torch.ones(4)).tolist() == (source["w"].sum(1) + source["b"]).tolist()
    assert module.weight.data_ptr() != pointers
    assert isinstance(module.weight, torch.nn.Parameter)
    kept = torch.nn.Linear(4, 3)
    pointers = kept.weight.data_ptr()
    with Cluster(1, engines=[TorchModuleEngine(kept, rename={"w": "weight", "b": "bias"}, commit="copy")]) as cluster:
        cluster.publish(0, source)
        cluster.refit_ok(0)
    assert kept.weight.data_ptr() == pointers
    assert kept.weight.tolist() == source["w"].tolist()


def test_unpublished_buffers_keep_their_values_and_are_listed() -> None:
    """N11."""
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("inv_freq", torch.arange(3.0), persistent=False)
    names = {"weight", "bias", "running_mean", "running_var"}
    with Cluster(1, engines=[TorchModuleEngine(module)]) as cluster:
        source = {n: np.full(3, i + 1, np.float32) for i, n in enumerate(sorted(names))}
        cluster.publish(0, source)
        (report,) = cluster.refit_ok(0)
    assert module.running_mean.tolist() == source["running_mean"].tolist()
    assert module.inv_freq.tolist() == [0, 1, 2]
    assert report.coverage.params_never_written_sample == ("inv_freq", "num_batches_tracked")


def test_tied_heads() -> None:
    """N9: alias declared and missing: one pull; no alias and missing: never written, an error under the gate."""

    class Tied(torch.nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.embed = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
            self.head = self.embed if tie else torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)

    source = {"embed": np.arange(8, dtype=np.float32).reshape(4, 2)}
    tied = Tied(True)
    with Cluster(1, engines=[TorchModuleEngine(tied)]) as cluster:
        cluster.publish(0, source)
        (report,) = cluster.refit_ok(0)
        assert report.wire_bytes == 32
        assert tied.head.tolist() == tied.embed.tolist() == source["embed"].tolist()
        assert report.coverage_pct == 100.0
    apart = Tied(False)
    settings = {"require_full_coverage": True}
    with Cluster(1, engines=[TorchModuleEngine(apart)], receiver_settings=settings) as cluster:
        cluster.publish(0, source)
        (error,) = cluster.refit(0)
        assert isinstance(error, RuntimeError)
        assert "head" in str(error)
    with Cluster(1, engines=[TorchModuleEngine(apart)]) as cluster:
        both = {**source, "head": source["embed"]}
        cluster.publishers[0].publish(epoch=0, step=0, tensors=local_tensors(both), timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
        assert apart.head.tolist() == source["embed"].tolist()


def test_two_tensors_for_one_tied_parameter_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """The later one is read, as a loader's last write stands; that the other is not does not pass in silence."""
    module = torch.nn.Module()
    module.embed = module.head = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    sources = {"embed": np.ones(2, np.float32), "head": np.full(2, 2, np.float32)}
    with Cluster(1, engines=[TorchModuleEngine(module)]) as cluster:
        tensors = local_tensors(sources)
        cluster.publishers[0].publish(epoch=0, step=0, tensors=tensors, timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
        assert module.embed.tolist() == [2, 2]
    said = [record.getMessage() for record in caplog.records if "both fill" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("published tensors 'embed' and 'head' both fill parameter 'head'")


def test_an_alias_is_one_pull_and_checked_where_both_are_published() -> None:
    """N9: declared and missing; declared and equal; declared and different."""
    source = {"embed": np.arange(8, dtype=np.float32).reshape(4, 2)}
    both = {**source, "head": source["embed"].copy()}
    engine = ArrayEngine({"embed": np.zeros((4, 2), np.float32), "head": np.zeros((4, 2), np.float32)})
    settings = {"options": PlanOptions(aliases={"head": "embed"}), "require_full_coverage": True}
    publishing = {"aliases": {"head": "embed"}}
    with Cluster(1, engines=[engine], receiver_settings=settings, publisher_settings=publishing) as cluster:
        cluster.publish(0, source)
        (report,) = cluster.refit_ok(0)
        assert engine["head"].tolist() == engine["embed"].tolist() == source["embed"].tolist()
        assert report.coverage_pct == 100.0
        publisher = cluster.publishers[0]
        publisher.publish(epoch=0, step=1, tensors=local_tensors(both), layout_epoch=1, timeout_s=TIMEOUT_S)
        cluster.refit_ok(1)
        both["head"][1, 1] += 1
        with pytest.raises(PublishError, match="'embed' and 'head' are declared equal and differ"):
            publisher.publish(epoch=0, step=2, tensors=local_tensors(both), layout_epoch=1, timeout_s=TIMEOUT_S)
        assert engine["head"].tolist() == source["embed"].tolist()
