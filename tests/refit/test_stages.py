"""The stage machine of a rank's refit: no skips, terminal stages stay terminal."""

from __future__ import annotations

import itertools

import pytest

from reshard.refit.errors import RefitError
from reshard.refit.stages import RefitStage as S
from reshard.refit.stages import StageMachine

WAY = [S.PREFLIGHTED, S.LOADED, S.PREPARED, S.MUTATING, S.VERIFIED, S.PUBLISHED]


@pytest.mark.parametrize("n_steps", range(len(WAY) + 1))
def test_a_failure_ends_where_the_memory_says(n_steps: int) -> None:
    machine = StageMachine()
    for stage in WAY[:n_steps]:
        machine.advance(stage)
    mutated = any(s in WAY[:n_steps] for s in (S.MUTATING, S.VERIFIED))
    expected = S.PUBLISHED if n_steps == len(WAY) else S.QUARANTINED if mutated else S.ABORTED
    assert machine.fail() is expected
    assert machine.terminal
    assert machine.fail() is expected
    for stage in S:
        with pytest.raises(RefitError, match="it has ended"):
            machine.advance(stage)


def test_no_stage_is_skipped() -> None:
    for n, to in itertools.product(range(len(WAY)), WAY):
        machine = StageMachine()
        for stage in WAY[:n]:
            machine.advance(stage)
        if to is not WAY[n]:
            with pytest.raises(RefitError, match="cannot go to"):
                machine.advance(to)


def test_a_rank_in_doubt_can_learn_either_answer() -> None:
    for answer in (S.MUTATING, S.ABORTING):
        machine = StageMachine()
        for stage in (*WAY[:3], S.IN_DOUBT, answer):
            machine.advance(stage)
    assert machine.fail() is S.ABORTED


def test_a_mutated_rank_is_never_called_aborted() -> None:
    machine = StageMachine()
    for stage in (*WAY[:4], S.ABORTING):
        machine.advance(stage)
    with pytest.raises(RefitError, match="ABORTING cannot go to ABORTED"):
        machine.advance(S.ABORTED)
