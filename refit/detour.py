"""A holder fails: who has what it owed? Go on without it, until nobody else has what is missing.

1. What raises a `TransportError` is tried again without the holders that it blames, which are released first, with
   nothing left behind on them.
2. It is raised where it blames nobody new.
3. Where the holders that are left do not have everything, the first failure is the reason: `HolderLostError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from reshard.planner.errors import CoverageError, PlanError
from reshard.refit.deadline import Deadline
from reshard.refit.errors import HolderLostError
from reshard.refit.waves import failed_peers
from reshard.transports.errors import TransportError

if TYPE_CHECKING:
    from reshard.refit.account import Account
    from reshard.refit.workbench import Workbench
    from reshard.rendezvous import Manifest

logger = logging.getLogger(__name__)

__all__ = ["Detour"]

Result = TypeVar("Result")


class Detour:
    """The holders that one refit goes without.

    Parameters
    ----------
    bench
        Releases them.
    manifest
        Names all holders.
    account
        Keeps whom it goes without: those that are left here, and those that were lost in a read and replaced there.
    """

    def __init__(self, bench: Workbench, manifest: Manifest, account: Account) -> None:
        self._bench, self._account = bench, account
        self._slots = frozenset(slot.slot for slot in manifest.slots)
        self._cause: TransportError | None = None

    def run(self, step: Callable[[], Result], deadline: Deadline) -> Result:
        """Call ``step`` until it returns; it reads ``account.without`` at each call.

        Raises
        ------
        HolderLostError
            What is missing nobody else has.
        TransportError
            One that blames nobody, or nobody new.
        Exception
            Whatever else ``step`` raises, at once.
        """
        while True:
            try:
                return step()
            except TransportError as error:
                self._leave(error, deadline)
            except (CoverageError, PlanError) as gap:
                if self._cause is None:
                    raise
                raise HolderLostError(self._account.without, self._cause, gap) from self._cause

    def _leave(self, error: TransportError, deadline: Deadline) -> None:
        bad = failed_peers(error) & self._slots
        self._bench.drop(bad, deadline.left_s)
        if not bad or bad <= self._account.without:
            raise error
        self._account.without |= bad
        self._cause = error
        logger.warning("member %s goes on without %s: %s", self._bench.settings.member, ", ".join(sorted(bad)), error)
