"""Which version is it to be, and how long may it be read? Await it, join its transaction, hold its lease.

1. The worker is registered, then the version is awaited; both are asked again under the retry policy.
2. The answer is the manifest: tables by digest, region bases, the transaction, and a lease that is renewed from here
   on (`reshard.refit.lease`).
3. After the last read the lease is asked for once more. One that has ended matters only where a holder has no header
   that would say whether it has written its memory since.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from reshard.refit.agreement import Agreement
from reshard.refit.deadline import Deadline
from reshard.refit.errors import RefitAborted, TornReadError
from reshard.refit.lease import LeaseKeeper
from reshard.rendezvous import limits
from reshard.rendezvous.errors import AbortedError, RendezvousError, RendezvousUnavailableError
from reshard.rendezvous.types import VersionKey

if TYPE_CHECKING:
    from reshard.refit.receiver import Receiver
    from reshard.rendezvous import Manifest

logger = logging.getLogger(__name__)

__all__ = ["Discovery", "discover", "withdraw"]

_WITHDRAWAL_S = 0.5
_PATIENCE = 0.8
"""Share of the call's time after which the service takes a missing vote for a no."""


class Discovery:
    """An awaited version, and the lease on it.

    Parameters
    ----------
    receiver
        Whose it is.
    manifest
        The service's answer. Its lease runs out by itself until `keep` is called.
    """

    def __init__(self, receiver: Receiver, manifest: Manifest) -> None:
        self.manifest = manifest
        self._member = receiver.member
        self._keeps = receiver.lease == "keep"
        self._keeper: LeaseKeeper | None = LeaseKeeper(receiver.rendezvous, manifest.lease)

    def keep(self, deadline: Deadline) -> None:
        """Keep the lease alive from now on until `release`; give it back at once where the receiver keeps none."""
        if self._keeper is None:
            return
        if self._keeps:
            self._keeper.start()
            return
        self._keeper.release(deadline.left_s)
        self._keeper = None

    def check_lease(self, deadline: Deadline) -> None:
        """Whether what was read up to now was read under the lease, as far as that matters.

        Raises
        ------
        TornReadError
            The lease has ended, and a holder has no header.
        RendezvousError, RefitTimeoutError
            The service does not answer, so that nobody knows.
        """
        ended = self._keeper.held(deadline) if self._keeper is not None else ""
        if not ended:
            return
        version = self.manifest.version
        bare = [s.slot for s in self.manifest.slots if s.header_region < 0 and not s.empty]
        if bare:
            raise TornReadError(
                f"the lease on {version}: {ended}; holder {bare[0]!r} has no header that would say whether it has "
                "written its memory since"
            )
        logger.warning(
            "member %s: the lease on %s: %s; no holder has written its memory since, so what was read is good",
            self._member,
            version,
            ended,
        )

    def begin_release(self, left_s: float) -> None:
        """Send the lease back, if it is still held, and go on; see `LeaseKeeper.begin_release`."""
        if self._keeper is not None:
            self._keeper.begin_release(left_s)

    def release(self, left_s: float) -> None:
        """Give the lease back, if it is still held; see `LeaseKeeper.release`."""
        if self._keeper is not None:
            self._keeper.release(left_s)


def discover(
    receiver: Receiver,
    version: Literal["latest"] | int | VersionKey,
    after: VersionKey | None,
    only: Sequence[str],
    deadline: Deadline,
) -> Discovery:
    """Await a version together with the rest of the group.

    Parameters
    ----------
    version, after, only
        See `reshard.refit.receiver.Receiver.refit`.

    Raises
    ------
    RefitAborted
        The group does not take it.
    RendezvousError
        It does not come, or the service does not answer.
    """
    r = receiver

    def ask(left_s: float) -> Manifest:
        worker = r.worker(left_s)
        left_s = min(left_s, deadline.remaining("discover"))
        return r.rendezvous.await_version(
            r.model,
            group=_party(r.group, only),
            members=r.members,
            member=r.member,
            worker=worker,
            want=version,
            after=after,
            lease_ttl_s=r.lease_ttl_s,
            # Missing votes are decided by the service before this call gives up, so that waiting is not doubt.
            transaction_timeout_s=min(r.transaction_timeout_s, _PATIENCE * left_s),
            timeout_s=left_s,
        )

    # First, so that a policy that the service suggests is that of this very call.
    r.retry.run(r.worker, RendezvousUnavailableError, deadline, "register", share=False)
    try:
        manifest = r.retry.run(ask, RendezvousUnavailableError, deadline, "discover", share=False)
    except AbortedError as error:
        raise RefitAborted(f"the group does not take the version: {error}; the old weights serve") from error
    return Discovery(r, manifest)


def withdraw(receiver: Receiver, only: Sequence[str], error: BaseException, left_s: float) -> None:
    """Leave the transaction that this member may have joined in a call whose answer nobody got: vote no, end its lease.

    Such a member is granted the same again when it asks; ``after`` the last version there can ever be it opens no other
    transaction. Where there is none to leave this takes half a second.
    """
    r = receiver
    try:
        manifest = r.rendezvous.await_version(
            r.model,
            group=_party(r.group, only),
            members=r.members,
            member=r.member,
            worker=r.worker(_WITHDRAWAL_S),
            after=VersionKey(r.model, limits.MAX_STEP, limits.MAX_STEP),
            lease_ttl_s=r.lease_ttl_s,
            timeout_s=_WITHDRAWAL_S,
        )
    except RendezvousError as other:
        logger.debug("member %s has nothing to withdraw from: %s", r.member, other)
        return
    Agreement(r.rendezvous, manifest, r.member).no(error, left_s)
    Discovery(r, manifest).release(left_s)


def _party(group: str, only: Sequence[str]) -> str:
    """Who decides together: the members of a group that take the same selection.

    Members that were given different selections never meet, so that their transactions end in ABORT for want of votes;
    if they met, they would say that they serve one version and hold parts of two.
    """
    return f"{group} only {hashlib.sha256(repr(sorted(only)).encode()).hexdigest()[:16]}" if only else group
