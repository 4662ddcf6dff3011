"""How far is a refit, and which way may it go? The stage machine of one rank's transaction.

CREATED -> PREFLIGHTED -> LOADED -> PREPARED -> MUTATING -> VERIFIED -> PUBLISHED. Up to PREPARED a failure leads to
ABORTING and ABORTED and the old weights serve; PREPARED without a decision is IN_DOUBT; from MUTATING on a failure
leads to ABORTING and QUARANTINED.
"""

from __future__ import annotations

from enum import Enum

from reshard.refit.errors import RefitError

__all__ = ["RefitStage", "StageMachine"]


class RefitStage(Enum):
    """Stages of one rank's refit."""

    CREATED = "created"
    PREFLIGHTED = "preflighted"
    LOADED = "loaded"
    PREPARED = "prepared"
    IN_DOUBT = "in_doubt"
    MUTATING = "mutating"
    VERIFIED = "verified"
    PUBLISHED = "published"
    ABORTING = "aborting"
    ABORTED = "aborted"
    QUARANTINED = "quarantined"


S = RefitStage
_NEXT: dict[RefitStage, frozenset[RefitStage]] = {
    S.CREATED: frozenset((S.PREFLIGHTED, S.ABORTING)),
    S.PREFLIGHTED: frozenset((S.LOADED, S.ABORTING)),
    S.LOADED: frozenset((S.PREPARED, S.ABORTING)),
    S.PREPARED: frozenset((S.MUTATING, S.IN_DOUBT, S.ABORTING)),
    S.IN_DOUBT: frozenset((S.MUTATING, S.ABORTING)),
    S.MUTATING: frozenset((S.VERIFIED, S.ABORTING)),
    S.VERIFIED: frozenset((S.PUBLISHED, S.ABORTING)),
    S.PUBLISHED: frozenset(),
    S.ABORTING: frozenset((S.ABORTED, S.QUARANTINED)),
    S.ABORTED: frozenset(),
    S.QUARANTINED: frozenset(),
}
_MUTATED = frozenset((S.MUTATING, S.VERIFIED))


class StageMachine:
    """The stage of one transaction; refuses every step that is not in the diagram."""

    def __init__(self) -> None:
        self._stage = S.CREATED
        self._mutated = False

    @property
    def stage(self) -> RefitStage:
        """Where it is."""
        return self._stage

    @property
    def mutated(self) -> bool:
        """Whether MUTATING was ever reached: the old weights can no longer be promised."""
        return self._mutated

    @property
    def terminal(self) -> bool:
        """Whether it has ended."""
        return not _NEXT[self._stage]

    def advance(self, to: RefitStage) -> None:
        """Go one step.

        Raises
        ------
        RefitError
            If the diagram has no such step, or it would call a mutated rank ABORTED (or an untouched one QUARANTINED).
        """
        allowed = _NEXT[self._stage]
        if self._stage is S.ABORTING:
            allowed = frozenset((S.QUARANTINED if self._mutated else S.ABORTED, S.QUARANTINED))
        if to not in allowed:
            names = ", ".join(sorted(s.name for s in allowed)) or "nothing: it has ended"
            raise RefitError(f"a refit at {self._stage.name} cannot go to {to.name}; expected {names}")
        self._stage = to
        self._mutated |= to in _MUTATED

    def fail(self) -> RefitStage:
        """Go to ABORTING and on to ABORTED or QUARANTINED; returns the terminal stage. A terminal stage stays."""
        if not self.terminal:
            if self._stage is not S.ABORTING:
                self.advance(S.ABORTING)
            self.advance(S.QUARANTINED if self._mutated else S.ABORTED)
        return self._stage
