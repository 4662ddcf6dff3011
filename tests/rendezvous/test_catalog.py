"""What a decision asks of the catalogue: the names of as many tables and members as there may be."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from tests.rendezvous.support import MODEL, make_part, make_record, receiver, trainer, wait

from reshard.planner.shards import ShardPart
from reshard.rendezvous import limits
from reshard.rendezvous.backend import LocalBackend
from reshard.rendezvous.catalog import ObjectCatalog
from reshard.rendezvous.client import Rendezvous
from reshard.rendezvous.errors import RendezvousTimeoutError
from reshard.rendezvous.types import VersionKey


def digest_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def test_a_version_of_the_most_slots_and_a_group_of_the_most_members_are_decided() -> None:
    """Each slot with a table of its own, each member with a set of its own: all must be there at once."""
    catalog = ObjectCatalog()
    tables = [digest_of(i) for i in range(limits.MAX_SLOTS)]
    sets = [digest_of(limits.MAX_SLOTS + i) for i in range(limits.MAX_MEMBERS)]
    for i, digest in enumerate(tables):
        part = SimpleNamespace(digest=digest, tensors=SimpleNamespace(names_list=[f"w{i}"]))
        catalog.put_part(cast(ShardPart, part))
    for i, digest in enumerate(sets[:-1]):
        catalog.put_names(digest, [f"w{i}"])
    catalog.put_names(sets[-1], [])
    assert catalog.unconsumed(tables, sets, ()) is None
    asyncio.run(catalog.load_names(tables, sets))
    assert catalog.unconsumed(tables, sets, ()) == (f"w{limits.MAX_MEMBERS - 1}",)


def test_names_that_never_stay_end_with_the_votes_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rendezvous.in_process() as rdv:
        worker = trainer(rdv, "t0")
        digest = rdv.put_table(make_part("t0"))
        uid = rdv.open_version(VersionKey(MODEL, 0, 1), ["t0"])
        rdv.publish_slot(uid, make_record("t0", worker.id, digest), worker)
        txn = wait(rdv, "r0", receiver(rdv, "r0"), ("r0",)).transaction
        catalog = cast(LocalBackend, rdv._client.backend)._catalog

        def forgotten(tables: Sequence[bytes], sets: Sequence[bytes], allowed: Sequence[str]) -> None:
            return None

        monkeypatch.setattr(catalog, "unconsumed", forgotten)
        with pytest.raises(RendezvousTimeoutError, match="the names of 1 tables and 1 sets"):
            rdv.vote(txn, "r0", True, names_consumed=["w"], wire_bytes=4, timeout_s=0.2)
