"""Publish the live weights themselves, without a copy: nobody may write them while somebody reads.

1. `InPlacePublisher` registers the allocations that the tensors live in, once; a shard is a contiguous tensor
   inside one of them. They lie in host memory or on one GPU.
2. `publish` makes sure that they are still in memory, waits for what the device does to them, digests the live bytes
   where they are, and only then offers them as a version.
3. `fence` ends admission, waits for the leases, and only then lets the trainer write again. `retract` ends
   admission alone.

What it can see of a change under a lease: the header's seqlock (the trainer that goes through `fence`), torch's
version counters (torch's own in-place operations; a fence that finds them moved says so), and the readers' digests.
Nothing sees a change before it happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from reshard.planner import Holder, Shard, ShardPart
from reshard.refit.aliases import alias_roots
from reshard.refit.cells import CellGrid
from reshard.refit.deadline import Deadline, check_timeout
from reshard.refit.devices import HOST, CellRows, Device
from reshard.refit.digests import root_of
from reshard.refit.errors import PublishError
from reshard.refit.header import HEADER_BYTES
from reshard.refit.homes import bytes_at, common_device, homes_of
from reshard.refit.layout import replica_groups
from reshard.refit.offering import Offering
from reshard.refit.preface import Preface, digest_region_bytes
from reshard.refit.published import Published
from reshard.refit.residency import Span, require_mapped
from reshard.refit.tensors import LocalTensor, is_torch, tensors_of
from reshard.rendezvous.types import VersionKey
from reshard.transports.regions import Region

if TYPE_CHECKING:
    from reshard.rendezvous import Rendezvous
    from reshard.transports import Transport

__all__ = ["InPlacePublisher"]

_PAGE = 4096
_WAKE = "wake the engine up (vLLM: wake_up) and make a new publisher of its tensors, or publish by copy"


class InPlacePublisher:
    """Publishes tensors where they are.

    Parameters
    ----------
    transport, rendezvous, model, slot, slots, host, ttl_s
        As in `reshard.refit.publisher.Publisher`.
    tensors
        What this rank holds: contiguous, all in host memory or all on one GPU, and where they are until `close`. They
        are published in their own dtypes.
    digests
        Whether cell digests are published.
    aliases
        As in `reshard.refit.publisher.Publisher`.
    device
        Where they are, and the stream that digests them; read off the tensors if None.

    Raises
    ------
    PublishError
        A tensor that cannot be published where it is, or a transport that does not reach its device; naming it.
    UnmappedMemoryError
        A tensor that is not in memory.
    """

    def __init__(
        self,
        transport: Transport,
        rendezvous: Rendezvous,
        *,
        model: str,
        slot: str,
        slots: Sequence[str],
        tensors: Sequence[LocalTensor],
        digests: bool = True,
        aliases: Mapping[str, str] | None = None,
        layout: str = "default",
        claim: str = "",
        host: str = "",
        ttl_s: float = 10.0,
        device: Device | None = None,
    ) -> None:
        self._offering = Offering(transport, rendezvous, model=model, slot=slot, slots=slots, host=host, ttl_s=ttl_s)
        self.model, self.slot = model, slot
        self._rendezvous = rendezvous
        self._tensors = tuple(tensors_of(tensors, f"slot {slot!r}"))
        self._digests = digests
        self._aliases = dict(aliases or {})
        if self._aliases and not digests:
            raise PublishError("aliases are compared by digest: they cannot be declared with digests=False")
        where = common_device(self._tensors)
        self._device = device if device is not None else _device_at(where)
        if self._device.memory not in transport.capabilities.memory_kinds:
            raise PublishError(
                f"slot {slot!r}: transport {transport.name!r} does not reach memory on {where} (it reaches "
                f"{', '.join(transport.capabilities.memory_kinds)}); publish by copy"
            )
        self._uid = ""
        self._counters: tuple[int, ...] = ()
        homes = homes_of(self._tensors, f"slot {slot!r}")
        number: dict[int, int] = {}
        spans: list[Span] = []
        regions: list[Region] = []
        shards: list[Shard] = []
        kind, ordinal = self._device.memory, self._device.number
        for t, home in zip(self._tensors, homes, strict=True):
            if home.base not in number:
                number[home.base] = len(spans)
                spans.append(Span(t.name, home.base, home.nbytes, where))
                if home.nbytes:
                    regions.append(Region(home.base, home.nbytes, kind, ordinal, home.owner))
            region, at = number[home.base], home.offset_bytes
            shards.append(Shard(t.name, t.dtype, t.shape, t.start, t.stop, region, at, t.replica_group, t.axes))
        sizes = [span.nbytes for span in spans]
        holder = Holder(slot, self._offering.host, kind, ordinal)
        self._grid = CellGrid.of(ShardPart.from_shards(holder, shards, sizes, layout, claim))
        digest_bytes = digest_region_bytes(len(self._grid))
        self._spans = spans
        self._backing = require_mapped(spans, f"slot {slot!r}", way_out=_WAKE)
        self._allocation = transport.allocate(_PAGE + digest_bytes, memory=kind, device=ordinal)
        try:
            self._registration = transport.register([*regions, self._allocation.region])
        except BaseException:
            self._allocation.close()
            raise
        own = self._device.bytes_of(self._allocation)
        self._preface = Preface(self._device, own[:HEADER_BYTES], own[_PAGE : _PAGE + digest_bytes])
        self._seqlock = self._preface.seqlock
        mine = self._allocation.region.address
        self._header_region, self._digest_region = len(sizes), len(sizes) + 1
        self._bases = np.array([*number, mine, mine + _PAGE], np.uint64)
        self._sizes = np.array([*sizes, HEADER_BYTES, digest_bytes], np.int64)
        self._part = ShardPart.from_shards(holder, shards, self._sizes.tolist(), layout, claim)
        self._groups = replica_groups(self._part, self._grid)
        self._rows = [self._cells_of(row, tensor) for row, tensor in enumerate(self._tensors)]
        self._closed = False

    def publish(self, *, epoch: int, step: int, layout_epoch: int = 0, timeout_s: float) -> Published:
        """Offer the live bytes as (epoch, step); nobody may write them until `fence` returns.

        Raises
        ------
        PublishError
            A version is being offered already: call `fence` first.
        UnmappedMemoryError
            The engine sleeps, or has slept and lies in other memory now; nothing was read or offered.
        RendezvousError
            As `Publisher.publish`. Where the answer was lost the version may be out: nobody may write before `fence`
            has returned, as if it had been published.
        """
        self._offering.require_open()
        deadline = Deadline(timeout_s, f"publishing {self.model!r} ({epoch}, {step}) in place from slot {self.slot!r}")
        version = VersionKey(self.model, epoch, step)
        if self._uid and self._offering.again(version, deadline, self._hold):
            return self._published(version)
        if self._uid:
            raise PublishError(f"slot {self.slot!r} offers version {self._uid} in place; fence it before the next one")
        require_mapped(self._spans, f"slot {self.slot!r}", way_out=_WAKE, registered=self._backing)
        self._counters = self._versions()  # first, so that a write while they are digested is seen by the fence
        self._device.quiesce()  # what other streams are still writing belongs to the version
        root, roots = b"", {}
        if self._digests:
            out = self._preface.put_digests(self._device.digest_cells(self._rows))
            root = root_of(out)
            roots = {str(g): root_of(out[cells], key) for g, (cells, key) in self._groups.items()}
            roots |= alias_roots(self._part, self._grid, out, self._aliases, slot=self.slot)
        self._seqlock.commit(epoch, step)
        self._offering.offer(
            version,
            deadline,
            part=self._part,
            region_bases=self._bases,
            region_bytes=self._sizes,
            header_region=self._header_region,
            digest_region=self._digest_region,
            digest_root=root,
            roots=roots,
            memory=self._device.memory,
            device=self._device.number,
            empty=not any(t.n_elems for t in self._tensors),
            layout_epoch=layout_epoch,
            hold=self._hold,
        )
        return self._published(version)

    def _hold(self, uid: str) -> None:
        """Readers may come for this version from now on; for none where ``uid`` is empty."""
        self._uid = uid

    def _published(self, version: VersionKey) -> Published:
        return Published(version, self._uid, False, int(self._grid.nbytes.sum()), {})

    def retract(self, *, timeout_s: float) -> None:
        """Admit no new readers; those that have a lease go on, so that nobody may write before `fence` has returned.

        Does nothing where no version is offered, or this one is retracted already.
        """
        self._offering.require_open()
        if self._uid:
            self._rendezvous.close_admission(self._uid, timeout_s=check_timeout(timeout_s))

    def fence(self, *, timeout_s: float) -> None:
        """Wait until nobody reads; on return the trainer may write.

        Raises
        ------
        FenceTimeoutError
            A lease outlived the deadline: the weights must not be written yet. Admission stays closed.
        PublishError
            Torch's version counters moved while the version was offered: readers may have seen the change.
        """
        self._offering.require_open()
        deadline = Deadline(timeout_s, f"fence of slot {self.slot!r}")
        if not self._uid:
            self._seqlock.begin()
            return
        self._offering.end(self._uid, deadline)
        self._uid = ""
        changed = [t.name for t, a, b in zip(self._tensors, self._counters, self._versions(), strict=True) if a != b]
        self._seqlock.begin()
        if changed:
            raise PublishError(
                f"slot {self.slot!r}: {changed[0]!r} was written while it was offered ({len(changed)} such tensors); "
                "readers that verify have refused it"
            )

    def close(self) -> None:
        """Leave the rendezvous and withdraw the registration; the tensors stay the trainer's. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._offering.close()
        self._seqlock.begin()
        self._registration.close()
        self._preface.close()
        self._rows = []
        self._allocation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _cells_of(self, row: int, tensor: LocalTensor) -> CellRows:
        """The cells of one tensor, where it lies."""
        cells = slice(int(self._grid.first[row]), int(self._grid.first[row + 1]))
        within = self._grid.offset_bytes[cells] - self._part.offset_bytes[row]
        return CellRows(bytes_at(tensor), within, self._grid.nbytes[cells], self._grid.tags[cells])

    def _versions(self) -> tuple[int, ...]:
        """Torch's counters of in-place writes; 0 for NumPy arrays."""
        return tuple(int(t.data._version) if is_torch(t.data) else 0 for t in self._tensors)  # type: ignore[union-attr]


def _device_at(where: str) -> Device:
    """The host, or a GPU by its name."""
    if where == "cpu":
        return HOST
    from reshard.refit.torch_device import TorchDevice

    return TorchDevice(where)
