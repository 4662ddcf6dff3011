"""Inputs for the service that no client of ours would send, drawn from a seed.

1. *Noise*: bytes that are mostly no message at all.
2. *Damage*: a right request with bytes flipped, cut, doubled or inserted.
3. *Fields*: a message with some fields set from pools of right, wrong and extreme values, whatever its descriptor says
   it has. The pools hold identifiers that the service knows, so that requests get past the first check.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from reshard.proto.v1 import rendezvous_pb2 as pb

NAMES = [
    "qwen",
    "slot-0",
    "slot-1",
    "r0",
    "r1",
    "g",
    "",
    "\0",
    "a\0b",
    "é",
    "e\u0301",
    "n" * 4096,
    "n" * 4097,
    "*",
    "[",
    "\U0001f600",
]
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
DURATIONS_MS = {"ttl_ms", "lease_ttl_ms", "transaction_timeout_ms", "timeout_ms"}
SHORT_MS = [1, 2, 5, 0, 1 << 63, (1 << 64) - 1, 7 * 86400 * 1000 + 1]
LENGTHS = [0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 64, 1000]


@dataclass
class Known:
    """What the service has: 16-byte ids and 32-byte digests, serialised contents, and a right request of each type."""

    ids: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    requests: dict[str, list[list[Message]]] = field(default_factory=dict)


class Fuzzer:
    def __init__(self, seed: int, known: Known) -> None:
        self.random = random.Random(seed)
        self.known = known

    def inputs(self, method: str, n: int, streams: bool) -> Iterator[list[bytes]]:
        """Yield `n` requests of a method, each as the bytes of its messages."""
        kind = getattr(pb, f"{method}Request")
        for _ in range(n):
            way = self.random.random()
            if way < 0.15:
                yield [self.noise() for _ in range(self.length(streams))]
            elif way < 0.45 and method in self.known.requests:
                right = [message.SerializeToString() for message in self.random.choice(self.known.requests[method])]
                at = self.random.randrange(len(right))
                right[at] = self.damage(right[at])
                yield right
            elif way < 0.55 and streams and method in self.known.requests:
                yield self.shuffled([m.SerializeToString() for m in self.random.choice(self.known.requests[method])])
            else:
                yield [self.fields(kind()).SerializeToString() for _ in range(self.length(streams))]

    def length(self, streams: bool) -> int:
        return self.random.choice([0, 1, 2, 3, 5]) if streams else 1

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.choice([0, 1, 2, 5, 20, 100, 1000]))

    def damage(self, raw: bytes) -> bytes:
        data = bytearray(raw)
        for _ in range(self.random.choice([1, 1, 2, 5])):
            at = self.random.randrange(len(data) + 1)
            way = self.random.randrange(5)
            if way == 0 and at < len(data):
                data[at] ^= 1 << self.random.randrange(8)
            elif way == 1:
                del data[at:]
            elif way == 2:
                data[at:at] = self.random.randbytes(self.random.choice([1, 4, 16]))
            elif way == 3:
                del data[at : at + self.random.choice([1, 4, 16])]
            else:
                data[at:at] = data[at : at + 64]
        return bytes(data)

    def shuffled(self, raws: list[bytes]) -> list[bytes]:
        way = self.random.randrange(3)
        if way == 0:
            self.random.shuffle(raws)
        elif way == 1:
            raws.append(self.random.choice(raws))
        else:
            del raws[self.random.randrange(len(raws))]
        return raws

    def fields(self, message: Message, depth: int = 0) -> Message:
        """Set some of the message's fields, whatever they are."""
        for each in message.DESCRIPTOR.fields:
            if self.random.random() < 0.15 or (depth > 2 and each.message_type is not None):
                continue
            self.set_field(message, each, depth)
        return message

    def set_field(self, message: Message, each: FieldDescriptor, depth: int) -> None:
        is_map = each.message_type is not None and each.message_type.GetOptions().map_entry
        target = getattr(message, each.name)
        if is_map:
            for _ in range(self.random.choice([0, 1, 2, 20])):
                target[self.text()] = self.value(each.message_type.fields_by_name["value"])
        elif each.is_repeated:
            for _ in range(self.count(each)):
                if each.message_type is not None:
                    self.fields(target.add(), depth + 1)
                else:
                    target.append(self.value(each))
        elif each.message_type is not None:
            self.fields(target, depth + 1)
            target.SetInParent()
        else:
            setattr(message, each.name, self.value(each))

    def count(self, each: FieldDescriptor) -> int:
        return self.random.choice([0, 1, 2, 2, 3, 17] if each.message_type else [0, 1, 2, 2, 3, 17, 3000])

    def value(self, each: FieldDescriptor) -> object:
        kind = each.type
        if kind == FieldDescriptor.TYPE_STRING:
            return self.text()
        if kind == FieldDescriptor.TYPE_BYTES:
            return self.bytes()
        if kind == FieldDescriptor.TYPE_BOOL:
            return self.random.random() < 0.5
        if kind == FieldDescriptor.TYPE_ENUM:
            return self.random.choice([0, 1, 1, 2, 2, 3, 77, -1])
        pool = SHORT_MS if each.name in DURATIONS_MS else NUMBERS
        number = self.random.choice(pool) if self.random.random() < 0.9 else self.random.getrandbits(63)
        if kind == FieldDescriptor.TYPE_UINT64:
            return number
        if kind == FieldDescriptor.TYPE_UINT32:
            return min(number, (1 << 32) - 1)
        if kind == FieldDescriptor.TYPE_SINT64:
            return min(number, (1 << 63) - 1) * self.random.choice([1, -1])
        raise AssertionError(f"no values for fields like {each.full_name}")

    def text(self) -> str:
        return self.random.choice(NAMES)

    def bytes(self) -> bytes:
        way = self.random.random()
        if way < 0.35 and self.known.ids:
            return self.random.choice(self.known.ids)
        if way < 0.6 and self.known.digests:
            return self.random.choice(self.known.digests)
        if way < 0.75 and self.known.blobs:
            blob = self.random.choice(self.known.blobs)
            return blob if self.random.random() < 0.3 else self.damage(blob)
        return self.random.randbytes(self.random.choice(LENGTHS))
