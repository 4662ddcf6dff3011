"""Tensors declared equal are compared at each version, also where they lie on different slots (N9, N5)."""

from __future__ import annotations

import numpy as np
import pytest
from tests.refit.cluster import TIMEOUT_S, Cluster

from reshard.planner.options import PlanOptions
from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.aliases import class_of
from reshard.refit.engines.arrays import ArrayEngine
from reshard.refit.errors import PublishError
from reshard.refit.inplace import InPlacePublisher
from reshard.refit.tensors import LocalTensor
from reshard.rendezvous.errors import EqualityError, RendezvousTimeoutError, VersionError

EMBED = np.arange(32, dtype=np.float32).reshape(8, 4)
ALIASES = {"head": "embed"}


def stages(**settings: object) -> tuple[Cluster, ArrayEngine]:
    """Two pipeline stages: the first holds the embedding, the last the head, which is declared its alias."""
    engine = ArrayEngine({name: np.zeros((8, 4), np.float32) for name in ("embed", "head")})
    publishing = {"aliases": ALIASES, **settings}
    receiving = {"options": PlanOptions(aliases=ALIASES), "require_full_coverage": True}
    return Cluster(2, engines=[engine], publisher_settings=publishing, receiver_settings=receiving), engine


def publish(cluster: Cluster, step: int, head: np.ndarray, *, rows: int = 8, dtype: str = "float32") -> None:
    first, last = cluster.publishers
    first.publish(epoch=0, step=step, tensors=local_tensors({"embed": EMBED}), timeout_s=TIMEOUT_S)
    pieces = [LocalTensor("head", dtype, (8, 4), (a, 0), head[a : a + rows]) for a in range(0, 8, rows)]
    last.publish(epoch=0, step=step, tensors=pieces, timeout_s=TIMEOUT_S)


def test_an_alias_on_another_slot_that_is_equal_is_served() -> None:
    cluster, engine = stages()
    with cluster:
        publish(cluster, 0, EMBED.copy())
        cluster.refit_ok(0)
        assert np.array_equal(engine["head"], EMBED)


@pytest.mark.parametrize("change", ["value", "sign of zero", "rows swapped", "nan"])
def test_an_alias_on_another_slot_that_differs_refuses_the_version_and_names_both(change: str) -> None:
    head = EMBED.copy()
    if change == "value":
        head[3, 2] += 1
    elif change == "sign of zero":
        head[0, 0] = -0.0
    elif change == "rows swapped":
        head[[1, 6]] = head[[6, 1]]
    else:
        head[7, 3] = np.nan
    cluster, engine = stages()
    with cluster:
        publish(cluster, 0, EMBED.copy())
        cluster.refit_ok(0)
        with pytest.raises(EqualityError, match=r"trainer-0.*trainer-1.*alias embed \[0, 8\) x \[0, 4\)") as caught:
            publish(cluster, 1, head)
        assert caught.value.holders == ("trainer-0", "trainer-1")
        (error,) = cluster.refit(1, timeout_s=3.0)
        assert isinstance(error, VersionError | RendezvousTimeoutError)
        assert np.array_equal(engine["head"], EMBED)
        assert cluster.receivers[0].check_serving().step == 0


def test_an_alias_of_another_dtype_is_not_equal() -> None:
    cluster, _ = stages()
    with cluster, pytest.raises(EqualityError, match="alias embed"):
        publish(cluster, 0, EMBED.astype(np.float16), dtype="float16")


def test_boxes_that_are_cut_differently_are_not_compared() -> None:
    """What the documentation says: a difference there is seen by nobody."""
    cluster, engine = stages()
    with cluster:
        publish(cluster, 0, EMBED + 1, rows=4)
        cluster.refit_ok(0)
        assert np.array_equal(engine["embed"], EMBED)


def test_in_place_publishers_compare_too() -> None:
    cluster, _ = stages()
    with cluster:
        live = {"embed": EMBED.copy(), "head": EMBED + 1}
        publishers = [
            InPlacePublisher(
                cluster.trainer_transports[i],
                cluster.rendezvous,
                model="m",
                slot=cluster.slots[i],
                slots=cluster.slots,
                tensors=local_tensors({name: live[name]}),
                aliases=ALIASES,
            )
            for i, name in enumerate(("embed", "head"))
        ]
        publishers[0].publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        with pytest.raises(EqualityError, match="alias embed"):
            publishers[1].publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
        for p in publishers:
            p.close()


def test_aliases_need_digests_and_an_end() -> None:
    cluster, _ = stages()
    with cluster:
        for digests, aliases, said in ((False, ALIASES, "digests=False"), (True, {"a": "b", "b": "a"}, "a -> b -> a")):
            with pytest.raises(PublishError, match=said):
                InPlacePublisher(
                    cluster.trainer_transports[0],
                    cluster.rendezvous,
                    model="m",
                    slot="trainer-0",
                    slots=cluster.slots,
                    tensors=local_tensors({"embed": EMBED.copy()}),
                    digests=digests,
                    aliases=aliases,
                ).publish(epoch=0, step=0, timeout_s=TIMEOUT_S)
    assert class_of("x", {}) == "x"
