"""The `ucx` transport against the contract, over CMA and over TCP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from reshard.transports.registry import probe
from reshard.transports.testing import TransportContract

pytestmark = pytest.mark.skipif(bool(probe("ucx")), reason=f"ucx does not work here: {probe('ucx')}")


class TestUcx(TransportContract):
    """With whatever UCX chooses: on one host, CMA."""

    backend = "ucx"


@pytest.mark.slow
class TestUcxOverTcp(TransportContract):
    """Where UCX emulates reads, the owner's process sends every byte."""

    backend = "ucx"
    settings: ClassVar[Mapping[str, object]] = {"tls": "tcp"}
