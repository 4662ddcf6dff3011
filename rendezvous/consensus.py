"""Collectives by which all ranks of a torch.distributed group find out whether they say the same thing.

1. A *frame* is what travels: one-dimensional uint8 on the CPU, four bytes big-endian length, the payload, and
   zeros up to the capacity that all ranks share.
2. Each collective first validates its arguments, then that there is a gloo group to speak to; only then does
   it send.
3. It announces itself in a frame of fixed size, with its name and all that is short. So ranks that came to
   different calls, or with different bounds, get a `ContractError` that says so instead of a hang or of one
   another's bytes.
4. Only `all_gather_records` needs a second frame, as long as the longest record.

Every collective must be entered by all ranks of the group, in one order. A rank whose own arguments are
refused never enters, and the others' wait ends at their deadline; after a timeout or a lost peer the group is
not usable any more.

torch is imported when a function is called.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, overload

from reshard.planner.errors import require
from reshard.rendezvous.canonical import (
    MAX_RECORD_BYTES,
    Plain,
    canonical_record,
    check_max_bytes,
    contract_digest,
    decode_record,
)
from reshard.rendezvous.checked_record import CheckedRecord
from reshard.rendezvous.contracts import MAX_SEQUENCE, MAX_WORLD_SIZE
from reshard.rendezvous.errors import (
    ContractError,
    ContractTypeError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
)
from reshard.rendezvous.frames import decode_frame, encode_frame

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "all_gather_records",
    "assert_rank_order",
    "require_consensus_digest",
    "require_record_consensus",
    "unanimous_vote",
]

DEFAULT_TIMEOUT_S = 60.0

_ANNOUNCEMENT_BYTES = 256
_DIGEST = re.compile(r"[0-9a-f]{64}")

R = TypeVar("R", bound=CheckedRecord)


@overload
def all_gather_records(
    record: R, *, max_bytes: int = ..., group: ProcessGroup | None = ..., timeout_s: float = ...
) -> tuple[R, ...]: ...
@overload
def all_gather_records(
    record: Plain, *, max_bytes: int = ..., group: ProcessGroup | None = ..., timeout_s: float = ...
) -> tuple[Plain, ...]: ...
def all_gather_records(
    record: CheckedRecord | Plain,
    *,
    max_bytes: int = MAX_RECORD_BYTES,
    group: ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> tuple[CheckedRecord, ...] | tuple[Plain, ...]:
    """Return every rank's record, in rank order.

    Parameters
    ----------
    record : CheckedRecord or plain value
        This rank's. Records come back as records of the same class, which all ranks must share, checked
        anew here.
    max_bytes : int
        The most bytes of a canonical record, 1 to `MAX_RECORD_BYTES`; the same on every rank.
    group : torch.distributed.ProcessGroup, optional
        A gloo group; the default one when None.
    timeout_s : float
        Seconds for the whole call.

    Returns
    -------
    tuple
        One record per rank.

    Raises
    ------
    ContractError
        The arguments, the group, or what another rank sent is wrong, or ranks came to different calls.
    RendezvousTimeoutError
        Not all ranks came in time.
    RendezvousUnavailableError
        The group failed, mostly since a peer is lost.
    """
    payload = canonical_record(record, check_max_bytes(max_bytes))
    talk = _Talk("all_gather_records", group, timeout_s)
    kind = type(record).__name__ if isinstance(record, CheckedRecord) else "plain"
    said = talk.announce({"kind": kind, "max_bytes": max_bytes, "n_bytes": len(payload)})
    talk.require_same("kind", said, kind)
    talk.require_same("max_bytes", said, max_bytes)
    lengths: list[int] = []
    for rank, fields in enumerate(said):
        length = fields["n_bytes"]
        if type(length) is not int or not 1 <= length <= max_bytes:
            raise ContractError("all_gather_records", "n_bytes", f"{length!r} from rank {rank}", f"[1, {max_bytes}]")
        lengths.append(length)
    payloads = talk.gather(payload, max(lengths))
    records = tuple(_decoded("all_gather_records", rank, data, max_bytes) for rank, data in enumerate(payloads))
    if isinstance(record, CheckedRecord):
        return tuple(type(record).from_plain(plain) for plain in records)
    return records


def require_consensus_digest(
    digest: str, *, group: ProcessGroup | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> str:
    """Return `digest` if every rank came with the same one.

    Parameters
    ----------
    digest : str
        64 lower-case hex digits, as of `contract_digest`.
    group, timeout_s
        As `all_gather_records`.

    Raises
    ------
    ContractError
        Ranks differ (`failures` holds the digest of each that differs from this rank's), or as
        `all_gather_records`.
    RendezvousTimeoutError, RendezvousUnavailableError
        As `all_gather_records`.
    """
    if type(digest) is not str:
        raise ContractTypeError("require_consensus_digest", "digest", type(digest).__name__, "str")
    if not _DIGEST.fullmatch(digest):
        raise ContractError("require_consensus_digest", "digest", repr(digest[:80]), "64 lower-case hex digits")
    talk = _Talk("require_consensus_digest", group, timeout_s)
    talk.require_same("digest", talk.announce({"digest": digest}), digest)
    return digest


def require_record_consensus(
    record: CheckedRecord | Plain,
    *,
    max_bytes: int = MAX_RECORD_BYTES,
    group: ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> str:
    """Return the digest of `record` if every rank came with an equal one. Only digests travel.

    Parameters
    ----------
    record : CheckedRecord or plain value
        This rank's.
    max_bytes, group, timeout_s
        As `all_gather_records`.

    Returns
    -------
    str
        `contract_digest` of the record.

    Raises
    ------
    ContractError
        Ranks differ (`failures` holds the digest of each that differs from this rank's), or as
        `all_gather_records`.
    RendezvousTimeoutError, RendezvousUnavailableError
        As `all_gather_records`.
    """
    digest = contract_digest(record, max_bytes)
    talk = _Talk("require_record_consensus", group, timeout_s)
    talk.require_same("record", talk.announce({"record": digest}), digest)
    return digest


def unanimous_vote(
    sequence: int, accepted: bool, *, group: ProcessGroup | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> bool:
    """Return whether every rank accepted; all ranks get the same answer.

    Parameters
    ----------
    sequence : int
        Which vote this is, from 0; ranks in different votes are an error and never a decision.
    accepted : bool
        This rank's vote; nothing but a `bool` is one.
    group, timeout_s
        As `all_gather_records`.

    Raises
    ------
    ContractError
        Ranks are in different votes, or as `all_gather_records`.
    RendezvousTimeoutError, RendezvousUnavailableError
        As `all_gather_records`. There was no decision: treat it as a refusal.
    """
    if type(sequence) is not int:
        raise ContractTypeError("unanimous_vote", "sequence", type(sequence).__name__, "int")
    if not 0 <= sequence <= MAX_SEQUENCE:
        raise ContractError("unanimous_vote", "sequence", str(sequence), f"an integer in [0, {MAX_SEQUENCE}]")
    if type(accepted) is not bool:
        raise ContractTypeError("unanimous_vote", "accepted", type(accepted).__name__, "bool")
    talk = _Talk("unanimous_vote", group, timeout_s)
    said = talk.announce({"sequence": sequence, "accepted": accepted})
    talk.require_same("sequence", said, sequence)
    votes = [fields["accepted"] for fields in said]
    for rank, vote in enumerate(votes):
        if type(vote) is not bool:
            raise ContractTypeError("unanimous_vote", "accepted", f"{vote!r} from rank {rank}", "bool")
    return all(votes)


def assert_rank_order(
    rank: int | None = None, *, group: ProcessGroup | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """Refuse a group that does not deliver rank r's message in place r.

    Parameters
    ----------
    rank : int, optional
        The rank that this process takes itself for (its `RankInventory.rank`, say); the group's own number
        when None.
    group, timeout_s
        As `all_gather_records`.

    Raises
    ------
    ContractError
        Some place holds another rank (`failures` holds what each such place said), or as
        `all_gather_records`.
    RendezvousTimeoutError, RendezvousUnavailableError
        As `all_gather_records`.
    """
    if rank is not None:
        if type(rank) is not int:
            raise ContractTypeError("assert_rank_order", "rank", type(rank).__name__, "int")
        if not 0 <= rank < MAX_WORLD_SIZE:
            raise ContractError("assert_rank_order", "rank", str(rank), f"an integer in [0, {MAX_WORLD_SIZE})")
    talk = _Talk("assert_rank_order", group, timeout_s)
    said = talk.announce({"rank": talk.rank if rank is None else rank})
    wrong = {place: repr(fields["rank"]) for place, fields in enumerate(said) if fields["rank"] != place}
    if wrong:
        place, found = next(iter(wrong.items()))
        raise ContractError("assert_rank_order", "rank", f"rank {found} in place {place}", f"rank {place}", wrong)


def _decoded(call: str, rank: int, data: bytes, max_bytes: int) -> Plain:
    try:
        return decode_record(data, max_bytes)
    except ContractError as error:
        raise ContractError(call, error.field, f"from rank {rank}: {error.got}", error.expected) from error


class _Talk:
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
        payload = canonical_record({"call": self.call, **fields}, _ANNOUNCEMENT_BYTES)
        said: list[dict[str, Plain]] = []
        for rank, data in enumerate(self.gather(payload, _ANNOUNCEMENT_BYTES)):
            plain = _decoded(self.call, rank, data, _ANNOUNCEMENT_BYTES)
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
