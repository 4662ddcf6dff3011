"""Read batch after batch, copying and verifying one while the next one is on its way.

    post 0 | wait 0, post 1, use 0 | wait 1, post 2, use 1 | ...

A batch is a wave or a share of one. Two waves share the staging arena; the first batch of wave k + 2 is posted only
when the copies of wave k are done. Where the caller can do without a holder (its replicas have its boxes), a peer
that fails is noted as lost and left out from there on, and the others finish; anything else that fails ends the
read, with nothing left in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.refit.deadline import Deadline
from reshard.transports.errors import OwnFaultError, PoisonedMemoryError, TransferTimeoutError, TransportError

if TYPE_CHECKING:
    from reshard.transports.base import Prepared, Transfer, Transport

__all__ = ["WireTotals", "failed_peers", "read_waves"]

_DRAIN_S = 5.0
_BLAMED = ("failed", "refused")


@dataclass(slots=True)
class WireTotals:
    """What moved, in whole lists; and the peers lost on the way.

    Attributes
    ----------
    nbytes
        Bytes of data.
    seconds
        With something in flight.
    n_descriptors
        Native descriptors.
    lost
        Peers that failed, and how.
    by_peer
        The bytes of each peer: what a lost one had delivered is read again from others.
    beside
        ``id`` of the lists that bring no data (digests): they take time and descriptors, and no bytes are counted.
    """

    nbytes: int = 0
    seconds: float = 0.0
    n_descriptors: int = 0
    lost: dict[str, TransportError] = field(default_factory=dict)
    by_peer: dict[str, int] = field(default_factory=dict)
    beside: set[int] = field(default_factory=set)

    @property
    def kept_bytes(self) -> int:
        """Bytes of data that moved from peers that were not lost."""
        return self.nbytes - sum(self.by_peer.get(name, 0) for name in self.lost)

    def count(self, lists: Iterable[Prepared]) -> None:
        """Count lists that have landed."""
        for prepared in lists:
            name = prepared.peer.name
            self.n_descriptors += prepared.n_descriptors
            if id(prepared) in self.beside:
                continue
            self.nbytes += prepared.nbytes
            self.by_peer[name] = self.by_peer.get(name, 0) + prepared.nbytes

    def add(self, other: WireTotals) -> None:
        """Count another read's bytes, seconds and descriptors too."""
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.n_descriptors += other.n_descriptors


def failed_peers(error: TransportError) -> frozenset[str]:
    """The peers that a transport error blames; not those that were only cancelled because of them.

    A healthy peer whose read did not end in time after it was cancelled is ``abandoned`` too: it is blamed only where
    time ran out, and then before those that did end.
    """
    if isinstance(error, PoisonedMemoryError):
        return frozenset()
    failed = {name for name, state in error.failures.items() if state.startswith(_BLAMED)}
    abandoned = {name for name, state in error.failures.items() if state.startswith("abandoned")}
    named = {error.peer} if error.peer else set()
    if isinstance(error, TransferTimeoutError):
        return frozenset(failed | abandoned or named)
    return frozenset(failed | named or abandoned)


def read_waves(
    transport: Transport,
    batches: Sequence[Sequence[Prepared]],
    use: Callable[[int], None],
    deadline: Deadline,
    *,
    totals: WireTotals | None = None,
    may_lose: bool = False,
    stall_s: float | None = None,
) -> WireTotals:
    """Read all ``batches``, calling ``use(k)`` once batch ``k`` has landed and the next one is posted.

    Parameters
    ----------
    use
        What it raises ends the read.
    totals
        Adds to these, also where it fails, and leaves out the peers that they name as lost.
    may_lose
        Note failing peers in ``totals.lost`` and go on without them, as long as no memory is quarantined.
    stall_s
        Longest wait for one batch, seconds; the deadline alone if None.

    Raises
    ------
    TransportError
        The first failure, with every peer's state; nothing is left in flight.
    """
    sums = WireTotals() if totals is None else totals
    in_flight: list[Transfer] = []

    def left_s(what: str) -> float:
        left = deadline.remaining(what)
        return left if stall_s is None else min(left, stall_s)

    def post(k: int) -> float:
        nonlocal in_flight
        since = time.monotonic()
        in_flight = _post(transport, batches[k], sums, left_s, may_lose)
        return since

    try:
        since = post(0) if batches else 0.0
        for k in range(len(batches)):
            try:
                _wait(transport, in_flight, sums, left_s("read"), may_lose, since)
            except TransportError:
                in_flight = []  # `wait` has ended them
                raise
            in_flight = []
            if k + 1 < len(batches):
                since = post(k + 1)
            use(k)
    except BaseException:
        if in_flight:
            # The caller has the first error; what is abandoned here is quarantined by the transport.
            _end(transport, in_flight, sums, max(min(deadline.left_s, _DRAIN_S), 1e-3), since)
        raise
    return sums


def _end(transport: Transport, transfers: Sequence[Transfer], sums: WireTotals, timeout_s: float, since: float) -> None:
    """Stop what is in flight; count what has landed all the same."""
    try:
        transport.cancel(transfers)
        transport.wait(transfers, timeout_s=timeout_s)
    except TransportError as error:
        sums.count(t.prepared for t in transfers if error.failures.get(t.prepared.peer.name, "").startswith("done"))
    else:
        sums.count(t.prepared for t in transfers)
    sums.seconds += time.monotonic() - since


def _wait(
    transport: Transport,
    transfers: Sequence[Transfer],
    sums: WireTotals,
    timeout_s: float,
    may_lose: bool,
    since: float,
) -> None:
    try:
        stats = transport.wait(transfers, timeout_s=timeout_s, finish_others=may_lose)
    except TransportError as error:
        bad = failed_peers(error)
        landed = {name for name, state in error.failures.items() if state.startswith("done")}
        unfinished = set(error.failures) - landed - bad
        sums.seconds += time.monotonic() - since
        if not may_lose or not bad or unfinished or transport.quarantined():
            sums.count(t.prepared for t in transfers if t.prepared.peer.name in landed)
            raise
        sums.lost.update(dict.fromkeys(bad, error))
        sums.count(t.prepared for t in transfers if t.prepared.peer.name not in bad)
        return
    sums.seconds += stats.seconds
    sums.count(t.prepared for t in transfers)


def _post(
    transport: Transport,
    lists: Sequence[Prepared],
    sums: WireTotals,
    left_s: Callable[[str], float],
    may_lose: bool,
) -> list[Transfer]:
    posted: list[Transfer] = []
    since = time.monotonic()
    for prepared in lists:
        name = prepared.peer.name
        if name in sums.lost:
            continue
        try:
            posted.append(transport.post(prepared, timeout_s=left_s("post")))
        except BaseException as error:
            # Whatever it is (the deadline, Ctrl-C): nobody else knows of the lists posted before this one.
            if isinstance(error, TransportError) and not isinstance(error, (OwnFaultError, PoisonedMemoryError)):
                error.failures.setdefault(name, f"refused: {error}")
                if may_lose:
                    sums.lost[name] = error
                    continue
            _end(transport, posted, sums, _DRAIN_S, since)
            raise
    return posted
