"""What goes on while more is read: cells are verified, waves are copied; and what ends that when something fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster
from tests.refit.held_transport import HeldTransport

from reshard.planner import Plan
from reshard.planner.options import CostModel, PlanOptions
from reshard.refit.checks import Check
from reshard.refit.deadline import Deadline
from reshard.refit.engines.arrays import ArrayEngine, take
from reshard.refit.errors import QuarantinedError, TornReadError, VerificationError
from reshard.refit.publisher import Publisher
from reshard.refit.report import RefitReport
from reshard.refit.verify import Verifier
from reshard.refit.waves import read_waves
from reshard.transports import Transport
from reshard.transports.base import Prepared
from reshard.transports.errors import TransferError

N_BATCHES = 8
WAIT_S = 15.0


def model(seed: int) -> dict[str, np.ndarray]:
    """32 cells of 1 KiB, which are read in 8 batches."""
    rng = np.random.default_rng(seed)
    return {f"w{i:02}": rng.standard_normal((16, 16)).astype(np.float32) for i in range(32)}


@contextmanager
def one_trainer(**settings: object) -> Iterator[tuple[Cluster, HeldTransport, ArrayEngine]]:
    """One trainer and one rank over memory that can be held back; version 0 is served, version 1 published."""
    engine = ArrayEngine({name: np.zeros_like(w) for name, w in model(0).items()})
    cluster = Cluster(1, engines=[engine], receiver_settings=settings)
    for t in (*cluster.trainer_transports, *cluster.receiver_transports):
        t.close()
    wire = HeldTransport()
    cluster.trainer_transports, cluster.receiver_transports = [HeldTransport()], [wire]
    cluster.publishers = [
        Publisher(cluster.trainer_transports[0], cluster.rendezvous, model="m", slot=s, slots=cluster.slots)
        for s in cluster.slots
    ]
    cluster.receivers = [cluster.receiver(0)]
    with cluster:
        cluster.publish(0, model(0))
        cluster.refit_ok(0)
        cluster.publish(1, model(1))
        yield cluster, wire, engine


def crew_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("reshard-crew")]


def until(true: Callable[[], bool], what: str) -> None:
    """Wait for something that other threads do."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def serves(cluster: Cluster, engine: ArrayEngine, seed: int) -> bool:
    return cluster.receivers[0].check_serving().step == seed and all(
        np.array_equal(engine[name], w) for name, w in model(seed).items()
    )


def start(cluster: Cluster, version: int) -> tuple[threading.Thread, list[RefitReport | BaseException]]:
    out: list[RefitReport | BaseException] = []
    thread = threading.Thread(target=lambda: out.extend(cluster.refit(version)), daemon=True)
    thread.start()
    return thread, out


def test_cells_are_verified_before_the_last_read_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    real = Verifier._verify

    def counted(self: Verifier, check: object, tool: object) -> None:
        real(self, check, tool)  # type: ignore[arg-type]
        done.append(1)

    with one_trainer() as (cluster, wire, engine):
        monkeypatch.setattr(Verifier, "_verify", counted)
        gate = wire.hold("trainer-0", after=3)
        try:
            thread, out = start(cluster, 1)
            until(lambda: wire.n_held > 0 and len(done) >= 8, "two batches are verified while the fourth is held")
            assert len(done) < 32
            assert not out
        finally:
            gate.set()
        thread.join(TIMEOUT_S)
        (report,) = out
        assert isinstance(report, RefitReport), report
        assert report.verified_bytes == report.received_bytes == 32 * 1024
        assert report.verified.n_cells == len(done) == 32
        assert report.verified.seconds > 0
        assert serves(cluster, engine, 1)
        assert not crew_threads()


@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_a_wrong_cell_stops_the_read(install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch has a wrong cell: what comes after the batches on their way is never posted."""
    with one_trainer(install=install) as (cluster, wire, engine):
        buffer = cluster.publishers[0]._newest
        assert buffer is not None
        buffer.data[5] ^= 0x40
        posted: list[int] = []
        real_post, real_feed = wire.post, Verifier.feed

        def post(prepared: Prepared, **more: float) -> object:
            if prepared.nbytes >= 1024:
                posted.append(prepared.nbytes)
            return real_post(prepared, **more)  # type: ignore[arg-type]

        def feed(self: Verifier, batch: int, lost: object = ()) -> None:
            real_feed(self, batch, lost)  # type: ignore[arg-type]
            if batch == 0:
                until(lambda: bool(self._bad), "the wrong cell is found")

        monkeypatch.setattr(wire, "post", post)
        monkeypatch.setattr(Verifier, "feed", feed)
        (error,) = cluster.refit(1)
        assert 2 <= len(posted) <= 3 < N_BATCHES, "two are on their way when the first is looked at"
        cause = error if install == "shadow" else cast(BaseException, error).__cause__
        assert isinstance(cause, VerificationError), error
        assert "1 of " in str(cause)
        assert "trainer-0: w00 [0, 16) x [0, 16)" in str(cause)
        if install == "shadow":
            assert serves(cluster, engine, 0)
        else:
            assert isinstance(error, QuarantinedError)
            assert cluster.receivers[0].state == "quarantined"
            assert all(np.array_equal(engine[name], w) for name, w in model(0).items()), "nothing was written yet"
        assert not crew_threads()
        assert not cluster.leftovers()
        monkeypatch.undo()
        cluster.publish(2, model(2))
        cluster.refit_ok(2)
        assert serves(cluster, engine, 2)


def test_a_failed_read_waits_for_the_cell_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may look at memory that the refit gives back."""
    started, release, failed = threading.Event(), threading.Event(), threading.Event()
    real = Verifier._verify

    def slow(self: Verifier, check: object, tool: object) -> None:
        started.set()
        assert release.wait(WAIT_S)
        real(self, check, tool)  # type: ignore[arg-type]

    with one_trainer() as (cluster, wire, engine):
        real_wait, n_waits = wire.wait, [0]

        def wait(transfers: list[object], **more: object) -> object:
            big = any(t.prepared.nbytes >= 1024 for t in transfers)  # type: ignore[attr-defined]
            n_waits[0] += big
            if n_waits[0] == 3:
                assert started.wait(WAIT_S)
                failed.set()
                raise TransferError("the wire broke")
            return real_wait(transfers, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(Verifier, "_verify", slow)
        monkeypatch.setattr(wire, "wait", wait)
        thread, out = start(cluster, 1)
        try:
            assert failed.wait(WAIT_S)
            thread.join(0.3)
            assert thread.is_alive(), "a cell is being verified"
        finally:
            release.set()
        thread.join(TIMEOUT_S)
        assert isinstance(out[0], TransferError)
        assert not crew_threads()
        assert serves(cluster, engine, 0)
        assert not cluster.leftovers()


def test_a_cell_that_was_overwritten_meanwhile_is_called_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_trainer() as (cluster, wire, engine):
        buffer = cluster.publishers[0]._newest
        assert buffer is not None
        real_post, real_feed, n_posts = wire.post, Verifier.feed, [0]

        def post(prepared: Prepared, **more: float) -> object:
            n_posts[0] += prepared.nbytes >= 1024
            if n_posts[0] == 3:
                buffer.seqlock.begin()
                buffer.data[3 * 4096 : 3 * 4096 + 700] ^= 0x40
            return real_post(prepared, **more)  # type: ignore[arg-type]

        def feed(self: Verifier, batch: int, lost: object = ()) -> None:
            real_feed(self, batch, lost)  # type: ignore[arg-type]
            if batch == 3:
                until(lambda: bool(self._bad), "the wrong cell is found")

        monkeypatch.setattr(wire, "post", post)
        monkeypatch.setattr(Verifier, "feed", feed)
        (error,) = cluster.refit(1)
        assert isinstance(error, TornReadError)
        assert "'trainer-0'" in str(error)
        assert isinstance(error.__context__, VerificationError)
        assert n_posts[0] < N_BATCHES
        assert serves(cluster, engine, 0)
        assert not crew_threads()


# -- waves


@dataclass
class Listed:
    """A prepared list, its peer and its transfer at once."""

    name: str
    nbytes: int = 100
    n_descriptors: int = 2

    @property
    def peer(self) -> Listed:
        return self

    @property
    def prepared(self) -> Listed:
        return self


@dataclass
class Recording:
    """A transport that says what was done, in order."""

    log: list[str] = field(default_factory=list)
    broken: str = ""

    def post(self, prepared: Listed, *, timeout_s: float) -> Listed:
        self.log.append(f"post {prepared.name}")
        return prepared

    def wait(self, transfers: list[Listed], *, timeout_s: float, finish_others: bool) -> object:
        self.log += [f"wait {t.name}" for t in transfers]
        time.sleep(0.01)
        if self.broken:
            states = {t.name: "failed: gone" if t.name == self.broken else "done" for t in transfers}
            self.broken = ""
            raise TransferError("gone", failures=states)
        return type("Stats", (), {"seconds": 0.25})

    def quarantined(self) -> tuple[object, ...]:
        return ()


def test_the_next_batch_is_on_its_way_while_one_is_used() -> None:
    wire = Recording()
    lists = [[cast(Prepared, Listed(str(k)))] for k in range(4)]
    read_waves(cast(Transport, wire), lists, lambda k: wire.log.append(f"use {k}"), Deadline(5.0, "test"))
    expected = "post 0, wait 0, post 1, use 0, wait 1, post 2, use 1, wait 2, post 3, use 2, wait 3, use 3"
    assert ", ".join(wire.log) == expected


def test_a_batch_that_lost_a_holder_took_time() -> None:
    wire = Recording(broken="a")
    lists = [[cast(Prepared, Listed(name)) for name in "abc"] for _ in range(2)]
    totals = read_waves(cast(Transport, wire), lists, lambda k: None, Deadline(5.0, "test"), may_lose=True)
    assert list(totals.lost) == ["a"]
    assert totals.by_peer == {"b": 200, "c": 200}
    assert totals.nbytes == totals.kept_bytes == 400
    assert totals.n_descriptors == 8
    assert totals.seconds >= 0.01 + 0.25
    assert wire.log[6:8] == ["post b", "post c"]


def test_no_wave_is_read_into_what_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading wave k + 1 overlaps the copies of wave k, from the other half of an arena within its budget."""
    source = {f"w{i}": np.random.default_rng(i).standard_normal((32, 64)).astype(np.float32) for i in range(9)}
    engine = ArrayEngine(
        {name: np.zeros((32, 2), np.float64) for name in source},
        layout={name: [take(name, np.s_[:, 3:5])] for name in source},
    )
    taken: list[tuple[str, int]] = []
    settings = {
        "options": PlanOptions(staging_bytes=16384, max_runs_per_block=4),
        "on_allocate": lambda what, n: taken.append((what, n)),
    }
    with Cluster(1, engines=[engine], receiver_settings=settings) as cluster:
        wire = cluster.receiver_transports[0]
        rows: dict[int, np.ndarray] = {}
        flying: dict[int, np.ndarray] = {}
        overlapped: list[int] = []
        real_prepare, real_post, real_wait, real_copies = wire.prepare, wire.post, wire.wait, Plan.copies

        def prepare(peer: object, local: np.ndarray, remote: np.ndarray) -> Prepared:
            made = real_prepare(peer, local, remote)  # type: ignore[arg-type]
            rows[id(made)] = local
            return made

        def post(prepared: Prepared, **more: float) -> object:
            flying[id(prepared)] = rows[id(prepared)]
            return real_post(prepared, **more)  # type: ignore[arg-type]

        def wait(transfers: list[object], **more: object) -> object:
            for t in transfers:
                flying.pop(id(t.prepared))  # type: ignore[attr-defined]
            return real_wait(transfers, **more)  # type: ignore[arg-type]

        def copies(plan: Plan, wave: int) -> object:
            """What is copied out of a wave is asked for when the copying begins."""
            base, half = staging()
            first = base + (wave % 2) * half
            made = real_copies(plan, wave)
            assert bool((made.staging_offset_bytes // half == wave % 2).all())
            for local in flying.values():
                address, nbytes = local[:, 0].astype(np.int64), local[:, 1].astype(np.int64)
                assert not bool(((address < first + half) & (address + nbytes > first)).any()), wave
                overlapped.append(wave)
            return made

        def staging() -> tuple[int, int]:
            arenas = cluster.receivers[0].reader.arenas
            return arenas.staging_base, arenas.staging.nbytes // 2

        for name, patched in (("prepare", prepare), ("post", post), ("wait", wait)):
            monkeypatch.setattr(wire, name, patched)
        cluster.publish(0, source)
        cluster.refit_ok(0)
        cluster.publish(1, source)
        monkeypatch.setattr(Plan, "copies", copies)
        (report,) = cluster.refit_ok(1)
        monkeypatch.undo()
        planned = cluster.receivers[0].bench.planned
        assert planned is not None
        n_waves = planned.plan.n_waves
        assert n_waves > 3
        assert sorted(set(overlapped)) == list(range(n_waves - 1)), "something is read during all copies but the last"
        assert [n for what, n in taken if what == "staging"] == [planned.plan.staging_bytes]
        assert planned.plan.staging_bytes <= 16384
        assert all(np.array_equal(engine[n], w[:, 3:5]) for n, w in source.items())
        assert report.certificate.written_bytes == sum(engine[n].nbytes for n in source)


@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_a_wrong_staged_cell_is_found_before_it_is_copied_on(install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are cast go through staging; the wave with the wrong cell is never copied."""
    source = {f"w{i}": np.random.default_rng(i).standard_normal((8, 16)).astype(np.float32) for i in range(6)}
    engine = ArrayEngine({name: np.zeros((8, 16), np.float64) for name in source})
    settings = {"options": PlanOptions(staging_bytes=4096), "install": install, "require_verified": True}
    with Cluster(1, engines=[engine], receiver_settings=settings) as cluster:
        cluster.publish(0, source)
        (report,) = cluster.refit_ok(0)
        assert report.verified_bytes == report.received_bytes == 6 * 512
        assert report.verified.n_cells == 6
        cluster.publish(1, {name: w + 1 for name, w in source.items()})
        buffer = cluster.publishers[0]._newest
        assert buffer is not None
        buffer.data[-3] ^= 0x40
        planned = cluster.receivers[0].bench.planned
        assert planned is not None
        assert planned.plan.n_waves > 1
        copied: list[int] = []
        real = Plan.copies

        def copies(plan: Plan, wave: int) -> object:
            copied.append(wave)
            return real(plan, wave)

        monkeypatch.setattr(Plan, "copies", copies)
        (error,) = cluster.refit(1)
        cause = error if install == "shadow" else cast(BaseException, error).__cause__
        assert isinstance(cause, VerificationError), error
        assert "trainer-0: w5 [0, 8) x [0, 16)" in str(cause)
        assert copied == list(range(planned.plan.n_waves - 1))
        assert isinstance(error, VerificationError if install == "shadow" else QuarantinedError)
        assert all(np.array_equal(engine[n], w) for n, w in source.items())


@pytest.mark.parametrize("whole", [True, False])
def test_batches_only_where_cells_can_be_verified(whole: bool) -> None:
    """Columns of row-major shards are read in part: there is nothing to verify meanwhile, and one list a holder."""
    source = {"w": np.arange(64 * 64, dtype=np.float32).reshape(64, 64)}
    columns = 64 if whole else 32
    engine = ArrayEngine(
        {"w": np.zeros((64, columns), np.float32)}, layout={"w": [take("w", np.s_[:, 64 - columns : 64])]}
    )
    options = PlanOptions(max_runs_per_block=64, cost=CostModel(descriptor_s=0.0))  # row by row, not as a span
    with Cluster(1, engines=[engine], receiver_settings={"options": options}) as cluster:
        cluster.publish(0, source)
        (report,) = cluster.refit_ok(0)
        (bound,) = cluster.receivers[0].reader.bound()
        assert len(bound.batches) == (N_BATCHES if whole else 1)
        assert (bound.complete_with is not None) == whole
        assert report.verified_bytes == (report.received_bytes if whole else 0)
        assert np.array_equal(engine["w"], source["w"][:, 64 - columns :])


def test_a_sample_is_other_cells_at_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 32 cells a version, all of them in the end; a wrong one is found when its turn comes."""
    chosen: list[int] = []
    real = Verifier._verify

    def noted(self: Verifier, check: Check, tool: object) -> None:
        chosen.append(check.cell)
        real(self, check, tool)  # type: ignore[arg-type]

    monkeypatch.setattr(Verifier, "_verify", noted)
    with one_trainer(verify="sample") as (cluster, _, _):
        seen: set[int] = set()
        found: dict[bool, int] = {True: 0, False: 0}
        for step in range(1, 65):
            if step > 1:
                cluster.publish(step, model(step))
            buffer = cluster.publishers[0]._newest
            assert buffer is not None
            if step > 32:
                buffer.data[5] ^= 0x40  # in the first cell
            chosen.clear()
            (result,) = cluster.refit(step)
            seen |= set(chosen)
            found[0 in chosen] += 1
            if step > 32 and 0 in chosen:
                assert isinstance(result, VerificationError)
            else:
                assert isinstance(result, RefitReport), result
                assert result.verified.n_cells == len(set(chosen)) == 2
                assert result.verified_bytes == 2 * 1024 < result.received_bytes
        assert seen == set(range(32))
        assert min(found.values()) > 0
        assert not crew_threads()


def test_cells_that_are_put_together_from_buffers_wait_for_the_last_copies() -> None:
    """Interleaved rows that fill several waves are whole in the buffers alone, once their last wave was copied."""
    source = {
        "w": np.arange(4096 * 4, dtype=np.uint32).astype(np.uint8).reshape(4096, 4),
        "z0": np.arange(1 << 15, dtype=np.uint32).astype(np.uint8),
        "z1": np.arange(1 << 15, dtype=np.uint32).astype(np.uint8),
    }
    z = [take("z0", into=np.s_[: 1 << 15]), take("z1", into=np.s_[1 << 15 :])]  # read after "w", in the same wave
    engine = ArrayEngine(
        {"p0": np.zeros((2048, 4), np.uint8), "p1": np.zeros((2048, 4), np.uint8), "z": np.zeros(1 << 16, np.uint8)},
        layout={"p0": [take("w", np.s_[0::2])], "p1": [take("w", np.s_[1::2])], "z": z},
    )
    settings = {"options": PlanOptions(max_runs_per_block=1, staging_bytes=8192)}
    with Cluster(1, engines=[engine], receiver_settings=settings) as cluster:
        cluster.receivers[0].reader.batch_bytes = 4096
        cluster.publish(0, source)
        (report,) = cluster.refit_ok(0)
        assert report.verified.n_cells_partial == 0
        checks, (bound,) = cluster.receivers[0].bench.checks, cluster.receivers[0].reader.bound()
        assert checks is not None
        assert bound.complete_with is not None
        ((number, check),) = ((i, c) for i, c in enumerate(checks.checks) if c.after_wave >= 0)
        assert check.after_wave > 0
        ready = bound.batches[int(bound.complete_with[number])]
        assert len([b for b in bound.batches if b.wave == check.after_wave]) > 1, "else there is nothing to wait for"
        assert (ready.wave, ready.ends_wave) == (check.after_wave, True)
        assert np.array_equal(engine["p1"], source["w"][1::2])
        cluster.publish(1, {name: array[::-1].copy() for name, array in source.items()})
        (again,) = cluster.refit_ok(1)
        assert again.verified_bytes == report.verified_bytes > 0


def test_what_cannot_be_verified_is_said_in_the_log_and_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    source = {"w": np.arange(64 * 64, dtype=np.float32).reshape(64, 64), "b": np.ones(8, np.float32)}
    engine = ArrayEngine(
        {"w": np.zeros((64, 32), np.float32), "b": np.zeros(8, np.float32)},
        layout={"w": [take("w", np.s_[:, 32:])], "b": [take("b")]},
    )
    options = PlanOptions(max_runs_per_block=64, cost=CostModel(descriptor_s=0.0))  # row by row, not as a span
    with Cluster(1, engines=[engine], receiver_settings={"options": options}) as cluster:
        cluster.publish(0, source)
        (report,) = cluster.refit_ok(0)
        cluster.publish(1, source)
        cluster.refit_ok(1)
    lines = [r.getMessage() for r in caplog.records if "cannot be verified" in r.getMessage()]
    assert lines == [
        "member 'tp0': 8192 of 8224 bytes of each refit cannot be verified: 1 cells are read in part (the first is "
        "trainer-0: w [0, 64) x [0, 64)); publishers that lay their buffers out by the cut hints make them whole"
    ], "once for a plan"
    assert (report.verified_bytes, report.unverified_bytes, report.verified.n_cells_partial) == (32, 8192, 1)
    assert "32 verified and 8,192 NOT verified (1 cells were read in part)" in str(report)


def test_a_column_slice_that_is_read_as_a_span_is_verified_whole(caplog: pytest.LogCaptureFixture) -> None:
    """The span is 128 bytes longer than it must be."""
    source = {"w": np.arange(64 * 64, dtype=np.float32).reshape(64, 64)}
    engine = ArrayEngine({"w": np.zeros((64, 32), np.float32)}, layout={"w": [take("w", np.s_[:, 32:])]})
    with Cluster(1, engines=[engine], receiver_settings={"require_verified": True}) as cluster:
        cluster.publish(0, source)
        (report,) = cluster.refit_ok(0)
    assert (report.wire_bytes, report.unverified_bytes) == (source["w"].nbytes, 0)
    assert "verified" not in caplog.text
    assert "NOT" not in str(report)
