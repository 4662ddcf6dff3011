"""Any torch model with ``load_weights`` and per-parameter ``weight_loader``s (vLLM's convention), as an engine.

1. `LoaderEngine.capture` runs the model's own ``load_weights`` on traced tensors and turns what it wrote into read
   requests.
2. `LoaderEngine.load_materialised` runs the same loader on the few sources whose values it computes with, into
   shadow buffers.
3. `LoaderEngine.install` swaps the parameters' storages for the shadow buffers (or copies, for memory that a CUDA
   graph or a device holds).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from reshard.planner import ReadRequest, ReadTable
from reshard.planner.errors import require
from reshard.refit.capture import record
from reshard.refit.devices import tensor_of
from reshard.refit.engine import Captured, EngineParameter
from reshard.refit.engines.places import Place, live_spans, places_of, signature_of, torch_dtype
from reshard.refit.errors import RefitError, UnsupportedLoaderError
from reshard.refit.names import names_of
from reshard.refit.recording import Recording, Write
from reshard.refit.redirect import run_redirected
from reshard.refit.residency import Span
from reshard.refit.seen import Seen
from reshard.refit.tensors import SourceTensor

if TYPE_CHECKING:
    import torch

    from reshard.refit.devices import Memory

Loader: TypeAlias = "Callable[[Iterable[tuple[str, torch.Tensor]]], object]"
"""Loads (name, tensor) pairs into a model."""

logger = logging.getLogger(__name__)

__all__ = ["Loader", "LoaderEngine", "captured_of"]


class LoaderEngine:
    """An engine over a torch model that loads itself.

    Parameters
    ----------
    model
        The live model.
    load_weights
        Called with an iterable of (name, tensor); the model's own ``load_weights`` by default.
    commit
        ``swap`` replaces the parameters' storages; ``copy`` keeps their addresses (CUDA graphs). Parameters on
        another device than the shadow buffers are always copied.
    allow_unattributed
        Patterns of source names that may end in memory that belongs to no parameter.
    on_pause, on_resume
        Stop and start serving, for ``stream`` mode.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        load_weights: Loader | None = None,
        commit: Literal["swap", "copy"] = "swap",
        allow_unattributed: Sequence[str] = (),
        on_pause: Callable[[], None] | None = None,
        on_resume: Callable[[], None] | None = None,
    ) -> None:
        if commit not in ("swap", "copy"):
            raise ValueError(f"commit={commit!r}: expected 'swap' or 'copy'")
        loader = load_weights if load_weights is not None else getattr(model, "load_weights", None)
        if not callable(loader):
            raise RefitError(
                f"{type(model).__name__} has no load_weights; give one, or use "
                "reshard.refit.engines.torch_module.TorchModuleEngine"
            )
        self.model = model
        self._loader: Loader = loader
        self._commit = commit
        self._allow = names_of(allow_unattributed, "allow_unattributed")
        self._on_pause, self._on_resume = on_pause, on_resume
        self._shown: dict[str, SourceTensor] = {}

    @property
    def swaps(self) -> bool:
        """Whether `install` keeps the buffers it is given."""
        return self._commit == "swap"

    def destination_device(self) -> str:
        """Where all parameters lie (``cuda:0``), for destinations beside them; ``cpu`` where they lie on several."""
        devices = {str(p.tensor.device) for p in places_of(self.model)}
        return devices.pop() if len(devices) == 1 else "cpu"

    def live_spans(self) -> list[Span]:
        """Where the live weights lie, for `reshard.refit.residency`."""
        return live_spans(self.model)

    # -- the Engine protocol

    def parameters(self) -> Sequence[EngineParameter]:
        """All parameters and buffers, persistent or not."""
        return [
            EngineParameter(p.name, p.label, tuple(int(n) for n in p.tensor.shape), p.nbytes)
            for p in places_of(self.model)
            if p.nbytes
        ]

    def signature(self) -> bytes:
        """Changes when a parameter was reallocated, reshaped or retyped."""
        return signature_of(places_of(self.model))

    def capture(self, manifest: Sequence[SourceTensor]) -> Captured:
        """Dry-run the loader.

        Raises
        ------
        UnsupportedLoaderError, UnattributedWriteError
            As `reshard.refit.capture.record`.
        """
        places = [p for p in places_of(self.model) if p.dense]
        before = signature_of(places_of(self.model))
        recording = record(
            self._loader,
            [(s.name, torch_dtype(s.dtype), s.shape) for s in manifest],
            [p.destination() for p in places],
            allow_unattributed=lambda name: any(fnmatchcase(name, pattern) for pattern in self._allow),
        )
        if signature_of(places_of(self.model)) != before:
            raise UnsupportedLoaderError(
                f"{type(self.model).__name__}.load_weights replaced parameters instead of writing into them; the "
                "model no longer "
                "matches what was captured"
            )
        self._shown = {s.name: s for s in manifest}
        return captured_of(recording, self._shown, {p.name: p for p in places})

    def read_live(self, name: str, into: Memory) -> None:
        """Copy one parameter's bytes, in physical order."""
        place = self._place(name)
        require("torch", extra="torch")
        import torch

        with torch.no_grad():
            place.view_of(into).copy_(place.tensor.detach())

    def load_materialised(self, sources: Mapping[str, Memory], buffers: Mapping[str, Memory]) -> None:
        """Run the loader on staged sources; ``sources`` maps ``name`` to row-major bytes."""
        require("torch", extra="torch")
        import torch

        places = [p for p in places_of(self.model) if p.dense]
        typed = {p.name: tensor_of(buffers[p.name]).view(p.tensor.dtype) for p in places if p.name in buffers}
        weights = [
            (name, tensor_of(raw).view(torch_dtype(s.dtype)).view(s.shape)) for name, raw, s in self._typed(sources)
        ]
        with torch.no_grad():
            run_redirected(self._loader, weights, [p.destination() for p in places], typed)

    def pause(self) -> None:
        """Call ``on_pause``."""
        if self._on_pause is not None:
            self._on_pause()

    def resume(self) -> None:
        """Call ``on_resume``."""
        if self._on_resume is not None:
            self._on_resume()

    def write_live(self, buffers: Mapping[str, Memory]) -> None:
        """Copy whole parameters into the live ones, whose addresses stay."""
        self._put(buffers, swap=False)

    def install(self, buffers: Mapping[str, Memory]) -> None:
        """Make ``buffers`` the parameters' memory, or copy them into it."""
        self._put(buffers, swap=self._commit == "swap")

    def _put(self, buffers: Mapping[str, Memory], *, swap: bool) -> None:
        require("torch", extra="torch")
        import torch

        devices: set[torch.device] = set()
        with torch.no_grad():
            for place in places_of(self.model):
                raw = buffers.get(place.name)
                if raw is None:
                    continue
                for tensor in place.tensors:
                    shown = place.view_of(raw, tensor)
                    if swap and tensor.device == shown.device:
                        tensor.data = shown
                    else:
                        tensor.data.copy_(shown, non_blocking=True)
                        devices.add(tensor.device)
                        break
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    # -- helpers

    def _place(self, name: str) -> Place:
        for place in places_of(self.model):
            if place.name == name:
                return place
        raise RefitError(f"the model has no parameter {name!r}; it had one when it was captured")

    def _typed(self, sources: Mapping[str, Memory]) -> list[tuple[str, Memory, SourceTensor]]:
        missing = [n for n in sources if n not in self._shown]
        if missing:
            raise RefitError(f"source {missing[0]!r} was not part of the last capture")
        return [(name, raw, self._shown[name]) for name, raw in sources.items()]


def captured_of(
    recording: Recording | Seen, sources: Mapping[str, SourceTensor], places: Mapping[str, Place]
) -> Captured:
    """Requests for what was written, by program order; ``sources`` in the loader's order."""
    if isinstance(recording, Seen):
        table = recording.read_table(list(sources.values()), lambda name: places[name].buffer())
        return Captured(table, recording.n_copies, frozenset(table.tensors.names_list))
    staged, by_loader = recording.materialised()
    numbers: dict[str, int] = {}
    for write in recording.writes:
        numbers.setdefault(write.destination, len(numbers))
    requests: list[ReadRequest] = []
    consumed: set[str] = set(staged)
    for write in recording.writes:
        consumed |= {r.source for r in write.reads}
        if write.destination not in by_loader:
            requests += _requests(write, sources, numbers[write.destination])
    table = ReadTable.build([places[name].buffer() for name in numbers], requests)
    loaded = tuple(name for name in numbers if name in by_loader)
    return Captured(
        table,
        recording.n_copies,
        frozenset(consumed),
        tuple(name for name in sources if name in staged),
        loaded,
        tuple(_written_bytes(places[name], recording.writes) for name in loaded),
    )


def _written_bytes(place: Place, writes: Sequence[Write]) -> int:
    """Bytes of a parameter that some write covers."""
    item = place.tensor.element_size()
    seen = np.zeros(place.nbytes // item, np.bool_)
    for write in writes:
        if write.destination == place.name:
            view = write.view
            np.lib.stride_tricks.as_strided(seen[view.offset :], view.sizes, view.strides)[...] = True
    return int(seen.sum()) * item


def _requests(write: Write, sources: Mapping[str, SourceTensor], buffer: int) -> list[ReadRequest]:
    if write.kind == "constant":
        view = write.view
        return [
            ReadRequest(
                "", (), "", (), (), view.sizes, buffer, view.offset, view.strides, write.order, "constant", write.value
            )
        ]
    return [
        ReadRequest(
            read.source,
            sources[read.source].shape,
            sources[read.source].dtype,
            read.start,
            read.step,
            read.count,
            buffer,
            read.dst_offset,
            read.dst_strides,
            write.order,
        )
        for read in write.reads
    ]
