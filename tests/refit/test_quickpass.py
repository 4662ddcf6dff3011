"""The quick pass sees what the recorder sees, or gives up."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from tests.refit.test_capture import COMPUTED, VIEWS, Model, Weights, t

from reshard.refit import quickpass
from reshard.refit.capture import _followed, record
from reshard.refit.engines.loader import captured_of
from reshard.refit.engines.places import Place, places_of
from reshard.refit.errors import UnsupportedLoaderError
from reshard.refit.quickpass import look
from reshard.refit.recording import Recording
from reshard.refit.seen import Seen
from reshard.refit.tensors import SourceTensor

MADE_ANEW = {name for name in VIEWS if "contiguous" in name or "cat" in name or "clone" in name} | {"stack"}
MADE_ANEW |= {"split_permute_merge", "to_same"}
Manifest = list[tuple[str, torch.dtype, tuple[int, ...]]]


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return [(name, w.dtype, tuple(w.shape)) for name, w in tensors.items()]


def both(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """Check that the quick pass sees the loader through, and that the recorder says the same."""
    places: dict[str, Place] = {p.name: p for p in places_of(model)}
    destinations = [p.destination() for p in places.values()]
    manifest = manifest_of(tensors)
    sources = {n: SourceTensor(n, str(d).removeprefix("torch."), s) for n, d, s in manifest}
    found = look(model.load_weights, manifest, destinations)
    assert found is not None
    seen, _ = found
    quick = captured_of(seen, sources, places)
    followed = captured_of(_followed(model.load_weights, manifest, destinations), sources, places)
    assert quick.reads.digest == followed.reads.digest
    assert (quick.n_copies, quick.consumed) == (followed.n_copies, followed.consumed)
    assert followed.materialised == () == followed.loader_buffers


@pytest.mark.parametrize("name", sorted(VIEWS.keys() - MADE_ANEW))
def test_views_are_seen_as_the_recorder_sees_them(name: str) -> None:
    tensors = {"a": t(8, 6), "b": t(8, 6)}
    shape = VIEWS[name](tensors["a"]).shape

    def load(model: Model, weights: Weights) -> None:
        for source, w in weights:
            view = VIEWS[name](w)
            model.get_parameter(source).data.unflatten(0, (-1, 2))[:, 1].zero_()
            model.get_parameter(source).data[2 : 2 + view.numel()].view(view.shape).copy_(view)

    n = 2 + 2 * shape.numel()
    both(Model({"b": (n,), "a": (n,)}, load), tensors)


def test_fills_broadcasts_casts_and_strided_destinations() -> None:
    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            model.p.data.fill_(3)
            model.p.data[1:3].copy_(w)
            model.p.data[:, ::2][3].zero_()
            model.q.data.t().copy_(w[0].expand(5, 4))

    both(Model({"p": (4, 4), "q": (4, 5)}, load), {"w": t(2, 4).to(torch.bfloat16)})


@pytest.mark.parametrize("name", [*COMPUTED, *sorted(MADE_ANEW)])
def test_what_is_no_view_is_left_to_the_recorder(name: str) -> None:
    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            if name in COMPUTED:
                COMPUTED[name](model, w)
            else:
                view = VIEWS[name](w)
                model.p.data[: view.numel()].view(view.shape).copy_(view)

    tensors = {"w": t(5) if name in COMPUTED else t(8, 6)}
    model = Model({"p": (5,) if name in COMPUTED else (60,)}, load)
    destinations = [p.destination() for p in places_of(model)]
    assert look(model.load_weights, manifest_of(tensors), destinations) is None
    assert not isinstance(record(model.load_weights, manifest_of(tensors), destinations), Seen)


def refusal(work: Callable[[Model, torch.Tensor], None]) -> None:
    def load(model: Model, weights: Weights) -> None:
        for _, w in weights:
            work(model, w)

    model = Model({"p": (5,)}, load)
    before = model.p.clone()
    with pytest.raises(UnsupportedLoaderError, match=r"'w'|used w"):
        record(model.load_weights, manifest_of({"w": t(5)}), [p.destination() for p in places_of(model)])
    assert torch.equal(model.p, before)


def test_a_copy_by_another_thread_is_not_missed() -> None:
    def elsewhere(model: Model, w: torch.Tensor) -> None:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                model.p.data.copy_(w)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if w.is_meta:  # a loader that does not look at what became of its thread
            return
        raise errors[0]

    refusal(elsewhere)


def test_a_loader_that_hides_the_end_of_the_pass_is_followed() -> None:
    def hides(model: Model, w: torch.Tensor) -> None:
        try:
            (w + 1).tolist()
        except UnsupportedLoaderError:
            raise
        except Exception:
            model.p.data.copy_(w)

    refusal(hides)


def test_a_source_that_nobody_writes_does_not_end_the_quick_pass() -> None:
    def load(model: Model, weights: Weights) -> None:
        for name, w in weights:
            if name == "mine":
                model.p.data.copy_(w)

    model = Model({"p": (5,)}, load)
    found = record(
        model.load_weights, manifest_of({"theirs": t(5), "mine": t(5)}), [p.destination() for p in places_of(model)]
    )
    assert isinstance(found, Seen)
    assert found.n_copies == 1


def test_a_torch_without_the_key_is_said_once_and_the_recorder_sees_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_key(name: str) -> None:
        raise RuntimeError(f"unknown dispatch key {name}")

    model = Model({"p": (5,)}, lambda model, weights: [model.p.data.copy_(w) for _, w in weights])
    destinations = [p.destination() for p in places_of(model)]
    manifest = manifest_of({"w": t(5)})
    quick = record(model.load_weights, manifest, destinations)
    assert isinstance(quick, Seen)
    monkeypatch.setattr(quickpass, "_set_up", functools.cache(quickpass._set_up.__wrapped__))
    monkeypatch.setattr(torch._C, "_dispatch_key_parse", no_key)
    for _ in range(2):
        slow = record(model.load_weights, manifest, destinations)
        assert isinstance(slow, Recording)
        assert [write.destination for write in slow.writes] == ["p"]
    said = [r.getMessage() for r in caplog.records if r.name == quickpass.__name__ and r.levelname == "WARNING"]
    assert len(said) == 1
    assert "unknown dispatch key DeferredInit" in said[0]


def test_why_a_loader_is_followed_slowly_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Model({"p": (5,)}, lambda model, weights: [model.p.data.copy_(w * 2) for _, w in weights])
    with caplog.at_level("INFO", logger=quickpass.__name__):
        record(model.load_weights, manifest_of({"w": t(5)}), [p.destination() for p in places_of(model)])
    assert [r.getMessage() for r in caplog.records if "operation by operation" in r.getMessage()] == [
        "capture follows this loader operation by operation, since the quick pass met aten.mul.Tensor"
    ]


def test_threads_that_capture_first_at_the_same_moment_all_have_it() -> None:
    code = """
import sys, threading
from reshard.refit import quickpass
sys.setswitchinterval(1e-6)
start, found = threading.Barrier(8), []
def look():
    start.wait()
    found.append(quickpass._guard())
threads = [threading.Thread(target=look) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert None not in found and len(set(map(id, found))) == 1, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
