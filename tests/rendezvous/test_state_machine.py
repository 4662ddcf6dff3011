"""The rendezvous' state machine against a second, simpler account of the same rules.

Hypothesis drives publishes, heartbeats, time, process restarts, leases, retirements, votes and housekeeping in any
order. A shadow keeps what must be true in plain sets and numbers, written from the design and not from ``state.py``;
each call's answer is compared with what the shadow expects, and after each step these invariants hold: a READY version
has all its slots from live workers of one step; a version under a live lease is never gone; a lost worker is never
offered; within an epoch a step never goes back; no version is visible in part; each of a transaction's two facts is
decided once.

The rules are in ``tests/rendezvous/machine``, one module for each thing that happens.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from tests.rendezvous.machine.decisions import DecisionRules
from tests.rendezvous.machine.hints import HintRules
from tests.rendezvous.machine.housekeeping import HousekeepingRules
from tests.rendezvous.machine.invariants import Invariants
from tests.rendezvous.machine.joins import JoinRules
from tests.rendezvous.machine.processes import ProcessRules
from tests.rendezvous.machine.versions import VersionRules
from tests.rendezvous.redis_records import read_records

from reshard.rendezvous.redis_store import RedisStore


class RendezvousMachine(ProcessRules, HousekeepingRules, VersionRules, JoinRules, DecisionRules, HintRules, Invariants):
    """All rules on one store in memory."""


class RedisMachine(RendezvousMachine):
    """The same over Redis: two servers' stores take turns, either may be restarted, and both must behave as one."""

    url = ""

    def open(self) -> None:
        import redis

        self.loop = asyncio.new_event_loop()
        with redis.Redis.from_url(self.url) as client:
            client.flushall()
        self.stores = [self.wait(RedisStore.open(self.url)) for _ in range(2)]
        self.turns = itertools.cycle([0, 0, 1, 0, 1, 1])

    def wait(self, call):
        return self.loop.run_until_complete(asyncio.wait_for(call, 60.0))

    def run(self, transition):
        def at_shadow_time(view):
            view.now = self.now
            return transition(view)

        return self.wait(self.stores[next(self.turns)].run(at_shadow_time)).value

    def snapshot(self) -> dict:
        return read_records(self.url)

    @rule(number=st.integers(0, 1))
    def restart_server(self, number: int) -> None:
        self.wait(self.stores[number].close())
        self.stores[number] = self.wait(RedisStore.open(self.url))

    def teardown(self) -> None:
        for store in self.stores:
            self.wait(store.close())
        self.loop.close()


RendezvousMachine.TestCase.settings = settings(
    settings.default, max_examples=2 * settings.default.max_examples, stateful_step_count=60
)
TestRendezvousMachine = RendezvousMachine.TestCase


@pytest.mark.redis
@pytest.mark.timeout(300)
def test_two_servers_on_redis_behave_as_one(redis_url):
    machine = type("RedisMachineHere", (RedisMachine,), {"url": redis_url})
    few = max(8, settings.default.max_examples // 12)
    run_state_machine_as_test(machine, settings=settings(settings.default, max_examples=few, stateful_step_count=40))
