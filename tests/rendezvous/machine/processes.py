"""Processes start, beat, stop and start anew; time passes."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from tests.rendezvous.machine.shadow import (
    GROUPS,
    LEASE_S,
    MODEL,
    SLOT_SETS,
    TRANSACTION_S,
    TTL_S,
    Shadow,
    ShadowWorker,
    refused,
)

from reshard.rendezvous import state
from reshard.rendezvous.errors import WorkerLostError
from reshard.rendezvous.types import WorkerInfo


class ProcessRules(Shadow):
    @initialize()
    def some_workers(self) -> None:
        for slot in SLOT_SETS[-1]:
            self.register("trainer", slot)
        for member in itertools.chain.from_iterable(GROUPS.values()):
            self.register("receiver", member)

    @rule(role=st.sampled_from(["trainer", "receiver"]), number=st.integers(0, 2))
    def restart(self, role: str, number: int) -> None:
        """A process starts anew, whether or not its former life is known to have ended."""
        self.register(role, SLOT_SETS[-1][number] if role == "trainer" else "abc"[number])

    def register(self, role: str, name: str) -> None:
        worker_id = next(self.ids)
        info = WorkerInfo(role, MODEL, f"host-{name}", name)
        for _ in range(2):  # a repeated call is the same call
            self.run(lambda view: state.register(view, worker_id, info, TTL_S))
        self.workers[worker_id] = ShadowWorker(role, name, self.now, self.now + TTL_S)
        self.used_at = self.now

    @rule(data=st.data())
    def beat(self, data) -> None:
        worker_id = self.pick(data, self.workers, "worker")
        if self.alive(worker_id):
            assert self.run(lambda view: state.beat(view, worker_id)) == TTL_S
            self.workers[worker_id].expires_at = self.now + TTL_S
        else:
            refused(WorkerLostError, lambda: self.run(lambda view: state.beat(view, worker_id)))

    @rule()
    def all_beat(self) -> None:
        for worker_id in self.workers:
            if self.alive(worker_id):
                self.run(lambda view, worker_id=worker_id: state.beat(view, worker_id))
                self.workers[worker_id].expires_at = self.now + TTL_S

    @rule(data=st.data())
    def close_worker(self, data) -> None:
        self.lose(self.pick(data, self.workers, "worker"))

    def lose(self, worker_id: str) -> None:
        self.run(lambda view: state.close_worker(view, worker_id))
        self.workers[worker_id].expires_at = min(self.workers[worker_id].expires_at, self.now)

    @rule(
        seconds=st.sampled_from([0.5, 3.0, 9.0, TTL_S, LEASE_S, TRANSACTION_S]),
        beating=st.sampled_from([True, True, False]),
    )
    def pass_time(self, seconds: float, beating: bool) -> None:
        """Time passes; workers beat meanwhile, or none does."""
        until = self.now + seconds
        while beating and self.now + TTL_S / 2 < until:
            self.now += TTL_S / 2
            self.all_beat()
        self.now = until
        if beating:
            self.all_beat()

    def some_worker(self, data, role: str, name: str) -> str:
        """Mostly a live one; else any of that name, whatever it is."""
        if data.draw(st.sampled_from([True, True, True, False]), label="live"):
            return self.live_worker(role, name)
        mine = [worker_id for worker_id, worker in self.workers.items() if worker.name == name] or list(self.workers)
        return data.draw(st.sampled_from(mine[-3:]), label="worker")

    def live_worker(self, role: str, name: str) -> str:
        """The newest live process of that name, started now if there is none."""
        for worker_id, worker in reversed(self.workers.items()):
            if (worker.role, worker.name) == (role, name) and self.alive(worker_id):
                return worker_id
        self.register(role, name)
        return list(self.workers)[-1]
