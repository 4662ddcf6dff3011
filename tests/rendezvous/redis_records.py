"""The records of a rendezvous as they lie in Redis, read past the store."""

from __future__ import annotations

from reshard.rendezvous import codec
from reshard.rendezvous.records import KINDS, Record

_PREFIX = "{reshard}:record:"


def read_records(url: str) -> dict[str, Record]:
    """All records by key. Consistent while nobody writes."""
    import redis

    client = redis.Redis.from_url(url)
    try:
        keys = [key.decode() for key in client.keys(f"{_PREFIX}*")]
        pipe = client.pipeline(transaction=True)
        for key in keys:
            pipe.hget(key, "v")
        blobs = pipe.execute()
    finally:
        client.close()
    names = [key.removeprefix(_PREFIX) for key in keys]
    return {name: codec.decode(KINDS[name.partition(":")[0]], blob) for name, blob in zip(names, blobs, strict=True)}
