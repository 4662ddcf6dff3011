"""How do the callers' values become messages, and messages values?

Requests are converted once, at the service's edge, into the types of :mod:`reshard.rendezvous.types`, whose own checks
name the field that is out of bounds. Slots of a version travel in two parts: what seldom changes (the topology,
addressed by its digest) and, per version, region bases and digest roots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from reshard.rendezvous import limits
from reshard.rendezvous.errors import InvalidRequestError
from reshard.rendezvous.optional import pb, protobuf
from reshard.rendezvous.records import Vote
from reshard.rendezvous.retries import RetryHint
from reshard.rendezvous.types import Decision, Facts, Progress, SlotRecord, WorkerInfo

__all__ = [
    "Topology",
    "bases_of",
    "facts_from_message",
    "facts_to_message",
    "hint_from_message",
    "hint_to_message",
    "id_from_bytes",
    "id_to_bytes",
    "identity_of",
    "ms_to_s",
    "progress_from_message",
    "progress_to_message",
    "record_from_message",
    "record_to_message",
    "roots_of",
    "s_to_ms",
    "slots_of",
    "topology_from_bytes",
    "topology_to_bytes",
    "vote_from_message",
    "worker_from_message",
]

_NO_ROOT = bytes(limits.DIGEST_BYTES)
Bases = npt.NDArray[np.uint64]


def id_to_bytes(text: str) -> bytes:
    """Encode an identifier."""
    return bytes.fromhex(text)


def id_from_bytes(field: str, value: bytes) -> str:
    """Decode an identifier; InvalidRequestError unless it has 16 bytes."""
    return limits.check_bytes(field, value, at_least=limits.ID_BYTES, at_most=limits.ID_BYTES).hex()


def s_to_ms(seconds: float) -> int:
    """Encode a positive duration; at least one millisecond."""
    return max(round(seconds * 1000), 1)


def ms_to_s(field: str, ms: int, *, at_most: float = limits.MAX_TIMEOUT_S) -> float:
    """Decode a duration; InvalidRequestError unless positive and at most `at_most` seconds."""
    return limits.check_timeout(field, ms / 1000, at_most=at_most)


def worker_from_message(message: pb.RegisterRequest) -> WorkerInfo:
    """Decode a process life."""
    roles: dict[int, Literal["trainer", "receiver"]] = {
        pb.ROLE_TRAINER: "trainer",
        pb.ROLE_RECEIVER: "receiver",
    }
    role = roles.get(message.role)
    if role is None:
        raise InvalidRequestError("worker.role", f"unknown value {message.role}")
    return WorkerInfo(role, message.model, message.host, message.name, dict(message.endpoints))


def hint_to_message(hint: RetryHint) -> pb.RetryHint:
    """Encode a suggested retry policy."""
    return pb.RetryHint(
        attempts=hint.attempts,
        backoff_ms=round(hint.backoff_s * 1000),
        factor=hint.factor,
        max_backoff_ms=round(hint.max_backoff_s * 1000),
        deadline_ms=round(hint.deadline_s * 1000),
    )


def hint_from_message(message: pb.RetryHint) -> RetryHint:
    """Decode a suggested retry policy."""
    return RetryHint(
        attempts=message.attempts,
        backoff_s=message.backoff_ms / 1000,
        factor=message.factor,
        max_backoff_s=message.max_backoff_ms / 1000,
        deadline_s=message.deadline_ms / 1000,
    )


def record_to_message(record: SlotRecord) -> pb.SlotStatic:
    """Encode what of a slot seldom changes."""
    memory = pb.MEMORY_VRAM if record.memory == "vram" else pb.MEMORY_DRAM
    message = pb.SlotStatic(
        slot=record.slot,
        worker_id=id_to_bytes(record.worker_id),
        host=record.host,
        endpoints=dict(record.endpoints),
        table_digest=record.table_digest,
        memory=memory,
        device=record.device,
        region_bytes=record.region_bytes.astype("<i8", copy=False).tobytes(),
        empty=record.empty,
    )
    if record.header_region >= 0:
        message.header_region = record.header_region
    if record.digest_region >= 0:
        message.digest_region = record.digest_region
    return message


def record_from_message(
    message: pb.SlotStatic, bases: Bases, root: bytes, roots: dict[str, bytes] | None = None
) -> SlotRecord:
    """Decode a slot from what seldom changes and what a version brings."""
    memories: dict[int, Literal["dram", "vram"]] = {
        pb.MEMORY_DRAM: "dram",
        pb.MEMORY_VRAM: "vram",
    }
    memory = memories.get(message.memory)
    if memory is None:
        raise InvalidRequestError("record.memory", f"unknown value {message.memory}")
    return SlotRecord(
        slot=message.slot,
        worker_id=id_from_bytes("record.worker_id", message.worker_id),
        host=message.host,
        endpoints=dict(message.endpoints),
        table_digest=message.table_digest,
        region_bases=bases,
        region_bytes=int64s("record.region_bytes", message.region_bytes),
        memory=memory,
        device=message.device,
        digest_root=root,
        header_region=message.header_region if message.HasField("header_region") else -1,
        digest_region=message.digest_region if message.HasField("digest_region") else -1,
        empty=message.empty,
        roots=roots or {},
    )


def int64s(field: str, blob: bytes) -> npt.NDArray[np.int64]:
    """Decode little-endian int64 values."""
    _check_words(field, blob)
    return np.frombuffer(blob, "<i8").astype(np.int64)


def uint64s(field: str, blob: bytes) -> Bases:
    """Decode little-endian uint64 values."""
    _check_words(field, blob)
    return np.frombuffer(blob, "<u8").astype(np.uint64)


def _check_words(field: str, blob: bytes) -> None:
    if len(blob) % 8:
        raise InvalidRequestError(field, f"{len(blob)} bytes are no whole number of 8-byte values")


@dataclass(frozen=True, slots=True)
class Topology:
    """The unchanging part of a version's slots, and where each slot's regions begin among all of them."""

    digest: bytes
    slots: tuple[pb.SlotStatic, ...]
    first_region: npt.NDArray[np.int64]


def topology_to_bytes(records: Sequence[SlotRecord]) -> bytes:
    """Encode the unchanging part of all slots."""
    message = pb.Topology(slots=[record_to_message(record) for record in records])
    return message.SerializeToString(deterministic=True)


def topology_from_bytes(blob: bytes) -> Topology:
    """Decode the unchanging part of all slots."""
    try:
        message = pb.Topology.FromString(blob)
    except protobuf.DecodeError:
        raise InvalidRequestError("topology", f"these {len(blob)} bytes are no Topology") from None
    limits.check_int("topology.slots", len(message.slots), at_least=0, at_most=limits.MAX_SLOTS)
    first = np.zeros(len(message.slots) + 1, np.int64)
    np.cumsum([len(slot.region_bytes) // 8 for slot in message.slots], out=first[1:])
    return Topology(hashlib.sha256(blob).digest(), tuple(message.slots), first)


def bases_of(records: Sequence[SlotRecord]) -> bytes:
    """Encode all region bases, slot by slot."""
    return b"".join(record.region_bases.astype("<u8", copy=False).tobytes() for record in records)


def roots_of(records: Sequence[SlotRecord]) -> bytes:
    """Encode all digest roots; empty if no slot has one."""
    if not any(record.digest_root for record in records):
        return b""
    return b"".join(record.digest_root or _NO_ROOT for record in records)


def slots_of(topology: Topology, bases: bytes, roots: bytes) -> tuple[SlotRecord, ...]:
    """Put the slots of a version back together."""
    all_bases = uint64s("grant.bases", bases)
    n = len(topology.slots)
    if all_bases.size != topology.first_region[-1]:
        raise InvalidRequestError("grant.bases", f"{all_bases.size} bases for {topology.first_region[-1]} regions")
    if roots and len(roots) != n * limits.DIGEST_BYTES:
        raise InvalidRequestError("grant.roots", f"{len(roots)} bytes for {n} slots")
    records = []
    for i, slot in enumerate(topology.slots):
        root = roots[i * limits.DIGEST_BYTES : (i + 1) * limits.DIGEST_BYTES]
        mine = all_bases[topology.first_region[i] : topology.first_region[i + 1]]
        records.append(record_from_message(slot, mine, b"" if root == _NO_ROOT else root))
    return tuple(records)


def identity_of(uid: bytes, topology_digest: bytes, bases_digest: bytes, roots: bytes) -> bytes:
    """32 bytes over all that a member was granted; members compare them through their votes."""
    return hashlib.sha256(uid + topology_digest + bases_digest + roots).digest()


def vote_from_message(message: pb.VoteRequest) -> Vote:
    """Decode a vote."""
    return Vote(
        yes=message.yes,
        reason=limits.check_name("reason", message.reason, empty_ok=True),
        identity=limits.check_digest("identity", message.identity),
        plan_digest=limits.check_bytes("plan_digest", message.plan_digest, at_most=64),
        names_digest=limits.check_digest("names_digest", message.names_digest, empty_ok=not message.yes),
        allow_unconsumed=limits.check_patterns("allow_unconsumed", message.allow_unconsumed),
        wire_bytes=limits.check_int("wire_bytes", message.wire_bytes, at_least=0, at_most=2**62),
    )


def facts_to_message(facts: Facts) -> pb.Facts:
    """Encode facts."""
    return pb.Facts(
        decision=f"DECISION_{facts.decision.name}",
        outcome=f"DECISION_{facts.outcome.name}",
        reason=facts.reason,
    )


def facts_from_message(message: pb.Facts) -> Facts:
    """Decode facts."""
    name = pb.Decision.Name
    decision, outcome = (
        Decision[name(value).removeprefix("DECISION_")] for value in (message.decision, message.outcome)
    )
    return Facts(decision, outcome, message.reason)


def progress_to_message(progress: Progress) -> pb.Progress:
    """Encode how far a version got."""
    return pb.Progress(
        n_filled=progress.n_filled,
        n_slots=progress.n_slots,
        missing=progress.missing,
        lost=progress.lost,
        empty=progress.empty,
        message=progress.message,
    )


def progress_from_message(message: pb.Progress) -> Progress:
    """Decode how far a version got."""
    return Progress(
        message.n_filled,
        message.n_slots,
        tuple(message.missing),
        tuple(message.lost),
        tuple(message.empty),
        message.message,
    )
