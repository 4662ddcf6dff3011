"""How does a rank come to have a version's bytes, proved and ready, without touching what it serves?

1. `Acquisition.obtain`, before the vote: plan, connect and allocate what is not there yet. In ``shadow`` mode then
   read and verify everything, and run the loader on what it computes with; in ``stream`` mode read the holders'
   headers and pause the engine.
2. `Acquisition.read_section`, in ``stream`` mode and after COMMIT: read and verify one section.

Holders that fail on the way are gone without (`reshard.refit.detour`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.refit.account import Account
from reshard.refit.deadline import Deadline
from reshard.refit.detour import Detour
from reshard.refit.discovery import Discovery
from reshard.refit.errors import UnverifiedError
from reshard.refit.loading import Reading, read_plan
from reshard.refit.planning import Planned
from reshard.refit.sentinel import fill_sentinel
from reshard.refit.stages import RefitStage, StageMachine

if TYPE_CHECKING:
    from reshard.planner import Plan
    from reshard.refit.checks import Checks
    from reshard.refit.reader import Reader
    from reshard.refit.receiver import Receiver
    from reshard.refit.streaming import StreamSection

__all__ = ["Acquisition"]


class Acquisition:
    """One refit's plan and reads.

    Parameters
    ----------
    receiver
        Whose refit it is.
    found
        The version and its lease.
    account
        Is told what moved, what was planned and who was given up.
    machine
        Goes to PREFLIGHTED and LOADED.
    only
        Patterns of source names; empty takes all.
    sentinel
        Fill destinations before the read.

    Attributes
    ----------
    planned : Planned or None
        The plan, once there is one; kept where a later step fails.
    """

    def __init__(
        self,
        receiver: Receiver,
        found: Discovery,
        account: Account,
        machine: StageMachine,
        only: Sequence[str],
        sentinel: bool,
    ) -> None:
        self._receiver, self._found, self._account, self._machine = receiver, found, account, machine
        self._only, self._sentinel = tuple(only), sentinel
        self._detour = Detour(receiver.bench, found.manifest, account)
        self.planned: Planned | None = None

    def obtain(self, deadline: Deadline) -> Planned:
        """Plan; read (``shadow``) or make sure that it can be read (``stream``)."""
        r = self._receiver
        r.bench.drop(frozenset(), deadline.left_s)

        nothing = replace(self._account.loaded)

        def step() -> Planned:
            self._account.loaded.keep_only(nothing)
            planned = self._prepare(deadline)
            self._require_verifiable()
            if r.install_mode == "shadow":
                self._load(planned, deadline)
            else:
                manifest = self._found.manifest
                r.bench.require_trusted(planned, quarantined=r.state == "quarantined")
                # Whether cells are verified while more is read, as `read_plan` decides it.
                batched = r.verify != "off" and not self._sentinel
                r.bench.probe_sections(manifest, deadline, batched=batched, stall_s=r.stall_s)
                r.bench.pause_engine()
            return planned

        planned = self._detour.run(step, deadline)
        self._machine.advance(RefitStage.LOADED)
        return planned

    def read_section(self, section: StreamSection, seeded: Sequence[str], deadline: Deadline) -> StreamSection:
        """Read one section, from replicas where its holders fail; nothing live is touched by it.

        Returns
        -------
        StreamSection
            The section, or the one that took its place; its buffers hold the version.
        """
        r = self._receiver
        earlier_sections = replace(self._account.loaded)

        def step() -> StreamSection:
            self._account.loaded.keep_only(earlier_sections)
            now = r.bench.section_without(section, self._account.without, self._found.manifest, deadline)
            self._read(now.reader, now.plan, now.checks, seeded, deadline)
            return now

        if self._sentinel:
            fill_sentinel(r.reader.device, section.buffers)
        section.seed(r.bench.stream_engine())
        return self._detour.run(step, deadline)

    def _prepare(self, deadline: Deadline) -> Planned:
        r, clock, manifest = self._receiver, self._account.clock, self._found.manifest
        planned, fresh = r.bench.plan_for(manifest, self._only, clock, deadline, without=self._account.without)
        self.planned = planned
        clock.enter("certify")
        self._account.discovery = r.bench.discovery(manifest, planned, fresh, clock.seconds.get("discover", 0.0))
        if fresh:
            r.bench.adopt(planned)
        if self._machine.stage is RefitStage.CREATED:
            self._machine.advance(RefitStage.PREFLIGHTED)
        clock.enter("connect")
        by_slot = {slot.slot: slot for slot in manifest.slots}
        records = [by_slot[h.name] for h in planned.plan.holders]
        dialled = r.reader.links.ensure(records, deadline)
        clock.enter("allocate")
        r.bench.allocate()
        self._account.cold |= fresh or bool(dialled) or self._account.new_registrations > 0
        return planned

    def _require_verifiable(self) -> None:
        """With ``require_verified``, refuse before the vote what can be known not to be verified after it."""
        r, version = self._receiver, self._found.manifest.version
        if not r.require_verified:
            return
        if r.verify != "full":
            raise UnverifiedError(f"require_verified needs verify='full', got {r.verify!r}: {version} was not read")
        for section in r.bench.stream_sections() if r.install_mode == "stream" else ():
            bare = [h.name for h in section.plan.holders if not self._found.manifest.slot(h.name).digest_root]
            cells = section.checks.partial if section.checks is not None else ()
            if section.checks is not None and (bare or cells):
                why = (
                    f"holder {bare[0]!r} published no digests"
                    if bare
                    else (f"{len(cells)} cells would be read in part: {section.checks.describe(*cells[0])}")
                )
                raise UnverifiedError(
                    f"{version} cannot be verified while it is streamed in, {why}; give the publisher this "
                    "receiver's cut hints and digests=True, or drop require_verified"
                )

    def _load(self, planned: Planned, deadline: Deadline) -> None:
        r = self._receiver
        shadow = r.reader.arenas.shadow()
        r.bench.about_to_overwrite(shadow, deadline)
        if self._sentinel:
            fill_sentinel(r.reader.device, shadow.buffers)
        r.bench.seed(planned, shadow.buffers, quarantined=r.state == "quarantined")
        self._read(r.reader, planned.plan, r.bench.checks, planned.seeded, deadline)
        if any(name in shadow.buffers for name in planned.captured.loader_buffers):
            self._account.clock.enter("load")
            r.bench.run_loader(planned, shadow.buffers)

    def _read(
        self, reader: Reader, plan: Plan, checks: Checks | None, seeded: Sequence[str], deadline: Deadline
    ) -> None:
        r, version, loaded = self._receiver, self._found.manifest.version, self._account.loaded
        context: dict[str, str | int] = {
            "rank": r.rank,
            "member": r.member,
            "step": version.step,
            "epoch": version.epoch,
        }
        read_plan(
            Reading(
                r.transport, r.verify, r.require_verified, r.stall_s, self._sentinel, context, r.reader.on_allocate
            ),
            reader,
            plan,
            checks,
            self._found.manifest,
            deadline,
            loaded,
            without=self._account.without,
            seeded=seeded,
            enter=self._account.clock.enter,
            check_lease=lambda: self._found.check_lease(deadline),
        )
        self._account.without |= loaded.lost
