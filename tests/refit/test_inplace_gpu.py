"""Live weights on a GPU, published where they are: driver, stream and transport are fakes of host memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster
from tests.refit.fake_gpu import NUMBER, FakeGpu, FakeLibrary, GpuTransport, driver, on_gpu

from reshard.refit import homes, residency
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import FenceTimeoutError, PublishError, UnmappedMemoryError, VerificationError
from reshard.refit.header import HEADER_BYTES, Header
from reshard.refit.inplace import InPlacePublisher
from reshard.refit.publisher import Publisher
from reshard.refit.receiver import Receiver
from reshard.refit.tensors import LocalTensor
from reshard.rendezvous import Rendezvous
from reshard.transports import open_transport


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    for module in (homes, residency):
        monkeypatch.setattr(module, "driver_of", lambda number: driver(fake))
    return fake


class Trainer:
    """Two tensors in one allocation of the GPU, one in another."""

    def __init__(self, library: FakeLibrary) -> None:
        one = library.add(torch.arange(96, dtype=torch.float32))
        two = library.add(torch.arange(24, dtype=torch.float16))
        self.one = one
        self.live = {"a": one[:32].view(4, 8), "b": one[40:88].view(6, 8), "c": two.view(3, 8)}
        self.tensors = [
            LocalTensor(n, str(t.dtype).removeprefix("torch."), tuple(t.shape), (0, 0), on_gpu(t))
            for n, t in self.live.items()
        ]
        self.gpu = FakeGpu()
        self.transport = GpuTransport()
        self.rendezvous = Rendezvous.in_process()

    def publisher(self, **settings: object) -> InPlacePublisher:
        """A publisher of them."""
        merged = {"tensors": self.tensors, "device": self.gpu} | settings
        return InPlacePublisher(
            self.transport,
            self.rendezvous,
            model="m",
            slot="t0",
            slots=["t0"],
            **merged,  # type: ignore[arg-type]
        )

    def receiver(self) -> tuple[Receiver, ArrayEngine, GpuTransport]:
        """An engine of host arrays that takes all of it."""
        engine = ArrayEngine({n: np.zeros(tuple(t.shape), t.numpy().dtype) for n, t in self.live.items()})
        wire = GpuTransport()
        made = Receiver(wire, self.rendezvous, engine, model="m", group="g", members=["r"], member="r")
        return made, engine, wire


def test_a_gpus_live_weights_version_after_version(library: FakeLibrary) -> None:
    trainer = Trainer(library)
    receiver, engine, _ = trainer.receiver()
    with trainer.publisher() as publisher, receiver:
        for step in range(3):
            publisher.publish(epoch=0, step=step, timeout_s=TIMEOUT_S)
            report = receiver.refit(step, timeout_s=TIMEOUT_S)
            assert all(np.array_equal(engine[n], t.numpy()) for n, t in trainer.live.items())
            assert report.verified_bytes == report.received_bytes == sum(t.nbytes for t in trainer.live.values())
            publisher.fence(timeout_s=TIMEOUT_S)
            for t in trainer.live.values():
                t.add_(1)


def test_each_allocation_is_registered_once_as_the_gpus(library: FakeLibrary) -> None:
    trainer = Trainer(library)
    with trainer.publisher() as publisher:
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        found = {(r.address, r.nbytes) for r in publisher._registration.regions if r.address in library.segments}
        assert found == set(library.segments.items()), "by allocation, not by tensor"
        assert {(r.memory, r.device) for r in publisher._registration.regions} == {("vram", NUMBER)}
        worker = trainer.receiver()[0].worker()
        (slot,) = trainer.rendezvous.await_version(
            "m", group="o", members=["x"], member="x", worker=worker, want=0, timeout_s=TIMEOUT_S
        ).slots
        assert (slot.memory, slot.device) == ("vram", NUMBER)


@pytest.mark.parametrize("count", [1, 3])
def test_the_device_is_waited_for_before_admission_opens(library: FakeLibrary, count: int) -> None:
    """Writers first, then one wait for all digests, then digests and header in place, and only then is it offered."""
    trainer = Trainer(library)
    log = trainer.gpu.runtime.log
    with trainer.publisher(tensors=trainer.tensors[:count]) as publisher:
        offer = publisher._offering.offer

        def offered(*args: object, **named: object) -> str:
            log.append("offer")
            return offer(*args, **named)  # type: ignore[arg-type]

        publisher._offering.offer = offered  # type: ignore[method-assign]
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        once = ["enqueue", "synchronize"]
        assert log == ["quiesce", *once, *once, *once, "offer"], "digests, their way to readers, header"


def test_readers_see_the_header_on_the_gpu_turn_odd_at_the_fence(library: FakeLibrary) -> None:
    trainer = Trainer(library)
    with trainer.publisher() as publisher:
        owner = publisher._allocation.region.owner

        def header() -> Header:
            raw = owner.as_subclass(torch.Tensor)[:HEADER_BYTES].numpy().tobytes()  # type: ignore[attr-defined]
            return Header.parse(raw, holder="t0")

        publisher.publish(epoch=0, step=7, timeout_s=TIMEOUT_S)
        assert (header().step, header().sequence % 2) == (7, 0)
        publisher.fence(timeout_s=TIMEOUT_S)
        assert header().sequence % 2 == 1


def test_a_write_on_the_gpu_under_a_lease_is_seen(library: FakeLibrary) -> None:
    trainer = Trainer(library)
    receiver, engine, _ = trainer.receiver()
    with trainer.publisher() as publisher, receiver:
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        trainer.live["b"][0, 0] = 77
        with pytest.raises(VerificationError, match="t0: b "):
            receiver.refit(0, timeout_s=TIMEOUT_S)
        assert not engine["b"].any()
        with pytest.raises(PublishError, match="'a' was written while it was offered"):  # a and b share a counter
            publisher.fence(timeout_s=TIMEOUT_S)


def test_a_write_while_the_weights_are_digested_is_seen_by_the_fence(library: FakeLibrary) -> None:
    """Whoever verifies is told by the digests at most in part; torch's counters are taken before."""
    trainer = Trainer(library)
    digest = trainer.gpu.digest_cells

    def digested(rows: object) -> np.ndarray:
        found = digest(rows)  # type: ignore[arg-type]
        trainer.live["c"].add_(1)
        return found

    trainer.gpu.digest_cells = digested  # type: ignore[method-assign, assignment]
    with trainer.publisher() as publisher:
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        with pytest.raises(PublishError, match="'c' was written while it was offered"):
            publisher.fence(timeout_s=TIMEOUT_S)


def test_the_fence_waits_for_leases(library: FakeLibrary) -> None:
    trainer = Trainer(library)
    with trainer.publisher() as publisher:
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        worker = trainer.receiver()[0].worker()
        manifest = trainer.rendezvous.await_version(
            "m", group="o", members=["x"], member="x", worker=worker, want=0, timeout_s=TIMEOUT_S
        )
        with pytest.raises(FenceTimeoutError):
            publisher.fence(timeout_s=1.0)
        trainer.rendezvous.release_lease(manifest.lease)
        publisher.fence(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("woken", [False, True])
def test_an_engine_that_sleeps_or_slept_is_not_offered(library: FakeLibrary, woken: bool) -> None:
    """Awake again it lies in other memory than what was registered: readers would get what is there by now."""
    trainer = Trainer(library)
    with trainer.publisher() as publisher:
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        publisher.fence(timeout_s=TIMEOUT_S)
        library.sleep()
        if woken:
            library.wake()
        before = list(trainer.gpu.runtime.log)
        with pytest.raises(UnmappedMemoryError, match="other memory" if woken else "not mapped") as caught:
            publisher.publish(epoch=0, step=1, timeout_s=TIMEOUT_S)
        assert caught.value.names == ("a", "c")
        assert "cuda:1" in str(caught.value)
        assert "make a new publisher" in str(caught.value)
        assert trainer.gpu.runtime.log == before, "nothing was launched over it"
        assert all(v.version.step == 0 for v in trainer.rendezvous.describe().versions), "nothing was offered"
    if woken:
        with trainer.publisher() as publisher:
            publisher.publish(epoch=0, step=1, timeout_s=TIMEOUT_S)
    else:
        with pytest.raises(UnmappedMemoryError):
            trainer.publisher()


def test_what_cannot_be_registered_is_named(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(library)
    with pytest.raises(PublishError, match=r"transport 'memory' does not reach memory on cuda:1 \(it reaches dram\)"):
        InPlacePublisher(
            open_transport("memory"),
            trainer.rendezvous,
            model="m",
            slot="t0",
            slots=["t0"],
            tensors=trainer.tensors,
            device=trainer.gpu,
        )
    library.rdma_capable = False
    with pytest.raises(PublishError, match="'a' is in CUDA memory that GPUDirect RDMA does not reach"):
        trainer.publisher()
    library.rdma_capable = True
    first = next(iter(library.segments))
    whole, library.segments[first] = library.segments[first], 100
    library.add(trainer.one[25:])
    with pytest.raises(PublishError, match=r"'a' spans two CUDA allocations"):
        trainer.publisher()
    library.segments[first] = whole
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(PublishError, match="expandable_segments in PYTORCH_ALLOC_CONF"):
        trainer.publisher()


def test_tensors_on_several_devices_are_refused(library: FakeLibrary) -> None:
    trainer = Trainer(library)
    host = LocalTensor("h", "float32", (2,), (0,), np.zeros(2, np.float32))
    with pytest.raises(PublishError, match="'a' is on cuda:1 and 'h' on cpu"):
        trainer.publisher(tensors=[*trainer.tensors, host])
    meta = LocalTensor("z", "float32", (2,), (0,), torch.zeros(2, device="meta"))
    with pytest.raises(PublishError, match="'z' is on meta"):
        trainer.publisher(tensors=[meta])


def test_copies_lie_on_the_gpu_with_header_and_digests(library: FakeLibrary) -> None:
    """A copying publisher's buffers on the GPU: what readers look at is taken there before the version is offered."""
    trainer = Trainer(library)
    receiver, engine, _ = trainer.receiver()
    with (
        receiver,
        Publisher(
            trainer.transport, trainer.rendezvous, model="m", slot="t0", slots=["t0"], device=trainer.gpu
        ) as publisher,
    ):
        for step in range(3):
            tensors = [LocalTensor(t.name, t.dtype, t.shape, t.start, trainer.live[t.name]) for t in trainer.tensors]
            publisher.publish(epoch=0, step=step, tensors=tensors, timeout_s=TIMEOUT_S)
            report = receiver.refit(step, timeout_s=TIMEOUT_S)
            assert all(np.array_equal(engine[n], t.numpy()) for n, t in trainer.live.items())
            assert report.verified_bytes == report.received_bytes > 0
            for t in trainer.live.values():
                t.add_(1)
        buffer = publisher._newest
        assert buffer is not None
        assert isinstance(buffer.data, torch.Tensor)
        assert buffer.data.device == torch.device("cuda", NUMBER)
        assert {(r.memory, r.device) for r in buffer._registration.regions} == {("vram", NUMBER)}


def test_host_tensors_take_the_devices_path_too() -> None:
    """Torch's CPU tensors through a device: the same calls, the same bytes."""
    from reshard.refit.torch_device import TorchDevice

    live = torch.randn(32, 8)
    engine = ArrayEngine({"w": np.zeros((32, 8), np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        publisher = InPlacePublisher(
            cluster.trainer_transports[0],
            cluster.rendezvous,
            model="m",
            slot="trainer-0",
            slots=["trainer-0"],
            tensors=[LocalTensor("w", "float32", (32, 8), (0, 0), live)],
            device=TorchDevice("cpu"),
        )
        for step in range(2):
            publisher.publish(epoch=0, step=step, timeout_s=TIMEOUT_S)
            (report,) = cluster.refit_ok(step)
            assert np.array_equal(engine["w"], live.numpy())
            assert report.verified_bytes == live.nbytes
            publisher.fence(timeout_s=TIMEOUT_S)
            live.add_(1)
        publisher.close()
        with pytest.raises(PublishError, match="closed"):
            publisher.fence(timeout_s=1.0)
