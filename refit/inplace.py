"""Publish the live weights themselves, without a copy: nobody may write them while somebody reads.

1. `InPlacePublisher` registers the allocations that the tensors live in, once; a shard is a contiguous tensor
   inside one of them.
2. `publish` digests the live bytes and offers them as a version.
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
import numpy.typing as npt

from reshard.planner import Holder, Shard, ShardPart
from reshard.refit import settings
from reshard.refit.aliases import alias_roots
from reshard.refit.cells import CellGrid
from reshard.refit.deadline import Deadline
from reshard.refit.digests import digest_many, root_of
from reshard.refit.errors import PublishError
from reshard.refit.header import HEADER_BYTES, SeqLock
from reshard.refit.layout import replica_groups, synchronize
from reshard.refit.offering import Offering
from reshard.refit.publisher import Published
from reshard.refit.tensors import LocalTensor, is_torch
from reshard.rendezvous.types import VersionKey
from reshard.transports.regions import Region

if TYPE_CHECKING:
    from reshard.rendezvous import Rendezvous
    from reshard.transports import Transport

__all__ = ["InPlacePublisher"]

U8 = npt.NDArray[np.uint8]
_PAGE = 4096


class InPlacePublisher:
    """Publishes tensors where they are.

    Parameters
    ----------
    transport, rendezvous, model, slot, slots, host, ttl_s
        As in `reshard.refit.publisher.Publisher`.
    tensors
        What this rank holds; contiguous host memory that stays where it is until `close`. They are published in
        their own dtypes.
    digests
        Whether cell digests are published.
    aliases
        As in `reshard.refit.publisher.Publisher`.
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
    ) -> None:
        self._offering = Offering(transport, rendezvous, model=model, slot=slot, slots=slots, host=host, ttl_s=ttl_s)
        self.model, self.slot = model, slot
        self._rendezvous = rendezvous
        self._tensors = tuple(tensors)
        self._digests = digests
        self._aliases = dict(aliases or {})
        if self._aliases and not digests:
            raise PublishError("aliases are compared by digest: they cannot be declared with digests=False")
        self._uid = ""
        self._counters: tuple[int, ...] = ()
        bases: list[int] = []
        sizes: list[int] = []
        owners: list[object] = []
        shards: list[Shard] = []
        for tensor in self._tensors:
            base, size, at, owner = _home(tensor)
            if base not in bases:
                bases.append(base)
                sizes.append(size)
                owners.append(owner)
            region = bases.index(base)
            shards.append(
                Shard(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    tensor.start,
                    tensor.stop,
                    region,
                    at,
                    tensor.replica_group,
                    tensor.axes,
                )
            )
        holder = Holder(slot, self._offering.host)
        self._grid = CellGrid.of(ShardPart.from_shards(holder, shards, sizes, layout, claim))
        own = _PAGE + max(len(self._grid), 1) * 16
        self._allocation = transport.allocate(own)
        regions = [Region(b, s, "dram", 0, o) for b, s, o in zip(bases, sizes, owners, strict=True) if s]
        try:
            self._registration = transport.register([*regions, self._allocation.region])
        except BaseException:
            self._allocation.close()
            raise
        memory = self._allocation.array
        self._seqlock = SeqLock(memory[:HEADER_BYTES])
        self._digest_memory = memory[_PAGE:own].view("<u8").reshape(-1, 2)
        mine = self._allocation.region.address
        self._header_region, self._digest_region = len(sizes), len(sizes) + 1
        self._bases = np.array([*bases, mine, mine + _PAGE], np.uint64)
        self._sizes = np.array([*sizes, HEADER_BYTES, own - _PAGE], np.int64)
        self._part = ShardPart.from_shards(holder, shards, self._sizes.tolist(), layout, claim)
        self._groups = replica_groups(self._part, self._grid)
        self._views = [_bytes_at(t) for t in self._tensors]

    def publish(self, *, epoch: int, step: int, layout_epoch: int = 0, timeout_s: float) -> Published:
        """Offer the live bytes as (epoch, step); nobody may write them until `fence` returns.

        Raises
        ------
        PublishError
            A version is being offered already: call `fence` first.
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
        synchronize(self._tensors)
        root, roots = b"", {}
        if self._digests:
            out = self._digest_memory[: len(self._grid)]
            for row, view in enumerate(self._views):
                cells = slice(int(self._grid.first[row]), int(self._grid.first[row + 1]))
                within = self._grid.offset_bytes[cells] - self._part.offset_bytes[row]
                digest_many(view, within, self._grid.nbytes[cells], self._grid.tags[cells], out[cells])
            root = root_of(out)
            roots = {str(g): root_of(out[cells], key) for g, (cells, key) in self._groups.items()}
            roots |= alias_roots(self._part, self._grid, out, self._aliases, slot=self.slot)
        self._counters = self._versions()
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
            empty=not any(t.n_elems for t in self._tensors),
            layout_epoch=layout_epoch,
            hold=self._hold,
        )
        return self._published(version)

    def _hold(self, uid: str) -> None:
        """Readers may come for this version from now on; for none where ``uid`` is empty."""
        self._uid = uid

    def _published(self, version: VersionKey) -> Published:
        return Published(version, self._uid, False, int(sum(v.size for v in self._views)), {})

    def retract(self, *, timeout_s: float) -> None:
        """Admit no new readers; those that have a lease go on."""
        if self._uid:
            self._rendezvous.close_admission(self._uid, timeout_s=timeout_s)

    def fence(self, *, timeout_s: float) -> None:
        """Wait until nobody reads; on return the trainer may write.

        Raises
        ------
        FenceTimeoutError
            A lease outlived the deadline: the weights must not be written yet. Admission stays closed.
        PublishError
            Torch's version counters moved while the version was offered: readers may have seen the change.
        """
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
        self._offering.close()
        self._seqlock.begin()
        self._registration.close()
        self._digest_memory = np.zeros((0, 2), np.uint64)
        self._allocation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _versions(self) -> tuple[int, ...]:
        """Torch's counters of in-place writes; 0 for NumPy arrays."""
        return tuple(int(t.data._version) if is_torch(t.data) else 0 for t in self._tensors)  # type: ignore[union-attr]


def _bytes_at(tensor: LocalTensor) -> U8:
    """The bytes of a contiguous host tensor."""
    if is_torch(tensor.data):
        import torch

        flat: torch.Tensor = tensor.data.detach().reshape(-1)  # type: ignore[union-attr]
        return np.asarray(flat.view(torch.uint8).numpy()) if flat.numel() else np.zeros(0, np.uint8)
    return np.asarray(tensor.data).reshape(-1).view(np.uint8)


def _home(tensor: LocalTensor) -> tuple[int, int, int, object]:
    """Base address and size of the allocation that holds a tensor, where the tensor starts in it, and its owner.

    Raises
    ------
    PublishError
        Not contiguous, not in host memory, or in memory that cannot be registered.
    """
    data = tensor.data
    if is_torch(data):
        device, contiguous = data.device.type, data.is_contiguous()  # type: ignore[union-attr]
        if device != "cpu":
            if variable := settings.expandable_segments():
                raise PublishError(
                    f"tensor {tensor.name!r} is in an expandable CUDA segment, which cannot be registered; unset "
                    f"expandable_segments in {variable}, or publish by copy"
                )
            raise PublishError(f"tensor {tensor.name!r} is on {device}; publish device memory by copy")
        if not contiguous:
            raise PublishError(f"tensor {tensor.name!r} is not contiguous; publish it by copy")
        storage = data.untyped_storage()  # type: ignore[union-attr]
        return int(storage.data_ptr()), int(storage.nbytes()), int(data.data_ptr() - storage.data_ptr()), data  # type: ignore[union-attr]
    array = np.asarray(data)
    if not array.flags.c_contiguous:
        raise PublishError(f"tensor {tensor.name!r} is not C-contiguous; publish it by copy")
    owner = array
    while isinstance(owner.base, np.ndarray) and owner.base.flags.c_contiguous:
        owner = owner.base
    return int(owner.ctypes.data), int(owner.nbytes), int(array.ctypes.data - owner.ctypes.data), owner
