"""The life of a version through the client, whatever is behind it: no server, or one in memory or on Redis."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.rendezvous.support import MODEL, empty_part, make_part, make_record, publish, receiver, trainer, wait

from reshard.planner import Buffer, ReadRequest, ReadTable
from reshard.planner.cuts import Cuts, cuts
from reshard.rendezvous.client import Rendezvous, Worker
from reshard.rendezvous.errors import (
    AbortedError,
    EqualityError,
    InvalidRequestError,
    LeaseError,
    RendezvousTimeoutError,
    StaleError,
    TransactionError,
    VersionError,
    WorkerLostError,
)
from reshard.rendezvous.types import CutHints, Decision, Facts, Manifest, VersionKey, WorkerInfo


def refit(rdv: Rendezvous, receivers: dict[str, Worker], names: list[str], **extra: object) -> dict[str, Facts]:
    """All members await, vote yes and install."""
    members = tuple(receivers)

    def one(member: str) -> Facts:
        manifest = wait(rdv, member, receivers[member], members, **extra)
        rdv.release_lease(manifest.lease)
        facts = rdv.vote(manifest.transaction, member, True, names_consumed=names, wire_bytes=8, timeout_s=30.0)
        if facts.decision is not Decision.COMMIT:
            return facts
        return rdv.installed(manifest.transaction, member, True, timeout_s=30.0)

    with ThreadPoolExecutor(len(members)) as pool:
        return dict(zip(members, pool.map(one, members, timeout=60.0), strict=True))


def test_refit_of_a_group(rdv: Rendezvous) -> None:
    workers = {slot: trainer(rdv, slot) for slot in ("t0", "t1")}
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    previous = None
    for step in range(3):
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(wait, rdv, name, worker, after=previous) for name, worker in receivers.items()]
            uid = publish(rdv, step, workers)
            manifests = [future.result(timeout=60) for future in waiting]
        assert {m.uid for m in manifests} == {uid}
        assert len({m.transaction for m in manifests}) == 1
        manifest = manifests[0]
        previous = manifest.version
        assert previous == VersionKey(MODEL, 0, step)
        assert [s.slot for s in manifest.slots] == ["t0", "t1"]
        assert [int(s.region_bases[0]) for s in manifest.slots] == [4096 * (step + 1)] * 2
        assert manifest.slot("t1").endpoints == {"memory": b"endpoint of t1"}
        assert manifest.slot("t1").digest_root == b"\2" * 32
        tables = rdv.get_tables([s.table_digest for s in manifest.slots])
        assert [tables[s.table_digest].digest for s in manifest.slots] == [s.table_digest for s in manifest.slots]
        for m in manifests:
            lease = rdv.renew_lease(m.lease)
            rdv.release_lease(lease)
            rdv.release_lease(lease)
            with pytest.raises(LeaseError):
                rdv.renew_lease(lease)
        txn = manifest.transaction
        with ThreadPoolExecutor(2) as pool:
            votes = [
                pool.submit(rdv.vote, txn, name, True, names_consumed=names, wire_bytes=8, timeout_s=30.0)
                for name, names in (("r0", ["w"]), ("r1", []))
            ]
            assert [v.result(timeout=60).decision for v in votes] == [Decision.COMMIT] * 2
            done = [pool.submit(rdv.installed, txn, name, True, timeout_s=30.0) for name in receivers]
            assert [d.result(timeout=60).outcome for d in done] == [Decision.SERVE] * 2
        assert rdv.ask_decision(txn).outcome is Decision.SERVE
        assert rdv.retire(uid)


def test_timeout_names_what_is_missing(rdv: Rendezvous) -> None:
    worker = trainer(rdv, "t0")
    digest = rdv.put_table(make_part("t0"))
    uid = rdv.open_version(VersionKey(MODEL, 0, 7), ["t0", "t1"])
    rdv.publish_slot(uid, make_record("t0", worker.id, digest), worker)
    with pytest.raises(RendezvousTimeoutError, match=r"1 of 2 slots filled; missing 't1'") as caught:
        wait(rdv, "r0", receiver(rdv, "r0"), timeout_s=1.0)
    assert caught.value.missing_slots == ("t1",)
    assert caught.value.waited_s > 0.2


def test_r1_slots_of_different_steps_are_no_version(rdv: Rendezvous) -> None:
    workers = {slot: trainer(rdv, slot) for slot in ("a", "b", "c")}
    digests = {slot: rdv.put_table(make_part(slot, (2 * i, 2 * i + 2))) for i, slot in enumerate(workers)}
    old = rdv.open_version(VersionKey(MODEL, 0, 6), list(workers))
    rdv.publish_slot(old, make_record("c", workers["c"].id, digests["c"]), workers["c"])
    new = rdv.open_version(VersionKey(MODEL, 0, 7), list(workers))
    for slot in ("a", "b"):
        rdv.publish_slot(new, make_record(slot, workers[slot].id, digests[slot]), workers[slot])
    with pytest.raises(
        RendezvousTimeoutError, match=r"qwen@0\.7 is staging: 2 of 3 .* missing 'c' \(at step 6\)"
    ) as caught:
        wait(rdv, "r0", receiver(rdv, "r0"), timeout_s=0.3)
    assert caught.value.missing_slots == ("c",)
    with pytest.raises(VersionError, match="step 6 goes back"):
        rdv.open_version(VersionKey(MODEL, 0, 6), list(workers))


def test_r2_steps_and_epochs(rdv: Rendezvous) -> None:
    worker = trainer(rdv, "t0")
    assert rdv.open_epoch(MODEL, "run-a") == 0
    assert rdv.open_epoch(MODEL, "run-a") == 0
    publish(rdv, 0, {"t0": worker})
    with pytest.raises(InvalidRequestError, match=r"version\.step"):
        VersionKey(MODEL, 0, None)  # type: ignore[arg-type]
    twelve = publish(rdv, 12, {"t0": worker})
    with pytest.raises(VersionError, match="step 0 goes back; step 12 was opened"):
        rdv.open_version(VersionKey(MODEL, 0, 0), ["t0"])
    reader = receiver(rdv, "r0")
    manifest = wait(rdv, "r0", reader, ("r0",))
    assert manifest.uid == twelve
    assert rdv.open_epoch(MODEL, "run-b") == 1
    with pytest.raises(VersionError, match="which epoch 1 replaced"):
        rdv.open_epoch(MODEL, "run-a")
    with pytest.raises(VersionError, match="epoch 0 was replaced by epoch 1"):
        rdv.open_version(VersionKey(MODEL, 0, 13), ["t0"])
    states = {str(v.version): v.state for v in rdv.describe().versions}
    assert states == {"qwen@0.12": "retiring"}, "a lease on the old epoch's version lives, the unread one is gone"
    rdv.release_lease(manifest.lease)
    assert rdv.describe().versions == ()
    new = publish(rdv, 0, {"t0": worker}, epoch=1)
    assert rdv.vote(manifest.transaction, "r0", False, timeout_s=30.0).decision is Decision.ABORT
    assert wait(rdv, "r0", reader, ("r0",), after=manifest.version).uid == new


def test_r3_one_no_vote_aborts_all(rdv: Rendezvous) -> None:
    publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    manifests = {name: wait(rdv, name, receiver(rdv, name)) for name in ("r0", "r1")}
    txn = manifests["r0"].transaction
    with ThreadPoolExecutor(1) as pool:
        yes = pool.submit(rdv.vote, txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
        no = rdv.vote(txn, "r1", False, reason="read of 't0' failed", timeout_s=30.0)
        assert no.decision is Decision.ABORT
        facts = yes.result(timeout=60)
    assert facts == Facts(Decision.ABORT, Decision.PENDING, "'r1' voted no: read of 't0' failed")
    with pytest.raises(TransactionError, match="is abort"):
        rdv.installed(txn, "r0", True, timeout_s=30.0)
    with pytest.raises(TransactionError, match="voted before"):
        rdv.vote(txn, "r1", True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)


def test_r4_a_silent_worker_is_lost_at_query_time(rdv: Rendezvous) -> None:
    lively, silent = trainer(rdv, "t0", ttl_s=300.0), trainer(rdv, "t1", ttl_s=5.0)
    publish(rdv, 1, {"t0": lively, "t1": silent})
    stop_heartbeat(silent)
    deadline = time.monotonic() + 60.0
    while not (silent.lost and {w.name: w.lost for w in rdv.describe().workers}["t1"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(RendezvousTimeoutError, match=r"lost 't1': no heartbeat for \d+\.\d s") as caught:
        wait(rdv, "r0", receiver(rdv, "r0"), timeout_s=0.2)
    assert caught.value.lost_workers == ("t1",)
    assert {w.name: w.lost for w in rdv.describe().workers} == {"t0": False, "t1": True, "r0": False}
    assert rdv.describe().versions[0].state == "withdrawn"
    with pytest.raises(StaleError, match=r"withdrawn: lost slots 't1' \(host-t1\)"):
        wait(rdv, "r0", receiver(rdv, "r0"), want=1, timeout_s=30.0)


def test_a_waiter_is_told_as_soon_as_a_worker_is_lost(rdv: Rendezvous) -> None:
    """The last vote is missing because its member died: its TTL, not the vote's deadline, decides."""
    publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    good, bad = receiver(rdv, "r0"), receiver(rdv, "r1", ttl_s=5.0)
    txn = wait(rdv, "r0", good).transaction
    wait(rdv, "r1", bad)
    stop_heartbeat(bad)
    facts = rdv.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=60.0)
    assert facts.decision is Decision.ABORT
    assert "'r1' is lost: no heartbeat" in facts.reason


def test_r5_an_old_heartbeat_never_marks_a_new_record(rdv: Rendezvous) -> None:
    first = trainer(rdv, "t0")
    publish(rdv, 1, {"t0": first})
    second = trainer(rdv, "t0")
    assert second.id != first.id
    publish(rdv, 2, {"t0": second})
    first.close()
    assert wait(rdv, "r0", receiver(rdv, "r0"), ("r0",)).version.step == 2
    assert not second.lost


def test_r6_an_empty_table_fills_a_slot_only_if_it_says_so(rdv: Rendezvous) -> None:
    real, bare = trainer(rdv, "t0"), trainer(rdv, "t1")
    uid = rdv.open_version(VersionKey(MODEL, 0, 1), ["t0", "t1"])
    full, nothing = rdv.put_table(make_part("t0", (0, 8))), rdv.put_table(empty_part("t1"))
    rdv.publish_slot(uid, make_record("t0", real.id, full), real)
    with pytest.raises(VersionError, match="table with no rows"):
        rdv.publish_slot(uid, make_record("t1", bare.id, nothing), bare)
    reader = receiver(rdv, "r0")
    with pytest.raises(RendezvousTimeoutError, match=r"1 of 2 slots filled.*1 empty") as caught:
        wait(rdv, "r0", reader, timeout_s=0.3)
    assert caught.value.empty_slots == ("t1",)
    with pytest.raises(InvalidRequestError, match=r"record\.empty: slot 't1' says empty, its table has 1 rows"):
        rdv.publish_slot(uid, make_record("t1", bare.id, full, empty=True), bare)
    rdv.publish_slot(uid, make_record("t1", bare.id, nothing, empty=True), bare)
    assert wait(rdv, "r0", reader).uid == uid


def test_r9_one_failed_installation_quarantines_all(rdv: Rendezvous) -> None:
    publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    txn = wait(rdv, "r0", receivers["r0"]).transaction
    wait(rdv, "r1", receivers["r1"])
    with ThreadPoolExecutor(2) as pool:
        votes = [
            pool.submit(rdv.vote, txn, name, True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
            for name in receivers
        ]
        assert {v.result(timeout=60).decision for v in votes} == {Decision.COMMIT}
        good = pool.submit(rdv.installed, txn, "r0", True, timeout_s=30.0)
        bad = pool.submit(rdv.installed, txn, "r1", False, reason="out of memory", timeout_s=30.0)
        facts = [f.result(timeout=60) for f in (good, bad)]
    assert facts == [Facts(Decision.COMMIT, Decision.QUARANTINE, "'r1' failed to install: out of memory")] * 2
    assert rdv.describe().groups[0].quarantined
    mended = refit(rdv, receivers, ["w"])
    assert {f.outcome for f in mended.values()} == {Decision.SERVE}
    group = rdv.describe().groups[0]
    assert group.serving == VersionKey(MODEL, 0, 1)
    assert not group.quarantined


def test_n1b_replicas_that_differ_are_refused(rdv: Rendezvous) -> None:
    workers = {slot: trainer(rdv, slot) for slot in ("t0", "t1")}
    digest = rdv.put_table(make_part("t", (0, 8)))
    uid = rdv.open_version(VersionKey(MODEL, 0, 3), list(workers))
    rdv.publish_slot(uid, make_record("t0", workers["t0"].id, digest, roots={"embed": b"\1" * 32}), workers["t0"])
    with pytest.raises(EqualityError, match="'t0' and 't1' claim equal content for 'embed'") as caught:
        rdv.publish_slot(uid, make_record("t1", workers["t1"].id, digest, roots={"embed": b"\2" * 32}), workers["t1"])
    assert caught.value.holders == ("t0", "t1")
    with pytest.raises(EqualityError, match="'t0' and 't1'"):
        rdv.publish_slot(uid, make_record("t0", workers["t0"].id, digest, roots={"embed": b"\1" * 32}), workers["t0"])
    with pytest.raises(EqualityError, match=r"qwen@0\.3 was refused") as refused:
        wait(rdv, "r0", receiver(rdv, "r0"), want=3)
    assert refused.value.holders == ("t0", "t1")
    with pytest.raises(RendezvousTimeoutError, match=r"is refused.*'t0' and 't1'"):
        wait(rdv, "r0", receiver(rdv, "r0"), timeout_s=0.2)


@pytest.mark.parametrize(
    ("consumed", "allowed", "decision"),
    [
        ([["visual.a"], ["visual.b"]], [], Decision.COMMIT),
        ([["visual.a"], ["visual.a"]], [], Decision.ABORT),
        ([["visual.a"], ["visual.a"]], ["visual.b"], Decision.COMMIT),
        ([[], []], ["visual.*"], Decision.COMMIT),
        ([[], []], ["*"], Decision.COMMIT),
    ],
)
def test_n6_names_that_nobody_consumed(
    rdv: Rendezvous, consumed: list[list[str]], allowed: list[str], decision: Decision
) -> None:
    worker = trainer(rdv, "t0")
    digest = rdv.put_table(make_part("t0", (0, 8), ("visual.a", "visual.b")))
    uid = rdv.open_version(VersionKey(MODEL, 0, 1), ["t0"])
    rdv.publish_slot(uid, make_record("t0", worker.id, digest), worker)
    members = ("r0", "r1")
    _, txn = [wait(rdv, name, receiver(rdv, name)).transaction for name in members]

    def cast(member: str, names: list[str]) -> Facts:
        return rdv.vote(txn, member, True, names_consumed=names, allow_unconsumed=allowed, wire_bytes=4, timeout_s=30.0)

    with ThreadPoolExecutor(2) as pool:
        facts = list(pool.map(cast, members, consumed, timeout=60.0))
    assert [f.decision for f in facts] == [decision] * 2
    if decision is Decision.ABORT:
        assert facts[0].reason == "1 published tensors were consumed by no member: 'visual.b'"


@pytest.mark.parametrize(("wire", "decision"), [((0, 0), Decision.ABORT), ((0, 5), Decision.COMMIT)])
def test_n7_a_rank_may_read_nothing_a_group_may_not(rdv: Rendezvous, wire: tuple[int, int], decision: Decision) -> None:
    publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    members = ("r0", "r1")
    _, txn = [wait(rdv, name, receiver(rdv, name)).transaction for name in members]
    with ThreadPoolExecutor(2) as pool:
        facts = list(
            pool.map(
                lambda member, n: rdv.vote(txn, member, True, names_consumed=["w"], wire_bytes=n, timeout_s=30.0),
                members,
                wire,
                timeout=60.0,
            )
        )
    assert [f.decision for f in facts] == [decision] * 2
    if decision is Decision.ABORT:
        assert facts[0].reason == "the plans of all 2 members hold zero bytes"


def test_publishers_that_disagree(rdv: Rendezvous) -> None:
    first, second = trainer(rdv, "t0"), trainer(rdv, "t0")
    digest, other = rdv.put_table(make_part("t0")), rdv.put_table(make_part("t0", (4, 8)))
    key = VersionKey(MODEL, 0, 1)
    uid = rdv.open_version(key, ["t0", "t1"])
    assert rdv.open_version(key, ["t1", "t0"]) == uid
    with pytest.raises(VersionError, match=r"added \['t2'\], left out \['t1'\]"):
        rdv.open_version(key, ["t0", "t2"])
    with pytest.raises(VersionError, match="layout epoch"):
        rdv.open_version(key, ["t0", "t1"], layout_epoch=1)
    record = make_record("t0", first.id, digest)
    rdv.publish_slot(uid, record, first)
    rdv.publish_slot(uid, record, first)
    with pytest.raises(VersionError, match="published before with another table"):
        rdv.publish_slot(uid, make_record("t0", first.id, other), first)
    with pytest.raises(VersionError, match="is filled by 't0'"):
        rdv.publish_slot(uid, make_record("t0", second.id, digest), second)
    with pytest.raises(VersionError, match="has no slot 't9'"):
        rdv.publish_slot(uid, make_record("t9", first.id, digest), first)
    later = rdv.open_version(VersionKey(MODEL, 0, 2), ["t0"])
    with pytest.raises(VersionError, match="a new layout needs a new layout epoch"):
        rdv.publish_slot(later, make_record("t0", first.id, other), first)
    announced = rdv.open_version(VersionKey(MODEL, 0, 3), ["t0"], layout_epoch=1)
    rdv.publish_slot(announced, make_record("t0", first.id, other), first)
    with pytest.raises(StaleError, match="is not here; put it first"):
        rdv.publish_slot(later, make_record("t0", first.id, b"\7" * 32), first)


def test_fence_waits_for_leases(rdv: Rendezvous) -> None:
    uid = publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    reader = receiver(rdv, "r0")
    manifest = wait(rdv, "r0", reader, ("r0",))
    rdv.close_admission(uid)
    with pytest.raises(RendezvousTimeoutError, match="1 leases live, of 'r0'"):
        rdv.wait_leases(uid, timeout_s=0.2)
    assert not rdv.retire(uid)
    rdv.renew_lease(manifest.lease)
    began = threading.Event()

    def release() -> None:
        began.set()
        rdv.release_lease(manifest.lease)

    releasing = threading.Timer(0.2, release)
    releasing.start()
    rdv.wait_leases(uid, timeout_s=30.0)
    assert began.is_set(), "the wait ended before the lease"
    releasing.join(30.0)
    assert rdv.retire(uid)
    assert rdv.describe().versions == ()
    with pytest.raises(StaleError, match="is gone or was never opened"):
        wait(rdv, "r9", receiver(rdv, "r9"), ("r9",), want=1, group="h")


def test_a_version_may_go_once_its_leases_ended_though_votes_are_open(rdv: Rendezvous) -> None:
    """Publishers change memory in place as soon as the fence lets them; what was read and verified still commits."""
    uid = publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    manifests = {name: wait(rdv, name, worker) for name, worker in receivers.items()}
    for manifest in manifests.values():
        rdv.release_lease(manifest.lease)
    rdv.close_admission(uid)
    rdv.wait_leases(uid, timeout_s=30.0)
    assert rdv.retire(uid)
    txn = manifests["r0"].transaction
    with ThreadPoolExecutor(2) as pool:
        votes = [
            pool.submit(rdv.vote, txn, name, True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
            for name in receivers
        ]
        assert [v.result(timeout=60).decision for v in votes] == [Decision.COMMIT] * 2


def test_a_publish_is_repeated_after_its_version_has_gone(rdv: Rendezvous) -> None:
    """Its answer was lost, and the others were quick: the publisher that asks again hears that it is done."""
    worker, other = trainer(rdv, "t0"), trainer(rdv, "t0")
    digest, another = rdv.put_table(make_part("t0")), rdv.put_table(make_part("t0", (4, 8)))
    uid = rdv.open_version(VersionKey(MODEL, 0, 1), ["t0"])
    rdv.publish_slot(uid, make_record("t0", worker.id, digest), worker)
    assert rdv.retire(uid)
    rdv.publish_slot(uid, make_record("t0", worker.id, digest), worker)
    for table, who in ((another, worker), (digest, other)):
        with pytest.raises(StaleError, match="is gone"):
            rdv.publish_slot(uid, make_record("t0", who.id, table), who)
    assert rdv.describe().versions == ()


def test_a_lease_ends_by_itself(rdv: Rendezvous) -> None:
    uid = publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    reader = receiver(rdv, "r0")
    started = time.monotonic()
    manifest = wait(rdv, "r0", reader, ("r0",), lease_ttl_s=2.0)
    assert manifest.lease.remaining_s(time.monotonic()) <= 2.0
    rdv.wait_leases(uid, timeout_s=30.0)
    assert time.monotonic() - started > 1.9
    with pytest.raises(LeaseError, match="what was read under it is void"):
        rdv.renew_lease(manifest.lease)


def test_group_gets_one_version_though_a_newer_one_came(rdv: Rendezvous) -> None:
    workers = {"t0": trainer(rdv, "t0")}
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    publish(rdv, 1, workers)
    first = wait(rdv, "r0", receivers["r0"])
    publish(rdv, 2, workers)
    second = wait(rdv, "r1", receivers["r1"])
    assert (first.uid, first.transaction) == (second.uid, second.transaction)
    assert wait(rdv, "r0", receivers["r0"]).lease.id == first.lease.id, "awaiting again gives the same lease"
    with pytest.raises(TransactionError, match="asks for step 2"):
        wait(rdv, "r1", receivers["r1"], want=2)
    with pytest.raises(TransactionError, match="members are fixed"):
        wait(rdv, "r1", receivers["r1"], ("r0", "r1", "r2"))
    with pytest.raises(TransactionError, match="is not among the members"):
        wait(rdv, "r7", receiver(rdv, "r7"))


def test_a_member_that_can_no_longer_join_aborts_the_transaction(rdv: Rendezvous) -> None:
    lost, survivor = trainer(rdv, "t0"), trainer(rdv, "t1")
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    publish(rdv, 1, {"t0": lost, "t1": survivor})
    txn = wait(rdv, "r0", receivers["r0"]).transaction
    lost.close()
    with pytest.raises(AbortedError, match="'r1' can no longer join"):
        wait(rdv, "r1", receivers["r1"])
    facts = rdv.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
    assert facts.decision is Decision.ABORT
    assert facts.reason == "'r1' can no longer join qwen@0.1; lost slots 't0' (host-t0)"


def test_a_late_member_hears_of_the_abort_once(rdv: Rendezvous) -> None:
    publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    first = wait(rdv, "r0", receivers["r0"]).transaction
    assert rdv.vote(first, "r0", False, reason="no room", timeout_s=30.0).decision is Decision.ABORT
    with pytest.raises(AbortedError, match="'r0' voted no: no room"):
        wait(rdv, "r1", receivers["r1"])
    second = wait(rdv, "r1", receivers["r1"]).transaction
    assert second not in ("", first)
    assert wait(rdv, "r0", receivers["r0"]).transaction == second
    reborn = receiver(rdv, "r1")
    assert rdv.vote(second, "r0", False, timeout_s=30.0).decision is Decision.ABORT
    assert wait(rdv, "r1", reborn).transaction not in (first, second), "it had joined; and a new life knows nothing"


def test_a_member_that_asks_for_another_step_does_not_hear_of_an_abort(rdv: Rendezvous) -> None:
    trainers = {"t0": trainer(rdv, "t0")}
    publish(rdv, 1, trainers)
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    first = wait(rdv, "r0", receivers["r0"], want=1).transaction
    assert rdv.vote(first, "r0", False, reason="no room", timeout_s=30.0).decision is Decision.ABORT
    publish(rdv, 2, trainers)
    second = wait(rdv, "r1", receivers["r1"], want=2)
    assert second.version.step == 2
    assert wait(rdv, "r0", receivers["r0"], want=2).transaction == second.transaction != first


def test_deadline_of_a_transaction(rdv: Rendezvous) -> None:
    publish(rdv, 1, {"t0": trainer(rdv, "t0")})
    receivers = {name: receiver(rdv, name) for name in ("r0", "r1")}
    txn = wait(rdv, "r0", receivers["r0"], transaction_timeout_s=3.0).transaction
    facts = rdv.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
    assert facts.decision is Decision.ABORT
    assert "deadline of 3 s passed without the votes of ['r1']" in facts.reason
    txn = wait(rdv, "r0", receivers["r0"], transaction_timeout_s=6.0).transaction
    wait(rdv, "r1", receivers["r1"])
    with ThreadPoolExecutor(2) as pool:
        votes = [
            pool.submit(rdv.vote, txn, name, True, names_consumed=["w"], wire_bytes=1, timeout_s=30.0)
            for name in receivers
        ]
        assert {v.result(timeout=60).decision for v in votes} == {Decision.COMMIT}
    facts = rdv.installed(txn, "r0", True, timeout_s=30.0)
    assert facts.outcome is Decision.QUARANTINE
    assert "without the installations of ['r1']" in facts.reason


def test_unknown_transactions_and_workers(rdv: Rendezvous) -> None:
    assert rdv.ask_decision("0" * 32).decision is Decision.UNKNOWN
    with pytest.raises(TransactionError, match="did not join"):
        rdv.vote("0" * 32, "r0", True, timeout_s=30.0)
    worker = trainer(rdv, "t0")
    worker.close()
    assert worker.lost
    with pytest.raises(WorkerLostError, match="register anew"):
        rdv.publish_slot("0" * 32, make_record("t0", worker.id, b"\0" * 32), worker)
    with pytest.raises(InvalidRequestError, match="is a trainer, not a receiver"):
        wait(rdv, "r0", trainer(rdv, "r0"))


def test_watch_versions(rdv: Rendezvous) -> None:
    worker = trainer(rdv, "t0")
    seen: list[tuple[int, bool]] = []

    def listen() -> None:
        for event in rdv.watch_versions(MODEL, timeout_s=30.0):
            seen.append((event.key.step, event.offered))
            if seen[-1] == (1, False):
                return

    thread = threading.Thread(target=listen)
    thread.start()
    uid = publish(rdv, 1, {"t0": worker})
    deadline = time.monotonic() + 25.0
    while (1, True) not in seen:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rdv.retire(uid)
    thread.join(30.0)
    assert seen == [(1, True), (1, False)]


@pytest.mark.parametrize(
    ("name", "fault"),
    [("", "empty name"), ("a\0b", "NUL"), ("x" * 5000, "5000 bytes, at most 4096"), ("\ud800", "not valid Unicode")],
)
def test_n12_names_out_of_bounds(rdv: Rendezvous, name: str, fault: str) -> None:
    with pytest.raises(InvalidRequestError, match=fault) as caught:
        rdv.open_version(VersionKey(MODEL, 0, 1), ["t0", name])
    assert caught.value.field == "slots[1]"


def test_a_name_given_twice_is_found_in_time_among_many(rdv: Rendezvous) -> None:
    slots = [f"{i:0200d}" for i in range(16_383)]
    with pytest.raises(InvalidRequestError, match="is given twice"):
        rdv.open_version(VersionKey(MODEL, 0, 1), [*slots, slots[-1]])


def test_n12_names_within_bounds_round_trip(rdv: Rendezvous) -> None:
    slots = ["\u00e9", "e\u0301", "x" * 4096]
    workers = {slot: trainer(rdv, slot) for slot in slots}
    uid = publish(rdv, 1, workers)
    manifest: Manifest = wait(rdv, "r0", receiver(rdv, "r0"), ("r0",))
    assert manifest.uid == uid
    assert [s.slot for s in manifest.slots] == slots


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), True, "5"])
def test_timeouts_are_finite_and_positive(rdv: Rendezvous, timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        rdv.describe(timeout_s=timeout_s)


def test_description(rdv: Rendezvous) -> None:
    workers = {slot: trainer(rdv, slot) for slot in ("t0", "t1")}
    receivers = {"r0": receiver(rdv, "r0")}
    publish(rdv, 1, workers)
    refit(rdv, receivers, ["w"])
    publish(rdv, 3, workers)
    manifest = wait(rdv, "r0", receivers["r0"], ("r0",))
    described = rdv.describe()
    assert {(w.name, w.role, w.lost) for w in described.workers} == {
        ("t0", "trainer", False),
        ("t1", "trainer", False),
        ("r0", "receiver", False),
    }
    newest = described.versions[-1]
    assert (newest.uid, newest.state, newest.n_leases) == (manifest.uid, "ready", 1)
    assert [(s.slot, s.state, s.last_step) for s in newest.slots] == [("t0", "filled", 3), ("t1", "filled", 3)]
    assert [(lease.holder, lease.version_uid) for lease in described.leases] == [("r0", manifest.uid)]
    assert described.groups[0].lag_steps == 2
    assert {t.decision for t in described.transactions} == {Decision.COMMIT, Decision.PENDING}


def rank_cuts(first: int) -> Cuts:
    request = ReadRequest("down", (4, 6), "bfloat16", (0, first), (1, 1), (4, 3), 0, 0, (3, 1))
    return cuts([[ReadTable.build([Buffer("p", (4, 3), "bfloat16")], [request])]])


def test_cut_hints(rdv: Rendezvous) -> None:
    assert rdv.get_cuts(MODEL) == CutHints(0, ())
    left, right = rank_cuts(0), rank_cuts(2)
    assert rdv.put_cuts(MODEL, left, group="g", member="r0") == 1
    assert rdv.put_cuts(MODEL, right, group="g", member="r1") == 2
    assert rdv.put_cuts(MODEL, left, group="g", member="r0") == 2, "nothing new, no new layout epoch"
    found = rdv.get_cuts(MODEL)
    assert found.layout_epoch == 2
    assert [(hint.group, hint.member, hint.cuts.of("down")) for hint in found.hints] == [
        ("g", "r0", ((0, 4), (0, 3, 6))),
        ("g", "r1", ((0, 4), (0, 2, 5, 6))),
    ]
    assert rdv.put_cuts(MODEL, left, group="g", member="r1") == 3
    assert [hint.cuts.digest for hint in rdv.get_cuts(MODEL).hints] == [left.digest] * 2
    older = rdv.get_cuts(MODEL, layout_epoch=2)
    assert [hint.cuts.digest for hint in older.hints] == [left.digest, right.digest]
    with pytest.raises(StaleError, match="no hints of layout epoch 9; the newest is 3"):
        rdv.get_cuts(MODEL, layout_epoch=9)


def stop_heartbeat(worker: Worker) -> None:
    """Make a worker fall silent without a word, as a killed process does."""
    thread, task = worker._thread, worker._worker._task

    async def cancel() -> None:
        task.cancel()

    thread.call(cancel())


def test_workers_are_registered_with_what_they_say(rdv: Rendezvous) -> None:
    info = WorkerInfo("trainer", MODEL, "host-a", "trainer-0", {"nixl": b"\0\1", "memory": b""})
    with rdv.register(info) as worker:
        assert worker.info == info
        listed = rdv.describe().workers
        assert [(w.id, w.name, w.host) for w in listed] == [(worker.id, "trainer-0", "host-a")]
    assert [w.lost for w in rdv.describe().workers] == [True]
