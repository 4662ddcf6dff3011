"""What is refused at the door, by name.

A bare string where names are expected: its characters may be patterns, and one of them ``*``. Memory that does not hold
what its label says.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.refit.cluster import TIMEOUT_S, Cluster, tp_cluster, weights

from reshard.planner.errors import DTypeError, TableError
from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.engines.loader import LoaderEngine
from reshard.refit.errors import PublishError
from reshard.refit.inplace import InPlacePublisher
from reshard.refit.publisher import Publisher
from reshard.refit.receiver import Receiver
from reshard.refit.tensors import LocalTensor

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


# -- tensors that would arrive as other values, or not at all

F32 = np.arange(6, dtype=np.float32)
WRONG: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "other byte order": (PublishError, "stored as >f4", lambda: local_tensors({"w": F32.astype(">f4")})),
    "floats labelled as integers": (
        PublishError,
        "labelled int32 .* holds float32",
        lambda: LocalTensor("w", "int32", (6,), (0,), F32),
    ),
    "float16 labelled bfloat16": (
        PublishError,
        "labelled bfloat16 .* holds float16",
        lambda: LocalTensor("w", "bfloat16", (6,), (0,), F32.astype(np.float16)),
    ),
    "torch's labelled otherwise": (
        PublishError,
        "labelled bfloat16 .* holds int16",
        lambda: LocalTensor("w", "bfloat16", (6,), (0,), torch.zeros(6, dtype=torch.int16)),
    ),
    "other width": (
        PublishError,
        "labelled float32 .4 bytes .* holds float64 .8 bytes",
        lambda: LocalTensor("w", "float32", (6,), (0,), F32.astype(np.float64)),
    ),
    "packed elements": (
        PublishError,
        "int4 packs 2 elements in a byte",
        lambda: LocalTensor("w", "int4", (2, 4), (0, 0), np.zeros((2, 4), np.uint8)),
    ),
    "complex": (DTypeError, "unknown dtype label 'complex64'", lambda: local_tensors({"w": F32.astype(np.complex64)})),
    "sparse": (
        PublishError,
        "layout torch.sparse_coo",
        lambda: LocalTensor("w", "float32", (4, 4), (0, 0), torch.eye(4).to_sparse()),
    ),
    "a list": (TypeError, "data of type list", lambda: LocalTensor("w", "float32", (1,), (0,), [1.0])),  # type: ignore[arg-type]
    "a name that is none": (TypeError, "a name of type int", lambda: LocalTensor(5, "float32", (6,), (0,), F32)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_memory_that_does_not_hold_what_its_label_says_is_refused_by_name(what: str) -> None:
    kind, words, make = WRONG[what]
    with pytest.raises(kind, match=rf"tensor ('w'|5): .*{words}"):
        make()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"w": F32}, "tensors of type dict"),
        (None, "tensors of type NoneType"),
        ([F32], r"tensors\[0\] is of type ndarray"),
        ([LocalTensor("w", "float32", (4,), (0,), torch.zeros(4, device="meta"))], "'w' is on meta"),
    ],
)
def test_what_is_no_list_of_local_tensors_is_refused_by_both_publishers(given: object, words: str) -> None:
    with tp_cluster() as cluster:
        with pytest.raises((TypeError, PublishError), match=rf"slot 'trainer-0': .*{words}"):
            cluster.publishers[0].publish(epoch=0, step=0, tensors=given, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
        with pytest.raises((TypeError, PublishError), match=rf"slot 'x': .*{words}"):
            InPlacePublisher(
                cluster.trainer_transports[0],
                cluster.rendezvous,
                model="m",
                slot="x",
                slots=["x"],
                tensors=given,  # type: ignore[arg-type]
            )


def test_an_array_engine_says_which_array_it_refuses() -> None:
    with pytest.raises(TableError, match="array 'w': stored as >f4"):
        ArrayEngine({"w": F32.astype(">f4")})
    with pytest.raises(DTypeError, match="array 'w': dtype 'int4'"):
        ArrayEngine({"w": np.zeros(4, np.uint8)}, dtypes={"w": "int4"})
