"""The frame in which a payload of any length travels through a collective of equal tensors.

One-dimensional uint8 on the CPU, ``4 + capacity`` long: four bytes of big-endian length, the payload, and
zeros. All ranks of a collective use one capacity. torch is imported when a function is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.planner.errors import require
from reshard.rendezvous.canonical import MAX_RECORD_BYTES
from reshard.rendezvous.errors import ContractError, ContractTypeError

if TYPE_CHECKING:
    import torch

__all__ = ["FRAME_HEADER_BYTES", "decode_frame", "encode_frame"]

FRAME_HEADER_BYTES = 4


def encode_frame(payload: bytes, capacity: int) -> torch.Tensor:
    """Return `payload` as a frame.

    Parameters
    ----------
    payload : bytes
        At most `capacity` bytes; may be empty.
    capacity : int
        Room for the payload, 1 to `MAX_RECORD_BYTES`; all ranks of a collective must use the same.

    Returns
    -------
    torch.Tensor
        uint8 on the CPU, shape ``(4 + capacity,)``.

    Raises
    ------
    ContractError
        `payload` is not bytes or too long, `capacity` is out of its range.
    """
    if type(capacity) is not int:
        raise ContractTypeError("frame", "capacity", type(capacity).__name__, "int")
    if not 1 <= capacity <= MAX_RECORD_BYTES:
        raise ContractError("frame", "capacity", str(capacity), f"an integer in [1, {MAX_RECORD_BYTES}]")
    if type(payload) is not bytes:
        raise ContractTypeError("frame", "payload", type(payload).__name__, "bytes")
    if len(payload) > capacity:
        raise ContractError("frame", "payload", f"{len(payload)} bytes", f"at most the capacity of {capacity}")
    require("torch", extra="torch")
    import torch

    frame = bytearray(FRAME_HEADER_BYTES + capacity)
    frame[:FRAME_HEADER_BYTES] = len(payload).to_bytes(FRAME_HEADER_BYTES, "big")
    frame[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + len(payload)] = payload
    return torch.frombuffer(frame, dtype=torch.uint8)


def decode_frame(frame: torch.Tensor) -> bytes:
    """Return the payload of a frame.

    Parameters
    ----------
    frame : torch.Tensor
        uint8 on the CPU, one-dimensional, longer than its header.

    Returns
    -------
    bytes
        The payload.

    Raises
    ------
    ContractError
        Another type, device or shape; no capacity; a length over the capacity; padding that is not zero.
    """
    require("torch", extra="torch")
    import torch

    if not isinstance(frame, torch.Tensor):
        raise ContractTypeError("frame", "frame", type(frame).__name__, "a torch.Tensor")
    if frame.dtype != torch.uint8 or frame.device.type != "cpu":
        raise ContractTypeError("frame", "frame", f"{frame.dtype} on {frame.device}", "torch.uint8 on the CPU")
    if frame.dim() != 1:
        raise ContractError("frame", "frame", f"shape {tuple(frame.shape)}", "one dimension")
    capacity = frame.numel() - FRAME_HEADER_BYTES
    if capacity < 1:
        raise ContractError("frame", "frame", f"{frame.numel()} bytes", "a header of 4 bytes and some capacity")
    raw = frame.numpy().tobytes()
    length = int.from_bytes(raw[:FRAME_HEADER_BYTES], "big")
    if length > capacity:
        raise ContractError("frame", "length", str(length), f"at most the capacity of {capacity}")
    if raw.count(0, FRAME_HEADER_BYTES + length) != capacity - length:
        raise ContractError("frame", "padding", "bytes other than zero", "only zeros")
    return raw[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + length]
