"""The seqlock header: torn, half-written and foreign headers are told apart."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.refit.errors import TornReadError
from reshard.refit.header import HEADER_BYTES, Header, SeqLock


def test_a_version_round_trips() -> None:
    memory = np.zeros(HEADER_BYTES, np.uint8)
    lock = SeqLock(memory)
    lock.begin()
    lock.commit(3, 0)
    header = Header.parse(memory.tobytes(), holder="t0")
    assert header == Header(2, 3, 0)
    header.require(holder="t0", epoch=3, step=0)


def test_every_version_has_a_new_even_sequence() -> None:
    memory = np.zeros(HEADER_BYTES, np.uint8)
    lock = SeqLock(memory)
    seen = []
    for step in range(5):
        lock.begin()
        assert Header.parse(memory.tobytes(), holder="t0").sequence % 2 == 1
        lock.commit(0, step)
        seen.append(Header.parse(memory.tobytes(), holder="t0").sequence)
    assert seen == [2, 4, 6, 8, 10]


def test_being_written_is_refused() -> None:
    memory = np.zeros(HEADER_BYTES, np.uint8)
    lock = SeqLock(memory)
    lock.commit(0, 1)
    lock.begin()
    with pytest.raises(TornReadError, match="'t1': its buffer is being written"):
        Header.parse(memory.tobytes(), holder="t1").require(holder="t1", epoch=0, step=1)


def test_another_version_is_refused() -> None:
    memory = np.zeros(HEADER_BYTES, np.uint8)
    SeqLock(memory).commit(0, 1)
    with pytest.raises(TornReadError, match=r"holds version \(0, 1\), expected \(0, 2\)"):
        Header.parse(memory.tobytes(), holder="t1").require(holder="t1", epoch=0, step=2)


def test_foreign_and_half_written_bytes_are_refused() -> None:
    memory = np.zeros(HEADER_BYTES, np.uint8)
    with pytest.raises(TornReadError, match="no header"):
        Header.parse(memory.tobytes(), holder="t1")
    SeqLock(memory).commit(0, 1)
    memory[16] ^= 1
    with pytest.raises(TornReadError, match="while it was being written"):
        Header.parse(memory.tobytes(), holder="t1")
    with pytest.raises(ValueError, match="64 contiguous bytes"):
        SeqLock(np.zeros(63, np.uint8))
