"""The ``nixl`` backend; see `reshard.transports.nixl.transport`."""

from __future__ import annotations

from reshard.transports.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
