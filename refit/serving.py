"""Serve on: a receiver publishes the shadow buffers that it kept, so that a replica joins without the trainer.

1. The boxes are those that the plan's blocks put, uncast and contiguous, into the arena that the engine was
   installed from.
2. They are digested, and then held against the trainer's digests of that refit (`reshard.refit.rechecking`): what was
   changed since is not offered.
3. They are offered under a model name of their own, as the version that is served, one slot a member; equal boxes
   of several members are claimed equal by their layouts' common claim.
4. Before the arena is written again the offer is fenced, and one that is being made is waited for.

Refused where the bytes are no longer the published ones: the engine keeps only kernel layouts, or a tensor was
cast, computed or scattered on its way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from reshard.planner import Holder, Shard, ShardPart
from reshard.planner.errors import format_box
from reshard.refit.arena import Arena
from reshard.refit.cells import CellGrid
from reshard.refit.deadline import Deadline
from reshard.refit.devices import CellRows
from reshard.refit.digests import root_of
from reshard.refit.errors import PublishError, RefitTimeoutError, UnverifiedError, VerificationError
from reshard.refit.header import HEADER_BYTES
from reshard.refit.offering import Offering
from reshard.refit.preface import Preface, digest_region_bytes
from reshard.refit.published import Published
from reshard.refit.rechecking import TrustedDigests, recheck
from reshard.rendezvous.errors import RendezvousError
from reshard.rendezvous.types import VersionKey

if TYPE_CHECKING:
    from reshard.planner import Plan
    from reshard.refit.receiver import Receiver

logger = logging.getLogger(__name__)

__all__ = ["ServeOn", "shards_in_place"]

_RETRACT_S = 2.0
"""A service that does not answer must not cost a refit its time."""

Int64 = npt.NDArray[np.int64]


def shards_in_place(plan: Plan, offsets: dict[str, int]) -> tuple[list[Shard], list[str]]:
    """The plan's blocks as shards of the arena, and what cannot be one, with why.

    Parameters
    ----------
    offsets
        Where each buffer starts in the arena, bytes.
    """
    blocks, buffers = plan.blocks, plan.buffers
    shards: list[Shard] = []
    refused: list[str] = []
    for i in range(len(blocks)):
        part = plan.sources.parts[int(blocks.part[i])]
        tensor = int(part.tensor_id[int(blocks.row[i])])
        name, label = part.tensors.name(tensor), part.tensors.dtype_label(tensor)
        shape = part.tensors.shape_of(tensor)
        buffer = int(blocks.buffer[i])
        lead = len(blocks.start) - len(shape)
        start, step, count, stride = (
            tuple(int(c[i]) for c in columns[lead:])
            for columns in (blocks.start, blocks.step, blocks.count, blocks.dst_stride_bytes)
        )
        item = int(part.tensors.bits[tensor]) // 8
        where = f"{name} {format_box([(a, a + n * s) for a, n, s in zip(start, count, step, strict=True)])}"
        if buffers.name(buffer) not in offsets:
            refused.append(f"{where}: staged for the loader")
        elif buffers.dtype_label(buffer) != label or item == 0:
            refused.append(f"{where}: {label} kept as {buffers.dtype_label(buffer)}")
        elif not _contiguous(count, step, stride, item):
            refused.append(f"{where}: scattered in {buffers.name(buffer)}")
        else:
            stop = tuple(a + n for a, n in zip(start, count, strict=True))
            at = offsets[buffers.name(buffer)] + int(blocks.dst_offset_bytes[i])
            shards.append(Shard(name, label, shape, start, stop, 0, at, axes=part.tensors.axes.get(tensor)))
    return shards, refused


def _contiguous(count: Sequence[int], step: Sequence[int], stride: Sequence[int], item: int) -> bool:
    size = item
    for n, by, s in zip(reversed(count), reversed(step), reversed(stride), strict=True):
        if n > 1 and (by != 1 or s != size):
            return False
        size *= n
    return True


class ServeOn:
    """Offers what a receiver serves.

    Parameters
    ----------
    receiver
        In ``shadow`` mode, serving a version. It fences this offer by itself before it overwrites the memory.
    model
        What the offers are called; ``MODEL@GROUP`` by default.
    partial
        Offer what can be offered and leave the rest out, instead of refusing.
    require_verified
        Refuse to offer bytes that cannot be held against the trainer's digests any more.
    fence_timeout_s
        How long a refit of the receiver waits for this offer's readers.
    """

    def __init__(
        self,
        receiver: Receiver,
        *,
        model: str = "",
        partial: bool = False,
        require_verified: bool = False,
        fence_timeout_s: float = 60.0,
    ) -> None:
        if receiver.bench.on_overwrite is not None:
            raise PublishError(f"member {receiver.member!r} is served on already; close the other ServeOn first")
        self._receiver = receiver
        self.model = model or f"{receiver.model}@{receiver.group}"
        self._partial, self._require_verified = partial, require_verified
        self.rechecked_bytes = 0
        """Of the newest offer: bytes that were held against the trainer's digests."""
        self._fence_timeout_s = fence_timeout_s
        self._offering = Offering(
            receiver.transport,
            receiver.rendezvous,
            model=self.model,
            slot=receiver.member,
            slots=receiver.members,
            host=receiver.options.receiver_host,
        )
        self._uid = ""
        self._key: VersionKey | None = None
        self._n_bytes = 0
        self._arena: Arena | None = None
        self._meta: Arena | None = None
        self._lock = threading.RLock()
        """Held while an offer is made or ended: the receiver may refit in another thread meanwhile."""
        receiver.bench.on_overwrite = self._overwrite
        receiver.reader.arenas.on_drop = self._dropped

    def publish(self, *, timeout_s: float) -> Published:
        """Offer the version that is served now; where it is offered already, nothing is done again.

        Raises
        ------
        PublishError
            Nothing is served from shadow buffers, only kernel layouts remain, or (without ``partial``) a tensor is
            not as it was published; each with why. Or a refit in another thread has taken another version meanwhile.
        RefitTimeoutError
            A fence in another thread outlives the deadline.
        """
        deadline = Deadline(timeout_s, f"serving on from member {self._receiver.member!r}")
        with self._alone(deadline):
            return self._publish(deadline)

    def _publish(self, deadline: Deadline) -> Published:
        r = self._receiver
        self._offering.require_open()
        version, planned, arena, trusted = r.check_serving(), r.bench.planned, r.reader.arenas.served, r.bench.trusted
        if r.check_serving() != version:  # what was looked at between belongs to either
            raise PublishError(f"member {r.member!r}: a refit in another thread went on from {version}; offer again")
        key = VersionKey(self.model, version.epoch, version.step)
        if self._uid and key == self._key:
            self._offering.again(key, deadline, self._hold)
            return Published(key, self._uid, False, self._n_bytes, {})
        if not getattr(r.engine, "keeps_load_layout", True):
            raise PublishError(
                f"member {r.member!r}: {type(r.engine).__name__} turns weights into kernel layouts when it "
                "installs them; "
                "what it has left is not what was published"
            )
        if planned is None or arena is None:
            raise PublishError(
                f"member {r.member!r}: no shadow buffers hold what is served (install mode {r.install_mode!r}, or "
                "a refit "
                "has failed since)"
            )
        if r.bench.selection and not self._partial:
            raise PublishError(
                f"member {r.member!r}: the last refit took a selection ({', '.join(map(repr, r.bench.selection))}), so "
                "that the buffers hold only a part of the version; refit in full, or give partial=True"
            )
        shards, refused = shards_in_place(planned.plan, arena.offsets)
        if refused and not self._partial:
            raise PublishError(
                f"member {r.member!r}: {len(refused)} boxes are not as they were published: {'; '.join(refused[:5])}"
            )
        self.fence(timeout_s=deadline.remaining("fence"))
        device = r.reader.device
        holder = Holder(r.member, self._offering.host, device.memory, device.number)
        grid = CellGrid.of(ShardPart.from_shards(holder, shards, [arena.nbytes], r.member, r.group))
        digests = device.digest_cells([CellRows(arena.memory, grid.offset_bytes, grid.nbytes, grid.tags)])
        self._recheck(trusted, arena, grid, version, deadline)
        sizes = {"header": HEADER_BYTES, "digests": digest_region_bytes(len(grid))}
        region_bytes = [arena.nbytes, *sizes.values()]
        part = ShardPart.from_shards(holder, shards, region_bytes, r.member, r.group)
        meta = Arena(r.transport, sizes, device=device)
        preface = Preface(device, meta.buffers["header"], meta.buffers["digests"])
        preface.put_digests(digests)
        preface.seqlock.commit(version.epoch, version.step)
        self._arena, self._meta = arena, meta
        self._key, self._n_bytes = key, int(grid.nbytes.sum())
        try:
            self._offering.offer(
                key,
                deadline,
                part=part,
                region_bases=np.array([arena.base, *meta.bases.tolist()], np.uint64),
                region_bytes=np.array(region_bytes, np.int64),
                header_region=1,
                digest_region=2,
                digest_root=root_of(digests),
                memory=device.memory,
                device=device.number,
                empty=not shards,
                # Boxes follow the trainer's cuts and the replicas that were read: they may be others at each version.
                layout_epoch=version.step + 1,
                hold=self._hold,
            )
        except BaseException:
            if not self._uid:  # else it may be out: only a fence frees what readers may be reading
                self._arena = self._meta = None
                meta.close()
            raise
        if arena not in r.reader.arenas.shadows():
            self._dropped(arena)
            raise PublishError(f"member {r.member!r}: a refit in another thread has let go of what holds {version}")
        return Published(key, self._uid, False, self._n_bytes, {})

    def _recheck(
        self, trusted: TrustedDigests | None, arena: Arena, grid: CellGrid, version: VersionKey, deadline: Deadline
    ) -> None:
        """After the boxes were digested, so that no change falls between; see `reshard.refit.rechecking`."""
        r, n_bytes = self._receiver, int(grid.nbytes.sum())
        ends = (grid.offset_bytes + grid.nbytes).tolist()
        offered = list(zip(grid.offset_bytes.tolist(), ends, strict=True))
        try:
            same = recheck(trusted, arena, r.reader.device, offered, deadline) if trusted is not None else 0
        except VerificationError as error:
            raise VerificationError(
                f"member {r.member!r}: what it serves as {version} is no longer what it verified, and is not offered; "
                f"refit it: {error}",
                cells=error.cells,
            ) from error
        if self._require_verified and same < n_bytes:
            raise UnverifiedError(
                f"member {r.member!r}: {same} of {n_bytes} bytes could be held against the trainer's digests; the "
                "others were read in part, through staging or without verification: give the trainer this receiver's "
                "cut hints, or drop require_verified"
            )
        self.rechecked_bytes = same
        logger.info(
            "member %s serves %s on: %d of %d bytes were held against the trainer's digests",
            r.member,
            version,
            same,
            n_bytes,
        )

    def _hold(self, uid: str) -> None:
        """Readers may come for this version from now on; for none where ``uid`` is empty."""
        self._uid = uid

    def fence(self, *, timeout_s: float) -> None:
        """End the offer: no new readers, and wait for the present ones."""
        deadline = Deadline(timeout_s, f"fence of member {self._receiver.member!r}")
        with self._alone(deadline):
            if self._uid:
                self._offering.end(self._uid, deadline)
                self._uid = ""
            meta, self._meta, self._arena = self._meta, None, None
            if meta is not None:
                meta.close()

    def close(self) -> None:
        """Withdraw the offer without waiting, and leave the rendezvous. Idempotent."""
        if self._receiver.bench.on_overwrite == self._overwrite:
            self._receiver.bench.on_overwrite = None
            self._receiver.reader.arenas.on_drop = None
        self._offering.close()
        self._uid = ""
        meta, self._meta, self._arena = self._meta, None, None
        if meta is not None:
            meta.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        """Do something while no other thread makes or ends an offer."""
        if not self._lock.acquire(timeout=deadline.remaining("serve on")):
            raise RefitTimeoutError(
                f"{deadline.what}: an offer was still being made or ended in another thread after "
                f"{deadline.timeout_s:g} s"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _overwrite(self, arena: Arena, deadline: Deadline) -> None:
        """End the offer of an arena that is about to be written; once this returns it is not taken for what serves."""
        left_s = min(self._fence_timeout_s, deadline.remaining("fence of what is served on"))
        within = Deadline(left_s, f"fence of member {self._receiver.member!r}")
        with self._alone(within):
            if self._uid and arena is self._arena:
                self.fence(timeout_s=within.remaining("fence of what is served on"))
            if self._receiver.reader.arenas.served is arena:
                self._receiver.reader.arenas.served = None

    def _dropped(self, arena: Arena) -> None:
        """The arena is about to be closed, since another plan needs other buffers: admit no new readers to it.

        Present ones find its memory withdrawn. A service that is out of reach withdraws the offer with this worker.
        """
        if self._uid and arena is self._arena:
            with contextlib.suppress(RendezvousError):
                self._offering.rendezvous.close_admission(self._uid, timeout_s=_RETRACT_S)
            logger.info("member %s: what it served on is no longer kept; the offer is ended", self._receiver.member)
