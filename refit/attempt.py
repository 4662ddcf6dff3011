"""One refit of one rank, from the awaited version to the group's second decision.

    before the vote   discover, plan, read, verify: a failure votes no, releases lease and broken peers, and is raised
    the vote          an answer that is lost leaves the rank IN_DOUBT: it asks until it learns
    after COMMIT      install, check, report: a failure, here or on another rank, ends in QUARANTINED

In ``stream`` mode nothing is read before the vote: yes means planned, connected and paused, and each part is read,
verified and written into the live weights after COMMIT, under the same lease.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

from reshard.planner.errors import CoverageError, PlanError
from reshard.refit.account import Account
from reshard.refit.agreement import Agreement
from reshard.refit.clock import StageClock
from reshard.refit.deadline import Deadline
from reshard.refit.errors import (
    HolderLostError,
    QuarantinedError,
    RefitAborted,
    RefitError,
    RefitTimeoutError,
    TornReadError,
)
from reshard.refit.lease import LeaseKeeper
from reshard.refit.loading import Loaded, Reading, read_plan
from reshard.refit.planning import Planned
from reshard.refit.report import RefitReport
from reshard.refit.sentinel import fill_sentinel
from reshard.refit.stages import RefitStage, StageMachine
from reshard.refit.waves import failed_peers
from reshard.rendezvous.errors import AbortedError, RendezvousError, RendezvousUnavailableError
from reshard.rendezvous.types import Decision, Facts, VersionKey
from reshard.transports.errors import TransportError

if TYPE_CHECKING:
    from reshard.refit.receiver import Receiver
    from reshard.refit.streaming import StreamPart
    from reshard.rendezvous import Manifest

logger = logging.getLogger(__name__)

__all__ = ["Attempt"]

_PATIENCE = 0.8
"""Share of the call's time after which the service takes a missing vote for a no."""


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
        self._account = Account(receiver, clock)
        self._deadline = deadline
        self._only = tuple(only)
        self._sentinel = sentinel
        self.machine = StageMachine()
        self._manifest: Manifest | None = None
        self._keeper: LeaseKeeper | None = None
        self._planned: Planned | None = None
        self._cause: TransportError | None = None

    # -- the whole way

    def run(self, version: Literal["latest"] | int | VersionKey, after: VersionKey | None) -> RefitReport:
        """Discover, read, agree, install."""
        r = self._receiver
        try:
            manifest = self._discover(version, after)
            planned = self._obtain(manifest)
            if r.install_mode == "shadow":
                self._release()
            self._account.clock.enter("vote")
        except BaseException as error:
            self._say_no(error)
            raise
        self.machine.advance(RefitStage.PREPARED)
        facts = self._vote(manifest, planned)
        self._decided(manifest, planned, facts, self._deadline)
        return self._account.report(manifest, planned)

    def settle(self, deadline: Deadline) -> None:
        """Learn what was decided while this rank was in doubt, and act on it."""
        manifest, planned = self._manifest, self._planned
        if manifest is None or planned is None or self.machine.terminal:
            return
        facts = self._agreement(manifest).ask(deadline, outcome=self.machine.mutated)
        try:
            if self.machine.mutated:
                self._finish(manifest, facts)
            else:
                self._decided(manifest, planned, facts, deadline)
        except (RefitAborted, QuarantinedError) as error:
            logger.warning("member %s: %s", self._receiver.member, error)

    @property
    def in_doubt(self) -> bool:
        """Whether it has voted yes and has not ended."""
        voted = (RefitStage.PREPARED, RefitStage.IN_DOUBT, RefitStage.MUTATING, RefitStage.VERIFIED)
        return self.machine.stage in voted

    # -- before the vote

    def _discover(self, version: Literal["latest"] | int | VersionKey, after: VersionKey | None) -> Manifest:
        r, clock = self._receiver, self._account.clock
        clock.enter("discover")

        def ask(left_s: float) -> Manifest:
            worker = r.worker(left_s)
            left_s = min(left_s, self._deadline.remaining("discover"))
            return r.rendezvous.await_version(
                r.model,
                group=_party(r.group, self._only),
                members=r.members,
                member=r.member,
                worker=worker,
                want=version,
                after=after,
                lease_ttl_s=r.lease_ttl_s,
                # Missing votes are decided by the service before this call gives up, so that waiting is not doubt.
                transaction_timeout_s=min(r.transaction_timeout_s, _PATIENCE * left_s),
                timeout_s=left_s,
            )

        # First, so that a policy that the service suggests is that of this very call.
        r.retry.run(r.worker, RendezvousUnavailableError, self._deadline, "register", share=False)
        try:
            manifest = r.retry.run(ask, RendezvousUnavailableError, self._deadline, "discover", share=False)
        except AbortedError as error:
            raise RefitAborted(f"the group does not take the version: {error}; the old weights serve") from error
        self._manifest = manifest
        self._keeper = LeaseKeeper(r.rendezvous, manifest.lease)
        if r.lease == "none":
            self._keeper.release(self._deadline.left_s)
            self._keeper = None
        return manifest

    def _obtain(self, manifest: Manifest) -> Planned:
        """Plan and read; holders that cannot be reached, or leave memory in doubt, are planned around."""
        r = self._receiver
        r.bench.drop(frozenset(), self._deadline.left_s)
        while True:
            try:
                planned = self._prepare(manifest)
                if r.install_mode == "shadow":
                    self._load(manifest, planned)
                else:
                    r.bench.require_trusted(planned, quarantined=r.state == "quarantined")
                    r.bench.probe_parts(manifest, self._deadline, batched=self._batched, stall_s=r.stall_s)
                    r.bench.pause_engine()
            except TransportError as error:
                self._go_without(manifest, error)
            except (CoverageError, PlanError) as gap:
                if self._cause is None:
                    raise
                raise HolderLostError(self._account.without, self._cause, gap) from self._cause
            else:
                self.machine.advance(RefitStage.LOADED)
                return planned

    def _go_without(self, manifest: Manifest, error: TransportError) -> None:
        """Leave the holders that ``error`` blames, with nothing behind on them; raise it where it blames no new one."""
        r = self._receiver
        bad = failed_peers(error) & {slot.slot for slot in manifest.slots}
        r.bench.drop(bad, self._deadline.left_s)
        if not bad or bad <= self._account.without:
            raise error
        self._account.without |= bad
        self._cause = error
        logger.warning("member %s goes on without %s: %s", r.member, ", ".join(sorted(bad)), error)

    def _prepare(self, manifest: Manifest) -> Planned:
        r, clock = self._receiver, self._account.clock
        planned, fresh = r.bench.plan_for(manifest, self._only, clock, self._deadline, without=self._account.without)
        self._planned = planned
        clock.enter("certify")
        self._account.discovery = r.bench.discovery(manifest, planned, fresh, clock.seconds.get("discover", 0.0))
        if fresh:
            r.bench.adopt(planned)
        if self.machine.stage is RefitStage.CREATED:
            self.machine.advance(RefitStage.PREFLIGHTED)
        clock.enter("connect")
        by_slot = {slot.slot: slot for slot in manifest.slots}
        records = [by_slot[h.name] for h in planned.plan.holders]
        dialled = r.reader.links.ensure(records, self._deadline)
        clock.enter("allocate")
        r.bench.allocate()
        self._account.cold |= fresh or bool(dialled) or self._account.new_registrations > 0
        return planned

    def _reading(self, manifest: Manifest) -> Reading:
        r, version = self._receiver, manifest.version
        context: dict[str, str | int] = {
            "rank": r.rank,
            "member": r.member,
            "step": version.step,
            "epoch": version.epoch,
        }
        return Reading(
            r.transport, r.verify, r.require_verified, r.stall_s, self._sentinel, context, r.reader.on_allocate
        )

    def _check_lease(self) -> None:
        """After the last read: a lease that ended meanwhile matters where no header says what became of the memory."""
        if self._keeper is None or self._manifest is None:
            return
        ended = self._keeper.held(self._deadline)
        if not ended:
            return
        version = self._manifest.version
        bare = [s.slot for s in self._manifest.slots if s.header_region < 0 and not s.empty]
        if bare:
            raise TornReadError(
                f"the lease on {version}: {ended}; holder {bare[0]!r} has no header that would say whether it has "
                "written its memory since"
            )
        logger.warning(
            "member %s: the lease on %s: %s; no holder has written its memory since, so what was read is good",
            self._receiver.member,
            version,
            ended,
        )

    def _load(self, manifest: Manifest, planned: Planned) -> None:
        r = self._receiver
        shadow = r.reader.shadow()
        r.bench.about_to_overwrite(shadow, self._deadline)
        if self._sentinel:
            fill_sentinel(r.reader.device, shadow.buffers)
        r.bench.seed(planned, shadow.buffers, quarantined=r.state == "quarantined")
        self._account.loaded = read_plan(
            self._reading(manifest),
            r.reader,
            planned.plan,
            r.bench.checks,
            manifest,
            self._deadline,
            without=self._account.without,
            seeded=planned.seeded,
            enter=self._account.clock.enter,
            check_lease=self._check_lease,
        )
        self._account.without |= self._account.loaded.lost
        if planned.captured.materialised:
            self._account.clock.enter("load")
            r.bench.run_loader(planned, shadow.buffers)

    def _release(self) -> None:
        self._account.clock.enter("release")
        if self._receiver.one_shot:
            self._receiver.reader.links.close()
        if self._keeper is not None:
            self._keeper.release(self._deadline.left_s)

    def _say_no(self, error: BaseException) -> None:
        """Leave nothing behind: broken peers, poisoned memory, lease; and let the group abort."""
        self._account.clock.stop()
        self.machine.fail()
        self._let_go(error)
        self._quietly(self._resume)
        if self._manifest is not None:
            self._agreement(self._manifest).no(error, self._deadline.left_s)
        self._account.emit(self._manifest, self._planned, "aborted")

    def _let_go(self, error: BaseException) -> None:
        """Release what a failure must not keep, one step after the other even if one of them fails too."""
        r = self._receiver
        bad: frozenset[str] = frozenset()
        if isinstance(error, TransportError):
            bad = failed_peers(error)
        elif isinstance(error, HolderLostError):
            bad = frozenset(error.holders)
        # Whatever the error was: reads that were in flight then may have been abandoned.
        self._quietly(lambda: r.bench.drop(bad, self._deadline.left_s))
        if r.one_shot:
            self._quietly(r.reader.links.close)
        self.abandon()

    def abandon(self) -> None:
        """Release the lease, if it is still held."""
        if self._keeper is not None:
            keeper = self._keeper
            self._quietly(lambda: keeper.release(self._deadline.left_s))

    def _resume(self) -> None:
        """Let the engine serve again, unless its weights are not to be trusted."""
        if self._receiver.state in ("empty", "serving"):
            self._receiver.bench.resume_engine()

    def _quietly(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # the first error is the one that the caller gets
            logger.exception("member %s: cleaning up after a failed refit", self._receiver.member)

    # -- the vote

    def _agreement(self, manifest: Manifest) -> Agreement:
        return Agreement(self._receiver.rendezvous, manifest, self._receiver.member)

    def _vote(self, manifest: Manifest, planned: Planned) -> Facts:
        r = self._receiver
        streamed = r.install_mode == "stream"
        try:
            return self._agreement(manifest).yes(
                plan_digest=planned.plan.digest,
                consumed=planned.consumed,
                allow_unconsumed=r.allow_unconsumed,
                wire_bytes=planned.plan.economics.wire_bytes if streamed else self._account.loaded.data_bytes,
                timeout_s=self._deadline.remaining("vote"),
            )
        except BaseException as error:
            self.machine.advance(RefitStage.IN_DOUBT)
            r.set_state("in_doubt", None)
            if not isinstance(error, RendezvousError | RefitTimeoutError):
                raise
            logger.warning("member %s voted yes on %s and lost the answer: %s", r.member, manifest.version, error)
            try:
                return self._agreement(manifest).ask(self._deadline, outcome=False)
            except RefitError:
                self._account.emit(self._manifest, self._planned, "in_doubt")
                raise

    # -- after it

    def _decided(self, manifest: Manifest, planned: Planned, facts: Facts, deadline: Deadline) -> None:
        r = self._receiver
        if facts.decision is Decision.ABORT:
            self.machine.fail()
            self._release()
            r.restore_state()
            self._resume()
            self._account.emit(self._manifest, self._planned, "aborted")
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
            self._account.clock.enter("install")
            if r.install_mode == "shadow":
                r.bench.install(again=not r.one_shot)
            else:
                self._stream(manifest, planned, deadline)
            self._account.clock.enter("check")
            r.bench.check_installed()
            self.machine.advance(RefitStage.VERIFIED)
        except BaseException as error:
            self._failed_install(manifest, error, deadline)
            raise
        self._account.clock.enter("serve")
        outcome = self._agreement(manifest).installed(None, deadline.left_s)
        if outcome is None:
            r.set_state("in_doubt", None)
            outcome = self._agreement(manifest).ask(deadline, outcome=True)
        self._finish(manifest, outcome)

    def _stream(self, manifest: Manifest, planned: Planned, deadline: Deadline) -> None:
        """Read, verify and write part after part, under the lease."""
        r = self._receiver
        for part in r.bench.stream_parts():
            if self._sentinel:
                fill_sentinel(r.reader.device, part.buffers)
            part.seed(r.bench.stream_engine())
            loaded = self._read_part(manifest, planned, part, deadline)
            self._account.without |= loaded.lost
            self._account.loaded.add(loaded)
            self._account.clock.enter("install")
            part.write(r.bench.stream_engine())
        self._release()

    def _read_part(self, manifest: Manifest, planned: Planned, part: StreamPart, deadline: Deadline) -> Loaded:
        """Read one part, from replicas where its holders fail; nothing live is touched by it."""
        r = self._receiver
        while True:
            try:
                part = r.bench.part_without(part, self._account.without, manifest, deadline)
                return read_plan(
                    self._reading(manifest),
                    part.reader,
                    part.plan,
                    part.checks,
                    manifest,
                    deadline,
                    without=self._account.without,
                    seeded=planned.seeded,
                    enter=self._account.clock.enter,
                    check_lease=self._check_lease,
                )
            except TransportError as error:
                self._go_without(manifest, error)
            except (CoverageError, PlanError) as gap:
                if self._cause is None:
                    raise
                raise HolderLostError(self._account.without, self._cause, gap) from self._cause

    @property
    def _batched(self) -> bool:
        """Whether cells are verified while more is read, as `read_plan` decides it."""
        return self._receiver.verify != "off" and not self._sentinel

    def _failed_install(self, manifest: Manifest, error: BaseException, deadline: Deadline) -> None:
        """Say that it failed, and serve nothing."""
        r = self._receiver
        self.machine.fail()
        r.set_state("quarantined", None)
        self._let_go(error)
        self._agreement(manifest).installed(error, deadline.left_s)
        self._account.emit(self._manifest, self._planned, "quarantined")
        if isinstance(error, Exception):
            raise QuarantinedError(
                f"member {r.member!r} failed while installing {manifest.version}: {type(error).__name__}: {error}; "
                "it serves nothing until a refit completes"
            ) from error

    def _finish(self, manifest: Manifest, facts: Facts) -> None:
        r = self._receiver
        if facts.outcome is Decision.SERVE:
            self.machine.advance(RefitStage.PUBLISHED)
            r.bench.resume_engine()
            r.set_state("serving", manifest.version)
            self._account.emit(self._manifest, self._planned, "served")
            return
        why = facts.reason or f"the outcome is {facts.outcome.name}"
        self._quarantine(f"the group did not finish installing {manifest.version}: {why}")

    def _quarantine(self, why: str) -> NoReturn:
        r = self._receiver
        if self._keeper is not None:
            self._keeper.release(self._deadline.left_s)
        if self.machine.stage is not RefitStage.ABORTING:
            self.machine.advance(RefitStage.ABORTING)
        self.machine.advance(RefitStage.QUARANTINED)
        r.set_state("quarantined", None)
        self._account.emit(self._manifest, self._planned, "quarantined")
        raise QuarantinedError(f"{why}; member {r.member!r} serves nothing until a refit completes")


def _party(group: str, only: Sequence[str]) -> str:
    """Who decides together: the members of a group that take the same selection.

    Members that were given different selections never meet, so that their transactions end in ABORT for want of votes;
    if they met, they would say that they serve one version and hold parts of two.
    """
    return f"{group} only {hashlib.sha256(repr(sorted(only)).encode()).hexdigest()[:16]}" if only else group
