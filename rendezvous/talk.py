"""How do ranks of a torch.distributed group exchange frames, by one deadline, and know that they came to the same call?

One `Talk` is one collective's use of a gloo group. Each exchange names every fault: a rank that came to another call or
with other fields, one that did not come in time, a group that was lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from reshard.planner.errors import require
from reshard.rendezvous.canonical import Plain, canonical_record, decode_record
from reshard.rendezvous.errors import (
    ContractError,
    ContractTypeError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
)
from reshard.rendezvous.frames import decode_frame, encode_frame

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ANNOUNCEMENT_BYTES", "Talk", "decoded"]

ANNOUNCEMENT_BYTES = 256
"""Of the frame in which a collective announces itself."""


def decoded(call: str, rank: int, data: bytes, max_bytes: int) -> Plain:
    """The record that a rank sent, or a ContractError that names the rank."""
    try:
        return decode_record(data, max_bytes)
    except ContractError as error:
        raise ContractError(call, error.field, f"from rank {rank}: {error.got}", error.expected) from error


class Talk:
    """One collective's use of the group: its name, its deadline and its gathers."""

    def __init__(self, call: str, group: ProcessGroup | None, timeout_s: float) -> None:
        if type(timeout_s) not in (int, float) or not math.isfinite(timeout_s) or timeout_s <= 0:
            raise ContractError(call, "timeout_s", repr(timeout_s), "finite seconds above 0")
        self.call = call
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        require("torch", extra="torch")
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise ContractError(call, "group", "no initialised process group", "an initialised gloo group")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ContractError(call, "group", "a group that this rank is not of", "a group with this rank")
        backends = str(dist.get_backend_config(group)).split(",")
        if "cpu:gloo" not in backends:
            raise ContractError(call, "group", ",".join(backends), "a group with gloo for CPU tensors")
        self.group = group
        self.rank = rank
        self.world_size = dist.get_world_size(group)

    def announce(self, fields: Mapping[str, Plain]) -> list[dict[str, Plain]]:
        """Gather this call's name and short fields from all ranks; refuse ranks that came to another call."""
        payload = canonical_record({"call": self.call, **fields}, ANNOUNCEMENT_BYTES)
        said: list[dict[str, Plain]] = []
        for rank, data in enumerate(self.gather(payload, ANNOUNCEMENT_BYTES)):
            plain = decoded(self.call, rank, data, ANNOUNCEMENT_BYTES)
            if not isinstance(plain, dict):
                raise ContractTypeError(self.call, "$", f"{type(plain).__name__} from rank {rank}", "an object")
            said.append(plain)
        self.require_same("call", said, self.call)
        for rank, plain in enumerate(said):
            if plain.keys() != {"call", *fields}:
                raise ContractError(self.call, "$", f"{sorted(plain)} from rank {rank}", f"call, {', '.join(fields)}")
        return said

    def require_same(self, field: str, said: list[dict[str, Plain]], own: Plain) -> None:
        """Refuse ranks whose `field` is not this rank's."""
        # Types too: to Python, True is 1.
        others = {
            rank: str(plain.get(field))
            for rank, plain in enumerate(said)
            if type(plain.get(field)) is not type(own) or plain.get(field) != own
        }
        if others:
            rank, value = next(iter(others.items()))
            raise ContractError(
                self.call,
                field,
                f"{value} from rank {rank} ({len(others)} of {self.world_size} ranks not as {self.rank})",
                str(own),
                others,
            )

    def gather(self, payload: bytes, capacity: int) -> list[bytes]:
        """Exchange one frame of `capacity` with every rank before the deadline."""
        import torch
        import torch.distributed as dist

        frame = encode_frame(payload, capacity)
        frames = [torch.empty_like(frame) for _ in range(self.world_size)]
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise self._timed_out()
        try:
            work = dist.all_gather(frames, frame, group=self.group, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            if time.monotonic() >= self.deadline or "timed out" in str(error).lower():
                raise self._timed_out() from error
            raise RendezvousUnavailableError(
                f"{self.call}: rank {self.rank} of {self.world_size} lost its process group: {error}"
            ) from error
        payloads: list[bytes] = []
        for rank, each in enumerate(frames):
            try:
                payloads.append(decode_frame(each))
            except ContractError as error:
                raise ContractError(self.call, error.field, f"from rank {rank}: {error.got}", error.expected) from error
        return payloads

    def _timed_out(self) -> RendezvousTimeoutError:
        return RendezvousTimeoutError(
            f"{self.call}: rank {self.rank}: not all {self.world_size} ranks came within {self.timeout_s} s"
        )
