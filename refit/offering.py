"""One slot's side of the rendezvous: register, offer a version, end it when its readers are gone.

From the moment that a slot is sent to the service until the service has said no, its memory counts as read: the answer
may be lost and the version out. Whoever owns the memory is told so before the sending (``hold``), and asking again with
the same record is how the answer is learnt (`Offering.again`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from reshard.refit.deadline import Deadline
from reshard.refit.errors import FenceTimeoutError, PublishError
from reshard.refit.names import names_of
from reshard.refit.retry import RetryPolicy
from reshard.rendezvous.errors import (
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
    StaleError,
)
from reshard.rendezvous.types import SlotRecord, VersionKey, WorkerInfo

if TYPE_CHECKING:
    from reshard.planner import ShardPart
    from reshard.rendezvous import Rendezvous, Worker
    from reshard.transports import Transport

__all__ = ["Offering"]

U64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A slot whose filling was asked for and not yet answered."""

    version: VersionKey
    uid: str
    record: SlotRecord


class Offering:
    """What all publishers share.

    Parameters
    ----------
    transport, rendezvous
        Stay the caller's.
    model, slot, slots
        Which slot of which model's versions; ``slots`` are equal on every publisher.
    host
        For the ``nearest`` replica policy; this machine's name if empty.
    """

    def __init__(
        self,
        transport: Transport,
        rendezvous: Rendezvous,
        *,
        model: str,
        slot: str,
        slots: Sequence[str],
        host: str = "",
        ttl_s: float = 10.0,
    ) -> None:
        named = names_of(slots, "slots")
        if slot not in named or len(set(named)) != len(named):
            raise PublishError(f"slot {slot!r} must be one of the distinct slots {list(named)}")
        self.transport, self.rendezvous = transport, rendezvous
        self.model, self.slot, self.slots = model, slot, named
        self.host = host or socket.gethostname()
        self._ttl_s = ttl_s
        self._worker: Worker | None = None
        self._put = b""
        self._unknown: _Sent | None = None
        self._retry = RetryPolicy()
        self._closed = False

    def require_open(self) -> None:
        """Raise PublishError after `close`."""
        if self._closed:
            raise PublishError(f"slot {self.slot!r}: the publisher is closed")

    def offer(
        self,
        version: VersionKey,
        deadline: Deadline,
        *,
        part: ShardPart,
        region_bases: U64,
        region_bytes: Int64,
        header_region: int,
        digest_region: int,
        digest_root: bytes = b"",
        roots: Mapping[str, bytes] | None = None,
        memory: Literal["dram", "vram"] = "dram",
        device: int = 0,
        empty: bool = False,
        layout_epoch: int = 0,
        hold: Callable[[str], None] = lambda uid: None,
    ) -> str:
        """Put the table if the service lacks it, open the version and fill the slot; returns the version's uid.

        Parameters
        ----------
        hold
            Told the uid before the slot is sent, from when on readers may come, and an empty one where the service
            has refused it, so that none will.

        Raises
        ------
        RendezvousError
            The other publishers disagree, a step goes back, or the service is out of reach.
        """
        self.require_open()
        endpoints = {self.transport.name: self.transport.endpoint()}
        if self._worker is None or self._worker.lost:
            info = WorkerInfo("trainer", self.model, self.host, self.slot, endpoints)
            self._worker = self.rendezvous.register(info, ttl_s=self._ttl_s, timeout_s=deadline.remaining("register"))
        uid = self.rendezvous.open_version(
            version, self.slots, layout_epoch=layout_epoch, timeout_s=deadline.remaining("open version")
        )
        record = SlotRecord(
            slot=self.slot,
            worker_id=self._worker.id,
            host=self.host,
            endpoints=endpoints,
            table_digest=part.digest,
            region_bases=region_bases,
            region_bytes=region_bytes,
            memory=memory,
            device=device,
            digest_root=digest_root,
            header_region=header_region,
            digest_region=digest_region if digest_root else -1,
            empty=empty,
            roots=roots or {},
        )
        if self._put != part.digest:
            self._put_table(part, deadline)
        try:
            self._send(_Sent(version, uid, record), self._worker, deadline, hold)
        except StaleError:
            # A service that was restarted knows neither tables nor, for that matter, the version.
            self._put_table(part, deadline)
            uid = self.rendezvous.open_version(
                version, self.slots, layout_epoch=layout_epoch, timeout_s=deadline.remaining("open version")
            )
            self._send(_Sent(version, uid, record), self._worker, deadline, hold)
        return uid

    def again(self, version: VersionKey, deadline: Deadline, hold: Callable[[str], None]) -> str:
        """Learn what became of ``version``, if it is the one whose answer was lost; its uid, or empty if it is not.

        Raises
        ------
        RendezvousError
            The service's answer, or that there still is none.
        """
        self.require_open()
        sent = self._unknown
        if sent is None or sent.version != version or self._worker is None or self._worker.lost:
            return ""
        self._send(sent, self._worker, deadline, hold)
        return sent.uid

    def _send(self, sent: _Sent, worker: Worker, deadline: Deadline, hold: Callable[[str], None]) -> None:
        """Fill the slot; the same record may be sent again and again, so a lost answer is asked for."""

        def send(left_s: float) -> None:
            self.rendezvous.publish_slot(sent.uid, sent.record, worker, timeout_s=left_s)

        self._unknown = sent
        hold(sent.uid)
        unheard = (RendezvousUnavailableError, RendezvousTimeoutError)
        try:
            self._retry.run(send, unheard, deadline, "publish slot")
        except unheard:
            raise
        except RendezvousError:
            self._unknown = None
            hold("")
            raise
        self._unknown = None

    def _put_table(self, part: ShardPart, deadline: Deadline) -> None:
        self._put = self.rendezvous.put_table(part, timeout_s=deadline.remaining("put table"))

    def is_leased(self, uid: str, deadline: Deadline) -> bool:
        """Whether somebody reads a version now."""
        now = self.rendezvous.describe(timeout_s=deadline.remaining("ask for leases"))
        return any(v.uid == uid and v.n_leases for v in now.versions)

    def end(self, uid: str, deadline: Deadline) -> None:
        """The fence: admit no new readers to a version, wait for the present ones, retire it.

        Raises
        ------
        FenceTimeoutError
            If a lease outlives the deadline. Admission stays closed.
        """
        try:
            self.rendezvous.close_admission(uid, timeout_s=deadline.remaining("close admission"))
            self.rendezvous.wait_leases(uid, timeout_s=deadline.remaining("wait for leases"))
            self.rendezvous.retire(uid, timeout_s=deadline.remaining("retire"))
            if self._unknown is not None and self._unknown.uid == uid:
                self._unknown = None
        except StaleError:
            pass  # a newer epoch, or another publisher, has retired it already
        except RendezvousTimeoutError as error:
            raise FenceTimeoutError(
                f"slot {self.slot!r}: version {uid} was still being read after {deadline.timeout_s:g} s; "
                "its memory was not touched"
            ) from error

    def close(self) -> None:
        """Leave the rendezvous; idempotent."""
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
