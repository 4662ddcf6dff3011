"""How a group of transfers ended: statistics if all are done, else one error with every peer's state."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.transports.base import PeerStats, TransferStats
from reshard.transports.errors import TransferError, TransferTimeoutError, TransportError
from reshard.transports.transfer import ListTransfer

_RANK = {"done": 0, "cancelled": 1, "active": 2, "failed": 3, "abandoned": 4}


def states(transfers: Sequence[ListTransfer]) -> dict[str, str]:
    """Return the worst state of each peer, by name."""
    worst: dict[str, str] = {}
    for transfer in transfers:
        name = transfer.prepared.peer.name
        state = f"failed: {transfer.error}" if transfer.error is not None else transfer.state
        if name not in worst or _RANK[state.partition(":")[0]] > _RANK[worst[name].partition(":")[0]]:
            worst[name] = state
    return worst


def _listing(states: dict[str, str]) -> str:
    return ", ".join(f"{name}: {state}" for name, state in states.items())


def stats(transfers: Sequence[ListTransfer]) -> TransferStats:
    """Return the statistics of transfers that are all done."""
    if not transfers:
        return TransferStats(0, 0.0, 0)
    # One pass: this runs at each refit, for each peer.
    nbytes = n_descriptors = 0
    began, ended = transfers[0].began, transfers[0].ended
    groups: dict[str, list[ListTransfer]] = {}
    for transfer in transfers:
        prepared = transfer.prepared
        nbytes += prepared.nbytes
        n_descriptors += prepared.n_descriptors
        began, ended = min(began, transfer.began), max(ended, transfer.ended)
        name = prepared.peer.name
        if name in groups:
            groups[name].append(transfer)
        else:
            groups[name] = [transfer]
    per_peer = {name: _peer_stats(group) for name, group in groups.items()}
    return TransferStats(nbytes, ended - began, n_descriptors, per_peer)


def _peer_stats(group: list[ListTransfer]) -> PeerStats:
    if len(group) == 1:
        (one,) = group
        prepared = one.prepared
        return PeerStats(
            prepared.nbytes, prepared.n_descriptors, one.ended - one.began, one.post_seconds, one.native_seconds
        )
    return PeerStats(
        sum(t.prepared.nbytes for t in group),
        sum(t.prepared.n_descriptors for t in group),
        max(t.ended for t in group) - min(t.began for t in group),
        sum(t.post_seconds for t in group),
        sum(t.native_seconds for t in group),
    )


def timed_out(mine: Sequence[ListTransfer], late: Sequence[ListTransfer], timeout_s: float) -> TransferTimeoutError:
    """Return the error for a deadline that passed, ``late`` being those that were active then."""
    by_name = states(mine)
    names = ", ".join(dict.fromkeys(transfer.prepared.peer.name for transfer in late))
    poisoned = [
        (region.address, region.stop)
        for transfer in late
        if transfer.state == "abandoned" and transfer.posted
        for region in transfer.prepared.destinations
    ]
    note = "; their destinations are quarantined" if poisoned else "; nothing can land any more"
    error = TransferTimeoutError(
        f"after {timeout_s} s still reading from {names}{note} (all peers: {_listing(by_name)})",
        peer=late[0].prepared.peer.name,
        failures=by_name,
        poisoned=poisoned,
    )
    error.__cause__ = next((transfer.error for transfer in mine if transfer.error is not None), None)
    return error


def failed(mine: Sequence[ListTransfer]) -> TransportError:
    """Return the first failure in time, with every peer's state."""
    bad = min((t for t in mine if t.error is not None), key=lambda t: t.ended, default=None)
    by_name = states(mine)
    if bad is None or bad.error is None:
        odd = next(transfer for transfer in mine if transfer.state != "done")
        name = odd.prepared.peer.name
        return TransferError(f"the read from peer {name!r} was {odd.state}", peer=name, failures=by_name)
    bad.error.failures.update(by_name)
    if len(by_name) > 1:
        bad.error.add_note(f"all peers: {_listing(by_name)}")
    return bad.error
