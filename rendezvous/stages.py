"""Which stage may follow which, for ranks that prepare and publish a state together.

1. The stages of the good way are passed in their order, one at a time: ``CREATED`` to ``PUBLISHED``.
2. Until the state is published, each of them may turn to ``ABORTING``.
3. ``ABORTING`` ends as ``ABORTED`` (the old state is whole) or ``QUARANTINED`` (it is not known to be).
4. ``PUBLISHED``, ``ABORTED`` and ``QUARANTINED`` are terminal: nothing follows them, not even themselves.

What is not a `Stage` is refused by its type: the string ``"CREATED"`` is not a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import pairwise
from types import MappingProxyType

from reshard.rendezvous.errors import ContractError, ContractTypeError

__all__ = ["STAGE_ORDER", "SUCCESSORS", "TERMINAL_STAGES", "Stage", "StageMachine", "advance_stage"]


class Stage(Enum):
    """A stage of a state that ranks prepare together; its value is its name."""

    CREATED = "CREATED"
    PREFLIGHTED = "PREFLIGHTED"
    LOADED = "LOADED"
    PROBED = "PROBED"
    DISTILLED = "DISTILLED"
    PREPARED = "PREPARED"
    MUTATING = "MUTATING"
    VERIFIED = "VERIFIED"
    STAGED = "STAGED"
    PUBLISHED = "PUBLISHED"
    ABORTING = "ABORTING"
    ABORTED = "ABORTED"
    QUARANTINED = "QUARANTINED"


STAGE_ORDER: tuple[Stage, ...] = (
    Stage.CREATED,
    Stage.PREFLIGHTED,
    Stage.LOADED,
    Stage.PROBED,
    Stage.DISTILLED,
    Stage.PREPARED,
    Stage.MUTATING,
    Stage.VERIFIED,
    Stage.STAGED,
    Stage.PUBLISHED,
)
"""The good way, first to last."""


def _successors() -> dict[Stage, frozenset[Stage]]:
    table = {stage: frozenset[Stage]() for stage in Stage}
    for stage, following in pairwise(STAGE_ORDER):
        table[stage] = frozenset((following, Stage.ABORTING))
    table[Stage.ABORTING] = frozenset((Stage.ABORTED, Stage.QUARANTINED))
    return table


SUCCESSORS: Mapping[Stage, frozenset[Stage]] = MappingProxyType(_successors())
"""For each stage, the stages that may directly follow it."""

TERMINAL_STAGES: frozenset[Stage] = frozenset(stage for stage, following in SUCCESSORS.items() if not following)
"""The stages that nothing follows."""


def _require_stage(value: Stage, field: str) -> Stage:
    # The type, not equality: whoever passes a string has not validated it.
    if not isinstance(value, Stage):
        raise ContractTypeError("stage", field, type(value).__name__, "a Stage")
    return value


def advance_stage(current: Stage, target: Stage) -> Stage:
    """Return `target` if it may directly follow `current`.

    Parameters
    ----------
    current, target : Stage
        Where the machine is and where it is to go.

    Returns
    -------
    Stage
        `target`.

    Raises
    ------
    ContractError
        `target` does not directly follow `current`; a `ContractTypeError` (also a `TypeError`) when
        either is not a `Stage`.

    Examples
    --------
    >>> advance_stage(Stage.CREATED, Stage.PREFLIGHTED).value
    'PREFLIGHTED'
    """
    following = SUCCESSORS[_require_stage(current, "current")]
    if _require_stage(target, "target") not in following:
        allowed = " or ".join(stage.value for stage in Stage if stage in following)
        raise ContractError(
            "stage",
            "target",
            f"{current.value} -> {target.value}",
            f"{current.value} -> {allowed}" if allowed else f"nothing: {current.value} is terminal",
        )
    return target


class StageMachine:
    """The stage that one rank is in, moved only along `SUCCESSORS`.

    Parameters
    ----------
    stage : Stage
        Where to begin.

    Raises
    ------
    ContractError
        `stage` is not a `Stage`.
    """

    __slots__ = ("_stage",)

    def __init__(self, stage: Stage = Stage.CREATED) -> None:
        self._stage = _require_stage(stage, "stage")

    def __repr__(self) -> str:
        return f"StageMachine({self._stage})"

    @property
    def stage(self) -> Stage:
        """The present stage."""
        return self._stage

    @property
    def terminal(self) -> bool:
        """Whether nothing follows the present stage."""
        return self._stage in TERMINAL_STAGES

    def advance(self, target: Stage) -> Stage:
        """Move to `target` and return it; the stage stays as it was when that is refused.

        Raises
        ------
        ContractError
            As `advance_stage`.
        """
        self._stage = advance_stage(self._stage, target)
        return self._stage
