"""Endpoint messages, errors and the ledger: hostile until checked, complete, and given back in any order."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.planner.errors import MissingDependencyError, ReshardError
from reshard.transports import errors
from reshard.transports.beacon import BEACON_BYTES, Beacon, check_beacon
from reshard.transports.endpoint import (
    HEADER_BYTES,
    MAX_ENDPOINT_BYTES,
    Endpoint,
    decode_endpoint,
    encode_endpoint,
)
from reshard.transports.errors import EndpointError, PeerError
from reshard.transports.ledger import Ledger
from reshard.transports.regions import Region, RegionTable

REGIONS = st.lists(
    st.builds(
        Region,
        st.integers(1, 2**63),
        st.integers(1, 2**62),
        st.sampled_from(["dram", "vram"]),
        st.integers(0, 2**32 - 1),
    ),
    max_size=6,
)


@given(REGIONS, st.binary(max_size=40), st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16))
def test_messages_round_trip(regions: list[Region], payload: bytes, generation: int, incarnation: bytes) -> None:
    made = Endpoint("nixl", incarnation, generation, RegionTable.build(regions), payload)
    found = decode_endpoint(encode_endpoint(made), backend="nixl")
    assert (found.backend, found.incarnation, found.generation, found.payload) == (
        "nixl",
        incarnation,
        generation,
        payload,
    )
    for name in ("address", "nbytes", "kind", "device"):
        assert np.array_equal(getattr(found.regions, name), getattr(made.regions, name))
        assert not getattr(found.regions, name).flags.writeable


MESSAGE = encode_endpoint(
    Endpoint("memory", b"i" * 16, 3, RegionTable.build([Region(4096, 100), Region(8192, 5, "vram", 1)]), b"payload")
)


def test_every_flipped_bit_is_seen() -> None:
    for bit in range(8 * len(MESSAGE)):
        damaged = bytearray(MESSAGE)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EndpointError):
            decode_endpoint(bytes(damaged))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(junk: bytes) -> None:
    with pytest.raises(EndpointError):
        decode_endpoint(junk)


def test_every_truncation_and_every_extension_is_seen() -> None:
    for size in range(len(MESSAGE)):
        with pytest.raises(EndpointError):
            decode_endpoint(MESSAGE[:size])
    with pytest.raises(EndpointError, match=rf"got {len(MESSAGE) + 1} bytes, expected {len(MESSAGE)}"):
        decode_endpoint(MESSAGE + b"\0")


def forged(regions: RegionTable | None = None, **header: object) -> bytes:
    """A message with a valid checksum and whatever else is wrong with it."""
    import hashlib

    fields = {"magic": b"RSHD", "version": 1, "name": b"memory", "incarnation": b"i" * 16, "generation": 0}
    fields |= {"n_regions": len(regions) if regions is not None else 0, "payload_bytes": 0} | header
    head = struct.pack("<4sH14s16sQII", *fields.values())
    body = b""
    if regions is not None:
        body = b"".join(column.tobytes() for column in (regions.address, regions.nbytes, regions.kind, regions.device))
    digest = hashlib.blake2b(head, digest_size=16, person=b"reshard.endpoint")
    digest.update(body)
    return head + digest.digest() + body


def columns(address: int, nbytes: int, kind: int = 0, second: int = 2**40) -> RegionTable:
    return RegionTable(
        np.array([address, second], np.uint64),
        np.array([nbytes, 1], np.uint64),
        np.array([kind, 0], np.uint8),
        np.zeros(2, np.uint32),
    )


def test_a_valid_checksum_does_not_make_it_true() -> None:
    assert len(decode_endpoint(forged(columns(4096, 1))).regions) == 2
    for message, part in (
        (forged(version=2), "version: got 2, expected 1"),
        (forged(name=b"\xffoo"), "backend"),
        (forged(name=b""), "backend"),
        (forged(name=b"a\0b"), "backend"),
        (forged(columns(0, 1)), "empty or at 0"),
        (forged(columns(4096, 0)), "empty or at 0"),
        (forged(columns(2**63, 2**63, second=2**63)), "wraps around"),
        (forged(columns(4096, 1, kind=2)), "memory kind 2"),
        (forged(columns(2**50, 1)), "not ascending"),
        (forged(n_regions=2**32 - 1), "expected"),
    ):
        with pytest.raises(EndpointError, match=part):
            decode_endpoint(message)
    with pytest.raises(EndpointError, match="got 'memory', expected 'nixl'"):
        decode_endpoint(MESSAGE, backend="nixl")


def test_the_bound_holds_on_both_sides() -> None:
    table = RegionTable.build([])
    room = MAX_ENDPOINT_BYTES - HEADER_BYTES
    whole = encode_endpoint(Endpoint("memory", b"i" * 16, 0, table, b"\0" * room))
    assert len(decode_endpoint(whole).payload) == room
    with pytest.raises(EndpointError, match="at most 4194304"):
        encode_endpoint(Endpoint("memory", b"i" * 16, 0, table, b"\0" * (room + 1)))
    with pytest.raises(EndpointError, match="4194305 bytes"):
        decode_endpoint(whole + b"\0")
    for name in ("", "fifteen-letters", "nul\0", "é"):
        with pytest.raises(EndpointError, match="ASCII"):
            encode_endpoint(Endpoint(name, b"i" * 16, 0, table, b""))


def test_the_beacon_says_what_changed() -> None:
    memory = np.zeros(BEACON_BYTES, np.uint8)
    endpoint = decode_endpoint(MESSAGE)
    beacon = Beacon(memory, b"i" * 16, 3)
    check_beacon(memory, endpoint, "p")
    beacon.withdraw(4)
    with pytest.raises(PeerError, match=r"generation 3, now 4"):
        check_beacon(memory, endpoint, "p")
    beacon.withdraw(3)
    beacon.close()
    with pytest.raises(PeerError, match="closed"):
        check_beacon(memory, endpoint, "p")
    for other in (np.zeros(BEACON_BYTES, np.uint8), memory):
        if other is memory:
            Beacon(memory, b"j" * 16, 3)
        with pytest.raises(PeerError, match="restarted or exited"):
            check_beacon(other, endpoint, "p")


def test_the_error_tree() -> None:
    """Every class of the module derives as the picture at its top says, and carries its fields."""
    builtin = {
        "TransportError": RuntimeError,
        "TransportUnavailableError": ImportError,
        "OwnFaultError": RuntimeError,
        "EndpointError": ValueError,
        "RegistrationError": RuntimeError,
        "PeerError": ConnectionError,
        "TransferError": RuntimeError,
        "TransferTimeoutError": TimeoutError,
        "PoisonedMemoryError": RuntimeError,
    }
    own = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TransportError)
    }
    assert own == set(builtin)
    picture = errors.__doc__ or ""
    for name, base in builtin.items():
        kind = getattr(errors, name)
        assert issubclass(kind, (errors.TransportError, base))
        assert issubclass(kind, ReshardError)
        assert issubclass(kind, base)
        assert name in picture
        error = kind("said")
        assert str(error) == "said"
        assert error.failures == {}
    assert issubclass(errors.TransportUnavailableError, MissingDependencyError)
    late = errors.TransferTimeoutError("late", peer="p", failures={"p": "abandoned"}, poisoned=[(1, 2)])
    assert (late.peer, late.failures, late.poisoned) == ("p", {"p": "abandoned"}, ((1, 2),))


class Record:
    """A ledger whose native side is a list."""

    def __init__(self) -> None:
        self.native: list[Region] = []
        self.generations: list[int] = []
        self.at_withdrawal: list[int] = []

        def withdrawn(generation: int) -> None:
            self.generations.append(generation)
            self.at_withdrawal.append(len(self.native))

        self.ledger = Ledger(self.native.append, lambda region, _: self.native.remove(region), withdrawn)


def test_memory_is_withdrawn_before_it_is_deregistered_and_after_its_last_use() -> None:
    record = Record()
    t1, t2, t3 = (Region(at, 16) for at in (100, 200, 300))
    first, second = record.ledger.add([t1, t2]), record.ledger.add([t2, t3])
    assert len(record.native) == 3
    assert record.ledger.generation == 0
    used = [entry for entry in second if entry.region == t2]
    record.ledger.hold(used)
    record.ledger.remove(first)
    assert record.native == [t2, t3]
    assert record.ledger.table().address.tolist() == [200, 300]
    record.ledger.remove(second)
    assert record.native == [t2]
    assert len(record.ledger.table()) == 0
    assert record.generations == [1, 2]
    assert record.at_withdrawal == [3, 2]
    record.ledger.release(used)
    assert record.native == []


def test_the_same_address_with_another_size_is_registered_anew() -> None:
    record = Record()
    small = record.ledger.add([Region(0x1000, 16)])
    large = record.ledger.add([Region(0x1000, 32)])
    assert [region.nbytes for region in record.native] == [16, 32]
    again = record.ledger.add([Region(0x1000, 16)])
    assert len(record.native) == 2
    for entries in (small, large, again):
        record.ledger.remove(entries)
    assert record.native == []


def test_importing_needs_numpy_alone(tmp_path: Path) -> None:
    """In an interpreter that has numpy and nothing else, every module imports, and `memory` works."""
    code = """
import importlib, pkgutil, sys
import reshard.transports
for module in pkgutil.walk_packages(reshard.transports.__path__, 'reshard.transports.'):
    importlib.import_module(module.name)
from reshard.transports import available, open_transport, TransportUnavailableError
rows = {row.name: row for row in available()}
assert rows['memory'].ok, rows
for name in ('nixl', 'ucx'):
    assert not rows[name].ok and f"pip install 'reshard[{name}]'" in rows[name].reason, rows[name]
    try:
        open_transport(name)
    except TransportUnavailableError as error:
        assert error.extra == name, error.extra
    else:
        raise SystemExit(f'{name} opened')
assert open_transport('auto').name == 'memory'
ours = {name.split('.')[1] for name in sys.modules if name.startswith('reshard.')}
assert not ours & {'rendezvous', 'refit', 'proto'}, ours
"""
    site = Path(np.__file__).parents[1]
    for package in ("numpy", "numpy.libs"):
        if (site / package).exists():
            (tmp_path / package).symlink_to(site / package)
    (tmp_path / "reshard").symlink_to(Path(reshard.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stderr
