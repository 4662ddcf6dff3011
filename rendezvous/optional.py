"""Where do the rendezvous' optional packages come from? Modules that are imported when they are first used.

So every module of the package imports on numpy alone, and using gRPC without it says which extra to install. For a type
checker these are the modules themselves.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from reshard.planner.errors import MissingDependencyError, require

if TYPE_CHECKING:
    from types import ModuleType

    import grpc
    import grpc.aio
    from google.protobuf import message as protobuf

    from reshard.proto.v1 import rendezvous_pb2 as pb
    from reshard.proto.v1 import tables_pb2 as tables_pb
else:

    class _Lazy:
        """A module that is imported at the first look at one of its names."""

        def __init__(self, module: str, needs: str) -> None:
            self._module = module
            self._needs = needs
            self._loaded: ModuleType | None = None

        def __getattr__(self, name: str) -> object:
            if self._loaded is None:
                require(self._needs, extra="rendezvous")
                try:
                    self._loaded = import_module(self._module)
                except Exception as error:
                    if type(error).__name__ != "VersionError":  # protobuf's own: no built-in error is its base
                        raise
                    state = f"too old: {str(error).partition('. ')[0]}"
                    raise MissingDependencyError("protobuf", "rendezvous", state) from error
            value = getattr(self._loaded, name)
            setattr(self, name, value)
            return value

    grpc = _Lazy("grpc", "grpc")
    protobuf = _Lazy("google.protobuf.message", "google.protobuf")
    pb = _Lazy("reshard.proto.v1.rendezvous_pb2", "google.protobuf")
    tables_pb = _Lazy("reshard.proto.v1.tables_pb2", "google.protobuf")

__all__ = ["grpc", "pb", "protobuf", "require_service_packages", "tables_pb"]


def require_service_packages() -> None:
    """Raise `MissingDependencyError` unless what the service needs is there, in versions that can be used."""
    for package in ("grpc", "grpc_health", "grpc_reflection"):
        require(package, extra="rendezvous")
    _ = pb.DESCRIPTOR  # grpc_health's own modules would fail by protobuf's error
