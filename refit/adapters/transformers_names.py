"""Under which checkpoint names, and as which views, does a transformers model's memory go out?

transformers 5 modules stack and fuse what checkpoints keep apart (all experts' gate and up projections are one
parameter); `save_pretrained` takes them apart again. This adapter takes the same road without moving a byte:

1. The model's own conversion is run once on *meta* tensors of the global shapes, with copies suppressed. What comes
   out are views that carry offset, sizes and strides: the checkpoint tensors in terms of the module's.
2. Each view is written down as a `CheckpointView`: per dim a start and a step along one dim of the module's tensor,
   and the indices of the dims that it selects (the expert).
3. `CheckpointNames.apply` cuts a rank's boxes by these views. A tensor sharded over its experts maps local expert e
   to its global number, since boxes are global; sharding over any other dim is cut the same way. Nothing is copied.

A `convert` function of one's own takes the place of step 1 for families that transformers does not know, or to
publish under other names: it is called with each name and a meta tensor, and returns views of it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from reshard.planner.errors import TableError, require
from reshard.refit.tensors import LocalTensor, is_torch

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

    Convert = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]

__all__ = ["Axis", "CheckpointNames", "CheckpointView"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One dim of a checkpoint tensor: indices start, start + step, ... of a dim of the module's tensor.

    Parameters
    ----------
    source_dim
        Dim of the module's tensor; -1 for a dim of size 1 that the module's tensor lacks.
    start, step, count
        Index k in [0, count) is index start + step * k of that dim.
    """

    source_dim: int
    start: int
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """A checkpoint tensor as a view of one of the module's tensors.

    Parameters
    ----------
    name
        Its name in a checkpoint.
    axes
        One entry a dim.
    selected
        Index of each dim of the module's tensor that no axis runs along (-1 where one does).

    Attributes
    ----------
    shape
        The checkpoint tensor's shape.
    """

    name: str
    axes: tuple[Axis, ...]
    selected: tuple[int, ...]
    shape: tuple[int, ...] = field(init=False)
    _picks: tuple[tuple[int, int], ...] = field(init=False, repr=False)
    _order: tuple[int, ...] | None = field(init=False, repr=False)
    _new_dims: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kept = [dim for dim, index in enumerate(self.selected) if index < 0]
        order = tuple(kept.index(axis.source_dim) for axis in self.axes if axis.source_dim >= 0)
        picks = tuple((dim, index) for dim, index in enumerate(self.selected) if index >= 0)
        object.__setattr__(self, "shape", tuple(axis.count for axis in self.axes))
        object.__setattr__(self, "_picks", picks)
        object.__setattr__(self, "_order", order if order != tuple(range(len(order))) else None)
        object.__setattr__(self, "_new_dims", tuple(d for d, axis in enumerate(self.axes) if axis.source_dim < 0))

    def cut(
        self, held: LocalTensor, data: torch.Tensor, box_start: tuple[int, ...], box_stop: tuple[int, ...]
    ) -> LocalTensor | None:
        """Return the part of this checkpoint tensor that lies in a box of the module's tensor, or None if none does.

        Parameters
        ----------
        held, data, box_start, box_stop
            The rank's piece of the module's tensor, its data, and its box.
        """
        index: list[int | slice] = [0] * len(box_start)
        for dim, selected in self._picks:
            if not box_start[dim] <= selected < box_stop[dim]:
                return None
            index[dim] = selected - box_start[dim]
        start = [0] * len(self.axes)
        for at, axis in enumerate(self.axes):
            dim, step = axis.source_dim, axis.step
            if dim < 0:
                continue
            first = max(-((axis.start - box_start[dim]) // step), 0)
            last = min(-((axis.start - box_stop[dim]) // step), axis.count)
            if first >= last:
                return None
            low = axis.start + step * first - box_start[dim]
            index[dim] = slice(low, low + step * (last - first - 1) + 1, step)
            start[at] = first
        view = data[tuple(index)]
        if self._order is not None:
            view = view.permute(self._order)
        for dim in self._new_dims:
            view = view.unsqueeze(dim)
        return LocalTensor(self.name, held.dtype, self.shape, tuple(start), view, held.replica_group, held.axes)


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """The checkpoint tensors of a model, as views of its module's tensors.

    Parameters
    ----------
    views
        For each name of the module, its views.
    """

    views: Mapping[str, tuple[CheckpointView, ...]]

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> CheckpointNames:
        """Take the names from the model's own conversion, the one that its `save_pretrained` runs.

        Parameters
        ----------
        model
            A transformers 5 model; its parameters may be DTensors.

        Raises
        ------
        TableError
            If the conversion computes a checkpoint tensor instead of viewing it (its name is given).
        """
        require("transformers", extra="demo")
        from transformers.core_model_loading import revert_weight_conversion

        from reshard.refit.adapters.torch_dtensor import named_tensors

        names = cls._trace(named_tensors(model), lambda metas: revert_weight_conversion(model, metas))
        if lost := [name for name, views in names.views.items() if not views]:
            raise TableError(
                f"tensor {lost[0]!r} and {len(lost) - 1} more: the model's conversion makes nothing of them"
            )
        return names

    @classmethod
    def of_peft(cls, model: PeftModel, adapter: str = "default") -> CheckpointNames:
        """Take the names from PEFT: one adapter of the model (LoRA or another kind), and nothing of the model under it.

        Parameters
        ----------
        model
            A PEFT model; its parameters may be DTensors.
        adapter
            Name of the adapter. In checkpoint names it does not occur.
        """
        peft = require("peft", extra="peft")

        from reshard.refit.adapters.torch_dtensor import named_tensors

        return cls._trace(
            named_tensors(model),
            lambda metas: peft.get_peft_model_state_dict(
                model, state_dict=metas, adapter_name=adapter, save_embedding_layers=False
            ),
        )

    @classmethod
    def of_convert(cls, named: Mapping[str, torch.Tensor], convert: Convert) -> CheckpointNames:
        """Take the names from a function.

        Parameters
        ----------
        named
            The module's tensors, e.g. from `named_tensors`. Only their shapes and dtypes are used.
        convert
            Called with (name, meta tensor of the global shape); returns views of that tensor by checkpoint name.
            Copies that keep the elements in their places (`contiguous`, `clone`) are ignored.
        """

        def run(metas: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = {}
            for name, meta in metas.items():
                for checkpoint_name, view in convert(name, meta).items():
                    if checkpoint_name in found:
                        raise TableError(f"checkpoint tensor {checkpoint_name!r} is made twice, once of {name!r}")
                    found[checkpoint_name] = view
            return found

        return cls._trace(named, run)

    @classmethod
    def _trace(
        cls,
        named: Mapping[str, torch.Tensor],
        run: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    ) -> CheckpointNames:
        require("torch", extra="torch")
        import torch

        metas = {name: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta") for name, t in named.items()}
        owner = {meta.untyped_storage()._cdata: name for name, meta in metas.items()}
        with _without_copies():
            converted = dict(run(dict(metas)))
        views: dict[str, list[CheckpointView]] = {name: [] for name in metas}
        for checkpoint_name, view in converted.items():
            source = owner.get(view.untyped_storage()._cdata)
            if source is None:
                raise TableError(
                    f"checkpoint tensor {checkpoint_name!r}: its conversion computes new values; only views can be "
                    "published without a copy"
                )
            if view.dtype != metas[source].dtype:
                raise TableError(
                    f"checkpoint tensor {checkpoint_name!r}: got a view as {view.dtype} of {source!r}, "
                    f"expected {metas[source].dtype}"
                )
            views[source].append(_as_view(checkpoint_name, view, source, tuple(metas[source].shape)))
        return cls({name: tuple(of_name) for name, of_name in views.items()})

    def apply(self, held: Iterable[LocalTensor]) -> list[LocalTensor]:
        """Return what a rank holds, under checkpoint names, as views.

        Parameters
        ----------
        held
            The rank's boxes under the module's names (`reshard.refit.adapters.torch_dtensor.local_tensors`).

        Raises
        ------
        TableError
            If a name is not one of the module's.

        Notes
        -----
        A tensor of the module that has no views yields nothing: that is how an adapter goes out without its model.
        """
        found: list[LocalTensor] = []
        for tensor in held:
            if tensor.name not in self.views:
                raise TableError(f"tensor {tensor.name!r} is none of the {len(self.views)} tensors of the model")
            data = tensor.data
            if not is_torch(data):
                raise TableError(f"tensor {tensor.name!r}: got a {type(data).__name__}, expected a torch tensor")
            box = (cast("torch.Tensor", data), tensor.start, tensor.stop)
            found += [part for view in self.views[tensor.name] if (part := view.cut(tensor, *box)) is not None]
        return found


def _without_copies() -> torch.overrides.TorchFunctionMode:
    """Return a mode under which copies that keep each element in its place return their input."""
    require("torch", extra="torch")
    import torch
    from torch.overrides import TorchFunctionMode

    identities = {torch.Tensor.contiguous, torch.Tensor.clone, torch.clone, torch.Tensor.cpu, torch.Tensor.detach}

    class WithoutCopies(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., object],
            types: Iterable[type],
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            return args[0] if func in identities else func(*args, **(kwargs or {}))

    return WithoutCopies()


def _as_view(name: str, view: torch.Tensor, source: str, shape: tuple[int, ...]) -> CheckpointView:
    """Write down a view of a contiguous tensor of some shape, dim by dim."""
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    offset = int(view.storage_offset())
    first: list[int] = []
    for dim_stride in strides:
        index, offset = divmod(offset, dim_stride)
        first.append(index)
    selected = list(first)
    axes: list[Axis] = []
    for count, view_stride in zip(view.shape, view.stride(), strict=True):
        if count == 1:
            axes.append(Axis(-1, 0, 1, 1))
            continue
        dims = [
            dim
            for dim, dim_stride in enumerate(strides)
            if selected[dim] >= 0
            and view_stride > 0
            and view_stride % dim_stride == 0
            and first[dim] + (count - 1) * (view_stride // dim_stride) < shape[dim]
        ]
        if not dims:
            raise TableError(
                f"checkpoint tensor {name!r}: its dims do not run along dims of {source!r} {shape}: "
                f"sizes {tuple(view.shape)}, strides {tuple(view.stride())}, offset {view.storage_offset()}"
            )
        dim = dims[0]
        selected[dim] = -1
        axes.append(Axis(dim, first[dim], view_stride // strides[dim], count))
    return CheckpointView(name, tuple(axes), tuple(selected))
