"""Who is there, what do they hold, which version is complete, and what was decided?

The service (``reshard serve``), its stores, and its clients; and, apart from them, the consensus records.
Names are loaded on first use: everything but :class:`Rendezvous` over gRPC and the Redis store works on numpy
alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.rendezvous.client import AsyncRendezvous, Rendezvous, TLSFiles, Worker
    from reshard.rendezvous.types import Decision, Lease, Manifest, SlotRecord, VersionKey, WorkerInfo

__all__ = [
    "AsyncRendezvous",
    "Decision",
    "Lease",
    "Manifest",
    "Rendezvous",
    "SlotRecord",
    "TLSFiles",
    "VersionKey",
    "Worker",
    "WorkerInfo",
]

_CLIENT = ("AsyncRendezvous", "Rendezvous", "TLSFiles", "Worker")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'reshard.rendezvous' has no attribute {name!r}")
    home = "reshard.rendezvous.client" if name in _CLIENT else "reshard.rendezvous.types"
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
