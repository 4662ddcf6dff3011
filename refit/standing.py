"""What does a rank serve now, and where did it stand before? Its state and version, told to whoever listens.

empty -> changing -> serving          the first refit, and the next ones
serving -> in_doubt -> ...            voted yes, the decision is not known
changing -> quarantined               the install of this or another rank failed
quarantined -> changing -> serving    mended by a complete refit
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from reshard.refit.errors import InDoubtError, QuarantinedError, RefitError

if TYPE_CHECKING:
    from reshard.rendezvous.types import VersionKey

__all__ = ["ServingState", "Standing"]

ServingState = Literal["empty", "serving", "changing", "in_doubt", "quarantined"]


class Standing:
    """State and served version of one rank.

    Parameters
    ----------
    member
        For messages.
    tell
        Called with each new state.

    Attributes
    ----------
    state : str
        ``empty``, ``serving``, ``changing``, ``in_doubt`` or ``quarantined``.
    serving : VersionKey or None
        The version that the rank serves; None while it serves nothing.
    """

    def __init__(self, member: str, tell: Callable[[ServingState], None]) -> None:
        self._member, self._tell = member, tell
        self.state: ServingState = "empty"
        self.serving: VersionKey | None = None
        self._before_doubt: ServingState = "empty"
        self._served: VersionKey | None = None

    def change(self, state: ServingState, serving: VersionKey | None = None) -> None:
        """Stand elsewhere."""
        self.serving = serving
        if state == "in_doubt" and self.state != "in_doubt":
            self._before_doubt = self.state
        if state in ("serving", "quarantined", "changing"):
            self._served = serving
        if state != self.state:
            self.state = state
            self._tell(state)

    def restore(self) -> None:
        """Stand again where it stood before an aborted refit: what was quarantined stays so."""
        if self.state == "in_doubt":
            self.change(self._before_doubt, self._served)

    def check(self) -> VersionKey:
        """The version served.

        Raises
        ------
        InDoubtError, QuarantinedError, RefitError
            If this rank serves nothing.
        """
        who = f"member {self._member!r}"
        if self.state == "serving" and self.serving is not None:
            return self.serving
        if self.state == "in_doubt":
            raise InDoubtError(f"{who} voted yes and does not know the decision; it serves nothing new")
        if self.state == "quarantined":
            raise QuarantinedError(f"{who} is quarantined: it serves nothing until a refit completes")
        raise RefitError(f"{who} has no version yet ({self.state})")
