"""Work on torch tensors equals the planner's own, and is ordered as a GPU needs it; CPU tensors stand in."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.reference import Scenario
from tests.refit.cluster import Cluster
from tests.refit.fake_gpu import FakeContexts, RecordingRuntime
from tests.strategies import read_table, scenarios, shard_table

from reshard.planner import PlanOptions, plan
from reshard.planner.errors import PlanError
from reshard.planner.execute import run_copies, run_fills
from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.cuda_driver import CudaDriver
from reshard.refit.devices import HOST, PINNED_HOST, device_of_engine
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.engines.torch_module import TorchModuleEngine
from reshard.refit.errors import RefitError, VerificationError
from reshard.refit.receiver import Receiver
from reshard.refit.sentinel import fill_sentinel, require_delivered
from reshard.refit.serving import ServeOn
from reshard.refit.settings import expandable_segments
from reshard.refit.torch_device import TorchDevice
from reshard.refit.torch_views import Strided, copy_runs, elements_of, put_elements
from reshard.transports import open_transport, registry


@st.composite
def views(draw: st.DrawFn, inner: int) -> tuple[Strided, Strided, int]:
    """Two views of equal shape whose pieces do not overlap, either of which may run backwards, and room for both."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))

    def one() -> Strided:
        strides: list[int] = []
        step = inner
        for n in reversed(shape):
            step += draw(st.sampled_from([0, 0, 1, 4, 8]))
            strides.insert(0, step)
            step *= n
        first = draw(st.integers(0, 17))
        if draw(st.booleans()) and shape:
            d = draw(st.integers(0, len(shape) - 1))
            first += (shape[d] - 1) * strides[d]
            strides[d] = -strides[d]
        return Strided(first, shape, tuple(strides), inner)

    a, b = one(), one()
    return a, b, 4096


def as_numpy(memory: np.ndarray, at: Strided) -> np.ndarray:
    return np.ndarray((*at.shape, at.inner), np.uint8, memory, at.offset, (*at.strides, 1))


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 4, 8, 12, 16]))
def test_runs_are_copied_as_numpy_copies_them(data: st.DataObject, inner: int) -> None:
    src, dst, room = data.draw(views(inner))
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, room, dtype=np.uint8)
    expected = rng.integers(0, 256, room, dtype=np.uint8)
    got = torch.from_numpy(expected.copy())
    as_numpy(expected, dst)[...] = as_numpy(source, src)
    copy_runs(torch.from_numpy(source), src, got, dst)
    assert np.array_equal(got.numpy(), expected)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn]))
def test_elements_come_and_go_at_any_address(data: st.DataObject, dtype: torch.dtype) -> None:
    src, dst, room = data.draw(views(dtype.itemsize))
    source = torch.from_numpy(np.random.default_rng(1).integers(0, 256, room, dtype=np.uint8))
    target = torch.zeros(room, dtype=torch.uint8)
    values = elements_of(source, src, dtype)
    assert values.shape == src.shape
    put_elements(target, dst, values)
    assert np.array_equal(as_numpy(target.numpy(), dst), as_numpy(source.numpy(), src))


@settings(max_examples=60, deadline=None)
@given(scenarios(), st.integers(0, 2**32 - 1))
def test_a_plans_copies_and_fills_equal_the_planners_own(scenario: Scenario, seed: int) -> None:
    """On arbitrary staging bytes (none of which make a NaN, of which casts promise no bits)."""
    try:
        made = plan(shard_table(scenario), read_table(scenario), PlanOptions(staging_bytes=1 << 12))
    except PlanError:
        assume(False)
    rng = np.random.default_rng(seed)
    staging = rng.integers(0, 0x40, max(made.staging_bytes, 1), dtype=np.uint8)
    expected = [rng.integers(0, 256, n, dtype=np.uint8) for n in made.buffer_bytes.tolist()]
    got = [torch.from_numpy(b.copy()) for b in expected]
    runtime = RecordingRuntime()
    device = TorchDevice("cpu", runtime=runtime)
    for wave in range(made.n_waves):
        run_copies(made, wave, staging, expected)
        device.run_copies(made, wave, torch.from_numpy(staging), got)
    run_fills(made, expected)
    device.run_fills(made, got)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert np.array_equal(a.numpy(), b), made.buffers.name(i)
    assert set(runtime.log) <= {"enqueue"}, "copies and fills wait for nothing"


def test_a_view_outside_its_bytes_is_refused() -> None:
    with pytest.raises(Exception, match=r"\[4, 12\).*8 bytes"):
        copy_runs(
            torch.zeros(8, dtype=torch.uint8),
            Strided(4, (2,), (4,), 4),
            torch.zeros(8, dtype=torch.uint8),
            Strided(0, (2,), (4,), 4),
        )


def test_memory_of_another_device_is_refused() -> None:
    device = TorchDevice("cpu")
    with pytest.raises(RefitError, match="meta"):
        device.fill(torch.zeros(8, dtype=torch.uint8, device="meta"), 0)
    with pytest.raises(RefitError, match="expected 'cpu' or 'cuda:N'"):
        TorchDevice("meta")


class LoggingDevice(TorchDevice):
    """A device that also writes down which kind of work is enqueued."""

    def __init__(self) -> None:
        self.runtime = RecordingRuntime()
        super().__init__("cpu", runtime=self.runtime)

    def digest(self, checks, staging, buffers):
        self.runtime.log.append("digest")
        return super().digest(checks, staging, buffers)

    def run_copies(self, plan, wave, staging, buffers):
        self.runtime.log.append("copies")
        super().run_copies(plan, wave, staging, buffers)

    def run_fills(self, plan, buffers):
        self.runtime.log.append("fills")
        super().run_fills(plan, buffers)

    def steps(self) -> list[str]:
        """The log without the stream's own entries."""
        return [step for step in self.runtime.log if step != "enqueue"]


def widening() -> tuple[dict[str, np.ndarray], ArrayEngine, dict[str, object]]:
    """A model that is cast on the way: all of it goes through staging, several waves of whole cells."""
    model = {name: np.random.default_rng(ord(name)).standard_normal((32, 128)).astype(np.float32) for name in "ab"}
    engine = ArrayEngine({name: np.zeros((32, 128), np.float64) for name in model}, commit="copy")
    return model, engine, {"options": PlanOptions(staging_bytes=1 << 13), "cut_hints": False}


def publish_in_rows(cluster: Cluster, model: dict[str, np.ndarray]) -> None:
    cuts = {name: [list(range(4, 32, 4)), []] for name in model}
    cluster.publishers[0].publish(epoch=0, step=0, tensors=local_tensors(model), cuts=cuts, timeout_s=20.0)


def test_each_wave_is_flushed_then_worked_on_and_waited_for_once() -> None:
    """As a GPU needs it: quiesce, and then for each wave flush, digests, copies, one synchronise."""
    device = LoggingDevice()
    model, engine, settings = widening()
    installed: dict[str, np.ndarray] = {}
    engine.install = lambda buffers: installed.update(  # type: ignore[method-assign]
        {n: b.numpy().view(np.float64).reshape(32, 128).copy() for n, b in buffers.items()}  # type: ignore[union-attr]
    )
    with Cluster(1, engines=[engine], receiver_settings=settings | {"device": device}) as cluster:
        publish_in_rows(cluster, model)
        (report,) = cluster.refit_ok(0)
        planned = cluster.receivers[0].bench.planned
        assert planned is not None
        assert planned.plan.n_waves > 2
        steps = device.steps()
        assert steps[0] == "quiesce"
        assert steps[1:] == ["flush", "digest", "copies", "synchronize"] * planned.plan.n_waves
        assert all(np.array_equal(installed[n], w) for n, w in model.items())
        assert report.verified_bytes == report.received_bytes > 0


def test_a_difference_in_staging_is_found_before_the_next_wave_is_worked_on() -> None:
    device = LoggingDevice()
    model, engine, settings = widening()
    with Cluster(1, engines=[engine], receiver_settings=settings | {"device": device}) as cluster:
        publish_in_rows(cluster, model)
        cluster.publishers[0]._newest.data[100] ^= 1  # type: ignore[index, union-attr, operator]
        (error,) = cluster.refit(0)
        assert isinstance(error, VerificationError)
        assert "trainer-0: a [0, 4) x [0, 128)" in str(error)
        assert device.steps().count("copies") == 1


@pytest.mark.parametrize("transport", ["memory", "nixl"])
@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_refits_of_a_torch_model_through_the_device(transport: str, install: str) -> None:
    """The whole way on torch tensors: publisher's buffers, waves, casts, digests, swap, warm refit, serving on."""
    if reason := registry.probe(transport):
        pytest.skip(reason)
    torch.manual_seed(0)
    source = {n: torch.randn(48, 64) for n in ("up.weight", "down.weight")} | {"up.bias": torch.randn(48)}
    module = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 48), "down": torch.nn.Linear(64, 48, bias=False)})
    module.to(torch.bfloat16)
    engine = TorchModuleEngine(module)
    device = LoggingDevice()
    settings = {"device": device, "install": install, "stream_bytes": 1 << 13, "require_verified": False}
    with Cluster(
        2,
        engines=[engine],
        transport=transport,
        publisher_settings={"device": TorchDevice("cpu")},
        receiver_settings=settings,
    ) as cluster:
        for step in range(3):
            model = {n: w + step for n, w in source.items()}
            for i, p in enumerate(cluster.publishers):
                half = {n: w[24 * i : 24 * i + 24] for n, w in model.items()}
                tensors = local_tensors(
                    {n: w.numpy() for n, w in half.items()},
                    shapes={n: tuple(w.shape) for n, w in model.items()},
                    starts={n: (24 * i, *(0,) * (w.ndim - 1)) for n, w in model.items()},
                )
                p.publish(epoch=0, step=step, tensors=tensors, timeout_s=20.0)
            (report,) = cluster.refit_ok(step)
            got = dict(module.named_parameters())
            assert all(torch.equal(got[n], w.to(torch.bfloat16)) for n, w in model.items())
            assert report.verified_bytes > 0
        steps = device.steps()
        assert steps.count("flush") == steps.count("copies") > 0
        for before, after in itertools.pairwise(steps):
            assert before != "copies" or after == "synchronize", "staging may be read into again only after it"


def test_serving_on_from_a_device() -> None:
    model = {"w": np.arange(512, dtype=np.float32).reshape(8, 64)}
    module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(8, 64))})
    late = ArrayEngine({"w": np.zeros((8, 64), np.float32)})
    settings = {"device": TorchDevice("cpu")}
    with Cluster(1, engines=[TorchModuleEngine(module)], receiver_settings=settings) as cluster:
        cluster.publish(0, model)
        cluster.refit_ok(0)
        wire = open_transport("memory")
        with ServeOn(cluster.receivers[0]) as served:
            published = served.publish(timeout_s=10.0)
            joiner = Receiver(
                wire, cluster.rendezvous, late, model=served.model, group="late", members=["a"], member="a"
            )
            report = joiner.refit(published.version, timeout_s=10.0)
            assert report.verified_bytes == report.received_bytes == model["w"].nbytes
            assert np.array_equal(late["w"], model["w"])
            joiner.close()
        wire.close()


def test_the_engines_device_is_the_receivers_where_the_transport_reaches_it() -> None:
    class OnGpu:
        def destination_device(self) -> str:
            return "cuda:1"

    assert device_of_engine(OnGpu(), ("dram",)) is PINNED_HOST, "what is installed is copied to the GPU"
    assert device_of_engine(object(), ("dram", "vram")) is HOST
    model = torch.nn.Linear(2, 2)
    assert TorchModuleEngine(model).destination_device() == "cpu"
    split = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")])
    split[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    split[1].bias = torch.nn.Parameter(torch.zeros(2))
    assert TorchModuleEngine(split).destination_device() == "cpu"


def test_the_sentinel_on_a_device() -> None:
    device = LoggingDevice()
    memory = {"w": torch.zeros(256, dtype=torch.uint8)}
    fill_sentinel(device, memory)
    assert device.steps()[-1] == "synchronize", "peers must not be overtaken by the fill"
    with pytest.raises(VerificationError, match="256 bytes"):
        require_delivered(device, memory, ())
    memory["w"].zero_()
    require_delivered(device, memory, ())


class FakeDriver(FakeContexts):
    """``libcuda`` with given attributes."""

    def __init__(self, *, options: int, ordering: int, flush_result: int = 0) -> None:
        super().__init__()
        self.attributes = {117: options, 118: ordering}
        self.flush_result = flush_result
        self.flushed: list[tuple[int, int]] = []

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.attributes[attribute]
        return 0

    def cuFlushGPUDirectRDMAWrites(self, target, scope):
        self.require_context()
        self.flushed.append((target, scope))
        return self.flush_result


def test_the_driver_flushes_where_the_gpu_does_not_order_writes() -> None:
    library = FakeDriver(options=1, ordering=0)
    CudaDriver(0, library).flush()
    assert library.flushed == [(0, 100)], "target: the current context; scope: the owner"
    for ordered in (100, 200):
        library = FakeDriver(options=1, ordering=ordered)
        CudaDriver(0, library).flush()
        assert library.flushed == []


def test_a_gpu_without_order_and_flush_is_named(caplog: pytest.LogCaptureFixture) -> None:
    library = FakeDriver(options=2, ordering=0)
    CudaDriver(3, library).flush()
    assert library.flushed == []
    assert "GPU 3 neither orders" in caplog.text


def test_a_flush_that_fails_is_an_error() -> None:
    with pytest.raises(RefitError, match=r"GPU 1.*cuFlushGPUDirectRDMAWrites with error 700"):
        CudaDriver(1, FakeDriver(options=1, ordering=0, flush_result=700)).flush()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128, expandable_segments:True")
    with pytest.raises(RefitError, match=f"unset expandable_segments in {name}"):
        TorchDevice("cuda:0")
    TorchDevice("cpu")
    monkeypatch.setenv(name, "expandable_segments:False")
    assert expandable_segments() == ""
