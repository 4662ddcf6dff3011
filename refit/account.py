"""What is there to say of a refit, whether it ended well or not? Its report, and its record of stages."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.refit import metrics
from reshard.refit.clock import StageClock
from reshard.refit.errors import RefitError
from reshard.refit.loading import Loaded
from reshard.refit.planning import Planned
from reshard.refit.records import DiscoveryRecord, StagesRecord, emit, implied_gbps
from reshard.refit.report import RefitReport

if TYPE_CHECKING:
    from reshard.refit.receiver import Receiver
    from reshard.rendezvous import Manifest

__all__ = ["Account"]


@dataclass(slots=True)
class Account:
    """What one refit took and came to, filled in as it goes.

    Attributes
    ----------
    receiver, clock
        Whose refit it is; its stage times.
    loaded, discovery
        What was read; what was found.
    cold
        Whether anything had to be planned, dialled or registered.
    without
        Holders given up on the way.
    """

    receiver: Receiver
    clock: StageClock
    loaded: Loaded = field(default_factory=Loaded)
    discovery: DiscoveryRecord | None = None
    cold: bool = False
    without: frozenset[str] = frozenset()
    _before: int = field(init=False)

    def __post_init__(self) -> None:
        self._before = self.receiver.reader.arenas.new_registrations

    @property
    def new_registrations(self) -> int:
        """Registrations that this refit made."""
        return self.receiver.reader.arenas.new_registrations - self._before

    def report(self, manifest: Manifest, planned: Planned) -> RefitReport:
        """The typed report of a refit that ended well."""
        r, plan = self.receiver, planned.plan
        if self.discovery is None:
            raise RefitError("a report needs a discovery")
        return RefitReport(
            version=manifest.version,
            member=r.member,
            cold=self.cold,
            mode=r.install_mode,
            certificate=plan.certificate,
            coverage=planned.coverage,
            discovery=self.discovery,
            stages=dict(self.clock.stop()),
            useful_bytes=plan.economics.useful_bytes,
            wire_bytes=self.loaded.wire_bytes,
            wire_s=self.loaded.wire_s,
            n_descriptors=self.loaded.n_descriptors,
            verified=self.loaded.verified,
            ledger=self.receiver.bench.ledger(planned),
            new_registrations=self.new_registrations,
            failovers=tuple(sorted(self.without)),
            plan_digest=plan.digest,
        )

    def emit(self, manifest: Manifest | None, planned: Planned | None, outcome: str) -> None:
        """Emit and count the record of stages; nothing for a refit that found no version."""
        if manifest is None:
            return
        r = self.receiver
        seconds = {k: round(v, 6) for k, v in self.clock.stop().items()}
        loaded, verified = self.loaded, self.loaded.verified
        record = StagesRecord(
            rank=r.rank,
            member=r.member,
            model=r.model,
            epoch=manifest.version.epoch,
            step=manifest.version.step,
            mode=r.install_mode,
            cold=self.cold,
            outcome=outcome,
            stages_s=seconds,
            total_s=round(sum(seconds.values()), 6),
            useful_bytes=planned.plan.economics.useful_bytes if planned is not None else 0,
            wire_bytes=loaded.wire_bytes,
            verified_bytes=verified.verified_bytes,
            received_bytes=verified.received_bytes,
            descriptors=loaded.n_descriptors,
            wire_s=round(loaded.wire_s, 6),
            implied_gbps=round(min(implied_gbps(loaded.wire_bytes, loaded.wire_s), 1e308), 3),
            new_registrations=self.new_registrations,
            failovers=len(self.without),
        )
        emit(record, logging.INFO if outcome == "served" else logging.WARNING)
        metrics.observe_refit(record)
