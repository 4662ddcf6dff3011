"""What do the bytes of a blob say? Each kind of content parsed, or refused by name."""

from __future__ import annotations

from reshard.rendezvous import limits
from reshard.rendezvous.errors import InvalidRequestError
from reshard.rendezvous.optional import protobuf, tables_pb

__all__ = ["canonical_bytes", "geometries_of", "names_of", "parse_content", "part_of", "tensors_of"]


def parse_content(field: str, message: protobuf.Message, blob: bytes) -> None:
    """Parse bytes into a message, or raise InvalidRequestError naming it."""
    try:
        message.ParseFromString(blob)
    except protobuf.DecodeError:
        raise InvalidRequestError(field, f"these {len(blob)} bytes are no {message.DESCRIPTOR.name}") from None


def part_of(blob: bytes) -> tables_pb.ShardPart:
    """A shard part's message, its digests checked."""
    message = tables_pb.ShardPart()
    parse_content("part", message, blob)
    limits.check_digest("part.tensors_digest", message.tensors_digest)
    limits.check_digest("part.geometries_digest", message.geometries_digest)
    return message


def tensors_of(blob: bytes) -> tables_pb.TensorDict:
    """A tensor dictionary's message."""
    message = tables_pb.TensorDict()
    parse_content("tensors", message, blob)
    return message


def geometries_of(blob: bytes) -> tables_pb.GeometryDict:
    """A geometry dictionary's message."""
    message = tables_pb.GeometryDict()
    parse_content("geometries", message, blob)
    return message


def names_of(blob: bytes) -> tables_pb.NameSet:
    """A name set's message."""
    message = tables_pb.NameSet()
    parse_content("names", message, blob)
    return message


def canonical_bytes(message: protobuf.Message) -> bytes:
    """Bytes of the message without fields that this version does not know."""
    message.DiscardUnknownFields()  # type: ignore[no-untyped-call, unused-ignore]
    return message.SerializeToString(deterministic=True)
