"""R8 on the durable store: the service dies between the vote and its answer, and the member learns the one decision."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="the rendezvous service needs grpcio")

from tests.ports import lasting_port
from tests.refit.cluster import holds, tp_cluster, weights
from tests.rendezvous.conftest import RedisServer, find_redis

from reshard.refit.errors import QuarantinedError
from reshard.rendezvous import Rendezvous
from reshard.rendezvous.errors import RendezvousUnavailableError
from reshard.rendezvous.service import Server, serve

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(find_redis() is None, reason="no redis-server or valkey-server is installed"),
    pytest.mark.skipif(importlib.util.find_spec("redis") is None, reason="the redis package is not installed"),
]


class Restartable:
    """A service on one port that can be ended without a word and started again on its store."""

    def __init__(self, store: str) -> None:
        self.address = f"127.0.0.1:{lasting_port()}"
        self.store = store
        self.server: Server = serve(listen=self.address, store=store)

    def restart(self) -> None:
        self.server.close(grace_s=0.0)
        self.server = serve(listen=self.address, store=self.store)


class LosesTheAnswer:
    """A client that hears nothing of its vote, because the service is gone when it would."""

    def __init__(self, inner: Rendezvous, service: Restartable) -> None:
        self.inner, self.service = inner, service
        self.voted = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def vote(self, *args: object, **kwargs: object) -> object:
        self.inner.vote(*args, **kwargs)  # type: ignore[arg-type]
        if not self.voted.is_set():
            self.voted.set()
            self.service.restart()
            raise RendezvousUnavailableError("the connection was lost")
        raise AssertionError("a member votes once")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.mark.parametrize("durable", [True, False])
def test_the_decision_survives_the_service_on_redis_alone(redis_server: RedisServer, durable: bool) -> None:
    service = Restartable(redis_server.url if durable else "memory")
    cluster = tp_cluster(receiver_settings={"worker_ttl_s": 8.0})
    cluster.rendezvous.close()
    cluster.rendezvous = Rendezvous.connect(service.address)
    cluster.publishers = [cluster.publisher(i) for i in range(2)]
    cluster.receivers = [cluster.receiver(i) for i in range(2)]
    try:
        cluster.publish(0, weights(0))
        cluster.refit_ok(0)
        cluster.publish(1, weights(1))
        states: list[str] = []
        cluster.receivers[1].rendezvous = LosesTheAnswer(cluster.rendezvous, service)  # type: ignore[assignment]
        cluster.receivers[1]._on_state = states.append
        first, second = cluster.refit(1)
        assert states[0] == "in_doubt"
        if durable:
            for result in (first, second):
                if isinstance(result, BaseException):
                    raise result
            assert [r.state for r in cluster.receivers] == ["serving", "serving"]
            assert all(holds(cluster.engines[r], weights(1), r) for r in range(2))  # type: ignore[arg-type]
        else:
            assert isinstance(second, QuarantinedError)
            assert "serving" not in {r.state for r in cluster.receivers}
    finally:
        cluster.close()
        service.server.close()
