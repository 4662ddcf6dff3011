"""How does an inference rank take a new version? `Receiver.refit`: all ranks of its group, or none.

1. discover: await the version (tables, region bases and a lease in one answer); join the group's transaction.
2. capture, plan, certify, connect, allocate: only if anything that the plan depends on has changed.
3. read, verify: into shadow buffers, nothing live is touched; load: run the loader on materialised sources.
4. release the lease, vote, wait for the group's decision.
5. install, report it, serve when the service says so.

A failure before the vote is a no vote: the old weights serve on every rank. After a yes vote the rank never decides
by itself.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt

from reshard.planner import PlanOptions
from reshard.refit import metrics, settings
from reshard.refit.attempt import Attempt
from reshard.refit.clock import StageClock
from reshard.refit.deadline import Deadline, check_timeout
from reshard.refit.engine import Engine, StreamEngine
from reshard.refit.errors import InDoubtError, QuarantinedError, RefitError
from reshard.refit.planning import Gate, Planned, manifest_of, plan_refit, topology_digest, with_holders
from reshard.refit.reader import Reader
from reshard.refit.records import DiscoveryRecord, StagesRecord, emit
from reshard.refit.report import RefitReport
from reshard.refit.retry import RetryPolicy
from reshard.refit.streaming import Streamer, StreamPart
from reshard.refit.verify import Checks, Mode, build_checks
from reshard.rendezvous.types import VersionKey, WorkerInfo

if TYPE_CHECKING:
    from reshard.planner import ShardPart
    from reshard.rendezvous import Manifest, Rendezvous, Worker
    from reshard.transports import Transport

logger = logging.getLogger(__name__)

U8 = npt.NDArray[np.uint8]

__all__ = ["Receiver", "ServingState", "preferred_mode"]

ServingState = Literal["empty", "serving", "changing", "in_doubt", "quarantined"]


class Receiver:
    """One rank of an inference group.

    Parameters
    ----------
    transport, rendezvous
        Stay the caller's; `close` closes neither.
    engine
        See `reshard.refit.engine.Engine`.
    model, group, members, member
        The model, this engine instance's name, all its ranks' names and this rank's; members change together.
    options
        How to plan; ``instance`` and ``instances`` spread several groups over replicas.
    require_full_coverage, coverage_floor
        The coverage gate; None reads the environment.
    allow_unconsumed
        Patterns of published names that no rank of the group needs to take.
    install
        ``shadow`` or ``stream``; the engine's own ``install_mode``, or ``shadow``, if None.
    stream_bytes
        Most bytes of the arena of ``stream`` mode.
    lease
        ``none`` gives the lease back at once, for sources that never change.
    verify
        ``full`` digests every cell read whole, ``sample`` one in 16, ``off`` none.
    require_verified
        Refuse a refit in which any received byte could not be verified.
    lease_ttl_s, transaction_timeout_s
        Asked of the service. A transaction never lives longer than four fifths of the time that the call has left.
    retry
        How often a holder is dialled and the rendezvous is asked, under the call's deadline.
    stall_s
        Longest wait for one wave before its silent holders are given up for their replicas; the deadline alone if None.
    on_allocate
        Told what (``shadow``, ``staging``, ``meta``, ``loader``) and how many bytes are allocated.
    on_stage, on_state
        Told the name of each stage as it starts, and each change of `state`.
    """

    def __init__(
        self,
        transport: Transport,
        rendezvous: Rendezvous,
        engine: Engine,
        *,
        model: str,
        group: str,
        members: Sequence[str],
        member: str,
        options: PlanOptions | None = None,
        require_full_coverage: bool | None = None,
        coverage_floor: float | None = None,
        allow_unconsumed: Sequence[str] = (),
        install: Literal["shadow", "stream"] | None = None,
        stream_bytes: int = 256 << 20,
        lease: Literal["keep", "none"] = "keep",
        verify: Mode = "full",
        require_verified: bool = False,
        lease_ttl_s: float = 30.0,
        transaction_timeout_s: float = 600.0,
        worker_ttl_s: float = 10.0,
        host: str = "",
        debug_sentinel: bool | None = None,
        on_stage: Callable[[str], None] | None = None,
        on_state: Callable[[ServingState], None] | None = None,
        on_allocate: Callable[[str, int], None] | None = None,
        retry: RetryPolicy | None = None,
        stall_s: float | None = None,
    ) -> None:
        if member not in members or len(set(members)) != len(members):
            raise RefitError(f"member {member!r} must be one of the distinct members {list(members)}")
        self.model, self.group, self.member = model, group, member
        self.members = tuple(members)
        self.rank = self.members.index(member)
        self.engine = engine
        self.transport, self.rendezvous = transport, rendezvous
        self.options = options if options is not None else PlanOptions(receiver_host=host or socket.gethostname())
        self.gate = Gate(require_full_coverage, coverage_floor)
        self.allow_unconsumed = tuple(allow_unconsumed)
        if verify not in ("off", "sample", "full"):
            raise ValueError(f"verify={verify!r}: expected 'off', 'sample' or 'full'")
        mode: Literal["shadow", "stream"] = install if install is not None else preferred_mode(engine)
        if mode not in ("shadow", "stream") or lease not in ("keep", "none"):
            raise ValueError(f"install={mode!r}, lease={lease!r}: expected 'shadow' or 'stream', and 'keep' or 'none'")
        self.install_mode: Literal["shadow", "stream"] = mode
        if mode == "stream" and not isinstance(engine, StreamEngine):
            raise RefitError(f"{type(engine).__name__} cannot be written in place: it is no StreamEngine")
        self._stream_bytes = stream_bytes
        self._streamer: Streamer | None = None
        self.lease = lease
        self.verify: Mode = verify
        self.require_verified = require_verified
        self.checks: Checks | None = None
        self.lease_ttl_s, self.transaction_timeout_s = lease_ttl_s, transaction_timeout_s
        self._worker_ttl_s = worker_ttl_s
        self._host = host or socket.gethostname()
        self._sentinel = debug_sentinel
        self._on_stage, self._on_state = on_stage, on_state
        self.one_shot = False
        self.retry = retry if retry is not None else RetryPolicy()
        self.stall_s = check_timeout(stall_s, "stall_s") if stall_s is not None else None
        self.reader = Reader(
            transport, swaps=bool(getattr(engine, "swaps", False)), on_allocate=on_allocate, retry=self.retry
        )
        self.planned: Planned | None = None
        self.serving: VersionKey | None = None
        """The version that this rank serves; None while it serves nothing."""
        self.state: ServingState = "empty"
        self._worker: Worker | None = None
        self._doubt: Attempt | None = None
        self._busy = threading.Lock()
        self._signature = b""
        self._served: VersionKey | None = None
        self._closed = False

    # -- public calls

    def refit(
        self,
        version: Literal["latest"] | int | VersionKey = "latest",
        *,
        after: VersionKey | None = None,
        only: Sequence[str] = (),
        timeout_s: float,
    ) -> RefitReport:
        """Take a version, together with the rest of the group.

        Parameters
        ----------
        version
            ``latest``, a step of the present epoch, or an exact version.
        after
            With ``latest``: wait for one newer than this.
        only
            Patterns of source names; empty takes all.
        timeout_s
            One deadline for everything.

        Raises
        ------
        RefitAborted
            Another member could not go on; the old weights serve.
        QuarantinedError, InDoubtError
            This rank serves nothing; see their documentation for the way out.
        ReshardError
            Any other failure came before the vote: the old weights serve.
        """
        deadline = Deadline(timeout_s, f"refit of member {self.member!r} of group {self.group!r}")
        if not self._busy.acquire(blocking=False):
            raise RefitError(f"member {self.member!r} is refitting already")
        try:
            if self._closed:
                raise RefitError(f"member {self.member!r}: the receiver is closed")
            if self._doubt is not None:
                self._settle(deadline)
            attempt = Attempt(
                self, StageClock(self._on_stage), deadline, tuple(only), settings.debug_sentinel(self._sentinel)
            )
            try:
                return attempt.run(version, after)
            finally:
                if attempt.in_doubt:
                    self._doubt = attempt
        finally:
            self._busy.release()

    def load(
        self,
        version: Literal["latest"] | int | VersionKey = "latest",
        *,
        only: Sequence[str] = (),
        timeout_s: float,
    ) -> RefitReport:
        """Load once: as `refit`, but peers are released as part of the load, after verification and before the lease.

        On failure too: nothing of it is left when this returns or raises, but the engine's weights.
        """
        self.one_shot = True
        try:
            return self.refit(version, only=only, timeout_s=timeout_s)
        finally:
            self.one_shot = False
            self.planned = None
            self._drop_streamer()
            self.reader.close()

    async def arefit(
        self,
        version: Literal["latest"] | int | VersionKey = "latest",
        *,
        after: VersionKey | None = None,
        only: Sequence[str] = (),
        timeout_s: float,
    ) -> RefitReport:
        """`refit` for asyncio: it runs in a worker thread."""
        return await asyncio.to_thread(self.refit, version, after=after, only=only, timeout_s=timeout_s)

    def resolve(self, *, timeout_s: float) -> ServingState:
        """Learn the decision of a refit that is in doubt, and act on it; returns the state afterwards.

        Raises
        ------
        InDoubtError
            If it still cannot be learnt.
        """
        with self._busy:
            if self._doubt is not None:
                self._settle(Deadline(timeout_s, f"resolving member {self.member!r}"))
            return self.state

    def check_serving(self) -> VersionKey:
        """The version served.

        Raises
        ------
        InDoubtError, QuarantinedError, RefitError
            If this rank serves nothing.
        """
        if self.state == "serving" and self.serving is not None:
            return self.serving
        if self.state == "in_doubt":
            raise InDoubtError(
                f"member {self.member!r} voted yes and does not know the decision; it serves nothing new"
            )
        if self.state == "quarantined":
            raise QuarantinedError(f"member {self.member!r} is quarantined: it serves nothing until a refit completes")
        raise RefitError(f"member {self.member!r} has no version yet ({self.state})")

    def close(self) -> None:
        """Release peers, registrations and memory and the rendezvous; idempotent. The engine keeps its weights."""
        self._closed = True
        self._drop_streamer()
        self.reader.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- what an attempt needs

    def set_state(self, state: ServingState, serving: VersionKey | None) -> None:
        """Change what this rank says that it serves."""
        self.serving = serving
        if state in ("serving", "quarantined", "changing"):
            self._served = serving
        if state != self.state:
            self.state = state
            if self._on_state is not None:
                self._on_state(state)

    def worker(self) -> Worker:
        """The registration of this process at the rendezvous, renewed if it was lost."""
        if self._worker is None or self._worker.lost:
            info = WorkerInfo("receiver", self.model, self._host, self.member, {})
            self._worker = self.rendezvous.register(info, ttl_s=self._worker_ttl_s)
        return self._worker

    def tables(self, manifest: Manifest, deadline: Deadline) -> dict[bytes, ShardPart]:
        """The parts of a manifest's slots."""
        wanted = list(dict.fromkeys(r.table_digest for r in manifest.slots))
        return self.rendezvous.get_tables(wanted, timeout_s=deadline.remaining("get tables"))

    def discovery(self, manifest: Manifest, planned: Planned, fresh: bool, seconds: float) -> DiscoveryRecord:
        """Emit and return the discovery record."""
        record = DiscoveryRecord(
            self.rank,
            self.member,
            self.model,
            manifest.version.epoch,
            manifest.version.step,
            len(manifest.slots),
            sum(r.empty for r in manifest.slots),
            len(planned.sources.tensors),
            planned.sources.n_shards,
            len({r.table_digest for r in manifest.slots}) if fresh else 0,
            fresh,
            round(seconds, 6),
        )
        emit(record)
        return record

    def plan_for(
        self,
        manifest: Manifest,
        only: Sequence[str],
        clock: StageClock,
        deadline: Deadline,
        *,
        without: frozenset[str] = frozenset(),
    ) -> tuple[Planned, bool]:
        """The plan for a manifest, and whether it is a new one.

        It is new where a table, the selection, the options or the engine's memory has changed since the last plan.
        """
        topology = topology_digest(manifest, only, self.options, without)
        signature = self.engine.signature()
        if self.planned is not None and self.planned.topology == topology and signature == self._signature:
            return self.planned, False
        parts = self.tables(manifest, deadline)
        sources = with_holders(manifest, parts)
        whole = manifest_of(sources)
        sources = sources.replace(removed=sorted(without & set(sources.by_name)))
        clock.enter("capture")
        captured = self.engine.capture(whole)
        clock.enter("plan")
        planned = plan_refit(
            captured,
            sources,
            self.engine.parameters(),
            self.options,
            only=only,
            gate=self.gate,
            rank=self.rank,
            topology=topology,
        )
        self._signature = signature
        return planned, True

    def adopt(self, planned: Planned) -> None:
        """Put a new plan in force."""
        self.planned = None
        self._drop_streamer()
        if self.install_mode == "shadow":
            self.checks = build_checks(planned.plan) if self.verify != "off" else None
            n_cells = self.checks.n_cells if self.checks is not None else {}
            self.reader.adopt(planned.plan, n_cells, planned.materialised_buffers)
        self.planned = planned

    def allocate(self) -> None:
        """Allocate and register what the plan in force needs and is not there yet."""
        if self.install_mode == "shadow":
            self.reader.allocate()
        elif self._streamer is None and self.planned is not None:
            self._streamer = Streamer(
                self.transport,
                self.reader.links,
                self.planned,
                budget_bytes=self._stream_bytes,
                verify=self.verify,
                reader=self.reader,
            )

    def drop(self, names: frozenset[str]) -> None:
        """Release peers that failed, and give up memory that a late write of theirs may still change."""
        self.reader.links.release(names)
        if self.transport.quarantined():
            self._drop_streamer()
            if self.reader.poisoned():
                self.planned = None

    def seed(self, planned: Planned, buffers: Mapping[str, U8]) -> None:
        """Fill buffers that the plan writes only in part with the live bytes."""
        self.require_trusted(planned)
        for name in planned.seeded:
            self.engine.read_live(name, buffers[name])

    def require_trusted(self, planned: Planned) -> None:
        """Refuse a partial refit of a quarantined rank."""
        if planned.seeded and self.state == "quarantined":
            raise QuarantinedError(
                f"member {self.member!r} is quarantined and this refit writes {planned.seeded[0]!r} only in part "
                f"({len(planned.seeded)} such parameters): it needs old weights that cannot be trusted; refit in full"
            )

    def run_loader(self, planned: Planned, buffers: Mapping[str, U8]) -> None:
        """Run the engine's loader on materialised sources, into shadow buffers."""
        sources = self.reader.materialised(planned.materialised_buffers)
        wanted = {n: buffers[n] for n in planned.captured.loader_buffers if n in buffers}
        self.engine.load_materialised(sources, wanted)

    def install(self, planned: Planned) -> None:
        """Make the shadow buffers live; a destination that was reallocated meanwhile is refused."""
        self._require_same_memory()
        self.engine.install(self.reader.shadow().buffers)
        self.reader.turn(again=not self.one_shot)
        self._signature = self.engine.signature()

    def stream_parts(self, planned: Planned) -> Sequence[StreamPart]:
        """The parts to be streamed into the paused engine."""
        self._require_same_memory()
        if self._streamer is None:
            raise RefitError("nothing was allocated for streaming")
        return self._streamer.parts()

    def stream_engine(self) -> StreamEngine:
        """The engine, as one that can be written in place."""
        if not isinstance(self.engine, StreamEngine):
            raise RefitError(f"{type(self.engine).__name__} cannot be written in place: it is no StreamEngine")
        return self.engine

    def stream_budget(self, planned: Planned) -> int:
        """Bytes of the arena that ``stream`` mode takes, or would take."""
        if self._streamer is not None:
            return self._streamer.arena_bytes
        return min(self._stream_bytes, int(planned.plan.buffer_bytes.sum()))

    def check_installed(self) -> None:
        """Whether the engine still has the memory that was written."""
        if self.engine.signature() != self._signature:
            raise RefitError("a parameter was reallocated while the refit was installed")

    def pause_engine(self) -> None:
        """Stop serving, for ``stream`` mode."""
        if isinstance(self.engine, StreamEngine):
            self.engine.pause()

    def resume_engine(self) -> None:
        """Serve again, after a refit in ``stream`` mode that ended well or touched nothing."""
        if self.install_mode == "stream" and isinstance(self.engine, StreamEngine):
            self.engine.resume()

    def observe(self, record: StagesRecord) -> None:
        """Count a refit in the metrics, where they are installed."""
        metrics.observe_refit(record)

    def _require_same_memory(self) -> None:
        if self.engine.signature() != self._signature:
            raise RefitError("a parameter was reallocated after this refit was planned")

    def _drop_streamer(self) -> None:
        streamer, self._streamer = self._streamer, None
        if streamer is not None:
            streamer.close()

    def restore_state(self) -> None:
        """Serve again what was served before an aborted refit."""
        if self.state == "in_doubt":
            self.set_state("serving" if self._served is not None else "empty", self._served)

    def _settle(self, deadline: Deadline) -> None:
        attempt = self._doubt
        if attempt is None:
            return
        attempt.settle(deadline)
        if not attempt.in_doubt:
            self._doubt = None


def preferred_mode(engine: Engine) -> Literal["shadow", "stream"]:
    """The install mode that an engine asks for by its ``install_mode``; ``shadow`` if it asks for none."""
    asked = getattr(engine, "install_mode", "shadow")
    if asked == "stream":
        return "stream"
    if asked == "shadow":
        return "shadow"
    raise ValueError(f"{type(engine).__name__}.install_mode={asked!r}: expected 'shadow' or 'stream'")
