"""What always holds."""

from __future__ import annotations

from hypothesis.stateful import invariant
from tests.rendezvous.machine.shadow import FINAL, OPEN, Shadow, ShadowTransaction, ShadowVersion

from reshard.rendezvous import state
from reshard.rendezvous.records import Group, Model, Transaction, Version, VersionState
from reshard.rendezvous.types import Decision


class Invariants(Shadow):
    @invariant()
    def a_version_under_a_live_lease_is_never_gone(self) -> None:
        known = {version.uid for version in self.records(Version)}
        for lease in self.leases.values():
            if lease.expires_at > self.now:
                assert lease.uid in known

    @invariant()
    def a_ready_version_has_all_its_slots(self) -> None:
        for version in self.records(Version):
            shadow = self.versions[version.uid]
            if version.state is VersionState.READY:
                assert shadow.status == "ready"
                assert set(version.filled) == set(version.slots) == set(shadow.filled)
                slots = self.run(lambda view, version=version: state.slot_records(view, version))
                assert {slot.slot: slot for slot in slots} == shadow.filled
                assert all(self.workers[w].role == "trainer" for w in version.filled.values())
            else:
                assert shadow.status != "ready"

    @invariant()
    def what_is_gone_is_gone_and_what_is_not_is_not(self) -> None:
        known = {version.uid for version in self.records(Version)}
        for uid, shadow in self.versions.items():
            if shadow.status == "gone":
                assert uid not in known or shadow.wanted_gone
            elif uid not in known:
                # Only its end may have come early: closed and free of leases, or swept after an hour.
                assert self.swept(uid, shadow), (uid, shadow)
                shadow.status = "gone"

    def swept(self, uid: str, shadow: ShadowVersion) -> bool:
        lost = not all(self.alive(record.worker_id) for record in shadow.filled.values())
        return not self.live_leases(uid) and (
            shadow.wanted_gone or lost or shadow.status == "refused" or not shadow.filled
        )

    @invariant()
    def a_step_never_goes_back_within_an_epoch(self) -> None:
        for model in self.records(Model):
            assert (model.epoch, model.step) == (self.epoch, self.step)
            for ref in model.versions:
                if ref.ready:
                    assert ref.epoch == model.epoch
                    assert ref.step <= model.step

    @invariant()
    def each_fact_is_decided_once(self) -> None:
        for txn in self.records(Transaction):
            shadow = self.transactions[txn.id]
            for seen, said in ((txn.decision, shadow.decision), (txn.outcome, shadow.outcome)):
                # The record may lag behind what time has decided (nobody asked), and never the other way.
                assert seen is said or (seen is OPEN and self.overdue(shadow)), (txn, shadow)

    def overdue(self, txn: ShadowTransaction) -> bool:
        return txn.deadline <= self.now or not all(map(self.alive, txn.joined.values())) or txn.decision in FINAL

    @invariant()
    def what_a_member_may_ask_for_is_kept_and_nothing_else(self) -> None:
        kept = {txn.id for txn in self.transactions.values() if not txn.forgotten}
        assert {txn.id for txn in self.records(Transaction)} == kept
        assert {group.group for group in self.records(Group)} == {self.transactions[txn_id].group for txn_id in kept}

    @invariant()
    def a_group_serves_one_version_that_all_its_members_installed(self) -> None:
        for group in self.records(Group):
            served = [
                txn for txn in self.transactions.values() if txn.group == group.group and txn.outcome is Decision.SERVE
            ]
            for txn in served:
                assert set(txn.installed) == set(txn.members) == set(txn.votes)
                assert all(txn.installed.values())
                assert all(vote.yes for vote in txn.votes.values())
            if group.serving is not None:
                last = served[-1]
                assert (group.serving.epoch, group.serving.step) == self.versions[last.uid].key
                assert not group.quarantined
