"""Two servers on one Redis: what one of them keeps a copy of, the other may have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

pytest.importorskip("redis", reason="redis is not installed: pip install 'reshard[redis]'")
from tests.rendezvous.redis_records import read_records

from reshard.rendezvous import state
from reshard.rendezvous.errors import VersionError
from reshard.rendezvous.keys import model_key
from reshard.rendezvous.records import Model
from reshard.rendezvous.redis_store import RedisStore
from reshard.rendezvous.types import VersionKey
from reshard.rendezvous.view import View

T = TypeVar("T")
pytestmark = pytest.mark.redis


class Pair:
    """Two stores on one loop."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.one, self.other = (self.wait(RedisStore.open(url)) for _ in range(2))

    def wait(self, call: Awaitable[T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(call, 60.0)

        return self.loop.run_until_complete(bounded())

    def close(self) -> None:
        for store in (self.one, self.other):
            self.wait(store.close())
        self.loop.close()


@pytest.fixture
def pair(redis_url: str) -> Iterator[Pair]:
    stores = Pair(redis_url)
    yield stores
    stores.close()


def open_epoch(run: str) -> Callable[[View], int]:
    return lambda view: state.open_epoch(view, "m", run)


def test_a_write_rests_on_what_is_there_and_not_on_an_old_copy(pair: Pair) -> None:
    assert pair.wait(pair.one.run(open_epoch("a"))).value == 0
    assert pair.wait(pair.other.run(open_epoch("b"))).value == 1
    assert pair.wait(pair.one.run(open_epoch("c"))).value == 2, "its copy says epoch 0"
    with pytest.raises(VersionError, match="which epoch 2 replaced"):
        pair.wait(pair.other.run(open_epoch("a")))


def test_an_answer_without_writes_and_a_refusal_rest_on_what_is_there_too(pair: Pair) -> None:
    def epoch(view: View) -> int:
        model = view.get(model_key("m"))
        return model.epoch if model is not None else -1

    key = VersionKey("m", 0, 3)
    opened = pair.wait(pair.one.run(lambda view: state.open_version(view, key, ["s"], 0, "0" * 32))).value
    assert pair.wait(pair.other.run(epoch)).value == 0
    pair.wait(pair.one.run(open_epoch("later")))
    assert pair.wait(pair.other.run(epoch)).value == 1
    with pytest.raises(VersionError, match="epoch 0 was replaced by epoch 1"):
        pair.wait(pair.other.run(lambda view: state.open_version(view, key, ["s"], 0, opened)))


def test_writes_that_meet_are_all_applied(pair: Pair, redis_url: str) -> None:
    async def both() -> list[int]:
        runs = [(store, f"{name}-{i}") for i in range(40) for name, store in (("a", pair.one), ("b", pair.other))]
        ran = await asyncio.gather(*(store.run(open_epoch(run)) for store, run in runs))
        return [done.value for done in ran]

    assert sorted(pair.wait(both())) == list(range(80)), "no epoch is given twice"
    model = read_records(redis_url)["model:m"]
    assert isinstance(model, Model)
    assert model.epoch == 79


def test_a_record_that_went_and_came_again_is_not_taken_for_the_old_one(pair: Pair) -> None:
    """Revisions come from one counter: the same record, deleted and written anew, has another."""
    pair.wait(pair.one.run(open_epoch("a")))
    pair.wait(pair.other.run(lambda view: view.delete(model_key("m"))))
    pair.wait(pair.other.run(open_epoch("b")))
    pair.wait(pair.other.run(open_epoch("c")))
    assert pair.wait(pair.one.run(open_epoch("d"))).value == 2
