"""One member's conversation with the service about one transaction: vote, ask, report the install.

After a yes the member never decides by itself: an answer that is lost is asked for until it is known.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.refit.deadline import Deadline
from reshard.refit.errors import InDoubtError
from reshard.rendezvous.errors import RendezvousError
from reshard.rendezvous.types import Decision, Facts

if TYPE_CHECKING:
    from reshard.rendezvous import Manifest, Rendezvous

logger = logging.getLogger(__name__)

__all__ = ["Agreement"]

_GOODBYE_S = 5.0
"""How long a failed refit may take to say so."""
_ASK_S = 2.0
"""How long one question for a lost decision may take."""
_PAUSE_S = 0.1


class Agreement:
    """A member's side of a transaction.

    Parameters
    ----------
    manifest
        Names the transaction.
    member
        Who speaks.
    """

    def __init__(self, rendezvous: Rendezvous, manifest: Manifest, member: str) -> None:
        self._rendezvous = rendezvous
        self._manifest = manifest
        self._member = member

    def yes(
        self,
        *,
        plan_digest: bytes,
        consumed: Sequence[str],
        allow_unconsumed: Sequence[str],
        wire_bytes: int,
        timeout_s: float,
    ) -> Facts:
        """Vote yes and wait for the decision; a RendezvousError means that it is not known."""
        return self._rendezvous.vote(
            self._manifest.transaction,
            self._member,
            True,
            plan_digest=plan_digest,
            names_consumed=consumed,
            allow_unconsumed=allow_unconsumed,
            wire_bytes=wire_bytes,
            timeout_s=timeout_s,
        )

    def no(self, error: BaseException, left_s: float) -> None:
        """Vote no, as well as it can be done."""
        try:
            self._rendezvous.vote(
                self._manifest.transaction,
                self._member,
                False,
                reason=_reason(error),
                timeout_s=min(_GOODBYE_S, max(left_s, 1.0)),
            )
        except RendezvousError as other:
            logger.warning("member %s could not say no to %s: %s", self._member, self._manifest.version, other)

    def ask(self, deadline: Deadline, *, outcome: bool) -> Facts:
        """Ask until the first fact (with ``outcome``, the second) is known, or known to be unknown.

        Raises
        ------
        InDoubtError
            If it cannot be learnt before the deadline.
        """
        last: RendezvousError | None = None
        wait_s = 0.0  # only a fact that is known to be open is waited for
        while deadline.left_s > 0:
            try:
                facts = self._rendezvous.ask_decision(
                    self._manifest.transaction, wait_s=wait_s, timeout_s=wait_s + _ASK_S
                )
            except RendezvousError as error:
                last = error
                threading.Event().wait(min(_PAUSE_S, max(deadline.left_s, 0.0)))
                continue
            if facts.decision is Decision.UNKNOWN:
                return facts
            if (facts.outcome if outcome else facts.decision) is not Decision.PENDING:
                return facts
            wait_s = min(_ASK_S, max(deadline.left_s, 1e-3))
        raise InDoubtError(
            f"member {self._member!r} voted yes on {self._manifest.version} and could not learn the "
            f"{'outcome' if outcome else 'decision'} within {deadline.timeout_s:g} s; it serves nothing new until "
            "Receiver.resolve does"
        ) from last

    def installed(self, error: BaseException | None, left_s: float) -> Facts | None:
        """Report how the install went and wait for the outcome; None where no answer came."""
        try:
            return self._rendezvous.installed(
                self._manifest.transaction,
                self._member,
                error is None,
                reason=_reason(error) if error is not None else "",
                timeout_s=max(left_s, _GOODBYE_S),
            )
        except RendezvousError as other:
            logger.warning(
                "member %s could not report its install of %s: %s", self._member, self._manifest.version, other
            )
            return None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000].replace("\0", " ")
