"""Which peers is a receiver connected to? One connection a holder, kept until it must not be used any more.

A link is good for one process life and one region table of its holder: a slot filled by another worker, or with
another endpoint message, is dialled anew, and so is a peer that its transport reads from no more; the old peer is
released first. A holder's name is claimed by the
transport before it is dialled, so a holder that was never acquired is never released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.refit.deadline import Deadline
from reshard.refit.errors import RefitError
from reshard.refit.retry import RetryPolicy
from reshard.transports.errors import PeerError, TransferTimeoutError

if TYPE_CHECKING:
    from reshard.rendezvous.types import SlotRecord
    from reshard.transports.base import Peer, Transport

__all__ = ["Links"]


@dataclass(slots=True)
class _Link:
    peer: Peer
    worker_id: str
    endpoint: bytes


class Links:
    """Peers by holder name.

    Parameters
    ----------
    retry
        How often a dial is tried.
    """

    def __init__(self, transport: Transport, retry: RetryPolicy | None = None) -> None:
        self._transport = transport
        self._retry = retry if retry is not None else RetryPolicy()
        self._listeners: list[Callable[[], None]] = []
        self._links: dict[str, _Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` before a peer is closed, so that no prepared list outlives it."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """No longer call ``listener``."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def names(self) -> tuple[str, ...]:
        """Holders connected now."""
        return tuple(self._links)

    def peer(self, holder: str) -> Peer:
        """The connected peer of a holder."""
        return self._links[holder].peer

    def ensure(self, records: Sequence[SlotRecord], deadline: Deadline, *, exact: bool = True) -> tuple[str, ...]:
        """Connect to these holders (and, if ``exact``, to no others); returns the names dialled now.

        Raises
        ------
        RefitError
            If a holder offers no endpoint for this transport.
        TransportError
            If one cannot be reached; those connected before stay.
        """
        wanted = {record.slot: record for record in records}
        if exact:
            self.release(name for name in tuple(self._links) if name not in wanted)
        dialled: list[str] = []
        for name, record in wanted.items():
            endpoint = record.endpoints.get(self._transport.name)
            if endpoint is None:
                raise RefitError(
                    f"holder {name!r} offers transports {sorted(record.endpoints)}, this receiver uses "
                    f"{self._transport.name!r}"
                )
            link = self._links.get(name)
            if link is not None:
                # A healthy peer fails too if a read from it was abandoned, for instance because another one's failed.
                well = not getattr(link.peer, "failed", "")
                if well and link.worker_id == record.worker_id and link.endpoint == endpoint:
                    continue
                self.release((name,))
            peer = self._dial(name, endpoint, deadline)
            self._links[name] = _Link(peer, record.worker_id, endpoint)
            dialled.append(name)
        return tuple(dialled)

    def _dial(self, name: str, endpoint: bytes, deadline: Deadline) -> Peer:
        return self._retry.run(
            lambda left_s: self._transport.connect(endpoint, timeout_s=left_s, name=name),
            (PeerError, TransferTimeoutError),
            deadline,
            "connect",
        )

    def release(self, names: Iterable[str]) -> None:
        """Close some peers; names that are not connected are left alone."""
        for name in tuple(names):
            link = self._links.pop(name, None)
            if link is not None:
                for listener in tuple(self._listeners):
                    listener()
                link.peer.close()

    def close(self) -> None:
        """Close all peers."""
        self.release(tuple(self._links))
