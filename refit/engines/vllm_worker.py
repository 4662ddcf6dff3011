"""vLLM's plug-in: the weight transfer back end named ``reshard``, on the inference side.

1. `register` is the ``vllm.general_plugins`` entry point: it tells vLLM's factories where to find the classes, and has
   the executor read every worker's reply (`reshard.refit.engines.vllm_replies`).
2. The class that vLLM looks up, ``ReshardWeightTransferEngine``, is made on first use, since it derives from vLLM's
   (``worker_engine_type``).
3. Its ``init_transfer_engine`` joins the rendezvous, ``receive_weights`` is a whole refit (read, verify, agree,
   install), and ``start_weight_update`` and ``finish_weight_update`` do nothing: a failed refit leaves no update open.
4. While the rank may not serve (quarantined, in doubt) its model raises instead of computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from reshard.planner.errors import require
from reshard.refit.engines.vllm_replies import read_all_replies
from reshard.refit.errors import RefitError
from reshard.refit.verify import check_mode

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from reshard.refit.receiver import Receiver
    from reshard.rendezvous import Rendezvous
    from reshard.transports import Transport

    ReshardWeightTransferEngine: type[WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]]

__all__ = ["ReshardInitInfo", "ReshardUpdateInfo", "group_of", "register", "worker_engine_type"]


@dataclass(frozen=True, slots=True)
class ReshardInitInfo:
    """What ``init_weight_transfer_engine`` is given, as a dict with these keys.

    Attributes
    ----------
    rendezvous
        ``host:port`` of the rendezvous service.
    model
        The model's name there; the trainer's.
    group
        The name of this engine's group; engines that take versions each for itself have different ones.
    engines, engine
        How many engines of the same size are one group, and which of them this is, from 0. None is vLLM's index of the
        data-parallel replica.
    transport
        As in `reshard.transports.open_transport`.
    token
        Bearer token of the service; empty for none.
    tls
        Paths for `reshard.rendezvous.TLSFiles` (``ca``, ``cert``, ``key``); None connects without TLS.
    verify, require_verified, allow_unconsumed, allow_unattributed
        As in `reshard.refit.receiver.Receiver` and `reshard.refit.engines.vllm.VllmEngine`.
    require_full_coverage, coverage_floor
        The coverage gate, which is on unless it is turned off here.
    """

    rendezvous: str
    model: str
    group: str = "vllm"
    engines: int = 1
    engine: int | None = None
    transport: str = "auto"
    token: str = field(default="", repr=False)  # what is printed ends in logs
    tls: dict[str, str] | None = None
    verify: str = "full"
    require_verified: bool = False
    require_full_coverage: bool = True
    coverage_floor: float | None = None
    allow_unconsumed: Sequence[str] = ()
    allow_unattributed: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_mode(self.verify)
        for name in ("rendezvous", "model", "group"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        if self.engines < 1:
            raise ValueError(f"engines={self.engines}: expected 1 or more")
        if self.engine is not None and not 0 <= self.engine < self.engines:
            raise ValueError(f"engine={self.engine}: expected one in [0, {self.engines}), which is set by engines=")


@dataclass(frozen=True, slots=True)
class ReshardUpdateInfo:
    """What ``update_weights`` is given, as a dict with these keys.

    Attributes
    ----------
    step
        The step to take; None takes the latest version.
    epoch
        With ``step``: the epoch; None means the present one.
    timeout_s
        For the whole refit.
    """

    step: int | None = None
    epoch: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.epoch is not None and self.step is None:
            raise ValueError(f"epoch={self.epoch} without a step")


def register() -> None:
    """Make the back end ``reshard`` known to vLLM. May be called any number of times in a process."""
    require("vllm", extra="vllm")
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    places = (
        (WeightTransferEngineFactory, __name__, "ReshardWeightTransferEngine"),
        (WeightTransferTrainerFactory, "reshard.refit.engines.vllm_trainer", "ReshardTrainerWeightTransferEngine"),
    )
    for factory, module, name in places:
        if "reshard" not in factory._registry:
            factory.register_engine("reshard", module, name)
    read_all_replies()


def group_of(info: ReshardInitInfo, parallel: ParallelConfig) -> tuple[str, tuple[str, ...], str]:
    """The group of workers that change together, its members, and which of them this worker is.

    All workers of an engine are one group, data-parallel replicas of a mixture-of-experts model included: vLLM's own
    ``update_weights`` reaches them all. Replicas of a dense model are engines of their own to vLLM, and groups here
    unless ``engines`` makes one of them.

    Raises
    ------
    RefitError
        This engine's index is not in the group.
    """
    n_replicas, world = int(parallel.data_parallel_size), int(parallel.world_size)
    replica, rank = int(parallel.data_parallel_index), int(parallel.rank)
    name = info.group
    if info.engines == 1 and n_replicas == 1:
        group = f"{name}/dp{replica}" if replica else name
        members = tuple(f"{group}/rank{r}" for r in range(world))
        return group, members, members[rank]
    engine = 0 if info.engines == 1 else info.engine
    if engine is None:
        if n_replicas > 1:
            raise RefitError(f"engines={info.engines} without engine: all replicas of this model are one engine")
        engine = replica
    if engine >= info.engines:
        raise RefitError(f"data-parallel replica {engine} is not in [0, {info.engines}), which is set by engines=")
    members = tuple(
        f"{name}/engine{e}/dp{d}/rank{r}" for e in range(info.engines) for d in range(n_replicas) for r in range(world)
    )
    at = replica if n_replicas > 1 else 0
    return name, members, members[(engine * n_replicas + at) * world + rank]


@cache
def worker_engine_type() -> type[WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]]:
    """The class that vLLM makes in each worker (built here, since it derives from vLLM's)."""
    require("vllm", extra="vllm")
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from reshard.refit.engines.vllm import VllmEngine
    from reshard.refit.receiver import Receiver
    from reshard.rendezvous import Rendezvous
    from reshard.rendezvous.types import VersionKey
    from reshard.transports import open_transport

    base = WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]

    class ReshardWeightTransferEngine(base):  # type: ignore[misc, valid-type]
        """One worker's receiver."""

        init_info_cls = ReshardInitInfo
        update_info_cls = ReshardUpdateInfo
        supports_draft_weight_update = False

        def __init__(
            self,
            config: WeightTransferConfig,
            vllm_config: VllmConfig,
            device: torch.device,
            model: torch.nn.Module,
        ) -> None:
            super().__init__(config, vllm_config, device, model)
            if self.parallel_config.enable_eplb:
                raise RefitError(
                    "enable_eplb: vLLM moves experts between ranks while it serves, so what a refit planned would "
                    "land in other experts' places; turn it off, or use another weight transfer back end"
                )
            if vllm_config.lora_config is not None:
                raise RefitError(
                    "enable_lora: vLLM puts its adapters' layers around the model's, whose load_weights does not know "
                    "them; turn it off and publish the merged model (reshard.refit.adapters.peft_merged)"
                )
            self._rendezvous: Rendezvous | None = None
            self._transport: Transport | None = None
            self._receiver: Receiver | None = None
            self._closed: RemovableHandle | None = None

        def init_transfer_engine(self, init_info: ReshardInitInfo) -> None:
            """Connect to the rendezvous; a second call leaves the first one's connection."""
            self.shutdown()
            group, members, member = group_of(init_info, self.parallel_config)
            try:
                self._rendezvous = _connect(init_info)
                self._transport = open_transport(init_info.transport)
                engine = VllmEngine(
                    self.model,
                    model_config=self.model_config,
                    device=self.device,
                    allow_unattributed=init_info.allow_unattributed,
                )
                self._receiver = Receiver(
                    self._transport,
                    self._rendezvous,
                    engine,
                    model=init_info.model,
                    group=group,
                    members=members,
                    member=member,
                    require_full_coverage=init_info.require_full_coverage,
                    coverage_floor=init_info.coverage_floor,
                    allow_unconsumed=init_info.allow_unconsumed,
                    verify=check_mode(init_info.verify),
                    require_verified=init_info.require_verified,
                )
            except BaseException:
                self.shutdown()
                raise

        def start_weight_update(self) -> None:
            """Nothing: the weights that serve stay until the group has decided."""

        def receive_weights(self, update_info: ReshardUpdateInfo) -> None:
            """Take a version, together with all workers of the engine."""
            receiver = self._receiver
            if receiver is None:
                raise RefitError("update_weights before init_weight_transfer_engine")
            wanted: VersionKey | int | Literal["latest"] = "latest"
            if update_info.step is not None:
                wanted = update_info.step
                if update_info.epoch is not None:
                    wanted = VersionKey(receiver.model, update_info.epoch, update_info.step)
            try:
                receiver.refit(wanted, timeout_s=update_info.timeout_s)
            finally:
                self._open_or_close(receiver)

        def _open_or_close(self, receiver: Receiver) -> None:
            """Have the model raise instead of computing until this rank may serve again."""
            if receiver.state == "serving" and self._closed is not None:
                self._closed.remove()
                self._closed = None
            if receiver.state in ("quarantined", "in_doubt") and self._closed is None:

                def refuse(*_: object) -> None:
                    receiver.check_serving()

                self._closed = self.model.register_forward_pre_hook(refuse)

        def finish_weight_update(self) -> None:
            """Nothing: an update that this rank may not serve has raised in `receive_weights`.

            Raising here would leave vLLM's update open for good.
            """

        def shutdown(self) -> None:
            """Leave the rendezvous and free buffers and connections. Idempotent."""
            receiver, self._receiver = self._receiver, None
            transport, self._transport = self._transport, None
            rendezvous, self._rendezvous = self._rendezvous, None
            with ExitStack() as stack:  # the receiver first, and all of them even if one fails
                for opened in (rendezvous, transport, receiver):
                    if opened is not None:
                        stack.callback(opened.close)

    def _connect(info: ReshardInitInfo) -> Rendezvous:
        from reshard.rendezvous import TLSFiles

        tls = TLSFiles(**info.tls) if info.tls is not None else None
        return Rendezvous.connect(info.rendezvous, token=info.token or None, tls=tls)

    return ReshardWeightTransferEngine


def __getattr__(name: str) -> Any:
    """What vLLM's factory asks this module for."""
    if name == "ReshardWeightTransferEngine":
        return worker_engine_type()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
