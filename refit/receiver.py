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

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from reshard.planner import PlanOptions
from reshard.refit import settings
from reshard.refit.attempt import Attempt
from reshard.refit.awaiting import AsyncCalls
from reshard.refit.clock import StageClock
from reshard.refit.deadline import Deadline, check_timeout
from reshard.refit.devices import Device, device_of_engine
from reshard.refit.engine import Engine, InstallMode, install_mode_of
from reshard.refit.errors import RefitError
from reshard.refit.names import names_of
from reshard.refit.planning import Gate
from reshard.refit.reader import Reader
from reshard.refit.report import RefitReport
from reshard.refit.retry import RetryPolicy, policy_of
from reshard.refit.standing import ServingState, Standing
from reshard.refit.turns import Turns
from reshard.refit.verify import Mode, check_mode
from reshard.refit.workbench import BenchSettings, Workbench
from reshard.rendezvous.types import VersionKey, WorkerInfo

if TYPE_CHECKING:
    from reshard.rendezvous import Rendezvous, Worker
    from reshard.transports import Transport

__all__ = ["Receiver", "ServingState"]


class Receiver(AsyncCalls):
    """One rank of an inference group. Its calls are awaitable too (`reshard.refit.awaiting`).

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
    cut_hints
        Whether publishers are told where this rank cuts the source tensors.
    verify
        ``full`` digests every cell read whole, ``sample`` one in 16, ``off`` none.
    require_verified
        Refuse a refit in which any received byte could not be verified.
    lease_ttl_s, transaction_timeout_s
        Asked of the service. A transaction never lives longer than four fifths of the time that the call has left.
    retry
        How often a holder is dialled and the rendezvous is asked, under the call's deadline. If None the environment's
        ``RESHARD_RETRY_*``, else what the rendezvous suggests, else `RetryPolicy()`.
    stall_s
        Longest wait for one wave before its silent holders are given up for their replicas; the deadline alone if None.
    device
        Where destinations lie: a `reshard.refit.devices.Device`; the one that holds the engine's weights if None, where
        the transport reaches it, else the host.
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
        install: InstallMode | None = None,
        stream_bytes: int = 256 << 20,
        lease: Literal["keep", "none"] = "keep",
        cut_hints: bool = True,
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
        device: Device | None = None,
    ) -> None:
        self.members = names_of(members, "members")
        self.allow_unconsumed = names_of(allow_unconsumed, "allow_unconsumed")
        if member not in self.members or len(set(self.members)) != len(self.members):
            raise RefitError(f"member {member!r} must be one of the distinct members {list(self.members)}")
        if lease not in ("keep", "none"):
            raise ValueError(f"lease={lease!r}: expected 'keep' or 'none'")
        self.model, self.group, self.member = model, group, member
        self.rank = self.members.index(member)
        self.engine = engine
        self.transport, self.rendezvous = transport, rendezvous
        self._host = host or socket.gethostname()
        self.options = replace(
            options if options is not None else PlanOptions(receiver_host=self._host), round_spans=True
        )
        self.install_mode = install_mode_of(engine, install)
        self.lease = lease
        self.require_verified = require_verified
        self.lease_ttl_s, self.transaction_timeout_s = lease_ttl_s, transaction_timeout_s
        self._retry = retry
        self.retry = retry if retry is not None else policy_of(settings.retry(), None)
        self.stall_s = check_timeout(stall_s, "stall_s") if stall_s is not None else None
        self.reader = Reader(
            transport,
            swaps=bool(getattr(engine, "swaps", False)),
            on_allocate=on_allocate,
            retry=self.retry,
            device=device if device is not None else device_of_engine(engine, transport.capabilities.memory_kinds),
        )
        self.bench = Workbench(
            transport,
            rendezvous,
            engine,
            self.reader,
            BenchSettings(
                model,
                group,
                member,
                self.rank,
                self.options,
                Gate(require_full_coverage, coverage_floor),
                self.install_mode,
                stream_bytes,
                check_mode(verify),
                cut_hints,
            ),
        )
        self.one_shot = False
        self.standing = Standing(member, self._tell_state)
        self._turns = Turns(f"member {member!r}")
        self._worker_ttl_s = worker_ttl_s
        self._sentinel = debug_sentinel
        self._on_stage, self._on_state = on_stage, on_state
        self._worker: Worker | None = None
        self._doubt: Attempt | None = None

    @property
    def state(self) -> ServingState:
        """``empty``, ``serving``, ``changing``, ``in_doubt`` or ``quarantined``."""
        return self.standing.state

    @property
    def serving(self) -> VersionKey | None:
        """The version that this rank serves; None while it serves nothing."""
        return self.standing.serving

    @property
    def verify(self) -> Mode:
        """``off``, ``sample`` or ``full``; may be changed between refits. From ``off``, the next one plans anew."""
        return self.bench.settings.verify

    @verify.setter
    def verify(self, mode: Mode) -> None:
        check_mode(mode)
        with self._turns.take(f"verify = {mode!r}"):
            self.bench.set_verify(mode)

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
        return self._refit(version, after, only, timeout_s, one_shot=False)

    def _refit(
        self,
        version: Literal["latest"] | int | VersionKey,
        after: VersionKey | None,
        only: Sequence[str],
        timeout_s: float,
        *,
        one_shot: bool,
    ) -> RefitReport:
        deadline = Deadline(timeout_s, f"refit of member {self.member!r} of group {self.group!r}")
        only = names_of(only, "only")
        with self._turns.take("load()" if one_shot else "refit()", until=deadline):
            if self._doubt is not None:
                self._settle(deadline)
            self.one_shot = one_shot
            attempt = Attempt(self, StageClock(self._on_stage), deadline, only, settings.debug_sentinel(self._sentinel))
            try:
                return attempt.run(version, after)
            finally:
                if attempt.in_doubt:
                    self._doubt = attempt
                elif one_shot:
                    self.bench.forget()

    def load(
        self,
        version: Literal["latest"] | int | VersionKey = "latest",
        *,
        only: Sequence[str] = (),
        timeout_s: float,
    ) -> RefitReport:
        """Load once: as `refit`, but peers are released as part of the load, after verification and before the lease.

        On failure too: nothing of it is left when this returns or raises, but the engine's weights. A rank that is
        in doubt keeps the memory that it may have to install, until it has learnt the decision.
        """
        return self._refit(version, None, only, timeout_s, one_shot=True)

    def resolve(self, *, timeout_s: float) -> ServingState:
        """Learn the decision of a refit that is in doubt, and act on it; returns the state afterwards.

        Raises
        ------
        InDoubtError
            If it still cannot be learnt.
        RefitTimeoutError
            If a refit in another thread outlives the deadline.
        """
        deadline = Deadline(timeout_s, f"resolving member {self.member!r}")
        with self._turns.take("resolve()", deadline):
            if self._doubt is not None:
                self._settle(deadline)
            return self.state

    def check_serving(self) -> VersionKey:
        """The version served.

        Raises
        ------
        InDoubtError, QuarantinedError, RefitError
            If this rank serves nothing.
        """
        return self.standing.check()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Release peers, registrations and memory and the rendezvous; idempotent. The engine keeps its weights.

        No refit is broken off, and nothing is freed under one. Called from within a refit, by a hook or the engine,
        this returns at once, and all is released when the refit ends. One in another thread is waited for, for
        ``timeout_s``; if None until its own deadline and 10 s more.

        Raises
        ------
        RefitTimeoutError
            It is under way still: a hook or the engine hangs. Nothing was released; all is if it returns.
        """
        self._turns.close(self._release_all, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- what an attempt needs

    def worker(self, left_s: float = 30.0) -> Worker:
        """The registration of this process at the rendezvous, renewed within ``left_s`` seconds if it was lost."""
        if self._worker is None or self._worker.lost:
            info = WorkerInfo("receiver", self.model, self._host, self.member, {})
            self._worker = self.rendezvous.register(info, ttl_s=self._worker_ttl_s, timeout_s=left_s)
            if self._retry is None:
                self.retry = policy_of(settings.retry(), getattr(self._worker, "retry_hint", None))
                self.reader.links.retry = self.retry
        return self._worker

    def _tell_state(self, state: ServingState) -> None:
        if self._on_state is not None:
            self._on_state(state)

    def _release_all(self) -> None:
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            doubt.abandon()
        self.bench.forget()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _settle(self, deadline: Deadline) -> None:
        attempt = self._doubt
        if attempt is None:
            return
        attempt.settle(deadline)
        if not attempt.in_doubt:
            self._doubt = None
            if self.one_shot:
                self.bench.forget()
