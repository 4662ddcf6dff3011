"""How does a client reach a service? Calls over gRPC that survive reconnects, and caches of what it knows.

Every call has one deadline. While it lasts, a call that met an outage is sent again after a growing, jittered pause:
all calls may be repeated. What remains of an outage at the deadline is RendezvousUnavailableError. Content travels by
:mod:`~reshard.rendezvous.remote_content`, versions by :mod:`~reshard.rendezvous.remote_versions`; the other calls are
one small message each way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reshard.rendezvous import messages
from reshard.rendezvous.link import Link, inner_s
from reshard.rendezvous.optional import pb
from reshard.rendezvous.records import Vote
from reshard.rendezvous.remote_content import ContentCalls
from reshard.rendezvous.remote_versions import VersionCalls
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.tablecache import TableCache
from reshard.rendezvous.types import Facts, SlotRecord, TLSFiles, VersionKey, WorkerInfo

__all__ = ["RemoteBackend"]


class RemoteBackend(ContentCalls, VersionCalls):
    """Calls to the service at ``host:port``.

    Parameters
    ----------
    address
        ``host:port``.
    token
        Bearer token to send with each call.
    tls
        None speaks plain text.
    cache
        Tables and topologies; None makes one. Clients of one process may share it.
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: TLSFiles | None = None, cache: TableCache | None = None
    ) -> None:
        super().__init__(Link(address, token, tls), cache if cache is not None else TableCache())

    async def close(self) -> None:
        """Close the channel."""
        await self._link.close()

    async def register(self, worker_id: str, info: WorkerInfo, ttl_s: float, timeout_s: float) -> RetryHint | None:
        """Record a process life."""
        request = pb.RegisterRequest(
            worker_id=messages.id_to_bytes(worker_id),
            role=pb.ROLE_TRAINER if info.role == "trainer" else pb.ROLE_RECEIVER,
            model=info.model,
            host=info.host,
            name=info.name,
            endpoints=dict(info.endpoints),
            ttl_ms=messages.s_to_ms(ttl_s),
        )
        response = await self._link.unary("Register", request, pb.RegisterResponse, timeout_s)
        return messages.hint_from_message(response.retry_hint) if response.HasField("retry_hint") else None

    async def heartbeat(self, worker_id: str, every_s: float, on_sent: Callable[[float], None]) -> None:
        """Beat until cancelled, or until the stream breaks."""
        request = pb.HeartbeatRequest(worker_id=messages.id_to_bytes(worker_id)).SerializeToString()
        await self._link.exchange("Heartbeat", request, every_s, on_sent)

    async def unregister(self, worker_id: str, timeout_s: float) -> None:
        """End a worker."""
        request = pb.UnregisterRequest(worker_id=messages.id_to_bytes(worker_id))
        await self._link.unary("Unregister", request, pb.UnregisterResponse, timeout_s)

    async def open_epoch(self, model: str, run_id: str, timeout_s: float) -> int:
        """Give a run its epoch."""
        request = pb.OpenEpochRequest(model=model, run_id=run_id)
        return (await self._link.unary("OpenEpoch", request, pb.OpenEpochResponse, timeout_s)).epoch

    async def open_version(self, key: VersionKey, slots: Sequence[str], layout_epoch: int, timeout_s: float) -> str:
        """Open a version."""
        request = pb.OpenVersionRequest(
            model=key.model, epoch=key.epoch, step=key.step, slots=slots, layout_epoch=layout_epoch
        )
        response = await self._link.unary("OpenVersion", request, pb.OpenVersionResponse, timeout_s)
        return messages.id_from_bytes("uid", response.uid)

    async def publish_slot(self, uid: str, record: SlotRecord, timeout_s: float) -> None:
        """Fill a slot."""
        request = pb.PublishSlotRequest(
            uid=messages.id_to_bytes(uid),
            slot=messages.record_to_message(record),
            region_bases=messages.bases_of([record]),
            digest_root=record.digest_root,
            roots=dict(record.roots),
        )
        await self._link.unary("PublishSlot", request, pb.PublishSlotResponse, timeout_s)

    async def renew_lease(self, uid: str, lease_id: str, ttl_s: float, timeout_s: float) -> None:
        """Prolong a lease."""
        request = pb.RenewLeaseRequest(
            uid=messages.id_to_bytes(uid), lease=messages.id_to_bytes(lease_id), ttl_ms=messages.s_to_ms(ttl_s)
        )
        await self._link.unary("RenewLease", request, pb.RenewLeaseResponse, timeout_s)

    async def release_lease(self, uid: str, lease_id: str, timeout_s: float) -> None:
        """End a lease."""
        request = pb.ReleaseLeaseRequest(uid=messages.id_to_bytes(uid), lease=messages.id_to_bytes(lease_id))
        await self._link.unary("ReleaseLease", request, pb.ReleaseLeaseResponse, timeout_s)

    async def close_admission(self, uid: str, timeout_s: float) -> None:
        """Grant no new leases."""
        request = pb.CloseAdmissionRequest(uid=messages.id_to_bytes(uid))
        await self._link.unary("CloseAdmission", request, pb.CloseAdmissionResponse, timeout_s)

    async def wait_leases(self, uid: str, timeout_s: float) -> None:
        """Wait for the leases' end."""

        def request(left_s: float) -> pb.WaitLeasesRequest:
            return pb.WaitLeasesRequest(uid=messages.id_to_bytes(uid), timeout_ms=messages.s_to_ms(inner_s(left_s)))

        await self._link.unary("WaitLeases", request, pb.WaitLeasesResponse, timeout_s, waits=True)

    async def retire(self, uid: str, timeout_s: float) -> bool:
        """Let a version go."""
        request = pb.RetireRequest(uid=messages.id_to_bytes(uid))
        return (await self._link.unary("Retire", request, pb.RetireResponse, timeout_s)).gone

    async def vote(self, txn_id: str, member: str, worker_id: str, vote: Vote, timeout_s: float) -> Facts:
        """Vote, and wait for the decision."""

        def request(left_s: float) -> pb.VoteRequest:
            return pb.VoteRequest(
                transaction=messages.id_to_bytes(txn_id),
                member=member,
                worker_id=messages.id_to_bytes(worker_id),
                yes=vote.yes,
                reason=vote.reason,
                identity=vote.identity,
                plan_digest=vote.plan_digest,
                names_digest=vote.names_digest,
                allow_unconsumed=vote.allow_unconsumed,
                wire_bytes=vote.wire_bytes,
                timeout_ms=messages.s_to_ms(inner_s(left_s)),
            )

        response = await self._link.unary("Vote", request, pb.VoteResponse, timeout_s, waits=True)
        return messages.facts_from_message(response.facts)

    async def installed(
        self, txn_id: str, member: str, worker_id: str, ok: bool, reason: str, timeout_s: float
    ) -> Facts:
        """Say how installing went, and wait for the outcome."""

        def request(left_s: float) -> pb.InstalledRequest:
            return pb.InstalledRequest(
                transaction=messages.id_to_bytes(txn_id),
                member=member,
                worker_id=messages.id_to_bytes(worker_id),
                ok=ok,
                reason=reason,
                timeout_ms=messages.s_to_ms(inner_s(left_s)),
            )

        response = await self._link.unary("Installed", request, pb.InstalledResponse, timeout_s, waits=True)
        return messages.facts_from_message(response.facts)

    async def ask(self, txn_id: str, wait_s: float, timeout_s: float) -> Facts:
        """Ask for facts."""

        def request(left_s: float) -> pb.AskDecisionRequest:
            wait_ms = messages.s_to_ms(min(wait_s, inner_s(left_s))) if wait_s else 0
            return pb.AskDecisionRequest(transaction=messages.id_to_bytes(txn_id), timeout_ms=wait_ms)

        response = await self._link.unary("AskDecision", request, pb.AskDecisionResponse, timeout_s + wait_s)
        return messages.facts_from_message(response.facts)
