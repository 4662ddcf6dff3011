"""One refit of one rank, from the awaited version to the group's second decision.

    before the vote   discover, plan, read, verify: a failure votes no, releases lease and broken peers, and is raised
    the vote          an answer that is lost leaves the rank IN_DOUBT: it asks until it learns
    after COMMIT      install, check, report: a failure, here or on another rank, ends in QUARANTINED

In ``stream`` mode nothing is read before the vote: yes means planned, connected and paused, and each section is read,
verified and written into the live weights after COMMIT, under the same lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

from reshard.refit.account import Account
from reshard.refit.acquisition import Acquisition
from reshard.refit.agreement import Agreement
from reshard.refit.clock import StageClock
from reshard.refit.deadline import Deadline
from reshard.refit.discovery import Discovery, discover, withdraw
from reshard.refit.errors import HolderLostError, QuarantinedError, RefitAborted, RefitError
from reshard.refit.planning import Planned
from reshard.refit.report import RefitReport
from reshard.refit.stages import RefitStage, StageMachine
from reshard.refit.waves import failed_peers
from reshard.rendezvous.errors import InvalidRequestError, RendezvousError
from reshard.rendezvous.types import Decision, Facts, VersionKey
from reshard.transports.errors import TransportError

if TYPE_CHECKING:
    from reshard.refit.receiver import Receiver

logger = logging.getLogger(__name__)

__all__ = ["Attempt"]


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
        self._found: Discovery | None = None
        self._getting: Acquisition | None = None

    # -- the whole way

    def run(self, version: Literal["latest"] | int | VersionKey, after: VersionKey | None) -> RefitReport:
        """Discover, read, agree, install."""
        r = self._receiver
        try:
            self._account.clock.enter("discover")
            found = self._found = discover(r, version, after, self._only, self._deadline)
            found.keep(self._deadline)
            getting = self._getting = Acquisition(r, found, self._account, self.machine, self._only, self._sentinel)
            planned = getting.obtain(self._deadline)
            if r.install_mode == "shadow":
                self._release()  # its answer is waited for together with the votes
            self._account.clock.enter("vote")
            left_s = self._deadline.remaining("vote")
        except BaseException as error:
            self._say_no(error)
            raise
        self.machine.advance(RefitStage.PREPARED)
        try:
            facts = self._vote(found, planned, left_s)
        finally:
            if r.install_mode == "shadow":
                found.release(self._deadline.left_s)
        self._decided(found, getting, planned, facts)
        return self._account.report(found.manifest, planned)

    def settle(self, deadline: Deadline) -> None:
        """Learn what was decided while this rank was in doubt, and act on it."""
        found, getting = self._found, self._getting
        if found is None or getting is None or getting.planned is None or self.machine.terminal:
            return
        self._deadline = deadline
        facts = self._agreement(found).ask(deadline, outcome=self.machine.mutated)
        try:
            if self.machine.mutated:
                self._finish(found, facts)
            else:
                self._decided(found, getting, getting.planned, facts)
        except (RefitAborted, QuarantinedError) as error:
            logger.warning("member %s: %s", self._receiver.member, error)

    @property
    def in_doubt(self) -> bool:
        """Whether it has voted yes and has not ended."""
        voted = (RefitStage.PREPARED, RefitStage.IN_DOUBT, RefitStage.MUTATING, RefitStage.VERIFIED)
        return self.machine.stage in voted

    # -- before the vote

    def _release(self) -> None:
        self._account.clock.enter("release")
        if self._receiver.one_shot:
            self._receiver.reader.links.close()
        if self._found is not None:
            self._found.begin_release(self._deadline.left_s)

    def _say_no(self, error: BaseException) -> None:
        """Leave nothing behind: broken peers, poisoned memory, lease; and let the group abort."""
        self._account.clock.stop()
        self.machine.fail()
        self._let_go(error)
        self._quietly(self._resume)
        if self._found is not None:
            self._agreement(self._found).no(error, self._deadline.left_s)
        elif not isinstance(error, Exception):  # an interrupt: the service may have let this rank join all the same
            self._quietly(lambda: withdraw(self._receiver, self._only, error, self._deadline.left_s))
        self._emit("aborted")

    def _let_go(self, error: BaseException) -> None:
        """Release what a failure must not keep, one step after the other even if one of them fails too."""
        r = self._receiver
        bad: frozenset[str] = frozenset()
        if isinstance(error, TransportError):
            bad = failed_peers(error)
        elif isinstance(error, HolderLostError):
            bad = frozenset(error.holders)
        if not isinstance(error, Exception):
            # An interrupt may have come just as a read was posted, before anybody knew of it; with its list it ends.
            self._quietly(r.bench.forget_lists)
        # Whatever the error was: reads that were in flight then may have been abandoned.
        self._quietly(lambda: r.bench.drop(bad, self._deadline.left_s))
        if r.one_shot:
            self._quietly(r.reader.links.close)
        self.abandon()

    def abandon(self) -> None:
        """Release the lease, if it is still held."""
        if self._found is not None:
            found = self._found
            self._quietly(lambda: found.release(self._deadline.left_s))

    def _resume(self) -> None:
        """Let the engine serve again, unless its weights are not to be trusted."""
        if self._receiver.state in ("empty", "serving"):
            self._receiver.bench.resume_engine()

    def _quietly(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # the first error is the one that the caller gets
            logger.exception("member %s: cleaning up after a failed refit", self._receiver.member)

    def _emit(self, outcome: str) -> None:
        """The record of stages."""
        manifest = self._found.manifest if self._found is not None else None
        self._account.emit(manifest, self._getting.planned if self._getting is not None else None, outcome)

    # -- the vote

    def _agreement(self, found: Discovery) -> Agreement:
        return Agreement(self._receiver.rendezvous, found.manifest, self._receiver.member)

    def _vote(self, found: Discovery, planned: Planned, left_s: float) -> Facts:
        r = self._receiver
        streamed = r.install_mode == "stream"
        try:
            return self._agreement(found).yes(
                plan_digest=planned.plan.digest,
                consumed=planned.consumed,
                allow_unconsumed=r.allow_unconsumed,
                wire_bytes=planned.plan.economics.wire_bytes if streamed else self._account.loaded.received_bytes,
                timeout_s=left_s,
            )
        except InvalidRequestError as error:  # it was refused and not counted: nobody takes it for a yes
            self._say_no(error)
            raise
        except BaseException as error:
            self.machine.advance(RefitStage.IN_DOUBT)
            r.standing.change("in_doubt")
            if not isinstance(error, RendezvousError):
                raise
            logger.warning("member %s voted yes on %s and lost the answer: %s", r.member, found.manifest.version, error)
            try:
                return self._agreement(found).ask(self._deadline, outcome=False)
            except RefitError:
                self._emit("in_doubt")
                raise

    # -- after it

    def _decided(self, found: Discovery, getting: Acquisition, planned: Planned, facts: Facts) -> None:
        r, version = self._receiver, found.manifest.version
        if facts.decision is Decision.ABORT:
            self.machine.fail()
            self._release()
            found.release(self._deadline.left_s)
            r.standing.restore()
            self._resume()
            self._emit("aborted")
            reason = facts.reason or "no reason given"
            raise RefitAborted(
                f"the group did not take {version}: {reason}; the old weights serve", failures={"group": reason}
            )
        if facts.decision is not Decision.COMMIT:
            self._quarantine(f"the decision on {version} is {facts.decision.name}")
        self.machine.advance(RefitStage.MUTATING)
        r.standing.change("changing")
        try:
            self._account.clock.enter("install")
            if r.install_mode == "shadow":
                r.bench.install(found.manifest, again=not r.one_shot)
            else:
                self._stream(found, getting, planned)
            self._account.clock.enter("check")
            r.bench.check_installed()
            self.machine.advance(RefitStage.VERIFIED)
        except BaseException as error:
            self._failed_install(found, error)
            raise
        self._account.clock.enter("serve")
        try:
            outcome = self._agreement(found).installed(None, self._deadline.left_s)
        except BaseException:
            r.standing.change("in_doubt")
            raise
        if outcome is None:
            r.standing.change("in_doubt")
            outcome = self._agreement(found).ask(self._deadline, outcome=True)
        self._finish(found, outcome)

    def _stream(self, found: Discovery, getting: Acquisition, planned: Planned) -> None:
        """Read, verify and write section after section, under the lease."""
        r = self._receiver
        for section in r.bench.stream_sections():
            read = getting.read_section(section, planned.seeded, self._deadline)
            self._account.clock.enter("install")
            read.write(r.bench.stream_engine())
        self._release()
        found.release(self._deadline.left_s)

    def _failed_install(self, found: Discovery, error: BaseException) -> None:
        """Say that it failed, and serve nothing."""
        r = self._receiver
        self.machine.fail()
        r.standing.change("quarantined")
        self._let_go(error)
        self._agreement(found).installed(error, self._deadline.left_s)
        self._emit("quarantined")
        if isinstance(error, Exception):
            raise QuarantinedError(
                f"member {r.member!r} failed while installing {found.manifest.version}: {type(error).__name__}: "
                f"{error}; it serves nothing until a refit completes"
            ) from error

    def _finish(self, found: Discovery, facts: Facts) -> None:
        r, version = self._receiver, found.manifest.version
        if facts.outcome is Decision.SERVE:
            self.machine.advance(RefitStage.PUBLISHED)
            r.bench.resume_engine()
            r.standing.change("serving", version)
            self._emit("served")
            return
        why = facts.reason or f"the outcome is {facts.outcome.name}"
        self._quarantine(f"the group did not finish installing {version}: {why}")

    def _quarantine(self, why: str) -> NoReturn:
        r = self._receiver
        if self._found is not None:
            self._found.release(self._deadline.left_s)
        if self.machine.stage is not RefitStage.ABORTING:
            self.machine.advance(RefitStage.ABORTING)
        self.machine.advance(RefitStage.QUARANTINED)
        r.standing.change("quarantined")
        self._emit("quarantined")
        raise QuarantinedError(f"{why}; member {r.member!r} serves nothing until a refit completes")
