"""vLLM's trainer-side half of the back end ``reshard``: ``send_weights`` publishes, then drives the engine's update.

1. Every trainer rank makes one with vLLM's ``WeightTransferTrainerFactory.trainer_init`` and a source.
2. A source with ``local_tensors()`` (`checkpoint_source`) is published sharded: each rank its own boxes, nothing is
   gathered. Any other ``WeightSource`` yields whole tensors, which rank 0 publishes while the others follow its
   collectives.
3. ``send_weights`` publishes the next step on all ranks; rank 0 then calls ``start_weight_update``,
   ``update_weights`` and ``finish_weight_update`` through the client it was given.
4. All ranks return when the engine has the step, since it reads all of them: a rank that went on to `shutdown` or to
   its end would take away what is being read. They tell each other over torch.distributed
   (`reshard.refit.engines.vllm_ranks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from reshard.planner.errors import require
from reshard.refit.engines.vllm_clients import ask_engine
from reshard.refit.engines.vllm_ranks import on_all_ranks
from reshard.refit.errors import PublishError
from reshard.refit.tensors import LocalTensor, full

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from vllm.distributed.weight_transfer.base import (
        ParamMeta,
        TrainerWeightTransferEngine,
        VLLMWeightSyncClient,
        WeightSource,
    )

    from reshard.refit.publisher import Publisher
    from reshard.rendezvous import Rendezvous
    from reshard.transports import Transport

    ReshardTrainerWeightTransferEngine: type[TrainerWeightTransferEngine[Any]]

__all__ = ["ReshardTrainerInitInfo", "ShardedSource", "checkpoint_source", "trainer_engine_type"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardTrainerInitInfo:
    """What a trainer rank says about itself and the run.

    Attributes
    ----------
    rank, world_size
        This trainer rank, and how many there are. Where they are those of torch.distributed's default group, each call
        ends on all ranks alike; elsewhere keep all ranks until rank 0's ``send_weights`` has returned.
    rendezvous, model, group, transport, token, tls
        As in `reshard.refit.engines.vllm_worker.ReshardInitInfo`, and handed on to the engine.
    run_id
        The same on all ranks and new for each run; steps count from 1 within it.
    wire_dtype, wire_dtype_exceptions
        As in `reshard.refit.publisher.Publisher`.
    engine_options
        Further keys of the engine's ``ReshardInitInfo``.
    timeout_s
        For each of publishing and refitting.
    """

    backend: ClassVar[str] = "reshard"

    rank: int
    world_size: int
    rendezvous: str
    model: str
    run_id: str
    group: str = "vllm"
    transport: str = "auto"
    token: str = field(default="", repr=False)  # what is printed ends in logs
    tls: dict[str, str] | None = None
    wire_dtype: str | None = None
    wire_dtype_exceptions: Sequence[str] = ()
    engine_options: dict[str, Any] | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: expected one in [0, {self.world_size})")

    def of_engine(self) -> dict[str, Any]:
        """The engine's init info."""
        shared = ("rendezvous", "model", "group", "transport", "token", "tls")
        return {name: getattr(self, name) for name in shared} | (self.engine_options or {})


@runtime_checkable
class ShardedSource(Protocol):
    """A source that says what this rank holds, so that nothing need be gathered."""

    def local_tensors(self) -> Sequence[LocalTensor]:
        """Return this rank's boxes under checkpoint names, as views."""
        ...


def checkpoint_source(
    module: PreTrainedModel, *, plain_ranks: Sequence[int] | None = None, copies_over: Sequence[str] = ()
) -> WeightSource:
    """A vLLM ``WeightSource`` over a transformers model, plain or under FSDP2, HSDP or TP, under checkpoint names.

    Parameters
    ----------
    plain_ranks, copies_over
        As in `reshard.refit.adapters.torch_dtensor.local_tensors`.
    """
    return _source_type()(module, plain_ranks, tuple(copies_over))


@cache
def _source_type() -> Any:
    require("vllm", extra="vllm")
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, materialize_full_tensor

    from reshard.refit.adapters.torch_dtensor import local_tensors, named_tensors
    from reshard.refit.adapters.transformers_names import CheckpointNames
    from reshard.refit.engines.places import torch_dtype

    class CheckpointSource(WeightSource):  # type: ignore[misc]
        """Yields whole tensors to whom asks for them, and boxes to this back end."""

        def __init__(
            self, module: PreTrainedModel, plain_ranks: Sequence[int] | None, copies_over: tuple[str, ...]
        ) -> None:
            self._module, self._plain_ranks, self._copies_over = module, plain_ranks, copies_over
            self._names = CheckpointNames.of_model(module)

        def local_tensors(self) -> Sequence[LocalTensor]:
            held = local_tensors(self._module, plain_ranks=self._plain_ranks, copies_over=self._copies_over)
            return self._names.apply(held)

        def metadata(self) -> list[ParamMeta]:
            whole: dict[str, torch.Tensor] = {
                name: torch_empty(tensor) for name, tensor in named_tensors(self._module).items()
            }
            shown = self._names.apply(local_tensors(whole))
            return [ParamMeta(t.name, torch_dtype(t.dtype), tuple(t.shape)) for t in shown]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named_tensors(self._module).items():
                for shown in self._names.apply(local_tensors({name: materialize_full_tensor(tensor)})):
                    yield shown.name, shown.data  # type: ignore[misc]

    def torch_empty(tensor: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")

    return CheckpointSource


@cache
def trainer_engine_type() -> type[TrainerWeightTransferEngine[Any]]:
    """The class that vLLM's trainer factory makes (built here, since it derives from vLLM's)."""
    require("vllm", extra="vllm")
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

    from reshard.refit.publisher import Publisher
    from reshard.rendezvous import Rendezvous, TLSFiles
    from reshard.transports import open_transport

    class ReshardTrainerWeightTransferEngine(TrainerWeightTransferEngine[Any]):  # type: ignore[misc]
        """One trainer rank's publisher."""

        init_info_cls = ReshardTrainerInitInfo

        def __init__(self, info: ReshardTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource) -> None:
            super().__init__(client=client, source=source, is_sender=info.rank == 0)
            self._info, self._step = info, 0
            self._sharded = source if isinstance(source, ShardedSource) else None
            n_slots = info.world_size if self._sharded is not None else 1
            self._rendezvous: Rendezvous | None = None
            self._transport: Transport | None = None
            self._publisher: Publisher | None = None
            self._epoch = -1
            if info.rank >= n_slots:
                return
            tls = TLSFiles(**info.tls) if info.tls is not None else None
            try:
                self._rendezvous = Rendezvous.connect(info.rendezvous, token=info.token or None, tls=tls)
                self._transport = open_transport(info.transport)
                self._publisher = Publisher(
                    self._transport,
                    self._rendezvous,
                    model=info.model,
                    slot=f"trainer-{info.rank}",
                    slots=[f"trainer-{r}" for r in range(n_slots)],
                    wire_dtype=info.wire_dtype,
                    wire_dtype_exceptions=info.wire_dtype_exceptions,
                )
                self._epoch = self._publisher.open_epoch(info.run_id)
            except BaseException:
                self.shutdown()
                raise

        @classmethod
        def trainer_init(
            cls,
            init_info: ReshardTrainerInitInfo,
            *,
            client: VLLMWeightSyncClient,
            source: WeightSource | None = None,
        ) -> Self:
            """Join the rendezvous; rank 0 makes the engine join too."""
            if source is None:
                raise PublishError("the back end 'reshard' publishes a source; none was given")
            made: list[Self] = []
            call = "init_weight_transfer_engine"

            def join() -> None:
                made.append(cls(init_info, client=client, source=source))
                if made[0].is_sender:
                    ask_engine(call, lambda: client.init_weight_transfer_engine(init_info.of_engine()))

            try:
                on_all_ranks(init_info.rank, init_info.world_size, call, join)
            except BaseException:
                for joined in made:
                    joined.shutdown()
                raise
            return made[0]

        def send_weights(self) -> None:
            """Publish the next step, and have the engine take it; its weight version becomes ``epoch:step``.

            Raises
            ------
            PublishError
                On ranks where nothing failed: it did on others. The engine has the weights that it had.
            """
            info = self._info
            self._step += 1
            tensors = self._tensors()  # its collectives are the trainer's own
            on_all_ranks(info.rank, info.world_size, f"publishing step {self._step}", lambda: self._publish(tensors))
            on_all_ranks(info.rank, info.world_size, f"the engine's update to step {self._step}", self._update)

        def _publish(self, tensors: Sequence[LocalTensor]) -> None:
            if self._publisher is None:
                return
            self._publisher.publish(
                epoch=self._epoch,
                step=self._step,
                tensors=tensors,
                empty=not tensors,
                timeout_s=self._info.timeout_s,
            )

        def _update(self) -> None:
            if not self.is_sender:
                return
            version = {"epoch": self._epoch, "step": self._step, "timeout_s": self._info.timeout_s}
            ask_engine("start_weight_update", self.client.start_weight_update)
            ask_engine("update_weights", lambda: self.client.update_weights(version))
            weight_version = f"{self._epoch}:{self._step}"
            ask_engine("finish_weight_update", lambda: self.client.finish_weight_update(weight_version))

        def _tensors(self) -> Sequence[LocalTensor]:
            if self._sharded is not None:
                return self._sharded.local_tensors()
            # Every rank iterates: materialising a tensor may be a collective.
            whole = ((name, t) for name, t in self.source or () if self._publisher is not None)
            return [full(name, str(t.dtype).removeprefix("torch."), t.detach()) for name, t in whole]

        def shutdown(self) -> None:
            """Leave the rendezvous and free the buffers; the engine keeps its weights. Idempotent."""
            publisher, self._publisher = self._publisher, None
            transport, self._transport = self._transport, None
            rendezvous, self._rendezvous = self._rendezvous, None
            with ExitStack() as stack:  # the publisher first, and all of them even if one fails
                for opened in (rendezvous, transport, publisher):
                    if opened is not None:
                        stack.callback(opened.close)

    return ReshardTrainerWeightTransferEngine


def __getattr__(name: str) -> Any:
    """What vLLM's factory asks this module for."""
    if name == "ReshardTrainerWeightTransferEngine":
        return trainer_engine_type()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
