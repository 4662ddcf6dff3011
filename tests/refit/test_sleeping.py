"""Weights that are not in memory (an engine asleep) are named before anything is read from or into them.

Without the check each of these ends the process with a segmentation fault, or reads what is not the weights.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster, holds, tp_engine, weights
from tests.refit.fake_gpu import FakeLibrary, driver
from tests.refit.naps import Napping

from reshard.refit import arena, residency
from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.arena import Arena
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.engines.torch_module import TorchModuleEngine
from reshard.refit.errors import PublishError, QuarantinedError, RefitAborted, RefitError, UnmappedMemoryError
from reshard.refit.homes import homes_of
from reshard.refit.inplace import InPlacePublisher
from reshard.refit.residency import LiveWeights, Span, backing_of, require_mapped, span_of
from reshard.refit.tensors import LocalTensor
from reshard.rendezvous.errors import RendezvousError
from reshard.transports import open_transport

PAGE = mmap.PAGESIZE


# -- what the system and the driver are asked


def test_host_memory_is_mapped_or_not() -> None:
    pages = Napping(4 * PAGE)
    whole = Span("w", pages.address, pages.nbytes)
    inner = Span("i", pages.address + 100, 2 * PAGE)
    assert backing_of([whole, inner, Span("none", 0, 0)]) == [(0, 0)] * 3
    pages.sleep()
    assert backing_of([whole, inner]) == [None, None], "reserved addresses are no memory"
    pages.wake()
    assert backing_of([whole]) == [(0, 0)]
    pages.hole(PAGE)
    assert backing_of([whole, inner]) == [None, None], "a hole within"
    assert backing_of([Span("before", pages.address, PAGE), Span("after", pages.address + 2 * PAGE, 8)]) == [(0, 0)] * 2


def test_a_hole_among_many_parameters_is_found_and_named() -> None:
    """All are looked up at once; only what is not there is looked at one by one."""
    pages = Napping(64 * PAGE)
    spans = [Span("gap", 0, 0, "meta"), *(Span(f"p{i}", pages.address + i * PAGE, PAGE - 8) for i in range(64))]

    class Engine:
        def live_spans(self) -> list[Span]:
            return spans

    live = LiveWeights(Engine(), "member 'x'")
    live.require_mapped(b"now")
    pages.hole(17 * PAGE)
    assert [s.name for s, behind in zip(spans, backing_of(spans), strict=True) if behind is None] == ["p17"]
    with pytest.raises(UnmappedMemoryError, match="member 'x': 'p17' at") as caught:
        live.require_mapped(b"now")
    assert caught.value.names == ("p17",)


def test_a_system_that_does_not_tell_is_believed_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MAPS", "/nowhere/maps")
    assert backing_of([Span("w", 4096, 8)]) == [(0, 0)]


def test_a_gpus_driver_is_asked_for_both_ends() -> None:
    library = FakeLibrary()
    one, two = (library.add(torch.zeros(64, dtype=torch.uint8)) for _ in range(2))
    span = Span("w", one.data_ptr(), 64, "cuda:1")
    (before,) = backing_of([span], drivers=lambda n: driver(library))
    assert before is not None
    assert before[0] == before[1] != 0
    del library.block[one.data_ptr()]
    assert backing_of([span], drivers=lambda n: driver(library)) == [None]
    library.block[one.data_ptr()] = 99
    with pytest.raises(UnmappedMemoryError, match=r"'w' at \[0x.*\) on cuda:1 is mapped to other memory.*woken since"):
        require_mapped([span], "x", way_out="do so", registered=[before], drivers=lambda n: driver(library))
    library.segments[one.data_ptr()] = 32  # its end belongs to nobody
    assert backing_of([span], drivers=lambda n: driver(library)) == [None]
    assert backing_of([Span("v", two.data_ptr(), 64, "cuda:1")], drivers=lambda n: driver(library)) != [None]


def test_the_driver_is_asked_from_any_thread_and_leaves_no_context_behind() -> None:
    """A new thread has no context, and some queries fail without one; asyncio's calls come from such threads."""
    library = FakeLibrary()
    tensor = library.add(torch.zeros(64, dtype=torch.uint8))
    made = driver(library)
    told: list[object] = []

    def ask() -> None:
        told.append((made.backing(tensor.data_ptr()), made.allocation_of(tensor.data_ptr() + 8), list(library.stack)))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(10.0)
    assert told == [(100, (tensor.data_ptr(), 64), [])]
    library.failure = 700
    with pytest.raises(RefitError):
        made.backing(tensor.data_ptr())
    assert library.stack == []


def test_an_arena_whose_memory_cannot_be_asked_for_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(spans: object) -> None:
        raise RefitError("the driver does not answer")

    monkeypatch.setattr(arena, "backing_of", fails)
    wire = open_transport("memory")
    before = wire.endpoint()
    with pytest.raises(RefitError, match="does not answer"):
        Arena(wire, {"a": 100})
    assert wire.endpoint() == before, "nothing is registered"
    wire.close()


def test_where_weights_lie_is_asked_again_when_they_move() -> None:
    asked: list[int] = []

    class Engine:
        def live_spans(self) -> list[Span]:
            asked.append(1)
            return []

    live = LiveWeights(Engine(), "x")
    for signature in (b"", b"a", b"a", b"b", b"b"):
        live.require_mapped(signature)
    assert len(asked) == 3
    LiveWeights(object(), "x").require_mapped(b"")


def test_an_older_driver_has_buffer_ids_alone() -> None:
    library = FakeLibrary()
    library.knows_blocks = False
    tensor = library.add(torch.zeros(64, dtype=torch.uint8))
    assert driver(library).backing(tensor.data_ptr()) == 7100


def test_a_driver_that_fails_is_an_error_and_no_answer() -> None:
    library = FakeLibrary()
    tensor = library.add(torch.zeros(64, dtype=torch.uint8))
    library.failure = 700
    with pytest.raises(RefitError, match=r"pointer attribute 13 of 0x.* with error 700"):
        driver(library).backing(tensor.data_ptr())


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((4, 6), np.float32),
        np.zeros((4, 6), np.float32)[::-2, 1::2],
        np.zeros((8, 8), np.int16).T[3:5],
        torch.zeros(4, 6)[1:3, ::2],
        torch.zeros(8, 8).t()[2:],
        np.float64(3).reshape(()),
    ],
)
def test_a_span_is_from_the_first_to_the_last_byte(data: np.ndarray | torch.Tensor) -> None:
    array = data.numpy() if isinstance(data, torch.Tensor) else data
    addresses = [
        array.__array_interface__["data"][0] + sum(i * s for i, s in zip(at, array.strides, strict=True))
        for at in np.ndindex(array.shape)
    ]
    span = span_of("w", data)
    assert (span.address, span.stop) == (min(addresses), max(addresses) + array.itemsize)


def test_freed_storage_is_named() -> None:
    tensor = torch.zeros(16)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnmappedMemoryError, match="'w' needs 64 bytes of its storage, which has 0"):
        span_of("w", tensor)


def test_a_wrapper_has_no_memory_of_its_own() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(f"{func} on a wrapper")

    wrapper = Wrapper(torch.zeros(4))
    assert span_of("w", wrapper).nbytes == 0
    with pytest.raises(PublishError, match="'w' wraps other tensors"):
        homes_of([LocalTensor("w", "float32", (4,), (0,), wrapper)], "slot 's'")


# -- a trainer that sleeps


def test_live_weights_that_are_gone_are_not_offered() -> None:
    pages = Napping(64 * 4)
    live = pages.array(np.float32, (64,))
    live[:] = 1
    engine = ArrayEngine({"w": np.zeros(64, np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        publisher = InPlacePublisher(
            cluster.trainer_transports[0],
            cluster.rendezvous,
            model="m",
            slot="trainer-0",
            slots=["trainer-0"],
            tensors=local_tensors({"w": live}),
        )
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
        publisher.fence(timeout_s=TIMEOUT_S)
        pages.sleep()
        with pytest.raises(UnmappedMemoryError, match=r"slot 'trainer-0': 'w' at .* is not mapped.*wake") as caught:
            publisher.publish(epoch=0, step=1, timeout_s=TIMEOUT_S)
        assert caught.value.names == ("w",)
        assert all(v.version.step == 0 for v in cluster.rendezvous.describe().versions), "nothing was offered"
        pages.wake()
        live[:] = 2
        publisher.publish(epoch=0, step=1, timeout_s=TIMEOUT_S)
        cluster.refit_ok(1)
        assert engine["w"].tolist() == [2.0] * 64
        publisher.close()
        pages.sleep()
        with pytest.raises(UnmappedMemoryError, match="'w'"):
            InPlacePublisher(
                cluster.trainer_transports[0],
                cluster.rendezvous,
                model="m",
                slot="trainer-0",
                slots=["trainer-0"],
                tensors=local_tensors({"w": live}),
            )


def test_weights_that_are_gone_are_not_copied_and_the_last_version_stands() -> None:
    pages = Napping(64 * 4)
    live = pages.array(np.float32, (64,))
    live[:] = 1
    engine = ArrayEngine({"w": np.zeros(64, np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        (publisher,) = cluster.publishers
        publisher.publish(epoch=0, step=0, tensors=local_tensors({"w": live}), timeout_s=TIMEOUT_S)
        pages.sleep()
        with pytest.raises(UnmappedMemoryError, match=r"'w' .*bring the trainer's weights back"):
            publisher.publish(epoch=0, step=1, tensors=local_tensors({"w": live}), timeout_s=TIMEOUT_S)
        cluster.refit_ok(0)
        assert engine["w"].tolist() == [1.0] * 64


# -- an engine that sleeps


def sleeping_engine(pages: Napping) -> ArrayEngine:
    """`tp_engine(0)` over pages that may go, written by copying."""
    engine = tp_engine(0)
    live = {
        "qk": pages.array(np.float32, (8, 16)),
        "o": pages.array(np.float32, (16, 4), at=1024),
        "norm": pages.array(np.float32, (7,), at=2048),
    }
    return ArrayEngine(live, layout=engine._layout, commit="copy")


def cluster_of(engine: ArrayEngine, stages: list[str], **settings: object) -> Cluster:
    return Cluster(engines=[engine, tp_engine(1)], receiver_settings={"on_stage": stages.append, **settings})


@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_an_engine_asleep_is_named_before_anything_is_read(install: str) -> None:
    pages = Napping(4 * PAGE)
    stages: list[str] = []
    with cluster_of(sleeping_engine(pages), stages, install=install) as cluster:
        for step in (0, 1, 2):
            cluster.publish(step, weights(step))
            if step == 1:
                pages.sleep()
                stages.clear()
                first, second = cluster.refit(step)
                pages.wake()
                assert isinstance(first, UnmappedMemoryError)
                assert "member 'tp0': 'qk' at" in str(first)
                assert "and 2 more are not mapped" in str(first)
                assert "wake_up(tags=['weights'])" in str(first)
                assert isinstance(second, RefitAborted), "all or none"
                kept = cluster.receivers[1].serving
                assert kept is not None
                assert kept.step == 0
                assert not cluster.leftovers()
            else:
                cluster.refit_ok(step)
                assert all(holds(e, weights(step), r) for r, e in enumerate(cluster.engines))  # type: ignore[arg-type]


def test_an_engine_that_falls_asleep_before_the_install_ends_in_quarantine() -> None:
    """Too late for a no: it says so, touches nothing, and the next refit mends it."""
    pages = Napping(4 * PAGE)
    stages: list[str] = []
    with cluster_of(sleeping_engine(pages), stages) as cluster:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        vote = cluster.receivers[0]._on_stage

        def nap(stage: str) -> None:
            if stage == "install":
                pages.sleep()
            assert vote is not None
            vote(stage)

        cluster.receivers[0]._on_stage = nap
        first, second = cluster.refit(1)
        pages.wake()
        assert isinstance(first, QuarantinedError)
        assert isinstance(first.__cause__, UnmappedMemoryError)
        assert isinstance(second, QuarantinedError)
        cluster.receivers[0]._on_stage = None
        cluster.publish(2, weights(2))
        cluster.refit_ok(2)
        assert all(holds(e, weights(2), r) for r, e in enumerate(cluster.engines))  # type: ignore[arg-type]


def test_a_torch_models_parameters_are_looked_at_by_name() -> None:
    pages = Napping(2 * PAGE)
    module = torch.nn.Linear(8, 8, bias=False)
    module.weight = torch.nn.Parameter(torch.from_numpy(pages.array(np.float32, (8, 8))), requires_grad=False)
    module.register_buffer("scale", torch.ones(3))
    engine = TorchModuleEngine(module, commit="copy", allow_unattributed=())
    assert [s.name for s in engine.live_spans()] == ["weight", "scale"]
    with Cluster(1, engines=[engine]) as cluster:
        cluster.publish(0, {"weight": np.ones((8, 8), np.float32)})
        pages.sleep()
        (error,) = cluster.refit(0)
        pages.wake()
        assert isinstance(error, UnmappedMemoryError)
        assert error.names == ("weight",)
        cluster.refit_ok(0)
        assert bool((module.weight == 1).all())


def test_registered_buffers_that_lost_their_memory_are_given_up() -> None:
    """Their registration leads elsewhere: they are not read into, and the next refit has others."""
    with Cluster(engines=[tp_engine(0)], receiver_settings={"allow_unconsumed": ["*"]}) as cluster:
        (receiver,) = cluster.receivers
        cluster.publish(1, weights(1))
        cluster.refit_ok(1)
        before = receiver.reader.arenas.all()
        assert before
        before[0].backing = (5, 5)  # as if the driver had said so when it was registered
        cluster.publish(2, weights(2))
        (error,) = cluster.refit(2)
        assert isinstance(error, UnmappedMemoryError)
        assert "mapped to other memory" in str(error)
        assert "registered anew" in str(error)
        (report,) = cluster.refit_ok(2)
        assert report.cold
        assert not set(map(id, before)) & set(map(id, receiver.reader.arenas.all()))
        assert holds(cluster.engines[0], weights(2), 0)  # type: ignore[arg-type]


def test_nobody_reads_a_version_whose_trainer_sleeps_at_the_start() -> None:
    """The first publication is refused too: whoever waits for the version waits in vain, and gets no wrong bytes."""
    pages = Napping(PAGE)
    live = pages.array(np.float32, (64,))
    pages.sleep()
    engine = ArrayEngine({"w": np.zeros(64, np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        with pytest.raises(UnmappedMemoryError):
            cluster.publishers[0].publish(epoch=0, step=0, tensors=local_tensors({"w": live}), timeout_s=TIMEOUT_S)
        (error,) = cluster.refit(0, timeout_s=0.5)
        assert isinstance(error, RendezvousError | RefitError)
        assert not engine["w"].any()
