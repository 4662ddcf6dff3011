"""What a receiver serves on is what the trainer published: it is held against the trainer's digests first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster, holds, tp_cluster, tp_engine, weights
from tests.refit.test_publishing_modes import in_place

from reshard.refit import rechecking, serving
from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.engines.torch_module import TorchModuleEngine
from reshard.refit.errors import PublishError, UnverifiedError, VerificationError
from reshard.refit.receiver import Receiver
from reshard.refit.serving import ServeOn
from reshard.refit.torch_device import TorchDevice
from reshard.rendezvous.types import VersionKey
from reshard.transports import open_transport


def hinted(**settings: object) -> Cluster:
    """A cluster whose trainers follow cut hints, so that every cell is read whole; two versions were taken."""
    cluster = tp_cluster(publisher_settings={"cut_hints": True}, **settings)
    cluster.publish(0, weights(0))
    cluster.refit_ok(0)
    cluster.publish(1, weights(1), layout_epoch=cluster.publishers[0].newest_layout_epoch())
    cluster.refit_ok(1)
    return cluster


def states(cluster: Cluster, model: str = "m@g") -> list[str]:
    """The states of what is served on."""
    return [v.state for v in cluster.rendezvous.describe().versions if v.version.model == model]


def offers(cluster: Cluster, model: str = "m@g") -> list[int]:
    """The steps of what is served on, opened by anyone."""
    return [v.version.step for v in cluster.rendezvous.describe().versions if v.version.model == model]


@pytest.mark.parametrize("where", ["qk", "o", "norm"])
def test_a_byte_flipped_since_the_refit_is_not_offered(where: str) -> None:
    """Memory that errs, or an engine that writes its own weights: named, refused, and mended by a refit."""
    with hinted() as cluster:
        (served, other) = (ServeOn(r) for r in cluster.receivers)
        arena = cluster.receivers[0].reader.arenas.served
        assert arena is not None
        arena.buffers[where][5] ^= 1  # type: ignore[index, operator]
        changed = r"member 'tp0': what it serves as .* is no longer what it verified"
        with pytest.raises(VerificationError, match=changed) as e:
            served.publish(timeout_s=TIMEOUT_S)
        assert e.value.cells
        assert "trainer-" in str(e.value)
        assert offers(cluster) == []
        other.publish(timeout_s=TIMEOUT_S)
        assert offers(cluster) == [1]
        assert other.rechecked_bytes > 0
        cluster.publish(2, weights(2), layout_epoch=cluster.publishers[0].newest_layout_epoch())
        cluster.refit_ok(2)
        served.publish(timeout_s=TIMEOUT_S)
        served.close()
        other.close()


def test_a_byte_flipped_on_a_device_is_not_offered() -> None:
    module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(8, 64), requires_grad=False)})
    settings = {"device": TorchDevice("cpu")}
    with Cluster(1, engines=[TorchModuleEngine(module)], receiver_settings=settings) as cluster:
        cluster.publish(0, {"w": np.ones((8, 64), np.float32)})
        cluster.refit_ok(0)
        with ServeOn(cluster.receivers[0]) as served:
            served.publish(timeout_s=TIMEOUT_S)
            assert served.rechecked_bytes == 8 * 64 * 4
        module["w"][3, 3] = 2
        with ServeOn(cluster.receivers[0]) as served, pytest.raises(VerificationError, match=r"w \[0, 8\) x \[0, 64\)"):
            served.publish(timeout_s=TIMEOUT_S)


def test_an_engine_that_writes_its_weights_is_not_offered() -> None:
    """The arrays that an engine was given are the arena: what it does to them shows."""
    engine = ArrayEngine({"w": np.zeros(64, np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        cluster.publishers[0].publish(
            epoch=0, step=0, tensors=local_tensors({"w": np.arange(64, dtype=np.float32)}), timeout_s=TIMEOUT_S
        )
        cluster.refit_ok(0)
        engine["w"][3] += 1
        with ServeOn(cluster.receivers[0]) as served, pytest.raises(VerificationError, match=r"w \[0, 64\)"):
            served.publish(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("when", ["between", "after"])
def test_a_byte_that_flips_while_it_is_offered_is_seen(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two passes by the second one, after them by whoever reads: in no order does it pass."""
    with hinted() as cluster:
        served = [ServeOn(r) for r in cluster.receivers]
        arena = cluster.receivers[0].reader.arenas.served
        assert arena is not None

        def flipped(then: Callable[..., int], *, first: bool) -> Callable[..., int]:
            def step(*args: object) -> int:
                if first:
                    arena.buffers["qk"][0] ^= 1  # type: ignore[index, operator]
                out = then(*args)
                if not first:
                    arena.buffers["qk"][0] ^= 1  # type: ignore[index, operator]
                return out

            return step

        monkeypatch.setattr(serving, "recheck", flipped(rechecking.recheck, first=when == "between"))
        if when == "between":
            with pytest.raises(VerificationError, match="q "):
                served[0].publish(timeout_s=TIMEOUT_S)
            return
        served[0].publish(timeout_s=TIMEOUT_S)
        monkeypatch.undo()
        served[1].publish(timeout_s=TIMEOUT_S)
        wire = open_transport("memory")
        late = Receiver(
            wire,
            cluster.rendezvous,
            tp_engine(0),
            model="m@g",
            group="late",
            members=["a"],
            member="a",
            allow_unconsumed=["*"],
        )
        with late, pytest.raises(VerificationError, match="tp0: q "):
            late.refit(1, timeout_s=TIMEOUT_S)
        wire.close()
        for s in served:
            s.close()


def test_what_cannot_be_told_is_counted_and_refused_on_demand() -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        reports = cluster.refit_ok(0)
        served = ServeOn(cluster.receivers[0])
        published = served.publish(timeout_s=TIMEOUT_S)
        assert reports[0].verified_bytes >= served.rechecked_bytes > 0
        assert served.rechecked_bytes < published.wire_bytes, "columns of row shards were read in part"
        served.close()
        told = rf"{served.rechecked_bytes} of {published.wire_bytes} bytes"
        strict = ServeOn(cluster.receivers[0], require_verified=True)
        with strict, pytest.raises(UnverifiedError, match=told):
            strict.publish(timeout_s=TIMEOUT_S)
    with hinted() as cluster:
        for r in cluster.receivers:
            with ServeOn(r, require_verified=True) as strict:
                published = strict.publish(timeout_s=TIMEOUT_S)
                assert strict.rechecked_bytes == published.wire_bytes > 0


@pytest.mark.parametrize(
    "settings", [{"receiver_settings": {"verify": "off"}}, {"publisher_settings": {"digests": False}}]
)
def test_without_digests_nothing_can_be_told(settings: dict[str, object]) -> None:
    with tp_cluster(**settings) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        with ServeOn(cluster.receivers[0]) as served:
            served.publish(timeout_s=TIMEOUT_S)
            assert served.rechecked_bytes == 0
        with ServeOn(cluster.receivers[0], require_verified=True) as strict, pytest.raises(UnverifiedError):
            strict.publish(timeout_s=TIMEOUT_S)


def test_a_sampled_refit_is_rechecked_in_full() -> None:
    with hinted(receiver_settings={"verify": "sample"}) as cluster, ServeOn(cluster.receivers[0]) as served:
        published = served.publish(timeout_s=TIMEOUT_S)
        assert served.rechecked_bytes == published.wire_bytes


def test_a_failed_refit_leaves_the_digests_of_what_is_served() -> None:
    """The next version's digests were read, its bytes refused: what is served is held against its own."""
    with hinted() as cluster:
        epoch = cluster.publishers[0].newest_layout_epoch()
        cluster.publish(2, weights(2), layout_epoch=epoch)
        buffer = cluster.publishers[1]._newest
        assert buffer is not None
        buffer.data[3] ^= 1  # type: ignore[index, operator]
        assert any(isinstance(e, VerificationError) for e in cluster.refit(2))
        assert holds(cluster.engines[0], weights(1), 0)  # type: ignore[arg-type]
        for r in cluster.receivers:
            with ServeOn(r) as served:
                published = served.publish(timeout_s=TIMEOUT_S)
                assert (published.version.step, served.rechecked_bytes) == (1, published.wire_bytes)


def test_digests_without_their_root_are_not_kept() -> None:
    """Those of a holder that was lost in the read are an older version's."""
    with tp_cluster() as cluster:
        publishers = in_place(cluster, weights(0))
        for p in publishers:
            p.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
        bench = cluster.receivers[0].bench
        assert bench.trusted is not None
        assert set(bench.trusted.digests) == {"trainer-0", "trainer-1"}
        worker = cluster.receivers[0].worker()
        manifest = cluster.rendezvous.await_version(
            "m", group="o", members=["x"], member="x", worker=worker, want=0, timeout_s=TIMEOUT_S
        )
        stale = {name: d.copy() for name, d in bench.trusted.digests.items()}
        stale["trainer-1"][0, 0] ^= np.uint64(1)
        assert bench.checks is not None
        kept = rechecking.keep_digests(bench.checks, bench.trusted.buffer_names, manifest, lambda name: stale[name])
        assert set(kept.digests) == {"trainer-0"}
        cluster.rendezvous.release_lease(manifest.lease)
        for p in publishers:
            p.close()


def test_a_selection_is_not_the_version() -> None:
    """After ``only=`` the buffers hold a part of the version: offered as a whole it would leave a replica with less."""
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0, only=["norm"])
        with ServeOn(cluster.receivers[0]) as served, pytest.raises(PublishError, match=r"took a selection \('norm'\)"):
            served.publish(timeout_s=TIMEOUT_S)
        with ServeOn(cluster.receivers[0], partial=True) as served:
            assert served.publish(timeout_s=TIMEOUT_S).wire_bytes == weights(0)["norm"].nbytes
        cluster.publish(1, weights(1))
        cluster.refit_ok(1)
        with ServeOn(cluster.receivers[0]) as served:
            served.publish(timeout_s=TIMEOUT_S)


def test_versions_that_are_cut_differently_are_served_on_one_after_the_other() -> None:
    """The trainer follows cut hints from its second version on, so that the boxes are others."""
    with tp_cluster(publisher_settings={"cut_hints": True}) as cluster:
        served = [ServeOn(r) for r in cluster.receivers]
        for step in range(3):
            epoch = cluster.publishers[0].newest_layout_epoch() if step else 0
            cluster.publish(step, weights(step), layout_epoch=epoch)
            cluster.refit_ok(step)
            for s in served:
                s.publish(timeout_s=TIMEOUT_S)
            assert states(cluster)[-1] == "ready"
        for s in served:
            s.close()


def test_a_receiver_is_served_on_once_at_a_time() -> None:
    """Else a refit would end the offer of the second one alone, and overwrite what the first one's readers read."""
    with tp_cluster() as cluster:
        first = ServeOn(cluster.receivers[0])
        with pytest.raises(PublishError, match="member 'tp0' is served on already"):
            ServeOn(cluster.receivers[0])
        first.close()
        second = ServeOn(cluster.receivers[0])
        first.close()
        assert cluster.receivers[0].bench.on_overwrite == second._overwrite, "closing twice takes nothing away"
        second.close()


def test_buffers_that_go_take_their_offer_with_them() -> None:
    """Another plan needs other buffers: those who come for the old ones are told that there are none."""
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        served = [ServeOn(r) for r in cluster.receivers]
        for s in served:
            s.publish(timeout_s=TIMEOUT_S)
        assert states(cluster) == ["ready"]
        cluster.refit_ok(0, only=["norm"])
        assert states(cluster) != ["ready"]
        for s in served:
            s.close()


@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_another_mode_of_verification_keeps_what_a_doubt_may_need(install: str) -> None:
    """A rank in doubt may have to install what it has: the mode is taken at the next refit, not at once."""
    with tp_cluster(receiver_settings={"verify": "off", "install": install}) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        for r in cluster.receivers:
            before = (r.bench.planned, r.bench._streamer, r.reader.arenas.all())
            r.verify = "full"
            assert (r.bench.planned, r.bench._streamer, r.reader.arenas.all()) == before
            assert before[0] is not None
        assert all(report.verified_bytes > 0 for report in cluster.refit_ok(0))


# -- while the receiver refits in another thread


def alone(**settings: object) -> Cluster:
    """One trainer and one rank that takes everything; version 0 is served, version 1 published."""
    engine = ArrayEngine({n: np.zeros_like(w) for n, w in weights(0).items()}, **settings)  # type: ignore[arg-type]
    cluster = Cluster(1, engines=[engine])
    cluster.publish(0, weights(0))
    cluster.refit_ok(0)
    cluster.publish(1, weights(1))
    return cluster


def test_a_refit_waits_for_an_offer_that_is_being_made_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the offer would come as the memory is overwritten, and who reads without digests would install a mixture."""
    begun, refitting = threading.Event(), threading.Event()
    real = serving.recheck

    def slow(*args: object) -> int:
        checked = real(*args)  # type: ignore[arg-type]
        begun.set()
        assert refitting.wait(TIMEOUT_S)
        time.sleep(0.2)
        return checked

    with alone(commit="copy") as cluster, ServeOn(cluster.receivers[0]) as served:
        monkeypatch.setattr(serving, "recheck", slow)
        made: list[object] = []
        offering = threading.Thread(target=lambda: made.append(served.publish(timeout_s=TIMEOUT_S)))
        offering.start()
        assert begun.wait(TIMEOUT_S)
        cluster.receivers[0]._on_stage = lambda name: refitting.set() if name == "allocate" else None
        cluster.refit_ok(1)
        offering.join()
        assert made, "it was offered"
        assert states(cluster) != ["ready"], "and ended before the memory was written"
        monkeypatch.undo()
        served.publish(timeout_s=TIMEOUT_S)
        assert offers(cluster)[-1] == 1


def test_an_offer_is_not_of_the_version_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refit had read its version when the offer was asked for, and swaps it in as that is made."""
    with alone(commit="swap") as cluster, ServeOn(cluster.receivers[0]) as served:
        receiver = cluster.receivers[0]
        voting, go_on = threading.Event(), threading.Event()

        def stage(name: str) -> None:
            if name == "vote":
                voting.set()
                assert go_on.wait(TIMEOUT_S)

        receiver._on_stage = stage
        refitting = threading.Thread(target=cluster.refit_ok, args=(1,))
        refitting.start()
        assert voting.wait(TIMEOUT_S)
        real = receiver.check_serving

        def between() -> VersionKey:
            monkeypatch.undo()
            version = real()
            go_on.set()
            refitting.join()
            return version

        monkeypatch.setattr(receiver, "check_serving", between)
        with pytest.raises(PublishError, match=r"went on from m@0\.0"):
            served.publish(timeout_s=TIMEOUT_S)
        assert not offers(cluster)
        served.publish(timeout_s=TIMEOUT_S)
        assert offers(cluster) == [1]


def test_buffers_that_go_while_they_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone() as cluster, ServeOn(cluster.receivers[0]) as served:
        real = serving.recheck

        def gone(*args: object) -> int:
            checked = real(*args)  # type: ignore[arg-type]
            cluster.receivers[0].bench.forget()
            return checked

        monkeypatch.setattr(serving, "recheck", gone)
        with pytest.raises(PublishError, match=r"has let go of what holds m@0\.0"):
            served.publish(timeout_s=TIMEOUT_S)
        assert states(cluster) != ["ready"]
