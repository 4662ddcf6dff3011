"""The second account of the rules: plain sets and numbers, and what they say of a call. Written from the design."""

from __future__ import annotations

import dataclasses
import itertools
import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from reshard.rendezvous.records import Vote
from reshard.rendezvous.store import MemoryStore
from reshard.rendezvous.types import Decision, SlotRecord

MODEL = "model"
SLOT_SETS = [("s0",), ("s0", "s1"), ("s0", "s1", "s2")]
GROUPS = {"pair": ("a", "b"), "single": ("c",)}
TTL_S = 10.0
LEASE_S = 20.0
TRANSACTION_S = 30.0
HOUR_S = 3600.0
WEEK_S = 7 * 24 * HOUR_S
OPEN = Decision.PENDING
FINAL = {Decision.COMMIT, Decision.ABORT, Decision.SERVE, Decision.QUARANTINE}


@dataclasses.dataclass
class ShadowWorker:
    role: str
    name: str
    registered_at: float
    expires_at: float


@dataclasses.dataclass
class ShadowVersion:
    key: tuple[int, int]
    slots: tuple[str, ...]
    layout_epoch: int
    opened_at: float
    status: str = "staging"  # staging, ready, refused, closed, gone
    wanted_gone: bool = False
    filled: dict[str, SlotRecord] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class ShadowLease:
    uid: str
    expires_at: float


@dataclasses.dataclass
class ShadowTransaction:
    id: str
    uid: str
    group: str
    seq: int
    members: tuple[str, ...]
    deadline: float
    joined: dict[str, str] = dataclasses.field(default_factory=dict)
    leases: dict[str, str] = dataclasses.field(default_factory=dict)
    votes: dict[str, Vote] = dataclasses.field(default_factory=dict)
    installed: dict[str, bool] = dataclasses.field(default_factory=dict)
    decision: Decision = OPEN
    outcome: Decision = OPEN
    decided_at: float = 0.0
    forgotten: bool = False

    @property
    def finished(self) -> bool:
        return self.decision is Decision.ABORT or self.outcome is not OPEN


def identifier(number: int) -> str:
    return f"{number:032x}"


def refused(error: type, call) -> None:
    try:
        answer = call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}, got {answer!r}")


class Shadow(RuleBasedStateMachine):
    """A store beside the shadow of what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.store = MemoryStore(lambda: self.now)
        self.open()
        self.ids = map(identifier, itertools.count(1))
        self.workers: dict[str, ShadowWorker] = {}
        self.epoch = -1
        self.step = -1
        self.runs: dict[str, int] = {}
        self.versions: dict[str, ShadowVersion] = {}
        self.progress: dict[str, tuple[int, int, bytes]] = {}  # slot -> step, layout epoch, table
        self.last_filled: dict[str, tuple[str, str, bytes]] = {}  # slot -> version, worker, table
        self.leases: dict[str, ShadowLease] = {}
        self.transactions: dict[str, ShadowTransaction] = {}
        self.last_joined: dict[tuple[str, str], int] = {}  # (group, member) -> seq
        self.sequences = dict.fromkeys(GROUPS, 0)
        self.hints: list[tuple[int, dict[tuple[str, str], bytes]]] = [(0, {})]
        self.said_at: dict[tuple[str, str], float] = {}
        self.used_at = -math.inf  # the last call for the model, or sweep that found a worker of it

    def open(self) -> None:
        """Hook for other stores."""

    def run(self, transition):
        return self.store.run_now(transition).value

    def snapshot(self) -> dict:
        """All records by key."""
        return dict(self.store.records)

    def records(self, kind: type) -> list:
        return [record for record in self.snapshot().values() if isinstance(record, kind)]

    def alive(self, worker_id: str) -> bool:
        worker = self.workers.get(worker_id)
        return worker is not None and worker.expires_at > self.now

    def known(self, worker_id: str) -> bool:
        """A worker that lives or was lost within the hour."""
        return self.workers[worker_id].expires_at + HOUR_S > self.now

    def live_leases(self, uid: str) -> list[str]:
        return [lease_id for lease_id, lease in self.leases.items() if lease.uid == uid and lease.expires_at > self.now]

    def offered(self) -> dict[str, ShadowVersion]:
        return {
            uid: version
            for uid, version in self.versions.items()
            if version.status == "ready" and all(self.alive(record.worker_id) for record in version.filled.values())
        }

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.step = epoch, -1
        self.progress, self.last_filled = {}, {}
        for uid, version in self.versions.items():
            if version.status != "gone":
                self.drop(uid, version)

    def drop(self, uid: str, version: ShadowVersion) -> None:
        version.wanted_gone = True
        version.status = "closed" if self.live_leases(uid) else "gone"

    def pick(self, data, things, label: str):
        return data.draw(st.sampled_from(sorted(things)), label=label)
