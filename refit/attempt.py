"""One refit of one rank, from the awaited version to the group's second decision.

before the vote      discover, plan, read, verify: a failure votes no, releases lease and broken peers, and is raised
the vote             an answer that is lost leaves the rank IN_DOUBT: it asks until it learns
after COMMIT         install, check, report: a failure, here or on another rank, ends in QUARANTINED
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

from reshard.planner.errors import CoverageError
from reshard.refit.clock import StageClock
from reshard.refit.deadline import Deadline
from reshard.refit.errors import InDoubtError, QuarantinedError, RefitAborted, RefitTimeoutError
from reshard.refit.lease import LeaseKeeper
from reshard.refit.planning import Planned
from reshard.refit.records import DiscoveryRecord, StagesRecord, check_throughput, emit, implied_gbps
from reshard.refit.report import MemoryLedger, RefitReport, Verified
from reshard.refit.rescue import rescue
from reshard.refit.stages import RefitStage, StageMachine
from reshard.refit.verify import Verifier
from reshard.refit.waves import WireTotals, failed_peers
from reshard.rendezvous.errors import AbortedError, RendezvousError, RendezvousUnavailableError
from reshard.rendezvous.types import Decision, Facts, VersionKey
from reshard.transports.errors import TransportError

if TYPE_CHECKING:
    from reshard.refit.receiver import Receiver
    from reshard.rendezvous import Manifest

logger = logging.getLogger(__name__)

__all__ = ["Attempt"]

_PATIENCE = 0.8
"""Share of the call's time after which the service takes a missing vote for a no."""
_GOODBYE_S = 5.0
"""How long a failed refit may take to say no."""
_ASK_S = 2.0
"""How long one question for a lost decision may take."""


class Attempt:
    """State of one refit.

    Parameters
    ----------
    receiver
        Whose refit it is.
    clock, deadline
        Stage times; the one deadline.
    only
        Patterns of source names; empty takes all.
    sentinel
        Fill destinations before the read.
    """

    def __init__(
        self, receiver: Receiver, clock: StageClock, deadline: Deadline, only: Sequence[str], sentinel: bool
    ) -> None:
        self._receiver = receiver
        self._clock = clock
        self._deadline = deadline
        self._only = tuple(only)
        self._sentinel = sentinel
        self.machine = StageMachine()
        self._manifest: Manifest | None = None
        self._keeper: LeaseKeeper | None = None
        self._planned: Planned | None = None
        self._discovery: DiscoveryRecord | None = None
        self._totals = WireTotals()
        self._data_bytes = 0
        self._verified = Verified()
        self._cold = False
        self._without: frozenset[str] = frozenset()
        self._cause: TransportError | None = None
        self._before = receiver.reader.new_registrations

    # -- the whole way

    def run(self, version: Literal["latest"] | int | VersionKey, after: VersionKey | None) -> RefitReport:
        """Discover, read, agree, install."""
        try:
            manifest = self._discover(version, after)
            planned = self._obtain(manifest)
            self._release()
        except BaseException as error:
            self._say_no(error)
            raise
        self.machine.advance(RefitStage.PREPARED)
        facts = self._vote(manifest, planned)
        self._decided(manifest, planned, facts, self._deadline)
        return self._report(manifest, planned)

    def _obtain(self, manifest: Manifest) -> Planned:
        """Plan and read; holders that cannot be reached, or leave memory in doubt, are planned around."""
        r = self._receiver
        while True:
            try:
                planned = self._prepare(manifest)
                self._load(manifest, planned)
            except TransportError as error:
                bad = failed_peers(error) & {slot.slot for slot in manifest.slots}
                r.drop(bad)
                if not bad or bad <= self._without:
                    raise
                self._without |= bad
                self._cause = error
                logger.warning("member %s goes on without %s: %s", r.member, ", ".join(sorted(bad)), error)
            except CoverageError as error:
                if self._cause is not None:
                    raise self._cause from error
                raise
            else:
                return planned

    def settle(self, deadline: Deadline) -> None:
        """Learn what was decided while this rank was in doubt, and act on it."""
        manifest, planned = self._manifest, self._planned
        if manifest is None or planned is None:
            return
        facts = self._ask(manifest, deadline)
        try:
            if self.machine.stage is RefitStage.IN_DOUBT:
                self._decided(manifest, planned, facts, deadline)
            else:
                self._finish(manifest, facts)
        except (RefitAborted, QuarantinedError) as error:
            logger.warning("member %s: %s", self._receiver.member, error)

    # -- before the vote

    def _discover(self, version: Literal["latest"] | int | VersionKey, after: VersionKey | None) -> Manifest:
        r, clock = self._receiver, self._clock
        clock.enter("discover")

        def ask(left_s: float) -> Manifest:
            return r.rendezvous.await_version(
                r.model,
                group=r.group,
                members=r.members,
                member=r.member,
                worker=r.worker(),
                want=version,
                after=after,
                lease_ttl_s=r.lease_ttl_s,
                # Missing votes are decided by the service before this call gives up, so that waiting is not doubt.
                transaction_timeout_s=min(r.transaction_timeout_s, _PATIENCE * left_s),
                timeout_s=left_s,
            )

        try:
            manifest = r.retry.run(ask, RendezvousUnavailableError, self._deadline, "discover", share=False)
        except AbortedError as error:
            raise RefitAborted(f"the group does not take the version: {error}; the old weights serve") from error
        self._manifest = manifest
        self._keeper = LeaseKeeper(r.rendezvous, manifest.lease)
        return manifest

    def _prepare(self, manifest: Manifest) -> Planned:
        r, clock = self._receiver, self._clock
        planned, fresh = r.plan_for(manifest, self._only, clock, self._deadline, without=self._without)
        self._planned = planned
        clock.enter("certify")
        self._discovery = r.discovery(manifest, planned, fresh, clock.seconds.get("discover", 0.0))
        if fresh:
            r.adopt(planned)
        if self.machine.stage is RefitStage.CREATED:
            self.machine.advance(RefitStage.PREFLIGHTED)
        clock.enter("connect")
        records = [manifest.slot(h.name) for h in planned.plan.holders]
        dialled = r.reader.links.ensure(records, self._deadline)
        clock.enter("allocate")
        r.reader.allocate()
        self._cold |= fresh or bool(dialled) or r.reader.new_registrations != self._before
        return planned

    def _load(self, manifest: Manifest, planned: Planned) -> None:
        r, clock = self._receiver, self._clock
        shadow = r.reader.shadow()
        bound = r.reader.bind(manifest)
        clock.enter("read")
        if not self._sentinel:
            r.seed(planned, shadow)
        version = manifest.version
        verifier = Verifier(r.checks, r.verify, (version.epoch, version.step)) if r.checks is not None else None
        self._totals = r.reader.read(
            bound,
            manifest,
            self._deadline,
            verifier=verifier,
            sentinel=self._sentinel,
            may_lose=len(planned.plan.holders) > 1,
            stall_s=r.stall_s,
        )
        self._data_bytes = max(self._totals.nbytes - r.reader.meta_bytes(self._totals.lost), 0)
        rescued: tuple[Verifier, ...] = ()
        if self._totals.lost:
            rescued = self._rescue(manifest, planned, self._totals.lost)
        if self._keeper is not None:
            self._keeper.check(manifest.version)
        check_throughput(
            self._data_bytes,
            self._totals.seconds,
            {"rank": r.rank, "member": r.member, "step": manifest.version.step, "epoch": manifest.version.epoch},
        )
        clock.enter("verify")
        self._verify(verifier, rescued)
        if planned.captured.materialised:
            clock.enter("load")
            r.run_loader(planned, shadow)
        self.machine.advance(RefitStage.LOADED)

    def _rescue(self, manifest: Manifest, planned: Planned, lost: Mapping[str, TransportError]) -> tuple[Verifier, ...]:
        """Read from replicas what lost holders owed; the first loss is raised where nobody else has it."""
        r = self._receiver
        names = frozenset(lost)
        cause = next(iter(lost.values()))
        logger.warning(
            "member %s lost %s in a read and turns to replicas: %s", r.member, ", ".join(sorted(names)), cause
        )
        buffers = dict(zip(planned.plan.buffers.names_list, r.reader.buffers(), strict=True))
        try:
            found = rescue(
                r.transport,
                r.reader,
                planned.plan,
                manifest,
                names | self._without,
                self._deadline,
                verify=r.verify,
                buffers=buffers,
                stall_s=r.stall_s,
                on_allocate=r.on_allocate,
            )
        except CoverageError as error:
            raise cause from error
        finally:
            r.reader.links.release(names)
        self._without |= found.lost
        self._totals.add(found.totals)
        self._data_bytes += found.totals.nbytes
        return found.verifiers

    def _verify(self, verifier: Verifier | None, rescued: Sequence[Verifier]) -> None:
        r = self._receiver
        received = self._data_bytes
        self._verified = Verified(r.verify, received_bytes=received)
        if verifier is None or r.checks is None:
            return
        since = time.perf_counter()
        verifier.check_wave(-1, r.reader.staging, r.reader.buffers(), lost=frozenset(self._totals.lost))
        verified = sum(v.verified_bytes for v in (verifier, *rescued))
        if r.require_verified and (verified < received or r.checks.partial):
            verifier.require_all(received)
        self._verified = Verified(
            r.verify,
            verified,
            received,
            sum(v.n_cells for v in (verifier, *rescued)),
            len(r.checks.partial),
            time.perf_counter() - since + verifier.staged_seconds,
        )

    def _release(self) -> None:
        self._clock.enter("release")
        if self._keeper is not None:
            self._keeper.release()

    def _say_no(self, error: BaseException) -> None:
        """Leave nothing behind: lease, broken peers, poisoned memory; and let the group abort."""
        r = self._receiver
        self._clock.stop()
        self.machine.fail()
        if isinstance(error, TransportError):
            r.drop(failed_peers(error))
        if self._keeper is not None:
            self._keeper.release()
        manifest = self._manifest
        if manifest is not None:
            reason = f"{type(error).__name__}: {error}"[:1000].replace("\0", " ")
            try:
                r.rendezvous.vote(
                    manifest.transaction,
                    r.member,
                    False,
                    reason=reason,
                    timeout_s=min(_GOODBYE_S, max(self._deadline.left_s, 1.0)),
                )
            except RendezvousError as other:
                logger.warning("member %s could not say no to %s: %s", r.member, manifest.version, other)
        self._emit_stages("aborted")

    # -- the vote

    def _vote(self, manifest: Manifest, planned: Planned) -> Facts:
        r = self._receiver
        self._clock.enter("vote")
        try:
            return r.rendezvous.vote(
                manifest.transaction,
                r.member,
                True,
                plan_digest=planned.plan.digest,
                names_consumed=planned.consumed,
                wire_bytes=self._data_bytes,
                allow_unconsumed=r.allow_unconsumed,
                timeout_s=self._deadline.remaining("vote"),
            )
        except (RendezvousError, RefitTimeoutError) as error:
            self.machine.advance(RefitStage.IN_DOUBT)
            r.set_state("in_doubt", None)
            logger.warning("member %s voted yes on %s and lost the answer: %s", r.member, manifest.version, error)
            try:
                return self._ask(manifest, self._deadline)
            except InDoubtError as doubt:
                self._emit_stages("in_doubt")
                raise doubt from error

    def _ask(self, manifest: Manifest, deadline: Deadline) -> Facts:
        """Ask until the first fact (or, after an install, the second) is known."""
        r = self._receiver
        last: RendezvousError | None = None
        mutated = self.machine.mutated
        wait_s = 0.0  # only a fact that is known to be open is waited for
        while deadline.left_s > 0:
            try:
                facts = r.rendezvous.ask_decision(manifest.transaction, wait_s=wait_s, timeout_s=wait_s + _ASK_S)
            except RendezvousError as error:
                last = error
                r.pause(min(0.1, max(deadline.left_s, 0.0)))
                continue
            if (facts.outcome if mutated else facts.decision) is not Decision.PENDING:
                return facts
            wait_s = min(_ASK_S, max(deadline.left_s, 1e-3))
        raise InDoubtError(
            f"member {r.member!r} voted yes on {manifest.version} and could not learn the decision within "
            f"{deadline.timeout_s:g} s; it serves nothing new until Receiver.resolve does"
        ) from last

    # -- after it

    def _decided(self, manifest: Manifest, planned: Planned, facts: Facts, deadline: Deadline) -> None:
        r = self._receiver
        if facts.decision is Decision.ABORT:
            self.machine.fail()
            r.restore_state()
            self._emit_stages("aborted")
            reason = facts.reason or "no reason given"
            raise RefitAborted(
                f"the group did not take {manifest.version}: {reason}; the old weights serve",
                failures={"group": reason},
            )
        if facts.decision is not Decision.COMMIT:
            self._quarantine(f"the decision on {manifest.version} is {facts.decision.name}")
        self.machine.advance(RefitStage.MUTATING)
        r.set_state("changing", None)
        try:
            self._clock.enter("install")
            r.install(planned)
            self._clock.enter("check")
            self.machine.advance(RefitStage.VERIFIED)
        except BaseException as error:
            self.machine.fail()
            r.set_state("quarantined", None)
            self._tell_installed(manifest, f"{type(error).__name__}: {error}", deadline)
            self._emit_stages("quarantined")
            if isinstance(error, Exception):
                raise QuarantinedError(
                    f"member {r.member!r} failed while installing {manifest.version}: {type(error).__name__}: {error}; "
                    "it serves nothing until a refit completes"
                ) from error
            raise
        self._clock.enter("serve")
        outcome = self._tell_installed(manifest, "", deadline)
        if outcome is None:
            r.set_state("in_doubt", None)
            outcome = self._ask(manifest, deadline)
        self._finish(manifest, outcome)

    def _finish(self, manifest: Manifest, facts: Facts) -> None:
        r = self._receiver
        if facts.outcome is Decision.SERVE:
            self.machine.advance(RefitStage.PUBLISHED)
            r.set_state("serving", manifest.version)
            self._emit_stages("served")
            return
        why = facts.reason or f"the outcome is {facts.outcome.name}"
        self._quarantine(f"the group did not finish installing {manifest.version}: {why}")

    def _quarantine(self, why: str) -> NoReturn:
        r = self._receiver
        if self.machine.stage is not RefitStage.ABORTING:
            self.machine.advance(RefitStage.ABORTING)
        self.machine.advance(RefitStage.QUARANTINED)
        r.set_state("quarantined", None)
        self._emit_stages("quarantined")
        raise QuarantinedError(f"{why}; member {r.member!r} serves nothing until a refit completes")

    def _tell_installed(self, manifest: Manifest, failure: str, deadline: Deadline) -> Facts | None:
        """Report the install (``failure`` is empty where it went well); None where no answer came."""
        r = self._receiver
        left = max(deadline.left_s, _GOODBYE_S)
        try:
            return r.rendezvous.installed(
                manifest.transaction, r.member, not failure, reason=failure[:1000], timeout_s=left
            )
        except RendezvousError as error:
            logger.warning("member %s could not report its install of %s: %s", r.member, manifest.version, error)
            return None

    # -- what it was

    def _report(self, manifest: Manifest, planned: Planned) -> RefitReport:
        r = self._receiver
        discovery = self._discovery
        if discovery is None:
            raise RefitTimeoutError("no discovery")
        plan = planned.plan
        return RefitReport(
            version=manifest.version,
            member=r.member,
            cold=self._cold,
            mode="shadow",
            certificate=plan.certificate,
            coverage=planned.coverage,
            discovery=discovery,
            stages=dict(self._clock.stop()),
            useful_bytes=plan.economics.useful_bytes,
            wire_bytes=self._data_bytes,
            wire_s=self._totals.seconds,
            n_descriptors=self._totals.n_descriptors,
            verified=self._verified,
            ledger=self._ledger(planned),
            new_registrations=r.reader.new_registrations - self._before,
            failovers=tuple(sorted(self._without)),
            plan_digest=plan.digest,
        )

    def _ledger(self, planned: Planned) -> MemoryLedger:
        plan = planned.plan
        total = int(plan.buffer_bytes.sum())
        return MemoryLedger(
            planned.coverage.engine_bytes,
            total - planned.materialised_bytes,
            plan.staging_bytes,
            planned.materialised_bytes,
        )

    def _emit_stages(self, outcome: str) -> None:
        r, manifest, planned = self._receiver, self._manifest, self._planned
        if manifest is None:
            return
        seconds = {k: round(v, 6) for k, v in self._clock.stop().items()}
        rate = implied_gbps(self._totals.nbytes, self._totals.seconds)
        emit(
            StagesRecord(
                rank=r.rank,
                member=r.member,
                model=r.model,
                epoch=manifest.version.epoch,
                step=manifest.version.step,
                mode="shadow",
                cold=self._cold,
                outcome=outcome,
                stages_s=seconds,
                total_s=round(sum(seconds.values()), 6),
                useful_bytes=planned.plan.economics.useful_bytes if planned is not None else 0,
                wire_bytes=self._data_bytes,
                verified_bytes=self._verified.verified_bytes,
                received_bytes=self._verified.received_bytes,
                descriptors=self._totals.n_descriptors,
                wire_s=round(self._totals.seconds, 6),
                implied_gbps=round(min(rate, 1e308), 3),
                new_registrations=r.reader.new_registrations - self._before,
                failovers=len(self._without),
            ),
            logging.INFO if outcome == "served" else logging.WARNING,
        )
