"""The dispatch mode that follows traced tensors through a loader, operation by operation.

What it does with each operation is the list in `reshard.refit.capture`; what it writes down is that module's
`Recording`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING

from reshard.planner.errors import require
from reshard.refit.errors import UnsupportedLoaderError
from reshard.refit.operations import ESCAPES, VALUE_FREE, is_view, on_each, tensors_in, written_by
from reshard.refit.recording import PARAM, Destination, Recording, Write, element_bytes, place_of, storage_key
from reshard.refit.trace import Origin, Piece, Storage, Strided, meta_of, origin_of, resolve, traced, traced_type

if TYPE_CHECKING:
    import torch

__all__ = ["recorder_type"]


@cache
def recorder_type() -> Callable[[Recording, Sequence[Destination]], AbstractContextManager[object]]:
    """The dispatch mode (made on first use, since torch is optional)."""
    require("torch", extra="torch")
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    made = traced_type()
    copies = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}
    fills = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
    joins = {aten.cat.default, aten.stack.default}

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Follows traced tensors; carries out everything that does not involve them or a destination's memory."""

        def __init__(self, recording: Recording, destinations: Sequence[Destination]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.recording = recording
            self.by_storage: dict[int, list[Destination]] = {}
            for d in destinations:
                self.by_storage.setdefault(d.storage_ptr, []).append(d)
            self.scratch_taint: dict[int, frozenset[str]] = {}
            self.scratch_owner: list[
                torch.Tensor
            ] = []  # keeps tainted scratch alive, so that its address is not reused

        # -- what a tensor is

        def destination(self, tensor: torch.Tensor) -> tuple[Destination, Strided] | None:
            """The destination that holds ``tensor`` and the view of it that ``tensor`` is; None if it is elsewhere."""
            if isinstance(tensor, made):
                return None
            known = self.by_storage.get(storage_key(tensor))
            return place_of(known, tensor) if known is not None else None

        def origin(self, tensor: torch.Tensor) -> Origin | None:
            """Where the values of ``tensor`` come from; None for a plain tensor with real values."""
            if isinstance(tensor, made):
                return origin_of(tensor)
            hit = self.destination(tensor)
            if hit is not None:
                return Origin(None, frozenset((PARAM + hit[0].name,)))
            if self.scratch_taint and tensor.layout == torch.strided:
                taint = self.scratch_taint.get(storage_key(tensor))
                if taint:
                    return Origin(None, taint)
            return None

        # -- dispatch

        def __torch_dispatch__(
            self,
            func: torch._ops.OpOverload,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            kwargs = kwargs or {}
            tensors = tensors_in(args, kwargs)
            origins = {id(t): o for t in tensors if (o := self.origin(t)) is not None}
            if not origins:
                return func(*args, **kwargs)
            name = func._schema.name.rpartition("::")[2]
            targets = written_by(func, args, kwargs)
            if targets:
                return self.write(func, name, args, kwargs, targets, tensors, origins)
            if is_view(func):
                viewed = next((t for t in tensors if isinstance(t, made)), None)
                if viewed is None:
                    return func(*args, **kwargs)  # a view of live memory; harmless until it is read or written
                out = func(*self.meta_args(args), **self.meta_kwargs(kwargs))
                retyped = isinstance(out, torch.Tensor) and out.dtype != viewed.dtype
                # other bits for the same elements, or other elements: the loader itself must do it
                return self.wrap(out, Origin(None, origin_of(viewed).names) if retyped else origin_of(viewed))
            if name in VALUE_FREE:
                return func(*self.like_args(args), **kwargs)
            names = frozenset[str]().union(*(o.names for o in origins.values()))
            if name in ESCAPES:
                raise self.escape(name, names)
            if func is aten._unsafe_view.default and isinstance(args[0], made):
                shown = args[0]
                return self.wrap(aten.view.default(meta_of(shown), args[1]), origin_of(shown))
            same_dtype = kwargs.get("dtype") in (None, tensors[0].dtype)
            if func in copies and same_dtype and (source := origins[id(tensors[0])]).storage is not None:
                out = func(meta_of(tensors[0]), **self.on_meta(kwargs))
                return self.copied(out, [(meta_of(tensors[0]), (0,) * out.dim(), source.storage)])
            if func in joins and all((o := origins.get(id(t))) is not None and o.storage is not None for t in tensors):
                return self.joined(func, args, kwargs, tensors)
            return self.compute(func, args, kwargs, names)

        def compute(
            self,
            func: torch._ops.OpOverload,
            args: Sequence[object],
            kwargs: Mapping[str, object],
            names: frozenset[str],
        ) -> object:
            """Run for shapes only; the result depends on ``names``."""
            try:
                out = func(*self.meta_args(args), **self.on_meta(self.meta_kwargs(kwargs)))
            except (NotImplementedError, RuntimeError) as error:
                raise self.escape(str(func), names) from error
            return self.wrap(out, Origin(None, names))

        def escape(self, what: str, names: frozenset[str]) -> UnsupportedLoaderError:
            shown = sorted(n.removeprefix(PARAM) for n in names)
            return UnsupportedLoaderError(
                f"the loader needs the value of {', '.join(map(repr, shown[:3]))} ({what}) to decide what to do; "
                "a refit "
                "describes what a loader copies, and cannot follow one that branches on values",
                source=shown[0] if shown else "",
            )

        def write(
            self,
            func: torch._ops.OpOverload,
            name: str,
            args: tuple[object, ...],
            kwargs: Mapping[str, object],
            targets: Sequence[torch.Tensor],
            tensors: Sequence[torch.Tensor],
            origins: Mapping[int, Origin],
        ) -> object:
            """A write to a destination, to a traced tensor, or of traced values to scratch memory."""
            if name == "_foreach_copy_":
                for one, other in zip(args[0], args[1], strict=True):  # type: ignore[call-overload]
                    self.__torch_dispatch__(aten.copy_.default, (), (one, other))
                return None
            written_ids = {id(t) for t in targets}
            inputs = frozenset[str]().union(
                *(origins[id(t)].names for t in tensors if id(t) in origins and id(t) not in written_ids)
            )
            for target in targets:
                hit = self.destination(target)
                if hit is not None:
                    self.write_destination(func, args, kwargs, target, hit, inputs, origins)
                elif isinstance(target, made):
                    self.recording.mutated |= {n for n in origin_of(target).names if not n.startswith(PARAM)}
                    origin_of(target).taint |= inputs
                else:
                    pointer = storage_key(target)
                    before = self.scratch_taint.get(pointer, frozenset())
                    self.scratch_taint[pointer] = before | inputs
                    self.scratch_owner.append(target)
                    where = f"a {target.dtype} tensor of shape {tuple(target.shape)} ({func})"
                    for n in inputs:
                        self.recording.scratch.setdefault(n, where)
            return targets[0] if len(func._schema.returns) else None

        def write_destination(
            self,
            func: torch._ops.OpOverload,
            args: tuple[object, ...],
            kwargs: Mapping[str, object],
            target: torch.Tensor,
            hit: tuple[Destination, Strided],
            inputs: frozenset[str],
            origins: Mapping[int, Origin],
        ) -> None:
            destination, view = hit
            order, during = len(self.recording.writes), self.recording.during

            def note(kind: str, **what: object) -> None:
                write = Write(order, kind, destination.name, view, during=during, **what)  # type: ignore[arg-type]
                self.recording.writes.append(write)

            value = args[1] if len(args) > 1 else kwargs.get("value", kwargs.get("src"))
            source = origins.get(id(value)) if isinstance(value, torch.Tensor) else None
            if func is aten.copy_.default or (func is aten.fill_.Tensor and source is not None):
                self.recording.n_copies += 1
                if source is None and isinstance(value, torch.Tensor):
                    element = self.uniform(value, target) if not value.is_meta else None
                    if element is not None:
                        note("constant", value=element)
                        return
                    inputs |= frozenset((self.recording.current,)) - {""}
                elif (
                    isinstance(value, torch.Tensor)
                    and source is not None
                    and source.storage is not None
                    and not source.taint
                    and target.dtype == destination.dtype
                ):
                    src = Strided.of(meta_of(value)).expand(view.sizes)
                    reads = resolve(source.storage, src, view)
                    note("copy", reads=tuple(reads))
                    return
            elif func in fills and source is None:
                number = value if isinstance(value, int | float | torch.Tensor) else 0
                element = element_bytes(0 if func is aten.zero_.default else number, target.dtype)
                note("constant", value=element)
                return
            taint = inputs | (source.names if source is not None else frozenset())
            note("computed", taint=taint)

        # -- making tensors

        def wrap(self, out: object, origin: Origin) -> object:
            if isinstance(out, torch.Tensor):
                return traced(out, Origin(origin.storage, origin.taint))
            return pytree.tree_map(
                lambda t: traced(t, Origin(origin.storage, origin.taint)) if isinstance(t, torch.Tensor) else t, out
            )

        def copied(self, out: torch.Tensor, parts: Sequence[tuple[torch.Tensor, tuple[int, ...], Storage]]) -> object:
            """A fresh dense tensor made of ``parts``: (meta view, where it starts in ``out``, its storage)."""
            order = sorted(range(out.dim()), key=lambda d: (-int(out.stride()[d]), d))
            pieces = []
            for view, start, storage in parts:
                strided = Strided.of(view)
                pieces.append(
                    Piece(
                        tuple(start[d] for d in order),
                        tuple(strided.sizes[d] for d in order),
                        Strided(
                            strided.offset,
                            tuple(strided.sizes[d] for d in order),
                            tuple(strided.strides[d] for d in order),
                        ),
                        storage,
                    )
                )
            shape = tuple(out.shape[d] for d in order)
            return traced(out, Origin(Storage(shape, pieces=tuple(pieces))))

        def joined(
            self,
            func: torch._ops.OpOverload,
            args: Sequence[object],
            kwargs: Mapping[str, object],
            tensors: Sequence[torch.Tensor],
        ) -> object:
            """``cat`` and ``stack`` of traced tensors of one dtype."""
            out: torch.Tensor = func(*self.meta_args(args), **self.meta_kwargs(kwargs))
            raw = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            dim = int(raw) % out.dim()  # type: ignore[call-overload]
            if any(t.dtype != out.dtype for t in tensors):
                names = frozenset[str]().union(*(origin_of(t).names for t in tensors))
                return self.wrap(out, Origin(None, names))
            parts: list[tuple[torch.Tensor, tuple[int, ...], Storage]] = []
            at = 0
            for t in tensors:
                view = meta_of(t).unsqueeze(dim) if func is aten.stack.default else meta_of(t)
                if view.numel():
                    storage = origin_of(t).storage
                    if storage is None:
                        raise UnsupportedLoaderError(f"{func} of a computed tensor")
                    parts.append((view, tuple(at if d == dim else 0 for d in range(out.dim())), storage))
                    at += int(view.shape[dim])
            return self.copied(out, parts)

        def meta_args(self, args: Sequence[object]) -> tuple[object, ...]:
            return tuple(on_each(self.meta, value) for value in args)

        def meta_kwargs(self, kwargs: Mapping[str, object]) -> dict[str, object]:
            return {name: on_each(self.meta, value) for name, value in kwargs.items()}

        @staticmethod
        def meta(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            tensor: torch.Tensor = value
            if isinstance(tensor, made):
                return meta_of(tensor)
            if tensor.dim():
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            return tensor.to("meta")

        @staticmethod
        def like_args(args: Sequence[object]) -> tuple[object, ...]:
            """Traced tensors replaced by real ones of their shape, for operations that look at nothing else."""

            def one(value: object) -> object:
                if not isinstance(value, torch.Tensor) or not isinstance(value, made):
                    return value
                traced_one: torch.Tensor = value
                return torch.empty((), dtype=traced_one.dtype).expand(traced_one.shape)

            return tuple(on_each(one, value) for value in args)

        @staticmethod
        def on_meta(kwargs: Mapping[str, object]) -> dict[str, object]:
            meta = torch.device("meta")
            return {k: meta if k == "device" and v is not None else v for k, v in kwargs.items()}

        @staticmethod
        def uniform(value: torch.Tensor, target: torch.Tensor) -> bytes | None:
            """One element's bytes in the target's dtype, if all of ``value`` are alike."""
            raw = value.detach().to("cpu", target.dtype).contiguous().reshape(-1)
            if not raw.numel():
                return None
            rows = raw.view(torch.uint8).view(raw.numel(), -1)
            return bytes(rows[0].numpy().tobytes()) if bool((rows == rows[0]).all()) else None

    return Recorder
