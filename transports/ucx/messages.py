"""Reads by messages: what a reader and an owner say to each other where UCX would emulate reads in software.

UCX emulates one-sided reads where the network has none (TCP), and its emulation ends the process of the *owner* when
a reader dies under a reply (``rma_sw.c``: a reply that cannot be sent is fatal). Its messages do survive that. So over
such a connection nothing is read one-sidedly:

1. The reader says `HELLO` with the address of its worker; the owner makes an endpoint of its own to it, which fails
   with a call back to us and can be closed by force.
2. The reader cuts its list into *parcels* (`parcels`), posts a tagged receive into all destinations of one, and asks
   for it by `READ`: where its rows lie in the owner's memory, and the tag.
3. The owner (`replies`) checks every row against what it has registered now, and sends them all from where they lie as
   one tagged message; or it says `REFUSE` and why.

Numbers are little-endian. `HELLO`: header `HELLO_HEADER`, data the reader's worker address, with a digest, since UCX
ends the process that is given a damaged one. `READ`: header `READ_HEADER`, data (address, bytes) of each row as u64.
`REFUSE`: header is the tag (u64) and UTF-8 text.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

from reshard.transports.ucx import declarations as d

HELLO, READ, REFUSE = 0x54, 0x55, 0x56

READER_BYTES = 16
_DIGEST_BYTES = 16
HELLO_HEADER = struct.Struct("<16sQ16s")
"""Reader's number, generation of the endpoint message that it connected by, digest of its address."""
READ_HEADER = struct.Struct("<16sQQ")
"""Reader's number, tag, bytes of the reply."""
TAG = struct.Struct("<Q")
ROW_BYTES = 16
ALL_BITS = (1 << 64) - 1
"""Mask of a tag that must match as a whole."""

MAX_PARCEL_BYTES = 4 << 20
MAX_PARCEL_ROWS = 4096
"""What one `READ` may ask for."""
IN_FLIGHT = 4
"""Parcels that a reader asks an owner for at a time, so that the owner never holds more than their rows."""
MAX_IN_FLIGHT = 2 * IN_FLIGHT
"""What an owner allows: it may learn later than its reader that a parcel is through."""
MAX_REASON_BYTES = 1024


class MessageParams(Protocol):
    """``ucp_request_param_t``, as far as messages need it."""

    op_attr_mask: int
    memory_type: int
    datatype: int


def hello(reader: bytes, generation: int, address: bytes) -> bytes:
    """Return the header of a `HELLO`."""
    return HELLO_HEADER.pack(reader, generation, address_digest(address))


def address_digest(address: bytes) -> bytes:
    """Return what tells a damaged worker address."""
    return hashlib.blake2b(address, digest_size=_DIGEST_BYTES).digest()


def refusal(tag: int, reason: str) -> bytes:
    """Return the header of a `REFUSE`."""
    return TAG.pack(tag) + reason.encode()[:MAX_REASON_BYTES]


def reason_of(header: bytes) -> str:
    """Return why a read was refused."""
    return header[TAG.size :].decode("utf-8", "replace")


def describe(params: MessageParams, scattered: bool, memory_type: int) -> None:
    """Fill in the parameters of a tagged message.

    Parameters
    ----------
    params : cffi pointer to ucp_request_param_t
    scattered : bool
        Its buffer is an array of ``ucp_dt_iov_t``, which is also how (address, bytes) rows of u64 lie, and must stay
        until the message is through.
    memory_type : int
        UCX's number.
    """
    params.memory_type = memory_type
    params.datatype = d.DATATYPE_IOV
    params.op_attr_mask = d.OP_FIELD_MEMORY_TYPE | (d.OP_FIELD_DATATYPE if scattered else 0)
