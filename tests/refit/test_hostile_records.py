"""A trainer whose slot record is not what it holds: each lie is refused with its name, in time, and changes nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from reshard.planner.errors import ReshardError
from reshard.refit import ArrayEngine, LocalTensor, Publisher, Receiver
from reshard.rendezvous import Rendezvous
from reshard.rendezvous.types import SlotRecord
from reshard.transports import Transport, open_transport

Lie = Callable[[SlotRecord], SlotRecord]
NAMES, SLOTS, LIAR = ("a", "b"), ("t0", "t1"), "t1"
ROWS, COLUMNS = 16, 8


def bases(change: Callable[[np.ndarray], np.ndarray]) -> Lie:
    return lambda r: dataclasses.replace(r, region_bases=change(r.region_bases).astype(np.uint64))


def sizes(nbytes: int) -> Lie:
    return lambda r: dataclasses.replace(r, region_bytes=np.full_like(r.region_bytes, nbytes))


def endpoint(change: Callable[[bytes], bytes]) -> Lie:
    return lambda r: dataclasses.replace(r, endpoints={"memory": change(r.endpoints["memory"])})


def field(**values: object) -> Lie:
    return lambda r: dataclasses.replace(r, **values)  # type: ignore[arg-type]


def flipped(seed: int) -> Callable[[bytes], bytes]:
    def change(message: bytes) -> bytes:
        rng, damaged = random.Random(seed), bytearray(message)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return bytes(damaged)

    return change


LIES: dict[str, tuple[Lie, str]] = {
    "a page on": (bases(lambda b: b + np.uint64(4096)), "t1"),
    "address 0": (bases(np.zeros_like), "0x0"),
    "the end of memory": (bases(lambda b: np.full_like(b, 2**64 - 4096)), "0xfffffffffffff000"),
    "regions swapped": (bases(lambda b: b[::-1].copy()), "no header"),
    "regions too large": (sizes(2**62), "4611686018427387904"),
    "regions too small": (sizes(1), "its table"),
    "regions of negative size": (sizes(-1), "negative"),
    "no such header region": (field(header_region=7), "7"),
    "data for a header": (field(header_region=0), "no header"),
    "no such digest region": (field(digest_region=7), "7"),
    "data for digests": (field(digest_region=0), "root"),
    "another root": (field(digest_root=bytes(32)), "root"),
    "no table": (field(table_digest=bytes(32)), "is not here"),
    "empty": (field(empty=True), "empty"),
    "another transport": (lambda r: dataclasses.replace(r, endpoints={"none such": b"x"}), "none such"),
    "no endpoint message": (endpoint(lambda m: b""), "0 bytes"),
    "half an endpoint message": (endpoint(lambda m: m[: len(m) // 2]), "endpoint"),
    **{f"endpoint message flipped, {seed}": (endpoint(flipped(seed)), "endpoint") for seed in range(8)},
}


class Lies:
    """A rendezvous that changes slot records on their way to the service."""

    def __init__(self, inner: Rendezvous) -> None:
        self._inner = inner
        self.lie: Lie = lambda record: record

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def publish_slot(self, uid: str, record: SlotRecord, *arguments: object, **settings: object) -> None:
        self._inner.publish_slot(uid, self.lie(record), *arguments, **settings)  # type: ignore[arg-type]


class Setup:
    """Two trainers, one of which may lie, and a receiver."""

    def __init__(self) -> None:
        self.service = Rendezvous.in_process()
        self.liar = Lies(self.service)
        self.transports: list[Transport] = [open_transport("memory") for _ in range(3)]
        self.publishers = [
            Publisher(
                transport,
                self.liar if slot == LIAR else self.service,  # type: ignore[arg-type]
                model="m",
                slot=slot,
                slots=SLOTS,
            )
            for slot, transport in zip(SLOTS, self.transports, strict=False)
        ]
        self.engine = ArrayEngine({name: np.zeros((ROWS, COLUMNS), np.float32) for name in NAMES})
        self.receiver = Receiver(
            self.transports[2], self.service, self.engine, model="m", group="g", members=["r"], member="r"
        )
        self.step = -1

    def refit(self, lie: Lie) -> None:
        """Publish another step with a lie, and take it."""
        self.liar.lie = lie
        self.step += 1
        half = ROWS // 2
        for i, publisher in enumerate(self.publishers):
            held = np.full((half, COLUMNS), self.step, np.float32)
            tensors = [LocalTensor(n, "float32", (ROWS, COLUMNS), (half * i, 0), held) for n in NAMES]
            publisher.publish(epoch=0, step=self.step, tensors=tensors, timeout_s=10.0)
        self.receiver.refit(self.step, timeout_s=10.0)

    def holds(self, step: int) -> bool:
        return all(bool((np.asarray(self.engine[name]) == step).all()) for name in NAMES)

    def close(self) -> None:
        for part in (self.receiver, *self.publishers, *self.transports, self.service):
            part.close()


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_and_changes_nothing(name: str, setup: Setup) -> None:
    lie, said = LIES[name]
    setup.refit(lambda record: record)
    with pytest.raises(ReshardError) as caught:
        setup.refit(lie)
    assert said in str(caught.value)
    assert setup.receiver.state == "serving"
    assert setup.holds(0)
    assert not setup.service.describe().leases
    setup.refit(lambda record: record)
    assert setup.holds(2)


def test_a_holder_may_offer_a_header_and_digests_at_one_version_and_none_at_another(setup: Setup) -> None:
    whole: Lie = lambda record: record  # noqa: E731
    bare = field(header_region=-1)
    blind = field(digest_region=-1, digest_root=b"")
    for step, lie in enumerate((whole, bare, blind, whole, whole, bare, whole, blind, whole)):  # in two buffers
        setup.refit(lie)
        assert setup.holds(step)
