"""What the fault matrix looks for after a fault, given what must not be: each check can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("grpc", reason="the rendezvous service needs grpcio")

from tests.faults import checks
from tests.faults.checks import Event, Status
from tests.faults.combinations import FAULTS, MEMBERS, SLOTS, STEPS, VICTIM, Combination, combinations

LIVES = {slot: f"worker of {slot}" for slot in SLOTS}
OLD = Status("serving", 0, (0, 0), LIVES, SLOTS)
NEW = Status("serving", 1, (1, 1), LIVES, SLOTS)
NOTHING = Status("quarantined", links=LIVES, peers=SLOTS)


def both(first: Status, second: Status) -> dict[str, Status]:
    return dict(zip(MEMBERS, (first, second), strict=True))


@pytest.mark.parametrize(
    "status",
    [
        replace(OLD, held=(0, 1)),  # mixed
        replace(OLD, held=(0, None)),  # no version's bytes
        replace(OLD, held=(1, 1)),  # says one thing and holds another
        replace(OLD, held=()),
        Status("serving", 3, (3, 3)),  # a version that was never published
        Status("resting"),
        Status("quarantined", serving=0, held=(0, 0)),
    ],
)
def test_a_member_that_serves_neither_old_nor_new_is_seen(status: Status) -> None:
    assert not list(checks.old_or_new(both(OLD, NOTHING), {0, 1}))
    (problem,) = checks.old_or_new(both(OLD, status), {0, 1})
    assert VICTIM in problem


def test_two_versions_are_seen() -> None:
    assert not list(checks.one_version(both(OLD, OLD)))
    assert not list(checks.one_version(both(NOTHING, NEW)))
    assert len(list(checks.one_version(both(OLD, NEW)))) == 1


def test_two_versions_for_a_moment_are_seen() -> None:
    here = [Event(1.0, "serving", 0), Event(2.0, "changing"), Event(3.0, "serving", 1)]
    good = [Event(1.0, "serving", 0), Event(2.5, "changing"), Event(4.0, "serving", 1)]
    late = [Event(1.0, "serving", 0), Event(3.25, "changing"), Event(4.0, "serving", 1)]
    stuck = [Event(1.0, "serving", 0)]
    killed = [Event(1.0, "serving", 0), Event(2.75, "end")]
    for other, found in ((good, 0), (late, 1), (stuck, 1), (killed, 0)):
        assert len(list(checks.never_two(dict(zip(MEMBERS, (here, other), strict=True))))) == found
    (problem,) = checks.never_two({"tp0": here, "tp1": late})
    assert problem == "tp0 served 1 while tp1 served 0, for 250.000 ms"


def test_a_refit_that_should_have_failed_is_seen_and_one_that_should_not() -> None:
    kept = {name: [Event(1.0, "serving", 0)] for name in MEMBERS}
    took = {name: [*events, Event(2.0, "changing"), Event(3.0, "serving", 1)] for name, events in kept.items()}
    spoiled = Combination("read", "wrong bytes")
    assert not list(checks.outcome(spoiled, both(OLD, OLD), kept))
    assert len(list(checks.outcome(spoiled, both(NEW, NEW), took))) == 2
    for_a_moment = kept | {VICTIM: [*took[VICTIM], Event(3.1, "quarantined")]}
    assert len(list(checks.outcome(spoiled, both(OLD, NOTHING), for_a_moment))) == 1
    slow = Combination("read", "slow rank")
    assert not list(checks.outcome(slow, both(NEW, NEW), took))
    assert len(list(checks.outcome(slow, both(NEW, NOTHING), took))) == 1
    free = Combination("read", "network stall")
    assert not list(checks.outcome(free, both(NEW, NEW), took)) + list(checks.outcome(free, both(OLD, NOTHING), kept))


def test_a_fault_that_nobody_felt_is_seen() -> None:
    for fault, said in (
        ("wrong bytes", "VerificationError: tile 3"),
        ("late digest", "QuarantinedError: VerificationError: tile 3"),
        ("trainer killed", "HolderLostError: trainer-1"),
        ("out of staging memory", "MemoryError: no 64 bytes"),
    ):
        cell = Combination("allocate", fault)
        assert not list(checks.struck(cell, {"tp0": "RefitAborted: others", VICTIM: said}))
        assert len(list(checks.struck(cell, {"tp0": "RefitTimeoutError: late", VICTIM: ""}))) == 1
    assert not list(checks.struck(Combination("vote", "trainer killed"), {"tp0": "", VICTIM: ""}))


def test_an_old_version_given_up_for_nothing_is_seen() -> None:
    for install in ("shadow", "stream"):
        cell = Combination("plan", "SIGTERM", install)
        assert not list(checks.kept_old(cell, {"tp0": OLD}))
        assert len(list(checks.kept_old(cell, {"tp0": NOTHING}))) == 1
    for cell in (
        Combination("install", "SIGTERM"),
        Combination("vote", "wrong bytes", "stream"),
        Combination("read", "server killed"),
    ):
        assert not list(checks.kept_old(cell, {"tp0": NOTHING}))


def test_a_member_that_does_not_learn_what_was_decided_is_seen() -> None:
    assert not list(checks.settled(both(OLD, NOTHING)))
    assert len(list(checks.settled(both(Status("in_doubt"), Status("changing"))))) == 2


def test_connections_to_the_dead_are_seen() -> None:
    dead, felt = ["trainer-1"], {"tp0": ["trainer-1"], "tp1": []}  # tp1 has only been told
    dropped = replace(OLD, links={"trainer-0": LIVES["trainer-0"]})
    assert not list(checks.no_dead_links(both(dropped, OLD), felt, LIVES, dead))
    assert len(list(checks.no_dead_links(both(OLD, OLD), felt, LIVES, dead))) == 1
    assert not list(checks.no_dead_links(both(OLD, OLD), felt, LIVES, []))


@pytest.mark.parametrize(
    "status",
    [
        replace(NEW, links=LIVES | {"trainer-1": "the life before"}),
        replace(NEW, links={}),
        replace(NEW, peers=(*SLOTS, "trainer-1")),
        replace(NEW, n_quarantined=1),
    ],
)
def test_what_is_left_after_the_next_refit_is_seen(status: Status) -> None:
    assert not list(checks.present_links(both(NEW, NEW), LIVES))
    assert len(list(checks.present_links(both(NEW, status), LIVES))) == 1


def test_the_matrix_has_at_least_sixty_combinations_and_reasons_for_the_rest() -> None:
    for install in ("shadow", "stream"):
        every = list(combinations(install))
        assert {(c.step, c.fault) for c in every} == {(step, fault) for step in STEPS for fault in FAULTS}
        assert sum(not c.skipped for c in every) >= 60
        # Many must fail with the old version kept, or succeed: a rank that always served nothing would not pass.
        assert sum(c.keeps_old or c.must_succeed for c in every if not c.skipped) >= 36
