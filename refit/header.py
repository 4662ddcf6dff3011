"""Has the publisher written its buffer while it was read? A seqlock in registered memory.

A header is 64 bytes at the start of each published buffer: magic, sequence, epoch, step, checksum. The sequence is
odd while the buffer is being written and grows by two with each version. A reader fetches it before its first and
after its last read of the buffer: both must be equal, even, and of the version that was asked for.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.refit.errors import TornReadError

__all__ = ["HEADER_BYTES", "Header", "SeqLock"]

HEADER_BYTES = 64
_MAGIC = b"RSHDR1\0\0"
_BODY = struct.Struct("<8sQqq")
_SUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Header:
    """A header as read: sequence (odd while being written), epoch and step."""

    sequence: int
    epoch: int
    step: int

    @classmethod
    def parse(cls, raw: bytes, *, holder: str) -> Header:
        """Read 64 bytes.

        Raises
        ------
        TornReadError
            If they are no header, or one that is half written.
        """
        body = raw[: _BODY.size]
        if len(raw) < HEADER_BYTES or body[:8] != _MAGIC:
            raise TornReadError(f"holder {holder!r}: its buffer starts with no header; is the address still its own?")
        if _SUM.unpack_from(raw, _BODY.size)[0] != zlib.crc32(body):
            raise TornReadError(f"holder {holder!r}: its header was read while it was being written")
        _, sequence, epoch, step = _BODY.unpack(body)
        return cls(sequence, epoch, step)

    def require(self, *, holder: str, epoch: int, step: int) -> None:
        """Raise TornReadError unless this is the finished header of (epoch, step)."""
        if self.sequence % 2:
            raise TornReadError(f"holder {holder!r}: its buffer is being written (sequence {self.sequence})")
        if (self.epoch, self.step) != (epoch, step):
            raise TornReadError(
                f"holder {holder!r}: its buffer holds version ({self.epoch}, {self.step}), expected ({epoch}, {step})"
            )


class SeqLock:
    """The writer's side, over the first 64 bytes of a registered buffer.

    Parameters
    ----------
    memory
        uint8 of shape (64,), contiguous: inside registered memory, or a copy of it on the host.
    written
        Called after each change of ``memory``; takes it to where readers look, if that is elsewhere.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], written: Callable[[], None] = lambda: None) -> None:
        if memory.shape != (HEADER_BYTES,) or not memory.flags.c_contiguous:
            raise ValueError(f"a header takes {HEADER_BYTES} contiguous bytes, got shape {memory.shape}")
        self.memory = memory
        self._written = written
        self.sequence = 0

    def begin(self) -> None:
        """Mark the buffer as being written; call it before the first byte changes."""
        if self.sequence % 2 == 0:
            self.sequence += 1
        self._write(-1, -1)

    def commit(self, epoch: int, step: int) -> None:
        """Mark it as holding (epoch, step); call it after the last byte and digest are in place."""
        self.sequence += 1 if self.sequence % 2 else 2
        self._write(epoch, step)

    def _write(self, epoch: int, step: int) -> None:
        body = _BODY.pack(_MAGIC, self.sequence, epoch, step)
        raw = (body + _SUM.pack(zlib.crc32(body))).ljust(HEADER_BYTES, b"\0")
        self.memory[:] = np.frombuffer(raw, np.uint8)
        self._written()
