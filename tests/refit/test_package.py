"""The package's face: every public name is there, and importing it needs numpy alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

import reshard.refit


def test_every_public_name_is_importable() -> None:
    for name in reshard.refit.__all__:
        assert getattr(reshard.refit, name).__name__ == name
    assert set(reshard.refit.__all__) <= set(dir(reshard.refit))
    with pytest.raises(AttributeError, match="no attribute 'Pickle'"):
        reshard.refit.Pickle  # noqa: B018


def test_public_names_need_numpy_alone() -> None:
    code = (
        "import sys, reshard.refit as r\n"
        "[getattr(r, n) for n in r.__all__]\n"
        "heavy = {'torch', 'grpc', 'nixl', 'redis', 'prometheus_client', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
