"""A first look at a loader that costs little: if all it does is take views and copy them, this sees all of it.

The recorder (`reshard.refit.recorder`) stops at every torch operation in Python, views included, which are most of
them. Here views never leave torch:

1. Sources are plain meta tensors, each with a storage of its own, so torch itself moves offset, sizes and strides.
2. In this thread every operation but views goes through `_KEY`, a dispatch key that torch leaves to tools outside of
   it (torchdistx recorded deferred initialisation with it). A copy of a source into a destination and a fill of a
   destination are written down and not carried out; what involves neither is carried out.
3. Anything else (a computation, a copy of a copy, a look at a value, an exception) ends the quick pass: `look` answers
   None and the recorder follows the loader instead, and says what there is to say.
4. So does a source that was never written, if the recorder sees anything done with it: another thread's copies would
   not have come through the key.

Writes of one geometry, such as those of the experts of one layer, are resolved once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from reshard.planner.errors import require
from reshard.refit.recording import Destination, element_bytes, place_of, storage_key
from reshard.refit.seen import Geometry, Seen
from reshard.refit.trace import Strided

if TYPE_CHECKING:
    import torch

    Operation = torch._ops.OpOverload

logger = logging.getLogger(__name__)

__all__ = ["look"]

_KEY = "DeferredInit"
_VIEWS = (
    "alias", "as_strided", "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten.using_ints",
    "movedim.int", "movedim.intlist", "narrow", "numpy_T", "permute", "reshape", "select.int", "slice.Tensor",
    "split.Tensor", "split.sizes", "split_with_sizes", "squeeze", "squeeze.dim", "squeeze.dims", "t", "to.device",
    "to.dtype", "to.dtype_layout", "to.other", "transpose.int", "unbind.int", "unflatten.int", "unfold", "unsqueeze",
    "view", "view_as",
)  # fmt: skip
"""Operations of ``aten`` that give a view of their first argument, or are made of such and of ones not listed."""


class _NotQuickError(Exception):
    """The loader does something that only the recorder can follow."""


class _Watch:
    """What is written during one quick pass."""

    def __init__(self, sources: Sequence[torch.Tensor], destinations: Sequence[Destination]) -> None:
        import torch

        aten = torch.ops.aten
        self.sources = {storage_key(t): i for i, t in enumerate(sources)}
        self.dtypes = [t.dtype for t in sources]
        self.by_storage: dict[int, list[Destination]] = {}
        for d in destinations:
            self.by_storage.setdefault(d.storage_ptr, []).append(d)
        self.numbers = {id(d): i for i, d in enumerate(destinations)}
        self.shapes = [tuple(t.shape) for t in sources]
        self.seen = Seen(destinations)
        self.ended = ""
        self._copy, self._fill, self._zero = aten.copy_.default, aten.fill_.Scalar, aten.zero_.default
        self._below = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))
        self._without = torch._C._ExcludeDispatchKeyGuard

    def operation(self, op: Operation, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Called by torch for each operation that is not a view."""
        if op is self._copy:
            if self.copied(args[0], args[1]):  # type: ignore[arg-type]
                return args[0]
        elif op is self._fill or op is self._zero:
            hit = self.destination(args[0])  # type: ignore[arg-type]
            if hit is not None:
                target: torch.Tensor = args[0]  # type: ignore[assignment]
                value = args[1] if op is self._fill else 0
                destination, into = hit
                element = element_bytes(value, target.dtype)  # type: ignore[arg-type]
                self.seen.fill(destination, into, element)
                return target
        if self.involved((*args, *kwargs.values())):
            self.end(str(op))
        with self._without(self._below):
            return op(*args, **kwargs)

    def copied(self, target: torch.Tensor, value: torch.Tensor) -> bool:
        source = self.sources.get(storage_key(value))
        if source is None:
            return False
        hit = self.destination(target)
        if hit is None or value.dtype != self.dtypes[source]:
            return False
        destination, into = hit
        view = (int(value.storage_offset()), tuple(value.shape), value.stride())
        self.seen.write(destination, into, source, Geometry(self.shapes[source], *view, into.sizes, into.strides))
        return True

    def destination(self, tensor: torch.Tensor) -> tuple[int, Strided] | None:
        """The number of the destination that holds ``tensor``, and the view of it that ``tensor`` is."""
        known = self.by_storage.get(storage_key(tensor))
        hit = place_of(known, tensor) if known is not None else None
        return (self.numbers[id(hit[0])], hit[1]) if hit is not None and hit[0].dtype == tensor.dtype else None

    def involved(self, values: Iterable[object]) -> bool:
        """Whether a source or a destination is among the arguments (tensors, and lists of them)."""
        import torch

        for value in values:
            if isinstance(value, torch.Tensor):
                if value.layout != torch.strided or not value.numel():
                    continue
                key = storage_key(value)
                if key in self.sources or key in self.by_storage:
                    return True
            elif isinstance(value, list | tuple) and self.involved(value):
                return True
        return False

    def end(self, why: str) -> None:
        self.ended = why
        raise _NotQuickError(why)


_active = threading.local()
_once = threading.Lock()
"""torch takes one registration of a key: ranks that are threads of one process may capture at the same moment."""


def _guard() -> Callable[[], object] | None:
    """Makes a context in which operations go to this thread's `_Watch`. None if torch cannot be set up for that."""
    with _once:
        return _set_up()


@cache
def _set_up() -> Callable[[], object] | None:
    require("torch", extra="torch")
    import torch

    def operation(op: Operation, *args: object, **kwargs: object) -> object:
        watch: _Watch = _active.watch
        return watch.operation(op, args, kwargs)

    try:
        key = torch._C._dispatch_key_parse(_KEY)
        everything = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        everything.fallback(operation, _KEY)  # type: ignore[no-untyped-call]
        views = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name in _VIEWS:
            views.impl(name, torch.library.fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
        _kept.extend((everything, views))

        def guard() -> object:
            return torch._C._IncludeDispatchKeyGuard(key)

        source, target = torch.empty((2, 3), device="meta"), torch.empty((2, 3), device="meta")
        place = Destination("probe", storage_key(target), 0, 24, 4, target.dtype)
        _active.watch = watch = _Watch([source], [place])
        with guard():  # type: ignore[attr-defined]
            target[1].narrow(0, 1, 2).copy_(source.t()[1:, 0])
        if (list(watch.seen.rows), list(watch.seen.geometries)) != (
            [0, 4, 0, 0],
            [Geometry((2, 3), 1, (2,), (1,), (2,), (1,))],
        ):
            raise RuntimeError(f"a copy was seen as {watch.seen}")
    except Exception as error:  # noqa: BLE001 - private parts of torch: another version may lack them
        logger.warning(  # once a process: every capture in it is slower
            "capture has no quick pass with torch %s and follows every loader operation by operation, which is five to "
            "six times slower and sees the same: %s: %s",
            torch.__version__,
            type(error).__name__,
            error,
        )
        return None
    return guard


_kept: list[object] = []
"""Registrations end with the objects that made them."""


def look(
    loader: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    manifest: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    destinations: Sequence[Destination],
) -> tuple[Seen, list[int]] | None:
    """Run ``loader`` once; None if it has to be looked at more closely.

    Returns
    -------
    seen, unwritten
        All writes, and the indices of the sources that were not written anywhere.
    """
    guard = _guard()
    if guard is None:
        return None
    import torch

    sources = [torch.empty(shape, dtype=dtype, device="meta") for _, dtype, shape in manifest]
    watch = _Watch(sources, destinations)
    names = (name for name, _, _ in manifest)
    _active.watch = watch
    try:
        with guard():  # type: ignore[attr-defined]
            loader(zip(names, sources, strict=True))
    except Exception as error:  # noqa: BLE001 - the recorder meets it too, and names the source
        watch.ended = watch.ended or f"{type(error).__name__}: {error}"
    finally:
        del _active.watch
    if watch.ended:  # also where the loader caught it
        logger.info("capture follows this loader operation by operation, since the quick pass met %s", watch.ended)
        return None
    written = set(watch.seen.columns[2].tolist())
    return watch.seen, [i for i in range(len(sources)) if i not in written]
