"""Engines that repack what they loaded: the same weights twice give the same final bytes (case D5)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster

from reshard.refit.engines.repacking import RepackingEngine
from reshard.refit.errors import PublishError, RefitError
from reshard.refit.serving import ServeOn


class Packed(torch.nn.Module):
    """Transposes one weight, replaces another by a packed one under a new name, scales a third in place."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("a", (4, 6)), ("b", (6,)), ("c", (3,))):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.register_buffer("steps", torch.arange(3.0), persistent=False)

    def load_weights(self, weights: object) -> None:
        for name, w in weights:  # type: ignore[attr-defined]
            getattr(self, name).data.copy_(w)


def after_load(model: torch.nn.Module) -> None:
    model.a.data = model.a.data.t().contiguous()
    packed = model.b.data.view(3, 2).flip(1).to(torch.float16)
    del model.b
    model.b_packed = torch.nn.Parameter(packed, requires_grad=False)
    model.c.data.mul_(2)


def source(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in (("a", (4, 6)), ("b", (6,)), ("c", (3,)))}


def kernel(step: int) -> dict[str, torch.Tensor]:
    model = Packed()
    model.load_weights([(n, torch.from_numpy(w)) for n, w in source(step).items()])
    after_load(model)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_the_same_weights_twice_and_other_ones_between() -> None:
    model = Packed()
    with Cluster(1, engines=[RepackingEngine(model, after_load=after_load)]) as cluster:
        for step, seed in enumerate((0, 0, 1, 0)):
            cluster.publish(step, source(seed))
            (report,) = cluster.refit_ok(step)
            assert report.cold == (step == 0)
            now = dict(model.named_parameters())
            assert now.keys() == kernel(seed).keys()
            assert all(torch.equal(now[n], w) for n, w in kernel(seed).items()), step
            assert model.steps.tolist() == [0, 1, 2]
            assert report.coverage.params_never_written_sample == ("steps",)


def test_a_new_plan_captures_the_load_layout_again() -> None:
    model = Packed()
    with Cluster(1, engines=[RepackingEngine(model, after_load=after_load)]) as cluster:
        cluster.publish(0, source(0))
        cluster.refit_ok(0)
        cluster.receivers[0].bench.forget()
        cluster.publish(1, source(1))
        (report,) = cluster.refit_ok(1)
        assert report.cold
        assert all(torch.equal(dict(model.named_parameters())[n], w) for n, w in kernel(1).items())


def test_a_refit_that_leaves_parameters_out_and_serving_on_are_refused() -> None:
    model = Packed()
    with Cluster(1, engines=[RepackingEngine(model, after_load=after_load)]) as cluster:
        cluster.publish(0, source(0))
        cluster.refit_ok(0)
        with ServeOn(cluster.receivers[0]) as serve, pytest.raises(PublishError, match="kernel layouts"):
            serve.publish(timeout_s=TIMEOUT_S)
        (error,) = cluster.refit(0, only=["a"])
        assert isinstance(error, RefitError)
        assert "'b' (2 such)" in str(error)
        assert "each refit must write them all" in str(error)
        assert cluster.receivers[0].check_serving().step == 0
        assert all(torch.equal(dict(model.named_parameters())[n], w) for n, w in kernel(0).items())
