"""Which transactions did this client join, and as whom? What it needs to vote in them."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.rendezvous.backend import Answer
from reshard.rendezvous.errors import TransactionError

__all__ = ["Joined", "Part"]

_KEPT_TRANSACTIONS = 64  # for each worker of the client


@dataclass(frozen=True, slots=True)
class Part:
    """A member's part in a transaction: the worker that joined it, and 32 bytes over what it was granted."""

    worker_id: str
    identity: bytes


class Joined:
    """The newest transactions that a client joined."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], Part] = {}

    def add(self, answer: Answer, member: str, worker_id: str, *, n_workers: int) -> None:
        """Remember a grant; the oldest are forgotten beyond 64 for each of `n_workers`."""
        self._parts[answer.transaction, member] = Part(worker_id, answer.identity)
        while len(self._parts) > _KEPT_TRANSACTIONS * max(n_workers, 1):
            self._parts.pop(next(iter(self._parts)))

    def find(self, transaction: str, member: str) -> Part:
        """Return the part of `member` in `transaction`, or raise TransactionError."""
        part = self._parts.get((transaction, member))
        if part is None:
            raise TransactionError(f"{member!r} did not join transaction {transaction!r} through this client")
        return part
