"""What a refit gives back: what moved, what was proved, and what each install mode takes in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.refit.records import CoverageRecord, DiscoveryRecord, implied_gbps

if TYPE_CHECKING:
    from reshard.planner import Certificate
    from reshard.rendezvous.types import VersionKey

__all__ = ["MemoryLedger", "RefitReport", "Verified"]


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes of memory that a rank's refit takes, and would take in each install mode, as they are allocated.

    The holders' headers and digests (16 bytes a cell) are apart.

    Attributes
    ----------
    engine_bytes
        The engine's own parameters and buffers.
    shadow_bytes
        Shadow buffers of this plan: what ``shadow`` mode takes beyond the engine (once while reading; a second set
        is kept for the next refit where the engine swaps storages).
    staging_bytes
        The one staging arena: that of the whole plan; in ``stream`` mode that of its largest part, which is no more.
    materialised_bytes
        Sources staged whole for the loader.
    stream_bytes
        The one arena of ``stream`` mode: its largest part, at most the budget; over it (and refused in that mode)
        where one parameter is.
    """

    engine_bytes: int
    shadow_bytes: int
    staging_bytes: int
    materialised_bytes: int
    stream_bytes: int = 0

    def extra_bytes(self, mode: str) -> int:
        """Memory beyond the engine's own that a refit in ``mode`` (``shadow`` or ``stream``) takes."""
        if mode == "stream":
            return self.stream_bytes + self.staging_bytes
        return self.shadow_bytes + self.staging_bytes + self.materialised_bytes


@dataclass(frozen=True, slots=True)
class Verified:
    """Bytes checked against digests, of the bytes received.

    ``n_cells_partial`` is the number of cells that were read in part: bytes of theirs are used, and nobody has verified
    them.
    """

    mode: str = "off"
    verified_bytes: int = 0
    received_bytes: int = 0
    n_cells: int = 0
    n_cells_partial: int = 0
    seconds: float = 0.0

    @property
    def unverified_bytes(self) -> int:
        """Bytes received that carry no proof, those that were only read with others, and are not used, included."""
        return self.received_bytes - self.verified_bytes

    def plus(self, other: Verified) -> Verified:
        """Both together."""
        return Verified(
            other.mode,
            self.verified_bytes + other.verified_bytes,
            self.received_bytes + other.received_bytes,
            self.n_cells + other.n_cells,
            self.n_cells_partial + other.n_cells_partial,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class RefitReport:
    """One refit of one rank.

    Attributes
    ----------
    version
        The version now served.
    cold
        Whether anything was planned, connected or registered in this refit.
    mode
        ``shadow`` or ``stream``.
    certificate
        The planner's proof of what was written.
    coverage
        The coverage record of the plan in force.
    stages
        Seconds by stage name, in order.
    useful_bytes, wire_bytes
        Bytes requested of sources; bytes that crossed the wire.
    wire_s
        Seconds between the first post and the last completion, summed over waves, without preparation.
    n_descriptors
        Wire rows posted.
    new_registrations
        Registrations made in this refit (0 on a warm one).
    failovers
        Holders replaced by replicas in this refit.
    """

    version: VersionKey
    member: str
    cold: bool
    mode: str
    certificate: Certificate
    coverage: CoverageRecord
    discovery: DiscoveryRecord
    stages: Mapping[str, float]
    useful_bytes: int
    wire_bytes: int
    wire_s: float
    n_descriptors: int
    verified: Verified
    ledger: MemoryLedger
    new_registrations: int = 0
    failovers: tuple[str, ...] = ()
    plan_digest: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        kind = "cold" if self.cold else "warm"
        return (
            f"{self.version} on {self.member} ({kind}, {self.mode}): {self.useful_bytes:,} bytes useful, "
            f"{self.wire_bytes:,} on the "
            f"wire, {self.verified_bytes:,} verified{self._unverified()}; "
            f"{self.gbps:.2f} GB/s, {self.total_s:.3f} s in all; {self.coverage_pct:.2f} % of the engine covered"
        )

    def _unverified(self) -> str:
        n, cells = self.verified.unverified_bytes, self.verified.n_cells_partial
        if not n:
            return ""
        return f" and {n:,} NOT verified" + (f" ({cells:,} cells were read in part)" if cells else "")

    @property
    def total_s(self) -> float:
        """Seconds of the whole refit."""
        return sum(self.stages.values())

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9 bytes) a second on the wire; 0.0 where nothing moved."""
        return implied_gbps(self.wire_bytes, self.wire_s) / 8 if self.wire_s > 0 else 0.0

    @property
    def coverage_pct(self) -> float:
        """Percent of the engine's bytes that the certificate proves written."""
        return self.coverage.coverage_pct

    @property
    def verified_bytes(self) -> int:
        """Bytes checked against their publishers' digests."""
        return self.verified.verified_bytes

    @property
    def unverified_bytes(self) -> int:
        """Bytes received that carry no proof: 0 where every byte was checked."""
        return self.verified.unverified_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes received from publishers."""
        return self.verified.received_bytes
