"""What a publisher does to its buffers, and in which order; what it registers, casts, and says of a version."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster, shards_of, tp_cluster, weights
from tests.refit.fake_gpu import GpuTensor, on_gpu

from reshard.refit import layout as layouts
from reshard.refit import publisher as publishing
from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.buffers import PublishBuffer
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import PublishError
from reshard.refit.header import SeqLock
from reshard.refit.inplace import InPlacePublisher
from reshard.refit.layout import PackedLayout, WireRule
from reshard.refit.published import Published
from reshard.refit.publisher import Publisher
from reshard.refit.tensors import LocalTensor
from reshard.rendezvous.errors import RendezvousError
from reshard.rendezvous.types import Manifest
from reshard.transports import open_transport


def manifest_of(cluster: Cluster, step: int) -> Manifest:
    """Somebody's manifest of a step, with a lease."""
    worker = cluster.receivers[0].worker()
    return cluster.rendezvous.await_version(
        "m", group=f"o{step}", members=["x"], member="x", worker=worker, want=step, timeout_s=TIMEOUT_S
    )


# -- order


def test_a_version_is_written_between_an_odd_and_an_even_header_and_offered_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readers of what was there see an odd header before a byte changes; writers are waited for on both sides."""
    log: list[str] = []

    def logged(owner: object, name: str, word: str) -> None:
        real = getattr(owner, name)

        def call(*args: object, **named: object) -> object:
            log.append(word)
            return real(*args, **named)

        monkeypatch.setattr(owner, name, call)

    logged(publishing, "synchronize", "synchronize")
    logged(PackedLayout, "pack", "pack")
    logged(PublishBuffer, "digest", "digest")
    logged(SeqLock, "begin", "odd")
    logged(SeqLock, "commit", "even")
    with tp_cluster() as cluster:
        (first, _) = cluster.publishers
        offer = first._offering.offer
        monkeypatch.setattr(first._offering, "offer", lambda *a, **k: (log.append("offer"), offer(*a, **k))[1])
        for step in range(3):
            log.clear()
            first.publish(epoch=0, step=step, tensors=shards_of(weights(step), 0, 2), timeout_s=TIMEOUT_S)
            assert log == ["odd", "synchronize", "pack", "synchronize", "digest", "even", "offer"]


def test_each_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    on_one = [LocalTensor(n, "float32", (4,), (0,), on_gpu(torch.zeros(4))) for n in "abc"]
    host = [LocalTensor("h", "float32", (4,), (0,), torch.zeros(4)), *local_tensors({"n": np.zeros(2, np.float32)})]
    layouts.synchronize([*on_one, *host])
    assert waited == [torch.device("cuda", 1)]


def test_a_version_that_fails_half_written_leaves_the_last_one_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        real = PackedLayout.pack

        def fails(self: PackedLayout, tensors: object, data: object) -> None:
            raise MemoryError("no room to cast")

        monkeypatch.setattr(PackedLayout, "pack", fails)
        with pytest.raises(MemoryError):
            cluster.publishers[0].publish(epoch=0, step=1, tensors=shards_of(weights(1), 0, 2), timeout_s=TIMEOUT_S)
        assert [b.seqlock.sequence % 2 for b in cluster.publishers[0]._buffers] == [0, 1]
        cluster.refit_ok(0)
        monkeypatch.setattr(PackedLayout, "pack", real)
        cluster.publish(1, weights(1))
        cluster.refit_ok(1)


# -- regions and versions


def test_memory_is_registered_once_and_the_table_stays_while_addresses_alternate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tp_cluster() as cluster:
        registered: list[int] = []
        for wire in cluster.trainer_transports:
            real = wire.register
            monkeypatch.setattr(wire, "register", lambda r, real=real: (registered.append(len(r)), real(r))[1])
        tables, bases, reports = set(), [], []
        for step in range(6):
            cluster.publish(step, weights(step))
            manifest = manifest_of(cluster, step)
            tables |= {slot.table_digest for slot in manifest.slots}
            bases.append(tuple(tuple(slot.region_bases.tolist()) for slot in manifest.slots))
            cluster.rendezvous.release_lease(manifest.lease)
            reports += cluster.refit_ok(step)
        assert registered == [1] * 4, "two buffers for each of two trainers, at the first version"
        assert len(tables) == 2
        assert bases[0::2] == [bases[0]] * 3
        assert bases[1::2] == [bases[1]] * 3
        assert bases[0] != bases[1]
        assert not any(r.cold for r in reports[4:])


def test_digests_lie_in_a_region_beside_the_data_and_the_rendezvous_has_their_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        manifest = manifest_of(cluster, 0)
        for slot, publisher in zip(manifest.slots, cluster.publishers, strict=True):
            buffer = publisher._newest
            assert buffer is not None
            assert len(slot.digest_root) == 32
            data, digests, header = slot.region_bases.tolist()
            assert (slot.digest_region, slot.header_region) == (1, 2)
            assert digests == buffer.digests.ctypes.data
            assert header == buffer.seqlock.memory.ctypes.data
            assert data == buffer.data.ctypes.data  # type: ignore[union-attr]
        cluster.rendezvous.release_lease(manifest.lease)
        cluster.refit_ok(0)
        reader = cluster.receivers[0].reader
        read = reader.arenas.digests("trainer-0")
        newest = cluster.publishers[0]._newest
        assert newest is not None
        assert np.array_equal(read, newest.digests[: len(read)])
        assert len(read) > 0
        bound = reader.bind(manifest, cluster.receivers[0].bench.checks)
        assert sum(p.nbytes for p in bound.beside) == sum(
            16 * reader.arenas.digests(name).shape[0] for name in ("trainer-0", "trainer-1")
        ), "read one-sidedly, 16 bytes a cell"


def test_what_is_published_in_place_is_kept_from_being_freed() -> None:
    live = torch.arange(64, dtype=torch.float32)
    gone = weakref.ref(live)
    engine = ArrayEngine({"w": np.zeros(64, np.float32)})
    with Cluster(1, engines=[engine]) as cluster:
        publisher = InPlacePublisher(
            cluster.trainer_transports[0],
            cluster.rendezvous,
            model="m",
            slot="trainer-0",
            slots=["trainer-0"],
            tensors=[LocalTensor("w", "float32", (64,), (0,), live)],
        )
        publisher.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        del live
        gc.collect()
        assert gone() is not None
        cluster.refit_ok(0)
        assert engine["w"].tolist() == list(range(64))
        publisher.close()


@pytest.mark.parametrize(
    "other", [{"layout_epoch": 3}, {"slots": ["trainer-0", "trainer-9"]}, {"step": -1}], ids=["epoch", "slots", "step"]
)
def test_publishers_that_differ_are_told(other: dict[str, object]) -> None:
    with tp_cluster() as cluster:
        cluster.publish(1, weights(0))
        first, second = cluster.publishers
        first.publish(epoch=0, step=2, tensors=shards_of(weights(1), 0, 2), timeout_s=TIMEOUT_S)
        if "slots" in other:
            wire = open_transport("memory")
            cluster.trainer_transports.append(wire)
            second = Publisher(wire, cluster.rendezvous, model="m", slot="trainer-9", slots=other["slots"])  # type: ignore[arg-type]
        step = 2 + int(str(other.get("step", 0))) * 2
        epoch = int(str(other.get("layout_epoch", 0)))
        with pytest.raises(RendezvousError):
            second.publish(
                epoch=0, step=step, tensors=shards_of(weights(1), 1, 2), layout_epoch=epoch, timeout_s=TIMEOUT_S
            )
        if "slots" in other:
            second.close()


# -- back-pressure


def test_a_publisher_that_waits_goes_on_when_the_reader_is_done() -> None:
    with tp_cluster(publisher_settings={"buffers": 1}) as cluster:
        cluster.publish(0, weights(0))
        manifest = manifest_of(cluster, 0)
        (first, _) = cluster.publishers
        done: list[Published] = []

        def publish() -> None:
            tensors = shards_of(weights(1), 0, 2)
            done.append(first.publish(epoch=0, step=1, tensors=tensors, timeout_s=TIMEOUT_S))

        thread = threading.Thread(target=publish)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert first._buffers[0].seqlock.sequence % 2 == 0, "nothing is written while it is read"
        cluster.rendezvous.release_lease(manifest.lease)
        thread.join(TIMEOUT_S)
        assert [p.skipped for p in done] == [False]


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_new_layout_skips_too_where_the_old_one_is_read(buffers: int) -> None:
    """All buffers go with their layout, so that any reader makes a version to be skipped."""
    with tp_cluster(publisher_settings={"buffers": buffers, "on_busy": "skip"}) as cluster:
        cluster.publish(0, weights(0))
        manifest = manifest_of(cluster, 0)
        (first, _) = cluster.publishers
        cuts = {"q": [[0, 2, 8], [0, 16]]}

        def publish(step: int) -> bool:
            tensors = shards_of(weights(1), 0, 2)
            return first.publish(
                epoch=0, step=step, tensors=tensors, cuts=cuts, layout_epoch=1, timeout_s=TIMEOUT_S
            ).skipped

        assert publish(1)
        assert publish(1), "and again"
        cluster.rendezvous.release_lease(manifest.lease)
        assert not publish(1)


# -- wire dtype


def tensor(dtype: str, name: str = "w", wire: str | None = None) -> LocalTensor:
    return LocalTensor(name, dtype, (4,), (0,), torch.zeros(4, dtype=getattr(torch, dtype)), wire_dtype=wire)


@pytest.mark.parametrize(
    ("dtype", "name", "wire", "expected"),
    [
        ("float32", "w", None, "bfloat16"),
        ("float64", "w", None, "bfloat16"),
        ("float32", "mlp.router.weight", None, "float32"),
        ("float32", "w", "float16", "float16"),
        ("float32", "mlp.router.weight", "bfloat16", "bfloat16"),
        ("int64", "w", None, "int64"),
        ("uint8", "w", None, "uint8"),
        ("bool", "w", None, "bool"),
        ("float8_e4m3fn", "w", None, "float8_e4m3fn"),
        ("int32", "w", "int32", "int32"),
    ],
)
def test_only_floats_are_cast_and_exceptions_are_not(dtype: str, name: str, wire: str | None, expected: str) -> None:
    assert WireRule("bfloat16", ("*router*",)).of(tensor(dtype, name, wire)) == expected


@pytest.mark.parametrize(("dtype", "wire"), [("int32", "bfloat16"), ("float32", "int32"), ("float8_e4m3fn", "float16")])
def test_what_is_never_cast_is_refused_by_name(dtype: str, wire: str) -> None:
    with pytest.raises(PublishError, match=rf"'w': {dtype} is never cast to {wire} on the wire"):
        WireRule().of(tensor(dtype, wire=wire))


@pytest.mark.parametrize("wire", ["int8", "float8_e4m3fn"])
def test_a_wire_dtype_is_a_float_of_at_least_16_bits(wire: str) -> None:
    with pytest.raises(PublishError, match=f"wire_dtype '{wire}': expected one of bfloat16"):
        WireRule(wire)


@pytest.mark.parametrize(("wire", "in_torch"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_a_gpus_tensors_are_cast_where_they_lie(
    wire: str, in_torch: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy to the host would carry the wider type and cast there: twice the bytes over the bus."""
    cast: list[torch.dtype] = []

    class Watched(GpuTensor):
        def to(self, dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
            cast.append(dtype)
            return torch.Tensor.to(self, dtype).as_subclass(torch.Tensor)

    values = torch.randn(64)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(publishing, "require_mapped", lambda *a, **k: [])
    engine = ArrayEngine({"w": np.zeros(64, np.uint16)}, dtypes={"w": wire})
    with Cluster(1, engines=[engine], publisher_settings={"wire_dtype": wire}) as cluster:
        cluster.publishers[0].publish(
            epoch=0,
            step=0,
            tensors=[LocalTensor("w", "float32", (64,), (0,), values.as_subclass(Watched))],
            timeout_s=TIMEOUT_S,
        )
        assert cast == [in_torch]
        cluster.refit_ok(0)
        assert torch.equal(torch.from_numpy(engine["w"]).view(in_torch), values.to(in_torch))
