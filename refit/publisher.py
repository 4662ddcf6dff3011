"""How does a trainer rank offer its weights? `Publisher.publish`, once for each version.

1. Lay out the tensors (once for each layout), allocate and register one or two buffers.
2. Choose the buffer that does not hold the newest version; end admission to what it holds and wait, with a
   deadline, for its leases.
3. Mark its header as being written, copy and cast, synchronise, digest the cells, mark it as holding the version.
4. Open the version at the rendezvous and fill this publisher's slot.

The optimizer may go on as soon as `publish` returns.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from reshard.planner import Holder
from reshard.refit.buffers import DIGESTS, HEADER, PublishBuffer, digest_region_bytes
from reshard.refit.deadline import Deadline
from reshard.refit.digests import root_of
from reshard.refit.errors import FenceTimeoutError, PublishError
from reshard.refit.header import HEADER_BYTES
from reshard.refit.layout import Cuts, PackedLayout, WireRule, build_layout, signature_of, synchronize
from reshard.refit.tensors import LocalTensor
from reshard.rendezvous.errors import RendezvousTimeoutError, StaleError
from reshard.rendezvous.types import SlotRecord, VersionKey, WorkerInfo

if TYPE_CHECKING:
    from reshard.rendezvous import Rendezvous, Worker
    from reshard.transports import Transport

logger = logging.getLogger(__name__)

__all__ = ["Published", "Publisher"]


@dataclass(frozen=True, slots=True)
class Published:
    """What a `Publisher.publish` did.

    Attributes
    ----------
    uid
        The version's id at the rendezvous; empty where it was skipped.
    skipped
        The buffer was still being read and ``on_busy="skip"``.
    wire_bytes
        Bytes of the data region.
    stages
        Seconds by stage: layout, wait, pack, digest, publish.
    """

    version: VersionKey
    uid: str
    skipped: bool
    wire_bytes: int
    stages: dict[str, float]


class Publisher:
    """Publishes one slot's tensors, version after version, from registered copies.

    Parameters
    ----------
    transport, rendezvous
        Stay the caller's; `close` closes neither.
    model
        The model's name at the rendezvous.
    slot, slots
        This publisher's slot and all slots that make a version; equal on every publisher.
    wire_dtype, wire_dtype_exceptions
        Cast floating-point tensors to this dtype, except names that match one of the patterns.
    buffers
        1 or 2. With two a version can be read while the next one is written.
    on_busy
        What to do when the buffer to overwrite is still being read: ``wait`` until the deadline, or ``skip`` the
        version.
    digests
        Whether cell digests are published.
    layout, claim
        As in `reshard.planner.ShardPart`.
    host
        For the ``nearest`` replica policy.
    """

    def __init__(
        self,
        transport: Transport,
        rendezvous: Rendezvous,
        *,
        model: str,
        slot: str,
        slots: Sequence[str],
        wire_dtype: str | None = None,
        wire_dtype_exceptions: Sequence[str] = (),
        buffers: int = 2,
        on_busy: Literal["wait", "skip"] = "wait",
        digests: bool = True,
        layout: str = "default",
        claim: str = "",
        host: str = "",
        ttl_s: float = 10.0,
    ) -> None:
        if buffers not in (1, 2):
            raise PublishError(f"buffers={buffers}: expected 1 or 2")
        if on_busy not in ("wait", "skip"):
            raise PublishError(f"on_busy={on_busy!r}: expected 'wait' or 'skip'")
        if slot not in slots or len(set(slots)) != len(slots):
            raise PublishError(f"slot {slot!r} must be one of the distinct slots {list(slots)}")
        self.model, self.slot, self.slots = model, slot, tuple(slots)
        self._transport, self._rendezvous = transport, rendezvous
        self._rule = WireRule(wire_dtype, tuple(wire_dtype_exceptions))
        self._n_buffers, self._on_busy, self._digests = buffers, on_busy, digests
        self._layout_name, self._claim, self._ttl_s = layout, claim, ttl_s
        self._host = host or socket.gethostname()
        self._worker: Worker | None = None
        self._layout: PackedLayout | None = None
        self._signature = b""
        self._table_digest = b""
        self._buffers: list[PublishBuffer] = []
        self._newest: PublishBuffer | None = None

    def open_epoch(self, run_id: str) -> int:
        """A new epoch for this run; the same for every publisher that gives the same ``run_id``."""
        return self._rendezvous.open_epoch(self.model, run_id)

    def publish(
        self,
        *,
        epoch: int,
        step: int,
        tensors: Iterable[LocalTensor],
        empty: bool = False,
        layout_epoch: int = 0,
        cuts: Cuts | None = None,
        timeout_s: float,
    ) -> Published:
        """Copy ``tensors`` into registered memory and offer them as (epoch, step).

        Parameters
        ----------
        tensors
            What this rank holds of the version.
        empty
            Says that it holds nothing, on purpose.
        layout_epoch
            A new number where the layout differs from the last version's.
        cuts
            Cut hints in force at this layout epoch.
        timeout_s
            For the whole call.

        Raises
        ------
        PublishError
            No tensors without ``empty`` (or some with it), or a tensor that cannot be published.
        FenceTimeoutError
            The buffer to overwrite was being read until the deadline.
        RendezvousError
            The other publishers disagree, a step goes back, or the service is out of reach.
        """
        deadline = Deadline(timeout_s, f"publishing {self.model!r} ({epoch}, {step}) from slot {self.slot!r}")
        version = VersionKey(self.model, epoch, step)
        given = list(tensors)
        if empty != (not any(t.n_elems for t in given)):
            raise PublishError(
                f"slot {self.slot!r}: {'some' if given else 'no'} tensors with empty={empty}; a rank that holds "
                "nothing says so with "
                "empty=True, and only then"
            )
        stages: dict[str, float] = {}
        clock = time.perf_counter()

        def lap(stage: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            stages[stage] = now - clock
            clock = now

        layout = self._lay_out(given, cuts, deadline)
        lap("layout")
        buffer = self._free_buffer(deadline)
        lap("wait")
        if buffer is None:
            return Published(version, "", True, 0, stages)
        buffer.seqlock.begin()
        buffer.uid = ""
        synchronize(given)
        layout.pack(given, buffer.data)
        synchronize(given)
        lap("pack")
        root, roots = b"", {}
        if self._digests:
            digests = buffer.digest(layout.grid)
            root, roots = root_of(digests), layout.roots(digests)
        lap("digest")
        buffer.seqlock.commit(epoch, step)
        self._offer(version, buffer, root, roots, empty, layout_epoch, deadline)
        lap("publish")
        logger.debug("slot %s published %s: %d bytes", self.slot, version, layout.data_bytes)
        return Published(version, buffer.uid, False, layout.data_bytes, stages)

    def close(self) -> None:
        """Leave the rendezvous and free the buffers. Readers that still hold a lease will notice. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._drop_buffers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- steps

    def _lay_out(self, tensors: Sequence[LocalTensor], cuts: Cuts | None, deadline: Deadline) -> PackedLayout:
        signature = signature_of(tensors, self._rule, cuts)
        if self._layout is not None and signature == self._signature:
            return self._layout
        layout = build_layout(
            Holder(self.slot, self._host),
            tensors,
            self._rule,
            cuts=cuts,
            layout=self._layout_name,
            claim=self._claim,
            extra_regions=lambda n_cells: (digest_region_bytes(n_cells), HEADER_BYTES),
        )
        for buffer in self._buffers:
            if buffer.uid:
                self._end(buffer, deadline)
        self._drop_buffers()
        self._table_digest = self._rendezvous.put_table(layout.part, timeout_s=deadline.remaining("put table"))
        self._layout, self._signature = layout, signature
        return layout

    def _free_buffer(self, deadline: Deadline) -> PublishBuffer | None:
        """A buffer that nobody reads; None where it is busy and the version is to be skipped."""
        layout = self._layout
        if layout is None:
            raise PublishError("no layout")
        while len(self._buffers) < self._n_buffers:
            # All at once, so that the endpoint message that readers connect by does not change at the second version.
            self._buffers.append(PublishBuffer(self._transport, layout.data_bytes, len(layout.grid)))
        choice = self._buffers[0]
        if len(self._buffers) > 1 and choice is self._newest:
            choice = self._buffers[1]
        if choice.uid:
            if self._on_busy == "skip" and self._is_leased(choice.uid):
                logger.info("slot %s: version %s is still being read; skipping", self.slot, choice.uid)
                return None
            self._end(choice, deadline)
        return choice

    def _is_leased(self, uid: str) -> bool:
        versions = self._rendezvous.describe().versions
        return any(v.uid == uid and v.n_leases for v in versions)

    def _end(self, buffer: PublishBuffer, deadline: Deadline) -> None:
        """End the version in ``buffer``: no new readers, wait for the present ones, retire it."""
        uid = buffer.uid
        try:
            self._rendezvous.close_admission(uid)
            self._rendezvous.wait_leases(uid, timeout_s=deadline.remaining("wait for leases"))
            self._rendezvous.retire(uid)
        except StaleError:
            pass  # a newer epoch, or another publisher, has retired it already
        except RendezvousTimeoutError as error:
            raise FenceTimeoutError(
                f"slot {self.slot!r}: version {uid} was still being read after {deadline.timeout_s:g} s; its "
                "buffer was not overwritten"
            ) from error
        buffer.uid = ""

    def _offer(
        self,
        version: VersionKey,
        buffer: PublishBuffer,
        root: bytes,
        roots: dict[str, bytes],
        empty: bool,
        layout_epoch: int,
        deadline: Deadline,
    ) -> None:
        endpoints = {self._transport.name: self._transport.endpoint()}
        if self._worker is None or self._worker.lost:
            info = WorkerInfo("trainer", self.model, self._host, self.slot, endpoints)
            self._worker = self._rendezvous.register(info, ttl_s=self._ttl_s)
        uid = self._rendezvous.open_version(version, self.slots, layout_epoch=layout_epoch)
        record = SlotRecord(
            slot=self.slot,
            worker_id=self._worker.id,
            host=self._host,
            endpoints=endpoints,
            table_digest=self._table_digest,
            region_bases=buffer.region_bases,
            region_bytes=buffer.region_bytes,
            digest_root=root,
            header_region=HEADER,
            digest_region=DIGESTS if root else -1,
            empty=empty,
            roots=roots,
        )
        self._rendezvous.publish_slot(uid, record, self._worker)
        buffer.uid = uid
        self._newest = buffer
        deadline.remaining("publish slot")

    def _drop_buffers(self) -> None:
        buffers, self._buffers, self._newest = self._buffers, [], None
        for buffer in buffers:
            buffer.close()

    @property
    def registered_bytes(self) -> int:
        """Bytes of registered memory held now."""
        return int(sum(int(np.sum(b.region_bytes)) for b in self._buffers))
