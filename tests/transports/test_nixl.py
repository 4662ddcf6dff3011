"""The `nixl` transport against the contract."""

from __future__ import annotations

import pytest

from reshard.transports.registry import probe
from reshard.transports.testing import TransportContract

pytestmark = pytest.mark.skipif(bool(probe("nixl")), reason=f"nixl does not work here: {probe('nixl')}")


class TestNixl(TransportContract):
    backend = "nixl"
