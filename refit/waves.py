"""Read wave after wave, copying one while the next one is on its way.

    post 0 | wait 0, post 1, copy 0 | wait 1, post 2, copy 1 | ...

Two waves share the staging arena; wave k + 2 is posted only when the copies of wave k are done. On a failure
everything in flight is waited for (or abandoned by the transport, which then quarantines the memory) before the
error is raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.refit.deadline import Deadline
from reshard.transports.errors import TransportError

if TYPE_CHECKING:
    from reshard.transports.base import Prepared, Transfer, Transport

__all__ = ["WireTotals", "read_waves"]


@dataclass(slots=True)
class WireTotals:
    """What moved: bytes, seconds with something in flight, native descriptors."""

    nbytes: int = 0
    seconds: float = 0.0
    n_descriptors: int = 0
    per_peer: dict[str, int] = field(default_factory=dict)


def read_waves(
    transport: Transport,
    waves: Sequence[Sequence[Prepared]],
    copy: Callable[[int], None],
    deadline: Deadline,
) -> WireTotals:
    """Read all ``waves``, calling ``copy(k)`` once wave ``k`` has landed.

    Raises
    ------
    TransportError
        The first failure, with every peer's state; nothing is left in flight.
    """
    totals = WireTotals()
    in_flight: list[Transfer] = []
    try:
        if waves:
            in_flight = _post(transport, waves[0], deadline)
        for k in range(len(waves)):
            stats = transport.wait(in_flight, timeout_s=deadline.remaining("read"))
            in_flight = []
            totals.nbytes += stats.bytes
            totals.seconds += stats.seconds
            totals.n_descriptors += stats.n_descriptors
            for name, peer in stats.per_peer.items():
                totals.per_peer[name] = totals.per_peer.get(name, 0) + peer.bytes
            if k + 1 < len(waves):
                in_flight = _post(transport, waves[k + 1], deadline)
            copy(k)
    except BaseException:
        _drain(transport, in_flight, deadline)
        raise
    return totals


def _post(transport: Transport, lists: Sequence[Prepared], deadline: Deadline) -> list[Transfer]:
    posted: list[Transfer] = []
    for prepared in lists:
        try:
            posted.append(transport.post(prepared))
        except TransportError as error:
            error.failures.setdefault(prepared.peer.name, f"refused: {error}")
            try:
                stats = transport.wait(posted, timeout_s=max(deadline.left_s, 1e-3))
            except TransportError as other:
                for name, state in other.failures.items():
                    error.failures.setdefault(name, state)
            else:
                for name in stats.per_peer:
                    error.failures.setdefault(name, "done")
            raise
    return posted


def _drain(transport: Transport, in_flight: Sequence[Transfer], deadline: Deadline) -> None:
    if not in_flight:
        return
    # The caller has the first error; what is abandoned here is quarantined by the transport.
    with contextlib.suppress(TransportError):
        transport.wait(in_flight, timeout_s=max(min(deadline.left_s, 5.0), 1e-3))
