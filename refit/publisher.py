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
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from reshard.planner import Holder
from reshard.refit.aliases import alias_roots
from reshard.refit.buffers import DIGESTS, HEADER, PublishBuffer
from reshard.refit.clock import StageClock
from reshard.refit.deadline import Deadline, check_timeout
from reshard.refit.devices import HOST, PINNED_HOST, Device
from reshard.refit.digests import root_of
from reshard.refit.errors import PublishError
from reshard.refit.layout import Cuts, PackedLayout, WireRule, synchronize
from reshard.refit.names import names_of
from reshard.refit.offering import Offering
from reshard.refit.published import Published
from reshard.refit.relayout import LayoutInForce
from reshard.refit.residency import require_mapped, spans_of
from reshard.refit.tensors import LocalTensor, is_torch, tensors_of
from reshard.rendezvous.types import VersionKey

if TYPE_CHECKING:
    from reshard.rendezvous import Rendezvous
    from reshard.transports import Transport

logger = logging.getLogger(__name__)

__all__ = ["Published", "Publisher"]

_WAKE = "bring the trainer's weights back into memory before publishing them"


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
    aliases
        Name -> name of tensors with equal content (tied weights), equal on every publisher. They are compared by
        digest at each version, where both are published and cut alike, here or on different slots.
    cut_hints
        Lay the buffer out by the receivers' cut hints of the ``layout_epoch`` that `publish` is given.
    layout, claim
        As in `reshard.planner.ShardPart`.
    host
        For the ``nearest`` replica policy.
    device
        Where the buffers lie: the host's memory, or a `reshard.refit.torch_device.TorchDevice`.
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
        aliases: Mapping[str, str] | None = None,
        cut_hints: bool = False,
        layout: str = "default",
        claim: str = "",
        host: str = "",
        ttl_s: float = 10.0,
        device: Device = HOST,
    ) -> None:
        if buffers not in (1, 2):
            raise PublishError(f"buffers={buffers}: expected 1 or 2")
        if on_busy not in ("wait", "skip"):
            raise PublishError(f"on_busy={on_busy!r}: expected 'wait' or 'skip'")
        self._offering = Offering(transport, rendezvous, model=model, slot=slot, slots=slots, host=host, ttl_s=ttl_s)
        self.model, self.slot, self.slots = model, slot, self._offering.slots
        self._transport, self._rendezvous = transport, rendezvous
        self._n_buffers, self._on_busy, self._digests = buffers, on_busy, digests
        self._aliases = dict(aliases or {})
        if self._aliases and not digests:
            raise PublishError("aliases are compared by digest: they cannot be declared with digests=False")
        self._device = device
        self._layouts = LayoutInForce(
            rendezvous,
            model,
            Holder(slot, self._offering.host, device.memory, device.number),
            WireRule(wire_dtype, names_of(wire_dtype_exceptions, "wire_dtype_exceptions")),
            follow_hints=cut_hints,
            layout=layout,
            claim=claim,
        )
        self._buffers: list[PublishBuffer] = []
        self._newest: PublishBuffer | None = None
        self._busy = threading.Lock()

    def open_epoch(self, run_id: str, *, timeout_s: float = 30.0) -> int:
        """A new epoch for this run; the same for every publisher that gives the same ``run_id``."""
        return self._rendezvous.open_epoch(self.model, run_id, timeout_s=check_timeout(timeout_s))

    def newest_layout_epoch(self, *, timeout_s: float = 30.0) -> int:
        """The newest layout epoch of the receivers' cut hints; one rank asks and tells the others."""
        return self._rendezvous.get_cuts(self.model, timeout_s=check_timeout(timeout_s)).layout_epoch

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
            A new number where the layout differs from the last version's; equal on every publisher. With ``cut_hints``
            the layout epoch whose hints are used.
        cuts
            A grid to cut by, instead of the hints: tensor name -> per dim coordinates.
        timeout_s
            For the whole call.

        Raises
        ------
        PublishError
            No tensors without ``empty`` (or some with it), or a tensor that cannot be published.
        UnmappedMemoryError
            A tensor that is not in memory: the trainer's weights are offloaded, or their engine sleeps.
        FenceTimeoutError
            The buffer to overwrite was being read until the deadline.
        RendezvousError
            The other publishers disagree, a step goes back, or the service is out of reach. Where its answer was
            lost the version may be out: its buffer counts as read. Publishing the same version again asks for the
            answer and copies nothing; the next version is fenced like any other.
        """
        self._offering.require_open()
        deadline = Deadline(timeout_s, f"publishing {self.model!r} ({epoch}, {step}) from slot {self.slot!r}")
        if not self._busy.acquire(blocking=False):
            raise PublishError(f"slot {self.slot!r}: a version is being published in another thread")
        try:
            return self._publish(VersionKey(self.model, epoch, step), tensors, empty, layout_epoch, cuts, deadline)
        finally:
            self._busy.release()

    def _publish(
        self,
        version: VersionKey,
        tensors: Iterable[LocalTensor],
        empty: bool,
        layout_epoch: int,
        cuts: Cuts | None,
        deadline: Deadline,
    ) -> Published:
        given = tensors_of(tensors, f"slot {self.slot!r}")
        if empty != (not any(t.n_elems for t in given)):
            raise PublishError(
                f"slot {self.slot!r}: {'some' if given else 'no'} tensors with empty={empty}; a rank that holds "
                "nothing says so with "
                "empty=True, and only then"
            )
        clock = StageClock()
        clock.enter("publish")
        held = self._unanswered(version)
        if held is not None and self._offering.again(version, deadline, held.hold):
            self._newest = held
            return Published(version, held.uid, False, int(held.data.nbytes), clock.stop())
        clock.enter("layout")
        require_mapped(spans_of((t.name, t.data) for t in given), f"slot {self.slot!r}", way_out=_WAKE)
        layout, changed = self._layouts.of(given, cuts, layout_epoch, deadline)
        clock.enter("wait")
        free = not changed or self._end_all(deadline)
        buffer = self._free_buffer(layout, any(_on_gpu(t) for t in given), deadline) if free else None
        if buffer is None:
            return Published(version, "", True, 0, clock.stop())
        clock.enter("pack")
        buffer.seqlock.begin()
        buffer.uid = ""
        synchronize(given)
        layout.pack(given, buffer.data)
        synchronize(given)
        clock.enter("digest")
        root, roots = b"", {}
        if self._digests:
            digests = buffer.digest(layout.grid)
            root, roots = root_of(digests), layout.roots(digests)
            roots |= alias_roots(layout.part, layout.grid, digests, self._aliases, slot=self.slot)
        clock.enter("publish")
        buffer.seqlock.commit(version.epoch, version.step)
        buffer.version = version
        self._offering.offer(
            version,
            deadline,
            part=layout.part,
            region_bases=buffer.region_bases,
            region_bytes=buffer.region_bytes,
            header_region=HEADER,
            digest_region=DIGESTS,
            digest_root=root,
            roots=roots,
            empty=empty,
            memory=self._device.memory,
            device=self._device.number,
            layout_epoch=layout_epoch,
            hold=buffer.hold,
        )
        self._newest = buffer
        logger.debug("slot %s published %s: %d bytes", self.slot, version, layout.data_bytes)
        return Published(version, buffer.uid, False, layout.data_bytes, clock.stop())

    def close(self) -> None:
        """Leave the rendezvous and free the buffers. Readers that still hold a lease will notice. Idempotent.

        Nothing can be published afterwards.
        """
        self._offering.close()
        self._drop_buffers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- steps

    def _end_all(self, deadline: Deadline) -> bool:
        """End what the buffers hold and let go of them: their layout has changed. False to skip the version instead."""
        held = [buffer for buffer in self._buffers if buffer.uid]
        try:
            if any(self._to_be_skipped(buffer, deadline) for buffer in held):
                self._layouts.forget()
                return False
            for buffer in held:
                self._end(buffer, deadline)
        except BaseException:
            self._layouts.forget()  # the buffers still have the old one
            raise
        self._drop_buffers()
        return True

    def _free_buffer(self, layout: PackedLayout, from_gpu: bool, deadline: Deadline) -> PublishBuffer | None:
        """A buffer that nobody reads; None where it is busy and the version is to be skipped."""
        device = PINNED_HOST if from_gpu and self._device is HOST else self._device
        while len(self._buffers) < self._n_buffers:
            # All at once, so that the endpoint message that readers connect by does not change at the second version.
            self._buffers.append(PublishBuffer(self._transport, layout.data_bytes, len(layout.grid), device))
        choice = self._buffers[0]
        if len(self._buffers) > 1 and choice is self._newest:
            choice = self._buffers[1]
        if choice.uid:
            if self._to_be_skipped(choice, deadline):
                return None
            self._end(choice, deadline)
        return choice

    def _to_be_skipped(self, buffer: PublishBuffer, deadline: Deadline) -> bool:
        """Whether somebody reads what would be overwritten, and that is no reason to wait."""
        busy = self._on_busy == "skip" and self._offering.is_leased(buffer.uid, deadline)
        if busy:
            logger.info("slot %s: version %s is still being read; skipping", self.slot, buffer.uid)
        return busy

    def _unanswered(self, version: VersionKey) -> PublishBuffer | None:
        """The buffer that holds ``version`` already, because publishing it failed after it was sent."""
        return next((b for b in self._buffers if b.uid and b.version == version), None)

    def _end(self, buffer: PublishBuffer, deadline: Deadline) -> None:
        """End the version in ``buffer``."""
        self._offering.end(buffer.uid, deadline)
        buffer.uid = ""

    def _drop_buffers(self) -> None:
        buffers, self._buffers, self._newest = self._buffers, [], None
        for buffer in buffers:
            buffer.close()

    @property
    def registered_bytes(self) -> int:
        """Bytes of registered memory held now."""
        return int(sum(int(b.region_bytes.sum()) for b in self._buffers))


def _on_gpu(tensor: LocalTensor) -> bool:
    return is_torch(tensor.data) and tensor.data.device.type == "cuda"  # type: ignore[union-attr]
