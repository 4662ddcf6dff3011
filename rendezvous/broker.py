"""What does each call do, wherever it comes from? Transitions run on a store, and waits that are answered by events.

The gRPC service and the in-process rendezvous are both thin layers over a :class:`Broker`. A wait subscribes, runs its
transition, and runs it again when a record that the transition read has changed, or when time alone may have changed
its answer; the caller's deadline bounds it. Nothing polls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reshard.rendezvous import explain, hints, joining, limits, state, transactions
from reshard.rendezvous.catalog import Catalog
from reshard.rendezvous.descriptions import Description
from reshard.rendezvous.errors import AbortedError, RendezvousTimeoutError, StaleError
from reshard.rendezvous.joining import Granted, Join, Pending
from reshard.rendezvous.keys import model_key, version_key
from reshard.rendezvous.records import Hint, HintSet, VersionState, Vote
from reshard.rendezvous.store import Store
from reshard.rendezvous.sweeping import sweep
from reshard.rendezvous.types import Decision, Facts, Progress, SlotRecord, VersionKey, WorkerInfo
from reshard.rendezvous.view import View

__all__ = ["Broker", "VersionEvent", "new_id"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_SWEEP_EVERY_S = 30.0
_PROGRESS_AFTER_S = 1.0


def new_id() -> str:
    """Return a random identifier: 32 hex digits."""
    return secrets.token_hex(limits.ID_BYTES)


@dataclass(frozen=True, slots=True)
class VersionEvent:
    """A version that is now offered, or no longer."""

    uid: str
    key: VersionKey
    offered: bool


class _NamesNotLoadedError(LookupError):
    def __init__(self, tables: Sequence[bytes], name_sets: Sequence[bytes]) -> None:
        super().__init__("names not loaded")
        self.tables = tables
        self.name_sets = name_sets


class Broker:
    """The rendezvous itself, without a wire.

    Parameters
    ----------
    store
        Where the state is.
    catalog
        Where tables and name sets are.
    """

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self.store = store
        self.catalog = catalog
        self.server_id = new_id()
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sweep, on the running loop."""
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep_forever())

    async def close(self) -> None:
        """Stop sweeping and close the store."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        await self.store.close()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            try:
                await self.catalog.sweep(*await sweep(self.store))
            except Exception:  # noqa: BLE001 - whatever it is: the next sweep is tried all the same
                _log.warning("sweeping failed; it is tried again in %g s", _SWEEP_EVERY_S, exc_info=True)

    async def register(self, worker_id: str, info: WorkerInfo, ttl_s: float) -> None:
        """Record a process life."""
        await self.store.run(lambda view: state.register(view, worker_id, info, ttl_s))

    async def beat(self, worker_id: str) -> float:
        """Prolong a worker; returns its TTL."""
        return (await self.store.run(lambda view: state.beat(view, worker_id))).value

    async def close_worker(self, worker_id: str) -> None:
        """End a worker."""
        await self.store.run(lambda view: state.close_worker(view, worker_id))

    async def open_epoch(self, model: str, run_id: str) -> int:
        """Give a run its epoch."""
        return (await self.store.run(lambda view: state.open_epoch(view, model, run_id))).value

    async def open_version(self, key: VersionKey, slots: Sequence[str], layout_epoch: int) -> str:
        """Open a version or agree with whoever did."""
        uid = new_id()
        return (await self.store.run(lambda view: state.open_version(view, key, slots, layout_epoch, uid))).value

    async def publish_slot(self, uid: str, record: SlotRecord) -> None:
        """Fill a slot; its table must have been put."""
        n_rows = await self.catalog.n_rows(record.table_digest)
        if n_rows is None:
            raise StaleError(
                f"slot {record.slot!r}: table {record.table_digest.hex()[:16]}... is not here; put it first"
            )
        rows = n_rows
        refusal = (await self.store.run(lambda view: state.publish_slot(view, uid, record, rows))).value
        if refusal is not None:
            raise refusal

    async def close_admission(self, uid: str) -> None:
        """Grant no new leases on a version."""
        await self.store.run(lambda view: state.close_admission(view, uid))

    async def retire(self, uid: str) -> bool:
        """Let a version go once no lease on it lives; tells whether it is gone."""
        return (await self.store.run(lambda view: state.retire(view, uid))).value

    async def wait_leases(self, uid: str, timeout_s: float) -> None:
        """Wait until no lease on the version lives."""

        def free(view: View) -> bool | Pending:
            leases = state.live_leases(view, uid)
            if not leases:
                return True
            holders = ", ".join(repr(row.holder) for row in list(leases.values())[:8])
            return Pending(f"{len(leases)} leases live, of {holders}")

        await self._until(free, timeout_s, f"leases of version {uid}")

    async def renew_lease(self, uid: str, lease_id: str, ttl_s: float) -> None:
        """Prolong a lease."""
        await self.store.run(lambda view: state.renew_lease(view, uid, lease_id, ttl_s))

    async def release_lease(self, uid: str, lease_id: str) -> None:
        """End a lease."""
        await self.store.run(lambda view: state.release_lease(view, uid, lease_id))

    async def await_version(
        self, wish: Join, timeout_s: float, on_progress: Callable[[Progress], Awaitable[None]] | None = None
    ) -> Granted:
        """Wait for a version, join the group's transaction to it and take a lease.

        Raises
        ------
        RendezvousTimeoutError
            Naming what was missing, lost or empty.
        """

        def look(view: View) -> Progress:
            return explain.explain_wait(view, wish.model, wish.step, wish.epoch, wish.after)

        async def report() -> None:
            if on_progress is not None:
                await on_progress((await self.store.run(look)).value)

        def attempt(view: View) -> Granted | AbortedError | Pending:
            return joining.join(view, wish)

        started = time.monotonic()
        try:
            answer: Granted | AbortedError = await self._until(attempt, timeout_s, "", report)
        except RendezvousTimeoutError as error:
            seen = (await self.store.run(look)).value
            waited_s = time.monotonic() - started
            wanted = "the latest version" if wish.step is None else f"step {wish.step}"
            raise RendezvousTimeoutError(
                f"waited {waited_s:.1f} s for {wanted} of {wish.model!r} as {wish.member!r} of {wish.group!r}: "
                f"{error}; {seen.message}",
                missing_slots=seen.missing,
                empty_slots=seen.empty,
                lost_workers=seen.lost,
                waited_s=waited_s,
            ) from None
        if isinstance(answer, AbortedError):
            raise answer
        return answer

    async def vote(self, txn_id: str, member: str, worker_id: str, vote: Vote, timeout_s: float) -> Facts:
        """Vote, and wait for the decision."""

        def unconsumed(tables: Sequence[bytes], names: Sequence[bytes], allowed: Sequence[str]) -> Sequence[str]:
            left = self.catalog.unconsumed(tables, names, allowed)
            if left is None:
                raise _NamesNotLoadedError(tables, names)
            return left

        deadline = time.monotonic() + timeout_s
        while True:
            try:
                ran = await self.store.run(
                    lambda view: transactions.cast_vote(view, txn_id, member, worker_id, vote, unconsumed)
                )
                break
            except _NamesNotLoadedError as need:
                if time.monotonic() >= deadline:  # other decisions may have had them forgotten again
                    raise RendezvousTimeoutError(
                        f"transaction {txn_id}: the names of {len(need.tables)} tables and {len(need.name_sets)} sets "
                        f"were not all here within {timeout_s:g} s",
                        waited_s=timeout_s,
                    ) from None
                await self.catalog.load_names(need.tables, need.name_sets)
        if ran.value.decision is not Decision.PENDING:
            return ran.value
        return await self._facts(txn_id, max(deadline - time.monotonic(), 0.0), Decision.PENDING)

    async def installed(
        self, txn_id: str, member: str, worker_id: str, ok: bool, reason: str, timeout_s: float
    ) -> Facts:
        """Say how installing went, and wait for the outcome."""
        ran = await self.store.run(lambda view: transactions.install(view, txn_id, member, worker_id, ok, reason))
        facts = ran.value
        if facts.outcome is not Decision.PENDING or facts.decision is not Decision.COMMIT:
            return facts
        return await self._facts(txn_id, timeout_s, Decision.COMMIT)

    async def ask(self, txn_id: str, timeout_s: float) -> Facts:
        """Return a transaction's facts; with a timeout, wait that long for the next one that is open."""
        facts = (await self.store.run(lambda view: transactions.ask(view, txn_id))).value
        if timeout_s <= 0 or facts.decision not in (Decision.PENDING, Decision.COMMIT):
            return facts
        if facts.outcome is not Decision.PENDING:
            return facts
        try:
            return await self._facts(txn_id, timeout_s, facts.decision)
        except RendezvousTimeoutError:
            return facts

    async def _facts(self, txn_id: str, timeout_s: float, beyond: Decision) -> Facts:
        """Wait for the fact after `beyond`: PENDING for the decision, COMMIT for the outcome."""

        def decided(view: View) -> Facts | Pending:
            facts = transactions.ask(view, txn_id)
            still_open = facts.decision is beyond and facts.outcome is Decision.PENDING
            return Pending(f"transaction {txn_id} is {facts.decision.value}") if still_open else facts

        return await self._until(decided, timeout_s, "the other members")

    async def watch_versions(self, model: str, timeout_s: float) -> AsyncGenerator[VersionEvent, None]:
        """Yield each version of a model as it becomes offered, and again when it no longer is."""

        def offers(view: View) -> dict[str, VersionKey]:
            record = view.get(model_key(model))
            found = {}
            for ref in record.versions if record is not None else ():
                version = view.get(version_key(ref.uid), watch=False) if ref.ready else None
                if version is not None and version.state is VersionState.READY and not state.lost_slots(view, version):
                    found[version.uid] = version.key
            return found

        deadline = time.monotonic() + timeout_s
        known: dict[str, VersionKey] = {}
        async with self.store.watch() as watch:
            while (left_s := deadline - time.monotonic()) > 0:
                ran = await self.store.run(offers)
                for uid, key in known.items():
                    if uid not in ran.value:
                        yield VersionEvent(uid, key, False)
                for uid, key in ran.value.items():
                    if uid not in known:
                        yield VersionEvent(uid, key, True)
                known = ran.value
                await watch.changed(ran.watched, min(left_s, _patience_s(ran.wake_s, ran.now)))

    async def put_hint(self, model: str, hint: Hint) -> int:
        """Record where a receiver cuts; returns the layout epoch whose hints include it."""
        return (await self.store.run(lambda view: hints.put_hint(view, model, hint))).value

    async def get_hints(self, model: str, layout_epoch: int | None) -> HintSet:
        """Return the hints of a layout epoch, the newest if None."""
        return (await self.store.run(lambda view: hints.get_hints(view, model, layout_epoch))).value

    async def describe(self) -> Description:
        """Describe everything at one moment."""
        names = {kind: sorted(await self.store.names(kind)) for kind in ("worker", "model", "group", "txn")}

        def look(view: View) -> Description:
            return explain.describe(
                view,
                store=self.store.name,
                server_id=self.server_id,
                workers=names["worker"],
                models=names["model"],
                groups=names["group"],
                transactions=names["txn"],
            )

        return (await self.store.run(look)).value

    async def version_slots(self, uid: str) -> tuple[SlotRecord, ...]:
        """Return the records of a complete version's slots."""

        def look(view: View) -> tuple[SlotRecord, ...]:
            version = state.require_version(view, uid)
            if version.state not in (VersionState.READY, VersionState.RETIRING):
                raise StaleError(f"{version.key} is {version.state.value}")
            return tuple(state.slot_records(view, version))

        return (await self.store.run(look)).value

    async def _until(
        self,
        transition: Callable[[View], T | Pending],
        timeout_s: float,
        what: str,
        report: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Run a transition until it is not pending: subscribed first, again on each event that concerns it."""
        deadline = time.monotonic() + timeout_s
        report_at = time.monotonic() + _PROGRESS_AFTER_S if report is not None else math.inf
        async with self.store.watch() as watch:
            while True:
                ran = await self.store.run(transition)
                if not isinstance(ran.value, Pending):
                    return ran.value
                now = time.monotonic()
                if now >= deadline:
                    raise RendezvousTimeoutError(
                        f"{what}: {ran.value.reason}" if what else ran.value.reason, waited_s=timeout_s
                    )
                patience_s = min(_patience_s(ran.wake_s, ran.now), deadline - now, max(report_at - now, 0.0))
                await watch.changed(ran.watched, patience_s)
                if report is not None and time.monotonic() >= report_at:
                    report_at = time.monotonic() + 10 * _PROGRESS_AFTER_S
                    await report()


def _patience_s(wake_s: float, now: float) -> float:
    """Seconds until time alone may change an answer; a little more, so that it has."""
    return wake_s - now + 0.002
