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

import re
from typing import TYPE_CHECKING, TypeVar, overload

from reshard.rendezvous.canonical import (
    MAX_RECORD_BYTES,
    Plain,
    canonical_record,
    check_max_bytes,
    contract_digest,
)
from reshard.rendezvous.checked_record import CheckedRecord
from reshard.rendezvous.contracts import MAX_SEQUENCE, MAX_WORLD_SIZE
from reshard.rendezvous.errors import (
    ContractError,
    ContractTypeError,
)
from reshard.rendezvous.talk import Talk, decoded

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
    talk = Talk("all_gather_records", group, timeout_s)
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
    records = tuple(decoded("all_gather_records", rank, data, max_bytes) for rank, data in enumerate(payloads))
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
    talk = Talk("require_consensus_digest", group, timeout_s)
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
    talk = Talk("require_record_consensus", group, timeout_s)
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
    talk = Talk("unanimous_vote", group, timeout_s)
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
    talk = Talk("assert_rank_order", group, timeout_s)
    said = talk.announce({"rank": talk.rank if rank is None else rank})
    wrong = {place: repr(fields["rank"]) for place, fields in enumerate(said) if fields["rank"] != place}
    if wrong:
        place, found = next(iter(wrong.items()))
        raise ContractError("assert_rank_order", "rank", f"rank {found} in place {place}", f"rank {place}", wrong)
