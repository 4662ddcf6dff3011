"""How do errors cross the wire? Each of the tree's errors as a gRPC status with a typed detail, and back.

The detail is a ``reshard.proto.v1.Error`` in the trailing metadata ``reshard-error-bin``. A status without one comes
from gRPC itself: no connection, a deadline, a proxy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from reshard.rendezvous.blobs import parse_content
from reshard.rendezvous.errors import (
    AbortedError,
    AuthenticationError,
    EqualityError,
    InvalidRequestError,
    LeaseError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnavailableError,
    StaleError,
    TransactionError,
    VersionError,
    WorkerLostError,
)
from reshard.rendezvous.optional import grpc, pb

__all__ = ["DETAIL_KEY", "error_from_status", "status_of", "to_detail", "to_details"]

DETAIL_KEY = "reshard-error-bin"
# Trailing metadata and status text together are bounded by the transport, usually at 8 KiB.
_DETAILS_BYTES, _MESSAGE_BYTES, _FIELD_BYTES, _NAME_BYTES, _NAMES = 512, 2048, 512, 64, 16

# Error type, its kind on the wire, its gRPC status: the first row whose type fits, so subclasses come first.
_ROWS: tuple[tuple[type[RendezvousError], str, str], ...] = (
    (InvalidRequestError, "INVALID_REQUEST", "INVALID_ARGUMENT"),
    (WorkerLostError, "WORKER_LOST", "FAILED_PRECONDITION"),
    (EqualityError, "EQUALITY", "FAILED_PRECONDITION"),
    (VersionError, "VERSION", "FAILED_PRECONDITION"),
    (StaleError, "STALE", "NOT_FOUND"),
    (LeaseError, "LEASE", "NOT_FOUND"),
    (AbortedError, "ABORTED", "ABORTED"),
    (TransactionError, "TRANSACTION", "FAILED_PRECONDITION"),
    (RendezvousTimeoutError, "TIMEOUT", "DEADLINE_EXCEEDED"),
    (RendezvousUnavailableError, "UNAVAILABLE", "UNAVAILABLE"),
    (AuthenticationError, "AUTHENTICATION", "UNAUTHENTICATED"),
)


def status_of(error: RendezvousError) -> grpc.StatusCode:
    """Return the status that an error travels with."""
    for kind, _, status in _ROWS:
        if isinstance(error, kind):
            code: grpc.StatusCode = getattr(grpc.StatusCode, status)
            return code
    return grpc.StatusCode.INTERNAL


def to_details(error: RendezvousError) -> str:
    """Return the status' own text: the message, for those who do not read the detail."""
    return _short(str(error), _DETAILS_BYTES)


def to_detail(error: RendezvousError) -> pb.Error:
    """Encode an error. Long texts lose their middle: what is wrong stands at the end."""
    name = next((wire for kind, wire, _ in _ROWS if isinstance(error, kind)), "UNSPECIFIED")
    detail = pb.Error(kind=f"ERROR_KIND_{name}", message=_short(str(error), _MESSAGE_BYTES))
    if isinstance(error, InvalidRequestError):
        detail.field = _short(error.field, _FIELD_BYTES)
        detail.message = _short(error.reason, _MESSAGE_BYTES)
    elif isinstance(error, VersionError):
        detail.holders.extend(_few(error.holders))
    elif isinstance(error, RendezvousTimeoutError):
        detail.waited_ms = int(error.waited_s * 1000)
        detail.progress.missing.extend(_few(error.missing_slots))
        detail.progress.lost.extend(_few(error.lost_workers))
        detail.progress.empty.extend(_few(error.empty_slots))
    return detail


def error_from_detail(blob: bytes) -> RendezvousError:
    """Decode an error. A kind that this version does not know is a plain RendezvousError."""
    detail = pb.Error()
    parse_content("error", detail, blob)
    known = pb.ErrorKind.DESCRIPTOR.values_by_number.get(detail.kind)
    name = known.name.removeprefix("ERROR_KIND_") if known is not None else ""
    if name == "INVALID_REQUEST":
        return InvalidRequestError(detail.field, detail.message)
    if name in ("VERSION", "EQUALITY"):
        kind = EqualityError if name == "EQUALITY" else VersionError
        return kind(detail.message, holders=tuple(detail.holders))
    if name == "TIMEOUT":
        return RendezvousTimeoutError(
            detail.message,
            missing_slots=tuple(detail.progress.missing),
            empty_slots=tuple(detail.progress.empty),
            lost_workers=tuple(detail.progress.lost),
            waited_s=detail.waited_ms / 1000,
        )
    for plain, wire, _ in _ROWS:
        if wire == name:
            return plain(detail.message)
    return RendezvousError(detail.message)


def error_from_status(error: grpc.aio.AioRpcError, address: str, call: str) -> RendezvousError:
    """Map what a gRPC call raised to the tree."""
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == DETAIL_KEY and isinstance(value, bytes):
            return error_from_detail(value)
    code, said = error.code(), error.details() or ""
    where = f"{call} at {address}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RendezvousTimeoutError(f"{where}: no answer before the deadline")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AuthenticationError(f"{where}: {said}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidRequestError(call, f"message too large: {said}")
    # what grpcio says where one of its own writes crossed the end of the call: why it ended was not heard
    unheard = code is grpc.StatusCode.INTERNAL and said == "Internal error from Core"
    if unheard or code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN):
        return RendezvousUnavailableError(f"{where}: {said or code.name}")
    return RendezvousError(f"{where}: {code.name}: {said}")


def _short(text: str, n_bytes: int) -> str:
    raw = text.encode(errors="replace")
    if len(raw) <= n_bytes:
        return text
    head = n_bytes // 4
    tail = n_bytes - head - 3
    return raw[:head].decode(errors="ignore") + "..." + raw[-tail:].decode(errors="ignore")


def _few(names: tuple[str, ...]) -> list[str]:
    return [_short(name, _NAME_BYTES) for name in names[:_NAMES]]
