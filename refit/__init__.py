"""Publish a trainer's weights and refit an inference group to them: all ranks or none, verified, and never silent.

Trainers use `Publisher`, engines use `Receiver`; `LocalTensor` is what the adapters yield. Everything is imported
on first use, so that importing this package needs numpy alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.refit.engine import Captured, Engine, EngineParameter
    from reshard.refit.engines.arrays import ArrayEngine, take
    from reshard.refit.engines.loader import LoaderEngine
    from reshard.refit.engines.repacking import RepackingEngine
    from reshard.refit.engines.torch_module import TorchModuleEngine
    from reshard.refit.inplace import InPlacePublisher
    from reshard.refit.publisher import Publisher
    from reshard.refit.receiver import Receiver
    from reshard.refit.report import RefitReport
    from reshard.refit.retry import RetryPolicy
    from reshard.refit.serving import ServeOn
    from reshard.refit.tensors import LocalTensor, SourceTensor

__all__ = [
    "ArrayEngine",
    "Captured",
    "Engine",
    "EngineParameter",
    "InPlacePublisher",
    "LoaderEngine",
    "LocalTensor",
    "Publisher",
    "Receiver",
    "RefitReport",
    "RepackingEngine",
    "RetryPolicy",
    "ServeOn",
    "SourceTensor",
    "TorchModuleEngine",
    "take",
]

_HOMES = {
    "ArrayEngine": "engines.arrays",
    "Captured": "engine",
    "Engine": "engine",
    "EngineParameter": "engine",
    "InPlacePublisher": "inplace",
    "LoaderEngine": "engines.loader",
    "LocalTensor": "tensors",
    "Publisher": "publisher",
    "Receiver": "receiver",
    "RefitReport": "report",
    "RepackingEngine": "engines.repacking",
    "RetryPolicy": "retry",
    "ServeOn": "serving",
    "SourceTensor": "tensors",
    "TorchModuleEngine": "engines.torch_module",
    "take": "engines.arrays",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
