"""An interrupt (Ctrl-C, a signal handler that raises) in a refit's most awkward moments leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.refit.cluster import tp_cluster, weights

from reshard.refit import ArrayEngine, LocalTensor, Publisher, Receiver, attempt
from reshard.refit.agreement import Agreement
from reshard.refit.errors import RefitAborted
from reshard.refit.lease import LeaseKeeper
from reshard.rendezvous import Rendezvous
from reshard.rendezvous.errors import RendezvousTimeoutError
from reshard.transports import Transport, open_transport

SHAPE = (8, 4)


class Setup:
    """A trainer and a receiver, in one process."""

    def __init__(self) -> None:
        self.service = Rendezvous.in_process()
        self.wires: list[Transport] = [open_transport("memory") for _ in range(2)]
        self.publisher = Publisher(self.wires[0], self.service, model="m", slot="s", slots=["s"], buffers=1)
        self.engine = ArrayEngine({"w": np.zeros(SHAPE, np.float32)})
        self.receiver = Receiver(
            self.wires[1],
            self.service,
            self.engine,
            model="m",
            group="g",
            members=["r"],
            member="r",
            transaction_timeout_s=10.0,
        )

    def publish(self, step: int) -> None:
        held = np.full(SHAPE, step, np.float32)
        self.publisher.publish(
            epoch=0, step=step, tensors=[LocalTensor("w", "float32", SHAPE, (0, 0), held)], timeout_s=10.0
        )

    def take(self, step: int) -> None:
        self.publish(step)
        self.receiver.refit(step, timeout_s=10.0)
        assert self.holds(step)

    def holds(self, step: int) -> bool:
        return bool((np.asarray(self.engine["w"]) == step).all())

    def close(self) -> None:
        for part in (self.receiver, self.publisher, *self.wires, self.service):
            part.close()


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    try:
        yield made
    finally:
        made.close()


def interrupted(function: Callable[..., object]) -> Callable[..., object]:
    """The function; its first caller does not hear of its answer."""
    fresh = [True]

    def call(*arguments: object, **settings: object) -> object:
        answer = function(*arguments, **settings)
        if fresh:
            fresh.clear()
            raise KeyboardInterrupt
        return answer

    return call


def test_as_the_lease_begins_to_be_renewed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.take(0)
    setup.publish(1)
    monkeypatch.setattr(LeaseKeeper, "start", interrupted(LeaseKeeper.start))
    with pytest.raises(KeyboardInterrupt):
        setup.receiver.refit(1, timeout_s=10.0)
    assert setup.receiver.state == "serving"
    assert setup.holds(0)
    assert not setup.service.describe().leases
    setup.take(2)  # the only buffer can be written again, and the group's transaction is over


@pytest.mark.parametrize("after", ["await_version", "discover"])
def test_as_the_version_is_granted(setup: Setup, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """Nobody here knows of the transaction that the service has opened."""
    setup.take(0)
    setup.publish(1)
    if after == "discover":
        monkeypatch.setattr(attempt, "discover", interrupted(attempt.discover))
    else:
        monkeypatch.setattr(setup.service, "await_version", interrupted(setup.service.await_version))
    with pytest.raises(KeyboardInterrupt):
        setup.receiver.refit(1, timeout_s=10.0)
    assert setup.receiver.state == "serving"
    assert setup.holds(0)
    assert not setup.service.describe().leases
    setup.take(2)  # another version, at once: no transaction is open


def test_as_nothing_is_granted_yet(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.take(0)
    wait = setup.service.await_version

    def interrupted_wait(*arguments: object, **settings: object) -> object:
        with pytest.raises(RendezvousTimeoutError):
            wait(*arguments, **{**settings, "timeout_s": 0.05})  # type: ignore[arg-type]
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(setup.service, "await_version", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        setup.receiver.refit(1, timeout_s=10.0)
    assert setup.receiver.state == "serving"
    setup.take(1)


def test_the_others_hear_of_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        first = cluster.receivers[0]
        real = first.rendezvous.await_version

        def join(*arguments: object, member: str, **settings: object) -> object:
            answer = real(*arguments, member=member, **settings)  # type: ignore[arg-type]
            if member == first.member and "after" in settings and settings["after"] is None:
                assert cluster.all_joined()
                raise KeyboardInterrupt
            return answer

        monkeypatch.setattr(first.rendezvous, "await_version", join)
        one, other = cluster.refit(0)
        assert isinstance(one, KeyboardInterrupt)
        assert isinstance(other, RefitAborted)
        assert "KeyboardInterrupt" in str(other), "not the transaction's deadline"
        monkeypatch.undo()
        assert not cluster.rendezvous.describe().leases
        cluster.refit_ok(0)


def test_as_the_vote_is_answered(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.take(0)
    setup.publish(1)
    monkeypatch.setattr(Agreement, "yes", interrupted(Agreement.yes))
    with pytest.raises(KeyboardInterrupt):
        setup.receiver.refit(1, timeout_s=10.0)
    assert setup.receiver.state == "in_doubt"
    assert setup.holds(0)
    assert setup.receiver.resolve(timeout_s=10.0) == "serving"
    assert setup.holds(1)
    setup.take(2)


def test_as_the_installation_is_acknowledged(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.take(0)
    setup.publish(1)
    monkeypatch.setattr(Agreement, "installed", interrupted(Agreement.installed))
    with pytest.raises(KeyboardInterrupt):
        setup.receiver.refit(1, timeout_s=10.0)
    assert setup.receiver.state == "in_doubt"
    assert setup.receiver.resolve(timeout_s=10.0) == "serving"
    assert setup.holds(1)
    setup.take(2)
