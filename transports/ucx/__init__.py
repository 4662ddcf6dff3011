"""The ``ucx`` backend; see `reshard.transports.ucx.transport`."""

from __future__ import annotations

from reshard.transports.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
