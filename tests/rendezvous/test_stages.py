"""The stage machine: every pair of stages, against the rule in words."""

from __future__ import annotations

import itertools

import pytest

from reshard.rendezvous.errors import ContractError, ContractTypeError
from reshard.rendezvous.stages import (
    STAGE_ORDER,
    SUCCESSORS,
    TERMINAL_STAGES,
    Stage,
    StageMachine,
    advance_stage,
)

ORDER = [
    "CREATED",
    "PREFLIGHTED",
    "LOADED",
    "PROBED",
    "DISTILLED",
    "PREPARED",
    "MUTATING",
    "VERIFIED",
    "STAGED",
    "PUBLISHED",
]


def allowed(current: str, target: str) -> bool:
    """RENDEZVOUS.md's sentence, written apart from the table."""
    if current in ORDER[:-1]:
        return target in (ORDER[ORDER.index(current) + 1], "ABORTING")
    return current == "ABORTING" and target in ("ABORTED", "QUARANTINED")


def test_the_stages_are_these_and_in_this_order():
    assert [stage.value for stage in STAGE_ORDER] == ORDER
    assert {stage.value for stage in Stage} == {*ORDER, "ABORTING", "ABORTED", "QUARANTINED"}
    assert all(stage.name == stage.value for stage in Stage)


@pytest.mark.parametrize(("current", "target"), list(itertools.product(Stage, Stage)), ids=lambda stage: stage.value)
def test_every_pair(current, target):
    machine = StageMachine(current)
    if allowed(current.value, target.value):
        assert target in SUCCESSORS[current]
        assert machine.advance(target) is target
        assert machine.stage is target
        return
    assert target not in SUCCESSORS[current]
    with pytest.raises(ContractError, match=rf"stage\.target: got {current.value} -> {target.value}") as caught:
        machine.advance(target)
    assert caught.value.field == "target"
    assert machine.stage is current


@pytest.mark.parametrize("stage", list(Stage), ids=lambda stage: stage.value)
def test_terminal_stages_stay(stage):
    terminal = stage.value in ("PUBLISHED", "ABORTED", "QUARANTINED")
    assert StageMachine(stage).terminal is terminal
    assert (stage in TERMINAL_STAGES) is terminal
    if terminal:
        for target in Stage:
            with pytest.raises(ContractError, match="terminal"):
                advance_stage(stage, target)


@pytest.mark.parametrize("impostor", ["CREATED", "PREFLIGHTED", None, 0, True, b"CREATED", Stage, object()], ids=repr)
def test_what_is_not_a_stage_is_refused_by_type(impostor):
    machine = StageMachine()
    with pytest.raises(ContractTypeError, match=r"stage\.target: got .*, expected a Stage"):
        machine.advance(impostor)
    assert machine.stage is Stage.CREATED
    with pytest.raises(TypeError, match=r"stage\.current"):
        advance_stage(impostor, Stage.PREFLIGHTED)
    with pytest.raises(ContractTypeError, match=r"stage\.stage"):
        StageMachine(impostor)


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        SUCCESSORS[Stage.PUBLISHED] = frozenset(Stage)
    with pytest.raises(AttributeError):
        StageMachine().stage = Stage.PUBLISHED
