"""Which peers is a receiver connected to? One connection a holder, kept until it must not be used any more.

A link is good for one process life and one region table of its holder: a slot filled by another worker, or with
another endpoint message, is dialled anew, and so is a peer that its transport reads from no more; the old peer is
released first. A holder's name is claimed by the
transport before it is dialled, so a holder that was never acquired is never released.

Holders are dialled side by side, all tries of all of them within half of the time that is left: one that is silent
costs neither the others their connections nor the refit the time to read from its replicas.

A transport knows its peers by name, so two receivers on one transport cannot both be connected to a holder: the second
one is refused, and told to open a transport of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.refit.deadline import Deadline
from reshard.refit.errors import RefitError, RefitTimeoutError
from reshard.refit.retry import RetryPolicy
from reshard.transports.errors import OwnFaultError, PeerError, TransferTimeoutError, TransportError

if TYPE_CHECKING:
    from reshard.rendezvous.types import SlotRecord
    from reshard.transports.base import Peer, Transport

__all__ = ["Links"]

_SHARE = 0.5
"""Share of the time left that dialling may take."""
_DIALS = 64
"""Holders dialled at once."""


_ALL: weakref.WeakSet[Links] = weakref.WeakSet()
_ALL_LOCK = threading.Lock()


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
        self.retry = retry if retry is not None else RetryPolicy()
        self._listeners: list[Callable[[], None]] = []
        self._links: dict[str, _Link] = {}
        with _ALL_LOCK:
            _ALL.add(self)

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
            If a holder offers no endpoint for this transport, or another receiver on it is connected to one.
        TransportError
            If some cannot be reached: the first one's error, with the state of each in ``failures``. All others are
            connected.
        """
        wanted: dict[str, tuple[SlotRecord, bytes]] = {}
        for record in records:
            offered = record.endpoints.get(self._transport.name)
            if offered is None:
                raise RefitError(
                    f"holder {record.slot!r} offers transports {sorted(record.endpoints)}, this receiver uses "
                    f"{self._transport.name!r}: open both sides' transports by one name instead of 'auto'"
                )
            wanted[record.slot] = (record, offered)
        if exact:
            self.release(name for name in tuple(self._links) if name not in wanted)
        missing: list[tuple[str, SlotRecord, bytes]] = []
        for name, (record, endpoint) in wanted.items():
            link = self._links.get(name)
            if link is not None:
                # A healthy peer fails too if a read from it was abandoned, for instance because another one's failed.
                well = not getattr(link.peer, "failed", "")
                if well and link.worker_id == record.worker_id and link.endpoint == endpoint:
                    continue
                self.release((name,))
            missing.append((name, record, endpoint))
        if not missing:
            return ()
        self._require_free([name for name, _, _ in missing])
        rounds = -(-len(missing) // _DIALS)
        share_s = deadline.remaining("connect") * _SHARE / rounds

        def dial(row: tuple[str, SlotRecord, bytes]) -> BaseException | None:
            return self._dial(*row, budget=Deadline(share_s, deadline.what))

        with ThreadPoolExecutor(min(len(missing), _DIALS), thread_name_prefix="reshard-dial") as pool:
            answers = list(pool.map(dial, missing))
        failed: dict[str, TransportError] = {}
        other: BaseException | None = None
        for (name, _, _), answer in zip(missing, answers, strict=True):
            if isinstance(answer, TransportError) and not isinstance(answer, OwnFaultError):
                failed[name] = answer
            elif other is None:
                other = answer
        if other is not None:
            raise other
        if failed:
            first = next(iter(failed.values()))
            first.failures.update({name: f"failed: {error}" for name, error in failed.items()})
            for name in wanted:
                first.failures.setdefault(name, "done: connected")
            raise first
        return tuple(name for name, _, _ in missing)

    def _require_free(self, names: Sequence[str]) -> None:
        with _ALL_LOCK:  # another thread may make a receiver meanwhile
            known = tuple(_ALL)
        others = [o for o in known if o is not self and o._transport is self._transport]
        taken = sorted({n for o in others for n in o.names() if n in names})
        if taken:
            raise RefitError(
                f"holder {taken[0]!r} ({len(taken)} such): another receiver is connected to it on this "
                f"{self._transport.name!r} transport; give each receiver a transport of its own"
            )

    def _dial(self, name: str, record: SlotRecord, endpoint: bytes, budget: Deadline) -> BaseException | None:
        """Connect to a holder; returns what went wrong, since no dial may lose what the others have come to.

        The link is known as soon as there is one, not when all dials have ended: a caller that is interrupted while it
        waits for them (Ctrl-C) leaves no peer behind that nobody knows, and whose name is taken for ever.
        """
        try:
            peer = self.retry.run(
                lambda left_s: self._transport.connect(endpoint, timeout_s=left_s, name=name),
                (PeerError, TransferTimeoutError),
                budget,
                "connect",
            )
        except RefitTimeoutError as error:
            return TransferTimeoutError(f"holder {name!r} was not reached: {error}", peer=name)
        except BaseException as error:  # noqa: BLE001
            return error
        self._links[name] = _Link(peer, record.worker_id, endpoint)
        return None

    def release(self, names: Iterable[str]) -> None:
        """Close some peers; names that are not connected are left alone."""
        for name in tuple(names):
            link = self._links.get(name)
            if link is None:
                continue
            try:
                for listener in tuple(self._listeners):
                    listener()
            finally:
                link.peer.close()
                self._links.pop(name, None)

    def close(self) -> None:
        """Close all peers."""
        self.release(tuple(self._links))
