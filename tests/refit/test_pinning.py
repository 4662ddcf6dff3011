"""Host buffers beside a GPU are page-locked for as long as they are used; where they cannot be, a line says so."""

from __future__ import annotations

import enum
import logging

import numpy as np
import pytest
import torch
from tests.refit.fake_gpu import on_gpu

from reshard.refit import pinning, publisher
from reshard.refit.arena import Arena
from reshard.refit.buffers import PublishBuffer
from reshard.refit.devices import HOST, PINNED_HOST, HostDevice
from reshard.refit.pinning import pin
from reshard.refit.publisher import Publisher
from reshard.refit.receiver import Receiver
from reshard.refit.tensors import LocalTensor
from reshard.rendezvous import Rendezvous
from reshard.transports import open_transport


class Answer(enum.Enum):
    """As torch gives a cudaError."""

    success = 0
    memory = 2


class FakeRuntime:
    """``torch.cuda.cudart()`` that keeps account."""

    def __init__(self, answer: Answer = Answer.success) -> None:
        self.answer = answer
        self.locked: dict[int, int] = {}
        self.flags: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Answer:
        if self.answer is Answer.success:
            self.locked[address] = nbytes
            self.flags.append(flags)
        return self.answer

    def cudaHostUnregister(self, address: int) -> Answer:
        del self.locked[address]
        return Answer.success


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(pinning, "load_runtime", lambda: fake)
    return fake


def test_memory_is_locked_until_it_is_closed(runtime: FakeRuntime) -> None:
    held = pin(4096, 100)
    assert held is not None
    assert runtime.locked == {4096: 100}
    assert runtime.flags == [1], "for every context"
    held.close()
    held.close()
    assert runtime.locked == {}


def test_what_cannot_be_locked_stays_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "load_runtime", lambda: FakeRuntime(Answer.memory))
    with caplog.at_level(logging.INFO, "reshard.refit.pinning"):
        assert pin(4096, 100) is None
        assert "100 bytes of host memory at 0x1000 are not page-locked (CUDA error 2)" in caplog.text
        assert "ulimit -l" in caplog.text
        caplog.clear()
        monkeypatch.setattr(pinning, "load_runtime", lambda: None)
        assert pin(4096, 100) is None
        assert "100 bytes of host memory are not page-locked: no CUDA runtime" in caplog.text


def test_an_unlock_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeRuntime()
    held = pin(4096, 100, library=fake)
    fake.cudaHostUnregister = lambda address: Answer.memory  # type: ignore[method-assign]
    assert held is not None
    held.close()
    assert "at 0x1000 cannot be unlocked: CUDA error 2" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_nothing_is_locked() -> None:
    assert pinning.load_runtime() is None


@pytest.mark.parametrize("kind", ["arena", "buffer"])
@pytest.mark.parametrize("device", [HOST, PINNED_HOST])
def test_buffers_are_locked_whole_and_unlocked_before_they_are_freed(
    runtime: FakeRuntime, kind: str, device: HostDevice
) -> None:
    wire = open_transport("memory")
    made = Arena(wire, {"a": 5000}, device=device) if kind == "arena" else PublishBuffer(wire, 5000, 2, device)
    region = made._allocation.region
    assert runtime.locked == ({region.address: region.nbytes} if device is PINNED_HOST else {})
    made.close()
    made.close()
    assert runtime.locked == {}
    wire.close()


def test_a_receiver_locks_what_it_copies_to_a_gpu_that_the_transport_does_not_reach(runtime: FakeRuntime) -> None:
    class OnGpu:
        swaps = False

        def destination_device(self) -> str:
            return "cuda:0"

    wire = open_transport("memory")
    receiver = Receiver(wire, Rendezvous.in_process(), OnGpu(), model="m", group="g", members=["a"], member="a")  # type: ignore[arg-type]
    assert receiver.reader.device is PINNED_HOST
    wire.close()


@pytest.mark.parametrize("from_gpu", [False, True])
def test_a_publisher_locks_its_buffers_where_tensors_come_from_a_gpu(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, from_gpu: bool
) -> None:
    wire = open_transport("memory")
    monkeypatch.setattr(publisher, "require_mapped", lambda *a, **k: [])
    monkeypatch.setattr(publisher, "synchronize", lambda tensors: None)
    plain = torch.arange(64, dtype=torch.float32)
    tensor = LocalTensor("w", "float32", (64,), (0,), plain)
    if from_gpu:
        monkeypatch.setattr(publisher, "_on_gpu", lambda t: True)
    with Publisher(wire, Rendezvous.in_process(), model="m", slot="s", slots=["s"]) as made:
        made.publish(epoch=0, step=0, tensors=[tensor], timeout_s=10.0)
        assert len(runtime.locked) == (2 if from_gpu else 0), "both buffers"
    assert runtime.locked == {}
    wire.close()


def test_tensors_of_a_gpu_are_told_from_the_hosts() -> None:
    plain = torch.zeros(4)
    assert publisher._on_gpu(LocalTensor("w", "float32", (4,), (0,), on_gpu(plain)))
    assert not publisher._on_gpu(LocalTensor("w", "float32", (4,), (0,), plain))
    assert not publisher._on_gpu(LocalTensor("w", "float32", (4,), (0,), np.zeros(4, np.float32)))
