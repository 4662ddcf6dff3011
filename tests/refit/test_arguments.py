"""A bare string where names are expected is refused: its characters may be patterns, and one of them ``*``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster, tp_cluster, weights

from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.engines.loader import LoaderEngine
from reshard.refit.errors import PublishError
from reshard.refit.inplace import InPlacePublisher
from reshard.refit.publisher import Publisher
from reshard.refit.receiver import Receiver

MISTAKES: dict[str, Callable[[Cluster], object]] = {
    "allow_unconsumed": lambda c: c.receiver(0, allow_unconsumed="visual.*"),
    "members": lambda c: Receiver(
        c.receiver_transports[0], c.rendezvous, c.engines[0], model="m", group="g", members="tp0", member="t"
    ),
    "only": lambda c: c.receivers[0].refit(0, only="q*", timeout_s=TIMEOUT_S),
    "wire_dtype_exceptions": lambda c: Publisher(
        c.trainer_transports[0],
        c.rendezvous,
        model="m",
        slot="trainer-0",
        slots=c.slots,
        wire_dtype_exceptions="*router*",
    ),
    "slots": lambda c: InPlacePublisher(
        c.trainer_transports[0],
        c.rendezvous,
        model="m",
        slot="a",
        slots="abc",
        tensors=local_tensors({"w": np.zeros(4, np.float32)}),
    ),
    "allow_unattributed": lambda c: LoaderEngine(
        torch.nn.Linear(2, 2), load_weights=lambda weights: None, allow_unattributed="visual.*"
    ),
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_bare_string_is_refused(argument: str) -> None:
    with tp_cluster() as cluster:
        cluster.publish(0, weights(0))
        with pytest.raises(TypeError, match=rf"{argument}: got the string .*expected a sequence"):
            MISTAKES[argument](cluster)
        assert not cluster.leftovers()


def test_names_that_are_no_strings_are_refused() -> None:
    with tp_cluster() as cluster, pytest.raises(TypeError, match="slots: got 3 of type int"):
        Publisher(cluster.trainer_transports[0], cluster.rendezvous, model="m", slot="a", slots=["a", 3])  # type: ignore[list-item]


def test_a_closed_publisher_publishes_nothing() -> None:
    with tp_cluster() as cluster:
        publisher = cluster.publishers[0]
        publisher.close()
        with pytest.raises(PublishError, match="slot 'trainer-0': the publisher is closed"):
            publisher.publish(epoch=0, step=0, tensors=local_tensors(weights(0)), timeout_s=TIMEOUT_S)
        live = InPlacePublisher(
            cluster.trainer_transports[1],
            cluster.rendezvous,
            model="m",
            slot="trainer-1",
            slots=cluster.slots,
            tensors=local_tensors(weights(0)),
        )
        live.close()
        with pytest.raises(PublishError, match="slot 'trainer-1': the publisher is closed"):
            live.publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        assert not cluster.rendezvous.describe().versions
        assert publisher.registered_bytes == 0
