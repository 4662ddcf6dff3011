"""What a publisher says that it did."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.rendezvous.types import VersionKey

__all__ = ["Published"]


@dataclass(frozen=True, slots=True)
class Published:
    """What a `Publisher.publish` did.

    Attributes
    ----------
    uid
        The version's id at the rendezvous; empty where it was skipped.
    skipped
        The buffer was still being read and ``on_busy="skip"``.
    wire_bytes
        Bytes of the data region.
    stages
        Seconds by stage: layout, wait, pack, digest, publish.
    """

    version: VersionKey
    uid: str
    skipped: bool
    wire_bytes: int
    stages: dict[str, float]
