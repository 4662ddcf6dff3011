"""The NIXL library: found, imported without side effects, and its exceptions mapped.

The meta package ``nixl`` pins both CUDA variants, so ``nixl_cu13`` or ``nixl_cu12`` is imported directly.  Importing it
reconfigures a logger and turns `logging.raiseExceptions` off for the whole process; both are put right here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import traceback
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from reshard.planner.errors import MissingDependencyError
from reshard.transports.errors import (
    PeerError,
    RegistrationError,
    TransferError,
    TransportError,
    TransportUnavailableError,
)
from reshard.transports.signals import signal_handlers_kept

PACKAGES = ("nixl_cu13", "nixl_cu12")

PEER_ERRORS = ("nixlRemoteDisconnectError", "nixlNotFoundError")
"""Native exceptions that say that the peer, or what it registered, is not there."""
LOCAL_ERRORS = ("nixlInvalidParamError", "nixlMismatchError", "nixlNotAllowedError", "nixlNotSupportedError")
"""Native exceptions that say that a list or a region is not acceptable."""
TRANSFER_ERRORS = (
    "nixlBackendError",
    "nixlCancelledError",
    "nixlNotPostedError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlNoTelemetryError",
)
"""Native exceptions about a transfer."""


def installed() -> str:
    """Return the name of the NIXL package that would be used, or an empty string."""
    for name in PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):  # from an import hook that forbids it
            if importlib.util.find_spec(name) is not None:
                return name
    return ""


@cache
def load() -> ModuleType:
    """Import NIXL.

    Raises
    ------
    TransportUnavailableError
        If it is not installed, or its libraries do not load.
    """
    package = installed()
    if not package:
        missing = MissingDependencyError("nixl_cu12", "nixl")
        raise TransportUnavailableError(str(missing), package="nixl_cu12", extra="nixl") from missing
    raises = logging.raiseExceptions
    try:
        with signal_handlers_kept():
            module = importlib.import_module(package)
    except (ImportError, OSError) as error:
        raise TransportUnavailableError(
            f"{package} is installed but does not load: {error}", package=package, extra="nixl"
        ) from error
    finally:
        logging.raiseExceptions = raises
    if not os.environ.get("NIXL_LOG_LEVEL"):
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return module


@cache
def native_errors() -> dict[type[BaseException], type[TransportError]]:
    """Return the map from NIXL's exceptions to ours."""
    bindings = importlib.import_module(f"{load().__name__}._bindings")
    table: dict[type[BaseException], type[TransportError]] = {}
    for names, ours in ((PEER_ERRORS, PeerError), (LOCAL_ERRORS, RegistrationError), (TRANSFER_ERRORS, TransferError)):
        for name in names:
            native = getattr(bindings, name, None)
            if isinstance(native, type) and issubclass(native, BaseException):
                table[native] = ours
    return table


def translate(error: Exception, what: str, peer: str = "", *, dialling: bool = False) -> TransportError:
    """Return NIXL's exception as one of ours, saying what was being done; while dialling a failure is the peer's."""
    if isinstance(error, TransportError):
        return error
    ours = next((ours for native, ours in native_errors().items() if isinstance(error, native)), None)
    if ours is None:
        if isinstance(error, (TypeError, AttributeError)):
            raise error  # a mistake of the caller's module
        ours = TransferError if peer else RegistrationError
    if dialling and ours is TransferError:
        ours = PeerError
    # Frames of NIXL's wrapper hold the agent: an error that is kept would keep it from being destroyed.
    traceback.clear_frames(error.__traceback__)
    return ours(f"{what}: NIXL says {type(error).__name__}: {str(error) or type(error).__name__}", peer=peer)


@contextlib.contextmanager
def mapped(what: str, peer: str = "", *, dialling: bool = False) -> Iterator[None]:
    """Raise what `translate` makes of NIXL's exceptions."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:
        raise translate(error, what, peer, dialling=dialling) from error
